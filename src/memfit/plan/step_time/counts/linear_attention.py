"""What linear attention of memfit's own step launches, moves and multiplies.

Hugging Face's classes run the gated delta rule over torch (`torch_chunk_gated_delta_rule`): some
operations over a whole row, and a scan in which each chunk of 64 tokens has a turn of its own. The
backward of a turn writes zeros as large as what the scan reads and adds them up, so that a row's
bytes grow with its tokens times its chunks. `scripts/count_operations.py` writes the file from tiny
models, as torch's dispatcher counts: bytes of tensors that operations read and write, of the
module without its products by weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.counts.operations import Way
from memfit.plan.step_time.work import Layout, Shape
from memfit.records import Record, from_data
from memfit.records.model import CHUNK, Linear

FILE = Path(__file__).parents[3] / "catalog" / "linear_attention.json"


class Launches(Record, frozen=True, kw_only=True):
    """Operations that are no views, of one block of linear attention and a micro-batch."""

    forward: int  # beside the turns
    backward: int
    turn: int  # of a chunk, forward
    turn_back: int
    decode: int  # one new token of all rows


class TokenBytes(Record, frozen=True, kw_only=True):
    """Bytes that a token moves, for each element of what it is cut into."""

    key: int  # of the keys of all heads of values
    value: int  # of their values
    query: int  # of the queries as they come, before they are repeated
    head: int  # a head of values
    hidden: int


class ChunkBytes(Record, frozen=True, kw_only=True):
    """The same for each chunk of its row, which the backward alone moves."""

    key: int
    value: int
    head: int


class Moved(Record, frozen=True, kw_only=True):
    """Bytes that one pass moves."""

    token: TokenBytes
    chunk: ChunkBytes
    state: int  # of an element of a state, for each chunk


class LinearCounts(Record, frozen=True, kw_only=True):
    """All of a block, trained whole."""

    launches: Launches
    forward: Moved
    backward: Moved


class Grown(Record, frozen=True, kw_only=True):
    """Bytes of a pass by what they grow with."""

    token: float  # of a token
    chunk: float  # of a token, for each chunk of its row
    state: float  # of a row and chunk


@cache
def read_linear() -> Mapping[str, Mapping[str, LinearCounts]]:
    """Of all families that have such blocks, by how their weights are stored; see `Way`."""
    rows = msgspec.json.decode(FILE.read_bytes())
    return {
        family: {way: from_data(row, LinearCounts, source=str(FILE)) for way, row in ways.items()}
        for family, ways in rows.items()
    }


def list_growth(linear: Linear, hidden: int) -> dict[str, tuple[int, ...]]:
    """Elements that the coefficients of `Moved` belong to, in the order of their fields."""
    heads = linear.value_heads
    key, value = heads * linear.key, heads * linear.value
    return {
        "token": (key, value, linear.key_heads * linear.key, heads, hidden),
        "chunk": (key, value, heads),
        "state": (heads * linear.key * linear.value,),
    }


def grow(moved: Moved, linear: Linear, hidden: int) -> Grown:
    """Bytes of one block's pass."""
    sizes = list_growth(linear, hidden)
    token, chunk = msgspec.structs.astuple(moved.token), msgspec.structs.astuple(moved.chunk)
    return Grown(
        token=sum(n * each for n, each in zip(sizes["token"], token, strict=True)),
        chunk=sum(n * each for n, each in zip(sizes["chunk"], chunk, strict=True)),
        state=sizes["state"][0] * moved.state,
    )


def multiplied(linear: Linear) -> int:
    """FLOP of a token's products within the rule, forward; the backward has twice as many.

    Keys by keys and queries by keys of a chunk, what the state predicts of the values and what the
    queries read of it, the chunk's own part of the result, what is added to the state, and the two
    triangular systems, as if they were whole.
    """
    key, value = linear.key, linear.value
    return 2 * linear.value_heads * (3 * CHUNK * key + 3 * key * value + 2 * CHUNK * value)


def with_linear(layout: Layout, linear: Linear, shape: Shape, family: str, way: Way) -> Layout:
    """The layout with what linear attention adds, of the mean block; `operations` are those of a
    block of attention before."""
    found, share = read_linear()[family][way], shape.linear
    there, back = (grow(m, linear, int(shape.hidden)) for m in (found.forward, found.backward))
    launches = found.launches
    beside = launches.forward + launches.backward
    return change(
        layout, operations=(1 - share) * layout.numbers.operations + share * beside,
        turn=share * launches.turn, turn_back=share * launches.turn_back,
        token_moved=share * there.token, token_back=share * back.token,
        chunk_back=share * back.chunk, state_moved=share * there.state,
        state_back=share * back.state, token_flop=share * multiplied(linear),
    )  # fmt: skip


def count_decoding(family: str, way: Way, attention: float, share: float) -> float:
    """Operations of the mean block in a decoding step; attention: of one without states."""
    if not share:
        return attention
    return (1 - share) * attention + share * read_linear()[family][way].launches.decode
