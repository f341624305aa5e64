"""In which order each rank of a pipeline does its work: GPipe, 1F1B, interleaved, zero-bubble.

A stage is a piece of the model, counted in the model's order; a rank holds `chunks` of them. An
order has no seconds, so that one order serves all questions about a schedule.

`zb-h1` of several chunks is torch's InterleavedZeroBubble.

Sources: GPipe 1811.06965; 1F1B and interleaved 2104.04473 and Megatron-LM's
megatron/core/pipeline_parallel/schedules.py; breadth-first 2211.05953; ZB-H1 and ZB-V 2401.10241.
torch.distributed.pipelining's orders are the same (tests/plan/step_time/test_orders.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import find_framework
from memfit.records import Record
from memfit.records.recipe import Recipe

Kind = Literal["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v"]
Pass = Literal["F", "B", "I", "W"]
ONE_CHUNK = ("gpipe", "1f1b")


class Schedule(Record, frozen=True, kw_only=True):
    """One pipeline's schedule for the micro-batches of a step.

    `group` is how many micro-batches of a chunk an interleaved rank runs before its next chunk
    (Megatron-LM's microbatch_group_size_per_virtual_pipeline_stage); 0 is as many as ranks.
    """

    kind: Kind
    ranks: int
    micro_batches: int
    chunks: int = 1
    group: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidRequest where no rank could follow it."""
        if min(self.ranks, self.micro_batches, self.chunks) < 1:
            raise InvalidRequest(
                f"a pipeline of {self.ranks} ranks with {self.chunks} chunks each and"
                f" {self.micro_batches} micro-batches",
                hint="each is at least 1",
            )
        if self.chunks != 1 and self.kind in ONE_CHUNK:
            raise InvalidRequest(
                f"`{self.kind}` holds one chunk a rank, not {self.chunks}",
                hint="`interleaved`, `breadth-first`, `zb-h1` and `zb-v` hold several",
            )
        if self.chunks != 2 and self.kind == "zb-v":
            raise InvalidRequest(f"`zb-v` holds two chunks a rank, not {self.chunks}")
        if self.kind in ("interleaved", "zb-h1") and self.chunks > 1:
            self._check_laps()

    def _check_laps(self) -> None:
        """As Megatron-LM does: in a lap shorter than the ranks, some would wait for each other."""
        last = self.micro_batches % self.lap
        if self.lap < self.ranks or 0 < last < self.ranks:
            raise InvalidRequest(
                f"{self.micro_batches} micro-batches in groups of {self.lap} leave a group of"
                f" {min(self.lap, last or self.lap)}, fewer than the {self.ranks} ranks",
                hint=f"a multiple of {self.ranks} micro-batches, in groups of {self.ranks}",
            )

    @property
    def stages(self) -> int:
        """Pieces of the model."""
        return self.ranks * self.chunks

    @property
    def lap(self) -> int:
        """Micro-batches of a chunk that run one after the other."""
        return self.group or self.ranks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that is a rank's chunk: ranks in turn, or in a V (zb-v)."""
        back = self.kind == "zb-v" and chunk % 2
        return chunk * self.ranks + (self.ranks - 1 - rank if back else rank)

    def rank(self, stage: int) -> int:
        """Who holds a stage."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.kind == "zb-v" and chunk % 2 else place


class Piece(NamedTuple):
    """One pass of one micro-batch through one stage.

    F: forward. B: the whole backward. I: backward of the inputs only. W: of the weights only.
    """

    pass_: Pass
    stage: int
    micro_batch: int


Order = tuple[Piece, ...]


TORCHS: dict[str, Kind] = {  # torch.distributed.pipelining's names
    "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "GPipe": "gpipe",
    "ZBVZeroBubble": "zb-v", "InterleavedZeroBubble": "zb-h1", "LoopedBFS": "breadth-first",
}  # fmt: skip


def kind_of(options: Mapping[str, object]) -> Kind:
    """The kind of schedule that a recipe's options state, of one chunk a rank."""
    if options.get("pipeline") == "afab":
        return "gpipe"
    return TORCHS[str(options.get("pipeline_schedule") or "1F1B")]


def find_schedule(recipe: Recipe) -> Schedule:
    """The schedule of a recipe's pipeline, as its framework orders it.

    Megatron-LM, Megatron-DeepSpeed, nanotron: 1F1B, interleaved where a rank holds several chunks,
    all forwards first where nanotron's `pipeline` is `afab`; torchtitan: `pipeline_schedule`, in
    torch's rounds, which memfit's own step has too. Raises InvalidRequest where no rank could
    follow it.
    """
    p, option, micro_batches = recipe.parallel, recipe.options.get, recipe.accumulation
    group = int(option("microbatch_group_size_per_vp_stage") or 0)
    kind = kind_of(recipe.options)
    if kind == "1f1b" and p.virtual_pp > 1:
        kind = "interleaved"
    if p.virtual_pp > 1 and find_framework(recipe.framework).time.torch_schedules:
        group = micro_batches // max(1, micro_batches // p.pp)
    return Schedule(
        kind=kind, ranks=p.pp, micro_batches=micro_batches, chunks=p.virtual_pp, group=group
    )


@lru_cache(maxsize=256)
def orders(schedule: Schedule) -> tuple[Order, ...]:
    """What each rank runs, one piece after the other."""
    build = {
        "gpipe": _all_forward_first,
        "breadth-first": _all_forward_first,
        "1f1b": _alternating,
        "interleaved": _alternating,
        "zb-h1": _alternating,
        "zb-v": _there_and_back,
    }[schedule.kind]
    return tuple(build(schedule, rank) for rank in range(schedule.ranks))


def count_warm_up(schedule: Schedule, rank: int) -> int:
    """Forwards of a rank before it takes turns with backwards (1f1b, interleaved, zb-h1)."""
    hops = schedule.ranks - 1 - rank
    if schedule.kind == "interleaved" and schedule.chunks > 1:
        hops *= 2
    ahead = hops + (schedule.chunks - 1) * schedule.lap
    return min(ahead, schedule.micro_batches * schedule.chunks)


def count_held(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Of each chunk of a rank, the most micro-batches whose activations are there at one time.

    From the forward's start to the end of the backward of the weights. The chunks' figures are of
    the one moment when the rank holds the most in all (the first such).
    """
    held = [0] * schedule.chunks
    best = tuple(held)
    for piece in orders(schedule)[rank]:
        if piece.pass_ == "F":
            held[piece.stage // schedule.ranks] += 1
            best = max(best, tuple(held), key=sum)
        elif piece.pass_ != "I":
            held[piece.stage // schedule.ranks] -= 1
    return best


def _laps(schedule: Schedule) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of each forward of an interleaved rank; the last lap may be short."""
    every = range(schedule.micro_batches)
    starts = every[:: schedule.lap]
    return [
        (chunk, m)
        for start in starts
        for chunk in range(schedule.chunks)
        for m in every[start : start + schedule.lap]
    ]


def _all_forward_first(schedule: Schedule, rank: int) -> Order:
    chunks, every = range(schedule.chunks), range(schedule.micro_batches)
    # micro-batches alike: breadth-first lets the last one back first, GPipe the first
    back: Sequence[int] = every if schedule.kind == "gpipe" else every[::-1]
    forward = [Piece("F", schedule.stage(rank, c), m) for c in chunks for m in every]
    return (*forward, *(Piece("B", schedule.stage(rank, c), m) for c in chunks[::-1] for m in back))


def _alternating(schedule: Schedule, rank: int) -> Order:
    """Forwards of the warm-up, then one forward and one backward in turn, then backwards."""
    laps, last = _laps(schedule), schedule.chunks - 1
    forward = [Piece("F", schedule.stage(rank, c), m) for c, m in laps]
    split = schedule.kind == "zb-h1"
    first: Pass = "I" if split else "B"
    backward = [Piece(first, schedule.stage(rank, last - c), m) for c, m in laps]
    warm_up = count_warm_up(schedule, rank)
    # zb-h1: the weights' backward lags as many pieces as there are ranks before this one, and so
    # fills what would be the cool-down's bubble
    lag = rank if split else len(laps)
    order = forward[:warm_up]
    for turn, piece in enumerate(backward):
        order += [*forward[warm_up + turn : warm_up + turn + 1], piece]
        if turn >= lag:
            order.append(backward[turn - lag]._replace(pass_="W"))
    if split:
        order += [piece._replace(pass_="W") for piece in backward[max(0, len(backward) - lag) :]]
    return tuple(order)


def _there_and_back(schedule: Schedule, rank: int) -> Order:
    """ZB-V: chunk 0 on the way there, chunk 1 on the way back (2401.10241 section 6).

    Written for at least 2 x ranks - 1 micro-batches; where there are fewer, the others' pieces are
    left out.
    """
    ranks = schedule.ranks
    enough = max(2 * ranks - 1, schedule.micro_batches)
    forward: tuple[Pass, ...] = ("F",)
    back: tuple[Pass, ...] = ("I", "W")
    done = {(p, c): 0 for p in forward + back for c in (0, 1)}
    order: list[Piece] = []

    def run(passes: Sequence[Pass], chunk: int) -> None:
        for name in passes:
            order.append(Piece(name, schedule.stage(rank, chunk), done[name, chunk]))
            done[name, chunk] += 1

    for _ in range(2 * (ranks - rank) - 1):
        run(forward, 0)
    for _ in range(rank):
        run(forward, 1)
        run(forward, 0)
    for _ in range(ranks - rank):
        run(forward + back, 1)
    while done["F", 1] < enough:
        run(forward + back if done["F", 0] < enough else back, 0)
        run(forward + back, 1)
    for _ in range(rank):
        run(back[:1], 0)
        run(back[:1], 1)
    for _ in range(ranks - rank):
        run(back, 0)
    for chunk in (1, 0):
        run(back[1:] * (done["I", chunk] - done["W", chunk]), chunk)
    return tuple(piece for piece in order if piece.micro_batch < schedule.micro_batches)
