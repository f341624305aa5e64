"""Rules of thumb beside exact accounting."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memfit import api
from memfit.catalog import find_model
from memfit.families import read_model
from memfit.plan.questions.rules import nominal_size, rules

TINY = {
    "model_type": "llama", "vocab_size": 640, "hidden_size": 96, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip


def model(name):
    return read_model(find_model(name).reference())


def by_name(name, **kw):
    return {r.name: r for r in rules(model(name), **kw)}


def test_the_textbook_figures_of_seven_billion():
    found = by_name("llama-2-7b")
    figures = {name: rule.figure / 1e9 for name, rule in found.items()}
    assert figures == {
        "load-fp32": 28, "load-16bit": 14, "load-8bit": 7, "load-4bit": 3.5,
        "train-states": 112, "train-18": 126, "train-24": 168, "train-80": 560,
        "dpo-two-models": 28,
        "adamw-12": 84, "sgd-8": 56, "adam8bit-6": 42, "adafactor-4": 28, "gradients-8bit": 7,
    }  # fmt: skip
    assert "7B = 168 GB" in found["train-24"].says
    assert "20B: 80 GB" in found["load-fp32"].holds
    assert "20B: 40 GB" in found["load-16bit"].holds
    assert "20B: 20 GB" in found["load-8bit"].holds
    assert "20B: 10 GB" in found["load-4bit"].holds
    assert "1B: 80 GB" in found["train-80"].says
    assert "1B: 24 GB" in found["train-24"].holds


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_the_exact_side_is_what_torch_holds_after_a_step(optimizer):
    from memfit.records.model import ModelReference

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    make = {
        "adamw": lambda p: torch.optim.AdamW(p),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        "adafactor": lambda p: torch.optim.Adafactor(p),
    }[optimizer]
    update = make(module.parameters())
    module(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    update.step()
    held = sum(
        v.nbytes for s in update.state.values() for v in s.values() if isinstance(v, torch.Tensor)
    )
    weights = sum(p.nbytes for p in module.parameters())
    gradients = sum(p.grad.nbytes for p in module.parameters())
    ours = {
        r.name: r for r in rules(read_model(ModelReference(name="tiny", source="", config=TINY)))
    }
    assert ours["load-fp32"].exact == weights
    assert ours["load-16bit"].exact == weights / 2
    if optimizer == "adamw":
        assert ours["adamw-12"].exact == held
        assert ours["train-states"].exact == weights + gradients + held
    else:
        assert ours[{"sgd": "sgd-8"}.get(optimizer, "adafactor-4")].exact == held


def test_every_error_is_signed_and_what_depends_on_a_batch_says_so():
    for rule in rules(model("qwen2.5-7b")):
        assert rule.says
        assert rule.because
        assert rule.holds
        if rule.depends_on_batch:
            assert rule.exact is rule.error is None
            assert "depends on batch" in rule.because
        else:
            assert rule.error == pytest.approx((rule.figure - rule.exact) / rule.exact)


def test_rules_are_judged_against_the_plain_step_of_the_trainer_that_people_use():
    """The certified plain step of Llama 2 7B in fp32, 4,096 tokens a row, is 156 GB."""
    found = {rule.name: rule for rule in api.rules("llama-2-7b")}
    assert found["train-24"].exact == pytest.approx(156e9, rel=0.02)
    assert abs(found["train-24"].error) < 0.1
    for part in ("Hugging Face's Trainer", "nothing recomputed", "accumulated over two"):
        assert part in api.RULES_PEAK


def test_gradients_in_8_bits_are_a_quarter_of_what_exists():
    rule = by_name("llama-2-7b")["gradients-8bit"]
    assert rule.error == pytest.approx(7e9 / (4 * 6_738_415_616) - 1)
    assert "optimizer.in_backward" in rule.holds


def test_a_predicted_peak_answers_what_depends_on_a_batch():
    found = by_name("llama-2-7b", predicted_peak=210 * 10**9)
    assert found["train-24"].exact == 210e9
    assert found["train-24"].error == pytest.approx(-0.2)
    assert "given" in found["train-24"].because
    assert found["train-80"].error == pytest.approx(560 / 210 - 1)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-2-7b", 7e9),
        ("llama-3.1-8b", 8e9),
        ("smollm2-135m", 135e6),
        ("mistral-7b-v0.1", 7e9),
        ("qwen3-0.6b", 0.6e9),
        ("tinyllama-1.1b", 1.1e9),
    ],
)
def test_the_nominal_size_is_the_one_in_the_name(name, size):
    assert nominal_size(model(name)) == size


def test_a_name_without_a_size_counts_exactly():
    assert nominal_size(model("gpt2-xl")) == 1557611200
    assert by_name("gpt2-xl")["load-fp32"].error == 0


def test_four_bit_misleads_most_where_the_embedding_is_most_of_the_model():
    small, large = by_name("smollm2-135m")["load-4bit"], by_name("llama-2-70b")["load-4bit"]
    assert small.error < -0.3
    assert -0.05 < large.error < 0


def test_nf4_and_int8_by_hand():
    """One linear layer of 4096 x 4096: QLoRA's 4.127 bits, LLM.int8's row scales."""
    from memfit.records.model import Architecture, Model, Weight

    a = Architecture(
        family="llama", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=1,
        max_sequence=1,
    )  # fmt: skip
    layer = Weight(name="w", shape=(4096, 4096), part="block", layer=0)
    norm = Weight(name="n", shape=(100,), part="norm")
    found = {r.name: r for r in rules(Model(name="m", architecture=a, weights=(layer, norm)))}
    n = 4096**2
    assert found["load-4bit"].exact == n / 2 + n / 64 + 4 * n / 64 / 256 + 4 + 4 * 256 + 200
    assert (found["load-4bit"].exact - 200) * 8 / n == pytest.approx(4.127, abs=1e-3)
    assert found["load-8bit"].exact == n + 4 * 4096 + 200
    assert found["adam8bit-6"].exact == 2 * (n + n / 256 * 4 + 256 * 4) + 8 * 100 + 2 * 4
