"""docs/questions.md: thirty questions as people asked them, and what memfit printed.

    python scripts/questions_page.py          # runs every command, some minutes

The questions are `tests/journeys/questions.toml`; `tests/journeys/test_questions.py` holds the page
against what the commands print now.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = ROOT / "tests" / "journeys" / "questions.toml"
PAGE = ROOT / "docs" / "questions.md"
HEAD = """# Thirty questions, as people asked them

<!-- written by scripts/questions_page.py from tests/journeys/questions.toml -->

Each was asked in a thread of Unsloth, LLaMA-Factory, axolotl, TRL or a project beside them; the
link leads to it. Below it stands the command that one guesses first, with the words of those
trainers where they come to mind, and what memfit prints at 80 columns without a network. {first} of
{all} are answered by that command, the others by the hint of its error.
"""


class Printed(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def read_questions() -> list[dict[str, Any]]:
    """The questions in their order."""
    found: list[dict[str, Any]] = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["question"]
    return found


def run(command: str) -> Printed:
    """A command as typed in a terminal of 80 columns, without colour and without a network."""
    words = [sys.executable, "-m", "memfit", *shlex.split(command)[1:]]
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False, cwd=ROOT)
    return Printed(done.returncode, done.stdout, done.stderr)


def write_entry(number: int, question: dict[str, Any], printed: Printed) -> str:
    """One question with its thread, command and transcript."""
    text = "\n".join(line.rstrip() for line in (printed.out + printed.err).splitlines())
    then = f"\nThe hint leads to `{question['then']}`.\n" if question.get("hint") else ""
    return (
        f"## {number}. {question['asked']}\n\n<{question['thread']}>\n\n"
        f"```text\n$ {question['command']}\n{text}\n```\n{then}"
    )


def main() -> int:
    questions = read_questions()
    first = sum(not question.get("hint") for question in questions)
    parts = [HEAD.format(first=first, all=len(questions))]
    for number, question in enumerate(questions, 1):
        parts.append(write_entry(number, question, run(question["command"])))
        print(number, question["command"], flush=True)
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
