"""The first Qwen (QWenLMHeadModel) in the words of its successor's class, which computes alike.

Its class fuses query, key and value, and its config counts the gate and the up projection as one
width; there is no bias but on query, key and value.
"""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published

TARGETS = {  # modules of QWenLMHeadModel -> projections of Qwen2ForCausalLM
    "c_attn": ("q_proj", "k_proj", "v_proj"), "c_proj": ("o_proj", "down_proj"),
    "w1": ("up_proj",), "w2": ("gate_proj",), "q_proj": ("q_proj",), "k_proj": ("k_proj",),
    "v_proj": ("v_proj",), "W_pack": ("q_proj", "k_proj", "v_proj"),
}  # fmt: skip
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config(row: Published) -> dict[str, Any]:
    """config.json of a model with the row's sizes."""
    m = row["model"]
    return {
        "name": m["name"], "model_type": "qwen2", "vocab_size": m["vocab"],
        "hidden_size": m["hidden"], "intermediate_size": m["ffn"],
        "num_hidden_layers": m["n_layers"], "num_attention_heads": m["heads"],
        "num_key_value_heads": m["kv_heads"], "max_position_embeddings": m["seq_len"],
        "tie_word_embeddings": False,
    }  # fmt: skip


def targets(said: str) -> list[str]:
    """Projections for the modules that a row's `lora.targets` names."""
    if said.startswith("all linear"):
        return list(ALL)
    found: list[str] = []
    for word in said.split(","):
        if word.strip() not in TARGETS:
            raise NotExpressible(f"adapters on `{said}` are not described")
        found += TARGETS[word.strip()]
    return list(dict.fromkeys(found))
