"""Seconds of a collective: NCCL's algorithms and latencies over two levels of links.

n ranks of which k share a machine. A ring moves (n - 1) / n of its bytes through every rank (twice
for an all_reduce; nccl-tests, doc/PERFORMANCE.md). One that leaves a machine uses the shares that
its k ranks have of the machine's adapters, and is never faster than the links inside. A tree goes
up and down once, with the logarithm of the machines in its latency. Where a switch adds up on its
own (NVLink SHARP), every rank sends and receives each byte once. The fastest of them is taken, as
NCCL's own model does (src/graph/tuning.cc), whose protocols and latencies these are; its caps by
channel and its corrections for middle sizes of trees are left out.

Every number may be a numpy array, and the seconds are then of their broadcast shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from memfit.catalog.links import find_link, find_network
from memfit.errors import InvalidRequest
from memfit.hardware import BusBandwidth, Device, Fabric
from memfit.nouns import Noun
from memfit.plan.clock.arrays import Number, larger, log2, smaller, where

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"]
MICRO = 1e-6
# NCCL's protocols: share of the bandwidth, and seconds to start (ring, tree)
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
PCIE = {3: 16e9, 4: 32e9, 5: 64e9, 6: 128e9}  # B/s of 16 lanes by generation, one direction
ASSUMED_EFFICIENCY = 0.75  # of a link of which nobody said: the lowest that NCCL reckons with


class Links(NamedTuple):
    """Bytes per second that one device reaches, and what its hops cross."""

    inside: Number  # to the others of its machine
    outside: Number  # its share of the machine's adapters
    hop: Literal["nvlink", "pci"] = "nvlink"
    in_switch: Number = 0.0  # of an all_reduce that the switch adds up; 0: none does
    per_machine: int = 8
    measured: tuple[BusBandwidth, ...] = ()


class Cluster(Noun, frozen=True, kw_only=True):
    """Machines alike, of devices alike; what joins them is None where nobody said."""

    device: Device
    per_machine: int
    machines: int = 1
    link: Fabric | None
    network: Fabric | None
    asked: bool = False  # whether the request names the network

    @property
    def links(self) -> Links:
        """What collectives run over.

        Raises InvalidRequest where it is unknown what joins several devices, or machines.
        """
        inside, hop = _inside(self)
        return Links(
            inside=inside, outside=_outside(self), hop=hop, per_machine=self.per_machine,
            in_switch=inside * ((self.link and self.link.in_switch) or 0.0),
            measured=self._measured,
        )  # fmt: skip

    @property
    def _measured(self) -> tuple[BusBandwidth, ...]:
        found = self.network.measured if self.network else ()
        return tuple(m for m in found if m.device == self.device.id)

    @property
    def because(self) -> str:
        """What joins devices and machines, and who said so."""
        link, network = self.link, self.network
        said = f"{self.device.link.name or 'unknown links'} in machines of {self.per_machine}"
        if link is not None and link.efficiency is None:
            said += f" ({ASSUMED_EFFICIENCY:.0%} of them assumed)"
        if self.machines == 1:
            return said
        if network is None:
            return f"{said}; what joins machines is unknown"
        usual = "as asked" if self.asked else f"the usual network of `{self.device.id}`"
        if network.efficiency is None and not self._measured:
            usual += f", {ASSUMED_EFFICIENCY:.0%} of it assumed"
        return f"{said}; {network.name} between them, {usual}"


def lay_out(device: Device, per_machine: int, machines: int = 1, network: str = "") -> Cluster:
    """The cluster of so many devices; network: a row of links.toml, else the device's usual one.

    Raises UnknownName or InvalidRequest for a network that no row describes.
    """
    between = find_network(network or device.network) if network or device.network else None
    if between is not None and between.machine:  # a rack is one machine
        devices = per_machine * machines
        per_machine = min(between.machine, devices)
        machines = -(-devices // per_machine)
    return Cluster(
        device=device, per_machine=per_machine, machines=machines, link=find_link(device),
        network=between, asked=bool(network),
    )  # fmt: skip


def _inside(cluster: Cluster) -> tuple[float, Literal["nvlink", "pci"]]:
    """Bytes per second between the devices of a machine, and what they cross."""
    device, link = cluster.device, cluster.link
    speed, share = device.link.unidirectional, link.efficiency if link else None
    crosses: Literal["nvlink", "pci"] = "pci" if link and link.hop == "pci" else "nvlink"
    if cluster.per_machine == 1:
        return speed or 1.0, crosses  # nothing crosses it
    if link is not None and link.reach and cluster.per_machine > link.reach:
        speed, share, crosses = PCIE.get(device.pcie_generation or 0), None, "pci"
    if not speed:
        raise InvalidRequest(
            f"what joins several `{device.id}` of a machine is unknown",
            hint="`link` of a row of your own in devices.toml can say it",
        )
    return speed * (share or ASSUMED_EFFICIENCY), crosses


def _outside(cluster: Cluster) -> float:
    """Bytes per second of a device's share of what joins machines."""
    network = cluster.network
    if cluster.machines == 1:
        return 1.0  # nothing crosses it
    if network is None or not network.bandwidth:
        raise InvalidRequest(
            f"what joins {cluster.machines} machines of `{cluster.device.id}` is unknown",
            hint="`hardware.network` names it, such as ndr-8x400 or ethernet-100",
        )
    devices = network.machine or cluster.per_machine
    share = network.efficiency or ASSUMED_EFFICIENCY
    return network.adapters * network.bandwidth / devices * share


def collective_seconds(
    collective: Collective, nbytes: Number, ranks: Number, inside: Number, links: Links
) -> Number:
    """Seconds of one collective.

    nbytes: of the whole message as nccl-tests counts it: what a rank has at the end of an
    all_gather, at the start of a reduce_scatter, an all_reduce or an all_to_all, and what
    send_recv sends. inside: how many of the group's ranks share a machine; it divides `ranks`.
    """
    if collective == "send_recv":
        seconds = _send(nbytes, inside, links)
    elif collective == "all_to_all":
        seconds = _all_to_all(nbytes, ranks, inside, links)
    else:
        seconds = NEVER * (nbytes + 1.0)
        for per_byte, latency in _ways(collective, ranks, inside, links):
            seconds = smaller(seconds, nbytes * per_byte + latency * MICRO)
        for found in links.measured:
            if found.collective == collective:
                whole = (inside == links.per_machine) & (ranks > inside)
                seconds = where(whole, _as_measured(found, nbytes, ranks, links), seconds)
    return where(ranks > 1, seconds, 0.0)


def bus_factor(collective: Collective, ranks: Number) -> Number:
    """Bus bandwidth over size by seconds (nccl-tests, doc/PERFORMANCE.md)."""
    if collective == "send_recv":
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _ways(
    collective: Collective, ranks: Number, inside: Number, links: Links
) -> Iterator[tuple[Number, Number]]:
    """Seconds of a byte, and microseconds before the first, of every algorithm and protocol."""
    machines = ranks / inside
    leaves = machines > 1
    ring = where(leaves, smaller(links.inside, links.outside * inside), links.inside)
    ring = where(inside > 1, ring, links.outside)
    rounds = 2 if collective == "all_reduce" else 1
    for protocol, (share, start, tree_start) in PROTOCOLS.items():
        if protocol == "ll128" and links.hop == "pci":
            continue
        within, up = HOPS[links.hop][protocol]
        across, over = HOPS["net"][protocol]
        posted = POSTED * (3 if protocol == "simple" else 1)
        step = where(leaves, larger(within, posted), within)
        # with one rank a machine nothing hides the network: NCCL takes the tree's hop
        across = where(inside > 1, across, over)
        steps = (ranks - machines) * step + (machines - 1) * across
        factor = bus_factor(collective, ranks)
        yield factor / (ring * share), start + rounds * steps
        if collective == "all_reduce":
            tree = TREE_SHARE * share * _tree(machines, inside, links)
            hops = (inside - 1) * up + log2(machines) * over
            yield 2.0 / tree, tree_start + 2 * hops
    if collective == "all_reduce":
        yield from _in_switch(machines, inside, links)


def _tree(machines: Number, inside: Number, links: Links) -> Number:
    """Bytes per second up, and as many down; between two machines nothing is passed on."""
    outside = links.outside * inside * where(machines == 2, 2.0, 1.0)
    crossed = where(machines > 1, outside, links.inside)
    return where(inside > 1, smaller(links.inside, crossed), outside)


def _in_switch(machines: Number, inside: Number, links: Links) -> Iterator[tuple[Number, Number]]:
    if not links.in_switch:
        return
    # between machines a tree of switches: what each sends up comes down as well
    outside = links.outside * inside * where(machines == 2, 1.0, 0.5)
    speed = where(machines > 1, smaller(links.in_switch, outside), links.in_switch)
    latency = IN_SWITCH + 2 * log2(machines) * TREE_OF_SWITCHES
    yield where(inside > 2, 1.0 / speed, NEVER), latency


def _send(nbytes: Number, inside: Number, links: Links) -> Number:
    """To a rank of the same machine, or where no two share one, of another."""
    start, near = PROTOCOLS["simple"][1], HOPS[links.hop]["simple"][0]
    far = HOPS["net"]["simple"][0]
    within = nbytes / links.inside + (start + near) * MICRO
    return where(inside > 1, within, nbytes / links.outside + (start + far) * MICRO)


def _all_to_all(nbytes: Number, ranks: Number, inside: Number, links: Links) -> Number:
    """Each rank sends every other an n-th of its bytes, near and far side by side.

    A pair's bytes go through one adapter each, so that far ones go at a device's share.
    """
    near = nbytes * (inside - 1) / ranks / links.inside
    far = nbytes * (ranks - inside) / ranks / links.outside
    start, hop = PROTOCOLS["simple"][1], HOPS[links.hop]["simple"][0]
    away = HOPS["net"]["simple"][0] + POSTED * (ranks - inside)
    leaves = ranks > inside
    latency = start + where(leaves, away, hop)
    return where(leaves, larger(near, far), near) + latency * MICRO


def _as_measured(found: BusBandwidth, nbytes: Number, ranks: Number, links: Links) -> Number:
    """Bytes at the measured rate, between counts of machines by a power of the count.

    A message of the measured size takes what was measured; of it, the latency is the same for any
    size. Beyond the last count its rate is taken, and the figure is too low.
    """
    machines = ranks / links.per_machine
    rate: Number = found.bus[0]
    for (few, slow), (many, fast) in zip(
        zip(found.machines, found.bus, strict=True),
        zip(found.machines[1:], found.bus[1:], strict=True),
        strict=False,
    ):
        part = smaller(larger(log2(machines / few) / log2(many / few), 0.0), 1.0)
        rate = rate * (fast / slow) ** part
    factor = bus_factor(found.collective, ranks)
    measured = found.size * factor / rate
    latency = smaller(_least_latency(found.collective, ranks, links), measured)
    return latency + nbytes / found.size * (measured - latency)


def _least_latency(collective: Collective, ranks: Number, links: Links) -> Number:
    """Seconds of the least that any algorithm takes for no bytes at all."""
    least: Number = NEVER
    for _, latency in _ways(collective, ranks, links.per_machine, links):
        least = smaller(least, latency * MICRO)
    return least
