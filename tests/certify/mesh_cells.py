"""Techniques on the axes of a mesh: a tiny recipe of each cell, and which of them train.

docs/techniques.md counts from here; test_mesh_cells.py holds every cell to one process, to its
certificate and to its prediction, or to its refusal.
"""

from __future__ import annotations

from typing import Any

import sampled_ranks
from msgspec.structs import replace
from tiny_steps import CONFIGS, make_recipe

from memfit.adapters import find_adapter
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.families.capabilities import float8, qat
from memfit.families.capabilities.compiled import check_compiled
from memfit.parallelism.limits import check_ranks
from memfit.records.objectives import check_objective
from memfit.records.recipe import (
    Lora,
    Parallel,
    Preference,
    Quantisation,
    Recipe,
    Regularisation,
)

AXES = {
    "FSDP2": Parallel(dp_shard=2),
    "copies": Parallel(dp_replicate=2),
    "tp": Parallel(tp=2, sequence_parallel=True),
    "cp": Parallel(cp=2),
    "pp": Parallel(pp=2),
    "ep": Parallel(dp_shard=2, ep=2, ep_imbalance=1.0),
}
SIZES = {
    **CONFIGS["llama"], "num_hidden_layers": 2, "intermediate_size": 192, "vocab_size": 256,
}  # fmt: skip
SPARSE = {**CONFIGS["mixtral"], "num_hidden_layers": 2, "vocab_size": 256}
LORA = {
    "method": "lora",
    "lora": Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "down_proj")),
}
OF_PAIRS = {"micro_batch": 2}
"""What a recipe of each technique says; `optimizer` fields by their own names."""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "LoRA": LORA,
    "DoRA": {**LORA, "method": "dora"},
    "LoRA+": {**LORA, "lora_plus": 16.0},
    "LoRA over nf4": {**LORA, "base_format": "nf4", "quantisation": Quantisation(double=True)},
    "LoRA over int8": {**LORA, "base_format": "int8"},
    "DPO, adapter off": {
        **LORA, **OF_PAIRS, "objective": "dpo",
        "preference": Preference(beta=0.1, reference="adapter-off"),
    },
    "DPO, reference before": {
        **OF_PAIRS, "objective": "dpo",
        "preference": Preference(beta=0.1, reference="precomputed"),
    },
    "SimPO": {
        **OF_PAIRS, "objective": "simpo",
        "preference": Preference(beta=2.0, gamma=0.5, loss_type="simpo"),
    },
    "ORPO": {
        **OF_PAIRS, "objective": "orpo",
        "preference": Preference(beta=0.1, loss_type="orpo", cross_entropy=1.0),
    },
    "reward model": {
        **OF_PAIRS, "objective": "reward",
        "preference": Preference(beta=1.0, loss_type="bradley_terry", center=0.1),
    },
    "KTO": {
        **OF_PAIRS, "objective": "kto",
        "preference": Preference(
            beta=0.1, loss_type="kto", desirable=1.0, undesirable=1.5, reference="precomputed"
        ),
    },
    "AdamW in 8 bits": {"name": "adamw8bit", "implementation": "loop"},
    "Muon": {"name": "muon", "implementation": "loop"},
    "Adafactor": {"name": "adafactor", "implementation": "loop"},
    "Lion": {"name": "lion", "implementation": "foreach"},
    "QAT": {"qat": "int8"},
    "fp8": {"precision": "fp8-mixed", "packing": True},
    "compiled blocks": {"compile": "blocks"},
    "label smoothing, z-loss": {
        "regularisation": Regularisation(label_smoothing=0.1, z_loss=1e-2)
    },
    "NEFTune": {"regularisation": Regularisation(neftune_alpha=5.0)},
}  # fmt: skip


EVERY = tuple(AXES)
DENSE = tuple(axis for axis in AXES if axis != "ep")
TRAINED: dict[str, tuple[str, ...]] = {
    "LoRA": EVERY,
    "DoRA": ("FSDP2", "copies", "cp", "pp", "ep"),
    "LoRA+": EVERY,
    "LoRA over nf4": ("FSDP2", "copies", "cp", "pp"),
    "LoRA over int8": ("FSDP2", "copies", "cp", "pp"),
    "DPO, adapter off": EVERY,
    "DPO, reference before": EVERY,
    "SimPO": EVERY,
    "ORPO": EVERY,
    "reward model": EVERY,
    "KTO": EVERY,
    "AdamW in 8 bits": EVERY,
    "Muon": EVERY,
    "Adafactor": (),
    "Lion": EVERY,
    "QAT": DENSE,
    "fp8": (),
    "compiled blocks": ("FSDP2", "copies", "pp"),
    "label smoothing, z-loss": EVERY,
    "NEFTune": EVERY,
}  # fmt: skip
"""On which axes each technique trains: what a test holds to one process."""
NOT_OURS = {
    "Adafactor": "torch's DTensor cannot run the operators of its Adafactor",
}
"""Techniques that torch itself does not have on any axis, and why."""
SAMPLED = {"GRPO, RLOO": ("FSDP2", "copies", "ep")}
"""Techniques whose recipes are no single step, and where test_sampled_ranks.py trains them."""
CELLS = [(technique, axis) for technique, axes in TRAINED.items() for axis in axes]


def make_cell(technique: str, axis: str) -> Recipe:
    """A tiny recipe of a technique on two ranks of an axis; of stages in two micro-batches."""
    changes = {"sequence_length": 32, **TECHNIQUES[technique]}
    parallel = AXES[axis]
    config = SIZES
    if parallel.ep > 1:
        config = SPARSE
        if "lora" in changes:  # experts are no projections, of which adapters are
            changes["lora"] = replace(changes["lora"], targets=("q_proj", "v_proj", "o_proj"))
    return make_recipe(
        config["model_type"], config=config, parallel=parallel,
        accumulation=2 if parallel.pp > 1 else 1, **changes,
    )  # fmt: skip


def make_sampled(objective: str, axis: str) -> Recipe:
    """A tiny recipe of an objective that samples answers; by the name of sampled_ranks.py."""
    changes = sampled_ranks.changes_of(objective, AXES[axis])
    config = changes.pop("config", SPARSE if AXES[axis].ep > 1 else SIZES)
    return make_recipe(config["model_type"], config=config, **changes)


def name_cell(technique: str, axis: str) -> str:
    """As tests and tables call a cell."""
    return f"{technique} on {axis}"


def refusal(recipe: Recipe) -> str:
    """Why plan and trainer refuse a recipe; "" where they accept it."""
    model = read_model(recipe.model)
    try:
        check_ranks(recipe)
        check_objective(recipe)
        find_adapter(recipe).adapt(model, recipe)
        check_compiled(model, recipe)
        qat.check_recipe(model, recipe)
        if recipe.precision == "fp8-mixed":
            float8.check_float8(
                model, method=recipe.method, ranks=recipe.parallel.world, packing=recipe.packing
            )
    except InvalidRequest as error:
        return error.message
    return ""
