"""fp16 with a loss scale: gradients survive, overflowing steps are skipped, a scale collapses."""

import json

import pytest
import torch
from tiny_runs import CONFIG, tiny_recipe, write_text

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records.recipe import Freeze
from memfit.records.request import Request, Task
from memfit.train.measure.counters import run_step, synthetic_micro
from memfit.train.model.weights import fill_weights
from memfit.train.run.loop import Cadence, train
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.scaling import SMALLEST, was_skipped

LOSSES = [{}, {"loss": "chunked", "loss_chunk": 20}]
OPTIMIZERS = {
    "adamw fused": {"implementation": "fused"},
    "adamw foreach": {"implementation": "foreach"},
    "adamw8bit": {"name": "adamw8bit", "implementation": "loop"},
}


def build(recipe):
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    return Built(recipe, model, build_optimizer(recipe, model))


def micros(built, n=1):
    return [synthetic_micro(built.recipe, 300)] * n


def weights(built):
    return torch.cat([p.detach().flatten() for p in built.model.parameters()])


def gradient_of(recipe):
    """The gradient that one step of plain SGD shows as the difference of the weights."""
    built = build(recipe)
    before = weights(built)
    run_step(built, micros(built))
    return before - weights(built)


PLAIN_SGD = {
    "name": "sgd", "implementation": "foreach", "learning_rate": 1.0, "momentum": 0.0,
    "clip_norm": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "chunked"])
def test_the_gradient_is_fp32s_within_the_rounding_of_fp16(loss):
    exact = gradient_of(tiny_recipe(optimizer=PLAIN_SGD, **loss))
    half = gradient_of(tiny_recipe(optimizer=PLAIN_SGD, precision="fp16-mixed", **loss))
    error = (half - exact).norm() / exact.norm()
    assert error < 4e-3  # fp16 rounds to 2**-11 = 5e-4; a dozen roundings lie in between


@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "chunked"])
def test_without_a_scale_small_gradients_would_be_lost(loss, monkeypatch):
    """Divided by 2**20 target tokens, gradients are below fp16's smallest number, 6e-8."""
    from memfit.train.measure import counters

    def gradient(precision):
        real = counters.step

        def many(built, batches, _, enter, **more):
            return real(built, batches, 2**20, enter, **more)

        monkeypatch.setattr(counters, "step", many)
        found = gradient_of(tiny_recipe(optimizer=PLAIN_SGD, precision=precision, **loss))
        monkeypatch.setattr(counters, "step", real)
        return found

    exact, half = gradient("fp32"), gradient("fp16-mixed")
    assert (half - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(optimizer):
    built = build(tiny_recipe(precision="fp16-mixed", optimizer=optimizer))
    run_step(built, micros(built))
    before, moments = weights(built), str(built.optimizer.state_dict()["state"])
    built.scaler.update(2.0**60)
    result = run_step(built, micros(built))
    assert was_skipped(built.scaler, result.scale, 2)
    assert built.scaler.get_scale() == 2.0**59
    assert torch.equal(weights(built), before)
    assert str(built.optimizer.state_dict()["state"]) == moments
    built.scaler.update(2.0**10)
    result = run_step(built, micros(built))
    assert not was_skipped(built.scaler, result.scale, 3)
    assert not torch.equal(weights(built), before)


def test_a_collapsed_scale_ends_the_run():
    built = build(tiny_recipe(precision="fp16-mixed"))
    result = run_step(built, micros(built))
    built.scaler.update(SMALLEST / 2)
    with pytest.raises(RunFailed, match=r"the loss scale has fallen to .* by step 7"):
        was_skipped(built.scaler, result.scale, 7)


def test_skipped_steps_are_in_the_log_and_do_not_end_the_run(tmp_path, monkeypatch):
    request = Request(model=CONFIG, task=Task(data=str(write_text(tmp_path / "data"))))
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind: scaler(kind, init_scale=2.0**38))
    recipe = tiny_recipe(precision="fp16-mixed", steps=30)
    run = train(recipe, request, tmp_path / "run", cadence=Cadence(save_every=7))
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert run.finished
    assert 0 < len(skipped) < 30
    assert skipped == list(range(1, len(skipped) + 1)), "the scale falls until gradients fit"
    assert all(("grad_norm" in row) != row["skipped"] for row in rows)
    assert rows[len(skipped)]["loss_scale"] == 2.0 ** (38 - len(skipped))


def test_a_base_in_another_16_bit_format_is_refused():
    recipe = tiny_recipe(
        method="freeze", freeze=Freeze(last_blocks=1), precision="fp16-mixed", base_format="bf16"
    )
    with pytest.raises(InvalidRequest, match="cast to another 16-bit format"):
        build_model(recipe, "cpu")
