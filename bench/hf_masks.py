"""Peaks of Hugging Face's Trainer and TRL's SFTTrainer under attention masks, and memfit's word.

    PYTHON bench/hf_masks.py [NAME...]      # of an environment that has TRL 1.16, too

The trainers themselves, on CUDA tensors without data (tests/plan/frameworks/fake_trainer.py).
Writes bench/results/hf_masks.jsonl: a configuration a line, with the bytes at the highest instant
of its second step and what memfit predicts of it; NAME...: only those, and nothing is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "hf_masks.jsonl"
BESIDE = "src", "tests", "tests/plan/frameworks"
sys.path[:0] = [str(HERE), *(str(HERE.parent / at) for at in BESIDE)]
GATED: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = 128
FLASH = "flash_attention_2"
MODELS: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "mistral": GATED | {"sliding_window": WINDOW},
    "mixtral": GATED | {
        "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "qwen2": GATED | {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
    },
    "qwen3": GATED | {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3,
        "head_dim": 32,
    },
    "gemma": GATED | {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": GATED | {"head_dim": 32, "tie_word_embeddings": True, "sliding_window": WINDOW},
    "gemma3_text": GATED | {
        "head_dim": 32, "tie_word_embeddings": True, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "phi3": GATED | {"sliding_window": WINDOW},
    "phi": GATED,
    "gpt_oss": GATED | {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "smollm3": GATED | {"no_rope_layer_interval": 2},
    "olmo2": GATED,
    "granite": GATED,
    "glm4": GATED | {"head_dim": 32},
    "stablelm": GATED | {"use_parallel_residual": False},
    "gpt_neox": {k: v for k, v in GATED.items() if k != "num_key_value_heads"},
    "gpt2": {
        "vocab_size": 512, "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 4096,
        "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "opt": {
        "vocab_size": 512, "hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 4096,
        "dropout": 0.0,
    },
    "falcon": {
        "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_kv_heads": 2, "new_decoder_architecture": True, "max_position_embeddings": 4096,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "falcon-7b": {
        "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
        "multi_query": True, "max_position_embeddings": 4096, "bos_token_id": 0,
        "eos_token_id": 0, "model_type": "falcon",
    },
    "gptj": {
        "vocab_size": 512, "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 4096,
        "rotary_dim": 16, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "bloom": {
        "vocab_size": 512, "hidden_size": 256, "n_layer": 6, "n_head": 8, "seq_length": 4096,
    },
    "mpt": {"vocab_size": 512, "d_model": 256, "n_layers": 6, "n_heads": 8, "max_seq_len": 4096},
    "deepseek_v3": GATED | {
        "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "olmo3": GATED | {"sliding_window": WINDOW},
    "cohere2": GATED | {"sliding_window": WINDOW, "tie_word_embeddings": True},
    "exaone4": GATED | {"head_dim": 32, "sliding_window": WINDOW},
    "starcoder2": GATED | {"sliding_window": WINDOW},
    "minimax_m2": GATED | {
        "head_dim": 32, "rotary_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "olmoe": GATED | {"num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe_lite": GATED | {
        "num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "ernie4_5": GATED | {"head_dim": 32},
    "hunyuan_v1_dense": GATED | {"head_dim": 32},
    "arcee": GATED,
}  # fmt: skip
LORA = {
    "gpt2": ["c_attn"], "gpt_neox": ["query_key_value"], "falcon": ["query_key_value"],
    "falcon-7b": ["query_key_value"], "bloom": ["query_key_value"], "mpt": ["Wqkv"],
    "phi3": ["qkv_proj"], "deepseek_v3": ["q_b_proj", "kv_b_proj"],
    "glm4_moe_lite": ["q_b_proj", "kv_b_proj"],
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "full rows": {},
    "padded": {"padded": True},
    "padded, recomputed": {"padded": True, "recompute": True},
    "recomputed, mixed": {"recompute": True, "precision": "bf16-mixed"},
    "lora, padded, mixed": {"padded": True, "lora": True, "precision": "bf16-mixed"},
    "padded, odd row": {"padded": True, "tokens": 493, "rows": 3},
    "eager, padded": {"attn": "eager", "padded": True},
}
OF_ALL = ("full rows", "padded", "recomputed, mixed", "lora, padded, mixed")
OF_SOME = ("padded, recomputed", "padded, odd row", "eager, padded")
SOME = ("llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen2", "gpt_oss")


LARGE: dict[str, dict[str, Any]] = {  # models as they are published
    "mistral-7b-v0.1": {"tokens": 8192, "rows": 1},
    "falcon-7b": {"tokens": 2048, "rows": 1, "recompute": True},
}  # fmt: skip
OF_TRL: dict[str, dict[str, dict[str, Any]]] = {  # family -> name -> case
    "llama": {
        "padded": {"padded": True},
        "packed": {"laid_out": True},
        "packed, recomputed": {"laid_out": True, "recompute": True},
        "packed, eager": {"laid_out": True, "attn": "eager"},
        "packed, flash": {"laid_out": True, "attn": FLASH},
        "padded, flash": {"padded": True, "attn": FLASH},
        "pairs, padded": {"pairs": True, "padded": True, "lora": True, "rows": 4},
        "pairs, padded, recomputed": {
            "pairs": True, "padded": True, "lora": True, "rows": 4, "recompute": True,
        },
    },
    "mistral": {
        "full rows": {}, "packed, lora, mixed": {
            "laid_out": True, "lora": True, "precision": "bf16-mixed",
        },
        "packed, flash": {"laid_out": True, "attn": FLASH},
    },
    "gemma2": {
        "padded, recomputed": {"padded": True, "recompute": True},
        "packed": {"laid_out": True},
    },
    "gemma3_text": {"packed": {"laid_out": True}, "padded": {"padded": True}},
    "qwen2": {
        "packed, recomputed": {"laid_out": True, "recompute": True},
        "padded, flash, recomputed": {"padded": True, "attn": FLASH, "recompute": True},
    },
    "qwen3": {
        "packed": {"laid_out": True, "rows": 3, "tokens": 250},
        "pairs, eager": {"pairs": True, "padded": True, "attn": "eager", "lora": True, "rows": 4},
    },
    "phi3": {"packed": {"laid_out": True}, "eager": {"attn": "eager"}},
    "olmo2": {"packed, eager": {"laid_out": True, "attn": "eager"}},
    "gpt_neox": {"padded, flash": {"padded": True, "attn": FLASH}},
    "gpt2": {"packed": {"laid_out": True}},
}  # fmt: skip


def make_case(family: str, told: dict[str, Any]) -> dict[str, Any]:
    """One configuration of a family's model."""
    case = {"rows": 2, "tokens": 512} | told
    case["model"] = {"model_type": family} | MODELS[family]
    if case.get("lora"):
        case["lora"] = LORA.get(family, ["q_proj", "v_proj"])
    return case


def make_cases() -> dict[str, dict[str, Any]]:
    """All configurations by name."""
    cases: dict[str, dict[str, Any]] = {}
    for family in MODELS:
        for name in (*OF_ALL, *(OF_SOME if family in SOME else ())):
            cases[f"{family}: {name}"] = make_case(family, VARIANTS[name])
    for family, own in OF_TRL.items():
        for name, told in own.items():
            cases[f"{family}: {name}, TRL"] = make_case(family, told | {"trainer": "trl"})
    for name, case in LARGE.items():
        cases[f"{name}: {case['rows']} x {case['tokens']}"] = case | {"model": published(name)}
    return cases


def published(name: str) -> dict[str, Any]:
    """The config of a model of the catalogue."""
    from memfit.plan.request.defaults import read_defaults
    from memfit.records import from_data
    from memfit.records.request import Request

    asked = {"framework": "hf-trainer", "model": name, "hardware": {"device": "h100-sxm"}}
    recipe, _, _ = read_defaults(from_data(asked, Request, source="bench"))
    return dict(recipe.model.config)


def predict(case: dict[str, Any]) -> int:
    """Bytes at the highest instant of a step, before an allocator rounds them."""
    from hf_step import ledger

    from memfit.records.ledger import Kind, Phase

    lora = case.get("lora")
    precision = case.get("precision", "bf16")
    own: dict[str, Any] = {"method": "full"}
    if lora:
        base = "bf16" if precision == "bf16" else "fp32"
        own = {"method": "lora", "lora": {"rank": 8, "targets": lora}, "base_format": base}
    options: dict[str, Any] = {
        name: bool(case.get(key))
        for name, key in (("padded", "padded"), ("padding_free", "laid_out"))
    }
    pairs = bool(case.get("pairs"))
    if "attn" in case:
        options["attn_implementation"] = case["attn"]
    found = ledger(
        case["model"], "h100-sxm", framework=case.get("trainer", "hf-trainer"),
        task={
            "sequence_length": case["tokens"], "global_batch": case["rows"], "packing": False,
            "objective": "dpo" if pairs else "pretrain",
        },
        micro_batch=case["rows"], precision=precision,
        recompute="full" if case.get("recompute") else "none", options=options, **own,
    )  # fmt: skip
    phases = dict.fromkeys(e.phase for e in found.entries if e.phase is not Phase.LOAD)
    return max(
        sum(e.nbytes for e in found.at(phase) if e.kind is not Kind.FRAGMENTATION)
        for phase in phases
    )


def measure(case: dict[str, Any]) -> int:
    """The same of the trainer itself."""
    import fake_trainer

    return max(fake_trainer.run(case).values())


def off_by(row: dict[str, Any]) -> float:
    """Percent of the trainer's peak."""
    return float(100 * (row["predicted"] / row["measured"] - 1))


def main() -> None:
    """See the module's docstring."""
    wanted = sys.argv[1:]
    rows = []
    for name, case in make_cases().items():
        if wanted and not any(word in name for word in wanted):
            continue
        row = {"name": name, "measured": measure(case), "predicted": predict(case)}
        rows.append(row)
        shown = f"{row['measured']:14,} {row['predicted']:14,} {off_by(row):8.3f} %"
        print(f"{name:48} {shown}", flush=True)
    if not wanted:
        OUT.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
