"""Plans that span what exports have to say: methods, quantised bases, meshes, recomputing."""

from __future__ import annotations

from functools import cache
from typing import Any

from memfit import api
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.export.target import Export
from memfit.records import from_data
from memfit.records.request import Request
from memfit.records.results import Plan

LLAMA = {"model": "llama-3.1-8b", "task": {"sequence_length": 4096, "steps": 100}}
SMALL = {"model": "qwen3-0.6b", "task": {"sequence_length": 1024, "steps": 100}}
H100 = {"device": "h100-sxm", "count": 8}
LORA = {"method": "lora", "lora": {"rank": 8, "alpha": 16, "dropout": 0.05}}
QLORA = {**LORA, "base_format": "nf4", "lora": {"rank": 8, "targets": ["all-linear"]}}
REQUESTS: dict[str, dict[str, Any]] = {
    "own-full": {**SMALL, "method": "full", "hardware": {"device": "h100-sxm"}},
    "own-lora": {**LLAMA, **LORA, "hardware": {"device": "rtx-4090"}, "precision": "bf16"},
    "own-qlora": {
        **LLAMA, "method": "lora", "lora": {"targets": "all-linear"}, "base_format": "nf4",
        "hardware": {"device": "rtx-4090"}, "quantisation": {"double": True},
    },
    "own-dpo": {
        **SMALL, **LORA, "hardware": {"device": "h100-sxm"}, "precision": "bf16",
        "task": {"objective": "dpo", "sequence_length": 1024, "steps": 50, "global_batch": 8},
        "preference": {"beta": 0.2, "label_smoothing": 0.1}, "micro_batch": 2,
        "loss": "plain", "recompute": "full",
    },
    "own-dpo-qlora": {
        **SMALL, "method": "lora", "lora": {"targets": "all-linear"}, "base_format": "nf4",
        "hardware": {"device": "rtx-4090"}, "precision": "bf16",
        "task": {"objective": "dpo", "sequence_length": 512, "steps": 50, "global_batch": 4},
        "preference": {"reference": "precomputed"}, "micro_batch": 4, "loss": "plain",
        "recompute": "none", "optimizer": {"name": "adamw8bit-bnb"},
        "quantisation": {"double": True},
    },
    "own-freeze": {
        **SMALL, "method": "freeze", "freeze": {"last_blocks": 2},
        "hardware": {"device": "h100-sxm"},
    },
    "hf-full-recompute": {
        **SMALL, "framework": "hf-trainer", "recompute": "full", "micro_batch": 2,
        "hardware": {"device": "h100-sxm"},
    },
    "hf-lora-ddp": {**LLAMA, **LORA, "framework": "hf-trainer", "hardware": H100,
                    "parallel": {"dp_replicate": 8}},
    "hf-qlora": {**LLAMA, **QLORA, "framework": "hf-trainer",
                 "hardware": {"device": "a100-sxm-80"}, "options": {"double_quantisation": True},
                 "optimizer": {"name": "adamw8bit", "warmup_steps": 10}},
    "hf-lora-fsdp": {**LLAMA, **LORA, "framework": "hf-trainer", "hardware": H100,
                     "parallel": {"dp_shard": 8}, "recompute": "full"},
    "hf-full-fsdp2": {**LLAMA, "framework": "hf-trainer", "hardware": H100,
                      "precision": "bf16-mixed", "parallel": {"dp_shard": 8}, "recompute": "full",
                      "options": {"fsdp_version": 2}},
    "trl-qlora": {**LLAMA, **QLORA, "framework": "trl", "hardware": {"device": "h100-sxm"},
                  "task": {"objective": "sft", "sequence_length": 2048, "steps": 50}},
    "trl-full-fsdp": {**LLAMA, "framework": "trl", "hardware": H100, "precision": "bf16",
                      "parallel": {"dp_shard": 8}},
    "deepspeed-zero2": {**LLAMA, "framework": "deepspeed", "hardware": H100,
                        "parallel": {"dp_shard": 8, "zero": 2}},
    "deepspeed-zero3": {
        **LLAMA, "framework": "deepspeed", "hardware": {**H100, "nodes": 2},
        "parallel": {"dp_shard": 16}, "recompute": "full", "task": {"global_batch": 32},
    },
    "deepspeed-zero1-lora": {**LLAMA, **LORA, "framework": "deepspeed", "hardware": H100,
                             "parallel": {"dp_shard": 8, "zero": 1}},
    "deepspeed-zero2-host": {**LLAMA, "framework": "deepspeed", "hardware": H100,
                             "parallel": {"dp_shard": 8, "zero": 2}, "offload": "optimizer",
                             "optimizer": {"schedule": "linear", "warmup_steps": 10}},
    "deepspeed-zero3-host": {**LLAMA, "framework": "deepspeed", "hardware": H100,
                             "parallel": {"dp_shard": 8}, "offload": "parameters",
                             "recompute": "full", "options": {"prefetch_bucket_size": 10**6}},
    "torchtitan-fsdp": {**LLAMA, "framework": "torchtitan", "hardware": H100,
                        "parallel": {"dp_shard": 8}, "compile": "blocks"},
    "torchtitan-3d": {
        **LLAMA, "framework": "torchtitan", "hardware": {**H100, "nodes": 2}, "recompute": "full",
        "parallel": {"dp_shard": 4, "tp": 2, "sequence_parallel": True, "pp": 2},
        "task": {"sequence_length": 8192, "global_batch": 64},
    },
    "megatron-3d": {
        **LLAMA, "framework": "megatron", "hardware": {**H100, "nodes": 2}, "recompute": "full",
        "parallel": {"dp_shard": 4, "zero": 1, "tp": 2, "sequence_parallel": True, "pp": 2},
        "task": {"global_batch": 64}, "options": {"overlap_grad_reduce": True},
    },
    "megatron-experts": {
        "model": "mixtral-8x7b", "framework": "megatron", "hardware": {**H100, "nodes": 2},
        "recompute": "selective", "task": {"sequence_length": 4096, "global_batch": 64},
        "parallel": {"dp_shard": 4, "zero": 1, "tp": 2, "sequence_parallel": True, "pp": 2,
                     "virtual_pp": 2, "ep": 4},
    },
}  # fmt: skip


def find_request(name: str) -> Request:
    return from_data(REQUESTS[name], Request, source=name)


@cache
def find_plan(name: str) -> Plan:
    request = find_request(name)
    own = request.framework == "memfit"
    return api.plan(request, levers=False) if own else api.predict(request)


@cache
def find_export(name: str, target: str) -> Export | None:
    """What is written of a plan; None where it is refused."""
    try:
        return api.export(find_plan(name), target)
    except (InvalidRequest, DoesNotFit):
        return None
