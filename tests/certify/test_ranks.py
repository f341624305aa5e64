"""Many ranks: a real run of 2 or 4 processes against one process, and the certificate."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worker import alone
from tiny_steps import CONFIGS, CPU, make_recipe

from memfit.certify import trace
from memfit.records.recipe import LEAN, Freeze, Parallel, Preference, Quantisation, Recipe

WORKER = Path(__file__).parent / "rank_worker.py"
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
        config=CONFIGS["qwen3"] | SMALL | {"num_hidden_layers": 2},
        parallel=Parallel(pp=2, tp=2, sequence_parallel=True),
        accumulation=3,
        micro_batch=1,
        implementation="foreach",
        recompute_blocks=1,
    ),
    "stages-of-tokens": make_recipe(
        config=CONFIGS["llama"] | SMALL | {"num_hidden_layers": 2},
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
        config=CONFIGS["mistral"] | SMALL | {"num_hidden_layers": 2},
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
    "ragged-both": make_recipe(config=RAGGED, parallel=BOTH, accumulation=2),
    "gpt2-kept": make_recipe("gpt2", parallel=KEPT, recompute_blocks=2, accumulation=2),
    "copies": make_recipe("gpt_neox", parallel=COPIES),
    "lora-tied": make_recipe("qwen2", parallel=SHARDS, **LORA, recompute_blocks=1),
    "freeze-loop": make_recipe(
        method="freeze", freeze=Freeze(last_blocks=1), parallel=SHARDS, implementation="loop"
    ),
    "chunked": make_recipe("mistral", parallel=SHARDS, loss="chunked", loss_chunk=20, clip_norm=0),
    "mixed-ragged-chunked": make_recipe(
        config=RAGGED, parallel=SHARDS, **MIXED, loss="chunked", loss_chunk=20, recompute_blocks=3
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
    "cpo-tied": make_recipe(
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
)  # fmt: skip
NAMES = [pytest.param(n, marks=pytest.mark.wide) if n in ALIKE else n for n in CASES]


@pytest.fixture(scope="module")
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What each of the case's processes held and computed, by case; xdist's workers share it."""
    mine = [item for item in request.session.items if item.path == Path(__file__)]
    asked = {item.callspec.params["name"] for item in mine if hasattr(item, "callspec")}
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return run_all(asked, tmp_path_factory)
    kept = tmp_path_factory.getbasetemp().parent / f"ranks-{run}.pickle"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_bytes(pickle.dumps(run_all(asked, tmp_path_factory)))
        found: dict[str, list[dict[str, Any]]] = pickle.loads(kept.read_bytes())
    return found


def run_all(
    asked: set[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    names = [name for name in CASES if name in asked]
    answers = run_ranks([CASES[name] for name in names], tmp_path_factory.mktemp("ranks"))
    return dict(zip(names, answers, strict=True))


def run_ranks(recipes: list[Recipe], folder: Path) -> list[list[dict[str, Any]]]:
    """Of each recipe the answers of its ranks."""
    (folder / "cases").write_bytes(pickle.dumps(recipes))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in [*sys.path, str(WORKER.parent)] if p),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run([sys.executable, str(WORKER), str(folder)], env=environment)
    assert ended.returncode == 0
    answers = {}
    for world in {recipe.parallel.world for recipe in recipes}:
        ranks = [pickle.loads((folder / f"{world}-{rank}").read_bytes()) for rank in range(world)]
        answers[world] = iter([*zip(*ranks, strict=True)])
    return [[*next(answers[recipe.parallel.world])] for recipe in recipes]


@pytest.mark.slow
@pytest.mark.covering(CASES)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_what_one_process_computes(name: str, real: Any) -> None:
    recipe, ranks = CASES[name], real[name]
    want = alone(recipe)
    exact = recipe.precision == "fp32"
    close = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.1, "atol": 0.02}
    each = recipe.parallel.world // recipe.parallel.pp
    # those that share products have one loss, and so have stages
    apart = ranks[-each :: recipe.parallel.tp]
    losses = torch.tensor([rank["losses"] for rank in apart]).sum(0)
    torch.testing.assert_close(losses, torch.tensor(want["losses"]), **close)
    if recipe.compares:
        sums = torch.tensor([rank["rewards"] for rank in apart]).sum(0)
        torch.testing.assert_close(sums, torch.tensor(want["rewards"]), **close)
    if recipe.optimizer.clip_norm:
        for rank in ranks:
            norms = torch.tensor([rank["norms"], want["norms"]])
            torch.testing.assert_close(norms[0], norms[1], **close)
    if recipe.accumulation == 1 or recipe.parallel.pp > 1:
        sums = torch.tensor([rank["evaluation"] for rank in apart]).sum(0)
        torch.testing.assert_close(sums, torch.tensor(want["evaluation"]), rtol=1e-2, atol=1e-2)
    for number, whole in enumerate(want["gradients"]):
        seen: set[str] = set()
        for place in range(recipe.parallel.pp):
            mine = ranks[place * each : (place + 1) * each]
            first, *others = (rank["gradients"][number] for rank in mine)
            assert not seen & first.keys()
            seen |= first.keys()
            for weight, gradient in first.items():
                assert all(torch.equal(gradient, other[weight]) for other in others)
                torch.testing.assert_close(gradient, whole[weight], **close, msg=weight)
        assert seen == whole.keys()


@pytest.mark.slow
@pytest.mark.covering(CASES)
@pytest.mark.parametrize("name", NAMES)
def test_each_rank_holds_what_its_certificate_says(name: str, real: Any, tmp_path: Path) -> None:
    """Or one of two runs more does: under load, gloo's thread keeps some of what tensor parallelism
    sent a moment longer, and no one sees when it lets go."""
    recipe = CASES[name]
    traced = [trace(recipe, CPU, rank=rank) for rank in range(recipe.parallel.world)]

    def holds(ranks: list[dict[str, Any]]) -> None:
        for fake, held in zip(traced, ranks, strict=True):
            assert {phase: fake.phases[phase] for phase in held["phases"]} == held["phases"]
            assert {phase: fake.ledger.by_kind(phase) for phase in held["phases"]} == held["kinds"]

    for attempt in range(2 if recipe.parallel.tp > 1 else 0):
        try:
            return holds(real[name] if attempt == 0 else again(recipe, tmp_path / str(attempt)))
        except AssertionError:
            continue
    return holds(real[name] if recipe.parallel.tp == 1 else again(recipe, tmp_path / "last"))


def again(recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    return run_ranks([recipe], folder)[0]
