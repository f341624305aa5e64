"""torch's CUDA out-of-memory message, joined with a prediction.

The words are those of c10/cuda/CUDACachingAllocator.cpp, of torch 1.x and of 2.x.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

from memfit import families
from memfit.catalog import find_device
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import read_bytes
from memfit.records import Record
from memfit.records.model import DTYPE_BYTES
from memfit.records.results import Plan

# no device has 10**13 GiB: more digits than that are none of torch's
SIZE = r"(?<![\d.])(\d{1,13}(?:\.\d{1,6})?) (bytes|KiB|MiB|GiB)"
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# what is said -> patterns, the newest words first
WORDS = {
    "tried": (rf"Tried to allocate {SIZE}",),
    "capacity": (rf"total capacity of {SIZE}", rf"; {SIZE} total capacity"),
    "free": (rf"of which {SIZE} is free", rf"; {SIZE} free"),
    "allocated": (rf"{SIZE} is allocated by PyTorch", rf"; {SIZE} already allocated"),
    "unused": (rf"{SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"; {SIZE} reserved in total",),
    "in_use": (rf"this process has {SIZE} memory in use",),
}
CAPACITY_RANGE = 0.05  # drivers and ECC leave devices of one name that much apart
MOST_LOG = 2**28  # bytes of a log
ROWS_OF = 1024  # tokens that rows are multiples of, where they tell logits from other tensors
NOTICED = 2**27  # bytes that explain something
OUTSIDE = 2 * 2**30  # a context is less
SMALL, LARGE = 2**21, 10 * 2**20  # kSmallBuffer, kMinLargeAlloc
MEDIUM = 20 * 2**20  # kLargeBuffer: of requests from 1 to 10 MiB


class Message(Record, frozen=True, kw_only=True):
    """Bytes as torch rounded them to be read; None where the message does not say."""

    tried: int  # the segment that was asked of the device, not the tensor alone
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None  # in tensors
    reserved: int | None = None  # by torch, in tensors or not
    in_use: int | None = None  # of the device, by this process
    rounding: int = 0  # half of the last digit that `tried` was written with

    @property
    def outside(self) -> int | None:
        """Bytes of the device that torch's allocator did not have: context, other processes."""
        if self.capacity is None or self.free is None or self.reserved is None:
            return None
        return self.capacity - self.free - self.reserved


class Suspect(Record, frozen=True, kw_only=True):
    """A tensor of the predicted step whose size is that of the failed request."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Cause(Record, frozen=True, kw_only=True):
    """Why a step that is predicted to fit may have run out, and what the log has of it in bytes."""

    what: str
    nbytes: int


class Diagnosed(Record, frozen=True, kw_only=True):
    """The message beside the prediction."""

    message: Message
    phase: str  # the first whose predicted peak is the allocated bytes with the request; "" none
    suspects: tuple[Suspect, ...]
    fragmented: bool  # torch held enough bytes that no tensor used
    other_device: bool  # the message's has another capacity than the one that is asked about
    causes: tuple[Cause, ...]  # the largest first


def read_message(path: Path) -> Message:
    """The first such message of a log, `-` of stdin; raises InvalidRequest where there is none."""
    try:
        if str(path) == "-":
            text = sys.stdin.buffer.read().decode(errors="replace")
        else:
            text = read_bytes(path, most=MOST_LOG).decode(errors="replace")
    except OSError as error:
        raise InvalidRequest(f"cannot read stdin: {error.strerror}") from None
    text = " ".join(text.split())
    begins = re.search(WORDS["tried"][0], text)
    if begins is None:
        raise InvalidRequest(
            f"`{path}` holds no CUDA out-of-memory message of torch's",
            hint='it says "Tried to allocate … GiB"',
        )
    text = text[begins.start() : begins.start() + 1500]
    found, rounding = {}, 0
    for name, patterns in WORDS.items():
        for pattern in patterns:
            if match := re.search(pattern, text):
                found[name] = round(float(match[1]) * UNITS[match[2]])
                if name == "tried":
                    digits = len(match[1].partition(".")[2])
                    rounding = round(UNITS[match[2]] / 10**digits / 2) + 1
                break
    unused = found.pop("unused", None)
    if unused is not None and "allocated" in found:
        found["reserved"] = found["allocated"] + unused
    return Message(**found, rounding=rounding)


def diagnose(message: Message, plan: Plan) -> Diagnosed:
    """Which tensor it was, by its size, and in which phase, by what was allocated."""
    suspects = tuple(
        one
        for one in list_tensors(plan)
        if abs(find_segment(one.nbytes) - message.tried) <= message.rounding
    )
    phase = ""
    if message.allocated is not None:
        needed = message.allocated + message.tried
        for name in plan.ledger.phases:
            if plan.ledger.live(name) >= needed:
                phase = name.value
                break
    unused = (message.reserved or 0) - (message.allocated or 0)
    own = find_device(plan.recipe.device).memory
    return Diagnosed(
        message=message,
        phase=phase,
        suspects=suspects,
        fragmented=unused >= message.tried,
        other_device=bool(
            own and message.capacity and abs(message.capacity / own - 1) > CAPACITY_RANGE
        ),
        causes=tuple(sorted(_list_causes(message, plan, own), key=lambda one: -one.nbytes)),
    )


def _list_causes(message: Message, plan: Plan, own: int | None) -> Iterator[Cause]:
    """What the log's numbers have beyond the prediction's; its request alone says nothing."""
    recipe, memory = plan.recipe, plan.memory
    if own and message.capacity and own - message.capacity > own * CAPACITY_RANGE:
        yield Cause(what="the device of the log is smaller", nbytes=own - message.capacity)
    if message.in_use is not None and message.capacity is not None and message.free is not None:
        others = message.capacity - message.free - message.in_use
        if others > NOTICED:
            yield Cause(what="other processes hold memory of the device", nbytes=others)
    elif message.outside is not None and message.outside > OUTSIDE:
        what = "other processes, or a large context, hold memory outside torch's allocator"
        yield Cause(what=what, nbytes=message.outside)
    if message.allocated is None:
        return
    unused = (message.reserved or message.allocated) - message.allocated
    usual = max(0, (memory.peak_reserved or 0) - (memory.peak_allocated or 0))
    if unused > max(usual, NOTICED):
        what = "fragmentation: torch has reserved it, and no tensor uses it"
        yield Cause(what=f"{what} (PYTORCH_ALLOC_CONF=expandable_segments:True)", nbytes=unused)
    more = message.allocated + message.tried - (memory.peak_allocated or 0)
    if more > 0:
        rows = f"{recipe.micro_batch} x {recipe.sequence_length}"
        what = "tensors beyond the predicted peak"
        tokens = _find_tokens(message, plan)
        if tokens:
            what += f": the request is of logits of {tokens:,} tokens, and predicted are {rows}"
        else:
            what += f": rows longer than {rows} tokens, an evaluation, or what the files do not say"
        yield Cause(what=what, nbytes=more)


def _find_tokens(message: Message, plan: Plan) -> int:
    """Tokens whose logits are as large as the request, if more than predicted; 0: none are."""
    recipe = plan.recipe
    vocab = families.read_model(recipe.model).architecture.vocab // recipe.parallel.tp
    planned = recipe.micro_batch * recipe.sequence_length
    for dtype in dict.fromkeys((recipe.compute_dtype, "float32")):
        row = vocab * DTYPE_BYTES[dtype]
        tokens = round(message.tried / row / ROWS_OF) * ROWS_OF
        near = abs(find_segment(tokens * row) - message.tried) <= message.rounding
        if tokens > planned and near:
            return tokens
    return 0


def find_segment(nbytes: int) -> int:
    """What the allocator asks the device for, to serve a tensor (get_allocation_size)."""
    rounded = -(-nbytes // 512) * 512
    if rounded <= 2**20:
        return SMALL
    return MEDIUM if rounded < LARGE else -(-rounded // SMALL) * SMALL


def list_tensors(plan: Plan) -> Iterator[Suspect]:
    """Large tensors of a step: of weights and what is made of them, logits, activations."""
    recipe = plan.recipe
    model = families.read_model(recipe.model)
    a, p = model.architecture, recipe.parallel
    rows, length = recipe.micro_batch, recipe.sequence_length // p.cp
    low = recipe.compute_dtype
    shaped = {
        "logits": (rows, length, a.vocab // p.tp),
        "a feed-forward's activation": (rows, length, a.ffn // p.tp),
        "hidden states": (rows, length, a.hidden),
        "attention's scores": (rows, a.heads // p.tp, length, length),
    }
    dtypes = dict.fromkeys((low, "float32"))
    for what, shape in shaped.items():
        for dtype in dtypes:
            yield _suspect(what, shape, dtype)
    seen = set()
    for weight in model.weights:
        name = re.sub(r"\.\d+\.", ".*.", weight.name)
        if name in seen:
            continue
        seen.add(name)
        for dtype in dtypes:
            yield _suspect(f"{name}: weight, gradient or state", weight.shape, dtype)


def _suspect(what: str, shape: tuple[int, ...], dtype: str) -> Suspect:
    return Suspect(what=what, shape=shape, dtype=dtype, nbytes=prod(shape) * DTYPE_BYTES[dtype])
