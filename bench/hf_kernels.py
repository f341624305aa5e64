"""Liger-Kernel's and cut-cross-entropy's own code in Hugging Face's classes, its kernels left out.

    PYTHONPATH=src:LIGER:CUT_CROSS_ENTROPY:TRITON python bench/hf_kernels.py LIGER_VERSION COMMIT

What they allocate and save is Python, and runs here; a kernel that Triton would launch writes into
tensors that are there, and is passed over. Blocks: a micro-batch of a small model on the CPU, with
one multiprocessor. Losses: on fake CUDA tensors, where Liger takes another way than on a CPU.
Writes bench/results/hf_kernels.json, which tests/plan/frameworks/test_hf_kernels.py holds the
descriptions to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from memfit.catalog import find_device
from memfit.certify.tracing.fake_device import fake_device
from size_oracle import Births, adapted, highest

RESULTS = Path(__file__).resolve().parent / "results" / "hf_kernels.json"
MODEL = {
    "vocab_size": 768, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROWS, TOKENS = 2, 40
ALL = "rope,rms_norm,swiglu"
BLOCKS: tuple[dict[str, Any], ...] = (
    {"liger": ALL},
    {"liger": ALL, "vocab_size": 32},  # the highest instant is in a block
    {"liger": ALL, "vocab_size": 32, "dtype": "float32"},
    {"liger": ALL, "vocab_size": 32, "lora": True},
    {"liger": ALL, "vocab_size": 32, "checkpointing": True},
    {"liger": "rope", "vocab_size": 32},
    {"liger": "rms_norm", "vocab_size": 32},
    {"liger": "swiglu", "vocab_size": 32},
    {"liger": ALL, "vocab_size": 32, "family": "qwen3"},
    {"liger": ALL, "vocab_size": 32, "family": "qwen2"},
    {"liger": ALL, "vocab_size": 32, "family": "mistral"},
)
LOSSES: tuple[dict[str, Any], ...] = tuple(
    {"loss": loss, "tokens": 2048, "hidden": 256, "vocab": 4096, **changes}
    for loss, each in (
        ("chunked", ({}, {"head": False}, {"autocast": True, "dtype": "float32"},
                     {"autocast": True, "dtype": "float32", "head": False}, {"vocab": 300})),
        ("fused", ({}, {"head": False}, {"vocab": 300})),
    )
    for changes in each
)  # fmt: skip


class Passed:
    """A Triton kernel that nothing launches."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def pass_over(*modules: Any) -> None:
    """Put `Passed` in place of each Triton kernel of the modules."""
    import triton

    kinds = (triton.runtime.JITFunction, triton.runtime.Autotuner, triton.runtime.Heuristics)
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, kinds):
                setattr(module, name, Passed())


def find_kernels() -> None:
    """The modules that launch kernels."""
    import cut_cross_entropy.cce
    import cut_cross_entropy.cce_backward
    import cut_cross_entropy.cce_lse_forward
    import cut_cross_entropy.indexed_dot
    import liger_kernel.ops.cross_entropy
    import liger_kernel.ops.fused_linear_cross_entropy
    import liger_kernel.ops.rms_norm
    import liger_kernel.ops.rope
    import liger_kernel.ops.swiglu

    pass_over(
        liger_kernel.ops.cross_entropy, liger_kernel.ops.fused_linear_cross_entropy,
        liger_kernel.ops.rms_norm, liger_kernel.ops.rope, liger_kernel.ops.swiglu,
        cut_cross_entropy.cce_backward, cut_cross_entropy.cce_lse_forward,
        cut_cross_entropy.indexed_dot,
    )  # fmt: skip
    # torch.compile'd there
    cut_cross_entropy.cce.sort_logit_avg = lambda x: torch.argsort(x).to(torch.int32)


def run_blocks(case: dict[str, Any]) -> int:
    """Bytes that a micro-batch adds at its highest instant."""
    import liger_kernel.transformers as liger
    import transformers

    family = case.get("family", "llama")
    name = {"llama": "Llama", "qwen3": "Qwen3", "qwen2": "Qwen2", "mistral": "Mistral"}[family]
    asked = case["liger"].split(",")
    names = MODEL | {"vocab_size": case.get("vocab_size", MODEL["vocab_size"])}
    if family == "qwen3":
        names["head_dim"] = 16
    config = getattr(transformers, f"{name}Config")(
        **names, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=False
    )
    made = getattr(transformers, f"{name}ForCausalLM")
    with mock.patch.dict(vars(sys.modules[made.__module__])):  # which Liger changes
        getattr(liger, f"apply_liger_kernel_to_{family}")(
            rope="rope" in asked, rms_norm="rms_norm" in asked, swiglu="swiglu" in asked,
            fused_linear_cross_entropy=False,
        )  # fmt: skip
        model: Any = made(config).to(getattr(torch, case.get("dtype", "bfloat16")))
        lora, again = bool(case.get("lora")), bool(case.get("checkpointing"))
        model = adapted(model, lora=lora, checkpointing=again)
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
        labels = ids.clone()
        with Births(*model.parameters(), *model.buffers(), ids, labels) as births:
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
    return highest(births)


def run_loss(case: dict[str, Any]) -> int:
    """Bytes that the loss and its backward add, from the last hidden states on."""
    from cut_cross_entropy.transformers.utils import PatchOptions, apply_lce
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    told = PatchOptions("cce", "mean", "auto", False, False, True, True, False)
    dtype, width = getattr(torch, case.get("dtype", "bfloat16")), case["hidden"]
    patches = [
        # what is read of values, which fake tensors do not have; nothing is counted of them
        mock.patch.object(Tensor, "item", return_value=case["tokens"]),
        mock.patch.object(torch, "equal", return_value=True),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(Tensor, "nonzero", lambda self: self.new_empty(
            (self.numel(), self.ndim), dtype=torch.int64)),
        mock.patch.object(Tensor, "data_ptr", return_value=0),
    ]  # fmt: skip
    for patch in patches:
        patch.start()
    try:
        with fake_device(find_device("h100-sxm")):
            hidden = torch.empty(1, case["tokens"], width, dtype=dtype, device="cuda")
            hidden.requires_grad_()
            head = nn.Parameter(
                torch.empty(case["vocab"], width, dtype=dtype, device="cuda"),
                requires_grad=case.get("head", True),
            )
            labels = torch.empty(1, case["tokens"], dtype=torch.int64, device="cuda")
            lowered = torch.autocast("cuda", torch.bfloat16, enabled=case.get("autocast", False))
            with Births(hidden, head, labels) as births:
                with lowered:
                    if case["loss"] == "chunked":
                        loss = LigerForCausalLMLoss(hidden, head, labels, width)
                    else:
                        loss = apply_lce(hidden, head, labels, told)
                loss.backward()
    finally:
        for patch in patches:
            patch.stop()
    return highest(births)


def main() -> None:
    find_kernels()
    found: dict[str, Any] = {
        "liger_kernel": sys.argv[1], "cut_cross_entropy": sys.argv[2], "torch": torch.__version__,
        "model": MODEL, "rows": ROWS, "tokens": TOKENS, "blocks": [], "losses": [],
    }  # fmt: skip
    for case in BLOCKS:
        found["blocks"].append(case | {"rise": run_blocks(case)})
        print(found["blocks"][-1])
    for case in LOSSES:
        found["losses"].append(case | {"rise": run_loss(case)})
        print(found["losses"][-1])
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
