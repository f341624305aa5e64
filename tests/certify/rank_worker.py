"""One rank of a real run on this CPU: `python rank_worker.py RANK WORLD STORE CASES ANSWERS`.

CASES is a pickled list of recipes. The answer to each is what the rank held, by phase and kind,
its losses and the gradients gathered from all ranks.
"""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from msgspec.structs import replace
from tiny_steps import watch_real_step

from memfit.certify.tracing import worst_shapes
from memfit.ledger import Phase
from memfit.parallelism.shards import local_shape
from memfit.recipe import Parallel, Recipe
from memfit.train.build import Built, build_model, build_optimizer
from memfit.train.live import LiveBytes
from memfit.train.step import Batch, evaluate, step


def fill(model: torch.nn.Module, recipe: Recipe) -> None:
    """The same numbers whatever the world is: drawn whole, then cut by our own arithmetic."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with torch.no_grad():
        for index, (_, weight) in enumerate(model.named_parameters()):
            random = torch.Generator().manual_seed(index)
            whole = 0.05 * torch.randn(weight.shape, generator=random)
            rows = -(-whole.shape[0] // recipe.parallel.dp_shard)
            start = rank % recipe.parallel.dp_shard * rows
            mine = whole[start : start + rows]
            assert tuple(mine.shape) == local_shape(tuple(whole.shape), recipe.parallel, rank)
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.copy_(mine)


def run(recipe: Recipe, rank: int, world: int) -> dict[str, Any]:
    """Two steps on this rank's rows of a batch drawn for all ranks; the gradients of both."""
    model = build_model(recipe, "cpu")
    fill(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    seen: list[dict[str, torch.Tensor]] = []

    def look(*_: Any) -> None:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
        kept = {n: g.clone() for n, g in whole.items()}
        if recipe.optimizer.in_backward:
            seen[-1].update(kept)  # told of one weight after the other
        else:
            seen.append(kept)

    built.optimizer.register_step_pre_hook(look)
    losses, norms = [], []
    rows = recipe.micro_batch
    for number in range(2):
        random = torch.Generator().manual_seed(number)
        shape = (recipe.accumulation, rows * world, recipe.sequence_length)
        tokens = torch.randint(0, 250, shape, generator=random)
        labels = tokens.roll(-1, dims=2)
        labels[:, 0, : number + 3] = -100  # ranks differ in how many tokens they predict
        here = slice(rank * rows, (rank + 1) * rows)
        batches = [Batch(t[here].contiguous(), y[here].contiguous())
                   for t, y in zip(tokens, labels, strict=True)]  # fmt: skip
        if recipe.optimizer.in_backward:
            seen.append({})
        result = step(built, batches, int((labels != -100).sum()))
        losses.append(result.loss.item())
        norms.append(None if result.grad_norm is None else result.grad_norm.item())
    held_out, targets = evaluate(built, batches[0])
    return {"losses": losses, "norms": norms, "gradients": seen,
            "evaluation": (held_out.item(), targets.item())}  # fmt: skip


COLLECTIVES = (
    "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
    "reduce_scatter_tensor", "all_reduce",
)  # fmt: skip


def wait_until_let_go(tensors: Sequence[torch.Tensor], users: Sequence[int]) -> None:
    """Until each has no more users than that, at most 2 s."""
    until = time.monotonic() + 2
    while time.monotonic() < until:
        if all(t._use_count() <= n for t, n in zip(tensors, users, strict=True)):
            return
        time.sleep(1e-5)


@contextmanager
def as_nccl(live: LiveBytes) -> Iterator[None]:
    """Two things that gloo does with memory and NCCL does not, taken out of the count.

    Gloo reduces a copy of its input, which is split and dropped when it is waited for; and its
    own thread lets go of a collective's tensors some time after it is over.
    """
    kept = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def collective(plain: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            before = [tensor._use_count() for tensor in tensors]
            out = plain(*args, **kwargs)
            wait_until_let_go(tensors, before)
            return out

        return run

    def wait(*args: Any) -> Any:
        live._hide()
        try:
            return plain_wait(*args)
        finally:
            live._show()

    def functional(*args: Any, **kwargs: Any) -> Any:  # of the gradients' norms
        out = reduce(*args, **kwargs)
        elem = getattr(out, "elem", out)
        funcol.wait_tensor(elem)
        wait_until_let_go([elem], [1])
        return out

    reduce, plain_wait = funcol.all_reduce, dist.Work.wait
    for name, plain in kept.items():
        setattr(dist, name, collective(plain))
    funcol.all_reduce, dist.Work.wait = functional, wait
    try:
        yield
    finally:
        funcol.all_reduce, dist.Work.wait = reduce, plain_wait
        for name, plain in kept.items():
            setattr(dist, name, plain)


def answer(recipe: Recipe, rank: int, world: int) -> dict[str, Any]:
    live = watch_real_step(recipe, worst_shapes(recipe), fill=fill, inside=as_nccl)
    phases = {p: n for p, n in live.peaks.items() if p is not Phase.LOAD}
    kinds = {phase: live.ledger().by_kind(phase) for phase in phases}
    return {"phases": phases, "kinds": kinds, **run(recipe, rank, world)}


def alone(recipe: Recipe) -> dict[str, Any]:
    """The same global batch in this process, without sharding."""
    world = recipe.parallel.world
    whole = replace(recipe, parallel=Parallel(), micro_batch=recipe.micro_batch * world)
    return run(whole, 0, 1)


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, cases, answers = sys.argv[3:]
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    recipes = pickle.loads(Path(cases).read_bytes())
    Path(answers).write_bytes(pickle.dumps([answer(r, rank, world) for r in recipes]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
