"""A rough plan is about the whole one, where it is given that plan's ratio of reserved bytes.

It replays no allocator. Rows of levers are estimated with it.
"""

import pytest

from memfit import api
from memfit.plan.request.problem import read_problem
from memfit.plan.search.search import find_explorer, search_briefly

NEAR = 0.02  # of the plan's bytes: what a replay of the allocator adds to a sum
CASES = {
    "all of it fits": ("pythia-70m", "rtx-4090", {}),
    "adapters fit": ("llama-3.1-8b", "rtx-4090", {}),
    "a large device": ("llama-3.1-8b", "h100-sxm", {}),
    "a limit that is kept": ("pythia-1b", "rtx-4090", {"limits.memory": "6 GiB"}),
    "nothing fits": ("pythia-1b", "rtx-4090", {"limits.memory": "1 GiB"}),
    "a processor": ("gpt2", "cpu-x86", {"limits.memory": "8 GiB"}),
    "two devices": ("pythia-1b", "rtx-4090", {"hardware.count": 2}),
    "another trainer": ("pythia-1b", "rtx-4090", {"framework": "trl", "task.objective": "sft"}),
    "another pretrainer": ("llama-3.1-8b", "h100-sxm", {"framework": "torchtitan",
                                                        "hardware.count": 8}),
}  # fmt: skip


# A whole plan leaves a margin for what ranks differ by, or recomputes more blocks than a bound
# says, and so takes a slower recipe.
OTHER = ("two devices", "adapters fit", "a limit that is kept")


@pytest.mark.parametrize("name", CASES)
def test_a_rough_plan_is_about_the_plan(name):
    model, device, changes = CASES[name]
    problem = read_problem(api.read(model, device=device, changes=changes))
    found = search_briefly(problem)
    memory, seconds = found.plan.memory, found.choice.seconds(problem.device)
    ratio = (memory.peak_reserved or memory.peak_allocated) / memory.peak_allocated
    rough = find_explorer(problem.framework).find_roughly(problem, ratio)
    assert rough.fits == (memory.verdict != "does_not_fit")
    if name in OTHER:
        assert 0.9 * seconds < rough.seconds <= seconds
        return
    assert rough.recipe == found.choice.recipe
    assert rough.peak_allocated == pytest.approx(memory.peak_allocated, rel=NEAR)
    assert rough.needs == pytest.approx(memory.device_total, rel=NEAR)
    assert rough.seconds == pytest.approx(seconds)
