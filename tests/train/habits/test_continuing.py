"""A run goes on beyond its end: its states, and the schedule as transformers' Trainer has it."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from tiny_runs import tiny_recipe, write_text
from torch.optim import SGD
from transformers import get_scheduler

from memfit.core.errors import InvalidRequest
from memfit.records.habits.continued import check_continues, name_lineage
from memfit.train.run.loop import Cadence
from typed_commands import STATED, quick, write

OFTEN = Cadence(save_every=3, evaluate_every=3)


def resume_theirs(kind, rate, done, steps):
    """Rates of all steps of transformers' own schedule: `done` steps of a run that ends there, then
    loaded by a run of `steps` with the optimizer, as Trainer does (`resume_from_checkpoint`)."""
    rates, state = [], None
    for first, last in ((0, done), (done, steps)):
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        schedule = get_scheduler(kind, optimizer, 2, last)
        if state is not None:
            optimizer.load_state_dict(state[0])
            schedule.load_state_dict(state[1])
        for _ in range(first, last):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        state = optimizer.state_dict(), schedule.state_dict()
    return rates


def read_rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_schedule_goes_on_as_transformers_trainer_resumes_it(kind, go, tmp_path):
    short = tiny_recipe(steps=6, optimizer={"schedule": kind})
    go(short, cadence=OFTEN)
    run = go(replace(short, steps=12), cadence=OFTEN)
    ours = [row["learning_rate"] for row in read_rows(tmp_path / "run")]
    theirs = resume_theirs(kind, short.optimizer.learning_rate, 6, 12)
    # Trainer's first step after loading still has the rate that the old schedule ended with
    assert theirs[6] == 0
    assert ours[:6] + ours[7:] == pytest.approx(theirs[:6] + theirs[7:])
    assert ours[6] > ours[7] > ours[11] > 0
    (said,) = run.continued
    assert "goes on after step 6 to step 12 with its weights, its optimizer states" in said
    assert f"`{kind}` over 12 steps, learning rate {ours[6]:.3g} at step 7" in said
    assert f"{ours[11]:.3g} at step 12 (it was {ours[5]:.3g} at step 6)" in said


def test_what_goes_on_has_the_bits_of_a_run_of_that_length(go, tmp_path):
    """Where the schedule does not depend on the length: weights, states and rows are kept."""
    recipe = tiny_recipe(steps=6, optimizer={"schedule": "constant"})
    whole = go(replace(recipe, steps=10), "whole", cadence=OFTEN)
    go(recipe, cadence=OFTEN)
    run = go(replace(recipe, steps=10), cadence=OFTEN)
    assert run.losses == whole.losses
    ours, theirs = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_schedule_is_the_same_lineage_and_another_seed_is_not():
    recipe = tiny_recipe()
    for same in ({"schedule": "linear"}, {"learning_rate": 1.0}, {"floor": 0.1, "warmup_steps": 0}):
        check_continues(recipe, tiny_recipe(steps=9, optimizer=same), 6)
    for other in ({"seed": 1}, {"optimizer": {"beta2": 0.95}}, {"sequence_length": 16}):
        assert name_lineage(tiny_recipe(**other)) != name_lineage(recipe)
    with pytest.raises(InvalidRequest, match="differs in more than its steps"):
        check_continues(recipe, tiny_recipe(steps=9, seed=1), 6)
    with pytest.raises(
        InvalidRequest, match=r"`task.steps: 6` is asked for, and the run has done 6"
    ):
        check_continues(recipe, recipe, 6)


@pytest.mark.slow
def test_the_command_goes_on_where_it_is_told_to(tmp_path, certified_here):
    folder = tmp_path / "run"
    task = {**STATED["task"], "data": str(write_text(tmp_path / "data"))}
    file = write(tmp_path, STATED | {"task": task})

    def train(*words):
        return quick("train", file, "--folder", folder, *words)

    code, _, said = train("--continue")
    assert code == 2
    assert f"`{folder}` holds no run that could go on" in said
    assert train()[0] == 0
    longer = ("--set", "task.steps=5", "--set", "optimizer.schedule=linear")
    code, _, said = train(*longer)
    assert code == 2
    assert "`task.steps` (3 there, 5 here)" in said
    assert "`--continue` goes on with the run's weights and states" in said
    code, _, said = train(*longer, "--set", "seed=1", "--continue")
    assert code == 2
    assert "`seed` (0 there, 1 here)" in said
    code, _, said = train("--set", "task.steps=2", "--continue")
    assert code == 2
    assert "`task.steps: 2` is asked for, and the run has done 3 steps" in said
    log, rows = folder / "log.jsonl", read_rows(folder)
    worse = [{**row, "evaluation_loss": float(row["step"])} for row in rows]
    log.write_text("".join(json.dumps(row) + "\n" for row in worse))
    waits = ("--set", "run.best_by=loss", "--set", "run.patience=2")
    code, _, said = train(*longer, *waits, "--continue")
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert code == 2
    assert "would end where it is, after step 3: `run.patience: 2`" in said
    (tmp_path / "data" / "more.txt").write_text("More of it.")
    code, _, said = train(*longer, "--continue")
    assert code == 2
    assert "the files of `task.data`, or the tokenizer, are others than then" in said
    (tmp_path / "data" / "more.txt").unlink()
    assert json.loads((folder / "request.json").read_text())["task"]["steps"] == 3
    code, _, said = train(*longer, "--continue")
    assert code == 0
    assert "the run of 3 steps goes on after step 3 to step 5" in said
    assert [row["step"] for row in read_rows(folder)] == [1, 2, 3, 4, 5]
    assert train(*longer)[0] == 0  # it is the folder's request from here on
