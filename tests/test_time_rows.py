"""Published step times: what a row carries of them, what it loses, and that its tokens agree."""

import json
import sys
from pathlib import Path

import pytest

from memfit import accuracy, corpus, families
from memfit.errors import MemoryUnknown
from memfit.plan import foreign
from memfit.plan.problem import find_device

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import import_published
import published
from published import NotExpressible, Translated

TIMED = [row for row in corpus.read_corpus() if "time.step_seconds" in row.measurements]
OTHERS = [row for row in TIMED if row.recipe.framework != "memfit"]
LLAMA = {
    "name": "Llama-3-8B", "n_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8,
    "ffn": 14336, "vocab": 128256, "seq_len": 8192,
}  # fmt: skip


def a_row(source, *, model=None, hardware=None, config=None, measured=None, **more):
    """A row as its collector writes it; what is not given is a plain run on 8 H100."""
    return {
        "id": "of-the-test", "source": source, "url_or_path": "https://example.org", "year": 2025,
        "model": LLAMA | (model or {}),
        "hardware": {"gpu": "H100-SXM-80GB", "n_gpus": 8, "gpus_per_node": 8} | (hardware or {}),
        "config": {"dp": 8, "tp": 1, "pp": 1, "cp": 1, "micro_batch": 1, "grad_accum": 1}
        | (config or {}),
        "measured": measured or {}, "derived": {}, "usable_for": ["time"], "confidence": "high",
        "notes": "as stated",
    } | more  # fmt: skip


TITAN = a_row(
    "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md Table 1",
    config={"framework": "torchtitan FSDP2", "recompute": "full", "zero_stage": 3},
    measured={"tokens_per_s_per_gpu": 8192, "peak_mem_gb": 50.5, "peak_mem_unit": "GiB",
              "peak_mem_kind": "reserved"},
    derived={"step_time_s": 1.0},
)  # fmt: skip


def test_a_row_of_time_alone_has_no_memory_figure_and_judges_no_memory():
    row, lost = import_published.make_row(TITAN)
    assert set(row.measurements) == {"time.step_seconds"}
    assert lost == {}
    assert accuracy.compare([row]).compared == ()
    both, _ = import_published.make_row(TITAN | {"usable_for": ["time", "memory"]})
    assert set(both.measurements) == {"time.step_seconds", "memory.peak_reserved"}
    assert len(accuracy.compare([both]).compared) == 1


def test_a_time_is_known_to_half_of_the_last_digit_of_what_was_printed():
    row, _ = import_published.make_row(TITAN)
    found = row.measurements["time.step_seconds"]
    assert found.value == 1.0
    assert found.spread == pytest.approx(0.5 / 8192)
    assert found.counter == "from the printed throughput"
    printed = TITAN | {"measured": {"step_time_s": 1.02}, "derived": {}}
    found = import_published.make_row(printed)[0].measurements["time.step_seconds"]
    assert (found.value, found.spread) == (1.02, pytest.approx(0.005))


def test_a_time_whose_tokens_do_not_agree_with_the_throughput_is_refused():
    wrong = TITAN | {"derived": {"step_time_s": 1.1}}
    with pytest.raises(NotExpressible, match="its step has 65536 tokens, its throughput 72090"):
        import_published.make_row(wrong)


def test_a_reason_says_which_use_was_lost(tmp_path, monkeypatch, capsys):
    one = Translated(request=import_published.translate(TITAN).request, kind="peak_reserved")
    made = {
        "kept": one,
        "no-memory": one._replace(memory_lost="its bytes are not described"),
        "no-time": one._replace(time_lost="one micro-batch, not a step"),
    }
    monkeypatch.setattr(import_published, "translate", lambda row: made[row["id"]])
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [TITAN | {"id": name, "usable_for": ["time", "memory"]} for name in made]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["import", str(file), "--out", str(out)])
    import_published.main()
    held = {row.id: sorted(row.measurements) for row in corpus.read_rows(out)}
    assert held == {
        "published-kept": ["memory.peak_reserved", "time.step_seconds"],
        "published-no-memory": ["time.step_seconds"],
        "published-no-time": ["memory.peak_reserved"],
    }
    refused = corpus.read_refused([out])
    assert {(r.use, r.reason, r.rows) for r in refused} == {
        ("memory", "its bytes are not described", 1), ("time", "one micro-batch, not a step", 1),
    }  # fmt: skip
    assert [r.use for r in accuracy.compare((), refused).refused] == ["memory"]
    assert "2 with a time" in capsys.readouterr().out


def test_what_a_row_does_not_state_is_no_recipe():
    silent = {k: v for k, v in TITAN["config"].items() if k != "recompute"}
    with pytest.raises(NotExpressible, match="`recompute` is not stated"):
        import_published.make_row(TITAN | {"config": silent})


def test_every_timed_rows_ranks_and_machines_are_those_of_its_source():
    for row in OTHERS:
        recipe, said = row.recipe, row.environment
        assert row.measurements["time.step_seconds"].value > 0, row.id
        if "devices" in said:
            world = recipe.parallel.world
            assert world == int(said["devices"]), row.id
            node = int(said.get("devices_per_node", world))
            assert recipe.devices_per_node == (node if world > node else 0), row.id


def test_the_corpus_has_times_of_many_frameworks():
    assert {"megatron", "nanotron", "torchtitan"} <= {row.recipe.framework for row in OTHERS}
    assert published.NotExpressible is NotExpressible


def recipe_of(row):
    """The recipe of a row that its translator takes, whose time is kept."""
    made, lost = import_published.make_row(row)
    assert "time" not in lost
    assert made.measurements["time.step_seconds"].value > 0
    return made.recipe


def at(row, seconds, **measured):
    """The row as measured: so many seconds a step, in the throughput that its batch then has."""
    tokens = row["config"]["global_batch"] * row["model"]["seq_len"]
    rate = tokens / seconds / row["hardware"]["n_gpus"]
    return row | {
        "measured": {"tokens_per_s_per_gpu": rate} | measured, "derived": {"step_time_s": seconds},
    }  # fmt: skip


FOUNDRY = a_row(
    "mosaicml/llm-foundry scripts/train/benchmarking/README.md: H100 80GB BF16",
    model={"name": "MPT-7b", "n_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32,
           "ffn": 16384, "vocab": 50368, "seq_len": 4096},
    hardware={"n_gpus": 24},
    config={"precision": "bf16-mixed", "micro_batch": 3, "grad_accum": 2, "global_batch": 144,
            "recompute": "full", "dp": 24, "zero_stage": 3, "fsdp": "FULL_SHARD",
            "framework": "Composer/FSDP1", "grad_dtype": "fp32 reduce"},
)  # fmt: skip


def test_llm_foundrys_models_have_the_number_of_parameters_that_its_tables_print():
    recipe = recipe_of(at(FOUNDRY, 2.5))
    model = families.read_model(recipe.model)
    assert model.parameters == 6_667_247_616  # README, 7b at 4,096
    wider = at(FOUNDRY | {"model": FOUNDRY["model"] | {"seq_len": 2048}}, 1.0)
    assert families.read_model(recipe_of(wider).model).parameters == 6_658_859_008  # at 2,048


def test_llm_foundrys_rows_say_how_fsdp_cuts_and_whose_attention_ran():
    recipe = recipe_of(at(FOUNDRY, 2.5))
    assert (recipe.framework, recipe.devices_per_node) == ("composer", 8)
    assert (recipe.micro_batch, recipe.accumulation, recipe.global_batch) == (3, 2, 144)
    assert recipe.recompute_blocks == 32
    assert recipe.options["attn_impl"] == "triton"
    assert recipe.options["mixed_precision"] == "DEFAULT"
    assert recipe.parallel.reshard_after_forward
    config = FOUNDRY["config"] | {"fsdp": "SHARD_GRAD_OP", "grad_dtype": "bf16 reduce"}
    other = recipe_of(at(FOUNDRY | {"config": config}, 2.5))
    assert not other.parallel.reshard_after_forward
    assert other.options["mixed_precision"] == "PURE"
    fp8 = FOUNDRY["config"] | {"precision": "fp8 (TransformerEngine)"}
    narrow = recipe_of(at(FOUNDRY | {"config": fp8}, 2.5))
    assert (narrow.precision, narrow.options["attn_impl"]) == ("fp8-mixed", "flash")
    large = FOUNDRY | {"source": f"{FOUNDRY['source']} (Large Scale, >= 128 GPUs)"}
    assert recipe_of(at(large, 2.5)).options["attn_impl"] == "flash"
    strange = FOUNDRY | {"config": FOUNDRY["config"] | {"fsdp": "NO_SHARD"}}
    with pytest.raises(NotExpressible, match="NO_SHARD"):
        import_published.make_row(at(strange, 2.5))


EVO = a_row(
    "InternLM/InternEvo doc/en/train_performance.md throughput table",
    model={"name": "InternLM-7B", "kv_heads": 32, "ffn": 11008, "vocab": 103168, "seq_len": 2048},
    hardware={"gpu": "A100-SXM-80GB", "n_gpus": 32},
    config={"precision": "bf16-mixed", "micro_batch": 4, "grad_accum": 4, "global_batch": 256,
            "recompute": "none", "dp": 16, "tp": 2, "zero_stage": 1,
            "extra": "ZeRO-1 group size 4; pack_sample_into_one=False"},
)  # fmt: skip


def test_internevos_groups_of_states_are_copied():
    recipe = recipe_of(at(EVO, 4.5))
    p = recipe.parallel
    assert (p.dp_shard, p.dp_replicate, p.tp, p.zero, p.world) == (4, 4, 2, 1, 32)
    assert recipe.packing
    extra = "ZeRO-1 group size = dp; pack_sample_into_one=True (attention spans the pack)"
    one = recipe_of(at(EVO | {"config": EVO["config"] | {"extra": extra}}, 4.5))
    assert (one.parallel.dp_shard, one.parallel.dp_replicate) == (16, 1)
    assert (one.packing, one.sequence_length, one.micro_batch) == (False, 2048, 4)
    odd = EVO["config"] | {"extra": "ZeRO-1 group size 5"}
    with pytest.raises(NotExpressible, match="group"):
        import_published.make_row(at(EVO | {"config": odd}, 4.5))


@pytest.mark.parametrize("name", ["composer", "internevo"])
def test_a_framework_without_bytes_says_why(name):
    row = next(r for r in OTHERS if r.recipe.framework == name)
    model = families.read_model(row.recipe.model)
    with pytest.raises(MemoryUnknown, match="does not describe the memory"):
        foreign.predict_ledger(row.recipe, model, find_device(row.recipe.device))


BRIDGE = a_row(
    "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md (26.04)",
    model={"name": "Llama-3.1-405B", "n_layers": 126, "hidden": 16384, "heads": 128,
           "ffn": 53248},
    hardware={"gpu": "GB200-186GB", "n_gpus": 256, "gpus_per_node": 4},
    config={"precision": "mxfp8", "micro_batch": 1, "grad_accum": 384, "global_batch": 1536,
            "recompute": "none", "dp": 4, "tp": 4, "pp": 16, "vp": 8, "sp": True, "zero_stage": 1},
)  # fmt: skip
SPARSE = a_row(
    "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md (26.06)",
    model={"name": "DeepSeek-V3", "n_layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 128,
           "vocab": 129280, "seq_len": 4096, "n_experts": 256, "top_k": 8, "moe_ffn": 2048,
           "arch": "moe-mla"},
    hardware={"gpu": "GB200-186GB", "n_gpus": 256, "gpus_per_node": 4},
    config={"precision": "mxfp8", "micro_batch": 1, "grad_accum": 64, "global_batch": 4096,
            "recompute": "selective: mla_up_proj", "dp": 64, "pp": 4, "vp": 4, "ep": 64,
            "zero_stage": 1},
)  # fmt: skip


def test_a_run_of_megatron_bridge_takes_from_its_recipe_what_the_page_leaves_out():
    recipe = recipe_of(at(BRIDGE, 60.0))
    o, p = recipe.options, recipe.parallel
    assert (recipe.precision, o["fp8_recipe"], o["version"]) == ("fp8-mixed", "mxfp8", 202604)
    assert (p.dp_shard, p.tp, p.pp, p.virtual_pp, p.zero, p.world) == (4, 4, 16, 8, 1, 256)
    assert p.sequence_parallel
    assert recipe.devices_per_node == 4
    assert o["account_for_embedding_in_pipeline_split"]  # 126 blocks and both ends: 128 pieces
    assert o["tp_comm_overlap"]
    assert o["overlap_grad_reduce"]
    assert not o["accumulate_allreduce_grads_in_fp32"]
    for said, precision, scaling in (
        ("nvfp4", "fp4-mixed", "delayed"), ("bf16-mixed", "bf16-mixed", "delayed"),
        ("fp8 (per-tensor current scaling)", "fp8-mixed", "tensorwise"),
    ):  # fmt: skip
        other = BRIDGE | {"config": BRIDGE["config"] | {"precision": said}}
        found = recipe_of(at(other, 60.0))
        assert (found.precision, found.options["fp8_recipe"]) == (precision, scaling)
    strange = BRIDGE | {"config": BRIDGE["config"] | {"precision": "int8"}}
    with pytest.raises(NotExpressible, match="precision int8"):
        import_published.make_row(at(strange, 60.0))


def test_a_layout_that_no_recipe_has_takes_no_recipes_settings_and_says_so():
    config = BRIDGE["config"] | {"pp": 8, "vp": 4, "dp": 8, "grad_accum": 192}
    row, _ = import_published.make_row(at(BRIDGE | {"config": config}, 60.0))
    assert not row.recipe.options["tp_comm_overlap"]
    assert "are not stated" in row.source.notes


def test_a_further_predicted_token_is_known_by_the_flop_that_a_page_prints():
    seconds, tokens = 10.0, 4096 * 4096 / 256
    rate = tokens / seconds
    with_it = recipe_of(at(SPARSE, seconds, tflops_per_gpu=rate * 260e9 / 1e12))
    without = recipe_of(at(SPARSE, seconds, tflops_per_gpu=rate * 250e9 / 1e12))
    assert [r.options["mtp_num_layers"] for r in (with_it, without)] == [1, 0]
    said = SPARSE | {"config": SPARSE["config"] | {"extra": "DeepSeekV3 (w/o MTP)"}}
    assert recipe_of(at(said, seconds)).options["mtp_num_layers"] == 0
    for recipe, ends in ((with_it, "mL"), (without, "L")):
        layout = recipe.options["pipeline_model_parallel_layout"]
        assert (layout.count("t"), layout.count("|") + 1) == (61, 16)
        assert (layout[0], layout.lstrip("E|t")) == ("E", ends)


def test_blocks_whose_activations_wait_and_whole_sharding_are_read_from_the_row():
    config = BRIDGE["config"] | {
        "dp": 256, "tp": 1, "pp": 1, "vp": None, "sp": False, "grad_accum": 6, "zero_stage": 3,
        "offload": "activations of 40 layers to CPU", "recompute": "full on 5 of 32 layers (block)",
    }  # fmt: skip
    recipe = recipe_of(at(BRIDGE | {"config": config}, 60.0))
    assert recipe.options["use_megatron_fsdp"]
    assert recipe.options["cpu_offloading_num_layers"] == 40
    assert (recipe.parallel.zero, recipe.recompute_blocks) == (3, 5)
