"""All configurations that a request leaves open, as columns: numpy arrays, an element a candidate.

What the request states is fixed. Left on `auto`, the knobs that change memory and time alone span
all their values: the mesh, the micro-batch, recomputing, kernels. Those that change what is learned
(precision, method, format, optimizer) keep the framework's default, as everywhere in memfit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from msgspec import structs

from memfit.core.errors import InvalidRequest
from memfit.objectives import find_objective
from memfit.plan.frameworks import Framework, Job, Rule, Split, divide, find_framework
from memfit.plan.frameworks.shared.columns import pick, with_columns
from memfit.plan.request.defaults import read_defaults, read_parallel
from memfit.plan.request.meshes import LEAST_SHARE, divisors
from memfit.plan.request.problem import find_device
from memfit.plan.search.tables import (
    Columns,
    Removed,
    cross,
    cross_each,
    find_right,
    keep,
    length,
    note,
    refuse,
    take_rows,
)
from memfit.records.hardware import Device
from memfit.records.model import Model
from memfit.records.recipe import Option, Parallel, Recipe
from memfit.records.request import Hardware, Request

WORDS = ("recompute", "attention", "compile", "implementation")  # knobs that span their values
NODE = 8  # devices of a node, where neither the request nor the catalogue says
EXPERTS = "num_experts"  # an option that puts experts into a dense model
LONGEST, TAIL = "longest", "tail"  # of a split: columns of a table, and no knobs
SLICE = 2**17  # candidates at a time


class Limits(NamedTuple):
    """What no candidate may exceed."""

    devices: int
    node: int  # devices of a node
    global_batch: int
    open_mesh: bool  # the mesh is memfit's to choose, so that it should be a sensible one


class Part(NamedTuple):
    """The candidates that agree in everything that is no number."""

    recipe: Recipe  # what they share; of what is a column, the plainest value
    table: Columns  # all columns but the recomputed blocks, where those are open
    choices: Any  # numbers of recomputed blocks that each row has; None where there is no choice
    falling: Any  # of them, those in which no choice needs more memory than the one before it
    some: bool  # whether they are 0, 1, 2, … blocks of a chunk, or none and all

    @property
    def size(self) -> int:
        """How many candidates there are."""
        return int(self.choices.sum()) if self.choices is not None else length(self.table)

    def slices(self, rows: int = SLICE) -> Iterator[Recipe]:
        """All of them in order, about `size` at a time: recipes whose numbers are arrays."""
        return (with_columns(self.recipe, table) for table in self.tables(rows))

    def tables(self, rows: int) -> Iterator[Columns]:
        """The columns of `slices`."""
        import numpy

        if self.choices is None:
            for start in range(0, self.size, rows):
                yield take_rows(self.table, slice(start, start + rows))
            return
        ends = numpy.cumsum(self.choices)
        start = 0
        while start < len(ends):
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(numpy.searchsorted(ends, before + rows, side="right")))
            yield self._chosen(start, stop)
            start = stop

    def _chosen(self, start: int, stop: int) -> Columns:
        """Those rows of the table, each with every number of recomputed blocks."""
        import numpy

        each = self.choices[start:stop]
        of = numpy.repeat(numpy.arange(start, stop), each)
        own = take_rows(self.table, of)
        order = numpy.arange(len(of)) - numpy.repeat(numpy.cumsum(each) - each, each)
        return {**own, "recompute_blocks": order * self._step}

    @property
    def _step(self) -> int:
        return 1 if self.some else self.recipe.recompute_blocks

    def choose(self, rows: Any, choices: Any) -> Recipe:
        """Those rows of the table, each with one of its choices."""
        columns = {**take_rows(self.table, rows), "recompute_blocks": choices * self._step}
        return with_columns(self.recipe, columns)

    def only(self, rows: Any) -> Part:
        """The same with those rows of the table."""
        table = take_rows(self.table, rows)
        if self.choices is None:
            return self._replace(table=table)
        return self._replace(table=table, choices=self.choices[rows], falling=self.falling[rows])

    def pieces(self, rows: int = SLICE) -> Iterator[Part]:
        """The table in parts of `rows` rows."""
        for start in range(0, length(self.table), rows):
            yield self.only(slice(start, start + rows))

    def choose_none(self) -> Recipe:
        """Every row with the least of its choices: none of its blocks are recomputed."""
        if self.choices is None:
            return with_columns(self.recipe, self.table)
        return with_columns(self.recipe, {**self.table, "recompute_blocks": 0 * self.choices})

    def recipe_of(self, row: int) -> Recipe:
        """One of them, by its place among `slices`."""
        if self.choices is None:
            return pick(with_columns(self.recipe, self.table), row)
        ends = self.choices.cumsum()
        at = int((ends > row).argmax())
        inside = row - int(ends[at] - self.choices[at])
        return pick(with_columns(self.recipe, self._chosen(at, at + 1)), inside)


class Space(NamedTuple):
    """The candidates of a request, and what is not among them."""

    framework: Framework
    model: Model
    device: Device
    limits: Limits
    parts: tuple[Part, ...]
    removed: tuple[Removed, ...]

    @property
    def size(self) -> int:
        """Candidates of all parts."""
        return sum(part.size for part in self.parts)

    def job(self, recipes: Recipe) -> Job:
        """A slice of candidates, as the framework's `measure` takes it."""
        return Job(model=self.model, recipe=recipes, device=self.device)


def span(request: Request, device: Device | None = None, *, predicts: bool = True) -> Space:
    """The candidates of a request for a step whose bytes are a closed form.

    device: None looks it up. predicts: False leaves in what only its own prediction refuses, where
    candidates are predicted one by one. Raises InvalidRequest: what the request states excludes
    every candidate; the error is the sentence of the rule that removed the last of them.
    """
    framework = find_framework(request.framework)
    device = device or find_device(request.hardware.device)
    if device.is_cpu:
        raise InvalidRequest(
            f"`framework: {framework.name}` is described on GPUs, and `hardware.device:"
            f" {request.hardware.device}` is a CPU",
            hint="name a GPU with `--device`, or use `framework: memfit`",
        )
    recipes = [_base(requested, framework, device) for requested in _variants(request, framework)]
    model = read_defaults(_alone(request), device)[1]
    job, node = Job(model=model, recipe=recipes[0], device=device), _node(request, device)
    limits = Limits(request.devices, node, request.global_batch, request.parallel == "auto")
    removed: dict[str, Removed] = {}
    table = _meshes(request, framework, job, limits, removed)
    table = _batches(request, job, table, limits, removed)
    parts: list[Part] = []
    known: list[tuple[Any, Columns]] = []  # equal tables are one
    for recipe in recipes:
        many = _job(structs.replace(job, recipe=recipe), table)
        right = find_right(table, framework.rules(many), removed)
        own = next((t for mask, t in known if (mask == right).all()), None)
        if own is None:
            own = take_rows(table, right)
            known.append((right, own))
        if not length(own):
            continue
        part = _part(request, recipe, framework, own)
        if not framework.arrays:
            part = _described(part, framework, job, removed, predicts=predicts)
        parts.append(part)
    parts = [part for part in parts if part.size]
    if not parts:
        refuse(removed)
    return Space(framework, model, device, limits, tuple(parts), tuple(removed.values()))


def explain(space: Space, recipe: Recipe) -> Rule | None:
    """The first rule that a configuration breaks; None where it is, or could be, in the space."""
    job = Job(model=space.model, recipe=recipe, device=space.device)
    for rule in (*mesh_rules(recipe, space.limits), *batch_rules(recipe, space.limits)):
        if rule.broken:
            return rule
    p, devices = recipe.parallel, space.limits.devices
    if p.world != devices:
        return Rule("devices", True, "`parallel` names {} ranks of {} devices", (p.world, devices))
    try:
        space.framework.check(job)
        space.framework.predict(job)
    except InvalidRequest as error:
        return Rule(space.framework.name, True, "{}", (error,), error.hint or "")
    return None


def mesh_rules(recipe: Recipe, limits: Limits) -> list[Rule]:
    """What a mesh must be; of one recipe or of many."""
    p = recipe.parallel
    ranks = p.tp * p.cp * p.pp
    rules = [divide("devices", "tp x cp x pp", ranks, "devices", limits.devices)]
    if not limits.open_mesh:
        return rules
    share = recipe.sequence_length // p.cp
    stated = "state `parallel` to have it all the same"
    return [
        *rules,
        Rule(
            "node", p.tp > limits.node,
            "`parallel.tp: {}` is more than the {} devices of a node", (p.tp, limits.node), stated,
        ),
        Rule(
            "share of a sequence", (p.cp > 1) & (share < LEAST_SHARE),
            "`parallel.cp: {}` leaves a rank {} tokens of a sequence", (p.cp, share), stated,
        ),
    ]  # fmt: skip


def batch_rules(recipe: Recipe, limits: Limits) -> list[Rule]:
    """How the global batch is divided; of one recipe or of many."""
    p, batch = recipe.parallel, limits.global_batch
    each = batch // p.dp
    return [
        divide("global batch", "dp_replicate x dp_shard", p.dp, "sequences of a step", batch),
        divide("micro-batch", "micro_batch", recipe.micro_batch, "sequences of a rank", each),
    ]


def _variants(request: Request, framework: Framework) -> list[Request]:
    """The request with every choice of words for the knobs that change memory and time alone."""
    choices: list[Sequence[str]] = []
    for name in WORDS:
        requested = request.optimizer.implementation if name == "implementation" else (
            getattr(request, name)
        )  # fmt: skip
        values = framework.values[name]
        if name == "recompute":  # none and full are one kind: of 0 blocks, and of all
            values = tuple(v for v in values if v != "none")
        choices.append(values if requested == "auto" else (requested,))
    found = []
    for words in product(*choices):
        chosen = dict(zip(WORDS, words, strict=True))
        implementation: Any = chosen.pop("implementation")
        optimizer = structs.replace(request.optimizer, implementation=implementation)
        found.append(structs.replace(request, optimizer=optimizer, **chosen))
    return found


def _alone(request: Request) -> Request:
    """The same on one device, before any mesh is chosen."""
    own = Hardware(device=request.hardware.device)
    rows = _least_rows(request)
    return structs.replace(request, parallel=Parallel(), hardware=own, micro_batch=rows)


def _least_rows(request: Request) -> int:
    """Rows of the smallest micro-batch: a pair of answers is two."""
    return find_objective(request.task.objective).least_rows


def _base(request: Request, framework: Framework, device: Device) -> Recipe:
    recipe = read_defaults(_alone(request), device)[0]
    mesh = Parallel()
    if "zero" in framework.axes:
        mesh = Parallel(zero=framework.choose_zeros(request)[0])
    if request.parallel != "auto":
        requested = request.parallel
        mesh = Parallel(zero=requested.zero, reshard_after_forward=requested.reshard_after_forward)
    nodes = request.hardware.nodes
    return structs.replace(
        recipe, parallel=mesh, devices_per_node=request.hardware.count if nodes > 1 else 0
    )


def _node(request: Request, device: Device) -> int:
    """Devices of a node: the requested number, else as the catalogue has it, `8` or `2-8`."""
    count, nodes = request.hardware.count, request.hardware.nodes
    if nodes > 1:
        return count
    return min(count, node_size(device))


def node_size(device: Device) -> int:
    """Devices of a node, the most that the catalogue has seen; `2-8` is 8."""
    words = device.devices_per_node.replace("-", " ").split()
    return max((int(word) for word in words if word.isdigit()), default=NODE)


def _job(job: Job, table: Columns) -> Job:
    """The candidates of a table."""
    own = {name: column for name, column in table.items() if name not in (LONGEST, TAIL)}
    return structs.replace(job, recipe=with_columns(job.recipe, own))


def _meshes(
    request: Request, framework: Framework, job: Job, limits: Limits, removed: dict[str, Removed]
) -> Columns:
    """Every mesh of all devices, with every split of the blocks."""
    ranks = divisors(limits.devices)
    splits = framework.list_splits(job, _values(request, framework, "pp", ranks))
    if request.parallel != "auto":
        splits = [s for s in splits if s.virtual_pp == read_parallel(request, framework).virtual_pp]
    if not splits:
        raise InvalidRequest(
            f"the {job.model.architecture.layers} blocks of `{job.model.name}` cannot be dealt to"
            " the stages asked for",
            hint="another `parallel.pp` or `virtual_pp`",
        )
    table = _of_splits(splits, job.recipe.options)
    for axis in ("tp", "cp"):
        table = cross(table, axis, _values(request, framework, axis, ranks))
        table = keep(table, mesh_rules(_job(job, table).recipe, limits), removed)
    table = cross(table, "sequence_parallel", _values(request, framework, "sequence_parallel"))
    if request.parallel == "auto":  # with one tp rank there is nothing to cut
        table = take_rows(table, ~table["sequence_parallel"] | (table["tp"] > 1))
    experts = max(1, job.model.architecture.experts.count, int(job.recipe.options.get(EXPERTS, 0)))
    table = cross(table, "ep", _values(request, framework, "ep", divisors(experts)))
    table = cross(table, "dp_replicate", _values(request, framework, "dp_replicate", ranks))
    if request.parallel == "auto" and framework.zeros:
        table = cross(table, "zero", sorted(framework.choose_zeros(request)))
    dp = limits.devices // (table["tp"] * table["cp"] * table["pp"])
    table["dp_shard"] = dp // table["dp_replicate"]
    copies = divide("copies", "dp_replicate", table["dp_replicate"], "data-parallel ranks", dp)
    table = keep(table, [copies], removed)
    if "zero" in table:  # one rank has nothing to cut
        first = framework.choose_zeros(request)[0]
        table = take_rows(table, (table["zero"] == first) | (table["dp_shard"] > 1))
    return table


def _values(
    request: Request, framework: Framework, axis: str, ranks: Sequence[int] = (False, True)
) -> Sequence[int]:
    """Of an axis of the mesh: the requested size; else all of `ranks`, or what the step has."""
    if request.parallel != "auto":
        return (getattr(read_parallel(request, framework), axis),)
    if axis in framework.axes:
        return ranks
    return (getattr(Parallel(), axis),)


def _batches(
    request: Request, job: Job, table: Columns, limits: Limits, removed: dict[str, Removed]
) -> Columns:
    """Every micro-batch of every mesh, and the micro-batches that make up the global batch."""
    table = keep(table, batch_rules(_job(job, table).recipe, limits)[:1], removed)
    micro, batch = request.micro_batch, limits.global_batch
    if micro == "auto":
        share = batch // (table["dp_replicate"] * table["dp_shard"])
        table = cross_each(table, "micro_batch", share, divisors)
        pairs = Rule(
            "pairs", table["micro_batch"] % _least_rows(request) != 0,
            f"`objective: {request.task.objective}` takes pairs of sequences, and a rank has {{}}"
            " of them",
            (table["micro_batch"],), "fewer devices, or a larger `task.global_batch`",
        )  # fmt: skip
        table = keep(table, [pairs], removed)
    else:
        table = cross(table, "micro_batch", (micro,))
        table = keep(table, batch_rules(_job(job, table).recipe, limits), removed)
    ranks = table["dp_replicate"] * table["dp_shard"]
    table["accumulation"] = batch // (ranks * table["micro_batch"])
    return table


def _part(request: Request, recipe: Recipe, framework: Framework, table: Columns) -> Part:
    """One kind of candidates; left open, a chunk recomputes none to all of its blocks."""
    own = {name: column for name, column in table.items() if name not in (LONGEST, TAIL)}
    if request.recompute != "auto" or recipe.recompute != "full":
        return Part(recipe, own, None, None, False)
    if not framework.recomputes_some:
        two = 0 * table[LONGEST] + 2
        return Part(recipe, own, two, two - 1, False)
    # a stage whose last chunk is recomputed whole builds a group of blocks again at once
    return Part(recipe, own, table[LONGEST] + 1, table[TAIL], True)


def _described(
    part: Part, framework: Framework, job: Job, removed: dict[str, Removed], *, predicts: bool
) -> Part:
    """The candidates that a framework whose rules are not for arrays describes: each is checked,
    and if it `predicts`, one of each mesh is predicted.

    What a prediction refuses depends on the mesh and on whether gradients accumulate, not on how
    many rows a micro-batch has.
    """
    import numpy

    (table,) = part.tables(part.size)
    many, right = with_columns(part.recipe, table), numpy.ones(part.size, bool)
    refused: dict[tuple[Parallel, bool], InvalidRequest | None] = {}
    for row in range(part.size):
        one = structs.replace(job, recipe=pick(many, row))
        error = _refusal(framework.check, one)
        if error is None and predicts and not framework.memory_unknown:
            kind = one.recipe.parallel, one.recipe.accumulation > 1
            if kind not in refused:
                refused[kind] = _refusal(framework.predict, one)
            error = refused[kind]
        if error is not None:
            right[row] = False
            note(removed, Removed(framework.name, 0, error.message, error.hint or ""), 1)
    return Part(part.recipe, take_rows(table, right), None, None, False)


def _refusal(check: Callable[[Job], object], job: Job) -> InvalidRequest | None:
    try:
        check(job)
    except InvalidRequest as error:
        return error
    return None


def _of_splits(splits: Sequence[Split], plain: Mapping[str, Option]) -> Columns:
    """The columns of a pipeline; plain: what an option is where a split does not say it."""
    import numpy

    names = {name for split in splits for name in split.options}
    table: Columns = {
        "pp": numpy.array([split.pp for split in splits]),
        "virtual_pp": numpy.array([split.virtual_pp for split in splits]),
        LONGEST: numpy.array([split.longest for split in splits]),
        TAIL: numpy.array([split.tail for split in splits]),
    }
    for name in sorted(names):
        table[name] = numpy.array([split.options.get(name, plain[name]) for split in splits])
    return table
