"""What is said to be left of a run, against what it takes."""

from statistics import median

import pytest
from tiny_runs import tiny_recipe

from memfit.train.habits.time_left import Due, TimeBeside
from memfit.train.run.loop import Cadence
from memfit.train.run.progress import Facts, Moment, Silent, remaining

DUE = Due(steps=100, save_every=10, evaluate_every=10, sample=5000, whole=60000, step_tokens=1000)
STEP, TOKEN, SAVE = 1.0, 0.0004, 2.0  # seconds: held-out tokens are a third slower than a forward's


def play(due):
    """The seconds when each step is shown, what is said to be left beside the steps, and the end"""
    beside, now, shown = TimeBeside(due), 0.0, []
    for step in range(1, due.steps + 1):
        now += STEP
        beside.note_step(STEP)
        last = step == due.steps
        if due.evaluate_every and (last or step % due.evaluate_every == 0):
            seconds = TOKEN * (due.whole if last else due.sample)
            now += seconds
            beside.note_evaluation(seconds, last=last)
        shown.append((step, now, beside.after(step)))
        if last or step % due.save_every == 0:
            now += SAVE
            beside.note_save(SAVE)
    return shown, now


CASES = {
    "usual": DUE,
    "no evaluation": DUE._replace(evaluate_every=0),
    "odd": DUE._replace(steps=97, save_every=7, evaluate_every=13),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_is_what_it_takes(case):
    due = CASES[case]
    shown, end = play(due)
    first = max(due.save_every, due.evaluate_every) + 1  # when both were timed
    for step, now, beside in shown[first:]:
        assert (due.steps - step) * STEP + beside == pytest.approx(end - now, abs=1e-6), step
    # before that an evaluation is known to cost about a forward; steps alone miss half of it
    step, now, beside = shown[0]
    assert (due.steps - step) * STEP + beside > 0.75 * (end - now)
    if due.evaluate_every:
        half = shown[due.steps // 2]
        assert (due.steps - half[0]) * STEP < 0.67 * (end - half[1])


def test_the_line_adds_it_to_both_times():
    moment = Moment(
        step=40, loss=1.0, learning_rate=1e-3, seconds=1.0, tokens_per_second=1.0, memory=0,
        evaluation_loss=None, beside=30.0,
    )  # fmt: skip
    facts = Facts(steps=100, done=0, predicted_step_seconds=2.0, certified_peak=None)
    assert remaining(facts, moment, [1.0]) == "1 min 30 s left (predicted 2 min 30 s)"


def test_a_run_times_what_it_does_beside_its_steps(go, monkeypatch):
    """With a clock that an evaluation and a checkpoint move by known steps."""
    from memfit.train.run import loop

    moments = []

    class Kept(Silent):
        def show(self, moment):
            moments.append(moment)

    clock = [0.0]

    def tick():
        clock[0] += 1e-6
        return clock[0]

    monkeypatch.setattr(loop.time, "perf_counter", tick)
    for name, seconds in (("_take_step", 1.0), ("evaluate_held_out", 8.0), ("_save", 3.0)):
        plain = getattr(loop, name)

        def slow(*arguments, plain=plain, seconds=seconds):
            clock[0] += seconds
            found = plain(*arguments)
            return found | {"seconds": 1.0, "tokens": 1} if "seconds" in (found or {}) else found

        monkeypatch.setattr(loop, name, slow)
    cadence = Cadence(save_every=2, evaluate_every=2, best_by="loss")  # all tokens each time
    go(tiny_recipe(steps=8), cadence=cadence, progress=Kept())
    assert median(m.seconds for m in moments) == 1.0
    # after step 5: evaluations after 6 and 8, checkpoints after 6 and 8
    assert moments[4].beside == pytest.approx(2 * 8.0 + 2 * 3.0, abs=0.01)
    assert moments[7].beside == pytest.approx(3.0, abs=0.01)
