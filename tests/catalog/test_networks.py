"""Networks between machines: what a request may name, and how they are listed."""

import msgspec
import pytest
from click.testing import CliRunner

from memfit import api
from memfit.catalog import find_device
from memfit.cli.app import app
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.plan.step_time.communication.collectives import Group, collective_seconds
from memfit.plan.step_time.communication.network import lay_out
from memfit.records import from_data
from memfit.records.request import Request

ASKED = {
    "model": "llama-3.1-8b", "framework": "torchtitan", "micro_batch": 2, "recompute": "none",
    "task": {"sequence_length": 8192, "global_batch": 32}, "parallel": {"dp_shard": 16},
    "hardware": {"device": "h100-sxm", "count": 8, "nodes": 2},
}  # fmt: skip


def predict(**hardware):
    asked = ASKED | {"hardware": ASKED["hardware"] | hardware}
    return api.predict(from_data(asked, Request, source="the test")).recipe


def test_a_request_names_the_network_between_its_machines():
    usual, asked = predict(), predict(network="P5")
    assert (usual.network, asked.network) == ("", "efa-32x100")
    assert usual.digest != asked.digest
    assert "network" in msgspec.to_builtins(usual)


def test_a_named_network_changes_the_time():
    hardware = {"network": "ethernet-100"}
    asked = {"parallel": {"dp_shard": 16}, "hardware": ASKED["hardware"] | hardware}
    slow = api.predict(from_data(ASKED | asked, Request, source="the test")).time
    usual = api.predict(from_data(ASKED, Request, source="the test")).time
    assert slow.step_seconds > 1.2 * usual.step_seconds


def test_one_machine_has_no_network_but_a_wrong_name_is_refused():
    one = {"parallel": {"dp_shard": 8}, "hardware": ASKED["hardware"] | {"nodes": 1}}
    one["hardware"]["network"] = "ndr-8x400"
    recipe = api.predict(from_data(ASKED | one, Request, source="the test")).recipe
    assert recipe.network == ""
    one["hardware"]["network"] = "ndr-8x40"
    with pytest.raises(UnknownName, match="ndr-8x400"):
        api.predict(from_data(ASKED | one, Request, source="the test"))
    with pytest.raises(InvalidRequest, match="the devices of a machine"):
        predict(network="nvlink-4")


def test_networks_are_listed():
    rows = api.networks()
    assert {row.joins for row in rows} == {"machines"}
    assert [row.id for row in api.networks("efa p5")] == ["efa-32x100"]
    with pytest.raises(UnknownName, match="`memfit networks` lists them all"):
        api.networks("pigeons")
    shown = CliRunner().invoke(app, ["networks", "efa", "p5"]).output
    assert "400 GB/s" in shown
    assert "up to 64 machines" in shown
    assert "185 GB/s on 2" in " ".join(shown.split())
    listed = msgspec.json.decode(CliRunner().invoke(app, ["networks", "--json"]).output)
    assert len(listed) == len(rows)


def test_a_network_shows_what_a_step_reckons_with():
    """The figures on the screen are those of the one description of collectives."""
    found = api.time_exchanges(api.networks("efa p5")[0])
    assert [(one.device, one.machines) for one in found] == [("h100-sxm", n) for n in (2, 8, 64)]
    cluster = lay_out(find_device("h100-sxm"), 8, 8, "p5")
    group = Group(64, 8)
    for kind, seconds in found[1].seconds.items():
        assert seconds == collective_seconds(kind, 1e9, group, cluster.links)
    shown = CliRunner().invoke(app, ["networks", "efa", "p5"]).output
    assert f"{found[1].seconds['all_gather'] * 1e3:.3g} ms" in shown
