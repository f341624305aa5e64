"""Units: what is parsed, what is shown, and what is refused as ambiguous."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.core import units
from memfit.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72 GiB", 77_309_411_328),
        ("1GB", 10**9),
        ("0.5 GiB", 2**29),
        ("1 B", 1),
        ("81559 MiB", 81559 * 2**20),
        ("1_000 KiB", 1_024_000),
        ("72 gib", 77_309_411_328),
        ("72Gi", 77_309_411_328),
        ("512 Mi", 2**29),
        ("80 gb", 80 * 10**9),
        ("80 GIB", 80 * 2**30),
        ("80 gigabytes", 80 * 10**9),
        ("1,024 mib", 2**30),
    ],
)
def test_memory_is_read_in_the_unit_it_states(text, value):
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(
    "text",
    ["72", "GiB", "", "7 2 GiB", "-1 GiB", None, 72, "1 TB/s", "80 Gb", "80 Gib", "80 b", "80 G",
     "1,5 GiB", "12,34 GiB"],
)  # fmt: skip
def test_a_size_without_a_known_unit_is_refused_with_an_example(text):
    with pytest.raises(InvalidRequest) as caught:
        units.parse_bytes(text)
    own = re.fullmatch(r"(\d{1,3}) ?[A-Za-z]*", text) if isinstance(text, str) else None
    assert f"`{own[1] if own else 72} GiB`" in caught.value.hint


def test_each_quantity_has_its_own_units():
    assert units.parse_seconds("48 h") == 172_800
    assert units.parse_usd("5000 USD") == 5000
    assert units.parse_flops("989 TFLOP/s") == 989e12
    assert units.parse_flop("2 PFLOP-days") == 2 * 8.64e19
    assert units.parse_bandwidth("3.35 TB/s") == 3.35e12
    assert units.parse_watts("0.7 kW") == 700
    assert units.parse_count("1.4 T") == 1.4e12
    assert units.parse_count(7) == 7


@pytest.mark.parametrize(
    ("text", "flop"),
    [
        ("1000 TFLOP-seconds", 1e15),
        ("1 TFLOPS-second", 1e12),
        ("1 PFLOP/s-days", 1e15 * 86_400),
        ("3.14 ZFLOP", 3.14e21),
        ("2 EFLOP-hours", 2e18 * 3600),
        ("5 YFLOPs", 5e24),
    ],
)
def test_compute_is_read_as_a_rate_over_a_while(text, flop):
    assert units.parse_flop(text) == pytest.approx(flop)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_seconds, "2 hours", 7200), (units.parse_seconds, "2 Hours", 7200),
        (units.parse_seconds, "90 mins", 5400), (units.parse_seconds, "2hrs", 7200),
        (units.parse_usd, "$500", 500), (units.parse_usd, "$5,000", 5000),
        (units.parse_usd, "$5k", 5000), (units.parse_usd, "5k USD", 5000),
        (units.parse_usd, "500 dollars", 500), (units.parse_usd, "US$ 1.5M", 1.5e6),
        (units.parse_usd, "USD 500", 500), (units.parse_usd, "500 usd", 500),
        (units.parse_flops, "989 tflops", 989e12), (units.parse_flops, "989 TFLOPS", 989e12),
        (units.parse_bandwidth, "3.35 tb/s", 3.35e12), (units.parse_watts, "700 watts", 700),
        (units.parse_count, "7b", 7e9), (units.parse_count, "50m", 50e6),
        (units.parse_count, "8K", 8000), (units.parse_count, "50 million", 50e6),
        (units.parse_flop, "1e21 flop", 1e21), (units.parse_flop, "2 pflop-days", 2 * 8.64e19),
    ],
)  # fmt: skip
def test_a_unit_is_read_in_any_case_and_spelled_out(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_seconds, "5 m"), (units.parse_seconds, "2 months"),
        (units.parse_usd, "500"), (units.parse_usd, "€500"), (units.parse_usd, "500 EUR"),
        (units.parse_flop, "1e21 FLOPS"), (units.parse_flop, "1 tflops"),
        (units.parse_bandwidth, "400 Gb/s"), (units.parse_count, "7 gigs"),
        (units.parse_count, "1,50"),
    ],
)  # fmt: skip
def test_what_may_mean_two_things_is_refused(parse, text):
    with pytest.raises(InvalidRequest, match="cannot read"):
        parse(text)


@given(st.integers(min_value=0, max_value=2**50))
def test_shown_bytes_are_within_half_of_their_last_digit(n):
    value, unit = units.show_bytes(n, digits=3).split()
    back = units.parse_bytes(f"{value} {unit}")
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(back - n) <= 0.0005 * factor + 1


def test_times_show_their_two_largest_units():
    assert units.show_seconds(93784) == "1 d 2 h"
    assert units.show_seconds(0.0123) == "12.3 ms"
    assert units.show_seconds(3700) == "1 h 1 min"
    assert units.show_seconds(75) == "1 min 15 s"


def test_counts_and_rates_are_shown_in_words():
    assert units.show_count(8_030_261_248) == "8.03B"
    assert units.show_count(124_439_808) == "124M"
    assert units.show_flops(989e12) == "989 TFLOP/s"
    assert units.show_bandwidth(3.35e12) == "3.35 TB/s"
