"""Files of trainers that pad their rows: attention is given a mask, as their collators make it."""

import pytest

from memfit import api

H100 = {"hardware": {"device": "h100-sxm"}}
TRL = "model_name_or_path: Qwen/Qwen3-0.6B\nper_device_train_batch_size: {rows}\n"
AXOLOTL = "base_model: Qwen/Qwen3-0.6B\nmicro_batch_size: {rows}\n"
KEPT = TRL + "gradient_checkpointing: false\n"  # so that the peak is of the blocks
FACTORY = (
    "model_name_or_path: Qwen/Qwen3-0.6B\ncutoff_len: 512\nper_device_train_batch_size: {rows}\n"
)


def check(folder, text, rows=2, **data):
    path = folder / "file.yaml"
    path.write_text(text.format(rows=rows))
    return api.check([path], {**H100, **data})


@pytest.mark.parametrize(("text", "rows", "padded"), [
    (TRL, 2, True),
    (TRL, 1, False),  # transformers drops a mask of ones
    (TRL + "pad_to_multiple_of: 64\n", 1, True),
    (TRL + "attn_implementation: flash_attention_2\n", 2, True),
    (TRL + "packing: true\npacking_strategy: wrapped\n", 1, False),
    (AXOLOTL, 1, True),  # to a multiple of 64 tokens
    (AXOLOTL + "pad_to_sequence_len: false\n", 1, False),
    (AXOLOTL + "pad_to_sequence_len: false\n", 2, True),
    (AXOLOTL + "flash_attention: true\n", 2, True),
    (AXOLOTL + "sample_packing: true\nflash_attention: true\n", 1, False),
    (FACTORY, 1, True),  # to a multiple of 8 tokens
    (FACTORY + "packing: true\n", 2, False),  # rows of as many tokens, all seen
    (FACTORY + "packing: true\nneat_packing: true\n", 2, True),
    (FACTORY + "flash_attn: fa2\n", 2, True),
])  # fmt: skip
def test_rows_are_padded_where_the_collator_pads_them(tmp_path, text, rows, padded):
    checked, plan = check(tmp_path, text, rows)
    assert plan.recipe.options["padded"] is padded
    given = ("mask", "copies without padding")  # of torch's kernels, and of flash-attn's
    assert any(word in line for line in checked.assumed for word in given) is padded


@pytest.mark.parametrize(("keys", "laid_out"), [
    ("packing: true\n", True),  # by `bfd`
    ("packing: true\npacking_strategy: bfd_split\n", True),
    ("packing: true\npacking_strategy: wrapped\n", False),
    ("padding_free: true\nmax_length: null\n", True),
    ("", False),
])  # fmt: skip
@pytest.mark.parametrize("kernel", ["sdpa", "flash_attention_2"])
def test_trl_lays_packed_rows_end_to_end(tmp_path, keys, laid_out, kernel):
    told = f"attn_implementation: {kernel}\n"
    checked, plan = check(tmp_path, TRL + keys + told, task={"sequence_length": 512})
    assert plan.recipe.options["padding_free"] is laid_out
    assert any("a mask of the whole batch" in line for line in checked.assumed) is (
        laid_out and kernel == "sdpa"
    )


def test_a_mask_of_the_whole_batch_is_larger_than_one_of_each_row(tmp_path):
    task = {"sequence_length": 2048}
    _, rows = check(tmp_path, KEPT, 4, task=task)
    _, laid_out = check(tmp_path, KEPT + "packing: true\n", 4, task=task)
    _, told = check(
        tmp_path, KEPT + "packing: true\nattn_implementation: flash_attention_2\n", 4, task=task
    )
    a = laid_out.recipe.model.config["num_hidden_layers"]
    tokens = 4 * 2048
    grown = laid_out.memory.peak_allocated - rows.memory.peak_allocated
    assert grown > 2 * a * (tokens**2 - 4 * 2048**2)  # 16-bit biases of every layer
    assert told.memory.peak_allocated < rows.memory.peak_allocated


def test_a_mask_takes_memory_that_full_rows_do_not(tmp_path):
    _, padded = check(tmp_path, KEPT, 8)
    _, full = check(tmp_path, KEPT, 8, options={"padded": False})
    assert full.recipe.options["padded"] is False
    assert full.memory.peak_allocated < padded.memory.peak_allocated


@pytest.mark.parametrize(("text", "kernel"), [
    (TRL, "sdpa"), (TRL + "attn_implementation: eager\n", "eager"),
    (TRL + "attn_implementation: kernels-community/flash-attn3\n", "flash_attention_2"),
    (AXOLOTL + "eager_attention: true\n", "eager"), (AXOLOTL + "sdp_attention: true\n", "sdpa"),
    (AXOLOTL + "flash_attention: true\n", "flash_attention_2"),
    (FACTORY + "flash_attn: disabled\n", "eager"),
    (FACTORY + "flash_attn: fa2\n", "flash_attention_2"),
])  # fmt: skip
def test_the_file_says_how_attention_runs(tmp_path, text, kernel):
    checked, plan = check(tmp_path, text)
    assert plan.recipe.options["attn_implementation"] == kernel
    assert not checked.undescribed


def test_eager_attention_keeps_its_scores(tmp_path):
    _, eager = check(tmp_path, KEPT + "attn_implementation: eager\n", 8)
    _, sdpa = check(tmp_path, KEPT, 8)
    assert eager.memory.peak_allocated > sdpa.memory.peak_allocated
