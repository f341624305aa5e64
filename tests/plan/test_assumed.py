"""What a plan takes for granted is said; epochs of data that is there are counted."""

import json

import pytest

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.plan.request.data_size import estimate_data

TINY = {"task.sequence_length": 128, "task.global_batch": 4}


def plan(model="pythia-70m", device="rtx-4090", **changes):
    return api.plan(api.read(model, device=device, changes=changes), levers=False)


def said(found, words):
    return any(words in line for line in found.assumptions)


@pytest.mark.parametrize(
    ("changes", "words", "stated"),
    [
        ({}, "sequence_length 2048 (not asked for)", {"task.sequence_length": 2048}),
        ({}, "1000 steps (no length and no data given)", {"task.steps": 10}),
        ({}, "memfit's own step", {"framework": "trl"}),
        ({}, "global_batch 16 (not asked for)", {"task.global_batch": 8}),
        ({}, "rows filled with whole documents", {"task.packing": True}),
        ({"method": "lora"}, "adapters of rank 16, alpha 32 on query_key_value",
         {"lora.targets": ["dense"], "lora.rank": 8}),
        ({"method": "lora"}, "frozen base in bf16, adapters and gradients in fp32",
         {"precision": "bf16-mixed", "base_format": "bf16"}),
        ({}, "weights, gradients and optimizer states stored in fp32; products in bf",
         {"precision": "bf16-mixed"}),
        ({}, "learning rate", {"optimizer.learning_rate": 1e-4}),
        ({"task.objective": "kto"}, "kto's baseline a mean over `micro_batch: 8`",
         {"micro_batch": 4}),
        ({"task.objective": "kto", "task.global_batch": 6}, "a mean over `micro_batch: 6`",
         {"preference.loss_type": "apo_zero_unpaired"}),
    ],
    ids=str,
)  # fmt: skip
def test_each_knob_left_open_is_said_and_a_stated_one_is_not(changes, words, stated):
    assert said(plan(**changes), words)
    assert not said(plan(**{**changes, **stated}), words)


def test_other_frameworks_plans_say_what_is_left_open_too():
    found = plan(framework="trl", method="lora")
    for words in ("sequence_length 2048 (not", "1000 steps (no", "global_batch 16 (not asked for)",
                  "adapters of rank 16", "precision bf16-mixed (trl's default)"):  # fmt: skip
        assert said(found, words), words


@pytest.mark.parametrize("framework", ["memfit", "trl"])
def test_epochs_of_data_that_is_there_are_steps(tmp_path, framework):
    text = tmp_path / "text.txt"
    text.write_text("seven letters or so make a word here\n" * 4000)  # 148,000 bytes
    found = plan(**TINY, framework=framework, **{"task.data": str(text), "task.epochs": 3})
    tokens = 148_000 / 4
    assert found.recipe.steps == pytest.approx(3 * tokens / (4 * 128), abs=1)
    assert said(found, f"about {found.recipe.steps:,} steps: 3 epochs of about 37K tokens")
    assert said(found, "4 bytes a token (assumed)")
    once = plan(**TINY, framework=framework, **{"task.data": str(text)})
    assert once.recipe.steps == pytest.approx(tokens / (4 * 128), abs=1)
    assert found.time.total_seconds == found.recipe.steps * found.time.step_seconds


@pytest.mark.parametrize(
    "changes", [{"task.epochs": 3}, {"task.epochs": 3, "task.data": "no/such"}]
)
def test_epochs_of_nothing_have_no_price(changes):
    found = plan(**changes)
    assert (found.recipe.steps, found.time.total_seconds, found.cost.usd) == (0, None, None)
    assert said(found, "steps unknown")


def test_records_count_their_texts_and_rows_that_are_not_packed_are_records(tmp_path):
    folder = tmp_path / "data"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "left_out.txt").write_text("x" * 10_000)
    (folder / "binary.bin").write_bytes(b"\0" * 10_000)
    lines = [json.dumps({"prompt": "p" * 40, "chosen": "c" * 60, "rejected": "r" * 60})] * 500
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    size = estimate_data(str(folder), "")
    assert size.tokens == pytest.approx(500 * 160 / 4, rel=0.02)
    assert size.records == pytest.approx(500, rel=0.01)
    found = plan(**TINY, **{"task.data": str(folder), "task.objective": "dpo", "task.epochs": 2})
    assert found.recipe.steps == 2 * 500 * 2 / 4
    assert estimate_data(str(folder / "*.jsonl"), "").records == size.records


def test_a_tokenizer_beside_the_model_is_asked(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[U]": 1}, unk_token="[U]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("eight888 " * 1000)
    size = estimate_data(str(tmp_path / "text.txt"), str(tmp_path))
    assert size.tokens == pytest.approx(1000, rel=0.01)
    assert "by the model's tokenizer" in size.because


@pytest.mark.parametrize(
    ("key", "here"),
    [("num_epochs", "task.epochs"), ("task.num_epochs", "task.epochs"), ("lr", "optimizer.lear"),
     ("load_in_4bit", "base_format: nf4"), ("gpus", "hardware.count")],
)  # fmt: skip
def test_what_other_trainers_call_a_key_is_answered_with_its_name_here(key, here):
    with pytest.raises(InvalidRequest, match=f"unknown key `{key}`") as error:
        api.read("gpt2", changes={key: 3})
    assert f"that is `{here}" in error.value.hint
