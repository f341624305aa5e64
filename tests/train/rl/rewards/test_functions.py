"""Reward functions that ship, by hand."""

import pytest

from memfit.train.rl.rewards.functions import length, number, regex, thoughts


@pytest.mark.parametrize(
    ("said", "truth", "reward"),
    [
        ("so 3 + 4 = 7", "7", 1.0),
        ("it is 7, no: 8", 7, 0.0),
        ("7.50", "15/2", 1.0),
        ("$1,234.0", "1234", 1.0),
        ("-3", "3", 0.0),
        ("I do not know", "3", 0.0),
        ("1/0", "3", 0.0),
        ("9" * 5000, "3", 0.0),
        ("__import__('os').abort()", "3", 0.0),
        ("3", "no number", None),
    ],
)
def test_number(said, truth, reward):
    assert number()(completions=[said], answer=[truth]) == [reward]


def test_number_reads_the_column_that_is_named_and_messages():
    messages = [{"role": "assistant", "content": "42"}]
    assert number("gold")(completions=[messages], gold=["42"], answer=["1"]) == [1.0]
    with pytest.raises(KeyError, match="column `gold`"):
        number("gold")(completions=["1"], answer=["1"])


def test_regex():
    assert regex(r"^a+\n?b$")(completions=["aa\nb", "ba"]) == [1.0, 0.0]


def test_format():
    said = ["<think>a\nb</think> 3", "3", "<think>a", "<think>a<think>b</think>"]
    assert thoughts()(completions=said) == [1.0, 0.0, 0.0, 0.0]


def test_length_falls_within_its_room():
    ids = [[0] * n for n in (0, 6, 8, 9, 10, 12)]
    found = length("4")(completion_ids=ids, max_completion_length=10)
    assert found == [0.0, 0.0, -0.5, -0.75, -1.0, -1.0]
    assert length()(completion_ids=ids, max_completion_length=10) == [0, 0, 0, -0.5, -1, -1]
