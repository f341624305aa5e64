"""Megatron-LM's golden values: the arguments of a functional test, in memfit's words.

`megatron_arguments.json` holds, for each test and machine, the arguments in the test's
model_config.yaml at the commit that brought its golden values (they change later without new
values), the environment variables and the number of GPUs of the test's recipe.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from published import NotExpressible, Translated

Arguments = dict[str, Any]

OTHER_MODELS = {
    "bert": "BERT: an encoder", "t5": "T5: an encoder and a decoder", "hybrid": "Mamba blocks",
    "mimo": "a vision-language model", "multimodal-llava": "a vision-language model",
    "nemotron": "Mamba blocks",
}  # fmt: skip
UNKNOWN = {  # arguments whose step memfit does not describe -> what they ask for
    "perform-rl-step": "a step of reinforcement learning, with inference between",
    "use-megatron-fsdp": "Megatron-FSDP",
    "data-parallel-sharding-strategy": "Megatron-FSDP",
    "export-kd-cfg": "distillation from a second model",
    "mtp-num-layers": "multi-token prediction",
    "fine-grained-activation-offloading": "activations offloaded by module",
    "cuda-graph-impl": "CUDA graphs, which keep pools of their own",
    "enable-cuda-graph": "CUDA graphs, which keep pools of their own",
    "use-transformer-engine-op-fuser": "Transformer Engine's fused operations",
    "fp4-format": "FP4 linears",
    "pipeline-model-parallel-layout": "a pipeline layout written out",
    "moe-layer-freq": "dense and expert blocks in a pattern of its own",
    "hybrid-layer-pattern": "Mamba blocks",
    "is-hybrid-model": "Mamba blocks",
    "tp-comm-overlap": "user buffers of overlapped tensor parallelism",
    "rerun-mode": "every iteration run twice to compare gradients",
}
DEVICES = {"a100": "a100-sxm-80", "h100": "h100-sxm", "gb200": "gb200"}
# the first golden values of the `lts` image that kept no probabilities where its earlier ones,
# of equal arguments, did: Transformer Engine found no FlashAttention that it could use there
LTS_FLASH = "2025-11"


@cache
def _known() -> dict[str, list[dict[str, Any]]]:
    file = Path(__file__).with_name("megatron_arguments.json")
    known: dict[str, list[dict[str, Any]]] = json.loads(file.read_text(encoding="utf-8"))
    return known


def translate(case: dict[str, str]) -> Translated:
    """The request of a golden value; its memory is of the last rank, which writes the log."""
    model = case["case"].split("/")[0]
    if model in OTHER_MODELS:
        raise NotExpressible(OTHER_MODELS[model])
    for form in _known().get(case["case"], ()):
        if case["hw"] in form["machines"]:
            return _express(case["hw"], form)
    raise NotExpressible("its arguments are not in megatron_arguments.json")


def _express(machine: str, form: dict[str, Any]) -> Translated:
    a = form["arguments"]
    for name, asks in UNKNOWN.items():
        if a.get(name):
            raise NotExpressible(asks)
    if a.get("optimizer", "adam") != "adam":
        raise NotExpressible(f"the optimizer {a['optimizer']}")
    if form["gpus"] is None:
        raise NotExpressible("a release run: nothing says on how many GPUs")
    device = _device(machine)
    request = {
        "model": _config(a),
        "framework": "megatron",
        "task": {
            "sequence_length": a["seq-length"], "global_batch": a["global-batch-size"],
            "packing": False,
        },
        "precision": _precision(a),
        "micro_batch": a["micro-batch-size"],
        "attention": _attention(machine, form, device),
        "recompute": a.get("recompute-granularity", "none"),
        "parallel": _parallel(a, form["gpus"]),
        "hardware": {"device": device, "count": form["gpus"]},
        "options": _options(a, form["environment"]),
    }  # fmt: skip
    return Translated(request, "peak_allocated")


def _precision(a: Arguments) -> str:
    """FP8 with one scale a tensor is described; blocks of it with scales of their own are not."""
    if a.get("fp8-format"):
        if a.get("fp8-recipe", "delayed") not in ("delayed", "tensorwise"):
            raise NotExpressible(f"FP8 by the recipe {a['fp8-recipe']}")
        return "fp8-mixed"
    return "bf16-mixed" if a.get("bf16") else "fp16-mixed" if a.get("fp16") else "fp32"


def _device(machine: str) -> str:
    """The machine's GPU; `lts` and `dev` alone are the A100 of the tests' first cluster."""
    return next((id for name, id in DEVICES.items() if name in machine), DEVICES["a100"])


def _config(a: Arguments) -> dict[str, Any]:
    """config.json: GPT-2's block, or Llama's where one of Megatron's options needs it."""
    hidden, heads = a["hidden-size"], a["num-attention-heads"]
    ffn = a.get("ffn-hidden-size") or (
        hidden * 8 // 3 // 64 * 64 if a.get("swiglu") else 4 * hidden
    )
    vocab = a.get("vocab-size") or (
        256000 if "SentencePiece" in str(a.get("tokenizer-type")) else 50257
    )
    tied = not a.get("untie-embeddings-and-output-weights")
    if a.get("swiglu") or a.get("group-query-attention") or a.get("kv-channels"):
        return {
            "name": "GPT", "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
            "intermediate_size": ffn, "num_hidden_layers": a["num-layers"],
            "num_attention_heads": heads, "head_dim": a.get("kv-channels") or hidden // heads,
            "num_key_value_heads": a.get("num-query-groups") or heads,
            "max_position_embeddings": a["max-position-embeddings"], "tie_word_embeddings": tied,
            "attention_bias": not a.get("disable-bias-linear"),
            "mlp_bias": not a.get("disable-bias-linear"),
        }  # fmt: skip
    return {
        "name": "GPT", "model_type": "gpt2", "vocab_size": vocab, "n_embd": hidden, "n_inner": ffn,
        "n_layer": a["num-layers"], "n_head": heads, "n_positions": a["max-position-embeddings"],
        "tie_word_embeddings": tied,
    }  # fmt: skip


def _attention(machine: str, form: dict[str, Any], device: str) -> str:
    """The backend that Transformer Engine chooses where the arguments leave it open.

    cuDNN's on Hopper; on Ampere FlashAttention's, and on Blackwell where the step is to be
    deterministic, which cuDNN's is not there. Megatron's own layers compute it unfused.
    """
    a, environment = form["arguments"], form["environment"]
    if a.get("transformer-impl") == "local":
        return "eager"
    asked = {"unfused": "eager", "flash": "flash", "fused": "cudnn", "local": "eager"}
    if a.get("attention-backend") in asked:
        return asked[a["attention-backend"]]
    exact = str(environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", 1)) == "0"
    if machine.startswith("lts") and form["machines"][machine] < LTS_FLASH:
        return "eager"
    if device == "a100-sxm-80" or (device == "gb200" and exact):
        return "flash"
    return "cudnn"


def _parallel(a: Arguments, gpus: int) -> dict[str, Any]:
    tp, pp = a.get("tensor-model-parallel-size", 1), a.get("pipeline-model-parallel-size", 1)
    cp, layers = a.get("context-parallel-size", 1), a["num-layers"]
    dp = gpus // (tp * pp * cp)
    instances = a.get("num-distributed-optimizer-instances", 1)
    cut = bool(a.get("use-distributed-optimizer"))
    each = a.get("num-layers-per-virtual-pipeline-stage")
    chunks = a.get("num-virtual-stages-per-pipeline-rank") or (layers // pp // each if each else 1)
    return {
        "dp_replicate": instances if cut else dp, "dp_shard": dp // instances if cut else 1,
        "zero": 1, "tp": tp, "pp": pp, "cp": cp, "ep": a.get("expert-model-parallel-size", 1),
        "sequence_parallel": bool(a.get("sequence-parallel")) and tp > 1,
        "virtual_pp": chunks,
    }  # fmt: skip


def _options(a: Arguments, environment: dict[str, Any]) -> dict[str, Any]:
    """Megatron's own arguments, under memfit's names for them."""
    options: dict[str, Any] = {
        "rank": "last",
        "transformer_impl": a.get("transformer-impl", "transformer_engine"),
        "hidden_dropout": float(a.get("hidden-dropout", 0.1)),
        "attention_dropout": float(a.get("attention-dropout", 0.1)),
        "position_embedding_type": a.get("position-embedding-type", "learned_absolute"),
        "swiglu": "on" if a.get("swiglu") else "off",
        "use_distributed_optimizer": bool(a.get("use-distributed-optimizer")),
        "gradient_accumulation_fusion": not a.get("no-gradient-accumulation-fusion"),
        "deterministic_mode": str(environment.get("CUBLAS_WORKSPACE_CONFIG")) == ":4096:8",
        "accumulate_allreduce_grads_in_fp32": not a.get("fp16")
        or bool(a.get("accumulate-allreduce-grads-in-fp32")),
        "cross_entropy_loss_fusion": a.get("cross-entropy-fusion-impl", "native")
        if a.get("cross-entropy-loss-fusion")
        else "none",
        "fp8_param_gather": bool(a.get("fp8-param-gather")),
        "masked_softmax_fusion": not a.get("no-masked-softmax-fusion"),
        "moe_grouped_gemm": bool(a.get("moe-grouped-gemm")),
        "create_attention_mask_in_dataloader": not a.get("no-create-attention-mask-in-dataloader"),
    }
    for name in (
        "make-vocab-size-divisible-by", "disable-bias-linear", "qk-layernorm",
        "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
        "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
        "recompute-num-layers", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
        "moe-shared-expert-intermediate-size", 
        "expert-tensor-parallel-size",
    ):  # fmt: skip
        if a.get(name):
            options[name.replace("-", "_")] = a[name]
    group = a.get("microbatch-group-size-per-virtual-pipeline-stage")
    if group:
        options["microbatch_group_size_per_vp_stage"] = group
    if isinstance(a.get("recompute-modules"), str):
        options["recompute_modules"] = a["recompute-modules"].strip("[]").replace(" ", ",")
    return options
