"""Training budgets against published runs, and each quantity from the others."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from memfit.catalog import find_device, find_model, models
from memfit.core import units
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.plan.budget.budget import QUANTITIES, BudgetRequest, read_budget, solve_budget
from memfit.plan.budget.inference import InferenceRequest, cache_nbytes, needs, size_by_inference
from memfit.train.run.generate import cache_name

positive = st.floats(1e-3, 1e3)


def solved(**texts):
    budget = solve_budget(read_budget(**texts))
    return {name: figure.value for name, figure in budget.figures.items()}


@pytest.mark.parametrize(
    ("parameters", "tokens", "flop", "tolerance"),
    [
        ("174.6B", "300B", 3.14e23, 0.005),  # GPT-3, 2005.14165 table D.1: 3.64e3 PF-days
        ("70B", "1.4T", 5.76e23, 0.025),  # Chinchilla, 2203.15556
        ("405B", "15.6T", 3.8e25, 0.005),  # Llama 3, 2407.21783
    ],
)
def test_the_compute_of_published_runs(parameters, tokens, flop, tolerance):
    found = solved(parameters=parameters, tokens=tokens)
    assert found["compute"] == pytest.approx(flop, rel=tolerance)
    assert found["forward"] * 2 == pytest.approx(found["backward"])
    assert found["forward"] + found["backward"] == pytest.approx(found["compute"])


def test_gpt3_in_pflop_days():
    assert solved(parameters="174.6B", tokens="300B")["pflop_days"] == pytest.approx(3640, rel=1e-3)


def test_time_and_money_by_hand():
    """8 devices of 1e15 FLOP/s at 50 % give 4e15 FLOP/s: 4e20 FLOP take 1e5 s."""
    found = solved(
        compute="4e20 FLOP", parameters="1B", devices="8", peak="1 PFLOP/s", mfu=0.5, price="2 USD"
    )
    assert found["throughput"] == 4e15
    assert found["time"] == pytest.approx(1e5)
    assert found["device_hours"] == pytest.approx(8e5 / 3600)
    assert found["cost"] == pytest.approx(16e5 / 3600)
    assert found["tokens"] == pytest.approx(4e20 / 6e9)


def test_chinchilla_both_ways():
    assert solved(parameters="7B")["tokens"] == pytest.approx(140e9)
    assert solved(tokens="140B")["parameters"] == pytest.approx(7e9)
    found = solved(compute="1.2e21 FLOP")
    assert found["parameters"] == pytest.approx(math.sqrt(1e19))
    assert found["tokens"] == pytest.approx(20 * found["parameters"])
    given_both = solved(parameters="7B", tokens="2T")
    assert given_both["chinchilla_tokens"] == pytest.approx(140e9)
    assert given_both["chinchilla_parameters"] == pytest.approx(100e9)
    best = given_both["optimal_parameters"], given_both["optimal_tokens"]
    assert 6 * best[0] * best[1] == pytest.approx(given_both["compute"])
    assert best[1] == pytest.approx(20 * best[0])


# Everything that determines a budget without Chinchilla's split, given rate and price.
DETERMINED = [
    *((*two, one) for two in combinations(("parameters", "tokens", "compute"), 2)
      for one in ("devices", "time")),
    *((one, spent, how) for one in ("parameters", "tokens") for spent in ("device_hours", "cost")
      for how in ("devices", "time")),
    ("parameters", "devices", "time"),
    ("tokens", "devices", "time"),
]  # fmt: skip


@settings(max_examples=60)
@given(parameters=positive, tokens=positive, devices=positive, mfu=st.floats(0.05, 1), x=positive)
def test_every_way_of_asking_gives_the_same_budget(parameters, tokens, devices, mfu, x):
    rates = {"peak": x * 1e14, "mfu": mfu, "price": x}
    whole = solve_budget(
        BudgetRequest(parameters=parameters * 1e9, tokens=tokens * 1e9, devices=devices, **rates)
    )
    values = {name: whole.figures[name].value for name in QUANTITIES}
    for names in DETERMINED:
        known = {name: values[name] for name in names}
        again = solve_budget(BudgetRequest(**known, **rates)).figures
        for name in QUANTITIES:
            assert again[name].value == pytest.approx(values[name], rel=1e-9), names


@settings(max_examples=100)
@given(parameters=positive, tokens=positive)
def test_tokens_come_back_from_compute(parameters, tokens):
    p, d = parameters * 1e9, tokens * 1e9
    compute = solve_budget(BudgetRequest(parameters=p, tokens=d)).figures["compute"].value
    back = solve_budget(BudgetRequest(parameters=p, compute=compute)).figures
    assert back["tokens"].value == pytest.approx(d)
    back = solve_budget(BudgetRequest(tokens=d, compute=compute)).figures
    assert back["parameters"].value == pytest.approx(p)


def test_a_contradiction_names_both_values():
    with pytest.raises(InvalidRequest) as caught:
        solved(parameters="7B", tokens="140B", compute="1e21 FLOP")
    assert "1e+21 FLOP (given)" in str(caught.value)
    assert "5.88e+21 FLOP by 6 x parameters x tokens" in str(caught.value)
    assert "`parameters`, `tokens`, `compute`" in caught.value.hint
    with pytest.raises(InvalidRequest, match="by peak x MFU x device_hours") as caught:
        solved(parameters="7B", tokens="1T", device="h100-sxm", devices="8", time="3 d")
    assert "(6 x parameters x tokens)" in str(caught.value)


def test_rounded_figures_do_not_contradict():
    assert solved(parameters="7B", tokens="140B", compute="5.9e21 FLOP")["compute"] == 5.9e21


@pytest.mark.parametrize(
    ("texts", "missing"),
    [
        ({}, "one of `parameters`"),
        ({"devices": "8"}, "`time`"),
        ({"time": "3 d"}, "`devices`"),
        ({"devices": "8", "time": "3 d"}, "the peak"),
        ({"device_hours": "100"}, "the peak"),
        ({"cost": "500 USD"}, "the price"),
        ({"cost": "500 USD", "price": "2 USD"}, "the peak"),
        ({"cost": "500 USD", "peak": "1 PFLOP/s"}, "the price"),
        ({"devices": "8", "time": "3 d", "device": "gb10"}, "the peak"),
    ],
)
def test_too_little_says_what_is_missing(texts, missing):
    with pytest.raises(InvalidRequest, match="too little") as caught:
        solved(**texts)
    assert missing in caught.value.hint


@pytest.mark.parametrize("name", [*QUANTITIES, "peak", "mfu", "price"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_figure_that_is_not_above_zero_is_refused(name, value):
    with pytest.raises(InvalidRequest, match=f"`{name}"):
        solve_budget(BudgetRequest(**{name: value}))


def test_an_mfu_in_percent_is_refused():
    with pytest.raises(InvalidRequest, match="above 1") as caught:
        solved(parameters="7B", mfu=40)
    assert "0.4" in caught.value.hint


def test_the_catalogue_gives_peak_and_price_and_says_so():
    budget = solve_budget(read_budget(parameters="7B", device="h100-sxm", devices="8"))
    device = find_device("h100-sxm")
    assert budget.figures["peak"].value == device.flops["bf16"]
    assert budget.figures["price"].value == 2.95  # of 2.29, 2.95 and 3.99 on demand
    assert "median of 3" in budget.figures["price"].because
    assert "h100-sxm" in budget.figures["peak"].because
    assert "assumed" in budget.figures["mfu"].because
    own = solve_budget(read_budget(parameters="7B", device="h100-sxm", price="9 USD", mfu=0.5))
    assert own.figures["price"].value == 9
    assert own.figures["mfu"].because == "given"


def test_every_figure_says_why_and_the_unknown_says_what_it_lacks():
    budget = solve_budget(read_budget(parameters="7B"))
    assert all(figure.because for figure in budget.figures.values())
    for name in ("device_hours", "devices", "time", "cost", "throughput", "peak", "price"):
        assert budget.figures[name].value is None
        assert "unknown" in budget.figures[name].because


def test_a_part_of_a_device_is_rounded_up_in_words():
    budget = solve_budget(read_budget(parameters="7B", device="h100-sxm", time="30 d"))
    devices = budget.figures["devices"]
    assert f"take {math.ceil(devices.value)}" in devices.because


def test_few_tokens_are_warned_of():
    def warnings(**texts):
        return " ".join(solve_budget(read_budget(**texts)).warnings)

    assert "meant to last" in warnings(parameters="1B", tokens="199B")
    assert "meant to last" not in warnings(parameters="1B", tokens="200B")
    assert "tokens a parameter" in warnings(parameters="70B", tokens="300B")
    assert "tokens a parameter" not in warnings(parameters="7B", tokens="300B")


REQUEST = InferenceRequest(memory=24 * units.GIB, context=8192, sequences=4)


def test_inference_first_takes_the_largest_that_fits_and_the_tokens_that_are_left():
    budget = solve_budget(
        read_budget(inference_memory="24 GiB", context=8192, sequences=4, compute="11.6 PFLOP-days")
    )
    sized = budget.inference
    best = find_model(sized.model)
    dense = [m for m in models() if m.active_parameters is None and m.model_type != "t5"]
    fits = [m for m in dense if m.max_sequence >= 8192 and needs(m, REQUEST) <= REQUEST.memory]
    assert best in fits
    assert best.parameters == max(m.parameters for m in fits)
    assert sized.largest * 2 + sized.cache_nbytes == pytest.approx(REQUEST.memory)
    assert sized.largest >= best.parameters
    assert budget.figures["parameters"].value == sized.largest
    spent = 6 * sized.largest * budget.figures["tokens"].value
    assert spent == pytest.approx(11.6 * units.PFLOP_DAY)
    assert sized.model in budget.figures["parameters"].because


def test_a_mixture_of_experts_is_not_offered_where_6pd_counts_every_parameter():
    request = InferenceRequest(memory=60 * units.GIB, context=512)
    mixture, best = find_model("qwen3-30b-a3b"), find_model(size_by_inference(request).model)
    assert needs(mixture, request) < request.memory
    assert mixture.architecture().experts.count
    assert not best.architecture().experts.count


def test_bytes_a_parameter_and_an_element_count():
    whole = size_by_inference(REQUEST)
    halved = size_by_inference(
        InferenceRequest(memory=24 * units.GIB, context=8192, sequences=4, weight_bytes=0.5)
    )
    assert halved.parameters > 3 * whole.parameters
    m = find_model("llama-3.1-8b")
    assert cache_nbytes(m, REQUEST) == 2 * 32 * 8 * 128 * 2 * 4 * 8192
    eight = InferenceRequest(memory=24 * units.GIB, context=8192, sequences=4, cache_bytes=1)
    assert cache_nbytes(m, eight) == cache_nbytes(m, REQUEST) / 2


@pytest.mark.parametrize("name", ["gpt2", "pythia-70m", "smollm2-135m", "qwen2.5-0.5b"])
def test_the_cache_is_the_one_that_hugging_face_keeps(name):
    row = find_model(name)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**row.reference().config))
        ids = torch.zeros(3, 40, dtype=torch.long)
        cache = getattr(module(input_ids=ids, use_cache=True), cache_name())
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    asked = InferenceRequest(memory=1, context=40, sequences=3, cache_bytes=1)
    assert held == cache_nbytes(row, asked)


def test_parameters_that_cannot_be_served_do_not_fit():
    with pytest.raises(DoesNotFit, match="70B parameters need") as caught:
        solved(parameters="70B", inference_memory="24 GiB", context=8192)
    assert "parameters fit" in caught.value.hint
    assert solved(parameters="3B", inference_memory="24 GiB", context=8192)["parameters"] == 3e9
    with pytest.raises(DoesNotFit, match="no model of the catalogue fits"):
        solved(inference_memory="24 MiB", context=1024)


def test_inference_figures_are_checked():
    with pytest.raises(InvalidRequest, match="no inference memory"):
        solved(parameters="7B", context=8192)
    with pytest.raises(InvalidRequest, match="`context: 0`"):
        solved(inference_memory="24 GiB")
    with pytest.raises(InvalidRequest, match="reads 100,000,000 tokens"):
        solved(inference_memory="24 GiB", context=10**8)
