"""A rank of accelerate's FSDP, whose own code runs in a world that is not here; and predicted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.request import Request
from size_oracle import Births

TOKENS, ROWS, RANKS = 40, 2, 2
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 768, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
NEOX: dict[str, Any] = {  # whose norms autocast runs in fp32
    "model_type": "gpt_neox", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
HELD = (Kind.PARAMETERS, Kind.OPTIMIZER_STATE, Kind.INPUT, Kind.WORKSPACE)
LORA = {"method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
PASSES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE)


def ledger(
    vocab: int, accumulation: int = 1, *, version: int, ranks: int = RANKS, tokens: int = TOKENS,
    tied: bool = False, device: str = "cpu", **changes: Any,
) -> Ledger:  # fmt: skip
    """What is predicted; of a CPU, of tensors alone."""
    model = TINY | {"vocab_size": vocab, "tie_word_embeddings": tied}
    asked: dict[str, Any] = {
        "framework": "hf-trainer", "model": model, "micro_batch": ROWS,
        "hardware": {"device": device, "count": ranks}, "parallel": {"dp_shard": ranks},
        "task": {
            "sequence_length": tokens, "global_batch": ranks * ROWS * accumulation,
            "packing": False,
        },
        "precision": "bf16-mixed", "options": {"fsdp_version": version},
    }  # fmt: skip
    changes["options"] = {"padded": False} | changes.get("options", asked["options"])
    recipe, described, _ = read_defaults(from_data(asked | changes, Request, source="request"))
    return predict_ledger(recipe, described, find_device(device))


def rise(found: Ledger) -> int:
    """Bytes of the highest instant of the passes, above what is held."""
    return max(sum(e.nbytes for e in found.at(p) if e.kind not in HELD) for p in PASSES)


class Level(Births):
    """Bytes of storages as large as they are now: FSDP empties them and fills them again.

    known: not counted, and kept: another storage in the place of one that died would not be seen.
    """

    highest = 0

    def __init__(self, *known: Tensor, device: str = "cpu") -> None:
        super().__init__(*known)
        self.device = device
        self._kept = [t.untyped_storage() for t in known]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            counts = isinstance(tensor, Tensor) and tensor.device.type == self.device
            if counts and not isinstance(tensor, AsyncCollectiveTensor):  # which only wraps one
                self.see(tensor.untyped_storage())
        alive = [one() for one in self.alive.values() if one is not None]
        self.highest = max(self.highest, sum(s.nbytes() for s in alive if s is not None))
        return out


def make_model(
    vocab: int, *, dtype: torch.dtype = torch.float32, lora: bool = False,
    reentrant: bool | None = None, tied: bool = False, rank: int = 4,
) -> Any:  # fmt: skip
    """Hugging Face's class, with peft's adapters over 16 bits where asked.

    reentrant: how the model itself recomputes its blocks; None: not.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {k: v for k, v in TINY.items() if k != "model_type"} | {"vocab_size": vocab}
    config = LlamaConfig(
        **shape, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=tied
    )
    model: Any = LlamaForCausalLM(config).to(dtype)
    if lora:
        model = adapt(model, rank)
    if reentrant is not None:
        with warnings.catch_warnings():  # what transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def make_neox() -> Any:
    """Hugging Face's class of another family."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape = {k: v for k, v in NEOX.items() if k != "model_type"}
    config = GPTNeoXConfig(**shape, attn_implementation="sdpa", use_cache=False)
    return GPTNeoXForCausalLM(config).train()


def adapt(model: Any, rank: int = 4) -> Any:
    """With peft's adapters over 16 bits."""
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model.to(torch.bfloat16), wanted).train()


def make_plugin(version: int, mixed: str = "bf16", **keys: Any) -> Any:
    """accelerate's own reading of its keys; mixed: "no", or of which 16 bits."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False, **keys,
        )  # fmt: skip
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    return plugin


def accelerator(plugin: Any, mixed: str, device: str = "cpu", **more: Any) -> SimpleNamespace:
    """As much of an Accelerator as its own functions that prepare a model ask for."""
    from accelerate.utils import DistributedType, DynamoBackend

    state = SimpleNamespace(
        fsdp_plugin=plugin, dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO)
    )
    asked = {
        "state": state, "mixed_precision": mixed, "native_amp": mixed != "no",
        "device": torch.device(device), "is_main_process": False, "autocast_handler": None,
        "fp8_backend": None, "delayed_fp8_autocast": False, "multi_device": False,
        "parallelism_config": None, "is_fsdp2": plugin.fsdp_version == 2, "_models": [None],
        "distributed_type": DistributedType.FSDP, "verify_device_map": lambda _: False,
    }  # fmt: skip
    return SimpleNamespace(**(asked | more))


def highest(
    model: nn.Module, known: Callable[[], Iterable[Tensor]], syncs: Callable[[bool], Any],
    accumulation: int, *, tokens: int = TOKENS, device: str = "cpu",
) -> int:  # fmt: skip
    """Of a second step's passes: the first makes what is only filled later.

    known: what is held, asked after the first; syncs: what micro-batches run in, told whether they
    are a step's last.
    """
    ids = torch.zeros(ROWS, tokens, dtype=torch.int64, device=device)
    labels = ids.clone()

    def step() -> None:
        for at in range(accumulation):
            with syncs(at == accumulation - 1):
                loss = model(input_ids=ids, labels=labels).loss
                loss.backward()
            del loss
        model.zero_grad()

    step()
    with Level(*known(), ids, labels, device=device) as level:
        step()
    return level.highest
