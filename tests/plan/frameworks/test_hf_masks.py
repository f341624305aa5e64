"""hf-trainer and trl held to the trainers themselves where attention is given masks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit import api
from memfit.core.errors import InvalidRequest
from neighbour_programs import run_program

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
import hf_masks

BENCH = Path(hf_masks.__file__).parent
LIMIT = 0.5  # percent of the peak
SHOWN = (
    "llama: full rows", "llama: padded, recomputed", "llama: eager, padded",
    "mistral: full rows", "mistral: padded, odd row", "gemma2: padded, recomputed",
    "gemma3_text: lora, padded, mixed", "phi3: recomputed, mixed", "qwen2: full rows",
    "gpt_oss: full rows", "falcon: padded", "falcon-7b: full rows", "gptj: padded",
    "gpt2: padded", "mixtral: recomputed, mixed", "deepseek_v3: recomputed, mixed",
    "gpt_oss: lora, padded, mixed", "olmo3: padded", "cohere2: recomputed, mixed",
)  # fmt: skip
# masks of whose classes another one's are
ALIKE = ("qwen2: full rows", "gptj: padded", "phi3: recomputed, mixed", "falcon-7b: full rows",
         "olmo3: padded", "cohere2: recomputed, mixed")  # fmt: skip
ROWS = [json.loads(line) for line in hf_masks.OUT.read_text().splitlines()]


@pytest.mark.covering
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.wide] if n in ALIKE else []) for n in SHOWN]
)
def test_a_step_holds_what_the_trainers_own_step_holds(name: str) -> None:
    case = hf_masks.make_cases()[name]
    real, mine = hf_masks.measure(case), hf_masks.predict(case)
    assert mine == pytest.approx(real, rel=LIMIT / 100)


def test_what_was_recorded_is_what_is_predicted_and_within_the_limit() -> None:
    cases = hf_masks.make_cases()
    assert [row["name"] for row in ROWS] == list(cases)
    assert {row["name"]: row["predicted"] for row in ROWS} == {
        name: hf_masks.predict(case) for name, case in cases.items()
    }
    assert {row["name"] for row in ROWS if hf_masks.off_by(row) < -LIMIT} == set()
    assert len(ROWS) >= 80
    assert len({row["name"].partition(":")[0] for row in ROWS}) >= 12
    assert max(abs(hf_masks.off_by(row)) for row in ROWS) <= LIMIT
    assert sum(row["name"].endswith(", TRL") for row in ROWS) >= 14


OF_TRL = (
    "mistral: full rows, TRL", "llama: packed, TRL", "llama: padded, flash, TRL",
    "llama: pairs, padded, TRL",
)  # fmt: skip


@pytest.mark.wide  # what was recorded of them is held to the predictions above
def test_trls_own_trainers() -> None:
    said = run_program(BENCH / "hf_masks.py", *OF_TRL)
    lines = [line for line in said.splitlines() if line.startswith(OF_TRL)]
    assert len(lines) == len(OF_TRL)
    assert max(abs(float(line.split()[-2])) for line in lines) <= LIMIT


def plan(
    framework: str, task: dict[str, Any], micro: int, model: str = "pythia-70m", **options: Any
) -> Any:
    changes = {
        "framework": framework, "micro_batch": micro, "recompute": "none", "method": "full",
        **{f"task.{key}": value for key, value in {**task, **SHAPE}.items()},
        **{f"options.{key}": value for key, value in options.items()},
    }  # fmt: skip
    return api.plan(api.read(model, device="h100-sxm", changes=changes), levers=False)


SHAPE = {"sequence_length": 1024, "global_batch": 8}
ON_ROWS = ("packed rows", "rows differ")
SFT, PAIRS = {"objective": "sft"}, {"objective": "dpo"}
FULL = {"padded": False, "padding_free": False}
PADDED, LAID_OUT = FULL | {"padded": True}, FULL | {"padding_free": True}


@pytest.mark.parametrize(("framework", "task", "micro", "means", "said"), [
    ("hf-trainer", {}, 4, FULL, ""),
    ("hf-trainer", {"packing": False}, 4, PADDED, "given a mask (`options.padded: false`"),
    ("hf-trainer", {"packing": False}, 1, FULL, ""),  # transformers drops a mask of ones
    ("hf-trainer", {**SFT, "packing": True}, 4, FULL, ""),  # whose rows are cut beforehand
    ("trl", {}, 4, FULL, "`packing_strategy: wrapped`"),
    ("trl", {**SFT, "packing": False}, 4, PADDED, "given a mask (`options.padded: false`"),
    ("trl", {**SFT, "packing": True}, 4, LAID_OUT, "by a mask of 4096 x 4096 tokens"),
    ("trl", {**SFT, "packing": True}, 1, LAID_OUT, "by a mask of 1024 x 1024 tokens"),
    ("trl", PAIRS, 2, PADDED, "given a mask (`options.padded: false`"),
])  # fmt: skip
def test_a_plan_takes_the_masks_that_the_trainers_collator_makes(
    framework: str, task: dict[str, Any], micro: int, means: dict[str, bool], said: str
) -> None:
    left, stated = plan(framework, task, micro), plan(framework, task, micro, **means)
    assert left.memory.peak_allocated == stated.memory.peak_allocated
    told = [line for line in left.assumptions if line.startswith(ON_ROWS)]
    assert len(told) == bool(said)
    assert all(said in line for line in told)
    assert not [line for line in stated.assumptions if line.startswith(ON_ROWS)]
    if means != FULL:
        free = plan(framework, task, micro, **FULL)
        assert free.memory.peak_allocated < left.memory.peak_allocated


def test_flash_attn_needs_no_mask_of_packed_rows_and_copies_padded_ones() -> None:
    flash = {"attn_implementation": hf_masks.FLASH, "model": "smollm2-135m"}
    packed, full = (
        plan("trl", {**SFT, "packing": True}, 4, **flash, padding_free=laid_out)
        for laid_out in (True, False)
    )
    # but for rotary tables of the whole batch's positions
    assert packed.memory.peak_allocated == pytest.approx(full.memory.peak_allocated, rel=1e-3)
    padded = plan("trl", {**SFT, "packing": False}, 4, **flash)
    copies = 30 * 4 * 1024 * 576 * 2  # an output more in each of the 30 blocks
    assert padded.memory.peak_allocated - full.memory.peak_allocated == copies
    assert any("copies without padding" in line for line in padded.assumptions)


def test_pairs_are_not_laid_end_to_end() -> None:
    with pytest.raises(
        InvalidRequest, match=r"`options\.padding_free: true` with `objective: dpo`"
    ):
        plan("trl", PAIRS, 2, padding_free=True)


@pytest.mark.parametrize("value", ["yes", 1, 0.5])
def test_a_knob_of_three_values_takes_no_other(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="is not a value of `trl`'s knob"):
        plan("trl", {}, 1, padded=value)
