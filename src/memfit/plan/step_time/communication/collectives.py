"""Seconds of a collective: NCCL's algorithms and latencies over two levels of links.

The one description there is: a step's messages (`exchanges.py`), the search over arrays and
`memfit networks` all ask here. n ranks of which k share a machine. A ring moves (n - 1) / n of its
bytes through every rank (twice for an all_reduce; nccl-tests, doc/PERFORMANCE.md). One that leaves
a machine uses the shares that its k ranks have of the machine's adapters, and is never faster than
the links inside. A tree goes up and down once, with the logarithm of the machines in its latency.
Where a switch adds up on its own (NVLink SHARP), every rank sends and receives each byte once. The
fastest of them is taken, as NCCL's own model does (src/graph/tuning.cc), whose protocols and
latencies these are; its caps by channel and its corrections for middle sizes of trees are left out.

Every number may be a numpy array, and the seconds are then of their broadcast shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from memfit.plan.step_time.arrays import PLAIN, Number, everywhere, larger, log2, smaller, where

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"]
MICRO = 1e-6
# NCCL's protocols: share of the bandwidth, and microseconds to start (ring, tree)
PROTOCOLS = {"simple": (1.0, 8.4, 8.4), "ll128": (0.92, 14.0, 14.0), "ll": (0.5, 6.6, 6.8)}
# and of a hop, by what it crosses: (ring, tree)
HOPS = {
    "nvlink": {"simple": (3.4, 4.0), "ll128": (1.9, 1.25), "ll": (0.6, 0.6)},
    "pci": {"simple": (5.7, 4.0), "ll128": (2.5, 1.9), "ll": (1.0, 1.0)},
    "net": {"simple": (14.0, 14.0), "ll128": (4.0, 8.5), "ll": (2.7, 5.0)},
}
POSTED = 1.0  # µs to post one transfer to an adapter; three a step of `simple`
IN_SWITCH, TREE_OF_SWITCHES = 25.0, 20.9  # µs of NVLink SHARP, and of each hop between its machines
TREE_SHARE = 0.92  # of a ring's bandwidth
NEVER = 1.0  # seconds a byte: what no algorithm takes


class Links(NamedTuple):
    """Bytes per second that one device reaches, and what its hops cross."""

    inside: Number  # to the others of its machine
    outside: Number  # its share of the machine's adapters
    pci: Number = 0.0  # 1 where hops inside cross PCIe, not NVLink
    in_switch: Number = 0.0  # of an all_reduce that the switch adds up; 0: none does
    per_machine: Number = 8.0
    gather_bus: Number = 0.0  # bus bandwidth measured over all machines together; 0: nobody did
    scatter_bus: Number = 0.0
    reduce_bus: Number = 0.0
    bus_bytes: Number = 1.0  # of the message that these were measured with


class Group(NamedTuple):
    """Ranks that take part in a collective."""

    ranks: Number
    inside: Number  # how many of them share a machine


def group_of(ranks: Number, stride: Number, links: Links, world: Number) -> Group:
    """Every `stride`-th rank of a world that fills its machines one after the other."""
    inside = smaller(links.per_machine, world) / stride
    return Group(ranks, smaller(larger(inside, 1), ranks))


def is_alone(ranks: Number) -> bool:
    """Whether there is nobody to send to, in all configurations."""
    return type(ranks) in PLAIN and not ranks > 1


def collective_seconds(
    collective: Collective, nbytes: Number, group: Group, links: Links
) -> Number:
    """Seconds of one collective.

    nbytes: of the whole message as nccl-tests counts it: what a rank has at the end of an
    all_gather, at the start of a reduce_scatter, an all_reduce or an all_to_all, and what
    send_recv sends.
    """
    ranks, inside = group
    if is_alone(ranks):
        return 0.0
    if collective == "send_recv":
        seconds = _send(nbytes, inside, links)
    elif collective == "all_to_all":
        near, far = nbytes * (inside - 1) / ranks, nbytes * (ranks - inside) / ranks
        seconds = exchange_seconds(near, far, group, links)
    else:
        seconds = collect([nbytes], collective, group, links)[0]
    return where(ranks > 1, seconds, 0.0)


def collect(
    messages: Sequence[Number], collective: Collective, group: Group, links: Links
) -> list[Number]:
    """Seconds of several messages of one group: of the fastest algorithm of each, or as measured.

    collective: all_gather, reduce_scatter or all_reduce.
    """
    if is_alone(group.ranks):
        return [0.0 for _ in messages]
    seconds: list[Number] = [NEVER * (nbytes + 1.0) for nbytes in messages]
    least: Number = NEVER
    for per_byte, latency in _ways(collective, group, links):
        latency = latency * MICRO
        seconds = [
            smaller(before, nbytes * per_byte + latency)
            for before, nbytes in zip(seconds, messages, strict=True)
        ]
        least = smaller(least, latency)
    buses = {"all_reduce": links.reduce_bus, "reduce_scatter": links.scatter_bus}
    bus: Number = buses.get(collective, links.gather_bus)
    if not everywhere(bus == 0):
        # a message of the measured size takes what was measured; latency is that of any size
        measured = links.bus_bytes * bus_factor(collective, group.ranks) / larger(bus, 1.0)
        least, measured_bus = smaller(least, measured), (bus > 0) * (group.ranks > group.inside)
        per_byte = (measured - least) / links.bus_bytes
        seconds = [
            where(measured_bus, least + nbytes * per_byte, before)
            for before, nbytes in zip(seconds, messages, strict=True)
        ]
    return [where(group.ranks > 1, each, 0.0) for each in seconds]


def bus_factor(collective: Collective, ranks: Number) -> Number:
    """Bus bandwidth over size by seconds (nccl-tests, doc/PERFORMANCE.md)."""
    if collective == "send_recv":
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def exchange_seconds(near: Number, far: Number, group: Group, links: Links) -> Number:
    """Each rank sends every other its own: these bytes near and far in all, side by side.

    A pair's bytes go through one adapter each, so that far ones go at a device's share.
    """
    ranks, inside = group
    start, hop = PROTOCOLS["simple"][1], _hop("simple", links)[0]
    away = HOPS["net"]["simple"][0] + POSTED * (ranks - inside)
    leaves = ranks > inside
    latency = start + where(leaves, away, hop)
    within = near / links.inside
    return where(leaves, larger(within, far / links.outside), within) + latency * MICRO


def _hop(protocol: str, links: Links) -> tuple[Number, Number]:
    """Microseconds of a hop inside a machine: of a ring's, of a tree's."""
    slots = zip(HOPS["pci"][protocol], HOPS["nvlink"][protocol], strict=True)
    ring, tree = (where(links.pci > 0, pci, nvlink) for pci, nvlink in slots)
    return ring, tree


def _ways(collective: Collective, group: Group, links: Links) -> Iterator[tuple[Number, Number]]:
    """Seconds of a byte, and microseconds before the first, of every algorithm and protocol."""
    ranks, inside = group
    machines = larger(ranks / inside, 1)
    leaves, several = machines > 1, inside > 1
    ring = where(leaves, smaller(links.inside, links.outside * inside), links.inside)
    ring = where(several, ring, links.outside)
    ringed, near, far = bus_factor(collective, ranks) / ring, ranks - machines, machines - 1
    reduces = collective == "all_reduce"
    rounds = 2 if reduces else 1
    if reduces:
        tree, up_hops = _tree(machines, inside, links), 2 * (inside - 1)
        over_hops = 2 * log2(machines)
    for protocol, (share, start, tree_start) in PROTOCOLS.items():
        within, up = _hop(protocol, links)
        across, over = HOPS["net"][protocol]
        posted = larger(within, POSTED * (3 if protocol == "simple" else 1))
        step = within if everywhere(posted == within) else where(leaves, posted, within)
        # with one rank a machine nothing hides the network: NCCL takes the tree's hop
        across = across if across == over else where(several, across, over)
        steps = near * step + far * across
        # no LL128 over PCIe
        share = where(links.pci > 0, 1e-3, share) if protocol == "ll128" else share
        yield ringed / share, start + rounds * steps
        if reduces:
            yield tree / share, tree_start + up_hops * up + over_hops * over
    if reduces and not everywhere(links.in_switch == 0):
        yield _in_switch(machines, inside, links)


def _tree(machines: Number, inside: Number, links: Links) -> Number:
    """Seconds of a byte, up and down; between two machines nothing is passed on."""
    outside = links.outside * inside * where(machines == 2, 2.0, 1.0)
    crossed = where(machines > 1, outside, links.inside)
    speed = where(inside > 1, smaller(links.inside, crossed), outside)
    return 2.0 / (TREE_SHARE * speed)


def _in_switch(machines: Number, inside: Number, links: Links) -> tuple[Number, Number]:
    # between machines a tree of switches: what each sends up comes down as well
    outside = links.outside * inside * where(machines == 2, 1.0, 0.5)
    speed = where(machines > 1, smaller(links.in_switch, outside), links.in_switch)
    latency = IN_SWITCH + 2 * log2(machines) * TREE_OF_SWITCHES
    there = (inside > 2) * (links.in_switch > 0)
    return where(there, 1.0 / larger(speed, 1.0), NEVER), latency


def _send(nbytes: Number, inside: Number, links: Links) -> Number:
    """To a rank of the same machine, or where no two share one, of another."""
    start, near = PROTOCOLS["simple"][1], _hop("simple", links)[0]
    far = HOPS["net"]["simple"][0]
    within = nbytes / links.inside + (start + near) * MICRO
    return where(inside > 1, within, nbytes / links.outside + (start + far) * MICRO)
