"""What the documentation tells one to type runs, and does what is said beside it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.records import read_json
from memfit.records.results import Run, Verdict
from typed_commands import quick, strict

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(text, kind):
    return [body for name, body in BLOCK.findall(text) if name == kind]


def commands_of(path):
    """Of its `sh` blocks, line by line."""
    return [line for body in blocks(path.read_text(), "sh") for line in body.splitlines()]


def check_code(command, code, err):
    assert code == (3 if "exits with 3" in command else 0), (command, err)


PAGES = [DOCS / "does_not_fit.md", *sorted((DOCS / "concepts").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in commands_of(page):
        name, *arguments = shlex.split(command, comments=True)
        assert name == "memfit"
        code, out, err = quick(*arguments)
        check_code(command, code, err)
        assert out or err


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_the_quick_start_trains_and_reports(tmp_path, monkeypatch):
    page = DOCS / "quickstart.md"
    (request,) = blocks(page.read_text(), "yaml")
    (tmp_path / "request.yaml").write_text(request)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "book.txt").write_text("The cat sat on a mat while the rain fell. " * 200)
    monkeypatch.chdir(tmp_path)
    for command in commands_of(page):
        _, *arguments = shlex.split(command, comments=True)
        code, _, err = quick(*arguments)
        check_code(command, code, err)
    assert (tmp_path / "runs/first/report.html").stat().st_size


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_the_page_on_objectives_learns_from_rewards(tmp_path, monkeypatch):
    """Of its 200 iterations the first two; its request is the recipe's, whose data is made so."""
    text = (DOCS / "objectives.md").read_text()
    (request,) = (body for body in blocks(text, "yaml") if "objective: grpo" in body)
    recipe = (DOCS.parent / "recipes" / "next-digit_grpo_cpu.yaml").read_text()
    assert recipe.endswith(request)
    made = re.search(r'python -c "(.*)" > prompts.jsonl', recipe)[1]
    done = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=True)
    shown = blocks(text, "text")[0]
    assert done.stdout.startswith(shown)
    assert len(done.stdout.splitlines()) == 9
    (tmp_path / "prompts.jsonl").write_text(done.stdout)
    (tmp_path / "request.yaml").write_text(request)
    monkeypatch.chdir(tmp_path)
    for command in commands_of(DOCS / "objectives.md"):
        _, *arguments = shlex.split(command, comments=True)
        if arguments[0] == "train":
            arguments += ["--steps", "2"]
        code, _, err = quick(*arguments)
        check_code(command, code, err)
    run = read_json(tmp_path / "runs" / "next" / "run.json", Run)
    assert [step for step, _ in run.rewards] == [1, 2]
    assert run.answers


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_every_command_of_the_page_on_certificates_runs(tmp_path, monkeypatch):
    text = (DOCS / "certificate.md").read_text()
    (request,) = blocks(text, "yaml")
    (tmp_path / "request.yaml").write_text(request)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMFIT_NO_CACHE")  # the page certifies one request again and again
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    commands = [line for body in blocks(text, "sh") for line in body.splitlines()]
    assert len(commands) == 10
    seen = {}
    for command in commands:
        name, *arguments = shlex.split(command, comments=True)
        assert name == "memfit"
        code, out, err = quick(*arguments)
        assert code == (3 if "exits with 3" in command else 0), (command, err)
        if "--json" in arguments:
            strict(out)
        assert max(map(len, out.splitlines())) <= 80 or "--json" in arguments
        seen[command] = out
    files = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert {"timeline.html", "timeline.trace.json", "timeline.snapshot.pickle"} <= files
    miss = next(out for command, out in seen.items() if "exits with 3" in command)
    words = re.search(r"nearest recipe that fits \(certified.*\n((?:  --set .*\n)+)", miss)
    assert words
    nearest = shlex.split(words[1])
    code, out, _ = quick("certify", "request.yaml", "--memory", "6 GiB", *nearest)
    assert code == 0
    assert out.startswith("FITS")


def test_the_page_names_every_verdict_and_no_other():
    from typing import get_args

    text = (DOCS / "certificate.md").read_text()
    section = text[text.index("| verdict | means |") : text.index("*Holds for*")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == set(get_args(Verdict))
