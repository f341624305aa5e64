"""docs/scaling.md: of the recorded points, which are what is predicted today."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from memfit import api

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import scaling
import scaling_page

ROWS = scaling_page.read_rows()["rows"]


def test_every_model_is_there_from_8_to_100_000_gpus() -> None:
    for model in scaling.MODELS:
        for kind in ("weak", "strong"):
            mine = [r for r in ROWS if (r["model"], r["scaling"]) == (model, kind)]
            assert [row["gpus"] for row in mine] == list(scaling.SIZES)
    known = {*scaling.SPEEDS, "memory", "batch size"}
    assert {row["binding"] for row in ROWS} <= known


def test_what_binds_is_what_gains_the_most_and_nothing_is_lost_by_more() -> None:
    for row in ROWS:
        if row["fits"]:
            gains = row["doubled"]
            assert gains[row["binding"]] == max(gains.values())
            assert min(gains.values()) >= 0.999, row
            assert row["used"] <= row["gpus"]
            assert math.isclose(sum(row["parts"].values()), row["step_seconds"], rel_tol=1e-3)


@pytest.mark.parametrize("at", [
    ("llama-3.1-8b", "weak", 64),
    pytest.param(("llama-3.1-70b", "strong", 512), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_recorded_point_is_predicted_today(at: tuple[str, str, int]) -> None:
    (row,) = (r for r in ROWS if (r["model"], r["scaling"], r["gpus"]) == at)
    device = api.find_device(scaling.DEVICE)
    today = scaling.point(row["model"], row["gpus"], row["global_batch"], device)
    assert today == {k: v for k, v in row.items() if k != "scaling"}


def test_the_plot_shows_every_point_that_fits() -> None:
    drawn = scaling_page.plot()
    assert drawn.count("<circle") == sum(row["fits"] for row in ROWS)
