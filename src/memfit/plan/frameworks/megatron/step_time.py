"""Megatron-LM's arguments that change how long a step takes, and whose bytes are not described.

Their names are Megatron-LM's own (megatron/training/arguments.py), with its defaults.
"""

from __future__ import annotations

from memfit.core.errors import MemoryUnknown
from memfit.plan.frameworks import Job, Knob

CLOCK_KNOBS = {
    "version": Knob(default=0, means="year and month of the code that ran; 0: as it was read"),
    "fp8_recipe": Knob(
        default="delayed", means="how FP8 values are scaled",
        values=("delayed", "tensorwise", "blockwise", "mxfp8"),
    ),
    "overlap_grad_reduce": Knob(default=False, means="gradients are reduced during the backward"),
    "overlap_param_gather": Knob(default=False, means="weights are gathered during the forward"),
    "tp_comm_overlap": Knob(default=False, means="tp's collectives run beside its products"),
    "moe_token_dispatcher_type": Knob(
        default="alltoall", means="how tokens reach their experts",
        values=("allgather", "alltoall", "deepep", "hybridep"),
    ),
    "overlap_moe_expert_parallel_comm": Knob(
        default=False, means="tokens travel while another micro-batch is computed"
    ),
    "cuda_graph_scope": Knob(
        default="", means="what CUDA graphs replay: full_iteration, or modules, comma-separated"
    ),
    "use_megatron_fsdp": Knob(default=False, means="weights and gradients are cut too (zero: 3)"),
    "cpu_offloading_num_layers": Knob(default=0, means="blocks whose activations wait on the CPU"),
    "mtp_num_layers": Knob(default=0, means="blocks that predict a further token"),
    "pipeline_model_parallel_layout": Knob(default="", means="blocks of each chunk, written out"),
}  # fmt: skip
APART = {  # knobs that move bytes in ways that are not read -> how to name them
    "tp_comm_overlap": "user buffers of overlapped tensor parallelism",
    "cuda_graph_scope": "CUDA graphs, which keep pools of their own",
    "use_megatron_fsdp": "Megatron-FSDP",
    "cpu_offloading_num_layers": "activations offloaded by block",
    "mtp_num_layers": "multi-token prediction",
    "pipeline_model_parallel_layout": "a pipeline layout written out",
    "overlap_moe_expert_parallel_comm": "two micro-batches in turn",
}


def refuse_bytes(job: Job) -> None:
    """Raise MemoryUnknown for a step that is described for its time alone."""
    precision = job.recipe.precision
    if precision == "fp4-mixed":
        raise MemoryUnknown("the copies of weights of `precision: fp4-mixed` are not described")
    scaling = job.option("fp8_recipe")
    if precision == "fp8-mixed" and scaling != "delayed":
        raise MemoryUnknown(
            f"the copies of weights of `options.fp8_recipe: {scaling}` are not described"
        )
    for name, what in APART.items():
        if job.option(name):
            raise MemoryUnknown(f"`options.{name}: {job.option(name)}`: {what}: not described")
