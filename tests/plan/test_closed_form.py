"""A closed form against simulations of the very shapes that it answers for, to the byte."""

import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_memory import CPU, H100, ON_CUDA, SETTINGS, adapted, recipe_of

from memfit.meta import meter
from memfit.plan.memory import predicted_memory
from memfit.plan.memory.predicted_memory import find_outline, worst_batch
from memfit.plan.simulate import closed_form
from memfit.plan.simulate.blocks import record
from memfit.plan.simulate.segments import simulate

attention = sys.modules["memfit.meta.attending.attention"]  # `sizes.attention` is its function
SHAPES = ((1, 1), (2, 1), (1, 128), (2, 129), (3, 13), (70, 1024))  # rows, tokens
CASES = {**{("cpu", name): case for name, case in SETTINGS.items()},
         **{("cuda", name): case for name, case in ON_CUDA.items()}}  # fmt: skip


def simulated(setting, recipe):
    """The passes of one shape in plain numbers."""
    return simulate(setting, worst_batch(recipe))


def plain(passes):
    """As data, without parts of 0 bytes."""
    data = msgspec.to_builtins(passes, str_keys=False)
    for one in data:
        for segments in one.values():
            for segment in segments:
                segment["net"] = {k: n for k, n in segment["net"].items() if n}
                segment["top"] = {k: n for k, n in segment["top"].items() if n}
    return data


def shaped(recipe, rows, tokens):
    return replace(recipe, micro_batch=rows, sequence_length=tokens)


@pytest.mark.covering({case: (case[0], CASES[case]) for case in CASES})
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_closed_form_is_the_simulation_of_every_shape(case):
    family, changes = CASES[case]
    device = CPU if case[0] == "cpu" else H100
    recipe = recipe_of(family, changes)
    model = adapted(recipe)
    find_outline(model, recipe, device).passes(recipe)  # the first is not a closed form
    for rows, tokens in SHAPES:
        here = shaped(recipe, rows, tokens)
        outline = find_outline(model, here, device)
        assert plain(outline.passes(here)) == plain(simulated(outline.setting, here)), (
            rows,
            tokens,
        )


@settings(max_examples=100)
@given(rows=st.integers(1, 80), tokens=st.integers(1, 5000), case=st.sampled_from(sorted(CASES)))
def test_any_shape_of_any_setting(rows, tokens, case):
    family, changes = CASES[case]
    recipe = shaped(recipe_of(family, changes), rows, tokens)
    device = CPU if case[0] == "cpu" else H100
    outline = find_outline(adapted(recipe), recipe, device)
    outline.passes(replace(recipe, sequence_length=17))  # the first is not a closed form
    assert plain(outline.passes(recipe)) == plain(simulated(outline.setting, recipe))


@pytest.mark.parametrize(("device", "most"), [(CPU, 1), (H100, 3)])  # kernels choose by rows
def test_a_simulation_answers_for_all_shapes_that_run_the_same_operations(
    device, most, monkeypatch
):
    made = []

    def counted(setting, batch):
        made.append(batch)
        return record(setting, batch)

    monkeypatch.setattr(closed_form, "record", counted)
    closed_form.find_answers.cache_clear()
    predicted_memory._outline.cache_clear()
    recipe = recipe_of("llama", {"loss": "chunked", "loss_chunk": 64, "precision": "bf16-mixed"})
    model = adapted(recipe)
    first = shaped(recipe, 7, 7)
    find_outline(model, recipe, device).passes(first)  # which is not a closed form
    for rows in range(2, 30, 3):
        for tokens in range(1600, 3200, 110):
            find_outline(model, recipe, device).passes(shaped(recipe, rows, tokens))
    assert 1 <= len(made) <= most  # of 150 shapes
    known = len(made)
    find_outline(model, recipe, device).passes(shaped(recipe, 1, 1600))  # one row: other strides
    assert len(made) == known + 1


@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][1].get("packing")], ids=" ".join)
def test_packed_rows_between_the_first_and_the_last_are_alike(case, monkeypatch):
    family, changes = CASES[case]
    device = CPU if case[0] == "cpu" else H100
    for recompute in (0, 2):
        for rows, tokens in ((4, 3), (5, 16), (9, 64)):
            recipe = shaped(
                recipe_of(family, changes | {"recompute_blocks": recompute}), rows, tokens
            )
            setting = find_outline(adapted(recipe), recipe, device).setting
            short = plain(simulated(setting, recipe))
            with monkeypatch.context() as patched:
                patched.setattr(meter, "PASSES", 1000)
                assert plain(simulated(setting, recipe)) == short


def test_chunks_between_the_second_and_the_last_change_nothing(monkeypatch):
    recipe = recipe_of("llama", {"loss": "chunked", "loss_chunk": 12, "precision": "bf16-mixed"})
    recipe = shaped(recipe, 3, 29)
    setting = find_outline(adapted(recipe), recipe, CPU).setting
    short = simulated(setting, recipe)
    monkeypatch.setattr(meter, "PASSES", 1000)
    assert plain(simulated(setting, recipe)) == plain(short)


def test_a_thread_may_plan_another_shape_while_this_one_looks_for_its_own(monkeypatch):
    recipe = recipe_of("llama", {})
    outline = find_outline(adapted(recipe), recipe, H100)
    answers = closed_form.Answers(outline.setting)

    def passes(batch):
        return answers.passes(batch, lambda rows, tokens: replace(batch, rows=rows, tokens=tokens))

    first, mine, others = (
        worst_batch(shaped(recipe, rows, tokens)) for rows, tokens in ((2, 64), (1, 64), (1, 1))
    )
    passes(first)  # in plain numbers
    passes(worst_batch(shaped(recipe, 2, 2)))  # a form that holds for none of the others
    fit = closed_form.ClosedForm.fit
    asked = []

    def slow(form, batch):
        asked.append(batch)
        if len(asked) == 1:
            passes(others)
        return fit(form, batch)

    monkeypatch.setattr(closed_form.ClosedForm, "fit", slow)
    assert plain(passes(mine)) == plain(simulate(outline.setting, mine))
    assert len(answers.forms) == 3
