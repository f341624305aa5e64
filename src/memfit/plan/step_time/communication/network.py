"""What joins devices and machines, and what large messages reach of it: rows of `links.toml`."""

from __future__ import annotations

from itertools import pairwise
from math import log

from memfit.catalog.links import find_link, find_network
from memfit.core.errors import InvalidRequest
from memfit.plan.step_time.communication.collectives import Links
from memfit.records import Record
from memfit.records.hardware import BusBandwidth, Device, Fabric

PCIE = {3: 16e9, 4: 32e9, 5: 64e9, 6: 128e9}  # B/s of 16 lanes by generation, one direction
ASSUMED_EFFICIENCY = 0.75  # of a link of which nobody said: the lowest that NCCL reckons with


class Cluster(Record, frozen=True, kw_only=True):
    """Machines alike, of devices alike; what joins them is None where it is unknown."""

    device: Device
    per_machine: int
    machines: int = 1
    link: Fabric | None
    network: Fabric | None
    named: bool = False  # whether the request names the network

    @property
    def links(self) -> Links:
        """What collectives run over.

        Raises InvalidRequest where it is unknown what joins several devices, or machines.
        """
        inside, pci = _inside(self)
        return Links(
            inside=inside, outside=_outside(self), pci=float(pci),
            per_machine=float(self.per_machine),
            in_switch=inside * ((self.link and self.link.in_switch) or 0.0),
            gather_bus=self._bus("all_gather"), scatter_bus=self._bus("reduce_scatter"),
            reduce_bus=self._bus("all_reduce"),
            bus_bytes=float(next((m.size for m in self._measured), 1)),
        )  # fmt: skip

    @property
    def _measured(self) -> tuple[BusBandwidth, ...]:
        found = self.network.measured if self.network else ()
        return tuple(m for m in found if m.device == self.device.id)

    def _bus(self, collective: str) -> float:
        """Return bytes per second over machines, by a power of their number between two counts.

        Beyond the last count its rate is taken, and the figure is too high. 0: nobody measured it.
        """
        found = next((m for m in self._measured if m.collective == collective), None)
        if found is None or self.machines == 1:
            return 0.0
        points = list(zip(found.machines, found.bus, strict=True))
        for (few, slow), (many, fast) in pairwise(points):
            if self.machines <= many:
                part = log(self.machines / few) / log(many / few)
                return float(slow * (fast / slow) ** part)
        return points[-1][1]

    @property
    def because(self) -> str:
        """Return what joins devices and machines, and the source of it."""
        link, network = self.link, self.network
        words = f"{self.device.link.name or 'unknown links'} in machines of {self.per_machine}"
        if link is not None and link.efficiency is None:
            words += f" ({ASSUMED_EFFICIENCY:.0%} of them assumed)"
        if self.machines == 1:
            return words
        if network is None:
            return f"{words}; what joins machines is unknown"
        usual = "as asked" if self.named else f"the usual network of `{self.device.id}`"
        if network.efficiency is None and not self._measured:
            usual += f", {ASSUMED_EFFICIENCY:.0%} of it assumed"
        return f"{words}; {network.name} between them, {usual}"


def lay_out(device: Device, per_machine: int, machines: int = 1, network: str = "") -> Cluster:
    """Return the cluster of these devices; network: a row of links.toml, else the usual one.

    Raises UnknownName or InvalidRequest for a network that no row describes.
    """
    between = find_network(network or device.network) if network or device.network else None
    if between is not None and between.machine:  # a rack is one machine
        devices = per_machine * machines
        per_machine = min(between.machine, devices)
        machines = -(-devices // per_machine)
    return Cluster(
        device=device, per_machine=per_machine, machines=machines, link=find_link(device),
        network=between, named=bool(network),
    )  # fmt: skip


def _inside(cluster: Cluster) -> tuple[float, bool]:
    """Bytes per second between the devices of a machine, and whether they cross PCIe."""
    device, link = cluster.device, cluster.link
    speed, share = device.link.unidirectional, link.efficiency if link else None
    crosses = link is not None and link.hop == "pci"
    if cluster.per_machine == 1:
        return speed or 1.0, crosses  # nothing crosses it
    if link is not None and link.reach and cluster.per_machine > link.reach:
        speed, share, crosses = PCIE.get(device.pcie_generation or 0), None, True
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
