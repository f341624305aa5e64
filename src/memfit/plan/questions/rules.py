"""The folklore of memory beside exact accounting, for one model.

A rule multiplies the model's nominal size by bytes a parameter; memfit counts the bytes of every
tensor. Where a rule's quantity depends on the batch, only a predicted peak can answer it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from memfit.adapters.shared.quantised_base import is_projection, stores_codes
from memfit.base_formats import find_coding, stored_bytes
from memfit.core import units
from memfit.optimizers import find_optimizer, optimizers
from memfit.records import Record
from memfit.records.model import Model, TensorSpec
from memfit.records.recipe import Optimizer

TWENTY = units.parse_count("20B")  # the size that the rule is usually told for


class Rule(Record, frozen=True, kw_only=True):
    """One rule of thumb, what it says of this model, and what is so."""

    name: str
    says: str  # the rule in its own words
    figure: float  # bytes it gives for this model's nominal size
    exact: float | None  # bytes that memfit counts for the same question; None: needs a batch
    error: float | None  # figure / exact - 1
    depends_on_batch: bool
    because: str  # how `exact` was counted, or why it cannot be
    holds: str  # where the rule holds and how it misleads
    measured: str = ""  # what the corpus of measured runs says of it; empty: nothing


def rules(model: Model, *, predicted_peak: int | None = None) -> tuple[Rule, ...]:
    """Every rule for this model, trained whole in fp32 unless the rule says otherwise.

    `predicted_peak` in bytes, of full AdamW training with a batch of the caller's choice, answers
    the rules that depend on one.
    """
    size = nominal_size(model)
    return (
        *_loading(model, size),
        *_training(model, size, predicted_peak),
        _preference(model, size),
        *_optimizers(model, size),
        _gradients(model, size),
    )


_SIZE_IN_NAME = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?[bm])(?![a-z\d])")


def nominal_size(model: Model) -> float:
    """Parameters as people say them: `llama-2-7b` -> 7e9; the exact count when no name says it."""
    exact = float(model.parameters)
    for text in _SIZE_IN_NAME.findall(model.name.lower()):
        count = units.parse_count(text.upper())
        if abs(count / exact - 1) < 0.35:
            return count
    return exact


def _rule(
    name: str,
    says: str,
    figure: float,
    exact: float | None,
    because: str,
    holds: str,
    depends_on_batch: bool = False,
) -> Rule:
    return Rule(
        name=name,
        says=says,
        figure=figure,
        exact=exact,
        error=None if exact is None else figure / exact - 1,
        depends_on_batch=depends_on_batch,
        because=because,
        holds=holds,
    )


def _loading(model: Model, size: float) -> Iterable[Rule]:
    shown = units.show_count(size)
    count = f"{model.parameters:,} parameters"
    matrices = sum(w.numel for w in model.weights if is_projection(w))
    share = matrices / model.parameters
    share_text = f"{share:.1%} of the parameters are matrices of blocks; the rest stays in 16 bits"
    rows: list[tuple[str, str, float, float, str, str]] = [
        ("load-fp32", "4 bytes a parameter to load in fp32", 4,
         _nbytes(model, "float32"), f"{count} x 4 bytes, tied weights once",
         "exact but for the rounded name; a GB is 0.931 GiB, which is what tools print"),
        ("load-16bit", "2 bytes a parameter in 16 bits", 2,
         _nbytes(model, "bfloat16"), f"{count} x 2 bytes", "as above; bf16 and fp16 alike"),
        ("load-8bit", "1 byte a parameter in 8 bits", 1,
         _quantised_nbytes(model, "int8"), f"int8 with one fp32 scale a row; {share_text}",
         "for large models; a small one is mostly embedding, which stays in 16 bits"),
        ("load-4bit", "half a byte a parameter in 4 bits", 0.5,
         _quantised_nbytes(model, "nf4-double"),
         f"nf4: 4.127 bits with doubly quantised scales; {share_text}",
         "for large models only; embedding, head and norms stay in 16 bits"),
    ]  # fmt: skip
    for name, says, factor, exact, because, holds in rows:
        yield _rule(name, f"{says}: {shown} = {units.show_gb(factor * size)}", factor * size, exact,
                    because, f"{holds} (20B: {units.show_gb(factor * TWENTY)})")  # fmt: skip


def _training(model: Model, size: float, peak: int | None) -> Iterable[Rule]:
    weights = _nbytes(model, "float32")
    states = 2 * weights + _state(model, "adamw")
    left = 24 * size - states
    unknown = "depends on batch, sequence and recompute: `memfit plan` predicts it"
    source = "the predicted peak that was given" if peak is not None else unknown
    shown = units.show_count(size)
    yield _rule(
        "train-states",
        f"16 bytes a parameter before any activation (4 + 4 + 8): {units.show_gb(16 * size)}",
        16 * size,
        states,
        "fp32 weights, gradients, AdamW's two moments and its counters",
        "fp32, and torch's autocast over fp32 weights; ZeRO's 2 + 2 + 12 adds up to the same",
    )
    yield _rule(
        "train-18",
        f"18 bytes a parameter in mixed precision (6 + 4 + 8): {units.show_gb(18 * size)}",
        18 * size,
        states,
        "memfit's bf16-mixed keeps fp32 weights only; 16-bit copies live for one product",
        "where a 16-bit copy of all weights is kept beside the fp32 ones",
    )
    yield _rule(
        "train-24",
        f"4 bytes to load and about 20 extra to train (4 gradients, 8 AdamW, 8 activations and"
        f" temporaries), 24 in all: {shown} = {units.show_gb(24 * size)}",
        24 * size,
        peak,
        f"states are {units.show_gb(states)} exactly; {source}",
        f"fp32 and AdamW, while activations and temporaries take {units.show_gb(max(left, 0))};"
        " they grow with batch and sequence, the rule does not (1B: 24 GB, 7B: 168 GB)",
        depends_on_batch=True,
    )
    yield _rule(
        "train-80",
        f"20 times what loading takes (1B: 80 GB): {shown} = {units.show_gb(80 * size)}",
        80 * size,
        peak,
        f"states are {units.show_gb(states)} exactly; {source}",
        "nowhere: the rule above misread, 4 GB x 20 where 4 + 20 bytes a parameter were meant;"
        " it was printed in course slides before it was corrected to 24 GB",
        depends_on_batch=True,
    )


def _preference(model: Model, size: float) -> Rule:
    return _rule(
        "dpo-two-models",
        f"preference optimisation (DPO) holds two models, policy and reference:"
        f" {units.show_gb(4 * size)} in 16 bits",
        4 * size,
        _nbytes(model, "bfloat16"),
        "one frozen base in 16 bits is both: with its adapters switched off it is the reference;"
        " trained whole, the reference is a number an answer, computed before the first step",
        "in trainers that keep a frozen copy beside full fine-tuning",
    )


def _optimizers(model: Model, size: float) -> Iterable[Rule]:
    copy = "counts a fp32 copy of 16-bit weights in; memfit's trainable weights are that copy"
    rows: list[tuple[str, str, int, int, str, str]] = [
        ("adamw-12", "AdamW keeps 12 bytes a parameter", 12, _state(model, "adamw"),
         "two fp32 moments and a counter a tensor", f"{copy}: 8 without it"),
        ("sgd-8", "SGD with momentum keeps 8 bytes a parameter", 8, _state(model, "sgd"),
         "one fp32 momentum", f"{copy}: 4 without it"),
        ("adam8bit-6", "an 8-bit optimizer keeps 6 bytes a parameter", 6,
         _state(model, "adamw8bit"),
         "torchao: two bytes an element, two fp32 scales a 256, two tables a tensor; tensors under"
         " 4096 elements keep their dtype", f"{copy}: about 2 without it"),
        ("adafactor-4", "Adafactor keeps a little more than 4 bytes a parameter", 4,
         _state(model, "adafactor"),
         "a matrix of n x m keeps n + m numbers, and a vector its squares",
         "with a first moment, which torch's Adafactor has not"),
    ]  # fmt: skip
    for name, says, factor, exact, because, holds in rows:
        words = f"{says}: {units.show_gb(factor * size)}"
        yield _rule(name, words, factor * size, exact, because, holds)


def _gradients(model: Model, size: float) -> Rule:
    return _rule(
        "gradients-8bit",
        f"8-bit gradients take 1 byte a parameter: {units.show_gb(size)}",
        size,
        _nbytes(model, "float32"),
        "gradients have their weights' dtype: 4 bytes a parameter in fp32, 2 in 16 bits",
        "nowhere in the trainers that memfit describes: none accumulates gradients in 8 bits; FP8"
        " training rounds the inputs of products and keeps gradients of weights in 16 or 32 bits."
        " What exists is `optimizer.in_backward: true`, which holds the gradient of one parameter"
        " at a time, and compressed messages between devices (1-bit Adam), which shrink traffic"
        " and not memory",
    )


def _nbytes(model: Model, dtype: str) -> int:
    return sum(TensorSpec(shape=w.shape, dtype=dtype).nbytes for w in model.weights)


def _state(model: Model, name: str) -> int:
    """Bytes of an optimizer's state over all weights in fp32, as its own file declares them."""
    implementation = optimizers.find(name).implementations[0]
    settings = Optimizer(
        name=name, implementation=implementation, learning_rate=1e-3, weight_decay=0.0, beta1=0.9,
        beta2=0.999, eps=1e-8, momentum=0.9, schedule="constant", warmup_steps=0, clip_norm=0.0,
    )  # fmt: skip
    state: Callable[..., tuple[TensorSpec, ...]] = find_optimizer(settings).state
    local = (TensorSpec(shape=w.shape) for w in model.weights)
    return sum(spec.nbytes for one in local for spec in state(one, settings))


def _quantised_nbytes(model: Model, coding: str) -> int:
    """Return bytes as memfit's own step stores them: quantised projections, the rest in 16 bits."""
    base = find_coding(coding)[0].name
    return sum(
        stored_bytes(coding, w.shape) if stores_codes(w, base) else 2 * w.numel
        for w in model.weights
    )
