"""Tiny recipes of every family, devices, and the real step watched on this CPU."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import torch
from msgspec.structs import replace

from gated_families import LORA_TARGETS as GATED_TARGETS
from gated_families import add_others, gated
from memfit.certify import BatchShape
from memfit.core.units import GIB
from memfit.families import find_family, read_model
from memfit.families.capabilities.lean import find_lean
from memfit.plan.request.model_reference import with_head
from memfit.records.hardware import Device, Link
from memfit.records.ledger import Phase
from memfit.records.model import ModelReference
from memfit.records.recipe import ADAPTED, Freeze, Lora, Optimizer, Recipe
from memfit.train.measure.live import LiveBytes
from memfit.train.model.weights import fill_weights
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.step import Batch, RatedBatch, step

_LLAMA_SHAPED = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 250,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
_LATENT = {
    **_LLAMA_SHAPED, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 0,
}  # fmt: skip
_GPT_OSS = {
    **{k: v for k, v in _LLAMA_SHAPED.items() if k != "rms_norm_eps"}, "head_dim": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA_SHAPED},
    "gpt_oss": {"model_type": "gpt_oss", **_GPT_OSS},
    "deepseek_v2": {
        "model_type": "deepseek_v2", **_LATENT, "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT},
    "mistral": {"model_type": "mistral", **_LLAMA_SHAPED, "sliding_window": None},
    "mixtral": {
        "model_type": "mixtral", **_LLAMA_SHAPED, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", **_LLAMA_SHAPED, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", **_LLAMA_SHAPED, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", **_LLAMA_SHAPED, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "use_qk_norm": True,
    },
    "qwen2": {"model_type": "qwen2", **_LLAMA_SHAPED, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_LLAMA_SHAPED, "head_dim": 32},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 250,
        "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 250,
        "max_position_embeddings": 256, "rotary_pct": 0.25,
    },
    "opt": {
        "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 32, "ffn_dim": 176,
        "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 250,
        "max_position_embeddings": 256,
    },
    "gptj": {
        "model_type": "gptj", "vocab_size": 250, "n_embd": 64, "n_layer": 3, "n_head": 4,
        "n_positions": 256, "rotary_dim": 8,
    },
    "falcon": {
        "model_type": "falcon", "vocab_size": 250, "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 256,
    },
    **gated(_LLAMA_SHAPED),
    "bloom": {
        "model_type": "bloom", "vocab_size": 250, "hidden_size": 64, "n_layer": 3, "n_head": 4,
        "seq_length": 256,
    },
    "mpt": {
        "model_type": "mpt", "vocab_size": 250, "d_model": 64, "n_layers": 3, "n_heads": 4,
        "max_seq_len": 256,
    },
}  # fmt: skip
add_others(CONFIGS, _LLAMA_SHAPED)
FAMILIES = tuple(CONFIGS)
OWN_ATTENTION = ("bloom", "mpt")  # of these classes: `math` alone, and no packed rows
# whose linear attention carries a state over a whole row
RECURRENT = tuple(
    family for family in FAMILIES if find_family(family).architecture(CONFIGS[family]).recurrent
)
MATH_ONLY = (*OWN_ATTENTION, "gpt_oss", "gemma2")
ANY_KERNEL = tuple(family for family in FAMILIES if family not in MATH_ONLY)
LORA_TARGETS = {
    "deepseek_v2": ("q_proj",), "deepseek_v3": ("q_b_proj", "kv_b_proj"),
    "gpt2": ("c_attn",), "gpt_neox": ("query_key_value",), "falcon": ("query_key_value",),
    **GATED_TARGETS,
    "bloom": ("query_key_value",), "mpt": ("Wqkv",),
}  # fmt: skip

_ADAMW = Optimizer(
    name="adamw", implementation="fused", learning_rate=1e-3, weight_decay=0.0, beta1=0.9,
    beta2=0.95, eps=1e-8, momentum=0.9, schedule="cosine", warmup_steps=0, clip_norm=1.0,
)  # fmt: skip


def possible(family: str, changes: dict[str, Any]) -> bool:
    """Whether a family's step can be so: see `memfit.families.capabilities.limits`."""
    if family in ("gptj", "phi"):
        return changes.get("loss") != "chunked"
    if changes.get("objective") == "reward" and not find_family(family).scored:
        return False
    lean = find_lean(find_family(family).architecture(CONFIGS[family]))
    if not {*changes.get("lean", ())} <= {*lean}:
        return False
    if changes.get("qat") and find_family(family).architecture(CONFIGS[family]).experts.count:
        return False
    if family == "gpt_oss" and changes.get("selective_blocks"):
        return False  # its experts add their bias into products
    if family in MATH_ONLY and changes.get("attention", "math") != "math":
        return False
    return not (family in (*OWN_ATTENTION, *RECURRENT) and changes.get("packing"))


def make_recipe(
    family: str = "llama", config: dict[str, Any] | None = None, **changes: Any
) -> Recipe:
    """A tiny full fp32 recipe with some knobs changed; those of the optimizer by its names."""
    of_optimizer = {k: changes.pop(k) for k in list(changes) if hasattr(_ADAMW, k)}
    if changes.get("method") in ADAPTED and "lora" not in changes:
        targets = LORA_TARGETS.get(family, ("q_proj", "v_proj"))
        changes["lora"] = Lora(rank=4, alpha=8.0, targets=targets)
    if family in MATH_ONLY:
        changes.setdefault("attention", "math")
    recipe = Recipe(
        model=ModelReference(name=family, source="", config=config or CONFIGS[family]),
        weights="random", objective="pretrain", method="full", lora=Lora(), freeze=Freeze(),
        base_format="fp32", precision="fp32", optimizer=replace(_ADAMW, **of_optimizer),
        recompute_blocks=0, attention="flash", loss="plain", loss_chunk=0, sequence_length=48,
        packing=False, micro_batch=2, accumulation=1, steps=10, device="cpu", seed=0,
    )  # fmt: skip
    made = replace(recipe, **changes)
    return replace(made, model=with_head(made.model, made.objective))


def make_device(vendor: str, name: str, capability: str | None) -> Device:
    return Device(
        id=name, name=name, vendor=vendor, architecture="", compute_capability=capability,
        match=(), memory=80 * GIB, memory_driver=80 * GIB, memory_datasheet="80 GB",
        bandwidth=None, flops={}, link=Link(name="", unidirectional=None), devices_per_node="1",
        watts=None, prices=(), unverified=(), notes="", sources=(), checked="2026-11-20",
    )  # fmt: skip


CPU = make_device("CPU", "cpu", None)
H100 = make_device("NVIDIA", "h100-sxm", "9.0")
A100 = make_device("NVIDIA", "a100-80gb", "8.0")


def build_watched(recipe: Recipe, fill: Any = fill_weights) -> tuple[Built, LiveBytes]:
    """The recipe's model and optimizer on this CPU, filled, and what counts their bytes."""
    model = build_model(recipe, "cpu")
    fill(model, recipe)
    live = LiveBytes("cpu")
    live.register_model(model)
    optimizer = build_optimizer(recipe, model)
    live.register_optimizer(optimizer)
    return Built(recipe, model, optimizer), live


def watch_real_step(
    recipe: Recipe,
    shapes: tuple[BatchShape, ...],
    steps: int = 2,
    *,
    fill: Any = fill_weights,
    inside: Any = nullcontext,
) -> LiveBytes:
    """Build, fill and step for real on this CPU, as the trace does on fake tensors.

    inside: a context that is given the counter and entered around the steps.
    """
    built, live = build_watched(recipe, fill)
    vocab = read_model(recipe.model).architecture.vocab  # of stages, not all have an embedding
    if built.scaler is not None:  # a step that overflows is skipped, and makes no states
        built.scaler.load_state_dict({**built.scaler.state_dict(), "scale": 256.0})

    def batches():
        for shape in shapes:
            yield make_batch(recipe, shape, vocab, live)

    targets = sum(s.rows * s.tokens for s in shapes)
    gc.collect()
    gc.disable()
    try:
        with live, inside(live):
            live.enter(Phase.FIRST_STEP)
            step(built, batches(), targets, lambda _: live.enter(Phase.FIRST_STEP))
            for _ in range(steps - 1):
                step(built, batches(), targets, live.enter)
    finally:
        gc.enable()
    return live


def make_rated(recipe: Recipe, tokens: torch.Tensor, reference: torch.Tensor | None):
    if not recipe.rates:
        return None
    desirable = torch.arange(len(tokens)) % 2 == 0
    if not recipe.mismatches:
        return RatedBatch(desirable)
    other = None if reference is None else reference.clone()
    return RatedBatch(desirable, tokens.clone(), tokens.clone(), other)


def make_batch(recipe: Recipe, shape: BatchShape, vocab: int, live: LiveBytes) -> Batch:
    """Random tokens of that shape, registered as a batch."""
    tokens = torch.randint(0, vocab, (shape.rows, shape.tokens))
    positions = None
    if shape.documents is not None:
        rows = [torch.cat([torch.arange(n) for n in row]) for row in shape.documents]
        positions = torch.stack(rows)
    elif recipe.parallel.cp > 1:
        positions = torch.arange(shape.tokens).unsqueeze(0)
    precomputed = recipe.preference.reference == "precomputed"
    reference = torch.zeros(shape.rows) if precomputed else None
    context = tokens.clone() if recipe.learns == "conversations" else None
    batch = Batch(
        tokens, tokens.clone(), positions, shape.documents, reference, context=context,
        rated=make_rated(recipe, tokens, reference),
    )  # fmt: skip
    live.register_batch(*batch.tensors)
    return batch
