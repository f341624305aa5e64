"""The search's estimate: the same whether its lines are simulated or answered by a closed form."""

from msgspec.structs import replace

from memfit import api
from memfit.plan import closed_form, estimate
from memfit.plan.again import Again
from memfit.plan.candidate import Candidate
from memfit.plan.estimate import Estimate
from memfit.plan.problem import first_recipe, read_problem

LENGTHS = (96, 256, 640, 1536, 2000)  # shorter and longer than a chunk of the loss


def test_an_estimate_of_any_length_is_that_of_a_search_for_this_length_alone(monkeypatch):
    problem = read_problem(api.read("pythia-70m", device="rtx-4090"))
    start = Candidate.of(problem, first_recipe(problem, method="full", precision="bf16-mixed"))

    def peaks(length):
        recipe = replace(start.recipe, sequence_length=length, accumulation=16)
        made = Estimate(start.model, recipe, problem.device)
        return [
            made.peak(micro, again, chunk)
            for micro in (1, 4)
            for again in (Again(0, 0), Again(2, 1), Again(6, 0))
            for chunk in (0, 512)
        ]

    def forget():
        closed_form.find_answers.cache_clear()
        estimate._draw.cache_clear()

    alone = []
    for length in LENGTHS:
        forget()
        alone.append(peaks(length))
    forget()
    simulated = []
    record = closed_form.record
    monkeypatch.setattr(closed_form, "record", lambda *a: simulated.append(a) or record(*a))
    assert [peaks(length) for length in LENGTHS] == alone
    known = len(simulated)
    assert known > 0
    assert peaks(1800)
    assert len(simulated) == known  # what is known answers for it
