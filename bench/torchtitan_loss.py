"""torchtitan's loss of chunks, run on the CPU: what it adds to what is alive before it.

    PYTHONPATH=src:TORCHTITAN:ITS_DEPENDENCIES python bench/torchtitan_loss.py VERSION

`ChunkedLossWrapper` as torchtitan has it, over FSDP2's units as its `apply_fsdp` makes them: the
embedding, a block, and the final norm with the head, or, tied, all three of the ends. One rank of
a world that communicates with nobody; of tensor parallelism, the head's rows of a rank and the
loss of cut logits. A second step is measured, without the rank's share of reduced gradients, which
the description counts among the states. Writes bench/results/torchtitan_loss.json, which
tests/plan/frameworks/test_torchtitan.py holds the description to.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.certify.tracing.world import fake_world
from memfit.records.recipe import Parallel

RESULTS = Path(__file__).resolve().parent / "results" / "torchtitan_loss.json"
BASE = {"tokens": 128, "hidden": 48, "vocab": 960, "chunks": 4, "ranks": 4, "tp": 1, "tied": False}
CASES: tuple[dict[str, Any], ...] = (
    {},  # the reduction
    {"tokens": 2048},  # the loss
    {"tokens": 2048, "chunks": 8},
    {"tokens": 512, "ranks": 16},
    {"tokens": 2048, "tp": 2},
    {"tokens": 128, "tp": 4},
    {"tokens": 2048, "tied": True},
    {"tokens": 128, "tied": True},
)


class Level(TorchDispatchMode):
    """Bytes of storages made since it began, as large as they are now; the highest of a time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}
        self.shares: set[int] = set()
        self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(issubclass(one, DTensor) for one in types):
            return out
        if "reduce_scatter" in str(func):
            self.shares.add(args[0].untyped_storage()._cdata)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        self.highest = max(self.highest, self.now())
        return out

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.made:
            self.made[key] = weakref.ref(storage, lambda _: self.gone(key))

    def gone(self, key: int) -> None:
        del self.made[key]
        self.shares.discard(key)

    def now(self) -> int:
        alive = ((key, one()) for key, one in self.made.items())
        return sum(s.nbytes() for key, s in alive if s is not None and key not in self.shares)


class Ends(nn.Module):
    """A decoder of one product a block; the class that is on trial is the loss."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        hidden = case["hidden"]
        self.tok_embeddings = nn.Embedding(case["vocab"] // case["tp"], hidden)
        self.block = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, case["vocab"] // case["tp"], bias=False)
        if case["tied"]:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.block(self.tok_embeddings(tokens)))


def share(model: Ends, case: dict[str, Any]) -> None:
    told: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (case["ranks"],)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    ends: list[nn.Module] = [model.norm, model.lm_head]
    if case["tied"]:
        fully_shard([model.tok_embeddings, *ends], **told, reshard_after_forward=False)
    else:
        fully_shard(model.tok_embeddings, **told)
        fully_shard(ends, **told, reshard_after_forward=False)
    fully_shard(model.block, **told)
    fully_shard(model, **told)


def measure(case: dict[str, Any]) -> int:
    """Bytes that a step's loss adds at its highest instant."""
    import torch.distributed as dist
    from torchtitan.components import loss as titan

    def cut(logits: Tensor, labels: Tensor, tokens: Tensor, **_: Any) -> Any:
        each = titan._LossParallelCrossEntropy.apply(
            logits.float(), labels, dist.new_group(list(range(case["tp"]))), case["vocab"], "sum"
        )
        return each / tokens, {}

    model = Ends(case)
    share(model, case)
    loss_fn = titan.ChunkedLossWrapper(titan.ChunkedLossWrapper.Config(num_chunks=case["chunks"]))
    loss_fn.set_lm_head(model.lm_head)
    if case["tp"] > 1:
        loss_fn.loss_fn = cut  # type: ignore[assignment]
    tokens = torch.zeros(case["tokens"], dtype=torch.int64)
    count = torch.tensor(float(case["tokens"]))
    rise = 0
    with Level() as level:
        for _ in range(2):
            hidden = model(tokens)
            gc.collect()
            before = level.now()
            level.highest = 0
            loss, _ = loss_fn(hidden, tokens, count)
            rise = level.highest - before
            del hidden
            loss.backward()
            del loss
            model.zero_grad(set_to_none=True)
    return rise


def run() -> list[dict[str, Any]]:
    rows = []
    for changes in CASES:
        case = BASE | changes
        world = Parallel(dp_shard=case["ranks"])
        with fake_world(world, 0, "cpu", lambda _: None, lambda *_: None):
            rows.append(case | {"rise": measure(case)})
        print(rows[-1])
    return rows


if __name__ == "__main__":
    found = {"source": f"pytorch/torchtitan {sys.argv[1]}", "torch": torch.__version__}
    RESULTS.write_text(json.dumps(found | {"rows": run()}, indent=1) + "\n", encoding="utf-8")
