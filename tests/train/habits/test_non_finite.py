"""Losses and gradients that are not finite: a run stops with what it had, or skips the step."""

import math

import pytest
import torch
from safetensors.torch import load_file
from tiny_rollouts import recipe_of, write_data
from tiny_runs import CONFIG, tiny_recipe

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records.request import Request, Task
from memfit.train.checkpoint.files import newest_checkpoint
from memfit.train.run import loop
from memfit.train.run.logs import read_log
from memfit.train.run.loop import Cadence, train
from memfit.train.step import step as steps

STEPS = 6
PLAIN = {"clip_norm": 0.0}


@pytest.fixture
def spoil(monkeypatch):
    """Put a NaN into the gradients, or into the loss, of the steps named."""

    def arm(*numbers, what="gradient"):
        taken, bad = [0], [False]
        run_step, clip, loss = loop.run_step, steps._clip, steps._loss

        def counted(*args, **options):
            taken[0] += 1
            bad[0] = taken[0] in numbers
            try:
                return run_step(*args, **options)
            finally:
                bad[0] = False

        def spoiled_clip(built):
            if bad[0] and what == "gradient":
                next(built.model.parameters()).grad.view(-1)[0] = math.nan
            return clip(built)

        def spoiled_loss(*args):
            return loss(*args) * (math.nan if bad[0] and what == "loss" else 1.0)

        monkeypatch.setattr(loop, "run_step", counted)
        monkeypatch.setattr(steps, "_clip", spoiled_clip)
        monkeypatch.setattr(steps, "_loss", spoiled_loss)

    return arm


def each_saved(**more):
    return Cadence(**{"save_every": 1, "evaluate_every": STEPS, "keep": 9, **more})


def tensors_of(run, step, name="weights"):
    return load_file(run / "checkpoints" / f"step-{step:06}" / f"{name}.safetensors")


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize(("what", "said"), [("gradient", "gradient norm"), ("loss", "loss")])
def test_a_run_stops_by_name_and_goes_on_from_what_was_before(go, spoil, tmp_path, what, said):
    """To the bit as a run that met nothing."""
    recipe = tiny_recipe(steps=STEPS)
    whole = go(recipe, "whole", cadence=each_saved())
    spoil(4, what=what)
    with pytest.raises(RunFailed, match=f"the {said} of step 4 is nan") as caught:
        go(recipe, cadence=each_saved(keep=1))
    assert "skip_non_finite" in caught.value.hint
    run = tmp_path / "run"
    found = newest_checkpoint(run, lambda text: pytest.fail(text))
    assert found is not None
    assert found.name == "step-000003"
    assert [row["step"] for row in read_log(run)] == [1, 2, 3]
    again = go(recipe, cadence=each_saved(keep=1))  # the fault was in the fourth step alone
    assert again.losses == whole.losses
    assert_same(tensors_of(run, STEPS), tensors_of(tmp_path / "whole", STEPS))


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_step_that_is_skipped_changes_nothing_and_is_said(go, spoil, tmp_path, what):
    spoil(3, what=what)
    made = go(tiny_recipe(steps=STEPS), cadence=each_saved(skip_non_finite=1))
    run = tmp_path / "run"
    assert made.finished
    for name in ("weights", "optimizer"):
        assert_same(tensors_of(run, 2, name), tensors_of(run, 3, name))
    before, after = tensors_of(run, 3), tensors_of(run, 4)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    rows = {row["step"]: row for row in read_log(run)}
    assert list(rows) == list(range(1, STEPS + 1))
    assert [n for n, row in rows.items() if row.get("skipped")] == [3]
    assert "grad_norm" not in rows[3]
    assert (rows[3]["loss"] is None) == (what == "loss")
    assert [n for n, _ in made.losses] == [n for n in rows if rows[n]["loss"] is not None]
    (text,) = made.warnings
    assert "step 3 updated nothing" in text
    assert "nan" in text


def test_a_run_that_may_skip_and_need_not_is_the_same_to_the_bit(go, tmp_path):
    for name, most in (("may", 3), ("never", 0)):
        made = go(tiny_recipe(steps=3), name, cadence=Cadence(save_every=3, skip_non_finite=most))
        assert not made.warnings
    assert_same(tensors_of(tmp_path / "may", 3), tensors_of(tmp_path / "never", 3))


@pytest.mark.parametrize(
    ("numbers", "most", "ends"),
    [((2, 4, 6), 1, 0), ((2, 3), 1, 3), ((1, 2, 3), 3, 0), ((1,), 0, 1)],
)
def test_only_so_many_in_turn_are_skipped(go, spoil, numbers, most, ends):
    spoil(*numbers)
    cadence = Cadence(save_every=2, skip_non_finite=most)
    if not ends:
        assert len(go(tiny_recipe(steps=STEPS), cadence=cadence).warnings) == len(numbers)
        return
    with pytest.raises(RunFailed, match=f"the gradient norm of step {ends} is nan") as caught:
        go(tiny_recipe(steps=STEPS), cadence=cadence)
    assert (f"after {most} skipped in turn" in caught.value.message) == bool(most)


def test_weights_that_are_not_finite_push_no_checkpoint_out(go, spoil, tmp_path):
    """Without clipping nobody sees the norm, and the loss is finite until the next step."""
    spoil(3)
    recipe = tiny_recipe(steps=STEPS, optimizer=PLAIN)
    with pytest.raises(RunFailed, match="is not finite after step 3: no checkpoint") as caught:
        go(recipe, cadence=each_saved(keep=1))
    assert "what is saved is from before" in caught.value.hint
    found = newest_checkpoint(tmp_path / "run", lambda text: pytest.fail(text))
    assert found is not None
    assert found.name == "step-000002"
    assert all(t.isfinite().all() for t in tensors_of(tmp_path / "run", 2).values())


def test_a_held_out_loss_that_is_not_finite_ends_a_run_by_name_too(go, spoil):
    spoil(3)
    recipe = tiny_recipe(steps=STEPS, optimizer=PLAIN)
    with pytest.raises(RunFailed, match="the evaluation loss of step 3 is nan"):
        go(recipe, cadence=Cadence(save_every=6, evaluate_every=3))


def test_a_step_is_skipped_by_its_norm_alone_and_so_without_one_by_nothing(go, tmp_path, cache):
    with pytest.raises(InvalidRequest, match=r"`optimizer\.clip_norm: 0` computes none") as caught:
        go(tiny_recipe(optimizer=PLAIN), cadence=Cadence(skip_non_finite=1))
    assert "clip_norm" in caught.value.hint
    data = write_data(tmp_path)
    request = Request(model=CONFIG, task=Task(objective="grpo", data=str(data)))
    cadence = Cadence(skip_non_finite=2)
    with pytest.raises(InvalidRequest, match=r"run\.skip_non_finite: 2.*objective: grpo"):
        train(recipe_of(tmp_path), request, tmp_path / "run", cadence=cadence, cache=cache)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_a_loss_scale_that_overflows_is_no_fault_of_the_run(go):
    """The scaler skips by itself until its scale is low enough, however few may be in turn."""
    recipe = tiny_recipe(steps=STEPS, precision="fp16-mixed", base_format="fp32")
    plain = go(recipe, "plain", cadence=Cadence(save_every=3))
    may = go(recipe, "may", cadence=Cadence(save_every=3, skip_non_finite=1))
    assert plain.losses == may.losses
