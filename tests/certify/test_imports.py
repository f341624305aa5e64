"""The certifying process imports less than a run, and certifies the same."""

import json
import subprocess
import sys
from contextlib import nullcontext

import msgspec
import pytest

from memfit import certify as certification
from memfit.certify import Order, lean_imports
from memfit.certify.tracing import trace_step
from memfit.core.system.beside import allow_forks
from memfit.core.system.processes import child_environment
from memfit.plan.request.problem import find_device
from memfit.records import to_json
from memfit.records.recipe import Lora


@pytest.fixture
def order(tiny_recipe):
    lora = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    recipe = msgspec.structs.replace(
        tiny_recipe, device="h100-sxm", method="lora", lora=lora, precision="bf16-mixed"
    )
    return Order(recipe=recipe, device=find_device("h100-sxm"), usable=2**30)


def answer(order):
    """The certificate of a fresh process, and which of the packages it has imported."""
    code = (
        "import sys, json; from memfit.certify import answer_order, import_step\n"
        "from memfit.certify.lean_imports import UNUSED\n"
        "line = sys.stdin.read()\n"
        "import_step([line])\n"
        "found = answer_order(line)\n"
        "print(json.dumps([json.loads(found), sorted(set(UNUSED) & set(sys.modules))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=to_json(order, indent=-1), capture_output=True,
        text=True, check=True, env=child_environment(),
    )  # fmt: skip
    made, imported = json.loads(done.stdout.splitlines()[-1])
    del made["seconds"]
    return made, imported


@pytest.mark.slow
def test_a_certificate_is_the_same_without_packages_that_no_step_calls(order):
    """The process of the tests has them."""
    lean, imported = answer(order)
    assert imported == []
    pytest.importorskip("bitsandbytes")
    whole = json.loads(certification.answer_order(to_json(order)))
    del whole["seconds"]
    assert lean == whole


@pytest.mark.parametrize(("coded", "hidden"), [("nf4", 0), ("bf16", 1)])
def test_nothing_is_hidden_of_a_quantised_base(order, monkeypatch, coded, hidden):
    seen = []

    def hide(names):
        seen.append(names)
        return nullcontext()

    monkeypatch.setattr(lean_imports, "hidden_packages", hide)
    recipe = msgspec.structs.replace(order.recipe, base_format=coded)
    certification.import_step([to_json(msgspec.structs.replace(order, recipe=recipe), indent=-1)])
    assert len(seen) == hidden


def test_what_a_recipe_imports_is_built_once_and_shallow(order, monkeypatch):
    built = []
    monkeypatch.setattr(trace_step, "_BUILT", set())
    monkeypatch.setattr(trace_step, "build_model", lambda recipe, device: built.append(recipe))
    monkeypatch.setattr(trace_step, "build_optimizer", lambda recipe, model: None)
    trace_step.import_for(order.recipe)
    trace_step.import_for(order.recipe)
    assert [recipe.model.config["num_hidden_layers"] for recipe in built] == [1]


def test_what_a_fork_traces_is_what_this_process_traces(order):
    found = []
    for allowed in (nullcontext(), allow_forks()):
        with allowed:
            found.append(json.loads(certification.answer_order(to_json(order))))
        del found[-1]["seconds"]
    assert found[0] == found[1]
    assert found[0]["generation"]["peak_allocated"] > 0


def ask(asked):
    """The words that a fresh process prints when it has imported a step leanly."""
    code = (
        "import sys; from memfit.certify.deferred_compiler import defer_compiler\n"
        "from memfit.certify.lean_imports import CERTIFYING, import_lean\n"
        "defer_compiler(); import_lean(CERTIFYING, adapters=True)\n"
        "import torch, transformers\n" + asked
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=child_environment(),
    )  # fmt: skip
    return done.stdout.split()


def test_what_is_deferred_is_whole_as_soon_as_it_is_asked_for():
    found = ask(
        "import transformers.models\n"
        "print('torch._dynamo.symbolic_convert' in sys.modules)\n"
        "print(len(transformers.models._class_to_module) > 1000)\n"
        "print(transformers.MistralConfig.model_type, transformers.models.qwen3.__name__)\n"
        "print(transformers.models.GemmaConfig.model_type)\n"
        "print(hasattr(transformers, 'no_such_name'))\n"
        "print(len(transformers.models._class_to_module) > 1000)\n"
        "from torch._dynamo.utils import counters  # a part, which imports the whole first\n"
        "print(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item())\n"
        "print(counters['stats']['unique_graphs'], torch._dynamo.config.recompile_limit > 0)\n"
    )
    assert found == [
        "False", "False", "mistral", "transformers.models.qwen3", "gemma", "False", "True",
        "2.0", "1", "True",
    ]  # fmt: skip
