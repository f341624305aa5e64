"""A short screen's plan: it shows what a whole plan says, though less of it is worked out."""

import io

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.plan.questions import shown_levers
from memfit.plan.questions.replanned import list_changes
from memfit.plan.questions.shown_levers import FEW, choose_levers, needs, replan_shown
from memfit.plan.request.problem import read_problem
from memfit.plan.search import candidate, search
from memfit.plan.search.best_first import _preferences
from memfit.plan.search.candidate import Candidate
from memfit.plan.search.estimate import Estimate, applies
from memfit.plan.simulate.recompute import RecomputedBlocks
from memfit.screens.short import show_short
from memfit.screens.widgets.terminal import Console

pytestmark = pytest.mark.levers

CASES = {
    "everything kept": ("pythia-410m", "l4", {}),
    "blocks recomputed": ("llama-3.2-1b", "l4", {"method": "full", "precision": "bf16"}),
    "adapters": ("qwen2.5-0.5b", "rtx-3090", {"method": "lora"}),
    "pairs": ("pythia-410m", "l4", {"task.objective": "dpo", "task.sequence_length": 512}),
    "ranks": ("gpt2", "l4", {"hardware.count": 2}),
    "nothing fits": ("pythia-410m", "rtx-4090", {"method": "full", "limits.memory": "1 GiB"}),
    "a processor": ("pythia-70m", "cpu", {"limits.memory": "1 GiB"}),
}


def show(plan):
    out = io.StringIO()
    show_short(Console(out, width=80), plan, commands=["memfit certify"])
    return out.getvalue()


def test_levers_of_a_plan_whose_replay_takes_seconds_are_estimates_beside_it(monkeypatch):
    """Linear attention's loops: they are planned by the plan's own ratio, and say so."""
    request = api.read("pythia-410m", device="l4", changes={"method": "lora"})
    exact = {str(row.changes): row for row in api.plan(request).levers}
    replay, replayed = candidate.replay_run, []
    monkeypatch.setattr(candidate, "LONG", 0)
    monkeypatch.setattr(
        candidate, "replay_run", lambda *asked: (replayed.append(asked), replay(*asked))[1]
    )
    search.search_briefly(read_problem(request))
    alone = len(replayed)
    brief = api.plan_briefly(request)
    assert len(replayed) == 2 * alone  # none of a lever
    assert brief.levers
    assert not any(row.exact for row in brief.levers)
    assert "~ estimated" in show(brief)
    for row in api.plan(request).levers:
        same = exact.get(str(row.changes))
        assert same is None or needs(row) == pytest.approx(needs(same), rel=0.1)


ENOUGH = ("everything kept", "a processor")  # the others take the same ways, and longer


@pytest.mark.parametrize("case", [
    pytest.param(case, id=name, marks=[] if name in ENOUGH else [pytest.mark.wide])
    for name, case in CASES.items()
])  # fmt: skip
def test_a_short_screen_shows_what_the_whole_plan_says(case):
    model, device, stated = case
    request = api.read(model, device=device, changes=stated)
    whole, brief = api.plan(request), api.plan_briefly(request)
    shown = choose_levers(whole.levers, whole)[:FEW]
    if not whole.ways_out:
        assert [row for row in whole.levers if row in shown] == list(brief.levers)
    chosen = tuple(row for row in whole.considered if row.chosen)
    assert replace(whole, levers=(), considered=chosen) == replace(
        brief, levers=(), considered=tuple(row for row in brief.considered if row.chosen)
    )
    assert show(brief) == show(whole)


@pytest.mark.parametrize("wrong", [0.975, 1.0, 1.025])
def test_rough_plans_that_are_a_little_wrong_decide_nothing(wrong):
    """Which levers are shown is known from exact plans, whatever within `DOUBT` came before."""
    problem = read_problem(api.read("pythia-410m", device="l4", changes={"method": "full"}))
    whole = search.search(problem)
    found = search.search_briefly(problem)
    by_changes = {str(row.changes): row for row in whole.levers}
    planned = []

    def estimate(request):
        rough = by_changes[str(next(asked))]
        row = replace(
            rough, peak_allocated=round(rough.peak_allocated * wrong),
            device_total=round(needs(rough) * wrong), relative_time=rough.relative_time / wrong,
        )  # fmt: skip
        return row, None

    def find_plan(request):
        planned.append(request)
        return search._find_best(read_problem(request, device=problem.device))

    class Listed:
        """The changes that have a row in the whole plan, one after the other."""

        def __init__(self):
            self.left = [c for c in list_changes(problem, found.choice) if str(c) in by_changes]

        def __next__(self):
            return self.left.pop(0)

    asked = Listed()
    known = list(asked.left)
    original = shown_levers.list_changes
    shown_levers.list_changes = lambda *_: iter(known)
    try:
        rows = replan_shown(problem, found, find_plan, estimate)
    finally:
        shown_levers.list_changes = original
    shown = choose_levers(whole.levers, whole)[:FEW]
    assert list(rows) == [row for row in whole.levers if row in shown]
    assert len(planned) < len(known)


@pytest.mark.parametrize("name", ["gpt2", "pythia-410m", "bloom-560m", "gemma-3-1b"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_blocks_keep_bounds_every_estimate(name, method):
    problem = read_problem(api.read(name, device="h100-sxm", changes={"method": method}))
    start = next(_preferences(problem))
    assert applies(start.model)
    made = Estimate(start.model, start.recipe, problem.device)
    layers = start.model.architecture.layers
    for micro in (1, 4, 16):
        for chunk in (0, 1024):
            plainest = made.alike(micro, chunk)
            own = made.peak(micro, RecomputedBlocks(0, 0), chunk)
            assert abs(plainest.peak - own) <= plainest.saved
            for full, selective in ((1, 0), (layers // 2, 0), (layers, 0), (0, 3), (2, 3)):
                peak = made.peak(micro, RecomputedBlocks(full, selective), chunk)
                assert peak >= plainest.peak - (1 + full + selective) * plainest.saved


def test_a_combination_that_cannot_win_is_not_looked_at(monkeypatch):
    """A brief search asks for a part of the estimates that a whole one does, and finds the same."""
    problem = read_problem(api.read("llama-3.2-1b", device="l4", changes={"method": "full"}))
    asked = []
    own = Candidate._estimated.func
    estimated = Candidate._estimated

    def count(candidate):
        asked.append(candidate)
        return own(candidate)

    monkeypatch.setattr(estimated, "func", count)
    whole = search.search(problem, levers=False)
    many = len(asked)
    asked.clear()
    brief = search.search_briefly(problem).plan
    assert brief.recipe == whole.recipe
    assert 0 < 2 * len(asked) < many
