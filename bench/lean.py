"""What a Llama block keeps for its backward, and how long it takes, by each road to keep less.

    python bench/lean.py [--rounds N] [--tokens N] [--update]

One block of Llama-2-7B's proportions on this CPU: Hugging Face's eager code, memfit's lean
functions, torch's selective recomputation of everything but products and attention,
torch.compile by its partitioner's own rules, and memfit's `compile: blocks`, without three of them
(`memfit.train.model.partition`). Bytes are those that torch's profiler sees allocated and not freed
by the forward of a second block behind a first, for each token and hidden unit; seconds are of the
processor, for a forward and backward, the roads taken in turn, as medians of ratios to the eager
code of the same round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memfit.records.model import ModelReference
from memfit.records.recipe import LEAN, Freeze, Lora, Optimizer, Recipe
from memfit.train.model.hugging_face import parts
from memfit.train.step.build import build_model

RESULTS = Path(__file__).parent / "results" / "lean.json"
HIDDEN, FFN, HEADS = 512, 1376, 4  # Llama-2-7B's 4096, 11008 and heads of 128, by 8
PRODUCTS = 7  # of a block; no derivative needs the last one's result
KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
MODES = {
    "bf16": {"precision": "bf16", "base_format": "bf16"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "fp32": {},
    "lora bf16": {
        "precision": "bf16", "base_format": "bf16", "method": "lora",
        "lora": Lora(rank=16, alpha=32.0, targets=("q_proj", "v_proj")),
    },
}  # fmt: skip
Road = Callable[[Tensor], Tensor]


def make_recipe(tokens: int, **changes: Any) -> Recipe:
    """One block; nothing of it but the block is run."""
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "vocab_size": 64, "max_position_embeddings": tokens,
    }  # fmt: skip
    adamw = Optimizer(
        name="adamw", implementation="fused", learning_rate=1e-3, weight_decay=0.0, beta1=0.9,
        beta2=0.95, eps=1e-8, momentum=0.9, schedule="constant", warmup_steps=0, clip_norm=0.0,
    )  # fmt: skip
    recipe = Recipe(
        model=ModelReference(name="block", source="", config=config), weights="random",
        objective="pretrain", method="full", lora=Lora(), freeze=Freeze(), base_format="fp32",
        precision="fp32", optimizer=adamw, recompute_blocks=0, attention="flash", loss="plain",
        loss_chunk=0, sequence_length=tokens, packing=False, micro_batch=1, accumulation=1,
        steps=1, device="cpu-x86", seed=0,
    )  # fmt: skip
    return replace(recipe, **changes)


def make_block(recipe: Recipe) -> Road:
    """The first block of a model built as memfit trains it, with random weights."""
    model = build_model(recipe, "cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    where = parts(model)
    positions = torch.arange(recipe.sequence_length).unsqueeze(0)
    dtype = getattr(torch, recipe.trainable_dtype)
    rotation: Any = where.backbone.rotary_emb
    turn = rotation(torch.zeros(1, dtype=dtype), positions)
    return partial(where.blocks[0], position_embeddings=turn, position_ids=positions)


def contexts() -> Any:
    """torch's selective recomputation: products and attention are kept, all else is run again."""
    seen = {False: 0, True: 0}

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        seen[ctx.is_recompute] += operator is torch.ops.aten.mm.default
        last = operator is torch.ops.aten.mm.default and seen[ctx.is_recompute] == PRODUCTS
        keep = operator in KEPT and not last
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def roads(recipe: Recipe) -> dict[str, Road]:
    """The same block, five ways."""
    eager, lean = make_block(recipe), make_block(replace(recipe, lean=LEAN))
    selective = partial(checkpoint, eager, use_reentrant=False, context_fn=contexts)
    compiled, blocks = torch.compile(eager, dynamic=False), replace(recipe, compile="blocks")
    return {
        "eager": eager, "lean": lean, "selective": selective, "compile": compiled,
        "blocks": make_block(blocks),
    }  # fmt: skip


def run(road: Road, recipe: Recipe, *, backward: bool = True) -> Tensor | None:
    """A forward, and its backward."""
    dtype = getattr(torch, recipe.trainable_dtype)
    x = torch.ones(1, recipe.sequence_length, HIDDEN, dtype=dtype, requires_grad=True)
    low = getattr(torch, recipe.compute_dtype) if recipe.autocast else torch.bfloat16
    with torch.autocast("cpu", low, enabled=recipe.autocast, cache_enabled=False):
        out = road(x)
    if not backward:
        return out
    out.sum().backward()
    return None


def count_kept(road: Road, recipe: Recipe) -> float:
    """Bytes that a second block leaves allocated beside a first, a token and hidden unit."""
    behind = _count(lambda x: road(road(x)), recipe)
    return (behind - _count(road, recipe)) / (recipe.sequence_length * HIDDEN)


def _count(road: Road, recipe: Recipe) -> int:
    dtype = getattr(torch, recipe.trainable_dtype)
    x = torch.ones(1, recipe.sequence_length, HIDDEN, dtype=dtype, requires_grad=True)
    low = getattr(torch, recipe.compute_dtype) if recipe.autocast else torch.bfloat16
    activities = [torch.profiler.ProfilerActivity.CPU]
    autocast = torch.autocast("cpu", low, enabled=recipe.autocast, cache_enabled=False)
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    with profiler as profile, autocast:
        out = road(x)
    events = profile.profiler.kineto_results.events()
    kept = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del out
    return int(kept)


def measure(recipe: Recipe, rounds: int) -> dict[str, dict[str, float]]:
    """Bytes and the ratio of seconds, by road."""
    found = roads(recipe)
    for road in found.values():
        for _ in range(2):
            run(road, recipe)
    kept = {name: count_kept(road, recipe) for name, road in found.items()}
    ratios: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        seconds = {}
        for name, road in found.items():
            start = time.process_time()
            run(road, recipe)
            seconds[name] = time.process_time() - start
        for name, taken in seconds.items():
            ratios[name].append(taken / seconds["eager"])
    return {
        name: {"bytes": round(kept[name], 2), "time": round(statistics.median(ratios[name]), 3)}
        for name in found
    }


def main() -> None:
    """Print a row a mode, and write them with --update."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only", default="", help="modes that hold this text")
    parser.add_argument("--update", action="store_true", help="write the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for name, changes in MODES.items():
        if options.only in name:
            rows[name] = measure(make_recipe(options.tokens, **changes), options.rounds)
            print(f"{name:12}", json.dumps(rows[name]), flush=True)
    about = {
        "block": {"hidden": HIDDEN, "ffn": FFN, "heads": HEADS, "tokens": options.tokens},
        "rounds": options.rounds, "torch": torch.__version__, "processor": platform.machine(),
        "threads": 1,
    }  # fmt: skip
    if options.update:
        text = json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
