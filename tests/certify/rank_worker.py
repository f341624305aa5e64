"""Real runs of many ranks on this CPU: `python rank_worker.py FOLDER`.

FOLDER/cases is a pickled list of recipes. Those of one world are run by as many processes, which
are forked: the libraries are imported once. A rank's answers are FOLDER/WORLD-RANK: of each recipe
what the rank held, by phase and kind, its losses and the gradients gathered from all ranks.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import sampled_ranks
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from msgspec.structs import replace
from tiny_steps import build_watched, watch_real_step
from torch.utils._python_dispatch import _disable_current_modes

import memfit.train.model.experts as experts_module
from memfit.certify.tracing.partitioned import Partitioned
from memfit.certify.tracing.trace_step import import_for, worst_shapes
from memfit.parallelism.context import own_parts
from memfit.parallelism.shards import local_shape
from memfit.parallelism.tensor import cut_dim
from memfit.records.ledger import Phase
from memfit.records.recipe import Parallel, Recipe
from memfit.train.distributed.gloo import without_gloo
from memfit.train.model.quantised import quantised_modules
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.step import Batch, RatedBatch, evaluate, step


def part_of(name: str, whole: torch.Tensor, parallel: Parallel, rank: int) -> torch.Tensor:
    """What a rank holds of a weight: of the part that tp ranks share, rows as `torch.chunk` cuts"""
    dim = cut_dim(name)
    if dim is not None:
        whole = whole.chunk(parallel.tp, dim)[rank % parallel.tp]
    if parallel.ep > 1 and ".experts." in name:  # neighbours have the parts of all experts
        whole = whole.chunk(parallel.ep)[rank % parallel.ep]
        place = rank % parallel.dp_shard // parallel.ep
        return whole.chunk(parallel.expert_shards)[place]
    rows = -(-whole.shape[0] // parallel.shards)
    start = rank // parallel.tp % parallel.shards * rows
    mine = whole[start : start + rows]
    assert tuple(mine.shape) == local_shape(tuple(whole.shape), parallel, rank)
    return mine


def fill(model: torch.nn.Module, recipe: Recipe) -> None:
    """The same numbers whatever the world is: drawn whole, then cut by our own arithmetic."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    coded = quantised_modules(model)
    stored = {id(p) for module in coded.values() for p in module.stored().values()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if id(weight) in stored:
                continue
            random = torch.Generator().manual_seed(crc32(name.encode()))
            # or what experts make, and their gradients, would be too small to be compared
            scale = 0.25 if ".experts." in name else 0.05
            whole = scale * torch.randn(weight.shape, generator=random)
            mine = part_of(name, whole, recipe.parallel, rank)
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.copy_(mine)
        for name, module in coded.items():
            random = torch.Generator().manual_seed(crc32(name.encode()))
            dense = module.empty_dense()
            module.store(dense.copy_(0.05 * torch.randn(dense.shape, generator=random)))


def count(recipe: Recipe, labels: torch.Tensor) -> int:
    """What a loss is divided by: target tokens, pairs or rated answers of all ranks."""
    learned = (labels != -100).any(-1)
    if recipe.prefers:
        return int(learned[:, ::2].sum())
    return int(learned.sum()) if recipe.rates else int((labels != -100).sum())


def batch_of(
    recipe: Recipe, tokens: torch.Tensor, labels: torch.Tensor, here: slice, columns: list[int],
    places: torch.Tensor | None,
) -> Batch:  # fmt: skip
    """A rank's part of a global micro-batch, with what its objective reads beside the rows."""
    reference = context = rated = None
    if recipe.preference.reference == "precomputed":
        reference = torch.linspace(-60, -50, len(tokens))[here].contiguous()
        if recipe.rates:  # near the policy's, and above those of other answers: no baseline of 0
            reference, below = reference - 120, reference - 130
    if recipe.scores:  # rows end on different ranks of those that share their tokens
        ends = torch.arange(len(tokens)) * 7 % tokens.shape[1]
        labels = torch.full_like(labels, -100).scatter_(1, ends[:, None], 1)
    if recipe.learns == "conversations":
        whole = torch.full_like(labels, -100)
        whole[::2, :5] = tokens.roll(-1, dims=1)[::2, :5]
        labels = labels.clone()
        labels[:, :5] = -100
        context = whole[here]
        context = context[:, columns].contiguous()
    if recipe.rates:
        rated = RatedBatch((torch.arange(len(tokens)) % 3 == 0)[here].contiguous())
        if recipe.mismatches:
            others = (x.roll(1, 0)[here][:, columns].contiguous() for x in (tokens, labels))
            rated = RatedBatch(
                rated.desirable, next(others), next(others), None if reference is None else below
            )
    return Batch(
        tokens[here][:, columns].contiguous(), labels[here][:, columns].contiguous(), places,
        reference=reference, context=context, beside=77.0, rated=rated,
    )  # fmt: skip


def run(recipe: Recipe, rank: int) -> dict[str, Any]:
    """Two steps on this rank's rows of a batch drawn for all ranks; the gradients of both.

    Ranks that share products, and stages, have the same rows, ranks that share rows their tokens
    of them.
    """
    columns = [*chain(*own_parts(recipe.sequence_length, recipe.parallel, rank))]
    places = torch.tensor([columns]) if recipe.parallel.cp > 1 else None
    rank, world = recipe.parallel.share(rank), recipe.parallel.dp
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
    losses, norms, rewards = [], [], []
    rows = recipe.micro_batch
    for number in range(2):
        random = torch.Generator().manual_seed(number)
        shape = (recipe.accumulation, rows * world, recipe.sequence_length)
        tokens = torch.randint(0, 250, shape, generator=random)
        labels = tokens.roll(-1, dims=2)
        labels[:, 0, : number + 3] = -100  # ranks differ in how many tokens they predict
        here = slice(rank * rows, (rank + 1) * rows)
        batches = [batch_of(recipe, t, y, here, columns, places)
                   for t, y in zip(tokens, labels, strict=True)]  # fmt: skip
        if recipe.optimizer.in_backward:
            seen.append({})
        torch.manual_seed(number)  # of noise, which is the same on every mesh
        result = step(built, batches, count(recipe, labels))
        losses.append(result.loss.item())
        rewards.append(None if result.rewards is None else result.rewards.tolist())
        norms.append(None if result.grad_norm is None else result.grad_norm.item())
    held_out, targets = evaluate(built, batches[0])
    return {"rewards": rewards, "losses": losses, "norms": norms, "gradients": seen,
            "evaluation": (held_out.item(), targets.item())}  # fmt: skip


@contextmanager
def graphs_one_by_one() -> Iterator[None]:
    """Compiled blocks run their graphs operator by operator, as certificates trace them: nobody
    sees what the compiler's own kernels allocate, and they take a minute to be made."""
    made: dict[Any, Any] = {}

    def cut(function: Any, **options: Any) -> Partitioned:
        return Partitioned(function, options.get("options", {}), made)

    compile_, torch.compile = torch.compile, cut
    try:
        yield
    finally:
        torch.compile = compile_


def answer(recipe: Recipe, rank: int) -> dict[str, Any]:
    with graphs_one_by_one() if recipe.compile == "blocks" else nullcontext():
        return _answer(recipe, rank)


@contextmanager
def routed_as_certified(parallel: Parallel) -> Iterator[None]:
    """The first rank of those that share experts receives `ep_imbalance` of what each sends, the
    others alike what is left, whatever the router chose. Of what a step holds, not what it learns.
    """
    plain = experts_module.run_experts

    def run(experts: Any, hidden: Any, chosen: Any, shares: Any) -> Any:
        with _disable_current_modes():
            own, rows = experts.num_experts // parallel.ep, torch.arange(chosen.numel())
            first = round(len(rows) * parallel.ep_imbalance / parallel.ep)
            others = own + (rows - first) % (experts.num_experts - own)
            chosen.data.copy_(torch.where(rows < first, rows % own, others).view_as(chosen))
        return plain(experts, hidden, chosen, shares)

    experts_module.run_experts = run
    try:
        yield
    finally:
        experts_module.run_experts = plain


def _answer(recipe: Recipe, rank: int) -> dict[str, Any]:
    routed = routed_as_certified(recipe.parallel) if recipe.parallel.ep > 1 else nullcontext()
    if recipe.samples:
        with routed:
            held = sampled_ranks.watch(*build_watched(recipe, fill))
        return {**held, **_run_sampled(recipe, rank)}
    with routed:
        live = watch_real_step(recipe, worst_shapes(recipe), fill=fill, inside=without_gloo)
    phases = {p: n for p, n in live.peaks.items() if p is not Phase.LOAD}
    kinds = {phase: live.ledger().by_kind(phase) for phase in phases}
    return {"phases": phases, "kinds": kinds, **run(recipe, rank)}


def _run_sampled(recipe: Recipe, rank: int) -> dict[str, Any]:
    model = build_model(recipe, "cpu")
    fill(model, recipe)
    return sampled_ranks.run(recipe, model, rank)


def alone(recipe: Recipe) -> dict[str, Any]:
    """The same global batch in this process, without sharding."""
    world = recipe.parallel.dp
    whole = replace(
        recipe, parallel=Parallel(), micro_batch=recipe.micro_batch * world, offload="none"
    )
    if recipe.samples:
        return _run_sampled(whole, 0)
    with graphs_one_by_one() if recipe.compile == "blocks" else nullcontext():
        return run(whole, 0)


def be_rank(rank: int, world: int, recipes: list[Recipe], folder: Path) -> None:
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=store)
    answers = pickle.dumps([answer(recipe, rank) for recipe in recipes])
    (folder / f"{world}-{rank}").write_bytes(answers)
    dist.destroy_process_group()


def fork(rank: int, world: int, recipes: list[Recipe], folder: Path) -> int:
    """A process that becomes the rank."""
    child = os.fork()
    if child:
        return child
    try:
        be_rank(rank, world, recipes, folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def all_end(ranks: list[int]) -> bool:
    """Whether all end well; as soon as one is lost, the others are ended."""
    for _ in ranks:
        _, status = os.wait()
        if status:
            for rank in ranks:
                with suppress(ProcessLookupError):  # it has ended, too
                    os.kill(rank, signal.SIGKILL)
            return False
    return True


def main() -> None:
    folder = Path(sys.argv[1])
    assert torch.get_num_threads() == 1, "OMP_NUM_THREADS=1 is missing"
    warnings.simplefilter("error")
    recipes: list[Recipe] = pickle.loads((folder / "cases").read_bytes())
    for recipe in recipes:
        import_for(recipe)  # once, and not in each rank
    gc.collect()
    gc.freeze()  # each step begins with a collection: 0.3 s less without the libraries
    for world in sorted({recipe.parallel.world for recipe in recipes}):
        of_it = [recipe for recipe in recipes if recipe.parallel.world == world]
        if not all_end([fork(rank, world, of_it, folder) for rank in range(world)]):
            sys.exit("a rank was lost")


if __name__ == "__main__":
    main()
