"""The Trainer's optimizers: the states that transformers' own choice of a class makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from transformers.trainer_optimizer import (
    OptimizerContext,
    _get_bitsandbytes_optimizer,
    _get_torchao_optimizer,
)

from memfit.certify.tracing.fake_device import fake_device
from memfit.core.errors import InvalidRequest
from memfit.meta.meter import block_size
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request
from size_oracle import adapted

MODEL: dict[str, Any] = {  # weights below 4096 elements, ragged ones, and some to be paged
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 136, "intermediate_size": 800,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "head_dim": 34,
}  # fmt: skip
H100 = find_device("h100-sxm")
CHANGES = ("method", "lora", "base_format")  # of the request; what else is named is an option


def read(name: str, precision: str = "bf16", implementation: str = "fused", **options: Any) -> Any:
    changes = {key: options.pop(key) for key in CHANGES if key in options}
    asked = {
        "framework": "hf-trainer", "model": MODEL, "hardware": {"device": "h100-sxm"},
        "task": {"sequence_length": 32, "global_batch": 1, "packing": False}, "micro_batch": 1,
        "precision": precision, "method": "full", "options": options,
        "optimizer": {"name": name, "implementation": implementation},
    }  # fmt: skip
    return read_defaults(from_data(asked | changes, Request, source="request"))


def states(*args: Any, **options: Any) -> int:
    recipe, model, _ = read(*args, **options)
    found = predict_ledger(recipe, model, H100).at(Phase.OPTIMIZER_STEP)
    return sum(e.nbytes for e in found if e.kind is Kind.OPTIMIZER_STATE)


def make(
    optim: str, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Any, list[torch.nn.Parameter]]:
    """transformers' own class and arguments, over weights of the model's shapes."""
    _, model, _ = read("adamw")
    weights = [
        torch.nn.Parameter(torch.zeros(w.shape, dtype=dtype, device=device)) for w in model.weights
    ]
    context = OptimizerContext(
        args=TrainingArguments(optim=optim, use_cpu=True), model=None, optimizer_kwargs={},
        adam_kwargs={}, optim_args={},
    )  # fmt: skip
    choose = _get_torchao_optimizer if "torch" in optim else _get_bitsandbytes_optimizer
    made, told = choose(context)
    return made(weights, **told), weights


def blocks(*tensors: torch.Tensor) -> int:
    return sum(block_size(t.numel() * t.element_size()) for t in tensors)


@pytest.mark.parametrize(
    ("optim", "name"), [("adamw_torch_8bit", "adamw8bit"), ("adamw_torch_4bit", "adamw4bit")]
)
def test_torchaos_moments(optim: str, name: str) -> None:
    optimizer, weights = make(optim, torch.bfloat16)
    held = coded = 0
    for weight in weights:
        for signed in (True, False):
            moment = optimizer._new_buffer(weight, signed)
            inner = getattr(moment, "tensor_attrs", ())
            coded += bool(inner)
            held += blocks(*([getattr(moment, one) for one in inner] or [moment]))
    assert 0 < coded < 2 * len(weights)
    assert states(name, adamw8bit="torchao") == held


def forget_overrides(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bitsandbytes' one list of overrides in a process, empty until the test is over."""
    optim = pytest.importorskip("bitsandbytes.optim")
    monkeypatch.setattr(optim.GlobalOptimManager, "_instance", None)
    return optim.GlobalOptimManager.get_instance()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optim", ["paged_adamw_32bit", "paged_adamw_8bit", "adamw_8bit"])
def test_bitsandbytes_moments(
    optim: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    pages: list[torch.Tensor] = []

    def page(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        pages.append(torch.zeros(shape, dtype=dtype))
        return pages[-1]

    def fill(optimizer: Any) -> None:  # from values, which fake tensors do not have
        optimizer.name2qmap |= {n: torch.zeros(256) for n in ("dynamic", "udynamic")}

    manager = forget_overrides(monkeypatch)
    monkeypatch.setattr("bitsandbytes.optim.optimizer.Optimizer8bit.fill_qmap", fill)
    monkeypatch.setattr(functional, "get_paged", page)
    monkeypatch.setattr(functional, "fill", lambda tensor, value: None)
    there: dict[int, torch.Tensor] = {}
    with fake_device(H100):
        optimizer, weights = make(optim, dtype, "cuda")
        if "8bit" in optim:  # as the Trainer does: see below
            embedding = torch.nn.Module()
            embedding.weight = weights[0]
            manager.register_module_override(embedding, "weight", {"optim_bits": 32})
            optimizer.check_overrides()
        for index, weight in enumerate(weights):
            optimizer.init_state(optimizer.param_groups[0], weight, 0, index)
            kept = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
            there |= {id(t): t for t in kept if not any(t is one for one in pages)}
    assert bool(pages) == ("paged" in optim)
    precision = "bf16" if dtype is torch.bfloat16 else "fp32"
    name = "adamw" if "32" in optim else "adamw8bit"
    assert states(name, precision, paged="paged" in optim) == blocks(*there.values())


@pytest.mark.parametrize("saved", ["", "embed_tokens"])
def test_the_trainer_keeps_fp32_moments_of_embeddings(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the trained copy of one, too; its own optimizer over a real model, on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    forget_overrides(monkeypatch)
    model: Any = LlamaForCausalLM(LlamaConfig(**{k: MODEL[k] for k in MODEL if k != "model_type"}))
    changes: dict[str, Any] = {}
    if saved:
        model = adapted(model, lora=True, checkpointing=False, saved=saved)
        changes = {"method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
        changes |= {"modules_to_save": saved, "base_format": "fp32"}
    told = TrainingArguments(optim="adamw_8bit", use_cpu=True, output_dir=str(tmp_path))
    optimizer: Any = Trainer(model=model, args=told).create_optimizer()
    optimizer.check_overrides()
    held: dict[int, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, weight in enumerate(group["params"]):
            optimizer.init_state(group, weight, number, index)
            kept = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
            held |= {t.data_ptr(): t for t in kept}
    assert states("adamw8bit", "fp32", **changes) == blocks(*held.values())


@pytest.mark.parametrize(("stage", "option"), [(2, {}), (3, {}), (3, {"sub_group_size": 0})])
def test_zeros_flat_shares_of_bitsandbytes_moments(
    stage: int, option: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 ranks: what the Trainer decays is one group, the rest another; or each weight is one."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    forget_overrides(monkeypatch)
    _, model, _ = read("adamw")
    kinds = [
        [w.numel // 2 for w in model.weights if (len(w.shape) > 1) is m] for m in (True, False)
    ]
    pieces = [*kinds[0], *kinds[1]] if option else [sum(kind) for kind in kinds]
    flat = [torch.nn.Parameter(torch.zeros(size)) for size in pieces]
    optimizer = bitsandbytes.optim.AdamW8bit(flat)
    kept: dict[int, torch.Tensor] = {}
    pages: set[int] = set()
    for index, one in enumerate(flat):
        optimizer.init_state(optimizer.param_groups[0], one, 0, index)
        made = {k: v for k, v in optimizer.state[one].items() if torch.is_tensor(v)}
        kept |= {id(v): v for v in made.values()}
        pages |= {id(made[k]) for k in ("state1", "state2") if one.numel() >= 100_000}
    here, paged = (by_zero(stage, **option, paged=on) for on in (False, True))
    assert sum(e.nbytes for e in here if e.owner == "optimizer") == blocks(*kept.values())
    rest = blocks(*(v for k, v in kept.items() if k not in pages))
    assert sum(e.nbytes for e in paged if e.owner == "optimizer") == rest


def by_zero(stage: int, **options: Any) -> list[Any]:
    asked = {
        "framework": "deepspeed", "model": MODEL, "hardware": {"device": "h100-sxm", "count": 2},
        "task": {"sequence_length": 32, "global_batch": 2, "packing": False}, "micro_batch": 1,
        "method": "full", "parallel": {"dp_shard": 2, "zero": stage}, "options": options,
        "optimizer": {"name": "adamw8bit"},
    }  # fmt: skip
    recipe, model, _ = read_defaults(from_data(asked, Request, source="request"))
    found = predict_ledger(recipe, model, H100).at(Phase.OPTIMIZER_STEP)
    return [e for e in found if e.kind is Kind.OPTIMIZER_STATE]


@pytest.mark.parametrize(
    ("name", "implementation", "options", "message"),
    [
        ("adamw8bit", "foreach", {}, "has no `implementation: foreach`"),
        ("adamw", "foreach", {"paged": True}, "has no `implementation: foreach`"),
        ("adamw4bit", "fused", {"paged": True}, "bitsandbytes alone pages states"),
    ],
)
def test_what_the_trainer_cannot_have(
    name: str, implementation: str, options: dict[str, Any], message: str
) -> None:
    recipe, model, _ = read(name, implementation=implementation, **options)
    with pytest.raises(InvalidRequest, match=message):
        predict_ledger(recipe, model, H100)
