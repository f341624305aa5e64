"""What a compiled block saves for its backward. Imports torch's compiler: not for every run.

The compiler's partitioner takes the smallest cut through a block's forward and backward of what
may be recomputed (min-cut rematerialisation, AOTAutograd). Three of its rules forbid that to
elementwise operations: those whose result a product of the backward reads, those that end a long
chain of them, those read far away. Without these rules it saves only the block's input, its
products that backward reads, its attention and the norms' numbers, one a row: the bytes of lean
blocks. It recomputes norms' outputs, gated units and casts of weights, which the compiler fuses at
no measurable cost (`bench/lean.py`).
"""

from __future__ import annotations

from typing import Any

from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

_LIFTED = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_used_far_apart": False,
}


class _Partition(CustomPartitionerFn):
    """torch's partitioner without the rules above; they stay in force for all other code."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Any, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        with config.patch(_LIFTED):
            return min_cut_rematerialization_partition(gm, joint_inputs, **options)

    def uuid(self) -> str:
        """Return the key of torch's cache of compilations: one per set of rules."""
        return f"memfit {sorted(_LIFTED)}"


PARTITION = _Partition()
