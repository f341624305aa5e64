"""Certified against measured memory on a real GPU; skipped with a reason where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memfit import api, catalog
from memfit.core.errors import UnknownName

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import gpu_grid  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
RECIPES = 4
SECONDS = 300.0


def this_gpu() -> str:
    try:
        return catalog.find_device(torch.cuda.get_device_name(0)).id
    except UnknownName as error:
        pytest.skip(f"no catalogue row for this GPU: {error.message}")


@pytest.mark.slow
@pytest.mark.timeout(RECIPES * 2 * SECONDS)
def test_certified_memory_is_what_a_few_recipes_take(tmp_path: Path) -> None:
    device = catalog.find_device(this_gpu())
    missed = {}
    requests = list(gpu_grid.make_requests(device, quick=True))[:RECIPES]
    assert requests
    for request in requests:
        plan = api.predict(request)
        row = gpu_grid.run_case(plan, device, tmp_path / "rows.jsonl", SECONDS)
        if words := gpu_grid.misses(row):
            missed[row["name"]] = words
    assert missed == {}
