"""What a model's class excludes is refused by plan and trainer in the same words."""

import pytest

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.train.step.build import build_model
from tiny_models import CONFIGS, make_recipe


def ask(family, **changes):
    keys = {"task.packing": False, "task.sequence_length": 32, "hardware.device": "h100-sxm"}
    return api.change(api.Request(model=CONFIGS[family]), keys | changes)


@pytest.mark.parametrize("family", ["bloom", "mpt", "gpt_oss"])
def test_what_no_kernel_knows_is_planned_with_what_is_written_out(family):
    plan = api.plan(ask(family), levers=False)
    assert plan.recipe.attention == "math"


@pytest.mark.parametrize(
    ("family", "asked", "recipe", "said"),
    [
        ("bloom", {"attention": "flash"}, {"attention": "flash"}, "attention: flash"),
        ("mpt", {"attention": "efficient"}, {"attention": "efficient"}, "attention: efficient"),
        ("gpt_oss", {"attention": "flash"}, {"attention": "flash"}, "attention sinks"),
        ("bloom", {"task.packing": True}, {"packing": True}, "packing: true"),
        ("gptj", {"loss": "chunked"}, {"loss": "chunked", "loss_chunk": 8}, "lm_head.bias"),
    ],
)
def test_plan_and_trainer_refuse_alike(family, asked, recipe, said):
    with pytest.raises(InvalidRequest, match=said) as planned:
        api.plan(ask(family, **asked), levers=False)
    with pytest.raises(InvalidRequest, match=said) as trained:
        build_model(make_recipe(family, **recipe), "meta")
    assert planned.value.hint == trained.value.hint


def test_a_plan_never_cuts_the_loss_of_a_head_with_a_bias():
    plan = api.plan(ask("gptj"), levers=False)
    assert plan.recipe.loss == "plain"
