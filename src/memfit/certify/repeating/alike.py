"""Which blocks of a model repeat others, read off the modules themselves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

RUN_CYCLES = (
    4  # cycles of a run that are traced: the third is what repeats, and must be as the second
)
TEMPLATE = 2
LONGEST = 8  # blocks of a cycle
_INDEX = frozenset({"layer_idx", "layer_id", "layer_index"})  # which block it is
_OWN = frozenset(nn.Module().__dict__)  # torch's own bookkeeping of a module
DEEPEST = 4  # containers and functions within an attribute that are looked into
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Unlike(Exception):
    """The blocks do not repeat: the model has to be traced in full."""


class Layout(NamedTuple):
    """The blocks that are traced, in units: a cycle of alike blocks, or a block of its own."""

    prefix: str  # of the blocks' paths
    units: tuple[tuple[int, ...], ...]  # numbers of the blocks that are traced
    more: Mapping[int, int]  # unit that is repeated -> how often

    @property
    def traced(self) -> tuple[int, ...]:
        """Numbers of the blocks that are traced."""
        return tuple(block for unit in self.units for block in unit)

    @property
    def repeated(self) -> tuple[tuple[int, int, int], ...]:
        """Each block that is not traced, the one that stands for it, and for which time."""
        return tuple(
            (block + time * len(self.units[unit]), block, time)
            for unit, more in self.more.items()
            for time in range(1, more + 1)
            for block in self.units[unit]
        )

    def rename(self, path: str, unit: int, time: int) -> str:
        """The path of what repeats a unit's module for that time."""
        block, rest = self.split(path)
        if block is None or not time:
            return path
        return f"{self.prefix}{block + time * len(self.units[unit])}{rest}"

    def split(self, path: str) -> tuple[int | None, str]:
        """(number of a path's block, what follows it); None outside the blocks."""
        if not path.startswith(self.prefix):
            return None, path
        number, dot, rest = path[len(self.prefix) :].partition(".")
        return (int(number), dot + rest) if number.isdigit() else (None, path)


def find_layout(prefix: str, blocks: Sequence[nn.Module], config: object) -> Layout | None:
    """What to trace of these blocks; None where too few are alike for anything to be left out."""
    kinds = [describe_module(block, number) for number, block in enumerate(blocks)]
    units: list[tuple[int, ...]] = []
    more: dict[int, int] = {}
    at = 0
    while at < len(kinds):
        length, cycles = _longest_run(kinds, at)
        if cycles <= RUN_CYCLES:
            units.append((at,))
            at += 1
            continue
        more[len(units) + TEMPLATE] = cycles - RUN_CYCLES
        for cycle in (*range(RUN_CYCLES - 1), cycles - 1):
            first = at + cycle * length
            units.append(tuple(range(first, first + length)))
        at += cycles * length
    found = Layout(prefix, tuple(units), more)
    return found if more and _at_their_places(found.traced, len(kinds), config) else None


def _longest_run(kinds: Sequence[Hashable], start: int) -> tuple[int, int]:
    """(blocks of a cycle, equal cycles from here on): those that leave most blocks out."""
    best = (1, 1)
    for length in range(1, LONGEST + 1):
        stop = start + length
        while stop < len(kinds) and kinds[stop] == kinds[stop - length]:
            stop += 1
        cycles = (stop - start) // length
        if (cycles - RUN_CYCLES) * length > max(0, (best[1] - RUN_CYCLES) * best[0]):
            best = (length, cycles)
    return best


def _at_their_places(traced: Sequence[int], count: int, config: object) -> bool:
    """Whether lists of the config with an entry a block say the same of a block's new place."""
    lists = [v for v in vars(config).values() if isinstance(v, list | tuple) and len(v) >= count]
    return all(entries[new] == entries[old] for entries in lists for new, old in enumerate(traced))


def describe_module(block: nn.Module, number: int) -> Hashable:
    """All that the step of a block can depend on, but for its number and its values."""
    own = f".{number}."
    return tuple((name, *_describe_one(module, own)) for name, module in block.named_modules())


def _describe_one(module: nn.Module, number: str) -> tuple[Hashable, ...]:
    tensors = [*module._parameters.items(), *module._buffers.items()]
    hooks = [len(v) for k, v in module.__dict__.items() if k in _OWN and k.endswith("_hooks")]
    own = {k: v for k, v in module.__dict__.items() if k not in _OWN and k not in _INDEX}
    kind: Any = type(module)
    stored = tuple((name, _describe_tensor(tensor)) for name, tensor in tensors)
    return kind, module.training, tuple(hooks), stored, _describe(own, number)


def _describe_tensor(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _describe(value: Any, number: str, depth: int = 0) -> Hashable:
    """A module's attribute, as far as another module's can be compared with it.

    number: of the block, as it stands in paths (peft keeps the path of what it replaces).
    """
    if isinstance(value, str):
        return value.replace(number, ".*.")
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, nn.Module | torch.Tensor) or depth > DEEPEST:
        return str(type(value))  # modules are described where they stand
    if isinstance(value, Mapping):
        return tuple((str(k), _describe(v, number, depth + 1)) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(_describe(v, number, depth + 1) for v in value)
    if isinstance(value, partial):
        return _describe([value.func, value.args, value.keywords], number, depth + 1)
    if callable(value) and not isinstance(value, type):
        return _describe_function(value, number, depth)
    return str(value if isinstance(value, type) else type(value))


def _describe_function(function: Callable[..., Any], number: str, depth: int) -> Hashable:
    """A function by its name and what it closes over: a recomputed block's forward is one."""
    cells = getattr(function, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells]
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name, _describe(held, number, depth + 1)
