"""Seconds of one optimizer step: blocks, pipeline, what collectives leave uncovered.

A block's operations run one after the other. Its kernels are launched beside them, and the longer
of the two counts. Collectives are exposed by the share that their framework leaves uncovered, and
beyond what computing could cover.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.plan.step_time import work
from memfit.plan.step_time.arrays import Number, beside, everywhere, larger, log2, smaller, where
from memfit.plan.step_time.block import Block, spend, time_block
from memfit.plan.step_time.communication.exchanges import (
    copy_seconds,
    expert_seconds,
    gather_seconds,
    reduce_seconds,
    tied_seconds,
)
from memfit.plan.step_time.pipeline.exact import count_sends, waiting_seconds
from memfit.plan.step_time.rates import Setting
from memfit.plan.step_time.runs import MESHES_DO_NOT_READ, once
from memfit.plan.step_time.work import Layout


class Parts(NamedTuple):
    """Seconds of a step on the rank that takes longest, one after the other."""

    forward: Number
    backward: Number
    repeated: Number
    head: Number
    tensor: Number  # exposed collectives between ranks of tp, cp and ep
    waiting: Number  # for the host's launches
    gathering: Number  # exposed gathering of weights, and reduction, of zero 3
    sending: Number  # between stages of a pipeline
    bubble: Number
    reducing: Number  # exposed reduction of gradients and gathering of updated weights
    updating: Number  # the optimizer
    straggling: Number
    fixed: Number
    offloading: Number = 0.0  # activations to the host and back, beyond what computing covers

    @property
    def total(self) -> Number:
        """Of the step."""
        return sum(self)


class Stage(NamedTuple):
    """Seconds of one micro-batch on the stage that takes longest, and on the mean stage."""

    blocks: Number  # how many it holds
    head: Number
    longest: Number
    mean: Number


def deal(setting: Setting, block: Number, head: Number) -> Stage:
    """Blocks of the longest stage, as they are dealt; or as few on the last as balance the head."""
    shape, layout = setting.shape, setting.layout
    mean = (shape.layers * block + head) / layout.mesh.pp
    balanced = (layout.stages.balanced > 0) * (layout.mesh.pp > 1)
    whole = (mean / block + 0.5) // 1 * block
    dealt = larger(layout.stages.most * block, layout.stages.last * block + head)
    longest = where(balanced, larger(mean, larger(whole, head)), dealt)
    first = layout.stages.most * block >= layout.stages.last * block + head
    blocks = where(first, layout.stages.most, layout.stages.last)
    blocks = where(balanced, smaller(longest / block, shape.layers / layout.mesh.pp), blocks)
    return Stage(blocks=blocks, head=longest - blocks * block, longest=longest, mean=mean)


def predict_step(setting: Setting) -> Parts:
    """Seconds of one optimizer step."""
    layout, rates = setting.layout, setting.rates
    spent, after = spend(setting), finish(setting)
    block, head = time_block(setting, spent), spent.head
    busy = block.forward + block.backward + block.repeated + 2 * block.exposed
    launched = block.launched - block.waited
    there = beside(block.forward + block.exposed, launched) + block.waited
    back = beside(busy - block.forward - block.exposed, block.launched_back)
    each = there + back
    stage = deal(setting, each, head)
    send = count_sends(layout.mesh.pp, layout.stages.chunks, layout.rows.accumulation) * spent.send
    times = layout.rows.accumulation
    gathering = _gathering(setting, there, back)
    waiting = waiting_seconds(layout.mesh.pp, layout.stages.chunks, stage.longest, stage.mean, 0.0)
    bubble = layout.stages.bubble * larger(waiting, 0)
    reducing = _reducing(setting, stage, after)
    sum_ = times * stage.longest + send + gathering + bubble + reducing + after.updating
    count = times * stage.blocks
    return Parts(
        forward=count * block.forward, backward=count * block.backward,
        repeated=count * block.repeated, head=times * stage.head,
        tensor=count * 2 * block.exposed, waiting=count * (each - busy),
        gathering=gathering, sending=send, bubble=bubble, reducing=reducing,
        updating=after.updating, fixed=rates.step.fixed,
        offloading=_offloading(setting, block),
        straggling=sum_ * rates.step.straggling * log2(larger(_world(layout) / 8, 1)),
    )  # fmt: skip


def _world(layout: Layout) -> Number:
    return layout.mesh.dp * layout.mesh.tp * layout.mesh.cp * layout.mesh.pp


def _offloading(setting: Setting, block: Block) -> Number:
    """Exposed seconds of activations that pass to the host and back beside other blocks' computing.

    The uppermost block's come back while nothing else can run.
    """
    away, found = setting.layout.offloading, 0.0
    for share, nbytes in (away.offloads, away.stowed), (away.input_share, away.input_bytes):
        once = nbytes / setting.machine.host
        there = larger(once - block.forward, 0)
        back = larger(once - block.backward - block.repeated, 0)
        found = found + setting.shape.layers * share * (there + back)
    uppermost = where(away.offloads > 0, away.stowed, away.input_bytes) / setting.machine.host
    offloads = away.offloads + away.input_share > 0
    return setting.layout.rows.accumulation * (found + where(offloads, uppermost, 0.0))


def _gathering(setting: Setting, there: Number, back: Number) -> Number:
    """Exposed seconds of zero 3: weights gathered for both passes, gradients reduced.

    A block's collectives run beside the previous block's computing, which takes so long there and
    back. Under a pipeline weights stay gathered for the whole step.
    """
    shape, layout, _, rates = setting
    if everywhere(layout.mesh.zero < 3):
        return 0.0
    elements = work.gathered_elements(shape, layout)
    gradients = layout.sent.gradient_bytes * elements
    gather, scatter = gather_seconds(setting, layout.sent.gathered * elements, gradients)
    reduce = layout.update.trains * (scatter + copy_seconds(setting, gradients))
    second_gather = gather * (1 - layout.sent.gathered_once)
    forward = larger(gather - there, 0)
    backward = larger(second_gather + reduce - back, 0)
    share = smaller(rates.exposed.exposed_data, 1)
    exposed = forward + backward + share * (gather + second_gather + reduce)
    times = where(layout.mesh.pp > 1, 1, layout.rows.accumulation)
    return where(layout.mesh.zero >= 3, times * shape.layers / layout.mesh.pp * exposed, 0.0)


class After(NamedTuple):
    """Seconds of what follows the last micro-batch, covered or not."""

    reducing: Number  # gradients' reduction and updated weights' gathering, zero 0 to 2
    tied: Number  # a tied embedding's gradients
    updating: Number  # the optimizer


def finish(setting: Setting) -> After:
    """The same, worked out once for each mesh."""
    return After(*once(_finish, setting, MESHES_DO_NOT_READ))


def _finish(setting: Setting) -> After:
    layout = setting.layout
    rest = After(0.0, _tied(setting), _updating(setting))
    if everywhere(layout.mesh.zero >= 3):
        return rest
    plain, routed = work.own_weights(setting.shape, layout)
    gradients = layout.sent.gradient_bytes * plain
    whole = sum(gather_seconds(setting, gradients, 2 * plain)) + copy_seconds(setting, gradients)
    # without a cut all ranks are copies of one another
    alone = (layout.mesh.zero >= 1) | (layout.mesh.shard * layout.mesh.cp <= 1)
    if not everywhere(alone):
        whole = where(alone, whole, reduce_seconds(setting, gradients))
    total = whole + expert_seconds(setting, layout.sent.gradient_bytes * routed, 2 * routed)
    return rest._replace(reducing=where(layout.mesh.zero >= 3, 0.0, total))


def _reducing(setting: Setting, stage: Stage, after: After) -> Number:
    """What is exposed of it, and of a tied embedding's gradients all."""
    layout, rates = setting.layout, setting.rates
    # under a pipeline no backward is long enough for replicated gradients to be sent beside it
    late = (layout.mesh.zero >= 1) | (layout.mesh.pp > 1)
    share = where(late, rates.exposed.exposed_data, rates.exposed.exposed_all_reduce)
    covered = larger((1 - share) * after.reducing - 0.66 * stage.longest, 0)
    return layout.update.trains * (share * after.reducing + covered + after.tied)


def _tied(setting: Setting) -> Number:
    """Seconds in which the first and the last stage add up a tied embedding's gradients."""
    shape, layout = setting.shape, setting.layout
    if everywhere(shape.own_head > 0):
        return 0.0
    nbytes = layout.sent.gradient_bytes * shape.vocab * shape.hidden / layout.mesh.tp
    return where(shape.own_head == 0, tied_seconds(setting, nbytes), 0.0)


def _updating(setting: Setting) -> Number:
    """Seconds of the optimizer: its states' bytes, and what passes to the host and back."""
    layout, machine, rates = setting.layout, setting.machine, setting.rates
    plain, routed = work.own_weights(setting.shape, layout)
    cut = layout.mesh.zero >= 1
    copies = larger(layout.mesh.dp * layout.mesh.cp * layout.mesh.tp / layout.mesh.ep, 1)
    own = plain / where(cut, layout.mesh.shard * layout.mesh.cp, 1) + routed / where(cut, copies, 1)
    seconds = (
        layout.update.state_bytes / (machine.memory * rates.elementwise.memory)
        + layout.update.offloaded / machine.host
    )
    products = layout.update.update_flop / (machine.products * rates.compute.products)
    return layout.update.trains * own * seconds + products
