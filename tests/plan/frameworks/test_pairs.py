"""How TRL and LLaMA-Factory compare pairs, as their own trainers were measured to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.request import Request

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import pairs

RECORDED = json.loads(pairs.OUT.read_text())
ROWS = [
    pytest.param(name, row, id=f"{name} {row['method']} {row['precision']} {row['reference']}")
    for name, part in RECORDED.items()
    for row in part["rows"]
    if row["recompute"] == "none"
    or row["precision"] == "bf16-mixed"
    or row["tokens"] == pairs.LONG
    or "words" in row
]
LIMIT = 0.005
PYTHON = Path(sys.prefix) / "neighbours" / "trainers" / "bin" / "python"
LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 8, "targets": ["q_proj"]}}


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_step_holds_what_the_trainers_own_held(name: str, row: dict[str, Any]) -> None:
    """Of the whole step and of its backward; bench/pairs.py ran them."""
    assert pairs.predict(row, name) == pytest.approx(row["measured"], rel=LIMIT)


def test_the_docs_say_how_many_steps_were_run_and_how_near_they_are() -> None:
    rows = [row for part in RECORDED.values() for row in part["rows"]]
    far = max(abs(r["predicted"][k] / r["measured"][k] - 1) for r in rows for k in r["measured"])
    said = " ".join((Path(__file__).parents[3] / "docs" / "neighbours.md").read_text().split())
    assert f"highest instant is within 0.4 % of the prediction, in {len(rows)} cases" in said
    assert far < 0.004


@pytest.mark.slow
@pytest.mark.wide  # its versions are pinned; what is recorded is held to the predictions above
def test_trls_own_trainer_holds_today_what_is_recorded() -> None:
    if not PYTHON.exists():
        pytest.skip("`make neighbours` installs TRL")
    found = pairs.run_apart(pairs.TILED, str(PYTHON), each=7)["rows"]
    kept = RECORDED[pairs.TILED]["rows"][::7]
    assert [row["measured"] for row in found] == [
        pytest.approx(row["measured"], rel=LIMIT) for row in kept
    ]


def ask(**changes: Any) -> Request:
    asked: dict[str, Any] = {
        "framework": "trl", "model": "llama-3.1-8b", "hardware": {"device": "h100-sxm"},
        "task": {"objective": "dpo", "sequence_length": 512, "global_batch": 4}, "micro_batch": 4,
        "precision": "bf16",
    }  # fmt: skip
    return from_data(asked | changes, Request, source="request")


def ledger(**changes: Any) -> Ledger:
    recipe, model, _ = read_defaults(ask(**changes))
    return predict_ledger(recipe, model, find_device(recipe.device))


def held(found: Ledger, kind: Kind) -> int:
    return found.by_kind(Phase.LOAD).get(kind, 0)


def test_a_second_model_is_as_large_as_the_first() -> None:
    """And LLaMA-Factory's is of the computed dtype."""
    none = {"preference": {"reference": "precomputed"}}
    low = {"options": {"compares": "llamafactory"}}
    bare = held(ledger(**none), Kind.PARAMETERS)
    assert held(ledger(), Kind.PARAMETERS) == pytest.approx(2 * bare, rel=1e-3)
    wide = {"precision": "bf16-mixed"}
    assert held(ledger(**wide), Kind.PARAMETERS) == pytest.approx(4 * bare, rel=1e-3)
    assert held(ledger(**wide, **low), Kind.PARAMETERS) == pytest.approx(3 * bare, rel=1e-3)
    assert held(ledger(**LORA), Kind.PARAMETERS) == pytest.approx(bare, rel=0.01)


def test_what_a_second_model_was_cast_to_is_gone_with_its_forward() -> None:
    """Of every block: autocast keeps 2 B a weight until the forward has ended."""
    wide = {"precision": "bf16-mixed", "recompute": "none"}
    beside = ledger(**wide)
    before = ledger(**wide, preference={"reference": "precomputed"})
    second = sum(e.nbytes for e in beside.at(Phase.LOAD) if e.owner == "reference")
    update = [found.total(Phase.OPTIMIZER_STEP) for found in (beside, before)]
    assert update[0] - update[1] == second
    during = beside.total(Phase.LOSS) - before.total(Phase.LOSS) - second
    assert during > 2 * 6.9e9  # without the head, which is cast tile by tile


def test_bytes_of_a_logit_on_a_gpu() -> None:
    """Beside the policy's logits, the reference's; a kernel's own copies where CUDA makes them."""
    counted = 4 * 512 * 128256
    long = {"task": {"objective": "dpo", "sequence_length": 512, "global_batch": 4}}

    def each(compares: str = "1.9", **changes: Any) -> float:
        changes["options"] = {"compares": compares}
        found = ledger(**LORA, **long, precision="bf16-mixed", base_format="bf16", **changes)
        kinds = found.by_kind(Phase.LOSS)
        return (kinds[Kind.LOGITS] + kinds[Kind.WORKSPACE] - 2 * 32 * 2**20) / counted

    # both logits in fp32, a flat copy of the policy's for its entropy, half of them picked out
    assert each() == pytest.approx(4 + 4 + 4, rel=0.07)
    before = {"preference": {"reference": "precomputed"}}
    assert each(**before) == pytest.approx(4 + 4, rel=0.1)
    # the policy's and their log-softmax; the reference's, made contiguous, and theirs
    assert each("llamafactory") == pytest.approx(4 + 4 + 4 + 4 + 4, rel=0.01)
    assert each("llamafactory", **before) == pytest.approx(4 + 4 + 4, rel=0.01)


TWO: dict[str, Any] = {
    "hardware": {"device": "h100-sxm", "count": 2},
    "task": {"objective": "dpo", "sequence_length": 512, "global_batch": 8},
}


def test_a_reference_without_its_adapter_is_gathered_as_the_policy_is() -> None:
    sharded = {**LORA, **TWO, "parallel": {"dp_shard": 2}, "base_format": "bf16"}
    sharded["options"] = {"compares": "1.9"}
    found, before = ledger(**sharded), ledger(**sharded, preference={"reference": "precomputed"})
    assert (
        found.by_kind(Phase.LOSS)[Kind.ALL_GATHER] == found.by_kind(Phase.FORWARD)[Kind.ALL_GATHER]
    )
    assert before.peak < found.peak


@pytest.mark.parametrize(("changes", "message"), [
    ({**TWO, "parallel": {"dp_shard": 2}}, "a second model that ranks share is not described"),
    ({**TWO, "parallel": {"dp_shard": 2}, "options": {"fsdp_version": 2}}, "under accelerate's"),
    ({"framework": "torchtune"}, "`objective: dpo` under `framework: torchtune`"),
    ({"framework": "deepspeed"}, "`objective: dpo` under `framework: deepspeed`"),
    ({"framework": "hf-trainer", "loss": "chunked"}, "it is a loss of tokens"),
    ({"micro_batch": 3, "task": {"objective": "dpo", "global_batch": 6}}, "is odd"),
    ({"preference": {"reference": "adapter-off"}}, "has no adapter"),
    ({"framework": "memfit", "preference": {"reference": "second-model"}}, "holds one model"),
])  # fmt: skip
def test_what_is_not_described_is_refused(changes: dict[str, Any], message: str) -> None:
    request = ask(**changes)
    with pytest.raises(InvalidRequest, match=message):
        (api.plan if request.framework == "memfit" else predict_request)(request)
