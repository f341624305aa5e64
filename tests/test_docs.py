"""What the documentation tells one to type runs, and does what is said beside it."""

import re
import shlex
from pathlib import Path

import pytest

from memfit.results import Verdict
from test_cli import quick, strict

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(text, kind):
    return [body for name, body in BLOCK.findall(text) if name == kind]


@pytest.mark.slow
def test_every_command_of_the_page_on_certificates_runs(tmp_path, monkeypatch):
    text = (DOCS / "certificate.md").read_text()
    (request,) = blocks(text, "yaml")
    (tmp_path / "request.yaml").write_text(request)
    monkeypatch.chdir(tmp_path)
    commands = [line for body in blocks(text, "sh") for line in body.splitlines()]
    assert len(commands) == 9
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
    code, out, _ = quick("certify", "request.yaml", "--memory", "8 GiB", *nearest)
    assert code == 0
    assert out.startswith("FITS")


def test_the_page_names_every_verdict_and_no_other():
    from typing import get_args

    text = (DOCS / "certificate.md").read_text()
    section = text[text.index("| verdict | means |") : text.index("*Holds for*")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == set(get_args(Verdict))
