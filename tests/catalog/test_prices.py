"""Prices, energy and CO2: which figure is taken, by hand; and the user's own files."""

import msgspec
import pytest

from memfit import api
from memfit.catalog import devices, find_device
from memfit.catalog.grids import find_grid
from memfit.catalog.prices import choose_price
from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.plan.budget.cost import ASSUMED_LOAD, describe_cost
from memfit.records import from_data
from memfit.records.hardware import Price
from memfit.records.request import Hardware, Request
from memfit.records.results import Time


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of the user's files; `write` puts one there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "memfit"
    folder.mkdir()

    def write(name, text):
        (folder / name).write_text(text)
        return folder / name

    return write


def device_with(*prices):
    return msgspec.structs.replace(
        find_device("h100-sxm"),
        prices=tuple(Price(usd_per_hour=usd, kind=kind, **more) for usd, kind, more in prices),
    )


def test_the_median_of_prices_on_demand_is_taken_and_the_range_is_said():
    three = device_with(
        (3.0, "on-demand", {"seller": "A"}), (2.0, "on-demand", {"seller": "B"}),
        (7.0, "on-demand", {"seller": "C"}), (0.5, "spot", {}), (90.0, "on-demand", {"weak": True}),
    )  # fmt: skip
    chosen = choose_price(three)
    assert chosen.usd_per_hour == 3.0
    assert "median of 3 from 2 (B) to 7 (C)" in chosen.because
    two = device_with((3.0, "on-demand", {}), (2.0, "on-demand", {}))
    assert choose_price(two).usd_per_hour == 2.5


def test_unlike_kinds_are_never_mixed_and_a_kind_can_be_asked_for():
    mixed = device_with((1.0, "spot", {}), (2.0, "capacity block", {}), (1.5, "reserved", {}))
    assert choose_price(mixed).usd_per_hour == 1.5
    assert choose_price(mixed, "spot").usd_per_hour == 1.0
    assert choose_price(mixed, "on-demand").usd_per_hour is None
    assert "no on-demand price of `h100-sxm`" in choose_price(mixed, "on-demand").because
    assert choose_price(mixed, "2.75 USD").usd_per_hour == 2.75
    assert choose_price(device_with((9.0, "on-demand", {"weak": True}))).usd_per_hour == 9.0
    with pytest.raises(InvalidRequest, match=r"`hardware.price`.*`cheap`") as caught:
        choose_price(mixed, "cheap")
    assert "on-demand" in caught.value.hint
    assert "2.50 USD" in caught.value.hint


def test_nobodys_price_is_unknown():
    free = next(d for d in devices() if not d.prices)
    assert choose_price(free).usd_per_hour is None
    assert f"no price of `{free.id}` is known" in choose_price(free).because


def request(**hardware):
    return Request(model="gpt2", hardware=Hardware(device="h100-sxm", **hardware))


def time(seconds):
    return Time(
        step_seconds=1.0, tokens_per_second=1.0, tokens_per_second_per_device=1.0, mfu=0.4, hfu=0.4,
        model_flops_per_step=1.0, total_seconds=seconds, because="by hand",
    )  # fmt: skip


def test_hours_money_energy_and_carbon_by_hand():
    """16 devices x 10 h = 160 h; x 2 USD; x 700 W x 85 % x 1.5 = 142.8 kWh; x 0.5 kg."""
    asked = request(count=8, nodes=2, price="2 USD", grid="0.5 kg/kWh", pue=1.5)
    cost = describe_cost(time(10 * units.HOUR), find_device("h100-sxm"), asked)
    assert ASSUMED_LOAD == 0.85
    assert cost.device_hours == pytest.approx(160)
    assert cost.usd == pytest.approx(320)
    assert cost.kwh == pytest.approx(142.8)
    assert cost.kg_co2 == pytest.approx(71.4)
    for said in ("2 USD an hour, as asked", "85% of 700 W (assumed), x PUE 1.5", "0.5 kg/kWh"):
        assert said in cost.because
    full = describe_cost(time(units.HOUR), find_device("h100-sxm"), request(load=1.0))
    assert full.kwh == pytest.approx(0.7)
    assert "(as asked)" in full.because


def test_what_is_not_stated_is_unknown():
    device = find_device("h100-sxm")
    assert describe_cost(time(1.0), device, request()).kg_co2 is None
    bare = msgspec.structs.replace(device, watts=None, prices=())
    cost = describe_cost(time(1.0), bare, request(grid="france"))
    assert (cost.usd, cost.kwh, cost.kg_co2) == (None, None, None)
    assert "the power of `h100-sxm` is unknown" in cost.because
    unknown = describe_cost(time(None), device, request())
    assert (unknown.device_hours, unknown.usd, unknown.kwh) == (None, None, None)


def test_grids_are_found_by_name_and_code_and_checked():
    """Our World in Data's table of 2023: France 56, Germany 381, Denmark 152 g."""
    assert find_grid("France").kg_per_kwh == 0.056
    assert find_grid("DEU").kg_per_kwh == 0.381
    assert find_grid("denmark").kg_per_kwh == 0.152
    assert find_grid("56 g/kWh").kg_per_kwh == pytest.approx(0.056)
    assert "2023" in find_grid("united states").because
    for wrong in ("frnace", "0.4", "0.4 kg"):
        with pytest.raises(InvalidRequest, match=r"`hardware.grid`") as caught:
            find_grid(wrong)
        assert "kg/kWh" in caught.value.hint


@pytest.mark.parametrize(("key", "value"), [("pue", 0.9), ("load", 0.0), ("load", 1.1)])
def test_a_share_out_of_range_is_refused(key, value):
    with pytest.raises(InvalidRequest, match=f"hardware.{key}"):
        from_data({"model": "gpt2", "hardware": {key: value}}, Request, source="a test")


def test_a_plan_carries_the_requests_price_and_grid():
    stated = {"hardware.price": "3 USD", "hardware.grid": "sweden", "task.global_batch": 4}
    plan = api.plan(api.read("gpt2", device="h100-sxm", changes=stated), levers=False)
    assert plan.cost.usd == pytest.approx(3 * plan.cost.device_hours)
    assert plan.cost.kg_co2 == pytest.approx(0.041 * plan.cost.kwh)
    with pytest.raises(InvalidRequest, match=r"`hardware.grid`"):
        api.plan(
            api.read("gpt2", device="h100-sxm", changes={"hardware.grid": "nowhere"}), levers=False
        )


def test_ones_own_prices_go_before_the_catalogues(own):
    own("prices.toml", '[h100-sxm]\nprices = [{ usd_per_hour = "1.1 USD", seller = "our lab" }]\n')
    chosen = choose_price(find_device("h100-sxm"))
    assert chosen.usd_per_hour == 1.1
    assert "your own on-demand price (our lab)" in chosen.because
    assert choose_price(find_device("h100-sxm"), "spot").usd_per_hour < 1.1  # theirs has no spot
    own("prices.toml", "")
    assert choose_price(find_device("h100-sxm")).usd_per_hour == 2.95


def test_ones_own_devices_start_from_a_row_or_replace_its_figures(own):
    before = len(devices())
    own(
        "devices.toml",
        '[my-box]\nlike = "rtx-4090"\nmemory = "20 GiB"\n[h100-sxm]\nbandwidth = "3 TB/s"\n'
        'flops_measured = { bf16 = "700 TFLOP/s" }\n',
    )
    box, listed = find_device("My Box"), find_device("rtx-4090")
    assert (box.memory, box.flops, box.match) == (20 * units.GIB, listed.flops, ())
    assert box.basis == "your own row"
    assert box.own.endswith("devices.toml")
    h100 = find_device("NVIDIA H100 80GB HBM3")
    assert (h100.bandwidth, h100.flops_measured["bf16"]) == (3e12, 7e14)
    assert h100.flops_measured["fp8"] == 1402.6e12  # what is not named stays
    assert len(devices()) == before + 1
    assert listed.basis == "the vendor's sheet"
    assert find_device("h200-sxm").basis == "published measurements"
    assert find_device("mi210").own == ""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("prices.toml", "[h100-smx]\nprices = []\n", "[h100-smx]"),
        ("prices.toml", '[l4]\nprices = [{ usd_per_hour = "2" }]\n', "`prices` of [l4]"),
        ("prices.toml", '[h100-sxm]\nprices = [{ kind = "spot" }]\n', "no `usd_per_hour`"),
        ("prices.toml", '[h100-sxm]\nprice = "2 USD"\n', "[h100-sxm]"),
        ("prices.toml", '[l4]\nprices = [{ usd_per_hour = "2 USD", kind = "a" }]\n', "kind"),
        ("prices.toml", "[h100-sxm\n", "is not TOML"),
        ("prices.toml", "price = 2\n", "`price`"),
        ("devices.toml", '[h100-sxm]\nbandwidth = "3"\n', "`bandwidth` of [h100-sxm]"),
        ("devices.toml", '[h100-sxm]\nbandwith = "3 TB/s"\n', "`bandwith`"),
        ("devices.toml", '[h100-sxm]\nflops = { bf16 = "9" }\n', "`flops` of [h100-sxm]"),
        ("devices.toml", '[h100-sxm]\nlink = "fast"\n', "`link` of [h100-sxm]"),
        ("devices.toml", '[h100-sxm]\ncalibration = { launch = "5" }\n', "`calibration`"),
        ("devices.toml", '[my-box]\nlike = "rtx-4091"\n', "`like` of [my-box]"),
        ("devices.toml", '[my-box]\nmemory = "20 GiB"\n', "[my-box]"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_clear_error_that_names_file_and_key(own, name, text, said):
    path = own(name, text)
    for ask in (lambda: find_device("a100-sxm-80"), devices):
        with pytest.raises(InvalidRequest) as caught:
            ask()
        assert str(path) in str(caught.value)
        assert said in str(caught.value)


def test_a_relative_config_home_is_ignored(monkeypatch):
    from memfit.catalog.own import own_file

    monkeypatch.setenv("XDG_CONFIG_HOME", "somewhere")
    assert own_file("prices.toml").is_absolute()
    assert "somewhere" not in str(own_file("prices.toml"))
