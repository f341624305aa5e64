"""The backward of a size-only graph: what torch's engine holds, in torch's order.

A node saves what its derivative needs (torch's derivatives.yaml), nodes run by descending sequence
number, and a node's first gradient is not copied: later ones are added to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from memfit.meta.meter import Meter
from memfit.meta.tensor import Shape, Tensor, elementwise_strides, empty, workspace
from memfit.meta.workspace import find_rows, row_sum
from memfit.records.ledger import Kind

Gradients = Sequence[Tensor | None]
Rule = Callable[["Node", "list[Tensor | None]"], Gradients]
FIRST = 1 << 62  # gradients are accumulated as soon as they are ready


class Node:
    """One differentiable operation that ran."""

    __slots__ = ("copies", "edges", "hooks", "outputs", "rule", "saved", "sequence", "variable")

    def __init__(self, meter: Meter, rule: Rule, inputs: Sequence[Tensor | None]) -> None:
        self.sequence = meter.sequence
        meter.sequence += 1
        self.copies = meter.node_copies  # see `Meter.standing_for`: its derivative counts as often
        self.rule = rule
        self.edges = [None if t is None or not t.requires_grad else edge(t) for t in inputs]
        self.hooks: tuple[Callable[[], None], ...] = ()  # run before it, in their order
        self.outputs: list[tuple[Shape, str]] = []
        self.saved: Any = ()
        self.variable: Tensor | None = None

    def needs(self, i: int) -> bool:
        """Whether the gradient of input i is wanted."""
        return self.edges[i] is not None

    def unpack(self, i: int) -> Tensor:
        """Return saved tensor i; a recomputed region recomputes it."""
        saved = self.saved[i]
        return saved if isinstance(saved, Tensor) else saved.fetch()

    def attach(self, tensor: Tensor) -> Tensor:
        """Make `tensor` an output of this node."""
        tensor.grad_fn = self
        tensor.requires_grad = True
        tensor.output = len(self.outputs)
        self.outputs.append((tensor.shape, tensor.dtype))
        return tensor


def edge(tensor: Tensor | None) -> tuple[Node, int] | None:
    """Where the gradient of a tensor goes."""
    if tensor is None or not tensor.requires_grad:
        return None
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output
    if tensor.accumulator is None:
        tensor.accumulator = node = Node(tensor.meter, _accumulate, ())
        node.sequence = FIRST
        node.variable = tensor
        node.outputs = [(tensor.shape, tensor.dtype)]
    return tensor.accumulator, 0


def record(
    rule: Rule, inputs: Sequence[Tensor | None], saved: Sequence[Tensor | None] = ()
) -> Node | None:
    """Return a node that holds `saved`, or None where no input wants a gradient."""
    for t in inputs:
        if t is not None and t.requires_grad:
            break
    else:
        return None
    meter = t.meter
    if not meter.graph:
        return None
    node = Node(meter, rule, inputs)
    if saved:
        node.saved = [None if t is None else meter.pack(t) for t in saved]
    return node


def _accumulate(node: Node, grads: list[Tensor | None]) -> Gradients:
    """AccumulateGrad: the first gradient becomes `.grad`, later ones are added into it."""
    variable, new = node.variable, grads[0]
    if variable is None or new is None:
        return ()
    if variable.grad is None:
        if new.strides == variable.strides or (new.contiguous and variable.contiguous):
            variable.grad = new.detached()
        else:
            variable.grad = empty(new.meter, new.shape, new.dtype)
        new.meter.kinds[variable.grad.storage.index] = Kind.GRADIENTS
        variable.grad.storage.call = -1
    if new.meter.on_gradient is not None:
        new.meter.on_gradient(variable)
    return ()


def backward(
    loss: Tensor,
    passing: Callable[[int], None] = lambda sequence: None,
    seed: Tensor | None = None,
) -> None:
    """Run a graph backwards, as `loss.backward()` does; `seed` is the gradient of a `loss` that
    is no scalar.

    `passing` is called with the sequence number of each node before it runs.
    """
    root, meter = loss.grad_fn, loss.meter
    if root is None:
        raise ValueError("nothing that the loss depends on is trainable")
    if seed is None:
        seed = empty(loss.meter, loss.shape, loss.dtype)
    waiting = _dependencies(root)
    buffers: dict[Node, list[Tensor | None]] = {root: [seed.detached()]}
    ready: list[tuple[int, int, Node]] = [(-root.sequence, 0, root)]
    del root
    order = 1
    while ready:
        node = heapq.heappop(ready)[2]
        passing(node.sequence)
        for hook in node.hooks:
            hook()
        meter.copies = node.copies
        outputs = _call(node, buffers.pop(node))
        meter.copies = 1
        node.saved = ()
        for i, target in enumerate(node.edges):
            if target is None:
                continue
            successor, position = target
            grad = outputs[i]
            waiting[successor] -= 1
            buffer = buffers.get(successor)
            if buffer is None:
                buffer = buffers[successor] = [None] * len(successor.outputs)
            if grad is not None:
                old = buffer[position]
                buffer[position] = grad if old is None else _add(old, grad)
                if old is None:  # moved; what is added to another stays an output meanwhile
                    outputs[i] = None
                del old
            del grad, buffer  # nothing but the buffers may hold a gradient from here on
            if waiting[successor] == 0:
                heapq.heappush(ready, (-successor.sequence, order, successor))
                order += 1
        del outputs, node


def _add(old: Tensor, new: Tensor) -> Tensor:
    strides = elementwise_strides(old.shape, (old, new))
    return empty(old.meter, old.shape, old.dtype, strides=strides)


def _call(node: Node, grads: list[Tensor | None]) -> list[Tensor | None]:
    """Run one derivative, then shape and cast its results to what the inputs were."""
    outputs = list(node.rule(node, grads))
    for i, target in enumerate(node.edges):
        grad = outputs[i] if i < len(outputs) else None
        if target is None or grad is None:
            continue
        shape, dtype = target[0].outputs[target[1]]
        if grad.shape != shape:
            outputs[i] = grad = sum_to(grad, shape)
        if grad.dtype != dtype:
            outputs[i] = empty(
                grad.meter, shape, dtype, strides=elementwise_strides(shape, (grad,))
            )
        del grad
    return outputs


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """`x.sum_to_size(shape)`, with the partial results of a sum over rows on CUDA."""
    result = empty(x.meter, shape, x.dtype)
    grid = x.meter.grid
    if grid is not None and len(shape) == 1 and shape[0] == x.shape[-1]:
        found = find_rows(x.shape, x.strides, range(len(x.shape) - 1))
        workspace(x.meter, *(row_sum(*found, grid) if found else ()))
    return result


def _dependencies(root: Node) -> dict[Node, int]:
    waiting: dict[Node, int] = {root: 0}
    stack = [root]
    while stack:
        for target in stack.pop().edges:
            if target is not None:
                if target[0] not in waiting:
                    waiting[target[0]] = 0
                    stack.append(target[0])
                waiting[target[0]] += 1
    return waiting


class Promise:
    """A saved tensor of a recomputed region: nothing, until backward asks for it."""

    __slots__ = ("__weakref__", "region", "tensor")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.tensor: Tensor | None = None

    def fetch(self) -> Tensor:
        """Return the tensor and drop it; where it is not there, its whole region is recomputed."""
        if self.tensor is None:
            self.region.recompute()
        saved, self.tensor = self.tensor, None
        if saved is None:
            raise RuntimeError("a recomputed forward saved other tensors than the first one")
        return saved


class _EnoughRecomputedError(Exception):
    """Every saved tensor is recomputed: the rest of the forward need not run."""


class _Argument:
    """What a recomputed region begins with, saved as any saved tensor is; with its history."""

    __slots__ = ("edge", "saved")

    def __init__(self, tensor: Tensor) -> None:
        self.saved = tensor if tensor.meter.saver is None else tensor.meter.pack(tensor)
        self.edge = tensor.grad_fn, tensor.output, tensor.requires_grad

    def fetch(self) -> Tensor:
        """Return the tensor as the first forward had it."""
        found = self.saved if isinstance(self.saved, Tensor) else self.saved.fetch()
        found.grad_fn, found.output, found.requires_grad = self.edge
        return found


class Region:
    """One non-reentrant `torch.utils.checkpoint` with early stop.

    selective: results of `must_save` inside are held until the recomputation takes them; those that
    it never takes are held as long as the region.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        arguments: tuple[Tensor, ...],
        autocast: bool,
        selective: bool,
    ) -> None:
        self.function = function
        self.arguments = [_Argument(t) for t in arguments]
        self.autocast = autocast
        self.selective = selective
        self.results: list[tuple[Tensor, ...] | None] = []
        self.found = 0  # of the results, while it is computed again
        self.promises: list[ref[Promise]] = []
        self.filled = -1  # promises kept so far; -1 while the first forward runs

    def pack(self, tensor: Tensor) -> Any:
        """First forward: promise. Recomputed forward: keep the promises in order."""
        if self.filled < 0:
            promise = Promise(self)
            self.promises.append(ref(promise))
            return promise
        waiting = self.promises[self.filled]() if self.filled < len(self.promises) else None
        self.filled += 1
        saved = tensor.detached()
        if waiting is not None:
            waiting.tensor = saved
        if self.filled == len(self.promises):
            raise _EnoughRecomputedError
        return saved

    def recompute(self) -> None:
        """Rerun the forward until every saved tensor is recomputed."""
        arguments = [argument.fetch() for argument in self.arguments]
        meter = arguments[0].meter
        before, meter.saver = meter.saver, self
        autocast, meter.autocast = meter.autocast, self.autocast
        self.filled = self.found = 0
        try:
            with meter.standing_for(1):
                self.function(*arguments)
        except _EnoughRecomputedError:
            pass
        finally:
            meter.saver, meter.autocast = before, autocast

    def keep(self, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return what `make` makes, and hold it; in the recomputation return what is held."""
        if self.filled < 0:
            made = make()
            self.results.append(tuple(t.detached() for t in made))
            return made
        known = self.results[self.found]
        self.results[self.found] = None
        self.found += 1
        if known is None:
            raise RuntimeError("a recomputed forward asks twice for what was kept")
        return known


def must_save(meter: Meter, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return what `make` makes; a selective region holds it (`CheckpointPolicy.MUST_SAVE`)."""
    region = meter.saver
    if region is None or not region.selective or meter.forgets:
        return make()
    found: tuple[Tensor, ...] = region.keep(make)
    return found


def checkpoint(
    function: Callable[..., Tensor], *arguments: Tensor, selective: bool = False
) -> Tensor:
    """Run `function` keeping its arguments instead of what it saves.

    keeps: and the results of products with weights and of fused attention
    (train/step/recompute.py).
    """
    meter = arguments[0].meter
    region = Region(function, arguments, meter.autocast, selective)
    before, meter.saver = meter.saver, region
    try:
        result = function(*arguments)
    finally:
        meter.saver = before
    return result
