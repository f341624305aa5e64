"""The most of one thing that a request allows: the longest sequence, the largest batch, …

Every value tried is planned in full; where more of a thing never needs less memory the limit is
found by halving, else all are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from memfit import catalog, families
from memfit.catalog import CatalogModel
from memfit.core.errors import Error, InvalidRequest, did_you_mean
from memfit.core.notebook import draw_tables
from memfit.core.units import show_bytes
from memfit.objectives import find_objective
from memfit.plan.questions.compare import place
from memfit.plan.request.meshes import divisors
from memfit.plan.request.model_reference import find_reference
from memfit.plan.request.objectives.sampled import choose_rollout, samples
from memfit.plan.request.problem import find_device
from memfit.plan.search.candidates import node_size
from memfit.records import Record
from memfit.records.request import Hardware, Request, Task
from memfit.records.results import Plan, Verdict
from memfit.records.tables import Rows, Tabled

GRAIN = 128  # tokens by which a sequence grows
MOST_ROWS = 4096  # sequences of a micro-batch
MOST_GENERATIONS = 1024  # answers to each prompt
MOST_NODES = 2048  # tried for the fewest devices
FIELDS = {
    "sequence_length": "the longest sequence, up to what the model was made for",
    "micro_batch": "the most sequences at once",
    "max_completion_length": "the longest answers, within the positions of the model",
    "num_generations": "the most answers to each prompt",
    "model": "the largest model of the catalogue",
    "devices": "the fewest devices",
}
# of one model and one offer: their least value is close
OF_ONE_MODEL = ("sequence_length", "micro_batch", "max_completion_length", "num_generations")


class Tried(Record, frozen=True, kw_only=True):
    """One value and its plan."""

    value: int | str
    verdict: Verdict | str  # `refused` where there is no plan
    needs: int | None  # bytes
    step_seconds: float | None
    because: str


class Solved(Tabled, frozen=True, kw_only=True):
    """The answer, its plan, and everything tried."""

    schema: int = 1
    field: str
    value: int | str | None  # None: nothing fits
    plan: Plan | None
    tried: tuple[Tried, ...]
    because: str
    # nothing fits: the plan of the least value, whose `ways_out` say what would; of a sequence
    # or a micro-batch
    least: Plan | None = None

    def __repr__(self) -> str:
        """The answer in one line."""
        return f"<Solved {self.field} = {self.value}: {self.because}>"

    def tables(self) -> Mapping[str, Rows]:
        """See `Tabled`."""
        return {"tried": self.tried}

    def _repr_html_(self) -> str:
        """What a notebook shows: everything tried, and the plan of the answer."""
        rows = [
            (str(one.value), one.verdict, "" if one.needs is None else show_bytes(one.needs))
            for one in self.tried
        ]
        heading = f"{self.field} = {self.value}: {self.because}"
        return draw_tables(((heading, rows),)) + (self.plan._repr_html_() if self.plan else "")


class Try(NamedTuple):
    """A value's plan, or why there is none."""

    value: int | str
    plan: Plan | None
    refused: str
    hint: str = ""  # of what refused it

    @property
    def fits(self) -> bool:
        """Whether it fits for certain."""
        return self.plan is not None and self.plan.memory.verdict == "fits"

    @property
    def tried(self) -> Tried:
        """The sentence that the screen shows."""
        if self.plan is None:
            return Tried(
                value=self.value, verdict="refused", needs=None, step_seconds=None,
                because=self.refused,
            )  # fmt: skip
        memory = self.plan.memory
        return Tried(
            value=self.value,
            verdict=memory.verdict,
            needs=memory.needed,
            step_seconds=self.plan.time.step_seconds,
            because=self.plan.label,
        )


Planner = Callable[[Request], Plan]


def check_field(field: str) -> None:
    """Raise InvalidRequest for a field that nobody solves for."""
    if field not in FIELDS:
        near = did_you_mean(field, FIELDS)
        raise InvalidRequest(
            f"memfit does not solve for `{field}`",
            hint=f"did you mean {near}?" if near else f"one of {', '.join(FIELDS)}",
        )


def solve(
    field: str,
    request: Request,
    find_plan: Planner,
    plan_exactly: Planner,
    plan_with_ways_out: Planner,
) -> Solved:
    """The most of a field that fits.

    find_plan: of each value tried; its verdict is what counts. plan_exactly: of the one found.
    plan_with_ways_out: of the least value, where nothing fits.
    Raises InvalidRequest: a field that nobody solves for, or one that the request states.
    """
    check_field(field)
    tries = Tries(request, field, find_plan)
    found = _SOLVERS[field](tries)
    tried = sorted(tries.made.values(), key=lambda t: str(t.value).zfill(9))
    if all(t.plan is None for t in tried):  # then it is not for want of memory
        raise InvalidRequest(
            f"no value of `{field}` has a plan: {tried[0].refused}", hint=tried[0].hint
        )
    because = f"{FIELDS[field]}; {len(tried)} planned" if found else "nothing that was tried fits"
    least = None
    if found is None and field in OF_ONE_MODEL:
        least = plan_with_ways_out(next(iter(tries.requests.values())))
    return Solved(
        field=field,
        value=found.value if found else None,
        plan=plan_exactly(tries.requests[found.value]) if found else None,
        tried=tuple(t.tried for t in tried),
        because=because,
        least=least,
    )


class Tries:
    """Plans of a request with one field changed, each made once."""

    def __init__(self, request: Request, field: str, find_plan: Planner) -> None:
        self.request, self.field, self._find = request, field, find_plan
        self.made: dict[int | str, Try] = {}
        self.requests: dict[int | str, Request] = {}

    def __call__(self, value: int | str, request: Request) -> Try:
        """The plan of the request, which says this value."""
        if value not in self.made:
            self.requests[value] = request
            try:
                self.made[value] = Try(value, self._find(request), "")
            except Error as error:
                self.made[value] = Try(value, None, error.message, error.hint)
        return self.made[value]


def _halve(values: Sequence[Any], attempt: Callable[[Any], Try]) -> Try | None:
    """The last of ascending values that fits, where none fits after one that does not."""
    if not values or not (best := attempt(values[0])).fits:
        return None
    low, high = 0, len(values)  # what is at `low` fits; what is at `high` does not, or is no value
    step = 1
    while low + step < len(values):  # far values are the dear ones: walk up before halving
        if not (found := attempt(values[low + step])).fits:
            high = low + step
            break
        low, best, step = low + step, found, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if (found := attempt(values[middle])).fits:
            low, best = middle, found
        else:
            high = middle
    return best


def _sequence(tries: Tries) -> Try | None:
    request = tries.request
    if samples(request):
        raise InvalidRequest(
            f"`sequence_length` under `objective: {request.task.objective}`, whose rows are a"
            " prompt and its answer",
            hint="solve for `max_completion_length`",
        )
    if request.task.sequence_length != "auto":
        raise InvalidRequest(
            f"`task.sequence_length: {request.task.sequence_length}` is stated already",
            hint="leave it on `auto` to solve for it",
        )
    longest = families.read_model(find_reference(request.model)).architecture.max_sequence
    values = [*range(GRAIN, longest, GRAIN), longest]

    def attempt(length: int) -> Try:
        task = structs.replace(request.task, sequence_length=length)
        return tries(length, structs.replace(request, task=task))

    return _halve(values, attempt)


def _rows(tries: Tries) -> Try | None:
    request = tries.request
    if request.micro_batch != "auto":
        raise InvalidRequest(
            f"`micro_batch: {request.micro_batch}` is stated already",
            hint="leave it on `auto` to solve for it",
        )

    def attempt(rows: int) -> Try:
        """One micro-batch a step and rank, so that the global batch follows."""
        ranks = request.devices if request.parallel == "auto" else request.parallel.dp
        task: Task = structs.replace(request.task, global_batch=rows * ranks)
        return tries(rows, structs.replace(request, task=task, micro_batch=rows))

    if samples(request):  # a rollout's answers are as many throughout

        def cut(rows: int) -> Try:
            return tries(rows, structs.replace(request, micro_batch=rows))

        return _halve(divisors(request.global_batch), cut)
    least = find_objective(request.task.objective).least_rows  # whole pairs
    return _halve(range(least, MOST_ROWS + 1, least), attempt)


def _completions(tries: Tries) -> Try | None:
    """Prompts are as long as the request says, or as memfit takes them."""
    request = tries.request
    _check_sampled(request, "max_completion_length")
    longest = families.read_model(find_reference(request.model)).architecture.max_sequence
    rest = longest - choose_rollout(request).max_prompt_length
    values = [*range(GRAIN, rest, GRAIN), rest]

    def attempt(length: int) -> Try:
        rollout = structs.replace(request.rollout, max_completion_length=length)
        return tries(length, structs.replace(request, rollout=rollout))

    return _halve([value for value in values if value > 0], attempt)


def _generations(tries: Tries) -> Try | None:
    """A rollout has as many prompts throughout, so that the global batch follows."""
    request = tries.request
    _check_sampled(request, "num_generations")
    if request.rollout.num_generations != "auto":
        raise InvalidRequest(
            f"`rollout.num_generations: {request.rollout.num_generations}` is stated already",
            hint="leave it on `auto` to solve for it",
        )
    prompts = max(1, request.global_batch // request.generations)

    def attempt(answers: int) -> Try:
        rollout = structs.replace(request.rollout, num_generations=answers)
        task: Task = structs.replace(request.task, global_batch=prompts * answers)
        return tries(answers, structs.replace(request, task=task, rollout=rollout))

    return _halve(range(2, MOST_GENERATIONS + 1), attempt)


def _check_sampled(request: Request, field: str) -> None:
    """Raise InvalidRequest for what only sampled answers have."""
    if not samples(request):
        raise InvalidRequest(
            f"`objective: {request.task.objective}` samples no answers, so that it has no"
            f" `rollout.{field}`",
            hint="use `task.objective: grpo`, `rloo` or `ppo`, or solve for `sequence_length`",
        )


def _model(tries: Tries) -> Try | None:
    """All models of the catalogue, the largest first, until one fits: sizes alone do not decide."""
    request = tries.request

    def size(model: CatalogModel) -> int:
        return model.parameters

    known = [m for m in catalog.models() if m.model_type in families.families]
    for model in sorted(known, key=size, reverse=True):
        found = tries(model.id, structs.replace(request, model=model.id))
        if found.fits:
            return found
    return None


def _devices(tries: Tries) -> Try | None:
    """1, 2, 4, … of a node, then nodes: the first number that fits."""
    request = tries.request
    device = find_device(request.hardware.device)
    node = node_size(device)
    counts = [2**i for i in range(node.bit_length()) if 2**i <= node]
    nodes = 2
    while nodes <= MOST_NODES:
        counts.append(node * nodes)
        nodes *= 2
    for count in counts:
        hardware: Hardware = place(device, count)
        found = tries(count, structs.replace(request, hardware=hardware))
        if found.fits:
            return found
    return None


_SOLVERS: dict[str, Callable[[Tries], Try | None]] = {
    "sequence_length": _sequence, "micro_batch": _rows, "model": _model, "devices": _devices,
    "max_completion_length": _completions, "num_generations": _generations,
}  # fmt: skip
