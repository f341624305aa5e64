"""What a compiled block keeps for its backward. Imports torch's compiler: not for every run.

The compiler's partitioner takes the smallest cut through a block's forward and backward of what
may be computed again (min-cut rematerialisation, AOTAutograd). Three of its rules forbid that to
elementwise operations: those whose result a product of the backward reads, those that end a long
chain of them, those read again far away. Without these rules all that is kept is the block's input,
its products that backward reads, its attention and the norms' numbers, one a row: the bytes of lean
blocks. What is made again is norms' outputs, gated units and casts of weights; it is fused by the
compiler and costs no measurable time (`bench/lean.py`).
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
        self, gm: GraphModule, joint_inputs: Any, **told: Any
    ) -> tuple[GraphModule, GraphModule]:
        with config.patch(_LIFTED):
            return min_cut_rematerialization_partition(gm, joint_inputs, **told)

    def uuid(self) -> str:
        """What compilations are kept under in torch's cache: one per set of rules."""
        return f"memfit {sorted(_LIFTED)}"


PARTITION = _Partition()
