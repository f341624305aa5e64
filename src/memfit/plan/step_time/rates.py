"""How fast things go: a device's and a framework's constants, from `catalog/rates.toml`.

A constant is fitted to published step times (`scripts/fit_rates.py`, on rows of the `fit` half
alone) or stated; where neither a device nor a framework has one of its own, that of `other` holds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import memfit.catalog
from memfit.plan.step_time.arrays import Number, gather, list_names
from memfit.plan.step_time.communication.collectives import Links
from memfit.plan.step_time.own import Own
from memfit.plan.step_time.work import Layout, Shape
from memfit.records import Record
from memfit.records.hardware import Device


class Rate(Record, frozen=True, kw_only=True):
    """One constant: what it is worth, and who says so."""

    value: float
    unit: str
    source: str
    rows: int = 0  # published rows of the `fit` half that it was fitted on


NOBODYS = Own()


class Machine(NamedTuple):
    """One device and what joins it to others; bytes and FLOP per second of one device."""

    products: Number  # of the blocks' products, in their precision: the best that anyone reached
    wide_products: Number  # the same of 16-bit products: the head's, and attention's peak
    wide_peak: Number  # dense peak in 16 bits
    memory: Number  # bandwidth
    host: Number  # to the host's memory
    links: Links  # to other devices
    eight: Number = 0.0  # the best product in int8; 0: as those in 16 bits
    own: Own = NOBODYS  # what the user measured, before all of these


class ComputeRates(NamedTuple):
    """How fast large products are, and what slows others."""

    products: Number  # share of Machine.products that large products reach
    head: Number  # the same of the head's, in 16 bits
    tile: Number  # rows, columns or depth at which a product takes twice as long
    weight_traffic: Number  # framework: of a weight's bytes, what its product does not hide
    grouped: Number  # experts' products are slower by this
    slowdown: Number  # framework: its products / those of others


class AttentionRates(NamedTuple):
    """How fast attention is."""

    attention: Number  # share of the peak that attention's kernel reaches at 128 elements a head
    narrow_head: Number  # exponent: attention is slower by (128 / elements) to this
    misaligned: Number  # attention written out is slower by this, where heads are not 16 B apart
    ring_attention: Number  # framework: attention is slower by this x (1 - 1/cp)


class ElementwiseRates(NamedTuple):
    """What element-wise operations move, and how fast."""

    memory: Number  # share of the memory's bandwidth
    passes: Number  # framework: its bytes of element-wise operations / nominal ones
    fused: Number  # bytes of element-wise operations once a compiler fused them / eager
    cast: Number  # passes over what is narrowed to FP8
    unpack: Number  # bytes moved an element of a 4-bit weight / 10
    adapter: Number  # passes over adapters' inputs and outputs
    selective: Number  # of a quarter of element-wise work that selective recomputation repeats
    clamp: Number  # passes of gpt-oss's clamped activation / 12
    permute: Number  # of the passes over permuted tokens


class HostRates(NamedTuple):
    """Seconds in which the host launches a block's kernels, and what adds to them."""

    launch: Number  # framework: s that its host takes for a block's forward and backward
    expert_launch: Number  # framework: the same that routing adds
    adapter_launch: Number  # host's launches take longer by this beside adapters
    tensor_launch: Number  # host's launches take longer by this where there are tp ranks


class LinkRates(NamedTuple):
    """What links reach of their bandwidth, and how long a message takes besides."""

    link: Number
    network: Number
    link_latency: Number  # s, of a collective within a domain
    context_latency: Number  # s, of a cp rank's message
    send_latency: Number  # framework: s, of a message between stages
    ring_latency: Number  # framework: s a rank, of a reduction or gathering, beyond NCCL's own


class ExpertRates(NamedTuple):
    """What is exposed of the all-to-all of tokens between experts."""

    dispatch: Number  # exposed share of all-to-all between experts of a domain
    dispatch_across: Number  # the same between domains
    dispatch_overlapped: Number  # of both, what remains where another micro-batch is computed


class ExposedRates(NamedTuple):
    """What is exposed of other collectives."""

    asynchronous: Number  # exposed share of tp's collectives that remains where they are async
    exposed_data: Number  # framework: exposed seconds of data-parallel collectives / a ring's
    exposed_all_reduce: Number  # framework: the same of all-reduces of replicated states
    exposed_tensor: Number  # framework: of tensor-parallel ones


class StepRates(NamedTuple):
    """What a whole step takes besides."""

    fixed: Number  # framework: s of a step that depend on nothing
    straggling: Number  # framework: a step is longer by this, a doubling of nodes


class Rates(NamedTuple):
    """All constants that a step's time rests on, looked up for one device and framework."""

    compute: ComputeRates
    attending: AttentionRates
    elementwise: ElementwiseRates
    host: HostRates
    links: LinkRates
    experts: ExpertRates
    exposed: ExposedRates
    step: StepRates


class Setting(NamedTuple):
    """Everything that a step's time depends on."""

    shape: Shape
    layout: Layout
    machine: Machine
    rates: Rates


FRAMEWORK_FIELDS = (
    "slowdown", "passes", "launch", "expert_launch", "exposed_data", "exposed_all_reduce",
    "exposed_tensor", "fixed", "ring_attention", "send_latency", "weight_traffic",
    "ring_latency", "straggling",
)  # fmt: skip
DEVICE_FIELDS = ("products", "head", "attention")


def slug(architecture: str) -> str:
    """A device's architecture as a constant's name has it: `Ampere GA100` -> `ampere-ga100`."""
    return architecture.lower().replace(" ", "-")


def names(device: Device, stack: str, narrow: str, kernel: str) -> dict[str, tuple[str, ...]]:
    """The constant of each field of Rates, and those that hold where there is none, in turn.

    stack: `framework` or `framework.build`; narrow: bf16 | fp16 | fp8 | mxfp8 | nvfp4 |
    tf32 | fp32;
    kernel: math | triton | flash1 | flash2 | fused.
    """
    architecture = slug(device.architecture)
    families = tuple(dict.fromkeys((stack, stack.partition(".")[0], "other")))
    narrow, wide = ("bf16" if n == "fp16" else n for n in (narrow, "bf16"))
    found = {
        "products": (f"products.{architecture}.{narrow}", f"products.other.{narrow}",
                     f"products.{architecture}.bf16", "products.other.bf16"),
        "head": (f"products.{architecture}.{wide}", "products.other.bf16"),
        "attention": (f"attention.{architecture}.{kernel}", f"attention.other.{kernel}"),
    }  # fmt: skip
    for field in list_names(Rates):
        if field in FRAMEWORK_FIELDS:
            found[field] = tuple(f"{family}.{field}" for family in families)
        elif field not in DEVICE_FIELDS:
            found[field] = (f"shared.{field}",)
    return found


@cache
def read_rates() -> Mapping[str, Rate]:
    """All constants by name."""
    path = Path(memfit.catalog.__file__).parent / "rates.toml"
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["rate"]
    return {row.pop("name"): Rate(**row) for row in rows}


@cache
def find_rates(device: Device, stack: str, narrow: str, kernel: str) -> Rates:
    """The constants of one device, framework, precision and attention kernel."""
    table = read_rates()
    found = names(device, stack, narrow, kernel)
    return gather(Rates, {
        field: next(table[name].value for name in chain if name in table)
        for field, chain in found.items()
    })  # fmt: skip


@cache
def explain(device: Device, stack: str, narrow: str, kernel: str) -> str:
    """What the constants of a prediction rest on, in a few words."""
    table, found = read_rates(), names(device, stack, narrow, kernel)
    own, framework = table.get(found["products"][0]), table.get(found["slowdown"][0])
    words = (
        f"{narrow} products on {device.architecture} as fitted on {own.rows} published runs"
        if own and own.rows
        else f"no published run on {device.architecture} in {narrow}: others' rates are assumed"
    )
    if framework and framework.rows:
        return f"{words}; `{stack}` as fitted on {framework.rows}"
    return f"{words}; no published run of `{stack}`: the mean framework's rates are assumed"
