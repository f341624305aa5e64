"""Methods of training: declared rows against peft's and Hugging Face's own modules."""

import warnings

import pytest
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from memfit.adapters import adapters, find_adapter
from memfit.adapters.shared.projections import choose_targets
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.records.recipe import Freeze, Lora
from tiny_models import CONFIGS, FAMILIES, TARGETS, make_recipe

WIDE_TARGETS = {
    "deepseek_v2": ("kv_a_proj_with_mqa", "o_proj"),
    "deepseek_v3": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h"),
    "llama": ("q_proj", "down_proj", "lm_head"),
    "gptj": ("k_proj", "fc_in", "lm_head"),
    "falcon": ("query_key_value", "dense_4h_to_h"),
    "bloom": ("query_key_value", "dense"),
    "mpt": ("Wqkv", "down_proj"),
    "opt": ("out_proj", "fc1", "project_out"),
    "phi3": ("o_proj", "gate_up_proj"),
    "phi": ("dense", "fc1", "lm_head"),
    "glm4": ("k_proj", "gate_up_proj"),
    "starcoder2": ("k_proj", "c_fc"),
    "glm4_moe_lite": ("q_a_proj", "kv_a_proj_with_mqa"),
}


DENSE = [f for f in FAMILIES if not read_model(make_recipe(f).model).architecture.experts.count]


def adapted(recipe):
    return find_adapter(recipe).adapt(read_model(recipe.model), recipe)


def with_lora(family, targets, rank=4):
    return make_recipe(family, method="lora", lora=Lora(rank=rank, alpha=8.0, targets=targets))


def hugging_face(family):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[family]))


def test_every_method_of_a_request_is_registered():
    assert list(adapters) == ["dora", "freeze", "full", "lora"]


@pytest.mark.parametrize("family", FAMILIES)
def test_full_trains_hugging_faces_parameters(family):
    rows = adapted(make_recipe(family)).weights
    expected = [(n, tuple(p.shape)) for n, p in hugging_face(family).named_parameters()]
    assert [(r.name, r.shape) for r in rows] == expected
    assert all(r.trainable for r in rows)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_pefts_in_name_shape_order_and_trainability(family, wide, method):
    others = ("k_proj", "up_proj" if family in DENSE else "o_proj")
    targets = WIDE_TARGETS.get(family, others) if wide else None
    targets = targets or TARGETS.get(family, ("q_proj", "v_proj"))
    config = LoraConfig(
        r=4, target_modules=list(targets), task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2",
        use_dora=method == "dora",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers renamed
        theirs = get_peft_model(hugging_face(family), config)
    expected = [(n, tuple(p.shape), p.requires_grad) for n, p in theirs.named_parameters()]
    rows = adapted(replace(with_lora(family, targets), method=method)).weights
    assert [(r.name, r.shape, r.trainable) for r in rows] == expected


@pytest.mark.parametrize("family", DENSE)
def test_all_linear_adapts_what_pefts_all_linear_adapts(family):
    config = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers renamed
        theirs = get_peft_model(hugging_face(family), config)
    targets = choose_targets("all-linear", read_model(make_recipe(family).model), ())
    rows = adapted(with_lora(family, targets)).weights
    expected = {n for n, p in theirs.named_parameters() if p.requires_grad}
    assert {r.name for r in rows if r.trainable} == expected


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(DENSE)))
def test_all_linear_of_a_mixture_is_refused_with_what_can_be_named(family):
    model = read_model(make_recipe(family).model)
    with pytest.raises(InvalidRequest, match="whose experts peft would adapt too") as caught:
        choose_targets("all-linear", model, ())
    named = caught.value.hint.partition("[")[2].partition("]")[0].split(", ")
    assert "o_proj" in named
    assert adapted(with_lora(family, tuple(named))).trainable_parameters


def test_lora_trains_rank_times_in_plus_out():
    rows = [r for r in adapted(with_lora("llama", ("q_proj",), rank=8)).weights if r.trainable]
    assert sum(r.numel for r in rows) == 3 * 8 * (32 + 32)


@pytest.mark.parametrize("target", ["q_porj", "embed_tokens", "self_attn", "input_layernorm", "q"])
def test_a_lora_target_that_names_no_projection_is_refused_with_those_that_exist(target):
    with pytest.raises(InvalidRequest) as caught:
        adapted(with_lora("llama", ("v_proj", target)))
    assert f"`{target}`" in caught.value.message
    assert "q_proj" in caught.value.hint
    assert "lm_head" in caught.value.hint


def test_a_router_is_no_projection_that_lora_could_adapt():
    with pytest.raises(InvalidRequest, match="`gate` matches no projection") as caught:
        adapted(with_lora("qwen2_moe", ("q_proj", "gate")))
    assert "shared_expert_gate" in caught.value.hint


@pytest.mark.parametrize("family", ["glm4_moe", "qwen2_moe"])
def test_shared_experts_are_not_adapted_because_peft_would_take_the_routed_ones_too(family):
    with pytest.raises(InvalidRequest, match=r"`up_proj` of .*whose experts") as caught:
        adapted(with_lora(family, ("q_proj", "up_proj")))
    assert "o_proj" in caught.value.hint


def test_a_misspelt_lora_target_is_corrected():
    with pytest.raises(InvalidRequest, match="did you mean `q_proj`"):
        adapted(with_lora("llama", ("q_porj",)))


def test_a_tied_head_is_no_lora_target():
    with pytest.raises(InvalidRequest, match="`lm_head` matches no projection"):
        adapted(with_lora("qwen2", ("lm_head",)))


def test_lora_without_targets_is_refused():
    with pytest.raises(InvalidRequest, match="targets` is empty"):
        adapted(with_lora("llama", ()))


def trained(family="llama", **freeze):
    rows = adapted(make_recipe(family, method="freeze", freeze=Freeze(**freeze))).weights
    return {r.name for r in rows if r.trainable}


def test_freezing_trains_the_last_blocks_the_final_norm_and_the_head():
    names = trained(last_blocks=2)
    assert {n.split(".")[2] for n in names if "layers" in n} == {"1", "2"}
    assert {n for n in names if "layers" not in n} == {"model.norm.weight", "lm_head.weight"}


def test_a_tied_head_stays_frozen_unless_a_pattern_names_it():
    assert "model.embed_tokens.weight" not in trained("qwen2", last_blocks=1)
    names = trained("qwen2", last_blocks=1, patterns=("*embed*",))
    assert "model.embed_tokens.weight" in names


def test_patterns_alone_train_what_they_match():
    assert trained(patterns=("*.1.mlp.*",)) == {
        f"model.layers.1.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }


@pytest.mark.parametrize(
    ("freeze", "said"),
    [
        (Freeze(), "would train nothing"),
        (Freeze(last_blocks=4), "has 3 blocks"),
        (Freeze(patterns=("*norm*", "*nrom*")), r"`\*nrom\*` matches no weight"),
    ],
)
def test_freezing_that_makes_no_sense_is_refused(freeze, said):
    with pytest.raises(InvalidRequest, match=said):
        adapted(make_recipe(method="freeze", freeze=freeze))


def test_what_is_trained_and_what_is_frozen_have_their_own_dtypes():
    recipe = make_recipe(method="lora", precision="bf16-mixed", base_format="bf16")
    dtypes = {r.trainable: r.dtype for r in adapted(recipe).weights}
    assert dtypes == {True: "float32", False: "bfloat16"}
    full = adapted(replace(recipe, method="full"))
    assert {r.dtype for r in full.weights} == {"float32"}
