"""The configurations of bench/predict_grid.py: every technique that memfit's step has.

Knobs turn at different speeds over every model, so that all values meet; `TURNED` are settings
that only a request names, one of each list a model; `TECHNIQUES` are combinations that none of
those make, each on named models. `settle` takes from a recipe what its settings exclude.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from msgspec.structs import replace

from memfit import catalog
from memfit.adapters.shared.projections import all_linear, choose_targets
from memfit.adapters.shared.quantised_base import check_base
from memfit.base_formats import is_quantised
from memfit.core.errors import InvalidRequest
from memfit.families import family_of, read_model
from memfit.families.capabilities.added import can_select
from memfit.families.capabilities.lean import find_lean
from memfit.families.capabilities.limits import own_kernels
from memfit.meta.attending.kernels import heads_of, refusal, usable
from memfit.optimizers import default_implementation, find_optimizer
from memfit.records.hardware import Device
from memfit.records.model import ModelReference
from memfit.records.recipe import Freeze, Lora, Optimizer, Preference, Quantisation, Recipe

CPU, H100 = DEVICES = ("cpu-x86", "h100-sxm")
SHALLOW = 4  # blocks of a model, or one of each kind; but in one recipe of every fourth model
INT8 = Quantisation(outlier_threshold=6.0, outlier_share=0.01)
DOUBLE = Quantisation(double=True)

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
# shares of the blocks: recomputed whole, and selectively
RECOMPUTE = {
    "none": (0, 0), "half": (0.5, 0), "full": (1, 0), "selective": (0, 1), "each": (0.25, 0.5),
}  # fmt: skip
A_MODEL = 2  # recipes of each model
NAMED = 50  # recipes with settings that only a request names, unless all are asked for
BATCHES = ((1, 4096), (8, 128), (2, 1024), (4, 512), (1, 8192), (2, 2048), (8, 1024))

Settings = dict[str, Any]  # keys of a recipe; a dict changes keys of what is there


def by(name: str, implementation: str = "loop", **more: Any) -> Settings:
    """An optimizer's settings."""
    return {"optimizer": {"name": name, "implementation": implementation, **more}}


FP16: Settings = {"precision": "fp16-mixed"}
BF16: Settings = {"precision": "bf16"}
MIXED: Settings = {"precision": "bf16-mixed"}
LEAN: Settings = {"lean": ("norm", "mlp")}
LORA: Settings = {"method": "lora"}
DORA: Settings = {"method": "dora"}
WIDE: Settings = {"lora": {"targets": "all-linear"}}
IN_8: Settings = {"base_format": "int8", "quantisation": INT8}
IN_NF4: Settings = {"base_format": "nf4", "quantisation": DOUBLE}
IN_FP4: Settings = {"base_format": "fp4", "quantisation": Quantisation()}
DPO: Settings = {"objective": "dpo", "preference": {"beta": 0.1}}
WITHIN: Settings = {"optimizer": {"in_backward": True}}
STOWED: Settings = {"offload": "activations"}
ON_HOST: Settings = {"offload": "optimizer"}
FP8: Settings = {"precision": "fp8-mixed"}
SELECTIVE: Settings = {"recompute": "selective"}
EACH: Settings = {"recompute": "each"}
DROPOUT: Settings = {"lora": {"dropout": 0.05}}
ROUNDED: Settings = {"stochastic_rounding": True}
VARLEN: Settings = {"attention": "varlen", "packing": True}
COMPILED: Settings = {
    "compile": "blocks", "recompute": "none", "lean": (), "packing": False, "attention": "flash",
}  # fmt: skip

# One setting of each list a model, in turn.
TURNED: tuple[tuple[Settings, ...], ...] = (
    (
        {**FP16, "attention": "cudnn"},
        by("adamw8bit"),
        {**FP16, **by("adamw", "foreach")},
        {**by("adamw4bit"), "attention": "cudnn"},
        {**FP16, **by("adamw8bit", "fused")},
        by("adamwfp8"),
        {**by("adamw8bit", "fused"), "attention": "cudnn"},
        by("muon"),
        by("adamw", "fused", in_backward=True),
        by("adafactor"),
        {**by("adamw8bit-bnb", "fused"), "attention": "cudnn"},
        by("adamw8bit", in_backward=True),
        {**BF16, **by("adamwbf16")},
    ),
    ({**IN_8, **MIXED}, {**IN_NF4, **BF16}, {**IN_8, **BF16}, {**IN_FP4, **FP16}),
    (
        {**DPO, **LORA}, {**DPO, "method": "full"}, {**DPO, **LORA, **MIXED},
        {**DPO, **LORA, **BF16}, {**DPO, "method": "freeze"},
    ),
)  # fmt: skip

TECHNIQUES: tuple[tuple[Settings, tuple[str, ...]], ...] = (
    ({"lean": ("norm",)}, ("llama-2-7b", "qwen2.5-7b", "granite-3.1-2b-base")),
    ({"lean": ("mlp",)}, ("llama-3.1-8b", "small-qwen3-30m", "mistral-7b-v0.3")),
    ({**LEAN, **LORA, **MIXED}, ("llama-2-7b", "smollm3-3b", "qwen3-4b")),
    ({**LEAN, **LORA, **WIDE, **BF16}, ("llama-3.1-8b", "qwen2.5-7b")),
    ({**LEAN, **DORA, **WIDE, **MIXED}, ("llama-2-7b", "qwen2-0.5b")),
    ({**LEAN, **IN_8, **MIXED}, ("llama-2-7b", "mistral-7b-v0.1")),
    ({**LEAN, **IN_NF4, **BF16}, ("llama-3.1-8b", "qwen2.5-7b")),
    ({**LEAN, **DPO, **LORA, **MIXED}, ("llama-2-7b", "qwen3-0.6b")),
    ({**LEAN, **DPO, **IN_8, **MIXED}, ("llama-3.1-8b",)),
    ({**LEAN, **STOWED, **MIXED}, ("llama-2-7b", "small-qwen3-30m")),
    ({**LEAN, **WITHIN, **MIXED}, ("smollm2-135m", "mistral-7b-v0.3")),
    ({**LEAN, **FP16}, ("tinyllama-1.1b", "qwen2-0.5b")),
    ({**LORA, **WIDE}, ("llama-3.1-8b", "pythia-1.4b", "phi-3-mini-4k-instruct", "gemma-2-2b")),
    ({**LORA, **WIDE, **DROPOUT}, ("gpt2", "opt-125m")),
    (
        {**LORA, "lora": {"targets": "all-linear", "scaling": "rank-stabilised"}},
        ("mistral-7b-v0.3", "bloom-560m"),
    ),
    (DORA, ("llama-2-7b", "pythia-410m", "gpt2", "falcon-7b")),
    ({**DORA, **WIDE, **BF16}, ("qwen2.5-7b", "opt-350m")),
    ({**DORA, **DROPOUT, **MIXED}, ("llama-2-7b",)),
    ({**DORA, **DPO}, ("tinyllama-1.1b",)),
    (FP8, ("llama-3.1-8b", "qwen2.5-7b", "pythia-1.4b", "gemma-2-2b", "opt-6.7b")),
    ({**FP8, **by("adamw8bit", "fused")}, ("llama-2-7b", "mistral-7b-v0.3")),
    ({**FP8, **WITHIN}, ("llama-3.1-8b", "olmo-2-1b")),
    ({**FP8, "recompute": "full"}, ("llama-2-7b", "granite-3.1-2b-base")),
    ({**FP8, **STOWED}, ("tinyllama-1.1b",)),
    ({"qat": "int8"}, ("llama-3.1-8b", "pythia-410m", "small-qwen3-30m")),
    ({"qat": "int4"}, ("qwen2.5-7b", "gemma-2-2b", "tinyllama-1.1b")),
    ({"qat": "int8", **FP16, **by("adamw8bit")}, ("llama-2-7b",)),
    ({"qat": "int4", **MIXED, "recompute": "full"}, ("mistral-7b-v0.3",)),
    ({"qat": "int8", **MIXED, **WITHIN}, ("opt-125m",)),
    (SELECTIVE, ("llama-3.1-8b", "pythia-1.4b", "mixtral-8x7b-v0.1", "gemma-2-2b")),
    (EACH, ("qwen2.5-7b", "gpt2-medium", "opt-6.7b", "deepseek-v2-lite")),
    ({**SELECTIVE, **LORA, **MIXED}, ("llama-2-7b", "falcon-7b")),
    ({**EACH, **LORA, **WIDE, **BF16}, ("llama-3.1-8b", "phi-2")),
    ({**SELECTIVE, **WITHIN, **BF16}, ("llama-2-7b", "pythia-410m")),
    ({**EACH, **DPO, **LORA}, ("qwen3-0.6b",)),
    ({**EACH, **FP16}, ("gpt2", "stablelm-2-1_6b")),
    ({**EACH, **STOWED}, ("llama-2-7b", "pythia-410m")),
    (STOWED, ("llama-2-7b", "pythia-410m", "gemma-2-2b", "qwen1.5-moe-a2.7b")),
    ({**STOWED, **LORA, **MIXED}, ("llama-3.1-8b", "gpt2")),
    ({**STOWED, **IN_NF4, **BF16}, ("mistral-7b-v0.1", "phi-3-mini-4k-instruct")),
    ({**STOWED, **DPO, **LORA}, ("pythia-1.4b",)),
    ({**STOWED, **by("adamw8bit"), "recompute": "half"}, ("opt-6.7b",)),
    ({**ON_HOST, **MIXED}, ("llama-3.1-8b", "gpt2-xl", "pythia-1.4b", "qwen1.5-moe-a2.7b")),
    ({**ON_HOST, **LEAN, **BF16}, ("llama-2-7b", "qwen3-4b")),
    ({**ON_HOST, "method": "freeze"}, ("mistral-7b-v0.1",)),
    ({**ON_HOST, **LORA}, ("gemma-2-2b", "opt-125m")),
    ({**ON_HOST, **DPO, "method": "full", **MIXED}, ("tinyllama-1.1b",)),
    ({**WITHIN, "method": "freeze"}, ("llama-3.1-8b", "gemma-2b")),
    ({**WITHIN, **LORA, **WIDE}, ("gpt2-medium", "qwen2-0.5b")),
    (by("muon", in_backward=True), ("llama-2-7b", "pythia-410m")),
    (by("adafactor", in_backward=True), ("qwen2.5-7b", "gpt2-xl")),
    ({**WITHIN, **DPO, "method": "full", **BF16}, ("smollm2-135m",)),
    ({**IN_8, **DPO, **MIXED}, ("gpt-neox-20b", "phi-3-mini-4k-instruct")),
    ({**IN_NF4, **DPO, **BF16}, ("gpt-neox-20b", "mistral-7b-v0.1")),
    ({**IN_FP4, **DPO, **FP16}, ("pythia-1.4b", "gemma-2b")),
    ({**IN_8, **WIDE, **DROPOUT, **MIXED}, ("llama-2-7b", "opt-6.7b")),
    ({**IN_NF4, **WIDE, **by("adamw8bit")}, ("llama-3.1-8b", "phi-2")),
    ({**FP16, **DPO, **LORA}, ("pythia-410m", "qwen2-0.5b")),
    ({**FP16, "method": "full"}, ("llama-2-7b", "gemma-2b", "bloom-560m")),
    (by("adamwbf16", **ROUNDED), ("llama-3.1-8b", "gpt2-medium", "gemma-2-2b")),
    (by("adamw8bit", **ROUNDED), ("qwen2.5-7b", "pythia-1.4b")),
    (by("adamwbf16", in_backward=True, **ROUNDED), ("tinyllama-1.1b",)),
    (by("muon"), ("llama-2-7b", "mixtral-8x7b-v0.1")),
    (by("adafactor"), ("llama-2-7b", "gpt2-medium")),
    (by("adamw4bit"), ("llama-2-7b", "opt-6.7b")),
    (by("adamwfp8"), ("llama-3.1-8b", "pythia-410m")),
    (by("adamw8bit-bnb", "fused"), ("llama-3.1-8b", "gpt2-xl")),
    (by("adamw8bit-paged", "fused"), ("llama-3.1-8b", "gpt2-xl", "pythia-1.4b")),
    ({"method": "freeze", "freeze": {"patterns": ("*norm*",)}}, ("llama-2-7b", "gemma-2-2b")),
    ({"objective": "sft", **LORA, "packing": True}, ("llama-3.1-8b", "pythia-410m")),
    ({**VARLEN, **BF16}, ("llama-3.1-8b", "mistral-7b-v0.3", "qwen2.5-7b")),
    ({**VARLEN, **LORA, **WIDE, **MIXED}, ("llama-2-7b", "qwen3-4b")),
    ({**VARLEN, **LEAN, **MIXED}, ("smollm2-135m", "pythia-1.4b")),
    ({**VARLEN, **IN_NF4, **BF16}, ("llama-3.1-8b",)),
    ({**COMPILED, "method": "full"}, ("smollm2-135m", "qwen2-0.5b", "granite-3.1-2b-base")),
    ({**COMPILED, "method": "full", **BF16}, ("llama-3.1-8b", "qwen3-4b")),
    ({**COMPILED, "method": "full", **MIXED}, ("tinyllama-1.1b", "smollm3-3b")),
    ({**COMPILED, **LORA, **WIDE, **BF16}, ("llama-2-7b", "mistral-7b-v0.1")),
    ({**COMPILED, **LORA}, ("qwen2.5-7b",)),
    ({**COMPILED, **FP16, **by("adamw8bit")}, ("qwen3-0.6b",)),
)  # fmt: skip
Row = tuple[str, Recipe, Device]


def grid(everywhere: bool) -> list[Row]:
    """Every configuration with its device.

    everywhere: turned ones on both devices, not on one in turn, and all of them.
    """
    found: dict[tuple[str, str], Row] = {}

    def add(recipe: Recipe, names: Iterable[str]) -> None:
        for name in names:
            device = catalog.find_device(name)
            if not possible(recipe, device):
                continue
            placed = on(recipe, device)
            row = (describe(placed), placed, device)
            found.setdefault((row[0], name), row)

    for n, (settings, names) in enumerate(TECHNIQUES):
        for k, name in enumerate(names):
            for m, device in enumerate(DEVICES):
                add(change(make_recipe(name, 11 * n + 5 * k + 3 * m, SHALLOW), settings), (device,))
    for n, recipe in enumerate(turned_by_knobs()):
        add(recipe, DEVICES if everywhere else (DEVICES[(n // 2 + n // 7) % 2],))
    for n, recipe in enumerate(islice(turned_by_settings(), None if everywhere else NAMED)):
        add(recipe, DEVICES if everywhere else (DEVICES[(n // 2 + n // 13) % 2],))
    return list(found.values())


def turned_by_knobs() -> Iterator[Recipe]:
    """Every model with `A_MODEL` recipes; one of every fourth is as deep as its model."""
    for n in range(len(MODELS) * A_MODEL):
        yield make_recipe(MODELS[n // A_MODEL], n, SHALLOW if n % (4 * A_MODEL) else None)


def turned_by_settings() -> Iterator[Recipe]:
    """A setting of each list for every model that can have it; of pairs, for every second one."""
    for k, each in enumerate(TURNED):
        for n, name in enumerate(MODELS):
            settings = each[n % len(each)]
            if can_store(name, settings) and (n % 2 or "preference" not in settings):
                yield change(make_recipe(name, 7 * n + 5 * k + 3, SHALLOW), settings)


def can_store(name: str, settings: Settings) -> bool:
    """Whether the model's base can be quantised as the settings ask."""
    try:
        check_base(read_model(find(name)), settings.get("base_format", "bf16"), "lora")
    except InvalidRequest:
        return False
    return True


def possible(recipe: Recipe, device: Device) -> bool:
    """Whether the device has what the recipe asks for, where nothing else would do."""
    if not device.is_cpu:
        return True
    cuda = find_optimizer(recipe.optimizer)
    only = set(cuda.implementations) <= set(cuda.cuda_only) or recipe.attention == "varlen"
    return not (only or recipe.precision == "fp8-mixed" or recipe.offload == "optimizer")


def change(recipe: Recipe, settings: Settings) -> Recipe:
    """The recipe with some settings, and without what they exclude."""
    changes = {
        key: replace(getattr(recipe, key), **value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key != "recompute"
    }
    recipe = replace(recipe, **changes)
    if "recompute" in settings:
        recipe = recompute(recipe, settings["recompute"])
        recipe = replace(recipe, lean=()) if recipe.selective_blocks else recipe
    return settle(recipe)


def recompute(recipe: Recipe, word: str) -> Recipe:
    """The recipe with a share of its blocks recomputed: see `RECOMPUTE`."""
    layers = read_model(recipe.model).architecture.layers
    whole, part = (int(layers * share) for share in RECOMPUTE[word])
    return replace(recipe, recompute_blocks=whole, selective_blocks=part)


def settle(recipe: Recipe) -> Recipe:
    """The recipe without what its model, its precision and its other settings exclude."""
    recipe = _settle_method(_settle_precision(recipe))
    recipe = _settle_blocks(_settle_updates(recipe))
    return _fit(_settle_pairs(recipe) if recipe.prefers else recipe)


def _settle_precision(recipe: Recipe) -> Recipe:
    settings = recipe.optimizer
    if settings.stochastic_rounding:
        recipe = replace(recipe, precision="bf16")
    if recipe.scaled and (settings.in_backward or recipe.offload == "optimizer"):
        recipe = replace(recipe, precision="bf16-mixed")
    if recipe.qat and recipe.precision == "bf16":
        recipe = replace(recipe, precision="bf16-mixed")
    return replace(recipe, packing=True) if recipe.precision == "fp8-mixed" else recipe


def _settle_method(recipe: Recipe) -> Recipe:
    if is_quantised(recipe.base_format):
        recipe = replace(recipe, method="lora")
    if recipe.qat or recipe.precision == "fp8-mixed":
        recipe = replace(recipe, method="full")
    base = {"fp32": "fp32", "bf16": "bf16", "fp16-mixed": "fp16"}.get(recipe.precision)
    if recipe.method == "full":
        base = base or "fp32"
    if base and not is_quantised(recipe.base_format):
        recipe = replace(recipe, base_format=base)
    freeze = recipe.freeze if recipe.freeze != Freeze() else Freeze(last_blocks=2)
    return replace(
        recipe,
        lora=_lora(recipe) if recipe.adapted else Lora(),
        freeze=freeze if recipe.method == "freeze" else Freeze(),
    )


def _lora(recipe: Recipe) -> Lora:
    model = read_model(recipe.model)
    usual = family_of(recipe.model).default_targets(model.architecture)
    asked = recipe.lora.targets or usual
    rank = recipe.lora.rank or (64 if recipe.loss == "chunked" else 8)
    targets = choose_targets(asked, model, usual)
    return replace(recipe.lora, rank=rank, alpha=16.0, targets=targets)


def _settle_updates(recipe: Recipe) -> Recipe:
    settings = recipe.optimizer
    if recipe.offload == "optimizer":
        settings = replace(settings, name="adamw", implementation="fused")
    if recipe.offload == "optimizer" or settings.in_backward:
        settings = replace(settings, clip_norm=0.0)
    if settings.in_backward:
        recipe = replace(recipe, accumulation=1)
    return replace(recipe, optimizer=settings)


def _settle_blocks(recipe: Recipe) -> Recipe:
    a = read_model(recipe.model).architecture
    alone = recipe.qat or recipe.precision == "fp8-mixed"
    own = () if alone else tuple(o for o in recipe.lean if o in find_lean(a))
    recipe = replace(recipe, lean=own)
    if recipe.selective_blocks and not can_select(a, recipe):
        again = recipe.recompute_blocks + recipe.selective_blocks
        recipe = replace(recipe, recompute_blocks=again, selective_blocks=0)
    return recipe


def _settle_pairs(recipe: Recipe) -> Recipe:
    """Of an adapter the reference runs; the others are given its log-probabilities."""
    reference: Any = "adapter-off" if recipe.adapted else "precomputed"
    return replace(
        recipe,
        preference=replace(recipe.preference, reference=reference),
        packing=False,
        micro_batch=recipe.micro_batch + recipe.micro_batch % 2,
    )


def _fit(recipe: Recipe) -> Recipe:
    """Without what the model's class excludes: see `memfit.families.capabilities.limits`."""
    architecture = read_model(recipe.model).architecture
    if only := own_kernels(architecture):
        recipe = replace(recipe, attention=only[0])
    if architecture.alibi:
        recipe = replace(recipe, packing=False)
    if architecture.head_bias:
        recipe = replace(recipe, loss="plain", loss_chunk=0)
    return recipe


def make_recipe(name: str, n: int, deepest: int | None = None) -> Recipe:
    """The n-th setting of all knobs, on one model of at most `deepest` blocks."""
    reference = find(name, deepest)
    architecture = read_model(reference).architecture
    method, precision, base = METHODS[n % len(METHODS)]
    optimizer, implementation = OPTIMIZERS[n % len(OPTIMIZERS)]
    rows, tokens = BATCHES[n % len(BATCHES)]
    chunked = n // 3 % 2 == 1
    window = architecture.sliding_window or tokens
    recipe = Recipe(
        model=reference,
        weights="random",
        objective="pretrain",
        method=method,
        lora=Lora(rank=(8, 64)[n % 2]) if method == "lora" else Lora(),
        freeze=Freeze(last_blocks=1 + n % 3) if method == "freeze" else Freeze(),
        base_format=base,
        precision=precision,
        optimizer=Optimizer(
            name=optimizer, implementation=implementation, learning_rate=1e-4,
            weight_decay=0.01 if n % 4 else 0.0, beta1=0.9, beta2=0.999, eps=1e-8, momentum=0.9,
            schedule="constant", warmup_steps=0, clip_norm=float(n % 3 > 0),
        ),
        recompute_blocks=0,
        attention="math" if n % 11 == 5 else "flash",
        loss="chunked" if chunked else "plain",
        loss_chunk=(256, 1024, 4096)[n % 3] if chunked else 0,
        sequence_length=min(tokens, architecture.max_sequence, window),
        packing=n % 5 == 2,
        micro_batch=rows,
        accumulation=1 + n % 2,
        steps=10,
        device=CPU,
        seed=0,
        lean=find_lean(architecture) if n // 2 % 3 else (),
        preference=Preference(),
    )  # fmt: skip
    word = tuple(RECOMPUTE)[n // 2 % len(RECOMPUTE)]
    if recipe.lean and RECOMPUTE[word][1]:
        word = "none"
    return settle(recompute(recipe, word))


def find(name: str, deepest: int | None = None) -> ModelReference:
    """A catalogue row, or one of the small models above; cut to its first blocks."""
    if name in SMALL:
        return ModelReference(name=name, source="", config=SMALL[name])
    row = catalog.find_model(name)
    a = row.architecture()
    layers = row.layers if deepest is None else max(deepest, len(a.layer_kinds))
    if row.layers <= layers:
        return row.reference()
    config = family_of(row.reference()).config(replace(a, layers=layers))
    cut = f"{name} ({layers} of {row.layers} blocks)"
    return ModelReference(name=cut, source="", config=config)


def describe(recipe: Recipe) -> str:
    """One line that names the configuration."""
    lora, settings = recipe.lora, recipe.optimizer
    parts = [
        recipe.model.name, recipe.method, recipe.precision,
        f"{recipe.micro_batch}x{recipe.sequence_length}x{recipe.accumulation}",
        f"recompute {recipe.recompute_blocks}" + f"+{recipe.selective_blocks} selective"
        * bool(recipe.selective_blocks),
        f"{settings.name} {settings.implementation}", recipe.loss, recipe.attention,
    ]  # fmt: skip
    known = (
        (f"{recipe.base_format} base", recipe.method != "full" and not recipe.coding),
        (recipe.coding, recipe.coding),
        (f"r={lora.rank} on {'+'.join(lora.targets)}", recipe.adapted),
        ("rank-stabilised", lora.scaling != "plain"),
        (f"dropout {lora.dropout}", lora.dropout),
        (f"patterns {' '.join(recipe.freeze.patterns)}", recipe.freeze.patterns),
        (f"lean {'+'.join(recipe.lean)}", recipe.lean),
        (f"qat {recipe.qat}", recipe.qat),
        ("in backward", settings.in_backward),
        ("rounded by chance", settings.stochastic_rounding),
        ("unclipped", not settings.clip_norm and not settings.in_backward),
        (f"offload {recipe.offload}", recipe.offload != "none"),
        ("packed", recipe.packing),
        ("compiled blocks", recipe.compile == "blocks"),
        ("sft", recipe.objective == "sft"),
        (f"dpo {recipe.preference.reference}", recipe.prefers),
    )
    return ", ".join([*parts, *(text for text, said in known if said)])


def techniques(recipe: Recipe) -> list[str]:
    """The techniques of issue and documentation that a configuration is a row of."""
    lora, settings, layers = recipe.lora, recipe.optimizer, recipe.recompute_blocks
    model = read_model(recipe.model)
    experts = bool(model.architecture.experts.count)
    wide = recipe.adapted and not experts and lora.targets == all_linear(model)
    known = {
        f"method: {recipe.method}": True,
        "all-linear": wide,
        "rsLoRA": lora.scaling != "plain",
        "LoRA dropout": lora.dropout > 0,
        f"precision: {recipe.precision}": True,
        f"base: {recipe.base_format}": recipe.coding,
        f"qat: {recipe.qat}": recipe.qat,
        f"optimizer: {settings.name}": True,
        "optimizer in backward": settings.in_backward,
        "stochastic rounding": settings.stochastic_rounding,
        f"lean: {'+'.join(recipe.lean)}": recipe.lean,
        "recompute: selective": recipe.selective_blocks,
        "recompute: whole blocks": layers,
        "recompute: per block": recipe.selective_blocks and layers,
        f"offload: {recipe.offload}": recipe.offload != "none",
        f"loss: {recipe.loss}": True,
        f"attention: {recipe.attention}": True,
        "packed documents": recipe.packing,
        f"compile: {recipe.compile}": recipe.compile != "none",
        f"dpo: {recipe.preference.reference}": recipe.prefers,
        "dpo over a quantised base": recipe.prefers and recipe.coding,
        "experts": experts,
    }
    return [name for name, has in known.items() if has]


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
