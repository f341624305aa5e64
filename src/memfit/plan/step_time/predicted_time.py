"""How long one optimizer step takes: matrix products, bytes moved, launches; closed form, no torch.

FLOP: 2 per parameter and token forward, 2 for the input's gradient, 2 for the weight's (Kaplan et
al. 2001.08361, section 2.1; 6 in all for full training), plus causal attention's 2 x 2 x s x s/2 x
hidden a sequence forward and twice that backward. Of a layer's experts only those count that a
token visits. A frozen weight needs no weight gradient, and a
block before the first trainable parameter no backward at all. Known error: under LoRA the gradient
of the first block's input is counted though nothing needs it (one block's q, k, v).

Seconds are `plan/clock`'s, whose constants were fitted to published runs of other frameworks; none
of them ran memfit's own step, and `because` says so.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod

from msgspec.structs import replace

from memfit.adapters.shared.peft_layers import MAGNITUDE, REWARD, VALUE
from memfit.core.errors import TimeUnknown
from memfit.families import find_family
from memfit.plan.frameworks import find_framework
from memfit.plan.step_time.adapters import PROJECTIONS, Matrix, list_matrices, with_adapters
from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.block import EAGER_CAST_BYTES, FUSED_CAST_BYTES, count_chunks
from memfit.plan.step_time.communication.collectives import Links
from memfit.plan.step_time.counts.linear_attention import multiplied
from memfit.plan.step_time.counts.own_counts import with_counts
from memfit.plan.step_time.own import describe
from memfit.plan.step_time.rates import Machine, Setting, explain, find_rates
from memfit.plan.step_time.read import (
    USUAL,
    Basis,
    Network,
    check_timed,
    read_basis,
    read_layout,
    read_machine,
    read_shape,
)
from memfit.plan.step_time.rollouts.describe import (
    assume_bounds,
    describe_iteration,
    describe_phases,
    lay_out_iteration,
)
from memfit.plan.step_time.rollouts.phases import Iteration, time_iteration
from memfit.plan.step_time.step import Parts, predict_step
from memfit.plan.step_time.time_range import find_range
from memfit.plan.step_time.update_time import Updated, count_updated, with_update
from memfit.plan.step_time.work import Shape
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.model import CHUNK, LINEAR, SCORE, Architecture, Model, Weight
from memfit.records.recipe import Recipe
from memfit.records.results import Time
from memfit.records.timeline import Span, Timeline

SCANNED = "linear attention"
# Where the device's speed is unknown, recipes are still ranked, by rates nobody claims.
OTHER_ADAPTERS = f".{VALUE}.weight", f".{REWARD}.weight"  # how their matrices' names end
RANKING_FLOPS, RANKING_BANDWIDTH = {"fp32": 1e12, "bf16": 1.5e12, "fp16": 1.5e12}, 5e10


class Work(Record, frozen=True, kw_only=True):
    """FLOP of one optimizer step."""

    forward: float
    backward: float
    recompute: float
    attention: float  # the part of all three that attention's two products take

    @property
    def model(self) -> float:
        """What the mathematics needs: MFU's numerator."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """With recompute: HFU's numerator."""
        return self.model + self.recompute


class Totals(Record, frozen=True, kw_only=True):
    """What the time of a step depends on, summed once over a model's weights."""

    architecture: Architecture
    shape: Shape
    dense: tuple[int, ...]  # elements of each block's matrices
    trained: tuple[int, ...]  # those of them that are trained
    last: tuple[int, ...]  # each block's last product: recomputation stops before it
    head: int
    head_trained: int
    first: int  # the first block that backward has to enter
    weight_bytes: int
    gradient_bytes: int
    trainable: int
    measured: tuple[int, ...]  # elements of each block's weights whose rows' lengths are trained
    updated: Updated = ()  # what the optimizer updates
    matrices: tuple[Matrix, ...] = ()  # of the base's blocks

    def __hash__(self) -> int:
        """Of what tells models apart quickly: a search asks for one model's seconds very often."""
        return hash((len(self.dense), self.head, self.weight_bytes, self.trainable))


def sum_up(model: Model) -> Totals:
    """The totals of a model after its adapter."""
    a = model.architecture
    dense, trained, last = [0] * a.layers, [0] * a.layers, [0] * a.layers
    measured = [0] * a.layers
    head = prod((a.vocab, a.head_input)) if a.tied_embeddings else 0
    head_trained = head if a.tied_embeddings and _embedding_trains(model) else 0
    first, weight_bytes, gradient_bytes, trainable = a.layers, 0, 0, 0
    bases = {
        w.name.partition(MAGNITUDE)[0] + ".base_layer.weight"
        for w in model.weights
        if MAGNITUDE in w.name
    }
    for w in model.weights:
        numel, nbytes = w.numel, w.nbytes
        weight_bytes += nbytes
        if w.trainable:
            gradient_bytes, trainable = gradient_bytes + nbytes, trainable + numel
            first = min(first, {"embedding": 0, "block": w.layer}.get(w.part, first))
        if len(w.shape) < 2 or w.name.endswith("_bias"):  # all experts' biases are one matrix
            continue
        numel = model.active(w)
        if w.part == "head" and (a.scores or w.name.endswith(SCORE)):
            continue  # a number of a row or a token: nothing beside the others
        if w.name.endswith(OTHER_ADAPTERS) or w.of_value:
            continue  # which runs in the policy's place
        if w.part == "head":
            head, head_trained = head + numel, head_trained + numel * w.trainable
        elif w.part == "block":
            dense[w.layer] += numel
            measured[w.layer] += numel * (w.name in bases)
            last[w.layer] = numel if _is_only_added(w, a) else 0
            trained[w.layer] += numel * w.trainable
    return Totals(
        architecture=a, shape=read_shape(model), dense=tuple(dense),
        trained=tuple(trained), last=tuple(last), head=head,
        head_trained=head_trained, first=first, weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes, trainable=trainable, measured=tuple(measured),
        updated=count_updated(model), matrices=list_matrices(model),
    )  # fmt: skip


def _is_only_added(w: Weight, a: Architecture) -> bool:
    """Whether no derivative needs what a block's last weight makes; shares multiply experts'."""
    if find_family(a.family).norm_after_blocks:
        return False
    sparse = a.experts.count > 0 and w.layer >= a.experts.dense_layers
    return not sparse or ".shared_experts." in w.name


def count_work(totals: Totals, recipe: Recipe) -> Work:
    """FLOP of one optimizer step of this recipe."""
    a, tokens = totals.architecture, recipe.tokens * recipe.accumulation
    dense, trained, first = totals.dense, totals.trained, totals.first
    attended = partial(_attend, a, recipe)
    every, entered = attended(range(a.layers)), attended(range(first, a.layers))
    forward = 2 * tokens * (sum(dense) + totals.head) + every
    # a reference's forward is part of the mathematics: all but the adapters
    base = 2 * tokens * (sum(dense) - sum(trained) + totals.head) + every
    forward += recipe.references * base
    forward += recipe.mismatches * (base + 2 * tokens * sum(trained))
    products = sum(dense[first:]) + sum(trained[first:]) + totals.head + totals.head_trained
    backward = 2 * tokens * products + 2 * entered
    recomputed = slice(min(first, recipe.recompute_blocks), recipe.recompute_blocks)
    repeated = attended(range(recomputed.start, recomputed.stop))
    part = range(max(first, recomputed.stop), recomputed.stop + recipe.selective_blocks)
    repeated += attended(part, fused=recipe.attention == "math")
    recompute = 2 * tokens * (sum(dense[recomputed]) - sum(totals.last[recomputed])) + repeated
    if recipe.values:  # the same blocks once more, without the vocabulary
        forward += 2 * tokens * sum(dense) + every
        backward += 2 * tokens * (sum(dense[first:]) + sum(trained[first:]))
        backward += 2 * entered
        recompute *= 2
    norms = 2 * recipe.lora.rank * recipe.accumulation  # DoRA's B A, of no token
    forward += norms * sum(totals.measured)
    recompute += norms * sum(totals.measured[recomputed])
    if (recipe.compares or recipe.samples) and recipe.loss == "chunked":
        recompute += 2 * tokens * totals.head
    share = (1 + recipe.references + recipe.mismatches) * every + 2 * entered + repeated
    share *= 2 if recipe.values else 1
    return Work(forward=forward, backward=backward, recompute=recompute, attention=share)


def _attend(a: Architecture, recipe: Recipe, blocks: range, *, fused: bool = True) -> float:
    """FLOP of attention's own products in some blocks, forward; fused: those of fused kernels
    too, whose results a selective block saves."""
    tokens = recipe.tokens * recipe.accumulation
    widths = a.head_dim + (a.latent.value or a.head_dim)  # of keys, and of values
    attention = 1.0 * recipe.sequence_length * a.heads * widths * tokens  # a block, causal
    linear = sum(a.kind(layer) == LINEAR for layer in blocks) if a.recurrent else 0
    found = attention * (len(blocks) - linear) if fused else 0.0
    if not linear:
        return found
    chunks = -(-recipe.sequence_length // CHUNK)
    rows = recipe.micro_batch * recipe.accumulation
    return found + 1.0 * multiplied(a.linear) * rows * chunks * CHUNK * linear


def _embedding_trains(model: Model) -> bool:
    return any(w.trainable for w in model.weights if w.part == "embedding")


def find_setting(
    totals: Totals, recipe: Recipe, device: Device, network: Network = USUAL
) -> Setting:
    """Everything that the recipe's time depends on; raises TimeUnknown."""
    check_timed(totals.architecture, recipe.framework, device)
    basis = read_basis(recipe)
    machine = read_machine(device, recipe, basis, network)
    return _setting(totals, recipe, device, basis, machine)


def _setting(
    totals: Totals, recipe: Recipe, device: Device, basis: Basis, machine: Machine
) -> Setting:
    layout = read_layout(recipe, totals.shape, basis)
    a, layers = totals.architecture, totals.architecture.layers
    layout = with_counts(layout, recipe, a, totals.shape, len(totals.matrices))
    layout = with_adapters(layout, recipe, totals.matrices, layers)
    if totals.first:  # frozen blocks that no backward enters
        layout = change(layout, entered=(layers - totals.first) / layers)
    traits = find_framework(recipe.framework).time
    if traits.counts_weights:
        layout = with_update(layout, totals.updated, recipe, layers, machine)
    products = sum(totals.dense) + totals.head
    if products and traits.counts_weights:
        trained = sum(totals.trained) + totals.head_trained
        layout = change(layout, trains=trained / products)
    if traits.casts_alone and recipe.precision == "fp8-mixed":
        layout = change(
            layout,
            narrow=EAGER_CAST_BYTES / FUSED_CAST_BYTES,
            recast=sum(totals.dense) / max(layers, 1),
        )
    # rounding a weight moves 36 bytes an element, twice what measuring its rows does
    passes = sum(totals.measured) + (2 * sum(totals.dense) if recipe.qat else 0)
    layout = change(layout, measured=passes / max(layers, 1))
    rates = find_rates(device, basis.stack, basis.narrow, basis.kernel)
    return Setting(totals.shape, layout, machine, rates)


def predict_timeline(totals: Totals, recipe: Recipe, device: Device) -> Timeline:
    """The spans of one optimizer step; empty when a speed that it needs is unknown."""
    if _samples_elsewhere(recipe):
        return Timeline(spans=())
    try:
        setting = find_setting(totals, recipe, device)
    except TimeUnknown:
        return Timeline(spans=())
    work = count_work(totals, recipe)
    if recipe.samples:
        iteration = _iterate(setting, totals, recipe, device)
        return lay_out_iteration(iteration, lay_out(iteration.update, work, recipe))
    return lay_out(predict_step(setting), work, recipe)


def _samples_elsewhere(recipe: Recipe) -> bool:
    """Whether answers are sampled by a loop that is not memfit's, whose speed nobody described."""
    return recipe.samples and not recipe.is_own


def _iterate(setting: Setting, totals: Totals, recipe: Recipe, device: Device) -> Iteration:
    """One iteration of a recipe whose answers are sampled; setting: of its update."""
    a = totals.architecture
    return time_iteration(setting, recipe, a, len(totals.matrices) / max(a.layers, 1), device)


def _seconds(setting: Setting, totals: Totals, recipe: Recipe, device: Device) -> float:
    if recipe.samples:
        return _iterate(setting, totals, recipe, device).seconds
    return float(predict_step(setting).total)


def relative_seconds(totals: Totals, recipe: Recipe, device: Device) -> float:
    """Seconds for ranking recipes of one device.

    On nominal rates where it states none, and on any CPU: there the rates are measured when a run
    starts, and two starts of one request must choose the same recipe.
    """
    if not device.is_cpu:
        try:
            basis = read_basis(recipe)
            machine = read_machine(device, recipe, basis, USUAL)
            return _known_seconds(totals, recipe, device, basis, machine)
        except TimeUnknown:
            pass
    basis = read_basis(recipe)
    speed = RANKING_FLOPS[_dtype(recipe)]
    machine = Machine(
        products=speed, wide_products=speed, wide_peak=speed, memory=RANKING_BANDWIDTH,
        host=RANKING_BANDWIDTH, links=Links(inside=RANKING_BANDWIDTH, outside=RANKING_BANDWIDTH),
    )  # fmt: skip
    return _known_seconds(totals, recipe, device, basis, machine)


@lru_cache(maxsize=4096)  # levers are planned roughly first, then exactly: most recipes come twice
def _known_seconds(
    totals: Totals, recipe: Recipe, device: Device, basis: Basis, machine: Machine
) -> float:
    """machine: with the user's own measurements, which may change while a process runs."""
    setting = _setting(totals, recipe, device, basis, machine)
    return _seconds(setting, totals, recipe, device)


def _dtype(recipe: Recipe) -> str:
    return {"float32": "fp32", "float16": "fp16"}.get(recipe.compute_dtype, "bf16")


# part of a step -> (stream, what it is)
SPANS = {
    "forward": ("compute", "blocks: products, attention and what lies between"),
    "head": ("compute", "logits and loss, forward and backward"),
    "repeated": ("compute", "what backward computes again"),
    "backward": ("compute", "gradients of inputs and weights"),
    "waiting": ("host", "kernels that the host has not launched yet"),
    "tensor": ("links", "collectives of tp, cp and ep that no product covers"),
    "gathering": ("links", "weights gathered and gradients reduced, beyond what computing covers"),
    "sending": ("links", "activations and their gradients between stages"),
    "bubble": ("pipeline", "no micro-batch to work on"),
    "reducing": ("links", "gradients reduced and weights gathered, beyond what computing covers"),
    "updating": ("compute", "the optimizer's states read and written"),
    "offloading": ("host", "activations to host memory and back, beyond what computing covers"),
    "straggling": ("links", "ranks that wait for the slowest"),
    "fixed": ("host", "what a step takes whatever its size"),
}


def lay_out(parts: Parts, work: Work, recipe: Recipe) -> Timeline:
    """The parts of a step end to end, as one rank's spans."""
    p = recipe.parallel
    share = 1 / (p.tp * p.cp * p.pp)
    flop = {
        "forward": work.forward, "backward": work.backward, "repeated": work.recompute,
    }  # fmt: skip
    spans, start = [], 0.0
    for part, (stream, what) in SPANS.items():
        duration = float(getattr(parts, part))
        if duration <= 0:
            continue
        mine = flop.get(part, 0.0) * share
        because = f"{what}; {mine:.3g} FLOP" if mine else what
        spans.append(
            Span(op=part, stream=stream, start=start, duration=duration, flop=mine, because=because)
        )
        start += duration
    return Timeline(spans=tuple(spans))


def describe_time(totals: Totals, recipe: Recipe, device: Device, timeline: Timeline) -> Time:
    """The figures of the JSON's `time` object.

    MFU: the FLOP that the mathematics needs, causal attention's and no recomputation's, over those
    of all devices' dense peak in the compute dtype (FP8 products count against the 16-bit peak).
    HFU counts recomputation too. Of sampled answers a step is an iteration.
    """
    work, seconds, p = count_work(totals, recipe), timeline.seconds, recipe.parallel
    tokens = recipe.global_batch * recipe.sequence_length
    peak = device.flops.get(_dtype(recipe))
    reached = seconds * peak * p.world / p.dp if seconds and peak else None
    rate = tokens / seconds if seconds else None
    low: float | None = None
    high: float | None = None
    why = ""
    if seconds and recipe.samples:
        setting = find_setting(totals, recipe, device)
        iteration = _iterate(setting, totals, recipe, device)
        phases = describe_phases(iteration, recipe, read_basis(recipe).stack, device.id)
        return describe_iteration(
            phases, recipe, work.model, _because(totals, recipe, device), device.basis
        )
    if seconds:
        few = SCANNED if totals.architecture.recurrent else ""
        low, high, why = find_range(seconds, read_basis(recipe).stack, device.id, few)
    return Time(
        step_seconds=seconds,
        tokens_per_second=rate,
        tokens_per_second_per_device=rate / p.world if rate else None,
        mfu=work.model / reached if reached else None,
        hfu=work.hardware / reached if reached else None,
        model_flops_per_step=work.model * p.dp,
        total_seconds=seconds * recipe.steps if seconds and recipe.steps else None,
        because=_because(totals, recipe, device),
        basis=device.basis if seconds else "",
        step_seconds_low=low,
        step_seconds_high=high,
        range_because=why,
    )


def assume_lengths(totals: Totals, recipe: Recipe, device: Device) -> tuple[str, ...]:
    """What seconds of sampled answers take for granted of lengths, in words."""
    if not recipe.samples or _samples_elsewhere(recipe):
        return ()
    rollout = recipe.rollout
    half = max(1, rollout.max_completion_length // 2)
    shorter = replace(
        recipe, sequence_length=rollout.max_prompt_length + half,
        rollout=replace(rollout, max_completion_length=half),
    )  # fmt: skip
    try:
        seconds = _seconds(find_setting(totals, shorter, device), totals, shorter, device)
    except TimeUnknown:
        return ()
    return (assume_bounds(recipe, half, seconds),)


def _because(totals: Totals, recipe: Recipe, device: Device) -> str:
    if _samples_elsewhere(recipe):
        return f"unknown: how fast answers are sampled by `{recipe.framework}` is not described"
    try:
        setting = find_setting(totals, recipe, device)
    except TimeUnknown as reason:
        return f"unknown: {reason.message}"
    own, basis = describe(setting.machine.own), read_basis(recipe)
    scanned = _tell_scan(setting) if totals.architecture.recurrent else ""
    rest = explain(device, basis.stack, basis.narrow, basis.kernel)
    if own:
        rest = f"{own} by {setting.machine.own.by}; what else there is: {rest}"
    slower = _slower_than_whole(setting, recipe)
    return f"{rest}; the device's speed by {device.basis}{scanned}{slower}"


def _tell_scan(setting: Setting) -> str:
    """Words for linear attention, whose launches decide a step of few and short rows."""
    _, _, chunks = count_chunks(setting.layout)
    found = setting.layout.scan
    each = (found.turn + found.turn_back) / setting.shape.linear
    words = (
        f"; {SCANNED} is torch's code, without kernels of its own: {chunks * each:,.0f} operations"
        f" a block of it and micro-batch for {chunks:g} chunks of {CHUNK} tokens, and in the"
        " backward bytes that grow with the square of a row's length"
    )
    if setting.machine.own.launch:
        return words
    return f"{words}; launches take as long as on the host that memfit measured"


def _slower_than_whole(setting: Setting, recipe: Recipe) -> str:
    """Words for adapters whose step is predicted longer than whole training's of the same shape.

    Adapters spare FLOP and add small kernels: where launching takes longer than computing, the
    kernels decide (measured too: 2507.08833, and Qwen 1.8B's published LoRA steps of 4,096 tokens).
    """
    layout = setting.layout
    if recipe.method != "lora" or layout.numbers.packed:
        return ""
    whole = setting._replace(layout=change(layout, trains=1.0, entered=1.0))
    ratio = float(predict_step(setting).total) / float(predict_step(whole).total)
    if ratio <= 1:
        return ""
    return (
        f"; {layout.beside.adapters * PROJECTIONS:.3g} adapters a block add more small kernels than"
        f" frozen weights spare: the step is predicted {ratio - 1:.1%} slower than training all"
        " weights with the same micro-batch; fewer `lora.targets` make it faster"
    )


def without_training(totals: Totals) -> Totals:
    """The sums of a model whose weights are all frozen beside adapters, from those of its own."""
    return replace(totals, trained=(0,) * len(totals.trained), head_trained=0)
