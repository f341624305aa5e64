"""How long one optimizer step takes: matrix products, bytes moved, launches; closed form, no torch.

FLOP: 2 per parameter and token forward, 2 for the input's gradient, 2 for the weight's (Kaplan et
al. 2001.08361, section 2.1; 6 in all for full training), plus causal attention's 2 x 2 x s x s/2 x
hidden a sequence forward and twice that backward. Of a layer's experts only those count that a
token visits. A frozen weight needs no weight gradient, and a
block before the first trainable parameter no backward at all. Known error: under LoRA the gradient
of the first block's input is counted though nothing needs it (one block's q, k, v).

The shares of a device's peak that a step reaches are assumed, not measured (see ASSUMED): the
ranking of recipes is what they serve; seconds carry the assumption in `because`.
"""

from __future__ import annotations

from math import prod

from memfit.hardware import Device
from memfit.model import Architecture, Model, Weight
from memfit.nouns import Noun
from memfit.recipe import Recipe
from memfit.results import Time
from memfit.timeline import Span, Timeline

# Shares of the dense peak and of the bandwidth, and seconds a kernel's launch takes.
ASSUMED_MATMUL, ASSUMED_ATTENTION, ASSUMED_BANDWIDTH = 0.65, 0.4, 0.75
ASSUMED_LAUNCH = 5e-6
KERNELS_PER_BLOCK = 60  # of one forward of one block, run eagerly
# Where the device's speed is unknown, recipes are still ranked, by rates nobody claims.
RANKING_FLOPS, RANKING_BANDWIDTH = {"fp32": 1e12, "bf16": 1.5e12, "fp16": 1.5e12}, 5e10


class Work(Noun, frozen=True, kw_only=True):
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


class Totals(Noun, frozen=True, kw_only=True):
    """What the time of a step depends on, summed once over a model's weights."""

    architecture: Architecture
    dense: tuple[int, ...]  # elements of each block's matrices
    trained: tuple[int, ...]  # those of them that are trained
    last: tuple[int, ...]  # each block's last product: recomputation stops before it
    head: int
    head_trained: int
    first: int  # the first block that backward has to enter
    weight_bytes: int
    gradient_bytes: int
    trainable: int


def sum_up(model: Model) -> Totals:
    """The totals of a model after its adapter."""
    a = model.architecture
    dense, trained, last = [0] * a.layers, [0] * a.layers, [0] * a.layers
    head = prod((a.vocab, a.head_input)) if a.tied_embeddings else 0
    head_trained = head if a.tied_embeddings and _embedding_trains(model) else 0
    first, weight_bytes, gradient_bytes, trainable = a.layers, 0, 0, 0
    for w in model.weights:
        numel, nbytes = w.numel, w.nbytes
        weight_bytes += nbytes
        if w.trainable:
            gradient_bytes, trainable = gradient_bytes + nbytes, trainable + numel
            first = min(first, {"embedding": 0, "block": w.layer}.get(w.part, first))
        if len(w.shape) < 2 or w.name.endswith("_bias"):  # all experts' biases are one matrix
            continue
        numel = model.active(w)
        if w.part == "head":
            head, head_trained = head + numel, head_trained + numel * w.trainable
        elif w.part == "block":
            dense[w.layer] += numel
            last[w.layer] = numel if _is_only_added(w, a) else 0
            trained[w.layer] += numel * w.trainable
    return Totals(
        architecture=a, dense=tuple(dense), trained=tuple(trained), last=tuple(last), head=head,
        head_trained=head_trained, first=first, weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes, trainable=trainable,
    )  # fmt: skip


def _is_only_added(w: Weight, a: Architecture) -> bool:
    """Whether no derivative needs what a block's last weight makes; shares multiply experts'."""
    sparse = a.experts.count > 0 and w.layer >= a.experts.dense_layers
    return not sparse or ".shared_experts." in w.name


def count_work(totals: Totals, recipe: Recipe) -> Work:
    """FLOP of one optimizer step of this recipe."""
    a, tokens = totals.architecture, recipe.tokens * recipe.accumulation
    widths = a.head_dim + (a.latent.value or a.head_dim)  # of keys, and of values
    attention = 1.0 * recipe.sequence_length * a.heads * widths * tokens  # a block, causal
    dense, trained, first = totals.dense, totals.trained, totals.first
    entered = a.layers - first
    forward = 2 * tokens * (sum(dense) + totals.head) + attention * a.layers
    products = sum(dense[first:]) + sum(trained[first:]) + totals.head + totals.head_trained
    backward = 2 * tokens * products + 2 * attention * entered
    again = slice(min(first, recipe.recompute_blocks), recipe.recompute_blocks)
    repeated = len(dense[again])
    recompute = 2 * tokens * (sum(dense[again]) - sum(totals.last[again])) + attention * repeated
    share = attention * (a.layers + 2 * entered + repeated)
    return Work(forward=forward, backward=backward, recompute=recompute, attention=share)


def _embedding_trains(model: Model) -> bool:
    return any(w.trainable for w in model.weights if w.part == "embedding")


def predict_timeline(totals: Totals, recipe: Recipe, device: Device) -> Timeline:
    """The spans of one optimizer step; empty when the device's speed is unknown."""
    if not device.flops.get(_dtype(recipe)) or not device.bandwidth:
        return Timeline(spans=())
    return _timeline(totals, recipe, device.flops, device.bandwidth)


def relative_seconds(totals: Totals, recipe: Recipe, device: Device) -> float:
    """Seconds for ranking recipes of one device.

    On nominal rates where it states none, and on any CPU: there the rates are measured when a run
    starts, and two starts of one request must choose the same recipe.
    """
    nominal = device.is_cpu or not device.flops.get(_dtype(recipe)) or not device.bandwidth
    flops = RANKING_FLOPS if nominal else device.flops
    bandwidth = RANKING_BANDWIDTH if nominal else device.bandwidth
    timeline = _timeline(totals, recipe, flops, bandwidth or RANKING_BANDWIDTH)
    return timeline.seconds or 0.0


def _feed_forward_width(a: Architecture) -> float:
    """Elements between a token's up and down projections, the mean of all blocks."""
    e = a.experts
    if not e.count:
        return a.ffn
    dense = min(e.dense_layers, a.layers)
    sparse = e.per_token * e.ffn + e.shared_ffn
    return (dense * a.ffn + (a.layers - dense) * sparse) / a.layers


def _dtype(recipe: Recipe) -> str:
    return {"float32": "fp32", "float16": "fp16"}.get(recipe.compute_dtype, "bf16")


def _timeline(
    totals: Totals, recipe: Recipe, flops: dict[str, float], bandwidth: float
) -> Timeline:
    work, a = count_work(totals, recipe), totals.architecture
    rate = flops[_dtype(recipe)]
    attention_share = work.attention / work.hardware
    # time per FLOP of the mix of attention and matrix products
    slowness = (1 - attention_share) / ASSUMED_MATMUL + attention_share / ASSUMED_ATTENTION
    width = 4 if recipe.compute_dtype == "float32" else 2
    moved = recipe.tokens * recipe.accumulation * width
    block = moved * (30 * a.hidden + 12 * _feed_forward_width(a))
    logits = 4.0 * moved * a.vocab
    if recipe.loss == "chunked":  # each chunk reads and adds to the head's gradient again
        chunks = -(-recipe.tokens // recipe.loss_chunk) * recipe.accumulation
        logits += 2.0 * chunks * a.vocab * a.head_input * (4 if recipe.method == "full" else 0)
    # each micro-batch reads the weights anew and adds to the gradients
    weights = float(recipe.accumulation * totals.weight_bytes)
    gradients = recipe.accumulation * 3.0 * totals.gradient_bytes
    launches = recipe.accumulation * KERNELS_PER_BLOCK
    passes = [
        ("forward", work.forward, weights + block * a.layers, launches * a.layers),
        ("loss", 0.0, logits, launches),
        ("recompute", work.recompute, block * recipe.recompute_blocks,
         launches * recipe.recompute_blocks),
        ("backward", work.backward, weights + gradients + 2 * block * a.layers,
         2 * launches * a.layers),
    ]  # fmt: skip
    spans, start = [], 0.0
    for op, flop, nbytes, kernels in passes:
        busy = flop * slowness / rate + nbytes / (bandwidth * ASSUMED_BANDWIDTH)
        duration = max(busy, kernels * ASSUMED_LAUNCH)
        spans.append(_span(op, start, duration, flop, f"{flop:.3g} FLOP, {nbytes:.3g} B moved"))
        start += duration
    trainable = totals.trainable
    state = trainable * (16 if recipe.precision == "bf16" else 28)
    spans.append(
        _span("optimizer_step", start, state / (bandwidth * ASSUMED_BANDWIDTH), 0.0,
              f"{trainable} parameters: weight, gradient and states read and written")
    )  # fmt: skip
    return Timeline(spans=tuple(s for s in spans if s.duration))


def _span(op: str, start: float, duration: float, flop: float, because: str) -> Span:
    return Span(op=op, stream="compute", start=start, duration=duration, flop=flop, because=because)


def describe_time(totals: Totals, recipe: Recipe, device: Device, timeline: Timeline) -> Time:
    """The figures of the JSON's `time` object."""
    work, seconds = count_work(totals, recipe), timeline.seconds
    tokens = recipe.tokens * recipe.accumulation
    peak = device.flops.get(_dtype(recipe))
    known = seconds is not None and peak
    rate = tokens / seconds if seconds else None
    because = (
        f"assumed {ASSUMED_MATMUL:.0%} of the dense peak for matrix products, "
        f"{ASSUMED_BANDWIDTH:.0%} of the bandwidth, by {device.basis}; not yet checked against"
        " measurements"
        if known
        else f"unknown: no {_dtype(recipe)} FLOP/s is known for `{device.id}`"
    )
    return Time(
        step_seconds=seconds,
        tokens_per_second=rate,
        tokens_per_second_per_device=rate,
        mfu=work.model / (seconds * peak) if seconds and peak else None,
        hfu=work.hardware / (seconds * peak) if seconds and peak else None,
        model_flops_per_step=work.model,
        total_seconds=seconds * recipe.steps if seconds and recipe.steps else None,
        because=because,
        basis=device.basis if known else "",
    )
