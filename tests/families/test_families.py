"""Families against Hugging Face's classes on the meta device."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from gated_families import add_others, gated
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.families import (
    families,
    find_described,
    find_family,
    read_model,
    references,
    without_dropout,
)
from memfit.records.model import Architecture, ModelReference

SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 101}
GATED = {**SMALL, "intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"model_type": "gpt2", "vocab_size": 101, "n_embd": 48, "n_head": 4, "n_layer": 2}
NEOX = {"model_type": "gpt_neox", **SMALL, "intermediate_size": 80}
LLAMA = {"model_type": "llama", **GATED}
MIXTRAL = {"model_type": "mixtral", **GATED, "num_local_experts": 4, "num_experts_per_tok": 2}
FEW = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2_MOE = {"model_type": "qwen2_moe", **GATED, **FEW, "shared_expert_intermediate_size": 40}
QWEN3_MOE = {"model_type": "qwen3_moe", **GATED, **FEW, "head_dim": 16}
GLM4_MOE = {"model_type": "glm4_moe", **GATED, "n_routed_experts": 6, "num_experts_per_tok": 2}
GLM4_MOE |= {"moe_intermediate_size": 24, "head_dim": 16}
QWEN3 = {"model_type": "qwen3", **GATED, "head_dim": 16}
OPT = {"model_type": "opt", **SMALL, "ffn_dim": 80, "max_position_embeddings": 64}
GPTJ = GPT2 | {"model_type": "gptj", "rotary_dim": 4}
FALCON = {"model_type": "falcon", **SMALL, "max_position_embeddings": 64}
GROUPED = FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}
BLOOM = {"model_type": "bloom", "vocab_size": 101, "hidden_size": 48, "n_head": 4, "n_layer": 2}
MPT = {"model_type": "mpt", "vocab_size": 101, "d_model": 48, "n_heads": 4, "n_layers": 2}
LATENT = {
    **SMALL, "intermediate_size": 80, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
DEEPSEEK2 = {"model_type": "deepseek_v2", **LATENT, "topk_method": "group_limited_greedy"}
DEEPSEEK3 = {"model_type": "deepseek_v3", **LATENT}
GPT_OSS = {
    "model_type": "gpt_oss", **GATED, "num_local_experts": 8, "num_experts_per_tok": 2,
    "head_dim": 16,
}  # fmt: skip
BASE = {
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK2,
    "deepseek_v3": DEEPSEEK3,
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "llama": LLAMA,
    "mistral": {"model_type": "mistral", **GATED},
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "glm4_moe": GLM4_MOE,
    "qwen2": {"model_type": "qwen2", **GATED},
    "qwen3": QWEN3,
    "opt": OPT,
    "gptj": GPTJ,
    "falcon": FALCON,
    **gated(GATED),
    "bloom": BLOOM,
    "mpt": MPT,
}
add_others(BASE, GATED)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
TOGGLED = [
    GPT2,
    GPT2 | {"tie_word_embeddings": False},
    GPT2 | {"n_inner": 100, "n_positions": 32},
    GPT2 | {"n_inner": None, "activation_function": "gelu"},
    NEOX,
    NEOX | {"tie_word_embeddings": True},
    NEOX | {"attention_bias": False},
    NEOX | {"rotary_pct": 0.5, "use_parallel_residual": False},
    NEOX | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.34}},
    NEOX | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    LLAMA,
    LLAMA | {"tie_word_embeddings": True},
    LLAMA | {"attention_bias": True},
    LLAMA | {"mlp_bias": True},
    LLAMA | {"head_dim": 20},
    LLAMA | {"num_key_value_heads": None},
    {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"},
    LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    BASE["mistral"],
    BASE["mistral"] | {"sliding_window": None},
    BASE["mistral"] | {"head_dim": 20, "tie_word_embeddings": True},
    {k: v for k, v in BASE["mistral"].items() if k != "num_key_value_heads"}
    | {"num_attention_heads": 16},
    MIXTRAL,
    MIXTRAL | {"head_dim": 20, "tie_word_embeddings": True, "sliding_window": 32},
    {k: v for k, v in MIXTRAL.items() if k not in ("num_local_experts", "num_experts_per_tok")},
    QWEN2_MOE,
    {k: v for k, v in QWEN2_MOE.items() if k not in FEW},
    QWEN2_MOE | {"qkv_bias": False, "norm_topk_prob": True, "tie_word_embeddings": True},
    QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 16},
    QWEN3_MOE,
    {k: v for k, v in QWEN3_MOE.items() if k not in FEW and k != "head_dim"},
    QWEN3_MOE | {"attention_bias": True, "norm_topk_prob": True},
    QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 16},
    GLM4_MOE,
    {k: v for k, v in GLM4_MOE.items() if "experts" not in k and k != "moe_intermediate_size"},
    GLM4_MOE | {"first_k_dense_replace": 0, "use_qk_norm": True, "attention_bias": True},
    GLM4_MOE
    | {"n_shared_experts": 2, "partial_rotary_factor": 0.25, "num_nextn_predict_layers": 1},
    BASE["qwen2"],
    BASE["qwen2"] | {"tie_word_embeddings": True, "head_dim": 20},
    BASE["qwen2"] | {"num_key_value_heads": None},
    BASE["qwen2"] | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    QWEN3,
    QWEN3 | {"attention_bias": True, "tie_word_embeddings": True},
    {k: v for k, v in QWEN3.items() if k != "head_dim"},
    OPT,
    OPT | {"word_embed_proj_dim": 20, "do_layer_norm_before": False},
    OPT | {"enable_bias": False, "tie_word_embeddings": False},
    OPT | {"word_embed_proj_dim": 20, "tie_word_embeddings": False, "activation_function": "gelu"},
    GPTJ,
    GPTJ | {"n_inner": 100, "n_positions": 32, "tie_word_embeddings": True},
    FALCON,
    FALCON | {"multi_query": False, "bias": True},
    FALCON | {"multi_query": False, "parallel_attn": False},
    FALCON | {"parallel_attn": False, "tie_word_embeddings": False},
    BLOOM,
    BLOOM | {"tie_word_embeddings": False},
    {"n_embed" if k == "hidden_size" else k: v for k, v in BLOOM.items()},
    MPT,
    MPT | {"tie_word_embeddings": False, "max_seq_len": 32},
    MPT | {"attn_config": {"alibi": True, "attn_impl": "torch", "clip_qkv": None}},
    GROUPED,
    GROUPED | {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80},
    *gated(GATED).values(),
    BASE["phi3"] | {"partial_rotary_factor": 1.0, "sliding_window": 7},
    BASE["phi3"] | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.34}},
    BASE["gemma"] | {"hidden_act": "gelu", "attention_bias": True},
    BASE["gemma"] | {"tie_word_embeddings": False},
    BASE["gemma2"] | {"attention_bias": True, "layer_types": ["full_attention"] * 2},
    BASE["gemma2"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    BASE["gemma3_text"] | {"sliding_window_pattern": 1, "final_logit_softcapping": 30.0},
    BASE["gemma3_text"] | {"sliding_window_pattern": 6, "attention_bias": True},
    BASE["olmo2"] | {"attention_bias": True, "num_key_value_heads": None},
    BASE["olmo3"] | {"attention_bias": True, "layer_types": ["full_attention"] * 2},
    BASE["olmo3"] | {"num_hidden_layers": 5, "head_dim": 20, "rope_scaling": YARN},
    BASE["cohere2"] | {"attention_bias": True, "tie_word_embeddings": False},
    BASE["cohere2"] | {"num_key_value_heads": None, "layer_types": ["full_attention"] * 2},
    BASE["exaone4"] | {"head_dim": 20, "tie_word_embeddings": True},
    BASE["exaone4"] | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    BASE["exaone4"] | {"layer_types": ["full_attention"] * 2},
    BASE["minimax_m2"],
    BASE["minimax_m2"] | {"rotary_dim": None, "partial_rotary_factor": 0.25},
    {k: v for k, v in BASE["minimax_m2"].items() if k not in ("num_local_experts", "rotary_dim")},
    BASE["olmoe"] | {"attention_bias": True, "norm_topk_prob": True},
    {k: v for k, v in BASE["olmoe"].items() if "experts" not in k},
    BASE["glm4_moe_lite"] | {"q_lora_rank": None, "attention_bias": True, "n_shared_experts": 2},
    BASE["glm4_moe_lite"] | {"mlp_layer_types": ["sparse"] * 2, "num_nextn_predict_layers": 1},
    {k: v for k, v in BASE["glm4_moe_lite"].items() if "head_dim" not in k and "rank" not in k},
    BASE["ernie4_5"] | {"use_bias": True, "head_dim": None, "tie_word_embeddings": False},
    BASE["hunyuan_v1_dense"] | {"attention_bias": True, "head_dim": 20, "rope_scaling": ALPHA},
    BASE["starcoder2"] | {"use_bias": False, "sliding_window": 8, "tie_word_embeddings": False},
    BASE["arcee"] | {"attention_bias": True, "mlp_bias": True, "head_dim": 20},
    BASE["granite"] | {"attention_bias": True, "tie_word_embeddings": True},
    BASE["smollm3"] | {"no_rope_layers": [0, 0], "attention_bias": True, "mlp_bias": True},
    BASE["smollm3"] | {"tie_word_embeddings": False, "num_key_value_heads": None},
    BASE["glm4"] | {"attention_bias": False, "partial_rotary_factor": 1.0},
    BASE["stablelm"] | {"use_parallel_residual": False, "use_qkv_bias": True},
    BASE["stablelm"] | {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    GPT_OSS,
    GPT_OSS | {"attention_bias": False, "tie_word_embeddings": True, "sliding_window": 8},
    {k: v for k, v in GPT_OSS.items() if k != "head_dim"},
    BASE["phi"] | {"num_key_value_heads": None, "partial_rotary_factor": 0.4},
    BASE["phi"] | {"tie_word_embeddings": True, "hidden_act": "gelu"},
    DEEPSEEK2,
    DEEPSEEK2 | {"q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None},
    DEEPSEEK2 | {"attention_bias": True, "mlp_bias": True, "n_shared_experts": 1},
    {k: v for k, v in DEEPSEEK2.items() if k not in ("topk_method", "first_k_dense_replace")},
    DEEPSEEK3,
    DEEPSEEK3 | {"q_lora_rank": None, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    DEEPSEEK3 | {"attention_bias": True, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    DEEPSEEK3 | {"first_k_dense_replace": 2, "num_nextn_predict_layers": 1},
    DEEPSEEK3
    | {
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "mscale": 1.0,
            "original_max_position_embeddings": 64,
            "mscale_all_dim": 1.0,
        }
    },
]


def reference(config):
    return ModelReference(name="tiny", source="", config=config)


def built(config):
    """Hugging Face's own model of a config, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def shapes(module):
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


@pytest.mark.parametrize("config", TOGGLED, ids=lambda c: f"{c['model_type']}-{TOGGLED.index(c)}")
def test_weights_and_buffers_are_those_of_hugging_faces_class(config):
    model = read_model(reference(config))
    theirs = built(config)
    assert [(w.name, w.shape) for w in model.weights] == shapes(theirs)
    assert model.parameters == theirs.num_parameters()
    held = sorted(tuple(b.shape) for b in theirs.buffers())
    buffers = find_family(config["model_type"]).buffers(model.architecture)
    assert sorted(b.shape for b in buffers) == held


@pytest.mark.parametrize("config", TOGGLED, ids=lambda c: f"{c['model_type']}-{TOGGLED.index(c)}")
def test_our_config_builds_the_same_model_without_dropout(config):
    family = find_family(config["model_type"])
    architecture = family.architecture(config)
    ours = family.config(architecture)
    assert family.architecture(ours) == architecture
    module = built(ours)
    assert shapes(module) == shapes(built(config))
    drops = [m.p for m in module.modules() if isinstance(m, torch.nn.Dropout)]
    assert not any(drops)
    assert not module.config.use_cache


@pytest.mark.parametrize("name", sorted(BASE))
def test_without_dropout_leaves_nothing_random(name):
    full = AutoConfig.for_model(**BASE[name]).to_dict()
    plain = AutoConfig.for_model(**without_dropout(reference(full)))
    left = {k: v for k, v in plain.to_dict().items() if "drop" in k or k.endswith("pdrop")}
    assert {k for k, v in left.items() if v} <= {"summary_first_dropout"}  # of another head


@pytest.mark.parametrize("name", sorted(BASE))
def test_a_config_that_hugging_face_writes_reads_as_the_short_one(name):
    """`to_dict` spells every default out; absent keys must have meant the same."""
    family = find_family(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        full = AutoConfig.for_model(**BASE[name]).to_dict()
    assert family.architecture(full) == family.architecture(BASE[name])


@pytest.mark.parametrize("name", sorted(BASE))
def test_lora_targets_are_projections_of_every_block(name):
    family = find_family(name)
    architecture = family.architecture(BASE[name])
    blocks = [*range(architecture.layers)]
    targets = family.default_targets(architecture)
    hits = {
        target: [w.layer for w in family.weights(architecture)
                 if w.name.split(".")[-2:] == [target, "weight"]]
        for target in targets
    }  # fmt: skip
    assert {layer for layers in hits.values() for layer in layers} == {*blocks}
    if not architecture.recurrent:  # whose kinds of blocks have other projections
        assert all(layers == blocks for layers in hits.values())


@pytest.mark.parametrize("name", sorted(BASE))
def test_blocks_with_states_have_the_gates_that_are_closed_at_padding(name):
    """Without a gate, padding would change a state and nothing would say so."""
    family = find_family(name)
    a = family.architecture(BASE[name])
    for layer in range(a.layers):
        weights = {w.name for w in family.weights(a) if w.layer == layer}
        gates = [g for g in family.state_gates if any(f".{g}.weight" in w for w in weights)]
        assert bool(gates) == bool(family.states(a, a.kind(layer)))
        assert not gates or gates == [*family.state_gates]
    if a.recurrent:
        assert family.state_gates


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_loras_default_follows_a_query_that_is_not_compressed(name):
    family = find_family(name)
    plain = family.architecture(BASE[name] | {"q_lora_rank": None})
    assert family.default_targets(plain) == ("q_proj", "kv_b_proj")
    assert family.default_targets(family.architecture(BASE[name])) == ("q_b_proj", "kv_b_proj")


def test_kimi_k2_is_deepseek_v3s_class_under_another_name():
    kimi = DEEPSEEK3 | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1}
    same = kimi | {"model_type": "deepseek_v3"}
    assert read_model(reference(kimi)).weights == read_model(reference(same)).weights
    assert read_model(reference(kimi)).architecture.family == "deepseek_v3"
    module = built(without_dropout(reference(kimi)))
    assert shapes(module) == shapes(built(same))


def test_every_base_config_has_a_family_and_the_other_way_round():
    assert families.names() == sorted(BASE)
    for name in families:
        assert families.find(name).name == name


def test_a_family_that_is_only_counted_is_none_that_is_planned():
    assert references.names() == ["t5"]
    assert not set(references.names()) & set(families.names())
    with pytest.raises(InvalidRequest, match="relu"):
        find_described("t5").architecture({"model_type": "t5", "feed_forward_proj": "relu"})
    with pytest.raises(UnknownName, match="`bert` of `tiny`"):
        find_described("bert", of="tiny")


def test_what_a_class_leaves_of_published_files_is_declared():
    """Each class says of which names of weights it expects no parameter of its own."""
    for name in families:
        kind = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(**BASE[name]))]
        ignored = kind._keys_to_ignore_on_load_unexpected or ()
        assert families.find(name).unread == ("mtp.",) * ("^mtp.*" in ignored), name


REQUIRED = {
    "glm4_moe": [*SMALL],
    "qwen2_moe": [*SMALL],
    "qwen3_moe": [*SMALL],
    "qwen3_5_moe_text": [*SMALL],
    "qwen3_next": [*SMALL],
    "gpt2": ["vocab_size", "n_embd", "n_head", "n_layer"],
    "gptj": ["vocab_size", "n_embd", "n_head", "n_layer"],
    "opt": [*SMALL, "ffn_dim"],
    "falcon": [*SMALL],
    "bloom": [k for k in BLOOM if k != "model_type"],
    "mpt": [k for k in MPT if k != "model_type"],
}
REQUIRED |= {n: [*SMALL, "intermediate_size"] for n in BASE if n not in REQUIRED}
REQUIRED["deepseek_v2"] += ["num_experts_per_tok"]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_size_that_is_missing_or_no_number_is_refused_by_name(name):
    for key in REQUIRED[name]:
        others = {k: v for k, v in BASE[name].items() if k != key}
        for wrong in ({}, *({key: value} for value in (0, -4, 2.5, "48", True))):
            with pytest.raises(InvalidRequest, match=f"`{key}"):
                read_model(reference(others | wrong))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2 | {"activation_function": "mish"}, "mish"),
        (GPT2 | {"n_head": 5}, "5 attention heads do not divide"),
        (LLAMA | {"hidden_act": "mish"}, "mish"),
        (LLAMA | {"num_key_value_heads": 3}, "3 key-value heads"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        (LLAMA | {"rope_parameters": {"full": {"rope_type": "default"}}}, "rotary parameters"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok: 5"),
        (MIXTRAL | {"output_router_logits": True}, "output_router_logits"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (MIXTRAL | {"intermediate_size": 84}, "intermediate_size: 84"),
        (QWEN2_MOE | {"mlp_only_layers": [1]}, "mlp_only_layers"),
        (QWEN2_MOE | {"layer_types": ["linear_attention"] * 2}, "layer_types"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN3_MOE | {"moe_intermediate_size": 20}, "moe_intermediate_size: 20"),
        (QWEN3_MOE | {"output_router_logits": True}, "output_router_logits"),
        (GLM4_MOE | {"first_k_dense_replace": -1}, "first_k_dense_replace: -1"),
        (GLM4_MOE | {"first_k_dense_replace": None}, "first_k_dense_replace: None"),
        (GLM4_MOE | {"n_group": 4}, "4 groups"),
        (GLM4_MOE | {"norm_topk_prob": False}, "norm_topk_prob"),
        (NEOX | {"rotary_pct": 0.0}, "rotary_pct"),
        (BASE["phi3"] | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (BASE["gemma"] | {"use_bidirectional_attention": True}, "use_bidirectional"),
        (BASE["gemma2"] | {"attn_logit_softcapping": 0}, "attn_logit_softcapping: 0"),
        (BASE["gemma2"] | {"layer_types": ["full_attention"]}, "1 of 2 layers"),
        (BASE["gemma3_text"] | {"use_bidirectional_attention": True}, "use_bidirectional"),
        (
            BASE["gemma3_text"] | {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "dynamic",
        ),
        (BASE["olmo3"] | {"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        (BASE["olmo3"] | {"sliding_window": None}, "sliding_window"),
        (BASE["cohere2"] | {"head_dim": 20}, "head_dim"),
        (BASE["cohere2"] | {"use_qk_norm": True}, "use_qk_norm"),
        (BASE["exaone4"] | {"sliding_window": None}, "layer_types"),
        (BASE["exaone4"] | {"sliding_window_pattern": "LLLG"}, "LLLG"),
        (
            BASE["exaone4"] | {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "sliding blocks",
        ),
        (BASE["minimax_m2"] | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (BASE["minimax_m2"] | {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        (BASE["minimax_m2"] | {"scoring_func": "softmax"}, "scoring_func"),
        (BASE["olmoe"] | {"clip_qkv": 8.0}, "clip_qkv"),
        (BASE["olmoe"] | {"head_dim": 20}, "head_dim"),
        (BASE["glm4_moe_lite"] | {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        (BASE["glm4_moe_lite"] | {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
        (BASE["glm4_moe_lite"] | {"norm_topk_prob": False}, "norm_topk_prob"),
        (BASE["glm4_moe_lite"] | {"n_group": 8, "topk_group": 8}, "two best"),
        (BASE["hunyuan_v1_dense"] | {"rope_scaling": {"type": "dynamic"}}, "dynamic"),
        (BASE["hunyuan_v1_dense"] | {"use_cla": True}, "use_cla"),
        (BASE["smollm3"] | {"use_sliding_window": True}, "use_sliding_window"),
        (BASE["smollm3"] | {"no_rope_layers": [1]}, "no_rope_layers"),
        (BASE["stablelm"] | {"head_dim": 99}, "head_dim"),
        (BASE["phi"] | {"qk_layernorm": True}, "qk_layernorm"),
        (NEOX | {"head_dim": 99}, "head_dim"),
        (OPT | {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (OPT | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (GPTJ | {"rotary_dim": 14}, "rotary_dim: 14"),
        (GPTJ | {"rotary_dim": 5}, "rotary_dim: 5"),
        (FALCON | {"alibi": True}, "alibi"),
        (FALCON | {"num_kv_heads": 2, "multi_query": False}, "new_decoder_architecture"),
        (FALCON | {"new_decoder_architecture": True}, "num_kv_heads: 4"),
        (FALCON | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        (BLOOM | {"slow_but_exact": True}, "slow_but_exact"),
        (BLOOM | {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        (BLOOM | {"n_embed": 64}, "n_embed: 64"),
        (GPTJ | {"hidden_size": 64}, "hidden_size: 64"),
        (MPT | {"num_attention_heads": 8}, "num_attention_heads: 8"),
        (MPT | {"no_bias": False}, "no_bias"),
        (MPT | {"expansion_ratio": 8}, "expansion_ratio"),
        (MPT | {"attn_config": {"clip_qkv": 6.0}}, "clip_qkv"),
        (MPT | {"attn_config": {"alibi": False}}, "alibi"),
        (MPT | {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
        (MPT | {"attn_config": [1]}, "attn_config"),
        (GROUPED | {"num_kv_heads": 3}, "num_kv_heads: 3"),
        (GROUPED | {"parallel_attn": False}, "parallel_attn"),
        (GPT_OSS | {"layer_types": ["full_attention"] * 2}, "layer_types"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window"),
        (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act"),
        (GPT_OSS | {"num_experts_per_tok": 9}, "9"),
        (GPT_OSS | {"intermediate_size": 84}, "multiple of 8"),
        (GPT_OSS | {"head_dim": 15}, "15 elements"),
        (DEEPSEEK3 | {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK3 | {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK3 | {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK3 | {"num_key_value_heads": 2}, "num_key_value_heads"),
        (DEEPSEEK3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK3 | {"n_group": 3}, "3 groups"),
        (DEEPSEEK3 | {"n_group": 8, "topk_group": 8}, "two best"),
        (DEEPSEEK3 | {"topk_group": 3}, "topk_group"),
        (DEEPSEEK3 | {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        (DEEPSEEK3 | {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (DEEPSEEK3 | {"qk_rope_head_dim": 5}, "qk_rope_head_dim"),
        (DEEPSEEK2 | {"topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK2 | {"n_group": 1}, "single group"),
        (DEEPSEEK2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        (
            DEEPSEEK2 | {"num_attention_heads": 5, "num_key_value_heads": 5},
            "5 attention heads do not divide",
        ),
        (BASE["qwen2"] | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_a_family_does_not_describe_is_refused_by_name(config, named):
    with pytest.raises(InvalidRequest, match=named):
        read_model(reference(config))


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({}, 4096),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 128}, 128),
    ],
)
def test_mistrals_window_is_read(change, window):
    assert find_family("mistral").architecture(BASE["mistral"] | change).sliding_window == window


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({}, 0),
        ({"use_sliding_window": False, "sliding_window": 16}, 0),
        ({"sliding_window": 16, "max_window_layers": 0}, 0),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 16),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, 0),
        ({"use_sliding_window": True, "sliding_window": None}, 0),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            16,
        ),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_qwens_window_is_read_only_where_a_layer_uses_it(name, change, window):
    config = BASE[name] | change
    assert find_family(name).architecture(config).sliding_window == window
    kinds = AutoConfig.for_model(**config).layer_types
    assert ("sliding_attention" in kinds) == bool(window)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (QWEN2_MOE, 0),
        (QWEN2_MOE | {"use_sliding_window": True}, 4096),
        (QWEN2_MOE | {"use_sliding_window": True, "max_window_layers": 0}, 0),
        (QWEN2_MOE | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 0),
        (QWEN3_MOE, 0),
        (QWEN3_MOE | {"sliding_window": 16}, 0),
        (QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 16}, 16),
        (QWEN3_MOE | {"use_sliding_window": True, "sliding_window": None}, 0),
    ],
)
def test_the_window_of_qwens_mixtures_is_the_one_that_hugging_face_uses(config, window):
    assert find_family(config["model_type"]).architecture(config).sliding_window == window
    theirs = AutoConfig.for_model(**config)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"]
    assert (theirs.sliding_window if "sliding_attention" in kinds else 0) in (
        window,
        window or None,
    )


def test_an_unsupported_family_is_refused_by_name_with_the_supported_ones():
    with pytest.raises(UnknownName, match="`mamba2` of `tiny`") as caught:
        read_model(reference({"model_type": "mamba2"}))
    assert ", ".join(sorted(BASE)) in caught.value.hint
    with pytest.raises(InvalidRequest, match="no `model_type`"):
        read_model(reference({"hidden_size": 8}))


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "qwen2", "qwen3"]
)
@pytest.mark.parametrize(
    "change",
    [
        {}, {"sliding_window_pattern": 4}, {"use_sliding_window": True, "max_window_layers": 2},
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"] * 3},
    ],
)  # fmt: skip
def test_which_blocks_slide_is_what_hugging_face_says(name, change):
    config = BASE[name] | {"num_hidden_layers": 9, "sliding_window": 16} | change
    architecture = find_family(name).architecture(config)
    theirs = AutoConfig.for_model(**config).layer_types
    ours = [architecture.window(architecture.kind(i)) for i in range(9)]
    used = change.get("use_sliding_window", not name.startswith("qwen"))
    assert ours == [16 * (used and kind == "sliding_attention") for kind in theirs]


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, ("", "unrotated")),
        ({"no_rope_layer_interval": 9}, ()),
        ({"no_rope_layers": [0, 0, 0, 0, 0]}, ("unrotated",)),
        ({"no_rope_layers": [1, 1, 0, 1, 1]}, ("", "", "unrotated")),
    ],
)
def test_smollms_blocks_without_rotation_are_a_cycle(change, kinds):
    config = BASE["smollm3"] | {"num_hidden_layers": 5} | change
    architecture = find_family("smollm3").architecture(config)
    assert architecture.layer_kinds == kinds
    rotates = AutoConfig.for_model(**config).no_rope_layers
    assert [architecture.kind(i) != "unrotated" for i in range(5)] == [bool(r) for r in rotates]


@settings(max_examples=200)
@given(head_dim=st.integers(2, 512), part=st.floats(0.01, 1.0))
def test_a_rotated_part_survives_the_way_to_config_json_and_back(head_dim, part):
    rotary = max(2, int(head_dim * part))
    a = Architecture(
        family="gpt_neox", layers=1, hidden=head_dim * 2, heads=2, kv_heads=2, head_dim=head_dim,
        ffn=8, vocab=8, max_sequence=8, mlp_bias=True, rotary_dim=rotary, activation="gelu",
    )  # fmt: skip
    family = find_family("gpt_neox")
    assert family.architecture(family.config(a)).rotary_dim == rotary
