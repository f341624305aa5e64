"""Many ranks: a real run of 2 or 4 processes against one process, and the certificate."""

from __future__ import annotations

from typing import Any

import pytest
from rank_runs import assert_as_certified, assert_as_one_process, run_asked
from tiny_steps import CONFIGS as DEEPER
from tiny_steps import make_recipe as make_deeper

from memfit.records.recipe import LEAN, Freeze, Parallel, Preference, Quantisation, Recipe

# two blocks, the first and the last one; three where a case says so
TWO = {"num_hidden_layers": 2}
CONFIGS = {name: config | TWO for name, config in DEEPER.items()}
THREE = {"num_hidden_layers": 3}
SHARDS = Parallel(dp_shard=2)
KEPT = Parallel(dp_shard=2, reshard_after_forward=False)
COPIES = Parallel(dp_replicate=2)
BOTH = Parallel(dp_replicate=2, dp_shard=2)
RAGGED = {**CONFIGS["llama"], "vocab_size": 251, "intermediate_size": 177}
MIXED = {"precision": "bf16-mixed"}
BF16 = {"precision": "bf16", "base_format": "bf16"}
LORA = {"method": "lora"}
NF4 = {"base_format": "nf4", "quantisation": Quantisation(double=True)}
PRODUCTS = Parallel(tp=2, sequence_parallel=True)
ROWS_AND_PRODUCTS = Parallel(dp_shard=2, tp=2, sequence_parallel=True)
SMALL = {"num_hidden_layers": 1, "vocab_size": 250, "intermediate_size": 178}
STAGES = Parallel(pp=2)
CHUNKED = {"loss": "chunked", "loss_chunk": 20}
BEFORE = Preference(beta=0.1, reference="precomputed")
DPO = {"objective": "dpo", "micro_batch": 2}
OFF = {**DPO, **LORA, "preference": Preference(beta=0.1, reference="adapter-off")}
SIMPO = {
    "objective": "simpo",
    "micro_batch": 2,
    "preference": Preference(beta=2.0, gamma=0.5, loss_type="simpo"),
}
ORPO = {
    "objective": "orpo",
    "micro_batch": 2,
    "preference": Preference(beta=0.1, loss_type="orpo", cross_entropy=1.0),
}
REWARD = {
    "objective": "reward",
    "micro_batch": 2,
    "preference": Preference(beta=1.0, loss_type="bradley_terry", center=0.1),
}
RATED = {
    "objective": "kto",
    "preference": Preference(
        beta=0.1,
        loss_type="apo_zero_unpaired",
        desirable=1.0,
        undesirable=1.5,
        reference="adapter-off",
    ),
}


def make_recipe(
    family: str = "llama", config: dict[str, Any] | None = None, **changes: Any
) -> Recipe:
    return make_deeper(family, config=config or CONFIGS[family], **changes)


CASES: dict[str, Recipe] = {
    "stages": make_recipe(parallel=STAGES, accumulation=4, implementation="foreach"),
    "stages-packed-mixed": make_recipe(
        "qwen3", parallel=STAGES, **MIXED, accumulation=3, packing=True, recompute_blocks=2
    ),
    "stages-interleaved": make_recipe(
        "mistral",
        config=CONFIGS["mistral"] | {"num_hidden_layers": 5},
        parallel=Parallel(pp=2, virtual_pp=2),
        accumulation=4,
        micro_batch=1,
        lean=LEAN,
    ),
    "stages-of-shards": make_recipe(
        config=RAGGED,
        parallel=Parallel(pp=2, dp_shard=2),
        accumulation=3,
        micro_batch=1,
        loss="chunked",
        loss_chunk=20,
    ),
    "stages-of-copies": make_recipe(
        config=CONFIGS["llama"] | {"num_hidden_layers": 4},
        parallel=Parallel(pp=2, dp_replicate=2, virtual_pp=2),
        accumulation=2,
        name="sgd",
        implementation="foreach",
    ),
    "stages-of-products": make_recipe(
        "qwen3",
        config=CONFIGS["qwen3"] | SMALL | TWO,
        parallel=Parallel(pp=2, tp=2, sequence_parallel=True),
        accumulation=3,
        micro_batch=1,
        implementation="foreach",
        recompute_blocks=1,
    ),
    "stages-of-tokens": make_recipe(
        config=CONFIGS["llama"] | SMALL | TWO,
        parallel=Parallel(pp=2, cp=2),
        accumulation=2,
    ),
    "products": make_recipe(config=CONFIGS["llama"] | SMALL, parallel=PRODUCTS, accumulation=2),
    "products-tied": make_recipe(
        "qwen2", config=CONFIGS["qwen2"] | SMALL, parallel=PRODUCTS, recompute_blocks=1
    ),
    "mixed-products": make_recipe(
        "qwen3",
        config=CONFIGS["qwen3"] | SMALL,
        parallel=PRODUCTS,
        **MIXED,
        implementation="foreach",
        packing=True,
    ),
    "rows-and-products": make_recipe(
        "qwen3",
        config=CONFIGS["qwen3"] | SMALL,
        parallel=ROWS_AND_PRODUCTS,
        accumulation=2,
        implementation="foreach",
    ),
    "copies-and-products": make_recipe(
        "mistral",
        config=CONFIGS["mistral"] | SMALL | TWO,
        **BF16,
        parallel=Parallel(dp_replicate=2, tp=2, sequence_parallel=True),
        method="freeze",
        freeze=Freeze(last_blocks=1),
    ),
    "tokens": make_recipe(
        config=CONFIGS["llama"] | SMALL, parallel=Parallel(cp=2), recompute_blocks=1, accumulation=2
    ),
    "mixed-tokens-lora": make_recipe(
        "qwen3", parallel=Parallel(cp=2), **MIXED, **LORA, base_format="bf16", lean=LEAN
    ),
    "tokens-and-shards": make_recipe(
        "mistral",
        config=RAGGED | {"model_type": "mistral"},
        parallel=Parallel(dp_shard=2, cp=2),
        loss="chunked",
        loss_chunk=20,
    ),
    "tokens-and-products": make_recipe(
        config=CONFIGS["llama"] | SMALL, parallel=Parallel(cp=2, tp=2, sequence_parallel=True)
    ),
    "ragged-both": make_recipe(config=RAGGED | THREE, parallel=BOTH, accumulation=2),
    "gpt2-kept": make_deeper("gpt2", parallel=KEPT, recompute_blocks=2, accumulation=2),
    "copies": make_recipe("gpt_neox", parallel=COPIES),
    "lora-tied": make_recipe("qwen2", parallel=SHARDS, **LORA, recompute_blocks=1),
    "freeze-loop": make_recipe(
        method="freeze", freeze=Freeze(last_blocks=1), parallel=SHARDS, implementation="loop"
    ),
    "chunked": make_recipe("mistral", parallel=SHARDS, loss="chunked", loss_chunk=20, clip_norm=0),
    "mixed-ragged-chunked": make_recipe(
        config=RAGGED | THREE, parallel=SHARDS, **MIXED, **CHUNKED, recompute_blocks=3
    ),
    "mixed-lora-bf16": make_recipe("qwen3", parallel=KEPT, **MIXED, **LORA, base_format="bf16"),
    "lean": make_recipe(parallel=SHARDS, lean=LEAN, recompute_blocks=1, accumulation=2),
    "lean-mixed-lora": make_recipe(
        "qwen3", parallel=SHARDS, **MIXED, **LORA, base_format="bf16", lean=LEAN
    ),
    "nf4-ragged": make_recipe(config=RAGGED, parallel=SHARDS, **LORA, **NF4, recompute_blocks=1),
    "mixed-nf4": make_recipe("qwen3", parallel=KEPT, **MIXED, **LORA, **NF4),
    "mixed-int8": make_recipe("mistral", parallel=SHARDS, **MIXED, **LORA, base_format="int8"),
    "copies-fp4": make_recipe(parallel=COPIES, **LORA, base_format="fp4"),
    "in-backward": make_recipe(
        config=RAGGED, parallel=SHARDS, recompute_blocks=1, clip_norm=0, in_backward=True
    ),
    "mixed-tied-in-backward": make_recipe(
        "qwen2", parallel=SHARDS, **MIXED, clip_norm=0, in_backward=True, implementation="foreach"
    ),
    "on-the-host": make_recipe(
        config=RAGGED, parallel=SHARDS, offload="parameters", accumulation=2, recompute_blocks=1
    ),
    "mixed-nf4-on-the-host": make_recipe(
        "qwen3",
        parallel=BOTH,
        **MIXED,
        **LORA,
        **NF4,
        offload="parameters",
        implementation="foreach",
    ),
    "experts": make_recipe("qwen3_moe", parallel=SHARDS, recompute_blocks=1, accumulation=2),
    "latent-experts": make_recipe("deepseek_v3", parallel=SHARDS, recompute_blocks=1),
    "sinks": make_recipe("gpt_oss", parallel=SHARDS, **MIXED),
    "mixed-experts": make_recipe("mixtral", parallel=SHARDS, **MIXED),
    "experts-nf4": make_recipe("gpt_oss", parallel=SHARDS, **MIXED, **LORA, **NF4),
    "bf16-foreach": make_recipe(parallel=SHARDS, **BF16, implementation="foreach"),
    "simpo": make_recipe(**SIMPO, parallel=SHARDS, accumulation=2),
    "reward": make_recipe(**REWARD, parallel=SHARDS, accumulation=2),
    "dpo-adapter-off": make_recipe("qwen3", **OFF, parallel=SHARDS, recompute_blocks=1),
    "dpo-adapter-off-chunked-kept-accumulated": make_recipe(
        config=RAGGED, **OFF, **CHUNKED, parallel=KEPT, accumulation=2
    ),
    "dpo-adapter-off-tied-copies": make_recipe("qwen2", **OFF, parallel=COPIES),
    "dpo-adapter-off-mixed-nf4": make_recipe("qwen3", **OFF, **NF4, **MIXED, parallel=SHARDS),
    "dpo-precomputed-both": make_recipe(
        "mistral", **DPO, **CHUNKED, preference=BEFORE, parallel=BOTH
    ),
    "orpo-chunked": make_recipe(config=RAGGED, **ORPO, **CHUNKED, parallel=SHARDS),
    "cpo-tied": make_deeper(
        "gpt2", objective="cpo", preference=Preference(beta=0.1, cross_entropy=1.0), parallel=SHARDS
    ),
    "rated-adapter-off": make_recipe("gpt_neox", **LORA, **RATED, parallel=SHARDS),
    "mixed-8bit": make_recipe(parallel=SHARDS, **MIXED, name="adamw8bit", implementation="loop"),
    "mixed-copies-sgd": make_recipe(
        parallel=COPIES, **MIXED, name="sgd", weight_decay=0.1, implementation="foreach"
    ),
}

# whose parts others have, too: each is run and traced twice
ALIKE = (
    "stages-packed-mixed", "stages-of-copies", "products-tied", "copies-and-products",
    "mixed-tokens-lora", "tokens-and-products", "freeze-loop", "chunked", "mixed-lora-bf16", "lean",
    "mixed-nf4", "copies-fp4", "mixed-tied-in-backward", "latent-experts", "sinks", "mixed-experts",
    "bf16-foreach", "mixed-copies-sgd", "stages-of-tokens", "tokens-and-shards",
    "mixed-nf4-on-the-host", "dpo-adapter-off-tied-copies", "dpo-adapter-off-mixed-nf4",
    "cpo-tied",
    # tests/certify/test_mesh_cells.py
    "simpo", "reward", "rated-adapter-off", "mixed-8bit", "orpo-chunked", "tokens",
    "copies",  # test_sampled_ranks.py; and with shards: "dpo-precomputed-both"
)  # fmt: skip
NAMES = [pytest.param(n, marks=pytest.mark.wide) if n in ALIKE else n for n in CASES]

ON_RANKS = CASES  # what `real` runs


@pytest.fixture(scope="module")
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What each of the case's processes held and computed, by case."""
    return run_asked(request, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.covering(CASES)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_what_one_process_computes(name: str, real: Any) -> None:
    assert_as_one_process(CASES[name], real[name])


@pytest.mark.slow
@pytest.mark.covering(CASES)
@pytest.mark.parametrize("name", NAMES)
def test_each_rank_holds_what_its_certificate_says(name: str, real: Any) -> None:
    assert_as_certified(CASES[name], real[name])
