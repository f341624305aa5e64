"""Optimizers whose kernels or memory exist on CUDA: certified against measured on a real GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from memfit import api, catalog
from memfit.core.errors import UnknownName
from memfit.records import from_data
from memfit.records.request import Request

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import gpu_grid  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
SECONDS = 300.0
WITHIN = {"clip_norm": 0.0, "in_backward": True}
OWN: dict[str, dict[str, Any]] = {
    "in backward": {"name": "adamw", "implementation": "fused", **WITHIN},
    "8 bits, in backward": {"name": "adamw8bit", "implementation": "fused", **WITHIN},
    "bitsandbytes": {"name": "adamw8bit-bnb", "implementation": "fused"},
    "paged": {"name": "adamw8bit-paged", "implementation": "fused"},
    "muon": {"name": "muon", "implementation": "loop"},
    "adafactor": {"name": "adafactor", "implementation": "loop"},
    "rounded by chance": {
        "name": "adamwbf16", "implementation": "fused", "stochastic_rounding": True
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", OWN)
def test_certified_memory_is_what_the_optimizer_takes(name: str, tmp_path: Path) -> None:
    try:
        device = catalog.find_device(torch.cuda.get_device_name(0))
    except UnknownName as error:
        pytest.skip(f"no catalogue row for this GPU: {error.message}")
    request = {
        "model": "qwen3-0.6b", "weights": "random", "method": "full", "precision": "bf16",
        "recompute": "none", "loss": "plain", "micro_batch": 2, "attention": "flash",
        "task": {"sequence_length": 1024, "global_batch": 2, "steps": 10, "packing": False},
        "hardware": {"device": device.id}, "optimizer": {"learning_rate": 1e-4, **OWN[name]},
    }  # fmt: skip
    plan = api.predict(from_data(request, Request, source="the test"))
    row = gpu_grid.run_case(plan, device, tmp_path / "rows.jsonl", SECONDS)
    assert not gpu_grid.misses(row)
