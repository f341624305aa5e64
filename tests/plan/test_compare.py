"""Offers side by side, a quantity solved for, and why a configuration was not chosen."""

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.core.errors import DoesNotFit, InvalidRequest, UnknownName
from memfit.core.units import show_bytes, show_seconds
from memfit.plan.budget.offers import read_offers
from memfit.plan.questions.compare import place
from memfit.plan.questions.solve import _halve
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.request import Request

SMALL = {
    "name": "small", "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 1048576,
}  # fmt: skip


def ask(device="rtx-4090", length=2048, batch=8, **more):
    request = {
        "model": SMALL, "weights": "random", "hardware": {"device": device},
        "task": {"sequence_length": length, "global_batch": batch, "steps": 100}, **more,
    }  # fmt: skip
    return from_data(request, Request, source="test")


def test_offers_are_ranked_by_the_objective():
    offers = "rtx-4090,h100-sxm,h100-sxm:8"
    fastest, cheapest, fewest = (
        api.compare(ask(), offers, objective)
        for objective in ("fastest", "cheapest", "fewest-devices")
    )
    for found in (fastest, cheapest, fewest):
        assert [row.best for row in found.rows] == [True, False, False]
        assert {row.verdict for row in found.rows} == {"fits"}
        assert found.plan.recipe.device == found.rows[0].offer.device
    assert fastest.rows[0].offer.count == 8
    assert [r.step_seconds for r in fastest.rows] == sorted(r.step_seconds for r in fastest.rows)
    each = [row.usd_per_million_tokens for row in cheapest.rows]
    assert each == sorted(each)
    assert fewest.rows[0].offer.count == 1
    assert "x the time" in fastest.rows[1].because


def test_money_is_devices_times_hours_times_price():
    (row, *_) = api.compare(
        ask(hardware={"device": "h100-sxm", "price": "2 USD"}), "h100-sxm:8"
    ).rows
    tokens = 8 * 2048 * 100
    assert row.usd == pytest.approx(row.device_hours * 2.95, rel=0.5)
    assert row.usd_per_million_tokens * tokens / 1e6 == pytest.approx(row.usd)
    assert row.device_hours == pytest.approx(8 * row.total_seconds / 3600)


def test_what_is_not_the_same_training_is_said():
    found = api.compare(ask(model="llama-3.1-8b", weights="pretrained"), "rtx-4090,h100-sxm")
    slow = next(row for row in found.rows if row.offer.device == "rtx-4090")
    assert "learns otherwise" in slow.because


def test_offers_are_of_the_step_that_is_asked_for():
    """Adapters on several devices are memfit's own; nobody has asked for torchtitan's step."""
    lora = ask(method="lora", weights="pretrained", model="llama-3.1-8b")
    found = api.compare(lora, "l40s:4,rtx-4090:8")
    assert {(r.framework, r.verdict) for r in found.rows} == {("memfit", "fits")}
    assert all("lora" in r.recipe for r in found.rows)
    assert all(r.step_seconds for r in found.rows)  # no network between machines is needed
    other = api.compare(ask(framework="torchtitan"), "h100-sxm:8")
    assert other.rows[0].framework == "torchtitan"


def test_more_devices_than_rows_share_products():
    """A batch of fewer rows than devices was refused, though nobody had asked for a mesh."""
    for asked in (ask(batch=16), ask(batch=16, method="lora")):
        found = api.compare(asked, "h100-sxm:64")
        assert found.plan.recipe.parallel.tp == 4
        assert found.plan.recipe.global_batch == 16
    (row,) = api.compare(ask(batch=8), "h100-sxm:64").rows  # 4 heads of keys
    assert "is not a multiple of 64: 64 ranks" in row.because


def test_machines_of_an_offer_can_be_said():
    (offer,) = read_offers("rtx-4090:4x2")
    assert (offer.count, offer.nodes, offer.name) == (8, 4, "rtx-4090:4x2")
    found = place(find_device("rtx-4090"), 8, 4)
    assert (found.count, found.nodes) == (2, 4)
    for text in ("rtx-4090:x2", "rtx-4090:0x2", "rtx-4090:4x", "rtx-4090:2x2x2"):
        with pytest.raises(InvalidRequest, match=r"cannot read|names no device"):
            read_offers(text)


def test_an_offer_without_a_plan_is_a_row_with_its_reason():
    found = api.compare(ask(), "h100-sxm:12,h100-sxm:8")
    assert [(r.offer.count, r.verdict) for r in found.rows] == [(8, "fits"), (12, "refused")]
    assert "no whole number of nodes of 8" in found.rows[1].because
    none = api.compare(ask(), "h100-sxm:12")
    assert (none.plan, none.rows[0].best) == (None, False)


@pytest.mark.parametrize(
    ("count", "node", "nodes"), [(1, 1, 1), (8, 8, 1), (64, 8, 8)],
)  # fmt: skip
@pytest.mark.parametrize("device", ["h100-sxm", "rtx-4090", "l40s"])
def test_devices_come_in_nodes(device, count, node, nodes):
    hardware = place(find_device(device), count)
    assert (hardware.count, hardware.nodes) == (node, nodes)


def test_bad_offers():
    with pytest.raises(UnknownName):
        api.compare(ask(), "h100-smx:8")
    with pytest.raises(InvalidRequest, match="`quickest` is no objective"):
        api.compare(ask(), "h100-sxm", "quickest")


class Planned:
    """What `_halve` asks of a value."""

    def __init__(self, value, fits):
        self.value, self.fits = value, fits


@pytest.mark.parametrize("number", [0, 1, 2, 7, 64, 100])
def test_halving_finds_the_last_that_fits(number):
    for most in range(number + 1):
        asked = []

        def attempt(value, most=most, asked=asked):
            asked.append(value)
            return Planned(value, value < most)

        found = _halve(range(number), attempt)
        assert (found.value if found else None) == (most - 1 if most else None)
        assert len(asked) == len(set(asked)) <= 2 + 2 * number.bit_length()


def test_the_longest_sequence_is_the_last_that_fits():
    request = ask(length="auto", batch=1, method="full", precision="bf16-mixed")
    found = api.solve("sequence_length", request)
    assert found.plan.memory.verdict == "fits"
    assert found.plan.recipe.sequence_length == found.value
    assert found.value % 128 == 0
    longer = replace(request, task=replace(request.task, sequence_length=found.value + 128))
    assert api.plan(longer, levers=False).memory.verdict != "fits"
    assert {row.value for row in found.tried} >= {128, found.value, found.value + 128}


def test_the_largest_micro_batch_is_the_last_that_fits():
    request = ask(method="full", precision="bf16-mixed", recompute="none", loss="plain")
    found = api.solve("micro_batch", request)
    assert found.plan.recipe.micro_batch == found.value
    more = found.value + 1
    larger = replace(request, micro_batch=more, task=replace(request.task, global_batch=more))
    assert api.plan(larger, levers=False).memory.verdict != "fits"


def test_the_fewest_devices():
    request = ask("h100-sxm", model="llama-3.1-8b", framework="torchtitan", batch=64)
    found = api.solve("devices", request)
    verdicts = {row.value: row.verdict for row in found.tried}
    assert verdicts[found.value] == "fits"
    assert all(verdict != "fits" for value, verdict in verdicts.items() if value != found.value)
    assert found.value > 1


@pytest.mark.parametrize(
    ("field", "more", "message"),
    [
        ("sequence_lenght", {}, "memfit does not solve for"),
        ("sequence_length", {}, "is stated already"),
        ("micro_batch", {"micro_batch": 2}, "is stated already"),
        ("micro_batch", {"attention": "math", "framework": "megatron"}, "`attention: math` is not"),
    ],
)
def test_what_cannot_be_solved(field, more, message):
    with pytest.raises(InvalidRequest, match=message):
        api.solve(field, ask(**more))


def test_why_not_says_what_is_missing_and_where_the_seconds_go():
    request = ask("h100-sxm", model="llama-3.1-8b", framework="megatron", batch=64, length=8192,
                  hardware={"device": "h100-sxm", "count": 8})  # fmt: skip
    slower = api.why_not(request, {"parallel.tp": 8, "parallel.zero": 1})
    assert slower.answer == "slower"
    assert slower.requested.recipe.parallel.tp == 8
    assert slower.requested.time.step_seconds > slower.chosen.time.step_seconds
    mine, its = ({s.op: s.duration for s in plan.timeline.spans}
                 for plan in (slower.requested, slower.chosen))  # fmt: skip
    most = max(mine, key=lambda op: abs(mine[op] - its.get(op, 0.0)))
    by = mine[most] - its.get(most, 0.0)
    told = f"{show_seconds(abs(by))} {'more' if by > 0 else 'less'}"
    assert slower.because[1] == f"{most}: {told}" == f"tensor: {told}"
    mesh = {"dp_shard": 8, "zero": 1}
    lacking = api.why_not(request, {"parallel": mesh, "micro_batch": 8, "recompute": "none"})
    assert lacking.answer == "does_not_fit"
    kept, chosen = (sum(e.nbytes for e in plan.memory.entries if e.kind == "activations")
                    for plan in (lacking.requested, lacking.chosen))  # fmt: skip
    more = f"activations: {show_bytes(kept - chosen)} more than the chosen one"
    over = lacking.requested.memory.needed - lacking.requested.memory.usable
    assert more in lacking.because
    assert lacking.because[0].endswith(f": {show_bytes(over)} more than there is")
    refused = api.why_not(request, {"parallel": {"tp": 3}})
    assert refused.answer == "refused"
    assert "names 3 ranks" in refused.because[0]
    same = api.why_not(request, {"micro_batch": slower.chosen.recipe.micro_batch})
    assert same.answer == "equal"


def test_time_and_money_bind_in_memfits_own_plans_too():
    request = ask("h100-sxm", batch=64)
    plan = api.plan(request, levers=False)
    for key, value, unit in (
        ("time", plan.time.total_seconds, "s"),
        ("cost", plan.cost.usd, "USD"),
    ):
        more, less = (replace(request.limits, **{key: f"{value * x} {unit}"}) for x in (1.01, 0.99))
        assert api.plan(replace(request, limits=more), levers=False).recipe == plan.recipe
        with pytest.raises(DoesNotFit, match=f"`limits.{key}` is"):
            api.plan(replace(request, limits=less), levers=False)


def test_a_limit_that_nothing_is_known_of_is_said():
    limits = {"cost": "5 USD"}
    plan = api.plan(ask("cpu-x86", limits=limits), levers=False)
    assert any("`limits.cost: 5 USD` is not judged" in said for said in plan.assumptions)
