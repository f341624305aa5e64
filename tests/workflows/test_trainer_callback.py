"""The callback in transformers' own Trainer: before the first step, and after it."""

from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

import memfit
from memfit.workflows import trainer_callback
from memfit.workflows.trainer_callback import Counted, MemoryCallback, StepReport

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
CONFIG = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ROWS = [{"input_ids": list(range(1, 33)), "labels": list(range(1, 33))} for _ in range(4)]


@dataclass
class LikeSft(Arguments):
    """Arguments with TRL's own key."""

    max_length: int | None = 24


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG))


@pytest.fixture
def train(model, tmp_path):
    def run(callback, *, of=model, kind=Arguments, rows=ROWS, **arguments):
        given = {"use_cpu": True, "max_steps": 2, "report_to": [], "save_strategy": "no",
                 "per_device_train_batch_size": 2, "disable_tqdm": True, **arguments}  # fmt: skip
        args = kind(output_dir=str(tmp_path), **given)
        Trainer(of, args, train_dataset=rows, callbacks=[callback]).train()

    return run


@pytest.fixture
def counters(monkeypatch):
    """CUDA's counters as a device would have them."""

    class Cuda:
        reset = 0

        def reset_peak_memory_stats(self):
            self.reset += 1

        def max_memory_allocated(self):
            return 20 * 2**20

        def max_memory_reserved(self):
            return 22 * 2**20

    made = Cuda()
    monkeypatch.setattr(trainer_callback, "_counters", lambda: made)
    return made


def test_the_step_is_that_of_the_arguments_the_model_and_the_data(train):
    said = []
    callback = MemoryCallback(device="l4", say=said.append)
    train(callback, gradient_accumulation_steps=2, optim="sgd", learning_rate=1e-3)
    recipe = callback.plan.recipe
    assert (recipe.framework, recipe.method, recipe.precision) == ("hf-trainer", "full", "fp32")
    assert (recipe.sequence_length, recipe.micro_batch, recipe.accumulation) == (32, 2, 2)
    assert recipe.optimizer.name == "sgd"
    assert callback.answer.verdict == "fits"
    assert said[0].startswith("memfit: <Plan FITS llama on l4")
    assert "nothing was measured" in said[1]
    assert len(said) == 2


def test_predicted_stands_beside_measured(train, counters):
    callback = MemoryCallback(device="l4", say=lambda text: None)
    train(callback)
    assert counters.reset == 1
    allocated, reserved = callback.report.rows
    assert allocated.predicted == callback.plan.memory.peak_allocated
    assert (allocated.measured, reserved.measured) == (20 * 2**20, 22 * 2**20)
    assert allocated.error == pytest.approx(allocated.predicted / (20 * 2**20) - 1)
    assert f"({allocated.error:+.1%})" in str(callback.report)
    assert list(callback.report.to_pandas()["measured"]) == [20 * 2**20, 22 * 2**20]


def test_what_does_not_fit_raises_before_the_first_step(train, model):
    before = model.lm_head.weight.clone()
    callback = MemoryCallback(device="l4", memory="16 MiB", say=lambda text: None)
    with pytest.raises(memfit.DoesNotFit, match="this Trainer's step needs") as caught:
        train(callback)
    assert "on_miss='warn'" in caught.value.hint
    assert torch.equal(before, model.lm_head.weight)
    warned = MemoryCallback(device="l4", memory="16 MiB", say=lambda text: None, on_miss="warn")
    train(warned)
    assert warned.report is not None


def test_adapters_of_peft_are_the_steps(train, model):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    callback = MemoryCallback(device="l4", say=lambda text: None)
    train(callback, of=get_peft_model(model, lora))
    recipe = callback.plan.recipe
    assert (recipe.method, recipe.lora.rank, recipe.lora.targets) == ("lora", 4, ("q_proj",))
    assert recipe.lora.dropout == 0


@pytest.mark.parametrize(
    ("installed", "version"), [("0.29.1", "0.29"), ("1.4.0", "0.29"), ("1.16.0", "1.16")]
)
def test_trls_arguments_are_trls_step(train, monkeypatch, installed, version):
    monkeypatch.setattr(trainer_callback, "installed_versions", lambda names: {"trl": installed})
    callback = MemoryCallback(device="l4", say=lambda text: None)
    train(callback, kind=LikeSft)
    recipe = callback.plan.recipe
    assert (recipe.framework, recipe.sequence_length) == ("trl", 24)
    assert recipe.options["version"] == version


def test_rows_whose_length_cannot_be_seen_are_asked_for():
    callback = MemoryCallback(device="l4")
    with pytest.raises(memfit.InvalidRequest, match="how long") as caught:
        callback._find_length(Arguments(output_dir="x", use_cpu=True), None)
    assert "sequence_length=" in caught.value.hint
    assert MemoryCallback(sequence_length=7)._find_length(None, None) == 7


def test_every_event_of_the_trainer_is_answered():
    callback = MemoryCallback()
    events = [name for name in dir(TrainerCallback) if name.startswith("on_")]
    assert len(events) > 10
    for event in events:
        if event != "on_train_begin":
            assert getattr(callback, event)(None, None, None) is None
    with pytest.raises(AttributeError):
        _ = callback.something


@pytest.mark.parametrize(
    ("words", "said"),
    [({"on_miss": "stop"}, "`on_miss=stop`"), ({"devise": "l4"}, "unknown word: `devise`")],
)
def test_wrong_words_are_refused_at_once(words, said):
    with pytest.raises(memfit.InvalidRequest, match=said):
        MemoryCallback(**words)


def test_an_unknown_side_has_no_error():
    assert Counted(name="x", predicted=None, measured=1).error is None
    assert "unknown" in str(
        StepReport(subject="x", rows=(Counted(name="x", predicted=1, measured=None),))
    )
