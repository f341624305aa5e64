"""Real runs of 2 or 4 processes, compared with one process and with the certificate."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worker import alone
from tiny_steps import CPU

from memfit.certify import trace
from memfit.certify.tracing.recorder import Trace
from memfit.records.recipe import Recipe

WORKER = Path(__file__).parent / "rank_worker.py"
Answers = list[dict[str, Any]]  # of each rank of a recipe
RAN: dict[tuple[str, str], Answers] = {}  # in this session, by file and case


def run_asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answers]:
    """What each of a case's processes held and computed, of the module's cases whose tests run.

    One process forks the ranks of every module's cases, for it imports all libraries; a session
    starts it once, whose workers share it.
    """
    if not RAN:
        RAN.update(_run_all(_find_asked(request.session), tmp_path_factory))
    return {name: found for (stem, name), found in RAN.items() if stem == request.path.stem}


def _find_asked(session: pytest.Session) -> dict[tuple[str, str], Recipe]:
    """By file and case: what the tests that are run take from `real`."""
    found = {}
    for item in session.items:
        cases: Mapping[str, Recipe] = getattr(getattr(item, "module", None), "ON_RANKS", {})
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if name in cases and "real" in getattr(item, "fixturenames", ()):
            found[item.path.stem, name] = cases[name]
    return dict(sorted(found.items()))  # the same for each worker


def _run_all(
    asked: Mapping[tuple[str, str], Recipe], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Answers]:
    def run() -> dict[tuple[str, str], Answers]:
        answers = run_ranks([*asked.values()], tmp_path_factory.mktemp("ranks"))
        return dict(zip(asked, answers, strict=True))

    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return run()
    kept = tmp_path_factory.getbasetemp().parent / f"ranks-{session}.pickle"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_bytes(pickle.dumps(run()))
        found: dict[tuple[str, str], Answers] = pickle.loads(kept.read_bytes())
    return found


def run_ranks(recipes: list[Recipe], folder: Path) -> list[Answers]:
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


def assert_as_one_process(recipe: Recipe, ranks: Answers) -> None:
    """Losses, norms, gathered gradients and an evaluation are those of one process."""
    want = alone(recipe)
    exact = recipe.precision == "fp32"
    close = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.1, "atol": 0.02}
    atol = 5 * close["atol"] if exact else close["atol"]
    each = recipe.parallel.world // recipe.parallel.pp
    # those that share products have one loss, and so have stages
    apart = ranks[-each :: recipe.parallel.tp]
    losses = torch.tensor([rank["losses"] for rank in apart]).sum(0)
    torch.testing.assert_close(losses, torch.tensor(want["losses"]), **close)
    if recipe.compares:
        sums = torch.tensor([rank["rewards"] for rank in apart]).sum(0)
        # differences of sums of some hundred nats
        torch.testing.assert_close(sums, torch.tensor(want["rewards"]), **close | {"atol": atol})
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


def assert_as_certified(recipe: Recipe, ranks: Answers) -> list[Trace]:
    """The first and the last rank hold what their certificates say, by phase and by kind; returns
    the traces. Of four ranks each of the two between shares its place on either axis with one of
    these.
    """
    traced = [trace(recipe, CPU, rank=rank) for rank in (0, recipe.parallel.world - 1)]
    for fake, held in zip(traced, (ranks[0], ranks[-1]), strict=True):
        assert {phase: fake.phases[phase] for phase in held["phases"]} == held["phases"]
        assert {phase: fake.ledger.by_kind(phase) for phase in held["phases"]} == held["kinds"]
    return traced
