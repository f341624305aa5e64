"""Predicted against certified memory over a grid of configurations, on a fake CPU and a fake GPU.

    python bench/predict_grid.py [--only SUBSTRING] [--everywhere] [--update] [--jobs N]

The prediction never imports torch's step; the certificate traces it. One JSON line a row, and a
table. Exits 1 when a limit of the README is missed: median 0.5 %, maximum 2 % of peak allocated,
and 5 % of every component above 16 MiB at every phase's peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.adapters.coded import check_base
from memfit.errors import InvalidRequest
from memfit.families import family_of, read_model
from memfit.families.limits import own_kernels
from memfit.hardware import Device
from memfit.ledger import Kind, Ledger, Phase
from memfit.model import ModelReference
from memfit.optimizers import default_implementation, find_optimizer
from memfit.plan.memory import predict_memory
from memfit.recipe import Freeze, Lora, Optimizer, Preference, Quantisation, Recipe
from memfit.sizes.kernels import heads_of, refusal, usable
from memfit.units import MIB, show_gib

DEVICES = ("cpu-x86", "h100-sxm")
INT8 = Quantisation(outlier_threshold=6.0, outlier_share=0.01)
COMPONENT_FLOOR = 16 * MIB
MEDIAN, MAXIMUM, COMPONENT = 0.005, 0.02, 0.05
Sizes = dict[str, dict[str, int]]  # bytes by phase and kind; "total" among the kinds
# What a replay of the allocator adds to live tensors (unsplit rests of blocks) belongs to no kind.
COMPARED = tuple(k for k in Kind if k is not Kind.FRAGMENTATION)

SMALL: dict[str, dict[str, Any]] = {
    "demo-llama-10m": {
        "model_type": "llama", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
    "small-qwen3-30m": {
        "model_type": "qwen3", "vocab_size": 16384, "hidden_size": 384, "intermediate_size": 1152,
        "num_hidden_layers": 10, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "gptj-6b": {
        "model_type": "gptj", "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16,
        "n_positions": 2048, "rotary_dim": 64,
    },
    "small-glm4-60m": {
        "model_type": "glm4", "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 4096,
    },
}  # fmt: skip

MODELS = (
    "demo-llama-10m", "small-qwen3-30m", "gpt2", "gpt2-medium", "gpt2-xl", "pythia-70m",
    "pythia-410m", "pythia-1.4b", "pythia-12b", "gpt-neox-20b", "smollm2-135m", "tinyllama-1.1b",
    "llama-2-7b", "llama-3.1-8b", "mistral-7b-v0.1", "mistral-7b-v0.3", "qwen2-0.5b", "qwen2.5-7b",
    "qwen2.5-32b", "qwen3-0.6b", "qwen3-4b", "qwen3-14b", "llama-3-70b", "opt-125m", "opt-350m",
    "opt-6.7b", "gptj-6b", "falcon-7b", "falcon-40b", "bloom-560m", "bloom-7b1", "mpt-7b",
    "phi-3-mini-4k-instruct", "phi-4", "gemma-2b", "gemma-7b", "gemma-2-2b", "gemma-2-9b",
    "gemma-3-1b-it", "gemma-3-4b-it", "olmo-2-1b", "olmo-2-7b", "granite-3.1-2b-base",
    "smollm3-3b", "stablelm-3b-4e1t", "stablelm-2-1_6b", "small-glm4-60m", "phi-2",
    "mixtral-8x7b-v0.1", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "glm-4.5-air", "gpt-oss-20b",
    "deepseek-v2-lite", "deepseek-v3",
)  # fmt: skip

# method, precision, storage of frozen weights
METHODS = (
    ("full", "fp32", "fp32"), ("full", "bf16", "bf16"), ("full", "bf16-mixed", "fp32"),
    ("lora", "bf16", "bf16"), ("lora", "bf16-mixed", "bf16"), ("freeze", "bf16-mixed", "bf16"),
    ("freeze", "fp32", "fp32"), ("lora", "fp32", "fp32"), ("freeze", "bf16", "bf16"),
)  # fmt: skip
OPTIMIZERS = (
    ("adamw", "fused"), ("adamw", "foreach"), ("adamw", "loop"), ("sgd", "foreach"), ("sgd", "loop")
)  # fmt: skip
RECOMPUTE = ("none", "half", "full")
BATCHES = ((1, 4096), (8, 128), (2, 1024), (4, 512), (1, 8192), (2, 2048), (8, 1024))
A_MODEL = 6  # recipes of each model
# Settings that are only taken when a request names them: two more recipes of each model.
NAMED: tuple[dict[str, Any], ...] = (
    {"precision": "fp16-mixed", "base_format": "fp16", "attention": "cudnn"},
    {"optimizer": ("adamw8bit", "loop")},
    {"precision": "fp16-mixed", "base_format": "fp16", "optimizer": ("adamw", "foreach")},
    {"optimizer": ("adamw4bit", "loop"), "attention": "cudnn"},
    {"precision": "fp16-mixed", "base_format": "fp16", "optimizer": ("adamw8bit", "fused")},
    {"optimizer": ("adamwfp8", "loop")},
    {"optimizer": ("adamw8bit", "fused"), "attention": "cudnn"},
    {"optimizer": ("muon", "loop")},
    {"optimizer": ("adamw", "fused"), "in_backward": True},
    {"optimizer": ("adafactor", "loop")},
    {"optimizer": ("adamw8bit-bnb", "fused"), "attention": "cudnn"},
    {"optimizer": ("adamw8bit", "loop"), "in_backward": True},
    {"optimizer": ("adamwbf16", "loop"), "precision": "bf16", "base_format": "bf16"},
)
# Adapters over a quantised base: two recipes of each model that can have one.
QUANTISED: tuple[dict[str, Any], ...] = (
    {"base_format": "int8", "quantisation": INT8, "precision": "bf16-mixed"},
    {"base_format": "nf4", "quantisation": Quantisation(double=True), "precision": "bf16"},
    {"base_format": "int8", "quantisation": INT8, "precision": "bf16"},
    {"base_format": "fp4", "quantisation": Quantisation(), "precision": "fp16-mixed"},
    {"base_format": "nf4", "quantisation": Quantisation(double=True), "precision": "bf16-mixed"},
)  # fmt: skip
# Pairs: one more recipe of every second model.
PAIRS: tuple[dict[str, Any], ...] = (
    {"method": "lora"},
    {"method": "full"},
    {"method": "lora", "precision": "bf16-mixed", "base_format": "bf16"},
    {"method": "lora", "precision": "bf16", "base_format": "bf16"},
    {"method": "freeze"},
)


def grid(everywhere: bool) -> list[tuple[str, Recipe, Device]]:
    """Every model with six recipes; the knobs turn at different speeds, so all values meet.

    Half of the recipes are for the one device and half for the other, or all for both.
    """
    found = []
    for n in range(len(MODELS) * A_MODEL):
        recipe = make_recipe(MODELS[n // A_MODEL], n)
        own = DEVICES[(n // 2 + n // 7) % 2]
        for name in DEVICES if everywhere else (own,):
            device = catalog.find_device(name)
            found.append((describe(recipe), on(recipe, device), device))
    for n in range(2 * len(MODELS)):
        recipe = name_settings(make_recipe(MODELS[n // 2], 7 * n + 3), NAMED[n % len(NAMED)])
        own = DEVICES[1 if recipe.attention == "cudnn" else (n // 2) % 2]
        for name in DEVICES if everywhere else (own,):
            device = catalog.find_device(name)
            placed = on(recipe, device)
            found.append((describe(placed), placed, device))
    for n in range(2 * len(MODELS)):
        recipe = quantise(make_recipe(MODELS[n // 2], 5 * n + 2), QUANTISED[n % len(QUANTISED)])
        if recipe is None:
            continue
        for name in DEVICES if everywhere else (DEVICES[n // 2 % 2],):
            device = catalog.find_device(name)
            placed = on(recipe, device)
            found.append((describe(placed), placed, device))
    for n in range(0, len(MODELS), 2):
        recipe = prefer(make_recipe(MODELS[n], 5 * n + 1), PAIRS[n // 2 % len(PAIRS)])
        own = DEVICES[n // 2 % 2]
        for name in DEVICES if everywhere else (own,):
            placed = on(recipe, catalog.find_device(name))
            found.append((describe(placed), placed, catalog.find_device(name)))
    return found


def quantise(recipe: Recipe, named: dict[str, Any]) -> Recipe | None:
    """The recipe as adapters over a quantised base; None where the model cannot have one."""
    model = read_model(recipe.model)
    try:
        check_base(model, named["base_format"], "lora", 1)
    except InvalidRequest:
        return None
    lora = recipe.lora if recipe.method == "lora" else _lora(recipe.model, 0)
    return fit(replace(recipe, method="lora", lora=lora, freeze=Freeze(), **named))


def prefer(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe over pairs of rows: of an adapter the reference runs, of others it is given."""
    method = changes["method"]
    lora = method == "lora"
    reference: Any = "adapter-off" if lora else "precomputed"
    full = replace(recipe, **changes)
    return fit(
        replace(
            full,
            objective="dpo",
            preference=Preference(beta=0.1, reference=reference),
            lora=_lora(recipe.model, full.loss_chunk) if lora else Lora(),
            freeze=Freeze(last_blocks=2) if method == "freeze" else Freeze(),
            base_format=full.base_format if lora else MATCHING.get(full.precision, "fp32"),
            packing=False,
            micro_batch=full.micro_batch + full.micro_batch % 2,
        )
    )


MATCHING = {"bf16": "bf16", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


def fit(recipe: Recipe) -> Recipe:
    """The recipe without what the model's class excludes: see `memfit.families.limits`."""
    architecture = read_model(recipe.model).architecture
    if only := own_kernels(architecture):
        recipe = replace(recipe, attention=only[0])
    if architecture.alibi:
        recipe = replace(recipe, packing=False)
    if architecture.head_bias:
        recipe = replace(recipe, loss="plain", loss_chunk=0)
    return recipe


def name_settings(recipe: Recipe, named: dict[str, Any]) -> Recipe:
    """The recipe with settings that no search chooses."""
    changes = dict(named)
    if "optimizer" in changes:
        name, implementation = changes.pop("optimizer")
        changes["optimizer"] = replace(recipe.optimizer, name=name, implementation=implementation)
    if changes.pop("in_backward", False):
        within = replace(changes["optimizer"], in_backward=True, clip_norm=0.0)
        changes |= {"optimizer": within, "accumulation": 1}
        if recipe.scaled:
            changes |= {"precision": "bf16-mixed"}
    if recipe.method == "full":
        changes.pop("base_format", None)
    if recipe.method == "lora":
        changes["lora"] = replace(recipe.lora, dropout=0.05)
    return fit(replace(recipe, **changes))


def make_recipe(name: str, n: int) -> Recipe:
    """The n-th setting of all knobs, on one model."""
    reference = find(name)
    model = read_model(reference)
    method, precision, base = METHODS[n % len(METHODS)]
    optimizer, implementation = OPTIMIZERS[n % len(OPTIMIZERS)]
    rows, tokens = BATCHES[n % len(BATCHES)]
    layers = model.architecture.layers
    recompute = {"none": 0, "half": layers // 2, "full": layers}[RECOMPUTE[n // 2 % 3]]
    chunked = n // 3 % 2 == 1
    window = model.architecture.sliding_window or tokens
    tokens = min(tokens, model.architecture.max_sequence, window)
    recipe = Recipe(
        model=reference,
        weights="random",
        objective="pretrain",
        method=method,
        lora=_lora(reference, n) if method == "lora" else Lora(),
        freeze=Freeze(last_blocks=1 + n % 3) if method == "freeze" else Freeze(),
        base_format=base,
        precision=precision,
        optimizer=Optimizer(
            name=optimizer, implementation=implementation, learning_rate=1e-4,
            weight_decay=0.01 if n % 4 else 0.0, beta1=0.9, beta2=0.999, eps=1e-8, momentum=0.9,
            schedule="constant", warmup_steps=0, clip_norm=float(n % 3 > 0),
        ),
        recompute_blocks=recompute,
        attention="math" if n % 11 == 5 else "flash",
        loss="chunked" if chunked else "plain",
        loss_chunk=(256, 1024, 4096)[n % 3] if chunked else 0,
        sequence_length=tokens,
        packing=n % 5 == 2,
        micro_batch=rows,
        accumulation=1 + n % 2,
        steps=10,
        device=DEVICES[0],
        seed=0,
    )  # fmt: skip
    return fit(recipe)


def _lora(reference: ModelReference, n: int) -> Lora:
    targets = family_of(reference).default_targets(read_model(reference).architecture)
    return Lora(rank=(8, 64)[n % 2], alpha=16.0, targets=targets)


def find(name: str) -> ModelReference:
    """A catalogue row, or one of the small models above."""
    if name in SMALL:
        return ModelReference(name=name, source="", config=SMALL[name])
    return catalog.find_model(name).reference()


def describe(recipe: Recipe) -> str:
    """One line that names the configuration."""
    parts = [
        recipe.model.name, recipe.method, recipe.precision,
        f"{recipe.micro_batch}x{recipe.sequence_length}x{recipe.accumulation}",
        f"recompute {recipe.recompute_blocks}",
        f"{recipe.optimizer.name} {recipe.optimizer.implementation}", recipe.loss,
        recipe.attention,
    ]  # fmt: skip
    parts += [recipe.coding] if recipe.coding else []
    parts += ["in backward"] if recipe.optimizer.in_backward else []
    pairs = [f"dpo {recipe.preference.reference}"] if recipe.prefers else []
    return ", ".join(parts + (["packed"] if recipe.packing else []) + pairs)


def on(recipe: Recipe, device: Device) -> Recipe:
    """The recipe for a device: the kernel and the implementation that it has, or the nearest."""
    heads = heads_of(read_model(recipe.model).architecture, recipe.sequence_length)
    facts = {"platform": device.platform, "capability": device.capability}
    kernel: Any = recipe.attention
    if refusal(kernel, recipe.compute_dtype, heads, **facts):
        kernel = usable(recipe.compute_dtype, heads, **facts)[0]
    optimizer = recipe.optimizer
    if device.is_cpu and optimizer.implementation in find_optimizer(optimizer).cuda_only:
        own = default_implementation(optimizer.name, cuda=False)
        optimizer = replace(optimizer, implementation=own)
    return replace(recipe, device=device.id, attention=kernel, optimizer=optimizer)


def compare(name: str, recipe: Recipe, device: Device) -> dict[str, Any]:
    """One row: the prediction beside a certificate made now."""
    from memfit.certify.certificate import make_certificate

    predicted, seconds = predict(recipe, device)
    certificate = make_certificate(recipe, device, None, None)
    traced = {
        phase: {"total": nbytes}
        | {
            str(kind): size
            for kind, size in certificate.ledger.by_kind(Phase(phase)).items()
            if kind in COMPARED and size > COMPONENT_FLOOR
        }
        for phase, nbytes in certificate.phases.items()
        if Phase(phase) in predicted.phases
    }
    row = {
        "configuration": name,
        "device": device.id,
        "digest": recipe.digest,
        "certified_peak_phase": certificate.memory.peak_phase,
        "predict_seconds": round(seconds, 5),
        "certify_seconds": certificate.seconds,
        "traced": traced,
    }
    return judge(row, predicted)


def judge(row: dict[str, Any], predicted: Ledger) -> dict[str, Any]:
    """The row with the errors of this prediction against what the row's certificate traced."""
    foretold = {
        phase: {"total": predicted.total(Phase(phase))}
        | {
            kind: predicted.by_kind(Phase(phase)).get(Kind(kind), 0)
            for kind in sizes
            if kind != "total"
        }
        for phase, sizes in row["traced"].items()
    }
    component, worst = "", 0.0
    for phase, kind, error in errors(row["traced"], foretold):
        if kind != "total" and abs(error) > abs(worst):
            component, worst = f"{kind} at {phase}", error
    certified = max(sizes["total"] for sizes in row["traced"].values())
    return row | {
        "foretold": foretold,
        "predicted": predicted.peak,
        "certified": certified,
        "error": predicted.peak / certified - 1,
        "peak_phase": str(predicted.peak_phase),
        "worst_component": component,
        "worst_component_error": worst,
    }


def errors(traced: Sizes, foretold: Sizes) -> list[tuple[str, str, float]]:
    """Phase, component or "total", and the error of the prediction as a share."""
    return [
        (phase, kind, foretold[phase][kind] / size - 1)
        for phase, sizes in traced.items()
        for kind, size in sizes.items()
    ]


def predict(recipe: Recipe, device: Device) -> tuple[Ledger, float]:
    """The prediction of a recipe, and the seconds it took."""
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    started = time.perf_counter()
    predicted = predict_memory(model, recipe, device)
    return predicted, time.perf_counter() - started


def read_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of an earlier run, by configuration and device."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["configuration"], row["device"]): row for row in rows}


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [
        "| configuration | device | certified | predicted | error | worst component |",
        "|---|---|--:|--:|--:|---|",
    ]
    for row in sorted(rows, key=lambda r: -abs(r["error"])):
        worst = f"{row['worst_component']} {row['worst_component_error']:+.3%}"
        lines.append(
            f"| {row['configuration']} | {row['device']} | {show_gib(row['certified'])}"
            f" | {show_gib(row['predicted'])} | {row['error']:+.4%} | {worst} |"
        )
    return "\n".join([summary(rows), "", *lines, ""])


def summary(rows: list[dict[str, Any]]) -> str:
    """The figures of the limits, by device."""
    lines = ["# Predicted against certified", ""]
    for device in (*DEVICES, "all"):
        chosen = [r for r in rows if device in (r["device"], "all")]
        if not chosen:
            continue
        totals = [abs(r["error"]) for r in chosen]
        component = max(chosen, key=lambda r: abs(r["worst_component_error"]))
        cold = statistics.median(r["predict_seconds"] for r in chosen)
        trace = statistics.median(r["certify_seconds"] for r in chosen)
        lines.append(
            f"- {device}: {len(chosen)} configurations; peak allocated: median"
            f" {statistics.median(totals):.5%}, maximum {max(totals):.4%}; worst component"
            f" {component['worst_component_error']:+.3%} ({component['worst_component']});"
            f" median time {cold * 1e3:.1f} ms predicted, {trace:.2f} s certified"
        )
    return "\n".join(lines)


def row_of(
    name: str, recipe: Recipe, device: Device, before: dict[str, Any] | None
) -> dict[str, Any]:
    """An earlier run's certificate where the prediction is now as near to it or nearer, else anew.

    A prediction that moves away from a certificate says that the step may have changed since.
    """
    warnings.simplefilter("ignore")
    if before is not None:
        now = judge(before | {"digest": recipe.digest}, predict(recipe, device)[0])
        if all(far <= was for far, was in zip(misses(now), misses(before), strict=True)):
            return now
    return compare(name, recipe, device)


def misses(row: dict[str, Any]) -> list[float]:
    """How far the prediction is off: each phase in bytes, then the worst component as a share."""
    phases = [
        abs(row["foretold"][phase]["total"] - sizes["total"])
        for phase, sizes in row["traced"].items()
    ]
    return [*phases, abs(row["worst_component_error"])]


def say(row: dict[str, Any]) -> None:
    mark = "" if abs(row["error"]) <= MAXIMUM else "  <-- peak"
    mark += "" if abs(row["worst_component_error"]) <= COMPONENT else "  <-- component"
    print(
        f"{row['error']:+.4%}  {row['worst_component_error']:+.3%} {row['worst_component']:28}"
        f" {row['device']:9} {row['configuration']}{mark}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--everywhere", action="store_true", help="every recipe on both devices")
    parser.add_argument(
        "--update", action="store_true", help="trace only rows that are new or predicted less well"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that trace side by side")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/predict_grid")
    arguments = parser.parse_args()
    path = arguments.out.with_suffix(".jsonl")
    before = read_rows(path) if arguments.update else {}
    chosen = [task for task in grid(arguments.everywhere) if arguments.only in task[0]]
    rows = []
    with (
        ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool,
        path.with_suffix(".partial").open("w") as file,
    ):
        tasks = [pool.submit(row_of, *task, before.get((task[0], task[2].id))) for task in chosen]
        try:
            for task in tasks:
                rows.append(task.result())
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                say(rows[-1])
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else hours pass before anyone sees it
            raise
    path.with_suffix(".partial").replace(path)
    arguments.out.with_suffix(".md").write_text(table(rows))
    print(summary(rows))
    totals = [abs(r["error"]) for r in rows]
    component = max(abs(r["worst_component_error"]) for r in rows)
    met = statistics.median(totals) <= MEDIAN and max(totals) <= MAXIMUM and component <= COMPONENT
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
