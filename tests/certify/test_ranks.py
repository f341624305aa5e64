"""Many ranks: a real run of two processes against one process, and against the certificate."""

from __future__ import annotations

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
from memfit.recipe import Freeze, Parallel, Recipe

WORKER = Path(__file__).parent / "rank_worker.py"
SHARDS = Parallel(dp_shard=2)
KEPT = Parallel(dp_shard=2, reshard_after_forward=False)
COPIES = Parallel(dp_replicate=2)
RAGGED = {**CONFIGS["llama"], "vocab_size": 251, "intermediate_size": 177}
MIXED = {"precision": "bf16-mixed"}
BF16 = {"precision": "bf16", "base_format": "bf16"}
LORA = {"method": "lora"}
CASES: dict[str, Recipe] = {
    "ragged": make_recipe(config=RAGGED, parallel=SHARDS, accumulation=2),
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
    "bf16-foreach": make_recipe(parallel=SHARDS, **BF16, implementation="foreach"),
    "mixed-copies-sgd": make_recipe(
        parallel=COPIES, **MIXED, name="sgd", weight_decay=0.1, implementation="foreach"
    ),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each of two processes held and computed, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases").write_bytes(pickle.dumps(list(CASES.values())))
    paths = [*sys.path, str(WORKER.parent)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", folder / "store", folder / "cases", folder / f"{rank}"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    answers = [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(2)]
    return [dict(zip(CASES, answer, strict=True)) for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_process_computes(name: str, real: Any) -> None:
    recipe = CASES[name]
    want, (first, second) = alone(recipe), (rank[name] for rank in real)
    exact = recipe.precision == "fp32"
    close = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.1, "atol": 0.02}
    losses = torch.tensor([first["losses"], second["losses"]]).sum(0)
    torch.testing.assert_close(losses, torch.tensor(want["losses"]), **close)
    if recipe.optimizer.clip_norm:
        norms = torch.tensor([first["norms"], second["norms"], want["norms"]])
        torch.testing.assert_close(norms[:2], norms[2:].expand(2, 2), **close)
    sums = torch.tensor([first["evaluation"], second["evaluation"]]).sum(0)
    if recipe.accumulation == 1:
        torch.testing.assert_close(sums, torch.tensor(want["evaluation"]), rtol=1e-2, atol=1e-2)
    for mine, other, whole in zip(
        first["gradients"], second["gradients"], want["gradients"], strict=True
    ):
        assert mine.keys() == whole.keys()
        for weight, gradient in whole.items():
            assert torch.equal(mine[weight], other[weight])
            torch.testing.assert_close(mine[weight], gradient, **close, msg=weight)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_each_rank_holds_what_its_certificate_says(name: str, rank: int, real: Any) -> None:
    fake, held = trace(CASES[name], CPU, rank=rank), real[rank][name]
    assert {phase: fake.phases[phase] for phase in held["phases"]} == held["phases"]
    assert {phase: fake.ledger.by_kind(phase) for phase in held["phases"]} == held["kinds"]
