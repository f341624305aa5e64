"""Thirty questions in people's own words: the first command guessed, or the hint of its error."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from typed_commands import quick

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import questions_page  # noqa: E402

pytestmark = [pytest.mark.levers, pytest.mark.ways_out]  # whole screens are compared
QUESTIONS = tomllib.loads(questions_page.QUESTIONS.read_text(encoding="utf-8"))["question"]
PAGE = questions_page.PAGE.read_text(encoding="utf-8")
CASES = [
    pytest.param(n, q, marks=[] if q.get("make_test") else [pytest.mark.wide], id=str(n))
    for n, q in enumerate(QUESTIONS, 1)
]


def test_there_are_thirty_each_with_its_thread_and_three_at_most_need_a_hint():
    assert len(QUESTIONS) == 30
    assert sum(bool(q.get("hint")) for q in QUESTIONS) <= 3
    assert len({q["command"] for q in QUESTIONS}) == 30
    threads = {q["thread"] for q in QUESTIONS}
    assert len(threads) >= 29
    assert all(re.fullmatch(r"https://github\.com/[^ ]+/(issues|pull)/\d+", t) for t in threads)
    for project in ("unslothai/unsloth", "hiyouga/", "axolotl-ai-cloud/", "huggingface/trl"):
        assert sum(project in t for t in threads) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("number", "question"), CASES)
def test_the_command_answers_on_one_screen(number, question, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = quick(*shlex.split(question["command"])[1:])
    shown = f"{out}\n{err}"
    assert all(words in shown for words in question["says"]), shown
    if question.get("hint"):
        assert (code, out) == (2, "")
        assert err.count("hint:") == 1
        again, screen, _ = quick(*shlex.split(question["then"])[1:])
        assert again in (0, 3)
        assert screen
    else:
        assert code in (0, 3), err
        lines = out.rstrip("\n").split("\n")
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
    entry = questions_page.write_entry(number, question, questions_page.Printed(code, out, err))
    assert entry in PAGE


def test_the_page_has_every_question_and_its_thread():
    for question in QUESTIONS:
        assert f". {question['asked']}\n\n<{question['thread']}>" in PAGE
        assert f"$ {question['command']}\n" in PAGE
