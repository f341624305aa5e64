"""`modules_to_save`: what peft's own copies hold beside adapters, in a real model on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_step import ROWS, TINY, TOKENS, ledger, make_config, rise, run

from memfit.core.errors import InvalidRequest, MemoryUnknown
from memfit.meta.meter import block_size
from memfit.plan.frameworks import Job
from memfit.plan.frameworks.hugging_face.step import hf_model
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.request import Request
from size_oracle import adapted

BOTH = "embed_tokens,lm_head"
EACH = ("embed_tokens", "lm_head", BOTH, "norm")
LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
MIXED = "bf16-mixed"
QUANTISED = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16,
}  # fmt: skip


def adapt(model: Any, saved: str, *, checkpointing: bool = False, trained: Any = None) -> Any:
    """peft's model in training; trained: the dtype that all it trains is cast to, as tools do."""
    model = adapted(model, lora=True, checkpointing=checkpointing, saved=saved)
    for parameter in model.parameters() if trained else ():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    return model


def dense(saved: str, dtype: torch.dtype, *, tied: bool = False, **told: Any) -> Any:
    from transformers import LlamaForCausalLM

    return adapt(LlamaForCausalLM(make_config(tied=tied)).to(dtype), saved, **told)


def predicted(saved: str, *, tied: bool = False, **changes: Any) -> Ledger:
    options = {"modules_to_save": saved, **changes.pop("options", {})}
    model = TINY | {"tie_word_embeddings": tied}
    return ledger(model, **(LORA | {"base_format": "bf16"} | changes), options=options)


def held(found: Ledger) -> int:
    entries = [e for e in found.at(Phase.LOAD) if e.kind is Kind.PARAMETERS]
    return sum(e.nbytes for e in entries if e.owner != "rotary")


def blocks(model: Any) -> int:
    """Bytes of the blocks of all parameters, with what belongs to quantised ones."""
    beside = {id(p): sum(t.nbytes for t in of_codes(p)) for p in model.parameters()}
    return sum(block_size(p.nbytes + beside[id(p)]) for p in model.parameters())


def of_codes(parameter: Any) -> tuple[torch.Tensor, ...]:
    state = getattr(parameter, "quant_state", None)
    return (state.absmax, state.code) if state is not None else ()


WIDE = {"copies_dtype": "fp32"}
STEPS: list[tuple[str, str, str, dict[str, Any], str]] = [
    (BOTH, "bf16", "bf16", {}, "none"),
    (BOTH, MIXED, "bf16", {}, "none"),
    (BOTH, MIXED, "fp32", {}, "none"),
    (BOTH, MIXED, "bf16", WIDE, "none"),
    (BOTH, "bf16", "bf16", {}, "full"),
    (BOTH, MIXED, "bf16", WIDE, "full"),
    ("embed_tokens", "bf16", "bf16", {}, "none"),
    ("embed_tokens", MIXED, "bf16", WIDE, "full"),
    ("lm_head", MIXED, "bf16", WIDE, "none"),
    ("norm", "bf16", "bf16", {}, "none"),
]


@pytest.mark.parametrize(("saved", "precision", "base", "options", "recompute"), STEPS)
def test_a_step_holds_what_pefts_copies_hold(
    saved: str, precision: str, base: str, options: dict[str, Any], recompute: str
) -> None:
    stored = torch.float32 if base == "fp32" else torch.bfloat16
    wide = torch.float32 if options else None  # as LLaMA-Factory casts what is trained
    real = dense(saved, stored, checkpointing=recompute == "full", trained=wide)
    mine = predicted(
        saved, precision=precision, base_format=base, options=options, recompute=recompute
    )
    assert held(mine) == blocks(real)
    assert rise(mine) == run(real, mixed=precision == MIXED)


@pytest.mark.parametrize("saved", ["lm_head", BOTH])
def test_a_tied_matrix_that_is_copied_is_tied_no_more(saved: str) -> None:
    real = dense(saved, torch.bfloat16, tied=True)
    mine = predicted(saved, tied=True)
    assert held(mine) == blocks(real)
    assert rise(mine) == run(real)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("published")
    LlamaForCausalLM(make_config()).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("framework", "prepared", "precision"),
    [("hf-trainer", False, MIXED), ("hf-trainer", True, MIXED), ("hf-trainer", True, "bf16"),
     ("trl", False, MIXED)],
)  # fmt: skip
def test_copies_over_a_quantised_base(
    published: Path, framework: str, prepared: bool, precision: str
) -> None:
    """bitsandbytes' own product of 4 bits gives back the dtype of what it reads."""
    pytest.importorskip("bitsandbytes")
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    real: Any = LlamaForCausalLM.from_pretrained(
        published, dtype=torch.bfloat16, attn_implementation="sdpa",
        quantization_config=BitsAndBytesConfig(**QUANTISED),
    )  # fmt: skip
    real.config.use_cache = False
    if prepared:
        real = prepare_model_for_kbit_training(real, use_gradient_checkpointing=False)
    real = adapt(real, BOTH, trained=torch.bfloat16 if framework == "trl" else None)
    mine = predicted(
        BOTH, framework=framework, base_format="nf4", precision=precision, recompute="none",
        options={"prepare_kbit": prepared} | ({"version": "0.29"} if framework == "trl" else {}),
    )  # fmt: skip
    assert held(mine) == blocks(real)
    codes = [t for p in real.parameters() for t in of_codes(p)]
    assert rise(mine) == run(real, *codes, mixed=precision == MIXED)


def rows(saved: str, *, tied: bool) -> list[tuple[str, tuple[int, ...], str, bool]]:
    request = {
        "framework": "hf-trainer", "model": TINY | {"tie_word_embeddings": tied}, **LORA,
        "hardware": {"device": "cpu"}, "task": {"sequence_length": TOKENS, "global_batch": ROWS},
        "base_format": "bf16", "options": {"modules_to_save": saved},
    }  # fmt: skip
    recipe, model, _ = read_defaults(from_data(request, Request, source="request"))
    job = Job(model=model, recipe=recipe, device=find_device("cpu"))
    return sorted((w.name, w.shape, w.dtype, w.trainable) for w in hf_model(job).weights)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("saved", EACH)
def test_names_and_dtypes_are_pefts(saved: str, tied: bool) -> None:
    real = dense(saved, torch.bfloat16, tied=tied).named_parameters()
    assert rows(saved, tied=tied) == sorted(
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
        for name, p in real
    )


COPY = 768 * 64  # elements
TWO: dict[str, Any] = {
    "hardware": {"device": "h100-sxm", "count": 2},
    "task": {"sequence_length": TOKENS, "global_batch": 2 * ROWS, "packing": False},
}  # fmt: skip


def test_ranks_that_copy_the_model_hold_each_copys_gradient_twice() -> None:
    copies = {"parallel": {"dp_replicate": 2}, **TWO}
    bare, saved = (predicted(name, **copies) for name in ("", "lm_head"))
    buckets = [
        e.nbytes for found in (bare, saved) for e in found.at(Phase.FORWARD) if e.owner == "buckets"
    ]
    assert buckets[1] - buckets[0] == 2 * COPY


def test_under_deepspeed_the_original_is_whole_and_the_copy_has_fp32_states() -> None:
    changes: dict[str, Any] = {
        "framework": "deepspeed", "parallel": {"dp_shard": 2, "zero": 2}, "precision": MIXED, **TWO,
    }  # fmt: skip
    bare, saved = (predicted(name, **changes) for name in ("", "lm_head"))
    kinds = [found.by_kind(Phase.OPTIMIZER_STEP) for found in (bare, saved)]
    assert kinds[1][Kind.PARAMETERS] - kinds[0][Kind.PARAMETERS] == 2 * COPY
    assert kinds[1][Kind.OPTIMIZER_STATE] - kinds[0][Kind.OPTIMIZER_STATE] == 12 * COPY // 2
    assert kinds[1][Kind.GRADIENTS] - kinds[0][Kind.GRADIENTS] == 2 * COPY // 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_reference_reads_what_the_copy_was_made_of(tied: bool) -> None:
    """In 16 bits; the cast of a copy of fp32 would lie beside the policy's logits."""
    pairs: dict[str, Any] = {
        "task": {"objective": "dpo", "sequence_length": 2, "global_batch": 2}, "micro_batch": 2,
        "precision": MIXED, "options": WIDE | {"compares": "llamafactory"},
    }  # fmt: skip
    totals = [
        predicted("lm_head", tied=tied, **pairs, preference={"reference": name}).total(Phase.LOSS)
        for name in ("adapter-off", "precomputed")
    ]
    assert totals[0] - totals[1] < COPY  # half of the cast


@pytest.mark.parametrize(
    ("saved", "changes", "kind", "message"),
    [
        ("lm_haed", {}, InvalidRequest, "`options.modules_to_save: lm_haed` is no module of"),
        ("o_proj", {}, MemoryUnknown, "a trained copy of `o_proj`, products of the blocks"),
        ("lm_head", {"method": "full"}, InvalidRequest, "copies stand beside adapters"),
        ("lm_head", {**TWO, "parallel": {"dp_shard": 2}}, MemoryUnknown, "ranks share"),
        (
            "lm_head",
            {**TWO, "parallel": {"dp_shard": 2}, "options": {"fsdp_version": 2}},
            MemoryUnknown,
            "ranks share",
        ),
        (
            "lm_head",
            {**TWO, "framework": "deepspeed", "parallel": {"dp_shard": 2}, "precision": MIXED},
            MemoryUnknown,
            "ranks share",
        ),
        ("lm_head", {"options": {"copies_dtype": "fp32"}}, InvalidRequest, "without autocast"),
        (
            "lm_head",
            {"framework": "trl", "base_format": "nf4", "options": {"prepare_kbit": True}},
            MemoryUnknown,
            "of TRL before 0.24",
        ),
        (
            "lm_head",
            {"loss": "fused", "precision": MIXED, "options": {"copies_dtype": "fp32"}},
            InvalidRequest,
            "beside a head of fp32",
        ),
    ],
)
def test_what_is_not_described_is_refused_by_name(
    saved: str, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        predicted(saved, **changes)
