"""The words of other trainers on their page are words that they have, and that are answered."""

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments

from memfit.check import read_files
from memfit.check.keys import UNKNOWN
from memfit.core.errors import InvalidRequest
from memfit.files.request_file import KEYS
from memfit.records.other_words import WORDS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import coming_page

TESTS = Path(__file__).resolve().parents[1]
ROWS = [row for rows in coming_page.SECTIONS.values() for row in rows]
FILES = ("trl.yaml", "axolotl.yaml", "llamafactory.yaml")
# what tells `memfit check` whose file it is
HEADS = (
    {"model_name_or_path": "Qwen/Qwen3-0.6B", "max_length": 64, "use_peft": True},
    {"base_model": "Qwen/Qwen3-0.6B", "sequence_len": 64, "datasets": [{"path": "x.jsonl"}]},
    {"model_name_or_path": "Qwen/Qwen3-0.6B", "stage": "sft", "cutoff_len": 64,
     "finetuning_type": "lora"},
)  # fmt: skip


BESIDE = {"freeze_trainable_layers": {"finetuning_type": "freeze"}}


def test_the_page_is_fresh():
    assert coming_page.PAGE.read_text() == coming_page.page()


def test_every_row_has_one_answer_for_its_words():
    assert len(ROWS) > 45
    assert all(word in WORDS for row in ROWS for word in row.words if word)
    with pytest.raises(ValueError, match="answered differently"):
        coming_page.describe(coming_page.Row(4, "lora_r", "lora_alpha"))


@pytest.mark.parametrize("place", range(3), ids=coming_page.TOOLS)
def test_the_words_are_the_trainers_own(place, tmp_path):
    """Asked of `memfit check`, which knows the keys of each trainer's configuration."""
    words = {row.words[place] for row in ROWS} - {""}
    assert len(words) > 25
    unknown = set()
    for word in (*words, "no_such_word"):
        value = next((row.value for row in ROWS if row.words[place] == word), 1)
        data = HEADS[place] | BESIDE.get(word, {}) | {word: value}
        file = tmp_path / FILES[place]
        file.write_text("".join(f"{key}: {val!r}\n" for key, val in data.items()))
        try:
            checked = read_files([file], {"hardware": {"device": "h100-sxm"}})
        except InvalidRequest:  # of its value beside the others': the word itself was understood
            continue
        unknown |= {u.key for u in checked.undescribed if u.why == UNKNOWN.why}
    assert unknown == {"no_such_word"}


@pytest.mark.parametrize("habit", coming_page.HABITS, ids=lambda habit: habit.name)
def test_what_is_held_to_another_library_is_run_beside_it(habit):
    """The test is there, imports the library or calls what is named, and the key is a request's."""
    name, _, function = habit.test.partition("::")
    text = (TESTS / name).read_text()
    tree = ast.parse(text)
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    library = habit.theirs.partition(":")[0]
    used = {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if library == "trl":  # in an environment of its own: `make neighbours`
        assert "neighbour_programs" in used
    else:
        called = any(f".{word}(" in text for word in re.findall("`([a-z_]+)`", habit.theirs))
        assert called or library in {module.partition(".")[0] for module in used}
    assert habit.key in KEYS


def test_twenty_habits_are_held_to_others():
    assert len({habit.name for habit in coming_page.HABITS}) == len(coming_page.HABITS) >= 20


def test_words_of_transformers_are_its_arguments():
    """Of the rows around the steps: TRL has them from transformers."""
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    rows = coming_page.SECTIONS["Around the steps"]
    assert {row.trl for row in rows} - {""} <= known
