"""ZeRO's shares by hand, and DeepSpeed's own estimate of a model's states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.core.errors import InvalidRequest
from memfit.plan.memory.declared import find_waiting, predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.request import Request

LLAMA_7B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip
P = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096


def request(stage: int, ranks: int = 8, **changes: Any) -> Request:
    asked: dict[str, Any] = {
        "framework": "deepspeed", "model": LLAMA_7B,
        "hardware": {"device": "h100-sxm", "count": ranks},
        "task": {"sequence_length": 128, "global_batch": ranks, "packing": False},
        "micro_batch": 1, "method": "full", "parallel": {"dp_shard": ranks, "zero": stage},
    }  # fmt: skip
    return from_data(asked | changes, Request, source="request")


def ledger(stage: int, ranks: int = 8, **changes: Any) -> Ledger:
    recipe, model, _ = read_defaults(request(stage, ranks, **changes))
    return predict_ledger(recipe, model, find_device("h100-sxm"))


def states(found: Ledger, phase: Phase) -> int:
    kinds = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)
    return sum(n for kind, n in found.by_kind(phase).items() if kind in kinds)


def test_stage_2_is_what_deepspeed_estimates() -> None:
    """2 P + 18 P / N (stage_1_and_2.py, estimate_zero2_model_states_mem_needs)."""
    found = ledger(2)
    wide = 4 * P // 8  # fp32 gradients, beside a 16-bit copy that the estimate leaves out
    temporary = found.by_kind(Phase.OPTIMIZER_STEP)[Kind.TEMPORARY]
    assert temporary == pytest.approx(wide + 2 * P / 8, rel=1e-3)
    total = states(found, Phase.OPTIMIZER_STEP) + wide
    assert total == pytest.approx(2 * P + 18 * P / 8, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_shares_of_each_stage(ranks: int) -> None:
    one, two, three = (ledger(stage, ranks) for stage in (1, 2, 3))
    step = Phase.OPTIMIZER_STEP
    assert states(one, step) == pytest.approx(2 * P + 2 * P + 12 * P / ranks, rel=0.01)
    assert states(two, step) == pytest.approx(2 * P + 2 * P / ranks + 12 * P / ranks, rel=0.01)
    assert states(three, step) == pytest.approx(16 * P / ranks, rel=0.01)


def test_stage_3_zeroes_gradients_of_its_share_for_its_first_states() -> None:
    """stage3.py, initialize_optimizer_states: over `ds_tensor`s, whose ds_numel is the share's."""
    first = ledger(3).by_kind(Phase.FIRST_STEP)
    assert first[Kind.TEMPORARY] == pytest.approx(4 * P / 8, rel=1e-3)
    few = ledger(3, options={"sub_group_size": 100_000_000}).by_kind(Phase.FIRST_STEP)
    assert few[Kind.TEMPORARY] == 4 * 100_000_000


def test_a_loop_that_holds_outputs_has_the_logits_in_backward() -> None:
    few = ledger(3).by_kind(Phase.BACKWARD)[Kind.LOGITS]
    held = ledger(3, options={"keeps_outputs": True}).by_kind(Phase.BACKWARD)[Kind.LOGITS]
    assert held - few == 2 * 128 * 32000


def test_stage_3_keeps_gathered_weights_up_to_a_limit() -> None:
    assert ledger(3).by_kind(Phase.FORWARD)[Kind.ALL_GATHER] == 2 * 1_050_000_000
    options = {"max_live_parameters": 10**9 // 5, "prefetch_bucket_size": 10**7}
    assert ledger(3, options=options).by_kind(Phase.FORWARD)[Kind.ALL_GATHER] == 2 * 210_000_000


def test_what_a_product_reads_is_gathered_whatever_the_limit() -> None:
    """partitioned_param_coordinator.py, fetch_sub_module: of no live ones none is fetched ahead."""
    head = 2 * 32000 * 4096
    for limit, ahead in ((0, 0), (10**6, 2 * 10**6), (10**8, 2 * 10**7)):
        options = {"max_live_parameters": limit, "prefetch_bucket_size": 10**7}
        gathered = ledger(3, options=options).by_kind(Phase.FORWARD)[Kind.ALL_GATHER]
        assert gathered == head + ahead
    assert Kind.ALL_GATHER not in ledger(2).by_kind(Phase.FORWARD)


def test_given_up_weights_wait_for_the_products_that_read_them() -> None:
    """Beside the update's blocks; they are given back when asked: no verdict counts them."""

    def waits(*asked: Any, **changes: Any) -> int:
        recipe, model, _ = read_defaults(request(*asked, **changes))
        return find_waiting(recipe, model, find_device("h100-sxm"))[0]

    update = 6 * P // 8
    assert waits(3) == 2 * P - 2 * 1_050_000_000 + update
    assert waits(3, 1) == 6 * 10**9  # nothing to gather; a group of 1e9 elements at once
    assert waits(3, offload="optimizer") == 2 * P - 2 * 1_050_000_000  # the host updates
    assert waits(3, offload="parameters") == waits(2) == 0
    assert waits(3, method="lora", lora={"rank": 8, "targets": ["q_proj"]}) == 0
    assert Kind.ALL_GATHER not in ledger(3, 1).by_kind(Phase.FORWARD)
    free, tight = (
        predict_request(request(3, limits={"memory": limit})).memory
        for limit in ("70 GiB", "30 GiB")
    )
    assert free.peak_allocated == tight.peak_allocated
    assert "given back before memory runs out" in free.because
    assert (free.device_total or 0) > (tight.device_total or 0) == 30 * 2**30
    assert (free.verdict, tight.verdict) == ("fits", "fits")


def test_what_is_reserved_is_what_the_replay_reserves() -> None:
    """bench/results/zero3_streams.json: a host a forward ahead, within 3 %."""
    for name, reserved in ahead().items():
        rows, tokens = (int(n) for n in name.split(",")[0].split(" x "))
        task = {"sequence_length": tokens, "global_batch": 8 * rows, "packing": False}
        options = {"prefetch_bucket_size": 10**7, "reduce_bucket_size": 10**7, "release": "4.38"}
        recompute = "full" if "recomputed" in name else "none"
        changes = {"task": task, "micro_batch": rows, "options": options, "recompute": recompute}
        found = predict_request(request(3, **changes)).memory
        assert found.peak_reserved == pytest.approx(reserved, rel=0.03), name


def ahead() -> dict[str, int]:
    file = Path(__file__).parents[3] / "bench" / "results" / "zero3_streams.json"
    results = json.loads(file.read_text()).items()
    return {name: one["reserved"] for name, one in results if "ahead" in name}


def test_what_the_host_updates_leaves_weights_alone() -> None:
    """estimate_zero2_ and estimate_zero3_model_states_mem_needs with cpu_offload: 2 P, and 2 P / N;
    beside them, buffers of gradients on their way, which the estimates leave out."""
    largest = 2 * 32000 * 4096
    for stage, weights in ((2, 2 * P), (3, 2 * P / 8)):
        found = ledger(stage, offload="optimizer")
        step = found.by_kind(Phase.OPTIMIZER_STEP)
        assert Kind.OPTIMIZER_STATE not in step
        assert step[Kind.PARAMETERS] == pytest.approx(weights, rel=0.01)
        gathered = 2 * 500_000_000 if stage == 2 else 0  # allgather_bucket_size
        assert step.get(Kind.TEMPORARY, 0) == pytest.approx(gathered, abs=16)
        way = largest if stage == 2 else 0
        assert sum(e.nbytes for e in found.at(Phase.BACKWARD) if e.owner == "on their way") == way
        assert not any(e.owner == "partition" for e in found.at(Phase.BACKWARD))
        assert not found.by_kind(Phase.FIRST_STEP).get(Kind.TEMPORARY, 0)
    whole = ledger(1, offload="optimizer").at(Phase.BACKWARD)
    assert sum(e.nbytes for e in whole if e.owner == "partition") == 2 * P


@pytest.mark.parametrize("ranks", [1, 8])
def test_weights_on_the_host_are_there_while_they_are_gathered(ranks: int) -> None:
    """estimate_zero3_model_states_mem_needs with cpu_offload_params: no 2 P / N on the device.

    A rank alone copies them (`NoGatherHandle`); of many each copies its share, then gathers.
    """
    here, there = (ledger(3, ranks, offload=where) for where in ("optimizer", "parameters"))
    rows = [e for e in there.at(Phase.FORWARD) if e.kind is Kind.PARAMETERS]
    assert [e.owner for e in rows] == ["rotary"]
    held = sum(e.nbytes for e in here.at(Phase.FORWARD) if e.kind is Kind.PARAMETERS)
    assert held - rows[0].nbytes == pytest.approx(2 * P / ranks, rel=1e-3)
    gathered, share = 2 * 1_050_000_000, 2 * 32000 * 4096 // 8 if ranks == 8 else 0
    assert there.by_kind(Phase.FORWARD)[Kind.ALL_GATHER] == gathered + share
    before = here.by_kind(Phase.FORWARD).get(Kind.ALL_GATHER, 0)
    assert before == (gathered if ranks == 8 else 0)  # alone they are where they are read
    assert there.total(Phase.OPTIMIZER_STEP) < 2**30


class Filled:
    """What transformers asks of its configuration of DeepSpeed, which needs that to be made."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.mismatches: list[str] = []

    def is_auto(self, key: str) -> bool:
        return True

    def is_zero3(self) -> bool:
        return True

    def fill_only(self, key: str, value: Any) -> None:
        self.values[key] = value

    def fill_match(self, *asked: Any) -> None:
        pass


def test_sizes_of_auto_are_what_transformers_fills_in() -> None:
    from types import SimpleNamespace

    from transformers import LlamaConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    model = SimpleNamespace(config=LlamaConfig(hidden_size=LLAMA_7B["hidden_size"]))
    arguments = SimpleNamespace(get_warmup_steps=lambda steps: 0)
    filled = Filled()
    HfTrainerDeepSpeedConfig.trainer_config_finalize(filled, arguments, model, 10)
    keys = {"reduce_bucket_size": "reduce_bucket_size"}
    keys["prefetch_bucket_size"] = "stage3_prefetch_bucket_size"
    sizes = {k: filled.values[f"zero_optimization.{key}"] for k, key in keys.items()}
    assert ledger(3, options=dict.fromkeys(keys, 0)) == ledger(3, options=sizes) != ledger(3)


def test_adapters_have_the_shares_of_what_is_trained() -> None:
    lora = {"method": "lora", "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}
    found, trained = ledger(3, **lora), 32 * 2 * 8 * 2 * 4096
    held = found.by_kind(Phase.FORWARD)
    assert held[Kind.OPTIMIZER_STATE] == pytest.approx(12 * trained / 8, rel=0.01)
    assert held[Kind.REDUCE_SCATTER] == 2 * 500_000_000  # however little it takes
    assert held[Kind.PARAMETERS] == pytest.approx(2 * (P + trained) / 8, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_format": "nf4"}, "cannot train weights stored as"),
        (
            {
                "method": "lora", "lora": {"targets": ["q_proj"]}, "base_format": "int8",
            },
            "cannot be partitioned",
        ),
        ({"precision": "fp32"}, "`precision: fp32` is not described"),
        (
            {"offload": "parameters", "parallel": {"dp_shard": 8, "zero": 2}},
            "`offload: parameters` with `parallel.zero: 2`",
        ),
        (
            {"optimizer": {"name": "adamw8bit"}, "options": {"adamw8bit": "torchao"}},
            "torchao` under ZeRO is not described",
        ),
        (
            {
                "optimizer": {"name": "adamw8bit"}, "options": {"sub_group_size": 2**33},
                "hardware": {"device": "h100-sxm", "count": 2}, "parallel": {"dp_shard": 2},
            },
            "counts up to 2,147,483,647 elements of a tensor",
        ),
    ],
)  # fmt: skip
def test_what_it_has_not(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ledger(3, **changes)
