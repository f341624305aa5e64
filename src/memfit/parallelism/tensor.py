"""Each matrix product shared by `tp` ranks (Shoeybi et al. 1909.08053), tokens cut among them
between the products (Korthikanti et al. 2205.05198): what a rank holds, and where that can be.

Cutting and communicating are torch's (`parallelize_module`); this file only says which product is
cut which way. The styles are torchtitan's for the same blocks
(torchtitan/models/llama3/infra/parallelize.py, `apply_non_moe_tp`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from memfit.families import families_that, find_family
from memfit.meta.layers.qat import GROUP
from memfit.optimizers import find_optimizer, optimizers_that
from memfit.records.model import Architecture
from memfit.records.recipe import Parallel, Recipe

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")  # whose outputs are summed over ranks
PER_HEAD = ("q_norm", "k_norm")
OTHERWISE = "`parallel.dp_shard`, which cuts every family and every method"


@lru_cache(maxsize=16384)  # names of one model's parameters, asked for by every mesh
def cut_dim(name: str) -> int | None:
    """The dimension in which tp ranks cut a parameter of this name; None: each has all of it."""
    *_, module, leaf = ("", *name.replace(".base_layer.", ".").split("."))
    if module == "default":  # peft's: of A, what its product reads is cut, of B what it makes
        *_, module, matrix, _, _ = name.split(".")
        uncut = ROWS if matrix == "lora_A" else COLUMNS
        return None if module in uncut else int(matrix == "lora_A")
    if module in ROWS:
        return 0
    return 1 if module in COLUMNS and leaf == "weight" else None


def cut(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """The shape of a tp rank's part, the same on all: only what divides is cut."""
    dim = cut_dim(name)
    return tuple(n // tp if i == dim else n for i, n in enumerate(shape))


def why_no_shared_products(recipe: Recipe, name: str, a: Architecture) -> tuple[str, str] | None:
    """Why ranks cannot share the products of a recipe, and what to use; None where they can."""
    parallel = recipe.parallel
    tp = parallel.tp
    if tp == 1:
        return None
    if not parallel.sequence_parallel:
        return (
            f"`parallel.tp: {tp}` without `sequence_parallel` is not in memfit's own step, whose"
            " ranks always cut tokens between products",
            "set `parallel.sequence_parallel: true`",
        )
    shares = find_family(a.family).shares_products
    if not shares or a.output_bias or a.mlp_bias:
        what = f"`{a.family}`" if not shares else "with biases on summed products"
        known = ", ".join(families_that("shares_products"))
        return (
            f"`parallel.tp: {tp}` is written for blocks of {known} without biases on"
            f" o_proj and down_proj, and those of `{name}` are {what}",
            f"use {OTHERWISE}",
        )
    for found, instead in _refused(recipe):
        return f"{found}, and `parallel.tp: {tp}` is asked for", instead
    for what, number in _divided(recipe, a):
        if number % tp:
            return (
                f"`parallel.tp: {tp}` does not divide the {number} {what} of `{name}`",
                f"use tp in {find_degrees(recipe, a)}",
            )
    return None


def _divided(recipe: Recipe, a: Architecture) -> tuple[tuple[str, int], ...]:
    found = (
        ("heads", a.heads), ("key and value heads", a.kv_heads),
        ("columns of the feed-forward", a.ffn), ("tokens of the vocabulary", a.vocab),
        ("tokens of a row", recipe.sequence_length),
    )  # fmt: skip
    if recipe.qat != "int4":
        return found
    inputs = ("output projection", a.heads * a.head_dim), ("down projection", a.ffn)
    groups = ((f"groups of {GROUP} inputs of the {name}", n // GROUP) for name, n in inputs)
    return *found, *groups


def find_degrees(recipe: Recipe, architecture: Architecture) -> list[int]:
    """Every `tp` that divides all that it must."""
    numbers = [number for _, number in _divided(recipe, architecture)]
    return [tp for tp in range(1, min(numbers) + 1) if not any(n % tp for n in numbers)]


def _refused(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What of a recipe is not built for such ranks, and what to use instead."""
    name = recipe.optimizer.name
    yield from _refused_adapters(recipe)
    if recipe.scores and recipe.adapted:
        problem = (
            f"`objective: {recipe.objective}` with `method: {recipe.method}` has a copied head"
        )
        yield f"{problem}, which is not cut for such ranks", f"use `method: full`, or {OTHERWISE}"
    if recipe.compile != "none":
        problem = f"`compile: {recipe.compile}` would take shared products into its graph"
        yield problem, "use `compile: none`"
    if recipe.loss == "chunked":
        problem = "`loss: chunked` takes whole rows of logits, of which each rank has a part"
        yield problem, "use `loss: plain`, whose logits the ranks share"
    if recipe.lean:
        problem = f"`lean: {', '.join(recipe.lean)}` does not take tokens that are cut among ranks"
        yield problem, "use `lean: none`"
    if recipe.offload != "none":
        yield f"`offload: {recipe.offload}` is not built for such ranks", "use `offload: none`"
    if recipe.optimizer.in_backward:
        problem = "updates within backward are not built for such ranks"
        yield problem, "use `optimizer.in_backward: false`"
    if not find_optimizer(recipe.optimizer).updates_parts:
        problem = f"`optimizer.name: {name}` is not proven on shards of parts"
        yield problem, f"use one of {', '.join(optimizers_that('updates_parts'))}"


def _refused_adapters(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.method == "dora":
        problem = "`method: dora` measures rows of weights, which are cut"
        yield problem, f"use `method: lora`, or {OTHERWISE}"
    if recipe.coding:
        problem = f"`base_format: {recipe.base_format}` has codes of whole weights, which are cut"
        yield problem, "use a base in 16 or 32 bits"
    if recipe.adapted and recipe.lora.dropout:
        problem = f"`lora.dropout: {recipe.lora.dropout:g}` would be drawn by each rank for itself"
        yield problem, "use `lora.dropout: 0`"


def split_products(
    embedding: nn.Module,
    blocks: Sequence[nn.Module],
    tail: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    scores: bool = False,
) -> None:
    """Cut these modules among the ranks of the axis `tp`, in place; a tied head stays tied.

    Between products each rank has its share of every row's tokens. Embedding and head are cut by
    tokens of the vocabulary. The final norm's output is gathered: (batch, tokens, hidden).

    tail: the final norm, where this stage has it, and the head. A module without weights stands
    where another stage has the one that is meant, and is left alone. scores: the head makes one
    number of a row, which each rank makes whole.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    *norms, head = tail
    tied = getattr(head, "weight", head) is getattr(embedding, "weight", embedding)
    cut_modules = (embedding, *blocks, *tail)
    frozen = [[n for n, p in m.named_parameters() if not p.requires_grad] for m in cut_modules]
    whole, tokens, last = Replicate(), Shard(1), Shard(-1)
    into = RowwiseParallel(input_layouts=whole, output_layouts=tokens)
    gathered = PrepareModuleOutput(
        output_layouts=tokens, desired_output_layouts=whole, use_local_output=False
    )
    ends = (
        (embedding, into),
        *((norm, style) for norm in norms for style in (SequenceParallel(), gathered)),
        (
            head,
            _whole() if scores else ColwiseParallel(output_layouts=last, use_local_output=False),
        ),
    )
    for block in blocks:
        parallelize_module(block, mesh, _styles(block))
    for module, style in ends:
        if any(True for _ in module.parameters()):
            parallelize_module(module, mesh, style)
    for module, names in zip(cut_modules, frozen, strict=True):
        for name in names:  # SequenceParallel's weights want gradients, whatever they were
            module.get_parameter(name).requires_grad_(False)
    if tied:
        head.weight = embedding.weight


def _styles(block: nn.Module) -> dict[str, Any]:
    """Of the modules of one block: norms and sums between them on tokens that are cut."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    whole, tokens = Replicate(), Shard(1)
    styles: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
    }
    for name, module in block.named_modules():
        leaf = name.rpartition(".")[2]
        adapted = hasattr(module, "base_layer")
        base = f"{name}.base_layer" if adapted else name
        if leaf in ROWS:
            styles[base] = ColwiseParallel()
            if adapted:
                styles[f"{name}.lora_A.default"] = _alone(None)
                styles[f"{name}.lora_B.default"] = _alone(0)
        elif leaf in COLUMNS:
            styles[base] = RowwiseParallel(output_layouts=tokens)
            if adapted:
                styles[f"{name}.lora_A.default"] = RowwiseParallel(output_layouts=tokens)
                styles[f"{name}.lora_B.default"] = _alone(None)
        elif leaf in PER_HEAD:  # (batch, tokens, heads, head_dim)
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return styles


def _whole() -> Any:
    """The style of a module that each rank has and runs whole, gradients alike."""
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.parallel import ParallelStyle

    class Whole(ParallelStyle):
        """Weights of the mesh, without another effect."""

        def _apply(self, module: Any, device_mesh: Any) -> Any:
            return distribute_module(module, device_mesh)

    return Whole()


def _alone(cut: int | None) -> Any:
    """The style of an adapter's product that a rank makes without the others, of its own tokens or
    with its own rows of the matrix; gradients of what is whole are sums over ranks.

    cut: the dimension in which the matrix is cut; None: each rank has all of it.
    """
    from torch.distributed.tensor import Partial, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.nn import Parameter
    from torch.nn.functional import linear

    def partition(_: str, module: Any, mesh: Any) -> None:
        if cut is not None:
            parts = distribute_tensor(module.weight, mesh, [Shard(cut)], src_data_rank=None)
            module.weight = Parameter(parts, requires_grad=module.weight.requires_grad)

    class Alone(ParallelStyle):
        """torch's styles would sum the gradient between the two products of an adapter."""

        def _apply(self, module: Any, device_mesh: Any) -> Any:
            made: Any = distribute_module(module, device_mesh, partition)
            sums = None if cut is not None else (Partial(),)

            def forward(x: Any) -> Any:
                own = x.to_local(grad_placements=(Partial(),)) if hasattr(x, "to_local") else x
                return linear(own, made.weight.to_local(grad_placements=sums))

            made.forward = forward
            return made

    return Alone()


@contextmanager
def sharing(parallel: Parallel) -> Iterator[None]:
    """What a step of many ranks runs within, its backward too.

    Where ranks share products, torch's cross entropy takes logits cut by tokens of the vocabulary.
    FSDP2 warns that what leaves a unit is a view (an embedding's that is cut, OPT's blocks), which
    must not be written into: nothing writes into it.
    """
    if parallel.world == 1:
        yield
        return
    from torch.distributed.tensor.parallel import loss_parallel

    with warnings.catch_warnings(), loss_parallel() if parallel.tp > 1 else nullcontext():
        warnings.filterwarnings("ignore", ".* returned a view tensor", UserWarning)
        yield
