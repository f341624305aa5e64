"""What somebody sees who types `memfit` for the first time."""

import json
import os
import shlex
import subprocess
import sys

import pytest

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
    (tmp_path / "config.yaml").touch()
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
