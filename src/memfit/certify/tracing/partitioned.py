"""A compiled block on fake tensors: cut by the compiler's partitioner, run operator by operator.

What a compiled forward saves for its backward is the partitioner's choice
(`train/model/partition.py`), made on the joint graph after inductor's own passes and
decompositions: the same functions are
called here with the options that the block is compiled with, so what is saved is exact. What
inductor's fused kernels hold meanwhile is not: the graphs' operators run one by one, each result
freed after its last use, while a fused kernel never writes most of them. Those bytes are a bound
from above.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten


class Partitioned:
    """Stands for `torch.compile(module.forward, options=options)` while a step is traced.

    made: graphs of all blocks; alike ones share theirs, as they share a compilation.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        options: dict[str, Any],
        made: dict[Hashable, Callable[..., Any]],
    ) -> None:
        self._forward, self._options, self._made = forward, options, made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result; its graph is made once for all calls that are alike."""
        module: nn.Module = self._forward.__self__  # type: ignore[attr-defined]
        weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [*weights.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        described = tuple(map(_describe, [*weights.values(), *leaves]))
        key = (_attributes(module), _ambient(), tuple(weights), described)
        if key not in self._made:
            self._made[key] = self._cut(module, list(weights), leaves, spec, tensors)
        return self._made[key](*tensors)

    def _cut(
        self,
        module: nn.Module,
        names: list[str],
        leaves: list[Any],
        spec: Any,
        tensors: list[Tensor],
    ) -> Callable[..., Any]:
        """The forward's graphs, made on twins that nobody counts."""
        with _disable_current_modes(), warnings.catch_warnings():  # no module's constants are fake
            warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own imports
            from torch._functorch.aot_autograd import aot_function
            from torch._inductor import config
            from torch._inductor.compile_fx import partition_fn
            from torch._inductor.decomposition import select_decomp_table

        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def call(*tensors: Tensor) -> Any:
            filled = list(constants)
            for place, tensor in zip(places, tensors[len(names) :], strict=True):
                filled[place] = tensor
            args, kwargs = tree_unflatten(filled, spec)
            weights = dict(zip(names, tensors, strict=False))
            with _reparametrize_module(module, weights):
                return self._forward(*args, **kwargs)

        def cut(gm: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
            # weights are there anyway, so that to keep them is free; dynamo says so of a module's
            options["static_lifetime_input_indices"] = list(range(len(names)))
            return partition_fn(gm, inputs, **options)

        made: Callable[..., Any] = aot_function(
            call, fw_compiler=_one_by_one, bw_compiler=_one_by_one,
            inference_compiler=_one_by_one, partition_fn=cut,
            decompositions=select_decomp_table(),
        )  # fmt: skip
        # folding constants would compute them, on a device that may not be here
        folds = tensors[0].device.type == "cpu"
        options = config.patch({**self._options, "joint_graph_constant_folding": folds})
        with options, _disable_current_modes(), FakeTensorMode():
            twins = [_twin(tensor) for tensor in tensors]
            made(*twins)  # the first call makes the graphs
        return made


def _one_by_one(gm: GraphModule, example_inputs: Any) -> Callable[[list[Any]], Any]:
    """Runs a graph; inputs and results go after their last use, as in the compiler's wrapper."""

    del example_inputs

    def run(args: list[Any]) -> Any:
        return Interpreter(gm).boxed_run(args)  # a new one: it keeps the last results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _twin(tensor: Tensor) -> Tensor:
    """Of the same metadata."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device,
        requires_grad=tensor.requires_grad,
    )  # fmt: skip


def _describe(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, Hashable) else repr(value)


def _ambient() -> Hashable:
    """What a graph depends on beside its inputs and its module."""
    cast = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    return torch.is_grad_enabled(), *cast


def _attributes(module: nn.Module) -> Hashable:
    """The plain attributes of a module and those inside it, but for the block's number."""
    return tuple(
        (name, type(part), key, value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, (bool, int, float, str)) and key != "layer_idx"
    )
