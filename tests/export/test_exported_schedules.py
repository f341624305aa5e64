"""Schedules in exported files: the tools' own schedulers, fed with them, give the plan's rates."""

import json
import shlex

import pytest
import torch
from msgspec.structs import replace
from ruamel.yaml import YAML
from transformers import TrainingArguments, get_scheduler

import neighbour_plans
from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.train.step.schedule import learning_rate

CASES = {
    "cosine": {"warmup_ratio": 0.03},
    "cosine to a tenth": {"floor": 0.1},
    "linear": {"warmup_steps": 7},
    "linear to a fifth": {"floor": 0.2},
    "polynomial": {"power": 2.0},
    "inverse-sqrt": {"warmup_steps": 10},
    "constant": {"warmup_steps": 5},
    "wsd": {"decay_ratio": 0.2, "floor": 0.05},
}


def planned(name, case, **more):
    request = neighbour_plans.find_request(name)
    schedule = case.partition(" ")[0]
    optimizer = replace(request.optimizer, schedule=schedule, warmup_steps=0)
    optimizer = replace(optimizer, **{**CASES[case], **more})
    return api.predict(replace(request, optimizer=optimizer))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("target", "file", "kind"),
    [
        ("trl", "trl.yaml", "lr_scheduler_type"),
        ("axolotl", "axolotl.yaml", "lr_scheduler"),
        ("llamafactory", "llamafactory.yaml", "lr_scheduler_type"),
    ],
)
def test_the_trainers_scheduler_gives_the_plans_rates(case, target, file, kind, tmp_path):
    plan = planned("hf-full-recompute", case)  # which all three take as it is, without a search
    said = YAML(typ="safe").load(api.export(plan, target).files[file])
    steps, rate = said["max_steps"], said["learning_rate"]
    warmup = TrainingArguments(
        output_dir=str(tmp_path), warmup_steps=said["warmup_steps"], use_cpu=True
    ).get_warmup_steps(steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    scheduler = get_scheduler(said[kind], optimizer, warmup, steps, said.get("lr_scheduler_kwargs"))
    for step in range(steps):
        ours = learning_rate(plan.recipe.optimizer, step, steps)
        assert ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9, abs=1e-15), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("case", ["linear to a fifth", "polynomial", "inverse-sqrt", "wsd"])
def test_a_schedule_that_deepspeed_lacks_is_refused(case):
    with pytest.raises(InvalidRequest, match=r"optimizer\.schedule.*none of DeepSpeed's"):
        api.export(planned("deepspeed-zero2", case), "deepspeed")


def test_deepspeeds_cosine_has_a_floor_and_its_share_of_warmup_in_steps():
    plan = planned("deepspeed-zero2", "cosine to a tenth", warmup_ratio=0.03)
    said = json.loads(api.export(plan, "deepspeed").files["deepspeed.json"])["scheduler"]["params"]
    assert said["cos_min_ratio"] == 0.1
    assert said["warmup_num_steps"] == plan.recipe.optimizer.warmup(plan.recipe.steps) > 2


def test_megatron_names_its_own_schedules():
    name = next(n for n in neighbour_plans.REQUESTS if n.startswith("megatron"))
    plan = planned(name, "wsd")
    words = shlex.split(api.export(plan, "megatron").files["megatron.sh"], comments=True)
    steps, made = plan.recipe.steps, plan.recipe.optimizer
    told = {word: words[n + 1] for n, word in enumerate(words[:-1]) if word.startswith("--")}
    assert told["--lr-decay-style"] == "WSD"
    assert int(told["--lr-wsd-decay-iters"]) == -(-steps // 5)
    assert float(told["--min-lr"]) == pytest.approx(0.05 * made.learning_rate)
    with pytest.raises(InvalidRequest, match="none of Megatron-LM's"):
        api.export(planned(name, "polynomial"), "megatron")
