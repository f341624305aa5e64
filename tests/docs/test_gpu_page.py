"""docs/gpu.md: claims about CUDA against rows. Every row here is made up, and none is committed."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "bench")]
import gpu_claims  # noqa: E402
import gpu_page  # noqa: E402
from on_gpu import land  # noqa: E402

MIB, GIB = 2**20, 2**30
NUMBERS = {"peak_allocated": 10 * GIB, "peak_reserved": 11 * GIB, "device_total": 12 * GIB}
HEAD = {
    "device": "h100-sxm", "made_up": True,
    "environment": {"device": "a made-up GPU", "torch": "2.11.0", "driver": "0"},
}  # fmt: skip
KINDS = {"forward": {"activations": 4 * GIB, "parameters": 6 * GIB}}
RECIPE = {
    **HEAD, "slice": "recipes", "name": "made up", "predicted": NUMBERS, "certified": NUMBERS,
    "measured": {**NUMBERS, "outside_allocator": GIB}, "phases": {"forward": 10 * GIB},
    "certified_phases": {"forward": 10 * GIB}, "kinds": KINDS, "certified_kinds": KINDS,
}  # fmt: skip
OPERATOR = "aten.embedding_dense_backward.default"
KERNEL = {
    **HEAD, "slice": "kernels", "name": "kernel: embedding", "operators": [{
        "operator": OPERATOR, "ruled": True, "stated": 2**20, "inside": 2**20, "kept": 0,
        "shapes": ["bfloat16 8x8"], "count": 1,
    }],
}  # fmt: skip
OTHERS = (
    {**HEAD, "slice": "allocator", "name": "small", "divergence": None, "entries": 9},
    {**HEAD, "slice": "kernels", "name": "context", "outside": {"cuBLAS": 3 * GIB // 4}},
    {
        **HEAD, "slice": "speed", "name": "1B", "flops": 1e15,
        "predicted": {
            "step_seconds": 1.0, "step_seconds_low": 0.8, "step_seconds_high": 1.2, "basis": "x",
        },
        "trainers": {
            "memfit": {"seconds": 1.1, "peak": GIB, "together": ["memfit", "trl"]},
            "trl": {"seconds": 2.2, "peak": 1, "together": ["memfit"], "over_memfit": 2.0},
            "hf-trainer": {"failed": "no"},
        },
    },
    {
        **HEAD, "slice": "trainers", "name": "llama", "predicted": GIB, "measured": GIB,
        "predicted_kinds": {"logits": 1}, "attention": {},
    },
    {**HEAD, "slice": "tests", "name": "tests/gpu/x.py", "passed": ["a"], "broken": {}},
    {**HEAD, "slice": "speed", "name": "8B", "failed": "exit code 1: made up"},
    {
        **HEAD, "slice": "cards", "name": "8B", "ran": True, "reserved": GIB, "allowed": 2 * GIB,
        "predicted": {"peak_reserved": 0.99 * GIB},
    },
    {
        **HEAD, "slice": "rates", "name": "products", "launch_seconds": 1e-6,
        "curves": [{"work": "matmul", "dtype": "bf16", "points": [[1.0, 5e14]]}],
    },
    {**HEAD, "slice": "grid", "name": "case 1", "failed": "OutOfMemoryError: made up"},
)  # fmt: skip


def judged(*rows):
    return {one.claim.name: one for one in gpu_page.judge(rows, 0.08)}


def test_claims_without_rows_are_not_yet_measured():
    assert {one.word for one in judged().values()} == {gpu_page.NOT_YET}


def test_rows_that_agree_hold_every_claim_that_they_judge():
    found = judged(RECIPE, KERNEL, *OTHERS)
    assert [name for name, one in found.items() if one.word == "failed"] == []
    held = [name for name, one in found.items() if one.word == "held"]
    assert len(held) == len(found) - 1  # no row here joins PyTorch's history with a certificate


@pytest.mark.parametrize(
    ("number", "component"),
    [
        ("peak_allocated", "activations in forward"),
        ("peak_reserved", "the allocator's replay"),
        ("device_total", "context"),
    ],
)
def test_a_number_that_is_off_fails_its_claim_and_names_the_component(number, component):
    row = copy.deepcopy(RECIPE)
    row["measured"][number] *= 1.2
    if number == "peak_allocated":
        row["kinds"] = {"forward": {"activations": 6 * GIB, "parameters": 6 * GIB}}
    found = judged(row)
    failed = [one for one in found.values() if one.word == "failed"]
    assert {one.claim.name.split()[0] for one in failed} == {"certified", "predicted"}
    for one in failed:
        assert one.failed[0].off == pytest.approx(1 / 1.2 - 1)
        assert one.failed[0].component.startswith(component)


def test_bytes_that_no_tensor_holds_are_said_to_be_no_tensors():
    row = copy.deepcopy(RECIPE)
    row["measured"]["peak_allocated"] *= 1.2  # and all kinds agree
    (found,) = judged(row)["certified allocated bytes, within 2%"].failed
    assert found.component.startswith("no tensor")


def test_the_page_opens_a_failed_claim_with_its_likely_component(monkeypatch):
    monkeypatch.setattr(gpu_page, "published_p90", lambda _: 0.08)
    row = copy.deepcopy(KERNEL)
    row["operators"][0]["inside"] *= 3  # the claim's number is wrong on purpose
    text = gpu_page.page(None, [RECIPE, row, *OTHERS])
    section = text.split("## Failed: bytes inside kernels are the rules'")[1].split("##")[0]
    assert section.strip().startswith(f"Likely component: **{OPERATOR}")
    assert "-66.67%" in section
    assert "| bytes inside kernels are the rules' | `docs/workspaces.md` | failed | 0 of 1" in text
    assert "| memfit (in turn with trl) | 1.100 s |" in text
    assert "grid: case 1 | h100-sxm | failed: OutOfMemoryError: made up" in text
    assert "1 failed" in gpu_page.trust(None, [row])[2]
    assert gpu_page.verified(OPERATOR, [row]) == "0 of 1 shapes on h100-sxm (docs/gpu.md)"


ROLLOUT = {
    **RECIPE, "slice": "rollouts", "name": "GRPO",
    "phase_seconds": {"rollout": 8.0, "score": 0.001, "update": 1.0},
    "planned_seconds": {"rollout": 4.0, "update": None},
}  # fmt: skip


def test_iterations_that_sample_are_judged_by_phase_and_their_seconds_are_shown(monkeypatch):
    name = "certified bytes of each phase, within 2%"
    assert judged(ROLLOUT)[name].word == "held"
    (found,) = judged(ROLLOUT | {"phases": {"decode": 2}, "certified_phases": {"decode": 1}})[
        name
    ].failed
    assert found.where == "h100-sxm: GRPO, decode"
    monkeypatch.setattr(gpu_page, "published_p90", lambda _: 0.08)
    text = gpu_page.page(None, [ROLLOUT, *OTHERS])
    assert "| h100-sxm: GRPO | rollout | 8.000 s | 4.000 s | 2.00 |" in text
    assert "| h100-sxm: GRPO | score | 0.001 s | no such phase | |" in text
    assert "| h100-sxm: GRPO | update | 1.000 s | | |" in text
    assert "within -1.0% and -1.0%, and 1.00 to 1.00 GiB were left" in text


def test_what_failed_or_was_refused_as_a_whole_judges_no_claim():
    """A library's limit is no figure of memfit's: the page names it and its reason."""
    slices = {row["slice"] for row in (RECIPE, KERNEL, *OTHERS)} | {"rollouts"}
    for word in ("failed", "skipped"):
        rows = [{**HEAD, "slice": one, "name": "kernel: x", word: "made up"} for one in slices]
        assert {one.word for one in judged(*rows).values()} == {gpu_page.NOT_YET}
    half = {k: v for k, v in RECIPE.items() if k not in ("measured", "phases", "kinds")}
    assert {one.word for one in judged(half | {"failed": "x"}).values()} == {gpu_page.NOT_YET}


def test_what_is_committed_is_measured():
    assert not any(row.get("made_up") or row.get("rehearsal") for row in gpu_claims.read())


def write(folder, rows, runs=()):
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))


def test_results_land_where_they_are_kept_and_only_once(tmp_path):
    run = {"id": "made-up-1", "recipe": {"device": "h100-sxm"}}
    (tmp_path / "measurements").mkdir()
    write(tmp_path / "out", [RECIPE, KERNEL], [run])
    for _ in range(2):
        land.land(tmp_path / "out", tmp_path)
    rows = gpu_claims.read(tmp_path / "bench/results/gpu/rows.jsonl")
    assert [row["slice"] for row in rows] == ["kernels", "recipes"]
    assert len((tmp_path / "measurements/h100-sxm.jsonl").read_text().splitlines()) == 1
    write(tmp_path / "out", [{**HEAD, "slice": "recipes", "name": "made up", "skipped": "no"}])
    land.land(tmp_path / "out", tmp_path)  # what was measured before stays
    assert "measured" in gpu_claims.read(tmp_path / "bench/results/gpu/rows.jsonl")[1]


def test_a_rehearsal_does_not_land(tmp_path):
    write(tmp_path / "out", [RECIPE | {"rehearsal": True}])
    with pytest.raises(land.Refused, match="hint: rows of `--device cpu`"):
        land.land(tmp_path / "out", tmp_path)
    with pytest.raises(land.Refused, match="hint: FROM"):
        land.land(tmp_path, tmp_path)


def test_what_the_rehearsal_left_explains_the_phase_load_of_rows_that_held_it():
    """Two cuBLAS workspaces, and cuBLASLt's MiB where a product has a bias; then none of them."""
    rows = [row for row in gpu_claims.read() if "load" in row.get("phases", {})]
    rows = [row for row in rows if not row.get("load_alone")]
    assert len(rows) == 6
    for row in rows:
        more = row["phases"]["load"] - row["certified_phases"]["load"]
        assert more - gpu_claims.rehearsed(row) in (0, MIB)
    row = RECIPE | {"phases": {"load": GIB}, "certified_phases": {"load": GIB}}
    name = "certified bytes of each phase, within 2%"
    assert judged(row)[name].word == "failed", "nothing was left here, though it is taken to be"
    assert judged(row | {"load_alone": True})[name].word == "held"


def test_the_memorys_rate_is_that_of_copies_beyond_any_cache():
    curve = {"work": "memory", "points": [[3e7, 3.8e12], [2e9, 3e12]]}
    assert gpu_claims.best_rate(curve) == 3e12
    assert gpu_claims.best_rate(curve | {"work": "matmul"}) == 3.8e12
