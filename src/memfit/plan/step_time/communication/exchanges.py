"""What the ranks of one step send each other, and for how long: `collectives.py` says how long.

Ranks lie on the mesh with tp innermost, then cp, dp and pp outermost; machines are filled one after
the other. Beside computing, links reach the share of what they reach alone that was fitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.plan.step_time import work
from memfit.plan.step_time.arrays import Number, everywhere, larger, smaller, where
from memfit.plan.step_time.communication.collectives import (
    Collective,
    Group,
    Links,
    collect,
    collective_seconds,
    exchange_seconds,
    group_of,
)
from memfit.plan.step_time.rates import Setting


def _links(setting: Setting) -> Links:
    machine, rates = setting.machine, setting.rates
    return machine.links._replace(
        inside=machine.links.inside * rates.links.link,
        in_switch=machine.links.in_switch * rates.links.link,
        outside=machine.links.outside * rates.links.network,
    )


def _unmeasured(links: Links) -> Links:
    return links._replace(gather_bus=0.0, scatter_bus=0.0, reduce_bus=0.0)


def _world(setting: Setting) -> Number:
    layout = setting.layout
    return layout.mesh.dp * layout.mesh.tp * layout.mesh.cp * layout.mesh.pp


def _group(setting: Setting, ranks: Number, stride: Number) -> Group:
    return group_of(ranks, stride, setting.machine.links, _world(setting))


def _collect(
    setting: Setting, messages: Sequence[Number], collective: Collective, group: Group
) -> list[Number]:
    """Seconds of collectives of data-parallel ranks, and what their framework adds."""
    added = setting.rates.links.ring_latency * where(group.ranks > group.inside, group.ranks, 1)
    added = where(group.ranks > 1, added, 0.0)
    return [each + added for each in collect(messages, collective, group, _links(setting))]


def gather_seconds(setting: Setting, *messages: Number) -> list[Number]:
    """All-gather or reduce-scatter of each message, over the ranks among which weights are cut."""
    layout = setting.layout
    group = _group(setting, layout.mesh.shard * layout.mesh.cp, layout.mesh.tp)
    return _collect(setting, messages, "all_gather", group)


def reduce_seconds(setting: Setting, nbytes: Number) -> Number:
    """All-reduce over all dp ranks, of these bytes a rank."""
    layout = setting.layout
    group = _group(setting, layout.mesh.dp * layout.mesh.cp, layout.mesh.tp)
    return _collect(setting, [nbytes], "all_reduce", group)[0]


def copy_seconds(setting: Setting, nbytes: Number) -> Number:
    """All-reduce of each rank's share of gradients, over the copies of a sharded model."""
    layout = setting.layout
    if everywhere(layout.mesh.dp == layout.mesh.shard):
        return 0.0
    ranks = layout.mesh.shard * layout.mesh.cp
    group = _group(setting, layout.mesh.dp / layout.mesh.shard, ranks * layout.mesh.tp)
    return collective_seconds("all_reduce", nbytes / ranks, group, _links(setting))


def expert_seconds(setting: Setting, nbytes: Number, updated: Number) -> Number:
    """Gradients of a rank's experts reduced over the ranks with the same, and gathered after it."""
    layout = setting.layout
    if everywhere(nbytes == 0):
        return 0.0
    copies = larger(layout.mesh.dp * layout.mesh.cp * layout.mesh.tp / layout.mesh.ep, 1)
    group = _group(setting, copies, layout.mesh.ep)
    both = sum(collect([nbytes, updated], "all_gather", group, _links(setting)))
    return where(nbytes > 0, both, 0.0)


def tensor_seconds(setting: Setting) -> Number:
    """One all-reduce of a micro-batch's activations over tp, or the gather and scatter it is."""
    shape, layout, _, rates = setting
    # what was measured over all machines says nothing of so few
    links = _unmeasured(_links(setting))
    group = Group(layout.mesh.tp, smaller(layout.mesh.tp, links.per_machine))
    nbytes = work.activation_bytes(shape, layout)
    seconds = 2 * collective_seconds("all_gather", nbytes, group, links)
    if not everywhere(layout.mesh.sequence_parallel > 0):
        whole = collective_seconds("all_reduce", nbytes, group, links)
        seconds = where(layout.mesh.sequence_parallel > 0, seconds, whole)
    return where(layout.mesh.tp > 1, seconds + 2 * rates.links.link_latency, 0.0)


def context_ring(setting: Setting, attention: Number) -> Number:
    """Keys and values of a sequence's other ranks, beyond what attention's own time covers."""
    shape, layout, _, rates = setting
    nbytes = work.key_value_bytes(shape, layout)
    reach = layout.mesh.tp * layout.mesh.cp <= setting.machine.links.per_machine
    pair = Group(layout.mesh.cp, where(reach, layout.mesh.cp, 1))
    seconds = (layout.mesh.cp - 1) * collective_seconds("send_recv", nbytes, pair, _links(setting))
    exposed = (
        larger(seconds - attention, 0)
        + 0.1 * seconds
        + rates.links.context_latency * layout.mesh.cp
    )
    return where(layout.mesh.cp > 1, exposed, 0.0)


def send_seconds(setting: Setting) -> Number:
    """A micro-batch's activations, or their gradients, from one stage to the next."""
    shape, layout, _, rates = setting
    nbytes = work.stage_bytes(shape, layout)
    inside = layout.mesh.tp * layout.mesh.cp * layout.mesh.pp <= setting.machine.links.per_machine
    pair = Group(layout.mesh.pp, where(inside, layout.mesh.pp, 1))
    return collective_seconds("send_recv", nbytes, pair, _links(setting)) + rates.links.send_latency


def tied_seconds(setting: Setting, nbytes: Number) -> Number:
    """All-reduce of a tied embedding's gradients between the first and the last stage."""
    layout = setting.layout
    inside = _world(setting) <= setting.machine.links.per_machine
    pair = Group(where(layout.mesh.pp > 1, 2, 1), where(inside, 2, 1))
    return collective_seconds("all_reduce", nbytes, pair, _links(setting))


def all_to_all(setting: Setting) -> Number:
    """Exposed seconds of tokens' way to their experts and back.

    A token goes once for each of its experts, or once to each of the domains that these lie in:
    on average d (1 - (1 - 1/d)^k) of d domains for k experts drawn evenly.
    """
    shape, layout, machine, rates = setting
    links, per_machine = _links(setting), machine.links.per_machine
    # tp's ranks hold whole experts each: their groups are of ep neighbours, tp's among them
    group = Group(layout.mesh.ep, smaller(layout.mesh.ep, per_machine))
    domains = larger(layout.mesh.ep / per_machine, 1)
    tokens = work.tokens_of(layout) / layout.mesh.tp
    distinct = domains * (1 - (1 - 1 / domains) ** shape.per_token)
    copies = where(layout.sent.deduplicated > 0, distinct, shape.per_token)
    across = 2 * shape.hidden * tokens * copies * (1 - 1 / domains)
    within = 2 * shape.hidden * work.routed_tokens(shape, layout) * (1 - 1 / layout.mesh.ep)
    far, near = rates.experts.dispatch_across * across, rates.experts.dispatch * within
    # what is sent once to a domain is passed on inside it at the same time
    together = exchange_seconds(near, far, group, links)
    apart = exchange_seconds(near, 0.0, group, links) + exchange_seconds(0.0, far, group, links)
    seconds = 2 * where(layout.sent.deduplicated > 0, together, apart)
    seconds = seconds * where(layout.sent.overlapped > 0, rates.experts.dispatch_overlapped, 1.0)
    return where(layout.mesh.ep > 1, seconds, 0.0)
