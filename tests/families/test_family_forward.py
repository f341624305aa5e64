"""Each family's block over sizes against Hugging Face's class on real tensors."""

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gated_families import of_family
from memfit import meta
from memfit.families import families, find_family
from memfit.families.shared.config import ACTIVATIONS as described_activations
from memfit.families.shared.forward import Forward
from memfit.records.ledger import Kind
from memfit.train.model.attention import BACKENDS, register_attention
from memfit.train.model.attention_classes import register_class
from memfit.train.model.experts import register_experts
from memfit.train.model.hugging_face import parts
from size_oracle import Births, listen, make, meter_events, ordered, saved_bytes, total

LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
CONFIGS = {
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, **GROUPED},
    "deepseek_v2": {"first_k_dense_replace": 1, **LATENT},
    "deepseek_v3": {"first_k_dense_replace": 1, **LATENT},
    "deepseek_v2 with experts": {"first_k_dense_replace": 0, **LATENT},
    "deepseek_v2 with experts in groups": {
        "first_k_dense_replace": 0, **LATENT, "topk_method": "group_limited_greedy",
    },
    "deepseek_v3 with experts": {"first_k_dense_replace": 0, **LATENT},
    "deepseek_v3 with experts in one group": {
        "first_k_dense_replace": 0, **LATENT, "n_group": 1,
    },
    "deepseek_v3 with queries as they are": {
        "first_k_dense_replace": 1, **LATENT, "q_lora_rank": None, "attention_bias": True,
    },
    "llama": {"num_key_value_heads": 2},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 3},
    "glm4_moe": {
        "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "first_k_dense_replace": 0,
    },
    "glm4_moe with norms": {
        "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 0,
        "use_qk_norm": True,
    },
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "num_key_value_heads": 2,
    },
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24
    },
    "qwen3_moe with shares of 1": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gpt_neox": {},
    "gpt_neox one after the other": {"use_parallel_residual": False},
    "gpt_neox rotating whole heads": {"rotary_pct": 1.0},
    "gpt2": {"n_head": 4},
    "opt": {"ffn_dim": 96},
    "opt norming afterwards": {"ffn_dim": 96, "do_layer_norm_before": False},
    "opt without biases": {"ffn_dim": 96, "enable_bias": False},
    "gptj": {"rotary_dim": 4},
    "gptj rotating whole heads": {"rotary_dim": 8},
    "falcon": {"ffn_hidden_size": 96},
    "falcon with groups": {
        "ffn_hidden_size": 96, "num_kv_heads": 2, "new_decoder_architecture": True
    },
    "falcon with groups and one norm": {
        "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1
    },
    "falcon with all heads, one after the other": {
        "multi_query": False, "parallel_attn": False, "bias": True
    },
    **{name: {"num_key_value_heads": 2, **own} for name, own in {
        "phi3": {}, "phi3 rotating part": {"partial_rotary_factor": 0.5},
        "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16},
        "gemma2 sliding": {"head_dim": 16, "sliding_window": 5},
        "gemma2 without caps": {"head_dim": 16, "attn_logit_softcapping": None},
        "gemma3_text": {"head_dim": 16}, "olmo2": {}, "granite": {"residual_multiplier": 0.5},
        "cohere2": {}, "cohere2 not rotating": {"layer_types": ["full_attention"]},
        "exaone4": {"head_dim": 16},
        "exaone4 not rotating": {"layer_types": ["full_attention"]},
        "qwen3_5_text": of_family("qwen3_5_text", {}),
        "qwen3_5_text attending": {
            **of_family("qwen3_5_text", {}), "full_attention_interval": 1,
        },
        "glm4_moe_lite": of_family("glm4_moe_lite", {}),
        "glm4_moe_lite with experts": {
            **of_family("glm4_moe_lite", {}), "mlp_layer_types": ["sparse"],
        },
        "smollm3": {}, "smollm3 not rotating": {"no_rope_layers": [0]},
        "glm4": {"head_dim": 16}, "stablelm": {}, "stablelm with norms": {"qk_layernorm": True},
        "phi": {"hidden_act": "gelu_new"}, "phi rotating whole heads": {
            "hidden_act": "gelu_new", "partial_rotary_factor": 1.0
        },
        "stablelm side by side": {"use_parallel_residual": True, "use_qkv_bias": True},
    }.items()},
    "bloom": {},
    "mpt": {"d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 64},
}  # fmt: skip
for _family in families:
    if not any(name.split()[0] == _family for name in CONFIGS):
        CONFIGS[_family] = GROUPED | of_family(_family, {})
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2")


def config_of(name, activation=None):
    family = name.split()[0]
    common = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 96, "use_cache": False}
    common |= {"num_hidden_layers": 1, "max_position_embeddings": 64}
    common |= {"num_attention_heads": 4, "pad_token_id": None}
    if family in ("gpt2", "gptj"):
        common = {"n_head": 4, "n_embd": 32, "n_layer": 1, "vocab_size": 50, "n_positions": 64}
    chosen = {} if activation is None else {"hidden_act": activation}
    off = dict.fromkeys(find_family(family).dropouts, 0.0)
    return {"model_type": family, **common, **off, **CONFIGS[name], **chosen}


def kernel_of(name):
    """Attention sinks are in no kernel but the one that is written out."""
    return "math" if name.startswith("gpt_oss") else "flash"


def real_block(name, dtype, autocast, activation=None):
    """Events and saved bytes of one block of Hugging Face's class, and of its backward."""
    config = AutoConfig.for_model(**config_of(name, activation))
    served = kernel_of(name)
    kernel = register_attention(served)
    register_class(config.model_type, kernel, BACKENDS[served])
    if name in ("bloom", "mpt"):
        kernel = "eager"
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=kernel, experts_implementation=register_experts()
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    where = parts(model)
    backbone, block = where.backbone, where.blocks[0]
    x = torch.zeros(2, 16, 32, dtype=dtype, requires_grad=True)
    given = {}
    mask = None
    if name == "bloom":
        given = {"alibi": torch.zeros(8, 1, 16, dtype=dtype)}
        mask = torch.zeros(2, 1, 16, 16, dtype=dtype)
    elif name == "mpt":
        given = {"position_bias": torch.zeros(4, 1, 64)}
        mask = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
    elif hasattr(backbone, "rotary_emb"):
        asked = inspect.signature(backbone.rotary_emb.forward).parameters
        kinds = (config.layer_types[0],) if "layer_type" in asked else ()
        turn = backbone.rotary_emb(x, torch.arange(16).unsqueeze(0), *kinds)
        given = {"position_embeddings": turn}
        given |= {"alibi": None} if name.startswith("falcon") else {}
    turn = given.get("position_embeddings", ())
    known = [x, *model.parameters(), *model.buffers()]
    known += turn if isinstance(turn, tuple) else [turn]  # complex angles are one tensor
    known += [t for t in (mask, *given.values()) if isinstance(t, torch.Tensor)]
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(  # what no backward reaches is let go, too
        lambda t: saved.append(t) or t.detach(), lambda t: t
    )
    with Births(*known) as births:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False), keep:
            found = block(x, attention_mask=mask, **given)
        out = found[0] if isinstance(found, tuple) else found
        del found
        kept = saved_bytes(saved, known)
        del saved[:]
        out.sum().backward()
        del out
    return ordered(births.events), kept


def size_only_block(name, dtype, autocast, activation=None):
    meter, found = meta.Meter(), find_family(name.split()[0])
    architecture = found.architecture(config_of(name, activation))
    weights, outside = {}, {}
    for row in found.weights(architecture):
        there, apart = (weights, ".0.") if row.layer == 0 else (outside, ".")
        name_there = row.name.partition(apart)[2]
        there[name_there] = meta.parameter(meter, row.shape, dtype, trainable=True)
    forward = Forward(
        architecture=architecture, meter=meter, kernel=kernel_of(name), position_ids=None,
        documents=None, kind=architecture.kind(0),
        input_ids=meta.empty(meter, (2, 16), "int64", Kind.INPUT),
    )  # fmt: skip
    x = make(meter, (2, 16, 32), dtype)
    embedded = found.embed(forward, outside)
    given = (*embedded.own.get(forward.kind, ()), *embedded.shared)
    known = [x, *weights.values(), *given]
    saved, start = listen(meter), len(meter.events)
    with meter.with_autocast(autocast):
        out = found.block(forward, weights, x, given)
    forward.beside.clear()
    kept = saved_bytes(saved, known)
    del saved[:]
    meta.backward(total(out))
    del out
    return meter_events(meter, start), kept


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_a_block_holds_what_hugging_faces_class_holds(name, precision):
    dtype = "bfloat16" if precision == "bf16" else "float32"
    mixed = precision == "bf16-mixed"
    if mixed and name == "stablelm with norms":
        pytest.xfail(
            "a CPU keeps two fp32 numbers a row of a 16-bit norm of fp32 weights; torch's"
            " fake kernel, whose bytes are certified, says 16-bit ones"
        )
    real, saved = real_block(name, getattr(torch, dtype), mixed)
    mine, kept = size_only_block(name, dtype, mixed)
    assert kept == saved
    assert mine == real


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_that_a_family_accepts_holds_what_hugging_faces_holds(activation):
    assert set(ACTIVATIONS) == set(described_activations)
    real, saved = real_block("gpt_neox", torch.float32, True, activation)
    mine, kept = size_only_block("gpt_neox", "float32", True, activation)
    assert kept == saved
    assert mine == real
