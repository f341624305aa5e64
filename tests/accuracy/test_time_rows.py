"""Published step times: what a row carries of them, what it loses, and that its tokens agree."""

import json
import sys
from pathlib import Path
from statistics import median

import pytest

from memfit import families
from memfit.accuracy import corpus, memory_errors
from memfit.accuracy.time_errors import predict_seconds
from memfit.core.errors import MemoryUnknown
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.problem import find_device
from memfit.plan.step_time import own
from memfit.plan.step_time.time_range import find_range

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

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
    assert memory_errors.compare([row]).compared == ()
    both, _ = import_published.make_row(TITAN | {"usable_for": ["time", "memory"]})
    assert set(both.measurements) == {"time.step_seconds", "memory.peak_reserved"}
    assert len(memory_errors.compare([both]).compared) == 1


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
    assert [r.use for r in memory_errors.compare((), refused).refused] == ["memory"]
    assert "2 with a time" in capsys.readouterr().out


def test_torchtitans_words_for_what_changes_the_clock_alone():
    words = {"extra": "async TP; schedule interleaved", "quant": "float8 rowwise, fp8 all-gather"}
    found = import_published.make_row(TITAN | {"config": TITAN["config"] | words})[0].recipe.options
    assert (found["async_tp"], found["pipeline_schedule"]) == (True, "Interleaved1F1B")
    assert (found["float8_recipe"], found["float8_all_gather"]) == ("rowwise", True)
    plain = import_published.make_row(TITAN)[0].recipe.options
    assert (plain["async_tp"], plain["pipeline_schedule"]) == (False, "1F1B")


def test_nanotrons_tensor_parallel_runs_communicate_beside_their_products():
    runs = [row.recipe for row in OTHERS if row.recipe.framework == "nanotron"]
    assert len(runs) > 100
    assert all(r.options["async_communication"] == (r.parallel.tp > 1) for r in runs)


def test_mlcommons_rows_say_which_container_or_round_ran():
    row = a_row(
        "MLCommons training_results_v4.1 llama2_70b_lora NVIDIA/eos_ngc24.09_nemo",
        model={"name": "Llama-2-70B", "n_layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672,
               "vocab": 32000},
        config={"precision": "fp8 (TE, fp8 params)", "attention": "fp8/cuDNN", "recompute": "none",
                "dp": 2, "tp": 4, "sp": True, "global_batch": 8, "grad_accum": 4,
                "lora": {"rank": 16, "alpha": 32, "targets": "linear_qkv, linear_proj"}},
    )  # fmt: skip
    assert recipe_of(at(row, 3.7)).options["version"] == 202409
    named = row | {"source": "MLCommons training_results_v5.0 llama2_70b_lora Oracle/8xBM.GPU"}
    assert recipe_of(at(named, 3.7)).options["version"] == 202504


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("config", "tp", None), ("config", "dp", "many"), ("hardware", "n_gpus", None),
     ("model", "n_layers", "thirty-two"), ("measured", "tokens_per_s_per_gpu", "fast")],
)  # fmt: skip
def test_a_field_of_another_kind_refuses_its_row_alone(part, key, value):
    strange = TITAN | {part: TITAN[part] | {key: value}}
    with pytest.raises(NotExpressible):
        import_published.read_row(strange)


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


@pytest.mark.parametrize(
    "name",
    [
        "automodel",
        "composer",
        "flash-attention",
        "fms-fsdp",
        "internevo",
        "llm-c",
        "maxtext",
        "paddlenlp",
        "tinyllama",
    ],
)
def test_a_framework_without_bytes_says_why(name):
    row = next(r for r in OTHERS if r.recipe.framework == name)
    model = families.read_model(row.recipe.model)
    with pytest.raises(MemoryUnknown, match="does not describe the memory"):
        predict_ledger(row.recipe, model, find_device(row.recipe.device))


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


def test_nemos_rows_before_megatron_bridge_are_read_alike():
    config = {
        "precision": "bf16-mixed", "micro_batch": 1, "grad_accum": 512, "global_batch": 2048,
        "recompute": "selective", "attention": "unfused/fused softmax (pre-flash)", "dp": 4,
        "tp": 4, "sp": True, "pp": 8, "vp": 12, "zero_stage": 1,
    }  # fmt: skip
    hardware = {"gpu": "A100-SXM-80GB", "n_gpus": 128}
    gpt = GPT | {"name": "GPT3-175B", "n_layers": 96, "arch": "gpt"}
    row = a_row("NVIDIA/NeMo-Megatron-Launcher", model=gpt, hardware=hardware, config=config)
    recipe = recipe_of(at(row, 280.0))
    assert (recipe.attention, recipe.recompute) == ("eager", "selective")
    assert recipe.options["recompute_modules"] == "core_attn"
    assert families.read_model(recipe.model).architecture.family == "gpt2"
    fp8 = row | {"config": config | {"precision": "fp8", "attention": "TE"}}
    assert recipe_of(at(fp8, 280.0)).options["fp8_recipe"] == "delayed"


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


GPT = {"name": "GPT", "kv_heads": 96, "heads": 96, "hidden": 12288, "ffn": 49152,
       "n_layers": 80, "vocab": 51200, "seq_len": 2048}  # fmt: skip
SELENE = a_row(
    "Narayanan et al. 2021 (SC21) Table 1",
    model=GPT, hardware={"gpu": "A100-SXM-80GB", "n_gpus": 1536},
    config={"precision": "fp16-mixed", "global_batch": 2304, "recompute": "full", "dp": 24,
            "tp": 8, "pp": 8, "micro_batch": None, "zero_stage": 0, "framework": "Megatron-LM"},
)  # fmt: skip


def test_megatrons_first_table_takes_micro_batches_and_interleaving_from_its_artifact():
    recipe = recipe_of(at(SELENE, 24.8))
    p = recipe.parallel
    assert (recipe.micro_batch, recipe.accumulation) == (2, 48)  # run_table_1.sh: MBS=2
    assert (p.virtual_pp, p.pp, p.tp, p.dp_replicate, p.world) == (2, 8, 8, 24, 1536)
    assert not recipe.options["use_distributed_optimizer"]
    assert recipe.recompute_blocks == 80
    unknown = SELENE | {"model": GPT | {"hidden": 12800, "heads": 100, "kv_heads": 100}}
    with pytest.raises(NotExpressible, match="artifact"):
        import_published.make_row(at(unknown, 24.8))
    second = SELENE | {"source": "Narayanan et al. 2021 Table 2"}
    row, _ = import_published.make_row(at(second, 24.8))
    assert (row.recipe.micro_batch, row.recipe.parallel.virtual_pp) == (1, 1)
    assert "Assumed: micro-batches of one" in row.source.notes
    smith = SELENE | {"source": "Smith et al. 2022 MT-NLG",
                      "config": SELENE["config"] | {"framework": "Megatron-DeepSpeed",
                                                    "precision": "bf16-mixed"}}  # fmt: skip
    assert recipe_of(at(smith, 24.8)).framework == "megatron-deepspeed"


QWEN3 = a_row(
    "yanring/Megatron-MoE-ModelZoo best_practice/qwen3/readme.md",
    model={"name": "Qwen3-235B-A22B", "n_layers": 94, "heads": 64, "kv_heads": 4, "ffn": None,
           "head_dim": 128, "vocab": 151936, "seq_len": 4096, "n_experts": 128, "top_k": 8,
           "moe_ffn": 1536},
    hardware={"n_gpus": 256},
    config={"precision": "bf16-mixed", "grad_accum": 128, "global_batch": 2048, "dp": 16, "tp": 2,
            "sp": True, "pp": 8, "vp": 4, "ep": 32, "recompute": "selective: norm, act",
            "extra": "DeepEP, 1F1B overlap"},
)  # fmt: skip


def test_the_moe_zoos_words_are_megatrons_arguments():
    recipe = recipe_of(at(QWEN3, 18.0))
    o = recipe.options
    assert o["moe_token_dispatcher_type"] == "deepep"
    assert o["overlap_moe_expert_parallel_comm"]
    assert o["recompute_modules"] == "layernorm,moe_act"
    assert o["account_for_loss_in_pipeline_split"]  # 94 blocks and both ends: 32 pieces of 3
    assert families.read_model(recipe.model).architecture.experts.count == 128
    config = QWEN3["config"] | {
        "extra": "A2A dispatcher, Megatron FSDP", "recompute": "full", "pp": 1, "vp": 1,
        "dp": 128, "grad_accum": 16,
    }  # fmt: skip
    other = recipe_of(at(QWEN3 | {"config": config}, 18.0))
    assert other.options["moe_token_dispatcher_type"] == "alltoall"
    assert (other.options["use_megatron_fsdp"], other.parallel.zero) == (True, 3)


AUTO = a_row(
    "NVIDIA-NeMo/Automodel docs/performance-summary.mdx",
    model={"name": "Llama-3-70B", "n_layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672,
           "seq_len": 4096},
    config={"precision": "bf16", "micro_batch": 2, "grad_accum": 4, "global_batch": 32, "dp": 4,
            "tp": 2, "recompute": "full", "lora": {"rank": 16, "targets": "*_proj"},
            "compile": "yes (yaml)", "extra": "LBS 2; TE + triton"},
)  # fmt: skip


def test_automodels_local_batch_kernels_and_adapters_are_read():
    recipe = recipe_of(at(AUTO, 15.0))
    assert (recipe.method, len(recipe.lora.targets), recipe.compile) == ("lora", 7, "blocks")
    assert (recipe.options["local_batch"], recipe.options["experts"]) == (2, "te")
    assert (recipe.options["dispatcher"], recipe.parallel.world) == ("deepep", 8)
    config = QWEN3["config"] | {
        "precision": "mxfp8", "recompute": "none", "dp": 64, "tp": 1, "pp": 4, "ep": 32,
        "grad_accum": 32, "extra": "expert/kernels: gmm; MFU vs 2500 TFLOPS",
    }  # fmt: skip
    hardware = {"gpu": "GB200-186GB", "n_gpus": 256, "gpus_per_node": 4}
    sparse = QWEN3 | {"source": AUTO["source"], "config": config, "hardware": hardware}
    recipe = recipe_of(at(sparse, 15.0))
    assert recipe.precision == "fp8-mixed"
    assert (recipe.options["experts"], recipe.options["dispatcher"]) == ("gmm", "hybridep")
    assert not recipe.parallel.reshard_after_forward


def test_small_trainers_rows_take_from_their_scripts_what_the_page_leaves_out():
    small = FOUNDRY["model"] | {"hidden": 1536, "ffn": 6144, "heads": 16, "kv_heads": 16,
                                "n_layers": 24, "seq_len": 2048}  # fmt: skip
    hardware = {"gpu": "A100-SXM-80GB", "n_gpus": 8, "mem_gb": 80}
    flash = a_row(
        "Dao-AILab/flash-attention training/README.md", model=small, hardware=hardware,
        config={"global_batch": 256, "dp": 8, "framework": "flash-attn training stack"},
    )  # fmt: skip
    recipe = recipe_of(at(flash, 1.0))
    assert (recipe.micro_batch, recipe.accumulation, recipe.parallel.dp_shard) == (16, 2, 8)
    tiny = flash | {"model": small | {"hidden": 768, "ffn": 3072, "heads": 12, "kv_heads": 12}}
    assert recipe_of(at(tiny, 1.0)).parallel.dp_replicate == 8
    c = a_row(
        "karpathy/llm.c scripts", model=small | {"seq_len": 1024}, hardware=hardware,
        config={"micro_batch": 32, "global_batch": 512, "zero_stage": 1, "dp": 8,
                "recompute": "none (-r 0)", "framework": "llm.c (CUDA)"},
    )  # fmt: skip
    assert recipe_of(at(c, 1.0)).accumulation == 2
    fms = a_row(
        "foundation-model-stack/fms-fsdp README.md", hardware=hardware | {"n_gpus": 32},
        config={"micro_batch": 2, "global_batch": 64, "dp": 32, "recompute": "selective",
                "compile": True, "fsdp": "HSDP", "framework": "FSDP1 (fms)"},
    )  # fmt: skip
    recipe = recipe_of(at(fms, 1.0, mfu=0.6, hfu=0.7))
    assert (recipe.parallel.dp_replicate, recipe.parallel.dp_shard) == (4, 8)
    assert (recipe.recompute_blocks, recipe.compile) == (16, "model")  # half of 32 blocks
    tiny = a_row(
        "jzhang38/TinyLlama README.md", hardware=hardware | {"n_gpus": 16},
        config={"micro_batch": 8, "global_batch": 1024, "dp": 16, "recompute": "none",
                "fsdp": "FULL_SHARD"},
    )  # fmt: skip
    recipe = recipe_of(at(tiny, 1.0))
    assert (recipe.framework, recipe.loss, recipe.accumulation) == ("tinyllama", "fused", 8)
    jax = a_row(
        "NVIDIA/JAX-Toolbox docs/frameworks/maxtext/README.md",
        config={"micro_batch": 2, "global_batch": 16, "precision": "bf16",
                "recompute": "minimal_flash (saves projections)", "framework": "MaxText (JAX)"},
    )  # fmt: skip
    recipe = recipe_of(at(jax, 1.0))
    assert (recipe.recompute, recipe.recompute_blocks, recipe.compile) == ("selective", 32, "model")


def test_qwens_quantised_rows_lose_their_memory_and_keep_their_time():
    row = a_row(
        "QwenLM/Qwen README.md profiling table", usable_for=["memory", "time"],
        model={"name": "Qwen-7B", "kv_heads": 32, "ffn": 11008, "vocab": 151936, "seq_len": 512},
        hardware={"gpu": "A100-SXM-80GB", "n_gpus": 1, "gpus_per_node": 1},
        config={"dp": 1, "global_batch": 8, "grad_accum": 8, "recompute": "full", "zero_stage": 2,
                "quant": "gptq int4 (fp16 compute)", "precision": "fp16",
                "lora": {"rank": 64, "targets": "c_attn,c_proj,w1,w2"}},
    )  # fmt: skip
    memory = {"peak_mem_gb": 11.5, "peak_mem_unit": "GB?", "peak_mem_kind": "unspecified"}
    made, lost = import_published.make_row(at(row, 3.0, **memory))
    assert set(made.measurements) == {"time.step_seconds"}
    assert "gptq" in lost["memory"]
    assert (made.recipe.base_format, made.recipe.precision) == ("int4", "fp16-mixed")
    lora = {"rank": 64, "targets": "c_attn,c_proj,w1,w2 + embedding and lm_head trained"}
    config = {k: v for k, v in row["config"].items() if k != "quant"}
    copied = row | {"config": config | {"lora": lora, "zero_stage": 0}}
    kept, lost = import_published.make_row(at(copied, 3.0, **memory))
    assert kept.recipe.options["modules_to_save"] == "embed_tokens,lm_head"
    assert "memory" not in lost
    recipe = made.recipe
    with pytest.raises(MemoryUnknown):
        predict_ledger(recipe, families.read_model(recipe.model), find_device(recipe.device))


def test_memfits_own_steps_are_predicted_better_by_what_was_measured_of_their_card(monkeypatch):
    rows = [r for r in TIMED if r not in OTHERS and not find_device(r.recipe.device).is_cpu]
    measured = [row.measurements["time.step_seconds"].value for row in rows]
    assert len(rows) >= 15

    def errors():
        return [abs(predict_seconds(r) / m - 1) for r, m in zip(rows, measured, strict=True)]

    for row, seconds in zip(rows, measured, strict=True):
        low, high, _ = find_range(predict_seconds(row), "memfit", row.recipe.device)
        assert low <= seconds <= high, row.id
    curves = errors()
    monkeypatch.setattr(own, "read_measured", dict)
    published = errors()
    assert median(curves) < 0.09 < 0.12 < median(published)
    assert max(curves) < 0.2 < max(published)
