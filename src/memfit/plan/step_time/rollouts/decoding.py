"""Seconds of one decoding step: a new token of each row in flight.

A step reads every weight and the keys and values of all rows, renews their states, and multiplies
little: bytes over the memory's bandwidth. Beside it the host launches operations, which are as many
for one row as for a thousand. The longer of the two counts; on a processor, which launches nothing
ahead, their sum.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.base_formats import find_base_format, stored_bytes
from memfit.families.capabilities.kv_cache import layer_caches
from memfit.plan.step_time import work
from memfit.plan.step_time.adapters import PROJECTIONS, WHOLE
from memfit.plan.step_time.arrays import Number, beside
from memfit.plan.step_time.block import around
from memfit.plan.step_time.counts.linear_attention import count_decoding
from memfit.plan.step_time.counts.operations import find_operations
from memfit.plan.step_time.counts.own_counts import count_quantised, stored_width, way_of
from memfit.plan.step_time.rates import Setting
from memfit.records.hardware import Device
from memfit.records.model import DTYPE_BYTES, Architecture
from memfit.records.recipe import Recipe

# Of the bandwidth, what reading weights and keys for few rows reaches: between llama.cpp's 0.97 of
# an RTX 4090 (8B in bf16, one row: 65.2 tokens/s, ggml-org/llama.cpp#15131) and what element-wise
# work reaches in training (`shared.memory`, 0.52).
READING = 0.8
KERNEL = 4e-6  # s that a kernel of a few rows takes on a device at least, however little it reads

# Operations of a step outside the blocks (norm, head, sampling), and what adapters add in one, as
# tests/plan/step_time/test_decode_steps.py counts them in memfit's own loop.
ADAPTER, ADAPTER_CAST = 6, 8  # more beside an adapted projection; the same under autocast
OUTSIDE = 42
# s of Python for each row, while the device waits for the next tokens: bench/rollout_seconds.py
EACH_ROW, EACH_ANSWER = 2e-6, 2e-5  # in a step; once, when it begins

DENSE_CAST = 2 + 2  # bytes of a 16-bit copy of a weight: written, and read by the product
SAMPLING = 44  # bytes that sampling moves for a logit: fp32, logsumexp, exp, cumulated in fp64
# of one score: written, its mask added, softmax in fp32, cast, read (`train/generation/attending`)
SCORE = 2 + 4 + (2 + 4) + (4 + 2) + 2
EXPANDED = 4  # passes over keys and values that latent attention makes from what the cache holds
SQUARE = 1024  # a matrix of so many rows and columns stands for all, of which bytes are asked


class Decoding(NamedTuple):
    """What all steps of a rollout have in common."""

    setting: Setting  # of a micro-batch of one token of each row in flight
    recipe: Recipe
    architecture: Architecture
    projections: float  # matrices of a block
    device: Device
    fused_rows: int  # see `BaseFormat.fused_rows`


class Step(NamedTuple):
    """Seconds of one step by what takes them; device and host run side by side."""

    weights: float  # read; those in codes made dense where no kernel multiplies by them
    products: float  # FLOP, which hide behind the bytes of their weights where rows are few
    cache: float  # keys and values read, scores, and states renewed
    around: float  # what is between products, and sampling
    kernels: float  # the least that so many kernels take
    host: float  # launches
    waiting: float  # for Python, row by row

    @property
    def on_device(self) -> float:
        """Of the device alone."""
        work = float(beside(self.weights, self.products)) + self.cache + self.around
        return work + self.kernels


def step_seconds(step: Step, device: Device) -> float:
    """Of one step; a processor launches nothing ahead, so that its seconds add up."""
    if device.is_cpu:
        return step.on_device - step.kernels + step.host + step.waiting
    return float(beside(step.on_device, step.host)) + step.waiting


def time_step(decoding: Decoding, columns: int) -> Step:
    """One step of all rows in flight whose attention reaches `columns` tokens."""
    setting = decoding.setting
    shape, layout, machine, rates = setting
    reading, bandwidth = machine.memory * READING, machine.memory * rates.elementwise.memory
    rows, blocks = layout.rows.micro_batch, shape.layers
    operations = blocks * count_operations(decoding) + OUTSIDE
    plain, routed = work.plain_weights(shape), work.expert_weights(shape)
    share = shape.per_token / max(shape.experts, 1.0)
    visited = 1 - (1 - share) ** rows  # of the experts, those that any row visits
    head = shape.vocab * shape.hidden
    read = blocks * (plain * weight_bytes(decoding) + routed * expert_bytes(decoding, visited))
    read += head * plain_bytes(decoding.recipe)
    flop = 2 * rows * (blocks * (plain + share * routed) + head)
    cached, expanded = _read_cache(decoding, columns)
    extra = around(setting)
    between = extra.elementwise + extra.adapters + extra.norms + extra.coding
    return Step(
        weights=read / reading,
        products=(flop + expanded) / (machine.products * rates.compute.products),
        cache=cached / reading,
        around=blocks * between + SAMPLING * rows * shape.vocab / bandwidth,
        kernels=operations * KERNEL,
        host=operations * (machine.own.launch or rates.host.launch / WHOLE)
        + blocks * (1 - shape.plain) * rates.host.expert_launch / 3,
        waiting=EACH_ROW * rows,
    )


def count_operations(decoding: Decoding) -> float:
    """Launches of one block in one step."""
    recipe, layout = decoding.recipe, decoding.setting.layout
    family = decoding.architecture.family
    way, share = way_of(recipe), float(decoding.setting.shape.linear)
    count = count_decoding(family, way, find_operations(family, way).decode, share)
    if recipe.adapted:
        each = ADAPTER_CAST if recipe.autocast else ADAPTER
        count += each * layout.beside.adapters * PROJECTIONS
    if recipe.coding:
        count += decoding.projections * count_quantised(recipe, fused=is_fused(decoding))
    return count


def is_fused(decoding: Decoding) -> bool:
    """Whether a kernel multiplies so few rows by the codes of every matrix of a block."""
    return bool(decoding.setting.layout.rows.micro_batch <= decoding.fused_rows)


def weight_bytes(decoding: Decoding) -> float:
    """Bytes that one step moves for an element of a block's weights."""
    recipe = decoding.recipe
    if not recipe.coding:
        return plain_bytes(recipe)
    held = _quantised_bytes(recipe)
    if find_base_format(recipe.base_format).product == "int8" or is_fused(decoding):
        return held
    return held + 2 * DTYPE_BYTES[recipe.compute_dtype]


def expert_bytes(decoding: Decoding, visited: Number) -> Number:
    """The same of all experts; visited: their share that any row visits.

    No kernel multiplies by the codes of experts: all become dense, and the visited ones are read.
    """
    recipe = decoding.recipe
    if not recipe.coding:
        return visited * weight_bytes(decoding)
    dense = DTYPE_BYTES[recipe.compute_dtype]
    return _quantised_bytes(recipe) + dense + visited * dense


def _quantised_bytes(recipe: Recipe) -> float:
    return stored_bytes(recipe.coding, (SQUARE, SQUARE)) / SQUARE**2


def plain_bytes(recipe: Recipe) -> float:
    """The same of a weight stored as numbers: autocast copies fp32 ones for each product."""
    stored = stored_width(recipe)
    return stored + (DENSE_CAST if recipe.autocast and stored == 4 else 0)


def _read_cache(decoding: Decoding, columns: int) -> tuple[float, float]:
    """Bytes of keys, values, scores and states that all blocks move, and FLOP of what they
    expand."""
    shape, layout = decoding.setting.shape, decoding.setting.layout
    rows, element = layout.rows.micro_batch, layout.numbers.element
    layers = layer_caches(decoding.architecture)
    held = sum(c.heads * (c.key + c.value) * c.columns(columns) for c in layers)
    reached = sum(c.columns(columns) for c in layers if not c.states)
    read = rows * (element * held + SCORE * shape.heads * reached + _move_states(decoding))
    if not shape.kv_rank:
        return read, 0.0
    width = shape.heads * (shape.key - shape.rotated + shape.value)
    made = rows * reached * width
    return read + EXPANDED * element * made, 2 * made * shape.kv_rank


def _move_states(decoding: Decoding) -> int:
    """Bytes of a row's states that one step moves, as torch's operations read and write them."""
    dtype = decoding.recipe.compute_dtype
    states = [state for layer in layer_caches(decoding.architecture) for state in layer.states]
    return sum(state.passes * state.nbytes(dtype) for state in states)
