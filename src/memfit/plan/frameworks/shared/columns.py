"""Many recipes at once: records whose numbers are numpy arrays, one candidate an element.

A recipe with arrays for `micro_batch`, `parallel.tp`, … describes as many recipes as the arrays
have elements; whatever computes with `step_time.arrays` answers for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import structs

from memfit.plan.step_time.arrays import Number
from memfit.records import Record
from memfit.records.model import ModelReference
from memfit.records.recipe import Freeze, Lora, Optimizer, Recipe

T = TypeVar("T")
# what holds no arrays, and need not be looked into
PLAIN = {bool, int, float, str, type(None), ModelReference, Lora, Freeze, Optimizer}
AXES = (  # of `parallel`, in which candidates differ
    "dp_replicate", "dp_shard", "zero", "tp", "sequence_parallel", "cp", "pp", "virtual_pp", "ep",
)  # fmt: skip


def each_array(value: T, change: Callable[[Any], Any]) -> T:
    """The same record, dict or tuple with every array in it changed; what has none stays itself."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if getattr(value, "ndim", 0):
        return change(value)  # type: ignore[no-any-return]
    if isinstance(value, Record):
        found = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            if type(old) not in PLAIN:
                new = each_array(old, change)
                if new is not old:
                    found[name] = new
        return structs.replace(value, **found) if found else value
    if kind is dict:
        items: Any = value
        changed = {k: each_array(v, change) for k, v in items.items() if type(v) not in PLAIN}
        return {**items, **changed} if changed else value  # type: ignore[return-value]
    if kind is tuple:
        parts: Any = value
        others = tuple(each_array(old, change) for old in parts)
        same = all(a is b for a, b in zip(others, parts, strict=True))
        return value if same else others  # type: ignore[return-value]
    return value


def take(value: T, rows: Any) -> T:
    """The candidates of those rows: an index, a slice or an array of indices."""
    return each_array(value, lambda array: array[rows])


def pick(value: T, row: int) -> T:
    """One candidate, in plain numbers."""
    return each_array(value, lambda array: array[row].item())


def with_columns(recipe: Recipe, columns: Mapping[str, Number]) -> Recipe:
    """The recipe with these numbers or arrays; names: AXES, options, and the recipe's own."""
    own, mesh = {}, {}
    options = dict(recipe.options)
    for name, value in columns.items():
        if name in AXES:
            mesh[name] = value
        elif name in options:
            options[name] = value
        else:
            own[name] = value
    return structs.replace(
        recipe, parallel=structs.replace(recipe.parallel, **mesh), options=options, **own
    )


def size_of(recipe: Recipe) -> int:
    """How many recipes its arrays describe; 1 where it has none."""
    sizes = [1]

    def count(array: Any) -> Any:
        sizes.append(len(array))
        return array

    each_array(recipe, count)
    return max(sizes)


def find_distinct(columns: Sequence[Number], size: int) -> tuple[Any, Any]:
    """Where each distinct row of these columns first stands, and which one every row is.

    Two index arrays, of the distinct rows and of all `size` rows; columns hold whole numbers or
    truths, and those that are no arrays are the same for all.
    """
    import numpy

    code: Any = numpy.zeros(size, numpy.int64)
    for column in columns:
        if getattr(column, "ndim", 0):
            low = int(column.min())
            code = code * (int(column.max()) - low + 1) + (column.astype(numpy.int64) - low)
    # equal rows stand side by side in a search, so that few are left to sort
    starts = numpy.flatnonzero(numpy.diff(code, prepend=code[:1] - 1))
    _, first, which = numpy.unique(code[starts], return_index=True, return_inverse=True)
    return starts[first], numpy.repeat(which, numpy.diff(starts, append=size))
