"""What a plan promises of a lever is what typing it gives; pure bf16 is never picked in silence."""

import pytest

from memfit import api
from memfit.cli.options import read_changes
from memfit.core.wording import set_words

pytestmark = pytest.mark.levers

CASES = {
    "whole": ("llama-3.1-8b", "h100-sxm", {}),
    "adapters": ("llama-3.1-8b", "rtx-4090", {}),
    "stated": ("qwen2.5-0.5b", "rtx-3090", {"method": "full", "optimizer.name": "adamw"}),
    "a limit": ("pythia-70m", "cpu", {"limits.memory": "1 GiB"}),
    "pairs": ("pythia-410m", "l4", {"task.objective": "dpo", "task.sequence_length": 512}),
    "several": ("llama-3.2-1b", "rtx-4090", {"hardware.count": 2}),
    "megatron": ("llama-3.1-8b", "h100-sxm", {"framework": "megatron", "hardware.count": 8}),
    "hf-trainer": ("gpt2", "h100-sxm", {"framework": "hf-trainer", "hardware.count": 2}),
}


def read_typed(changes):
    """The changes as the shell hands them over, read again."""
    import shlex

    words = [word for text in set_words(changes) for word in shlex.split(text)]
    return read_changes(None, None, tuple(words))


@pytest.mark.parametrize("case", [
    pytest.param(case, id=name, marks=[pytest.mark.wide] if name == "whole" else [])
    for name, case in CASES.items()
])  # fmt: skip
def test_each_lever_typed_as_printed_gives_its_bytes_and_seconds(case):
    model, device, stated = case
    plan = api.plan(api.read(model, device=device, changes=stated))
    assert plan.memory.verdict == "fits"
    assert len(plan.levers) >= 3
    for lever in plan.levers:
        typed = {**stated, **read_typed(lever.changes)}
        given = api.plan(api.read(model, device=device, changes=typed), levers=False)
        assert given.recipe != plan.recipe
        assert given.memory.peak_allocated == lever.peak_allocated
        assert given.memory.device_total == lever.device_total
        assert (given.memory.verdict == "fits") == lever.fits
        assert given.label == lever.label
        assert bool(lever.mesh) == (given.recipe.parallel != plan.recipe.parallel)
        if plan.time.step_seconds is not None:
            ratio = given.time.step_seconds / plan.time.step_seconds
            assert ratio == pytest.approx(lever.relative_time, rel=1e-9)
        changed = "changes what is learned" in lever.because
        assert changed == (describe(given.recipe) != describe(plan.recipe))


def describe(recipe):
    own = recipe.optimizer
    return recipe.method, recipe.precision, recipe.coding, own.name, own.stochastic_rounding


def test_full_training_that_does_not_fit_in_fp32_learns_all_the_same():
    """16 bytes a weight are too much for 80 GiB; pure bf16, at 8, is not what comes next."""
    plan = api.plan(api.read("llama-3.1-8b", device="h100-sxm"))
    own = plan.recipe.optimizer
    assert (plan.recipe.method, plan.recipe.precision) == ("full", "bf16")
    assert (own.name, own.stochastic_rounding) == ("adamw8bit", True)
    (pure,) = [row for row in plan.levers if row.changes == {"precision": "bf16"}]
    assert "changes what is learned" in pure.because
    roomy = api.plan(api.read("llama-3.1-8b", device="b300-sxm"), levers=False).recipe
    assert (roomy.precision, roomy.optimizer.name) == ("bf16-mixed", "adamw")


@pytest.mark.parametrize(
    ("model", "device", "stated", "expected"),
    [
        # the optimizer that is asked for can round by chance: so it does
        ("llama-3.1-8b", "h100-sxm", {"optimizer.name": "adamw8bit"},
         ("full", "bf16", "adamw8bit", True)),
        # one that cannot comes after adapters, whose weights and states are fp32
        ("llama-3.1-8b", "h100-sxm", {"optimizer.name": "adamw"},
         ("lora", "bf16-mixed", "adamw", False)),
        ("llama-3.1-8b", "h100-sxm", {"optimizer.stochastic_rounding": False},
         ("lora", "bf16-mixed", "adamw", False)),
        # pure bf16 where it is asked for, or where nothing else fits
        ("llama-3.1-8b", "h100-sxm", {"precision": "bf16"}, ("full", "bf16", "adamw", False)),
        ("llama-3.1-8b", "h100-sxm", {"optimizer.name": "adamw", "method": "full"},
         ("full", "bf16", "adamw", False)),
        ("llama-3.1-8b", "h100-sxm",
         {"optimizer.name": "adamw8bit", "precision": "bf16",
          "optimizer.stochastic_rounding": False},
         ("full", "bf16", "adamw8bit", False)),
    ],
    ids=str,
)  # fmt: skip
def test_pure_bf16_is_what_is_asked_for_or_the_last_resort(model, device, stated, expected):
    plan = api.plan(api.read(model, device=device, changes=stated), levers=False)
    own = plan.recipe.optimizer
    found = plan.recipe.method, plan.recipe.precision, own.name, own.stochastic_rounding
    assert found == expected
    warned = any("no fp32 copy" in said for said in plan.assumptions)
    assert warned == (expected[1] == "bf16" and not expected[3])


def test_more_memory_never_takes_a_less_faithful_way():
    """The order of `list_storage`: fp32 states, states in 8 bits, adapters; each in turn."""
    order = ["bf16-mixed", "bf16"]
    seen = []
    for gib in (20, 40, 60, 76, 100, 130, 170):
        limit = {"limits.memory": f"{gib} GiB", "task.sequence_length": 2048}
        plan = api.plan(api.read("llama-3.1-8b", device="b200-sxm", changes=limit), levers=False)
        assert plan.memory.verdict == "fits"
        recipe = plan.recipe
        rank = 0 if recipe.method == "full" else len(order)
        seen.append((rank + order.index(recipe.precision), plan.time.step_seconds))
    ranks = [rank for rank, _ in seen]
    assert ranks == sorted(ranks, reverse=True)
    for rank in set(ranks):
        seconds = [time for other, time in seen if other == rank]
        assert seconds == sorted(seconds, reverse=True)
    assert len(set(ranks)) == 3
