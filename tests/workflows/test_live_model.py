"""Models that are in memory already, planned: what is read of them, and what is refused."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GPTQConfig

import memfit
from memfit.workflows.live_model import read_live

# of peft: it calls what transformers has renamed, and each class has its own advice
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
WORDS = {"device": "l4", "seq_len": 128}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def config_of(family="llama", **more):
    return AutoConfig.for_model(family, **SIZES, **more)


def module_of(dtype=torch.float32, **more):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(**more), dtype=dtype)


def adapted(**more):
    return get_peft_model(module_of(), LoraConfig(**{**LORA, **more}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_config_is_planned_as_its_config_json(family, tmp_path):
    config = config_of(family)
    config.save_pretrained(tmp_path)
    plan = memfit.plan_model(config, **WORDS)
    named = memfit.plan(tmp_path, weights="random", **WORDS)
    assert plan.memory.peak_allocated == named.memory.peak_allocated
    assert plan.recipe.model.source == ""


def test_a_module_that_trains_whole_says_so():
    plan = memfit.plan_model(module_of(), **WORDS)
    assert plan.recipe.method == "full"
    whole = memfit.plan_model(config_of(), method="full", **WORDS)
    assert plan.ledger == whole.ledger
    assert memfit.plan_model(module_of(torch.bfloat16), **WORDS).recipe.precision == "bf16"


def test_peft_adapters_are_read():
    plan = memfit.plan_model(adapted(lora_dropout=0.1, use_rslora=True), **WORDS)
    lora = plan.recipe.lora
    assert plan.recipe.method == "lora"
    assert (lora.rank, lora.alpha, lora.dropout, lora.scaling) == (4, 8, 0.1, "rank-stabilised")
    assert set(lora.targets) == {"q_proj", "v_proj"}
    assert plan.recipe.base_format == "fp32"
    assert memfit.plan_model(adapted(use_dora=True), **WORDS).recipe.method == "dora"
    every = memfit.plan_model(adapted(target_modules="all-linear"), **WORDS).recipe.lora.targets
    assert len(every) == 7


def test_frozen_parameters_are_read():
    module = module_of()
    for name, parameter in module.named_parameters():
        parameter.requires_grad = "layers.1" in name
    plan = memfit.plan_model(module, **WORDS)
    assert plan.recipe.method == "freeze"
    assert all("layers.1" in name for name in plan.recipe.freeze.patterns)


def test_a_word_takes_the_place_of_what_is_read():
    plan = memfit.plan_model(module_of(), method="lora", **WORDS)
    assert plan.recipe.method == "lora"


def test_quantised_bases_are_read():
    config = config_of()
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert read_live(config)["base_format"] == "nf4"
    config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    assert read_live(config)["base_format"] == "int8"
    assert memfit.plan_model(config, method="lora", **WORDS).recipe.method == "lora"


def gptq():
    config = config_of()
    config.quantization_config = GPTQConfig(bits=4)
    return config


def two_adapters():
    module = adapted()
    module.add_adapter("second", LoraConfig(**LORA))
    return module


def another_head():
    module = module_of()
    module.score = torch.nn.Linear(64, 3)
    return module


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.nn.Linear(2, 2), "a `Linear` is neither"),
        (lambda: "llama", "a `str` is neither"),
        (lambda: None, "a `NoneType` is neither"),
        (gptq, "quantised by `gptq`"),
        (two_adapters, "has 2 adapters: default, second"),
        (lambda: get_peft_model(module_of(), IA3Config(task_type="CAUSAL_LM")), "type `IA3`"),
        (another_head, "the module trains"),
        (lambda: adapted(modules_to_save=["lm_head"]), "the module trains"),
        (lambda: AutoConfig.for_model("bert"), "bert"),
    ],
)
def test_what_is_not_described_is_refused(make, said):
    with pytest.raises(memfit.InvalidRequest, match=said) as caught:
        memfit.plan_model(make(), **WORDS)
    assert caught.value.hint
