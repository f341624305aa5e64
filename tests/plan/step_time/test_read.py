"""A recipe in the clock's numbers: networks in words, sizes of published models, whose rates."""

from itertools import product

import msgspec
import pytest

from memfit.core.errors import TimeUnknown
from memfit.families import read_model
from memfit.plan.frameworks.shared.pipeline import deal_blocks
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.model_reference import find_reference
from memfit.plan.request.problem import find_device
from memfit.plan.step_time import rates, work
from memfit.plan.step_time.read import (
    Network,
    find_links,
    read_basis,
    read_layout,
    read_machine,
    read_network,
    read_setting,
    read_shape,
)
from memfit.plan.step_time.step import predict_step
from memfit.records import from_data
from memfit.records.request import Request


def recipe(**changes):
    asked = {
        "model": "llama-3.1-8b", "framework": "megatron", "micro_batch": 1, "attention": "cudnn",
        "task": {"sequence_length": 4096, "global_batch": 128},
        "parallel": {"dp_shard": 4, "zero": 1, "tp": 4}, "recompute": "none",
        "hardware": {"device": "h100-sxm", "count": 8, "nodes": 2},
    }  # fmt: skip
    return read_defaults(from_data(asked | changes, Request, source="the test"))[0]


@pytest.mark.parametrize(
    ("text", "nodes", "gigabytes"),
    [
        ("8x400 Gb/s InfiniBand NDR (1 per GPU, 50 GB/s per GPU)", 8, 50),
        ("8x200 Gb/s HDR (DGX A100); AWS p4d 4x100 Gb/s = 50 GB/s per node", 8, 25),
        ("NVLink intra-node; 4x100 Gb/s RoCE per node", 8, 6.25),
        ("1600 Gb/s per node RoCE; NVLink intra-node", 8, 25),
        ("NVLink intra-node; 4x Omni-Path 100 per node (Jean Zay)", 8, 6.25),
        ("NVLink/NVSwitch; 8x200G HDR IB (Selene)", 8, 25),
        ("NVLink intra-node; 400 Gb/s RDMA per GPU", 8, 50),
        ("NVL72 rack: NVLink 900 GB/s across 72 GPUs; between racks 800 Gb/s per GPU", 4, 100),
        ("800 Gb/s per node", 8, 12.5),
    ],
)
def test_a_network_in_words_is_bytes_per_second_of_a_device(text, nodes, gigabytes):
    assert read_network(text, nodes) == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("text", ["", "NVLink + IB", "none typical (25-100 Gb/s Ethernet)"])
def test_a_network_without_a_number_is_unknown(text):
    assert read_network(text, 8) is None


def test_shapes_count_the_published_parameters_of_dense_and_latent_models():
    for name, blocks in (("llama-3.1-8b", 6.98e9), ("deepseek-v3", 669.2e9)):
        shape = read_shape(read_model(find_reference(name)))
        counted = shape.layers * (work.plain_weights(shape) + work.expert_weights(shape))
        assert counted == pytest.approx(blocks, rel=0.005)


def test_a_layout_is_the_recipes():
    asked = recipe(recompute={"blocks": 8})
    shape = read_shape(read_model(asked.model))
    layout = read_layout(asked, shape, read_basis(asked))
    assert (layout.mesh.dp, layout.mesh.tp, layout.rows.accumulation, layout.mesh.zero) == (
        4,
        4,
        32,
        1,
    )
    assert (layout.recompute.repeated, layout.sent.gradient_bytes, layout.update.trains) == (
        0.25,
        4,
        1,
    )
    assert find_links(find_device("h100-sxm"), asked, Network()).per_machine == 8
    assert find_links(find_device("gb200"), asked, Network()).per_machine == 16  # one rack


def test_constants_are_the_builds_own_then_the_frameworks_then_anyones():
    device = find_device("h100-sxm")
    chain = rates.names(device, "megatron.bridge", "fp8", "fused")
    assert chain["launch"] == ("megatron.bridge.launch", "megatron.launch", "other.launch")
    assert chain["products"][0] == "products.hopper.fp8"
    table = rates.read_rates()
    unheard = rates.find_rates(device, "unheard-of", "fp8", "fused")
    assert unheard.host.launch == table["other.launch"].value
    assert "no published run of `unheard-of`" in rates.explain(device, "unheard-of", "fp8", "fused")


def test_no_constant_claims_more_than_the_device_was_measured_to_reach():
    for name, rate in rates.read_rates().items():
        assert rate.value > 0
        if name.startswith(("products.", "attention.")):
            assert rate.value <= 1 + 1e-6, name


def test_products_are_never_faster_than_the_best_that_anyone_measured():
    asked, usual = recipe(), Network()
    hopper, cdna = find_device("h100-sxm"), find_device("mi300x")
    machine = read_machine(hopper, asked, read_basis(asked), usual)
    assert (machine.products, machine.wide_peak) == (794.5e12, 989.4e12)
    eighth = recipe(precision="fp8-mixed")
    assert read_machine(hopper, eighth, read_basis(eighth), usual).products == 1402.6e12
    # nobody measured FP8 there: the share of the peak that bf16 reaches
    share = 668.4 / 1307.4
    unmeasured = read_machine(cdna, eighth, read_basis(eighth), usual)
    assert unmeasured.products == pytest.approx(share * 2614.9e12)


def test_a_measured_network_is_taken_as_measured_and_a_stated_one_at_its_word():
    asked, device = recipe(), find_device("h100-sxm")
    basis = read_basis(asked)
    machine = read_machine(device, asked, basis, Network(name="efa-32x100"))
    links = machine.links
    assert (links.gather_bus, links.scatter_bus, links.reduce_bus) == (185e9, 182e9, 362e9)
    assert links.bus_bytes == 256e6
    usual = read_machine(device, asked, basis, Network())
    assert usual.links.gather_bus == 0
    stated = read_machine(device, asked, basis, Network(per_device=1e10))
    assert stated.links.outside == pytest.approx(0.96e10)
    assert usual.links.outside > stated.links.outside


def test_a_device_of_unknown_speed_has_no_setting():
    asked = recipe()
    model = read_model(asked.model)
    device = msgspec.structs.replace(find_device("h100-sxm"), bandwidth=None)
    with pytest.raises(TimeUnknown, match="no bandwidth"):
        read_setting(asked, model, device)
    setting = read_setting(asked, model, find_device("h100-sxm"))
    assert predict_step(setting).total > 0


@pytest.mark.parametrize("layers", [7, 8, 30, 126])
def test_blocks_of_stages_are_dealt_as_the_framework_deals_them(layers):
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
              "num_hidden_layers": layers, "num_attention_heads": 4}  # fmt: skip
    for pp, chunks in product((2, 3, 4, 8), (1, 2, 3)):
        if pp * chunks > layers:
            continue
        mesh = {"dp_shard": 1, "zero": 1, "pp": pp, "virtual_pp": chunks}
        asked = recipe(
            model=config, parallel=mesh, hardware={"device": "h100-sxm", "count": pp},
            task={"sequence_length": 512, "global_batch": 24},
        )  # fmt: skip
        layout = read_layout(asked, read_shape(read_model(asked.model)), read_basis(asked))
        sizes = [sum(map(len, stage)) for stage in deal_blocks(layers, pp, chunks)]
        assert (layout.stages.most, layout.stages.last) == (max(sizes[:-1]), sizes[-1])
