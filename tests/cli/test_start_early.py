"""When the certifying process is started before the words are read."""

import pytest

from memfit.cli import start_early

WORDS = ["certify", "llama-3.1-8b"]


@pytest.fixture
def started(monkeypatch, tmp_path):
    found = []
    monkeypatch.delenv("MEMFIT_NO_CACHE", raising=False)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(start_early, "start_ahead", found.append)
    return found


def test_words_that_were_answered_find_their_certificate_and_start_nothing(started):
    start_early.start_unless_answered(WORDS)
    assert started == ["memfit.certify"]
    start_early.note_answered(WORDS, 3)
    start_early.start_unless_answered(WORDS)
    assert len(started) == 1
    start_early.start_unless_answered([*WORDS, "--device", "t4"])
    start_early.start_unless_answered([*WORDS, "--no-cache"])
    assert len(started) == 3


@pytest.mark.parametrize("code", [1, 2, 4, 130])
def test_words_that_found_no_answer_are_not_noted(started, code):
    start_early.note_answered(WORDS, code)
    start_early.start_unless_answered(WORDS)
    assert started


def test_where_nothing_is_cached_the_process_is_always_started(started, monkeypatch, tmp_path):
    start_early.note_answered(WORDS, 0)
    monkeypatch.setenv("MEMFIT_NO_CACHE", "1")
    start_early.start_unless_answered(WORDS)
    assert started
    start_early.note_answered([*WORDS, "--memory", "8GiB"], 0)
    assert len(list((tmp_path / "cache" / "answered").iterdir())) == 1


@pytest.mark.parametrize("words", [["certify"], ["certify", "--help"]])
def test_help_starts_nothing(started, words):
    start_early.start_unless_answered(words)
    assert not started


def test_a_folder_that_cannot_be_written_is_passed_over(started, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    start_early.note_answered(WORDS, 0)
    start_early.start_unless_answered(WORDS)
    assert started
