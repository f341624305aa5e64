"""What each operator's kernel takes from CUDA's caching allocator, beside what its rule says."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from memfit import api
from memfit.certify.tracing.workspace import PRODUCTS, RULES
from memfit.meta.workspace import find_grid
from on_gpu.rows import Place


def key_of(operator: str, shapes: list[str]) -> str:
    """What a row of `Probe.seen` is found by."""
    return f"{operator} {', '.join(shapes[:4])}"[:300]


class Probe(TorchDispatchMode):
    """Weighs every operator that runs within it; `seen` has one row an operator and its shapes.

    weigh: whether there is an allocator to ask; else the rules' bytes alone are noted.
    """

    def __init__(self, place: Place, *, weigh: bool = True) -> None:
        super().__init__()
        cuda = place.device == "cuda"
        self._cuda = cuda and weigh
        self._grid = find_grid(api.find_device(place.row)) if cuda else None
        self.seen: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(operator)
        rule = RULES.get(name)
        stated = 0 if rule is None else rule.nbytes(args, self._grid)
        before = self._start()
        out = operator(*args, **(kwargs or {}))
        inside, kept = self._weigh(before, out)
        if stated or inside or (kept and name in PRODUCTS):
            self._note(name, args, stated=stated, inside=inside, kept=kept, ruled=rule is not None)
        return out

    def _start(self) -> int:
        if not self._cuda:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())

    def _weigh(self, before: int, out: Any) -> tuple[int | None, int | None]:
        """Bytes above the operator's results at its worst, and above them when it has returned."""
        if not self._cuda:
            return None, None
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        results = {
            t.untyped_storage().data_ptr(): -(-t.untyped_storage().nbytes() // 512) * 512
            for t in tree_flatten(out)[0]
            if isinstance(t, torch.Tensor) and t.is_cuda
        }
        return int(peak - after), max(0, int(after - before - sum(results.values())))

    def _note(self, name: str, args: Any, **found: Any) -> None:
        shapes = [
            f"{str(t.dtype).removeprefix('torch.')} {'x'.join(map(str, t.shape))}"
            for t in tree_flatten(args)[0]
            if isinstance(t, torch.Tensor)
        ]
        row = self.seen.setdefault(
            key_of(name, shapes), {"operator": name, "shapes": shapes[:4], "count": 0}
        )
        row["count"] += 1
        for what, value in found.items():
            old = row.get(what)
            row[what] = value if old is None else max(old, value)
