"""Seconds of one step's collectives: rings over two levels of links.

Ranks lie on the mesh with tp innermost, then cp, dp and pp outermost. A collective of n ranks
moves (n - 1) / n of its bytes through each rank's link (nccl-tests, doc/PERFORMANCE.md). A ring
that leaves a domain uses all its devices' network adapters side by side, never more than a link.
"""

from __future__ import annotations

from memfit.plan.clock import work
from memfit.plan.clock.arrays import Number, larger, smaller, where
from memfit.plan.clock.rates import Setting


def _world(setting: Setting) -> Number:
    layout = setting.layout
    return layout.dp * layout.tp * layout.cp * layout.pp


def _links(setting: Setting) -> tuple[Number, Number]:
    """Bytes per second that a device reaches within its domain and beyond."""
    machine, rates = setting.machine, setting.rates
    return machine.link * rates.link, machine.network * rates.network


def _between(setting: Setting, group: Number, nbytes: Number, bus: Number) -> Number:
    """A ring of data-parallel ranks; `bus` is its measured bandwidth, 0 where nobody measured."""
    layout, machine, rates = setting.layout, setting.machine, setting.rates
    link, network = _links(setting)
    reach = smaller(machine.domain, _world(setting))
    inside = smaller(larger(reach / layout.tp, 1), group)
    leaves = group * layout.tp > reach
    speed = where(leaves, where(bus > 0, bus, smaller(network * inside, link)), link)
    latency = where(bus > 0, 0.0, rates.ring_latency * where(leaves, group, 1))
    return where(group > 1, nbytes * (group - 1) / group / speed + latency, 0.0)


def gather_seconds(setting: Setting, nbytes: Number) -> Number:
    """All-gather or reduce-scatter of so many bytes, over the ranks among which weights are cut."""
    layout = setting.layout
    return _between(setting, layout.shard * layout.cp, nbytes, setting.machine.gather_bus)


def reduce_seconds(setting: Setting, nbytes: Number) -> Number:
    """All-reduce over all dp ranks, of twice as many bytes as a rank has gradients."""
    layout = setting.layout
    return _between(setting, layout.dp * layout.cp, nbytes, setting.machine.reduce_bus)


def copy_seconds(setting: Setting, nbytes: Number) -> Number:
    """All-reduce of each rank's share of gradients, over the copies of a sharded model."""
    layout = setting.layout
    copies = layout.dp / layout.shard
    _, network = _links(setting)
    return 2 * nbytes / (layout.shard * layout.cp) * (copies - 1) / copies / network


def tensor_seconds(setting: Setting) -> Number:
    """One all-reduce of a micro-batch's activations over tp, or the gather and scatter it is."""
    shape, layout, machine, rates = setting
    link, network = _links(setting)
    inside = layout.tp <= machine.domain
    speed = where(inside, link, smaller(link, network * machine.domain))
    nbytes = 2 * work.tokens_of(layout) * shape.hidden
    steps = where(inside, 2, layout.tp / 2)
    seconds = 2 * (layout.tp - 1) / layout.tp * nbytes / speed + rates.link_latency * steps
    return where(layout.tp > 1, seconds, 0.0)


def context_ring(setting: Setting, attention: Number) -> Number:
    """Keys and values of a sequence's other ranks, beyond what attention's own time covers."""
    shape, layout, machine, rates = setting
    link, network = _links(setting)
    speed = where(layout.tp * layout.cp <= machine.domain, link, network)
    width = shape.kv_heads * (shape.key + shape.value)
    seconds = 2 * work.tokens_of(layout) * width / layout.tp * (layout.cp - 1) / speed
    exposed = larger(seconds - attention, 0) + 0.1 * seconds + rates.context_latency * layout.cp
    return where(layout.cp > 1, exposed, 0.0)


def all_to_all(setting: Setting) -> Number:
    """Exposed seconds of tokens' way to their experts and back.

    A token goes once for each of its experts, or once to each of the domains that these lie in:
    on average d (1 - (1 - 1/d)^k) of d domains for k experts drawn evenly.
    """
    shape, layout, machine, rates = setting
    link, network = _links(setting)
    # tp's ranks hold whole experts each: their groups are of ep neighbours, tp's among them
    domains = larger(layout.ep / machine.domain, 1)
    tokens = work.tokens_of(layout) / layout.tp
    distinct = domains * (1 - (1 - 1 / domains) ** shape.per_token)
    copies = where(layout.deduplicated > 0, distinct, shape.per_token)
    across = tokens * copies * (1 - 1 / domains) / network
    within = work.routed_tokens(shape, layout) * (1 - 1 / layout.ep) / link
    across, within = rates.dispatch_across * across, rates.dispatch * within
    # what is sent once to a domain is passed on inside it at the same time
    both = where(layout.deduplicated > 0, larger(across, within), across + within)
    seconds = 4 * shape.hidden * both
    seconds = seconds * where(layout.overlapped > 0, rates.dispatch_overlapped, 1.0)
    return where(layout.ep > 1, seconds, 0.0)
