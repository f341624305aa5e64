"""The check of words in names and docstrings finds them where they are, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_words


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def said_of(x): ...", "said"),
        ("class KeptPlan: ...", "kept"),
        ("def run(*, again): ...", "again"),
        ("self.coded = 1", "coded"),
        ("import numpy as lack", "lack"),
        ("for where in (): ...", "where"),
        ('def run():\n    """Return what was asked."""', "asked"),
        ('"""Bytes of so many elements."""', "so many"),
    ],
)
def test_a_word_is_found_in_a_name_and_in_a_docstring(text, word):
    assert [use.word for use in check_words.find_uses("core/units.py", text)] == [word]


@pytest.mark.parametrize(
    "text",
    [
        "x = numpy.where(a, b, c)",  # another library's name is read, not bound
        "# what was asked is kept",
        'print("as asked")',
        "because = 1",
        'def run():\n    """Return where it is."""',
        "against = lacquer = 1",
    ],
)
def test_other_uses_pass(text):
    assert not list(check_words.find_uses("core/units.py", text))


def test_a_module_has_no_such_name():
    assert [use.word for use in check_words.find_uses("plan/because.py", "x = 1")] == ["because"]


def test_only_folders_that_are_not_done_have_a_baseline():
    assert set(check_words.BASELINE) <= {"plan", "certify", "train"}
