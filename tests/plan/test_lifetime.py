"""Inference cost first: the size that is cheapest to train and to serve, and when it is another."""

import pytest

from memfit.catalog import find_device
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.plan.budget.budget import read_budget, solve_budget
from memfit.plan.budget.inference import ALPHA, BETA, CHINCHILLA, split_by_demand, weigh_loss

TRAINED = {"cost": "50000 USD", "device": "h100-sxm"}
# so many at once that the products take longer than reading the weights, as in a FLOP count
MANY = 10**6


def live(**served):
    return solve_budget(read_budget(**{**TRAINED, **served})).lifetime


def loss(size, weight):
    return weight * size.parameters**-ALPHA + size.tokens**-BETA


@pytest.mark.parametrize("served", ["100B", "1T", "30T"])
def test_where_products_decide_it_is_the_published_answer(served):
    """Serving at the price and rate of training costs its FLOP: Sardana et al., equation 2."""
    found = live(inference_tokens=served, sequences=MANY).cheapest
    compute = 6 * found.parameters * found.tokens
    demand = {"100B": 1e11, "1T": 1e12, "30T": 3e13}[served]
    size, tokens = split_by_demand(compute, demand, CHINCHILLA)
    assert found.parameters == pytest.approx(size, rel=0.02)
    assert found.tokens == pytest.approx(tokens, rel=0.02)


def test_both_sizes_are_of_one_quality():
    life = live(inference_tokens="1T", sequences=32, context=4096, serve_on="l40s")
    weight = weigh_loss(6 * life.own.parameters * life.own.tokens, CHINCHILLA)
    assert loss(life.cheapest, weight) == pytest.approx(loss(life.own, weight), rel=1e-9)
    assert life.cheapest.total < life.own.total
    assert life.own.training == pytest.approx(50_000, rel=1e-6)


def test_the_more_is_served_the_smaller_the_model_and_little_is_served_by_the_budgets_own():
    sizes = [live(inference_tokens=n, sequences=MANY).cheapest.parameters
             for n in ("1M", "1T", "100T")]  # fmt: skip
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(live(inference_tokens="1M").own.parameters, rel=0.01)


def test_a_token_takes_what_reading_the_weights_takes():
    life = live(inference_tokens="1T", serve_on="l40s")
    device = find_device("l40s")
    assert life.own.latency == pytest.approx(2 * life.own.parameters / device.bandwidth)
    hours = 1e12 * life.own.latency / 3600
    assert life.own.serving == pytest.approx(hours * 1.548, rel=0.01)
    at_once = live(inference_tokens="1T", serve_on="l40s", sequences=32).own
    assert at_once.latency == life.own.latency
    assert at_once.serving == pytest.approx(life.own.serving / 32)


def test_latency_and_memory_bound_the_size():
    quick = live(inference_tokens="1M", latency="5 ms")
    assert not quick.own.fits
    assert quick.cheapest.latency <= 0.005
    assert quick.cheapest.latency == pytest.approx(0.005, rel=0.01)  # the largest that may be
    small = live(inference_tokens="1M", serve_on="rtx-4090")
    assert not small.own.fits
    assert 2 * small.cheapest.parameters <= find_device("rtx-4090").planned_memory


def test_what_cannot_be_served_or_said_is_refused():
    with pytest.raises(DoesNotFit, match="no size of this quality can be served on one `h100-sxm`"):
        live(inference_tokens="1T", latency="0.1 ms")
    with pytest.raises(InvalidRequest, match="no price of `t4` is known"):
        live(inference_tokens="1T", serve_on="t4")
    assert live(inference_tokens="1T", serve_on="t4", serve_price="0.4 USD").own.serving > 0
    with pytest.raises(InvalidRequest, match="nothing is served"):
        live(latency="10 ms")
    with pytest.raises(InvalidRequest, match="where are"):
        read_budget(parameters="7B", inference_tokens="1T")
    with pytest.raises(InvalidRequest, match="no FLOP/s of its device"):
        solve_budget(read_budget(parameters="7B", inference_tokens="1T", serve_on="l40s"))
    with pytest.raises(InvalidRequest, match=r"`sequences: 0` of serving is not above 0"):
        live(inference_tokens="1T", sequences=0)
