"""The benchmark for whoever has a GPU: its grid, its arithmetic, and the whole path on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import made_by_hand
from memfit import api, catalog
from memfit.core.units import GIB
from memfit.plan.request.as_stated import read_stated
from typed_commands import quick

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import gpu_grid


@pytest.mark.slow
def test_the_grid_covers_what_it_should_and_fits_a_large_card() -> None:
    device, fits = catalog.find_device("h200-sxm"), made_by_hand.plan()
    with patch.object(gpu_grid.api, "predict", lambda request: fits):  # no length is halved
        requests = [gpu_grid.make_request(n, device, quick=False) for n in range(gpu_grid.CASES)]
    recipes = [read_stated(request).recipe for request in requests]
    assert len({recipe.digest for recipe in recipes}) == len(recipes) >= 60
    assert {api.predict(request).memory.verdict for request in requests[::5]} == {"fits"}
    families = Counter(r.model.config["model_type"] for r in recipes)
    assert set(families) == {"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"}
    assert min(families.values()) >= 5
    assert {r.method for r in recipes} == {"full", "freeze", "lora"}
    assert {r.precision for r in recipes} == {"fp32", "bf16", "bf16-mixed"}
    assert {(r.optimizer.name, r.optimizer.implementation) for r in recipes} == {
        ("adamw", "fused"), ("adamw", "foreach"), ("adamw", "loop"), ("sgd", "foreach"),
    }  # fmt: skip
    assert {r.sequence_length for r in recipes} >= {512, 1024, 2048, 4096, 8192, 16384, 32768}
    assert min(Counter(r.allocator for r in recipes).values()) >= 25
    assert min(Counter(r.packing for r in recipes).values()) >= 8
    assert min(Counter(r.loss for r in recipes).values()) >= 15
    parts = Counter(
        "none" if r.recompute_blocks == 0 else "full" if r.recompute_blocks >= 12 else "half"
        for r in recipes
    )
    assert min(parts.values()) >= 3


@pytest.mark.slow
def test_a_subset_fits_a_small_card() -> None:
    """Shown on every 21st case; what never fits is left out of these, too."""
    row = catalog.find_device("rtx-4090")
    cases = range(0, gpu_grid.CASES, 21)
    made = [gpu_grid.make_request(n, row, quick=False) for n in cases]
    plans = [api.predict(request) for request in made if request is not None]
    assert len(cases) / 2 < len(plans)
    assert all(plan.memory.device_total <= 24 * GIB for plan in plans)


def row(name: str, certified: list, measured: list, **more: object) -> dict:
    numbers = gpu_grid.NUMBERS
    return {
        "name": name, "recipe_digest": name, "device": "gpu",
        "predicted": dict(zip(numbers, certified, strict=True)),
        "certified": dict(zip(numbers, certified, strict=True)),
        "measured": dict(zip(numbers, measured, strict=True)), **more,
    }  # fmt: skip


def test_errors_are_of_what_was_measured_and_misses_are_named() -> None:
    good = row("good", [101, 200, 3 * GIB], [100, 200, 3 * GIB])
    assert gpu_grid.errors(good, "certified")["peak_allocated"] == pytest.approx(0.01)
    assert gpu_grid.misses(good) == []
    far = row("far", [98 * GIB, 106 * GIB, 100 * GIB], [101 * GIB, 100 * GIB, 104 * GIB])
    said = gpu_grid.misses(far)
    assert said == [
        "peak_allocated -2.97% (3.00 GiB)", "peak_reserved +6.00% (6.00 GiB)",
        "device_total -3.85% (4.00 GiB)",
    ]  # fmt: skip
    small = row("small", [100, 100, 5 * GIB], [100, 100, int(5.7 * GIB)])
    assert gpu_grid.misses(small) == []  # 12 %, and less than 0.75 GiB
    failed = {"name": "lost", "recipe_digest": "lost", "device": "gpu", "failed": "measure: slow"}
    table = gpu_grid.summarise([good, far, small, failed])
    assert "| gpu | certified | peak_allocated | 3 | 1.000% |" in table
    assert "4 recipes, 2 misses." in table
    assert "- gpu: far: peak_allocated -2.97% (3.00 GiB)" in table
    assert "- gpu: lost: measure: slow" in table


def test_what_has_a_row_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_case(plan, device, corpus, timeout) -> dict:
        ran.append(plan.recipe_digest)
        found = row(plan.recipe_digest, [100, None, None], [100, None, None])
        more = {"failed": "measure: exit code 5"} if len(ran) == 2 else {}
        return found | {"device": device.id} | more

    monkeypatch.setattr(gpu_grid, "run_case", run_case)
    command = ["--device", "cpu", "--quick", "--most", "3", "--out", str(tmp_path / "g.jsonl")]
    assert gpu_grid.main(command) == 1  # one failed
    assert len(set(ran)) == 3
    assert gpu_grid.main(command) == 1
    assert len(ran) == 3
    assert gpu_grid.main([*command, "--again"]) == 0
    assert ran[3:] == ran[1:2]
    assert "3 recipes, 0 misses." in (tmp_path / "g.md").read_text()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(gpu_grid.api, "find_device", lambda name: catalog.find_device("cpu-x86"))
    assert gpu_grid.main([]) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert gpu_grid.main(["--device", "cpu"]) == 2
    assert "add --quick" in capsys.readouterr().err


def test_a_measurement_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    (request,) = [r for r in gpu_grid.make_requests(cpu(), quick=True)][:1]
    assert gpu_grid.measure(request, tmp_path / "rows.jsonl", 0.01) == "not done after 0 s"


def cpu():
    return api.find_device("cpu")


def typed_here(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """What the command would say; a process of its own would import all libraries again."""
    assert command[1:4] == ["-m", "memfit", "measure"]
    return subprocess.CompletedProcess(command, *quick(*command[3:]))


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_the_whole_path_on_a_cpu(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(run=typed_here, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu_grid, "subprocess", here)
    out, corpus = tmp_path / "grid.jsonl", tmp_path / "measured.jsonl"
    command = ["--device", "cpu", "--quick", "--most", "1"]
    assert gpu_grid.main([*command, "--out", str(out), "--corpus", str(corpus)]) == 0
    (found,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert found["certified"]["peak_allocated"] == found["measured"]["peak_allocated"] > 0
    (measured,) = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert measured["recipe_digest"] == found["recipe_digest"]
    assert "1/1" in capsys.readouterr().out
