"""What peers answer for the rows of the corpus, with their own code.

    python bench/calculators.py --peers FOLDER

FOLDER holds checkouts of the peers' sources (`cookbook` of EleutherAI, `deepspeed-…`,
`llm-analysis`, `SimuMax`); accelerate is imported. What is not there is skipped and said.
One fixed rule a peer, written in its function: the recipe as far as the peer can be told; a row
that it cannot be told is not expressible and is no error. Writes bench/results/calculators.jsonl,
which docs/accuracy.md reads.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.accuracy.corpus import Row, read_corpus
from memfit.core.errors import Error
from memfit.core.units import GIB
from memfit.families import read_model
from memfit.records.model import Architecture

OUT = Path(__file__).resolve().parent / "results" / "calculators.jsonl"


class NotExpressible(Exception):
    """Why a peer cannot be told a row."""


def refuse(**reasons: bool) -> None:
    """Raise NotExpressible with the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise NotExpressible(reason.replace("_", " "))


def architecture(row: Row) -> Architecture:
    return read_model(row.recipe.model).architecture


def layer_bytes(row: Row) -> tuple[int, int]:
    """(all parameters, those of the largest layer)."""
    model = read_model(row.recipe.model)
    return model.parameters, max(w.numel for w in model.weights)


def gated(row: Row) -> bool:
    """Whether a feed-forward has three products."""
    weights = read_model(row.recipe.model).weights
    return sum(w.layer == 0 and "mlp" in w.name and len(w.shape) == 2 for w in weights) == 3


def accelerate(_: Path) -> Callable[[Row], float]:
    """accelerate estimate-memory: the largest of its four training numbers, of a model and dtype.

    Told: the model (built by transformers on meta, without a head, as it does) and float32 or
    float16. It knows no batch, sequence, recompute or parallelism: those rows are asked all the
    same when the model is whole on each device and trained in full, since that is its question.
    """
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel

    @lru_cache
    def size(config: str) -> int:
        data = json.loads(config)
        with init_empty_weights(include_buffers=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModel.from_config(AutoConfig.for_model(**data))
        return int(calculate_maximum_sizes(model)[0])

    def ask(row: Row) -> float:
        p = row.recipe.parallel
        refuse(
            knows_no_adapters_and_frozen_weights=row.recipe.method != "full",
            knows_one_device_only=p.tp * p.pp * p.cp * p.ep * p.dp_shard > 1,
            knows_AdamW_only=row.recipe.optimizer.name != "adamw",
        )
        total = size(json.dumps(row.recipe.model.config, sort_keys=True))
        half = row.recipe.precision != "fp32"
        usage = estimate_training_usage(total / (1 + half), "float16" if half else "float32")
        return float(max(n for n in usage.values() if n > 0))

    return ask


def deepspeed(folder: Path) -> Callable[[Row], float]:
    """DeepSpeed's estimators of model states: ZeRO-2, and ZeRO-3 where weights are cut too.

    Told: parameters, the largest layer, devices. No activations, by its own words.
    """
    home = next(folder.glob("deepspeed-*/deepspeed/runtime/zero"))
    two = function(home / "stage_1_and_2.py", "estimate_zero2_model_states_mem_needs")
    three = function(home / "stage3.py", "estimate_zero3_model_states_mem_needs")

    def ask(row: Row) -> float:
        p = row.recipe.parallel
        refuse(
            knows_no_adapters_and_frozen_weights=row.recipe.method != "full",
            knows_data_parallelism_only=p.tp * p.pp * p.cp * p.ep > 1,
            knows_mixed_precision_only=row.recipe.precision not in ("bf16-mixed", "fp16-mixed"),
            has_no_estimate_of_ZeRO_1=p.dp_shard > 1 and p.zero == 1,
        )
        total, largest = layer_bytes(row)
        told = {"num_gpus_per_node": p.dp_shard, "num_nodes": 1, "cpu_offload": False}
        if p.dp_shard > 1 and p.zero == 3:
            return float(three(total, largest, **told, cpu_offload_params=False)[1])
        return float(two(total, **told)[1])

    return ask


def function(path: Path, name: str) -> Callable[..., Any]:
    """One function of a source file, without importing what stands around it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    space: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), str(path), "exec"), space)
    made: Callable[..., Any] = space[name]
    return made


def eleuther(folder: Path) -> Callable[[Row], float]:
    """EleutherAI's calc_transformer_mem.py with explicit sizes.

    Told: sizes, linears of a feed-forward, sequence, batch, devices, tensor and pipeline degree,
    ZeRO stage (0 without cut states), whether activations are checkpointed, and cut among the
    tensor-parallel ranks.
    """
    script = load(folder / "cookbook" / "calc" / "calc_transformer_mem.py")

    def ask(row: Row) -> float:
        r, p, a = row.recipe, row.recipe.parallel, architecture(row)
        refuse(
            knows_no_adapters_and_frozen_weights=r.method != "full",
            knows_no_context_parallelism=p.cp > 1,
            knows_mixed_precision_only=r.precision not in ("bf16-mixed", "fp16-mixed"),
            knows_no_selective_recompute=r.recompute == "selective" and r.recompute_blocks > 0,
            knows_no_experts_of_another_width=a.experts.count > 0,
        )
        words: dict[str, Any] = {
            "num_layers": a.layers, "hidden_size": a.hidden, "num_attention_heads": a.heads,
            "vocab_size": a.vocab, "ffn_expansion_factor": a.ffn / a.hidden,
            "num_mlp_linears": 3 if gated(row) else 2, "kv_size_ratio": a.kv_heads / a.heads,
            "sequence_length": r.sequence_length, "batch_size_per_gpu": r.micro_batch,
            "num_gpus": p.world, "tensor_parallel_size": p.tp, "pipeline_parallel_size": p.pp,
            "zero_stage": p.zero if p.dp_shard > 1 else 0,
        }  # fmt: skip
        line = [f"--{k.replace('_', '-')}={v}" for k, v in words.items()]
        line += ["--checkpoint-activations"] if r.recompute_blocks else []
        line += ["--partition-activations"] if p.sequence_parallel else []
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            script.calc_mem(script.config_parser().parse_args(line))
        text = said.getvalue().partition("Per-GPU Memory Required for Training: ")[2]
        return float(text.split(" ")[0]) * GIB

    return ask


def load(path: Path) -> ModuleType:
    """A script as a module."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def llm_analysis(folder: Path) -> Callable[[Row], float]:
    """llm-analysis: estimated_peak_memory_per_gpu of `LLMAnalysis.training`.

    Told: sizes, gated or not, sequence, batch, tensor, pipeline and data degree, ZeRO stage, full
    or no recompute, 16-bit weights, flash attention where the row has it.
    """
    sys.path.insert(0, str(folder / "llm-analysis"))
    import logging

    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import (
        ModelConfig,
        ParallelismConfig,
        get_dtype_config_by_name,
        get_gpu_config_by_name,
    )

    logging.disable(logging.CRITICAL)

    def ask(row: Row) -> float:
        r, p, a = row.recipe, row.recipe.parallel, architecture(row)
        refuse(
            knows_no_adapters_and_frozen_weights=r.method != "full",
            knows_no_context_parallelism=p.cp > 1,
            knows_mixed_precision_only=r.precision not in ("bf16-mixed", "fp16-mixed"),
            knows_no_experts_of_another_width=a.experts.count > 0,
        )
        model = ModelConfig(
            name="row", num_layers=a.layers, n_head=a.heads, hidden_dim=a.hidden,
            vocab_size=a.vocab, max_seq_len=max(a.max_sequence, r.sequence_length),
            num_key_value_heads=a.kv_heads, ffn_embed_dim=a.ffn, mlp_gated_linear_units=gated(row),
        )  # fmt: skip
        degrees = ParallelismConfig(
            tp_size=p.tp, pp_size=p.pp, dp_size=p.dp, sp_size=p.tp if p.sequence_parallel else 1
        )
        judge = LLMAnalysis(
            model, get_gpu_config_by_name("a100-sxm-80gb"), get_dtype_config_by_name("w16a16e16"),
            degrees,
        )  # fmt: skip
        stage = p.zero if p.dp_shard > 1 else 0
        level = ActivationRecomputation.NONE
        if r.recompute_blocks:
            level = (
                ActivationRecomputation.FULL
                if r.recompute == "full"
                else ActivationRecomputation.ATTN_COMPUTE
            )
        said = judge.training(
            batch_size_per_gpu=r.micro_batch, gradient_accumulation_steps=r.accumulation,
            seq_len=r.sequence_length, total_num_tokens=10**9, activation_recomputation=level,
            ds_zero=DSZeRO(stage), flash_attn=r.attention not in ("math", "eager"),
        )  # fmt: skip
        return float(said["estimated_peak_memory_per_gpu"])

    return ask


def simumax(folder: Path) -> Callable[[Row], float]:
    """SimuMax: the largest peak of its pipeline stages, of Megatron-LM's step.

    Told: sizes, sequence, batches, tensor, pipeline and data degree, sequence parallelism, full
    recompute, distributed optimizer. Its reserved memory is that over 0.94.
    """
    sys.path.insert(0, str(folder / "SimuMax"))
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    configs = folder / "SimuMax" / "configs"
    system = SystemConfig.init_from_config_file(str(configs / "system" / "b200_bf16_ceperm.json"))
    base = json.loads((configs / "strategy" / "tp1_pp2_dp4_mbs1.json").read_text())

    def ask(row: Row) -> float:
        r, p, a = row.recipe, row.recipe.parallel, architecture(row)
        refuse(
            knows_Megatrons_step_only=r.framework != "megatron",
            is_asked_for_dense_models_here=a.experts.count > 0 or a.latent.kv_rank > 0,
            knows_bf16_only=r.precision != "bf16-mixed",
            knows_no_uniform_part_of_recompute=0 < r.recompute_blocks < a.layers,
            knows_gated_feed_forwards_here=a.family not in ("llama", "mistral", "qwen2", "qwen3"),
        )
        model = ModelConfig(
            model_type="dense", model_name="row", hidden_size=a.hidden, head_num=a.heads,
            kv_head_num=a.kv_heads, head_size=a.head_dim, intermediate_size=a.ffn,
            layer_num=a.layers, vocab_size=a.vocab, use_swiglu=True,
        )  # fmt: skip
        told = base | {
            "seq_len": r.sequence_length, "micro_batch_size": r.micro_batch,
            "micro_batch_num": r.accumulation, "world_size": p.world, "tp_size": p.tp,
            "cp_size": p.cp, "pp_size": p.pp, "enable_sequence_parallel": p.sequence_parallel,
            "interleaving_size": p.virtual_pp, "enable_recompute": bool(r.recompute_blocks),
            "cp_comm_type": r.options["cp_comm_type"],
            "zero_state": int(bool(r.options["use_distributed_optimizer"])),
            "te_version": "2.11.0",
            "cross_entropy_loss_fusion": r.options["cross_entropy_loss_fusion"] != "none",
        }  # fmt: skip
        if r.recompute_blocks:
            names = {"full": "full_block", "selective": "selective_recompute"}
            told["recompute_granularity"] = names[r.recompute]
            told["recompute_layer_num"] = r.recompute_blocks
        judge = PerfLLM()
        with contextlib.redirect_stdout(io.StringIO()):
            judge.configure(
                strategy_config=StrategyConfig(**told), model_config=model, system_config=system
            )
            judge.run_estimate()
            said = judge.analysis_mem()
        key = "peak_mem_with_reserved" if "peak_reserved" in row.memory else "peak_mem"
        return max(_numbers(said, key))

    return ask


def calculon(folder: Path) -> Callable[[Row], float]:
    """calculon: bytes of a processor for a step of Megatron-LM's GPT, with its seconds.

    Told: sizes, sequence, batches, degrees, interleaving, recompute, distributed optimizer. Its
    blocks have two products in a feed-forward, a key and value for each head and no vocabulary, so
    it is asked how long an answer takes (bench/search.py) and not for the rows of the corpus.
    """
    sys.path.insert(0, str(folder / "calculon"))
    import logging

    from calculon import System
    from calculon.llm import Llm

    home = folder / "calculon"
    told_system = json.loads((home / "systems" / "h100_80g_nvl8.json").read_text())
    told_system["mem1"]["GiB"] = 10**6  # else it stops where its bytes do not fit
    system = System(told_system)
    base = json.loads((home / "examples" / "3072_t4_p64_d12_mbs4_full.json").read_text())
    silent = logging.getLogger("calculon")

    def ask(row: Row) -> float:
        r, p, a = row.recipe, row.recipe.parallel, architecture(row)
        refuse(
            knows_no_context_parallelism=p.cp > 1,
            knows_no_experts=a.experts.count > 0,
            knows_all_blocks_or_none_recomputed=r.recompute_blocks not in (0, a.layers),
            knows_whole_stages_only=a.layers % (p.pp * p.virtual_pp) > 0,
        )
        level = {"full": "full", "selective": "attn_only"}[r.recompute]
        told = base | {
            "num_procs": p.world, "tensor_par": p.tp, "pipeline_par": p.pp, "data_par": p.dp,
            "batch_size": r.global_batch, "microbatch_size": r.micro_batch,
            "activation_recompute": level if r.recompute_blocks else "none",
            "pipeline_interleaving": p.virtual_pp, "optimizer_sharding": p.dp > 1,
            "tensor_par_comm_type": "rs_ag" if p.sequence_parallel else "ar",
        }  # fmt: skip
        sizes = {
            "hidden": a.hidden, "feedforward": a.ffn, "seq_size": r.sequence_length,
            "attn_heads": a.heads, "attn_size": a.head_dim, "num_blocks": a.layers,
        }  # fmt: skip
        judge = Llm(Llm.Application(sizes), silent)
        judge.compile(system, Llm.Execution.from_json(told))
        judge.run(system)
        return float(judge.get_mem_tier1_cap_req())

    return ask


def _numbers(said: Any, key: str) -> Iterator[float]:
    """Every value of a key in a nested answer, in bytes."""
    data = getattr(said, "data", said)
    if isinstance(data, dict):
        for name, value in data.items():
            if name == key:
                yield _bytes(value)
            else:
                yield from _numbers(value, key)
    elif isinstance(data, list):
        for value in data:
            yield from _numbers(value, key)


def _bytes(value: Any) -> float:
    if isinstance(value, str):
        number, unit = value.split()
        return float(number) * {"GB": GIB, "MB": GIB / 1024, "KB": GIB / 1024**2}[unit]
    return float(value)


PEERS: dict[str, Callable[[Path], Callable[[Row], float]]] = {
    "accelerate": accelerate, "DeepSpeed": deepspeed, "EleutherAI cookbook": eleuther,
    "llm-analysis": llm_analysis, "SimuMax": simumax,
}  # fmt: skip


def answers(
    peer: str, ask: Callable[[Row], float], rows: tuple[Row, ...]
) -> Iterator[dict[str, Any]]:
    """One line a row."""
    for row in rows:
        if not row.memory:
            continue
        said: dict[str, Any] = {"peer": peer, "id": row.id, "nbytes": None}
        try:
            said["nbytes"] = round(ask(row))
        except NotExpressible as reason:
            said["reason"] = str(reason)
        except Error as error:
            said["reason"] = error.message
        except Exception as error:  # a peer's own failure is its answer
            first = str(error).strip().splitlines()
            said["reason"] = f"{type(error).__name__}: {first[0] if first else ''}"[:160]
        yield said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    rows = read_corpus()
    lines: list[str] = []
    for peer, prepare in PEERS.items():
        try:
            ask = prepare(asked.peers)
        except (ImportError, OSError, StopIteration) as error:
            print(f"{peer}: not run ({type(error).__name__}: {error})")
            continue
        found = list(answers(peer, ask, rows))
        lines += [json.dumps(one) + "\n" for one in found]
        print(f"{peer}: {sum(one['nbytes'] is not None for one in found)} of {len(found)} rows")
    asked.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
