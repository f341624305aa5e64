"""What somebody sees who types `memfit` for the first time."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from memfit.cli import first_contact, planning
from memfit.cli.app import app
from memfit.cli.first_contact import SHELLS
from typed_commands import ROOT, quick


def test_memfit_alone_welcomes_in_fifteen_lines():
    code, out, err = quick()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80
    assert "memfit plan " in out


def test_every_command_of_the_welcome_is_parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    _, out, _ = quick()
    typed = [line.strip() for line in out.splitlines() if line.startswith("  memfit ")]
    assert len(typed) >= 8
    for line in typed:
        words = shlex.split(line.partition("    ")[0].partition("   ")[0])[1:]
        context = app.make_context("memfit", list(words))
        name, command, rest = app.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        command.make_context(name, rest, parent=context)


def test_help_is_the_help_of_a_verb():
    assert quick("help") == quick("--help")
    code, out, err = quick("help", "plan")
    assert (code, err) == (0, "")
    assert out == quick("plan", "--help")[1]
    code, out, err = quick("help", "plna")
    assert (code, out) == (2, "")
    assert "hint: did you mean `plan`?" in err


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_a_script_of_the_shell(shell):
    code, out, err = quick("completion", shell)
    assert code == 0
    assert "_MEMFIT_COMPLETE" in out
    assert f"memfit completion {shell}" in err
    assert json.loads(quick("completion", shell, "--json", "--quiet")[1])["script"] in out


def test_a_shell_is_offered_the_verbs_and_flags():
    def complete(words, at):
        done = subprocess.run(
            [sys.executable, "-m", "memfit"], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COMP_WORDS": words,
                 "COMP_CWORD": str(at), "_MEMFIT_COMPLETE": "bash_complete"},
        )  # fmt: skip
        return done.stdout

    assert "plain,plan" in complete("memfit pl", 1)
    assert "plain,--method" in complete("memfit plan --me", 2)


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    """`memfit plan …` in an empty folder of a terminal where these lines are typed."""
    monkeypatch.chdir(tmp_path)

    def type_lines(text, *flags):
        monkeypatch.setattr(first_contact, "can_ask", lambda: True)
        monkeypatch.setattr(planning, "can_ask", lambda: True)
        return CliRunner().invoke(app, ["plan", *flags, "--json"], input=text)

    return type_lines


@pytest.mark.parametrize(
    ("text", "flags", "model", "device", "method"),
    [
        ("gpt2\nl4\nlora\n", (), "gpt2", "l4", "lora"),
        ("smollm2-135m\nl4\nqlora\n", (), "smollm2-135m", "l4", "lora"),
        ("gpt2\n\n\n", (), "gpt2", "rtx-4090", None),
        ("gpt2\nfull\n", ("--device", "l4"), "gpt2", "l4", "full"),
        ("gpt2\nl4\n", ("--method", "lora"), "gpt2", "l4", "lora"),
    ],
)
def test_in_a_terminal_plan_alone_asks_what_was_not_said(
    terminal, text, flags, model, device, method
):
    done = terminal(text, *flags, "--seq-len", "128")
    assert done.exit_code == 0, done.stderr
    recipe = json.loads(done.stdout)["recipe"]
    assert (recipe["model"]["name"], recipe["device"]) == (model, device)
    assert method in (None, recipe["method"])
    assert done.stderr.count("?") == len(text.splitlines())
    again = re.search(r"the same, typed: memfit (.*)", done.stderr)[1]
    code, out, err = quick(*shlex.split(again), "--json")
    assert code == 0, err
    assert json.loads(out)["recipe_digest"] == json.loads(done.stdout)["recipe_digest"]


def test_nothing_is_asked_where_a_request_stands_or_nobody_sits(terminal, tmp_path, monkeypatch):
    (tmp_path / "request.yaml").write_text(
        "model: gpt2\nhardware: {device: l4}\ntask: {sequence_length: 128}\n"
    )
    done = terminal("")
    assert done.exit_code == 0
    assert "?" not in done.stderr
    (tmp_path / "request.yaml").unlink()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, out, err = quick("plan")
    assert (code, out) == (2, "")
    assert "no model was named" in err
