"""Activations that wait in host memory: the same numbers bit by bit, and far fewer bytes."""

import pytest
import torch
from msgspec.structs import replace

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import predict_memory, waiting_on_host
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Lora
from memfit.train.step.step import step
from tiny_models import (
    FAMILIES,
    RECURRENT,
    gradients_in,
    make_batch,
    make_built,
    make_recipe,
    targets_of,
)

H100 = catalog.find_device("h100-sxm")
DROPPED = Lora(rank=4, alpha=8.0, dropout=0.5, targets=("q_proj", "v_proj"))
AWAY = {"offload": "activations"}
SETTINGS = {
    "mixed": {"precision": "bf16-mixed"},
    "lora with dropout": {"method": "lora", "lora": DROPPED},
    "one recomputed, bf16": {"recompute_blocks": 1, "precision": "bf16", "base_format": "bf16"},
    "all recomputed": {"recompute_blocks": 2, "precision": "bf16-mixed"},
    "one selective": {"selective_blocks": 1},
    "chunked": {"loss": "chunked", "loss_chunk": 5},
    "math": {"attention": "math"},
    "lean": {"lean": ("norm", "mlp")},
    "in backward": {"optimizer": {"in_backward": True, "clip_norm": 0.0}},
}


def one_step(recipe):
    """Loss, and every gradient or, where updates come first, every weight."""
    built = make_built(recipe)
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in built.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    gradients, batches = gradients_in(built), [make_batch(ignored=3), make_batch(seed=1)]
    if recipe.optimizer.in_backward:
        batches = batches[:1]
    loss = step(built, batches, targets_of(*batches)).loss
    return loss, gradients or dict(built.model.named_parameters())


def differences(recipe):
    """How many of loss and gradients differ in any bit from those that stay on the device."""
    loss, expected = one_step(replace(recipe, offload="none"))
    again, gradients = one_step(recipe)
    assert expected.keys() == gradients.keys()
    unequal = sum(not torch.equal(expected[name], gradients[name]) for name in expected)
    return unequal + (not torch.equal(loss, again))


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_loss_and_gradients_are_those_without_bit_by_bit(changes):
    assert differences(make_recipe(**AWAY, **changes)) == 0


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*RECURRENT}))
def test_every_family_trains_with_its_activations_on_the_host(family):
    assert differences(make_recipe(family, **AWAY)) == 0


@pytest.mark.parametrize("family", RECURRENT)
def test_linear_attention_is_refused(family):
    with pytest.raises(InvalidRequest, match="not described for linear attention"):
        make_built(make_recipe(family, **AWAY))


def test_what_blocks_save_is_given_up_once_the_next_has_run():
    """On a GPU the forward of ten blocks holds what two of them save, and not ten."""

    block = peak(6, "none") - peak(5, "none")
    state = 24  # of attention's generator, whose two numbers stay
    assert peak(10, "activations") == peak(6, "activations") + 4 * state
    assert peak(6, "activations") < 2.2 * block


def peak(layers, where, **recompute):
    """Bytes of activations as the loss begins."""
    config = make_recipe().model.config | {"num_hidden_layers": layers}
    recipe = make_recipe(
        config=config, precision="bf16", base_format="bf16", sequence_length=64,
        micro_batch=4, offload=where, **recompute,
    )  # fmt: skip
    return trace(recipe, H100).ledger.by_kind(Phase.LOSS)[Kind.ACTIVATIONS]


def test_inputs_of_recomputed_blocks_wait_on_the_host():
    """However deep the model is, the forward holds those of two blocks; the host the others'."""
    assert peak(10, "none", recompute_blocks=10) > peak(6, "none", recompute_blocks=6)
    assert peak(10, "activations", recompute_blocks=10) == peak(
        6, "activations", recompute_blocks=6
    )


def test_the_certificate_says_what_the_host_holds():
    kept = trace(make_recipe(precision="bf16", base_format="bf16"), H100)
    away = trace(make_recipe(precision="bf16", base_format="bf16", **AWAY), H100)
    assert Phase.LOSS not in kept.host
    gone = kept.ledger.by_kind(Phase.LOSS)[Kind.ACTIVATIONS]
    gone -= away.ledger.by_kind(Phase.LOSS)[Kind.ACTIVATIONS]
    assert away.host[Phase.LOSS] >= gone > 0


@pytest.mark.parametrize("changes", [{}, {"recompute_blocks": 5}, {"selective_blocks": 7}])
def test_a_plan_says_what_the_host_holds(changes):
    """What the certificate counted of the host's tensors, but for the batch."""
    config = make_recipe().model.config | {"num_hidden_layers": 7}
    recipe = make_recipe(config=config, precision="bf16", base_format="bf16", **AWAY, **changes)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    found = waiting_on_host(model, recipe, H100)
    assert found == trace(recipe, H100).host[Phase.LOSS] > 0
    assert waiting_on_host(model, replace(recipe, offload="none"), H100) == 0


SHAPES = {
    "mixed, accumulated": {"precision": "bf16-mixed", "accumulation": 2},
    "lora with dropout": {"method": "lora", "lora": DROPPED, "attention": "efficient"},
    "packed, half recomputed": {
        "packing": True, "precision": "bf16", "base_format": "bf16", "recompute_blocks": 1,
        "selective_blocks": 1,
    },
    "lean": {"precision": "bf16", "base_format": "bf16", "lean": ("norm", "mlp")},
    "all recomputed": {"precision": "bf16-mixed", "accumulation": 2, "recompute_blocks": 7},
    "all selective": {"precision": "bf16", "base_format": "bf16", "selective_blocks": 7},
    "nf4": {"method": "lora", "base_format": "nf4", "precision": "bf16"},
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu-x86", "h100-sxm"])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_prediction_equals_the_trace(family, changes, device):
    if family == "gpt2" and ({"lean", "lora"} & set(changes) or "nf4" in changes.values()):
        pytest.skip("another family's names")
    if device == "cpu-x86":
        changes = changes | {"attention": "flash"}
    lora = {"lora": Lora(rank=4, alpha=8.0, targets=("q_proj",))} if "lora" not in changes else {}
    lora = lora if changes.get("method") == "lora" and family == "llama" else {}
    key = "num_hidden_layers" if family == "llama" else "n_layer"
    config = make_recipe(family).model.config | {key: 7}
    recipe = make_recipe(family, config=config, device=device, **AWAY, **lora, **changes)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    found = catalog.find_device(device)
    traced, ledger = trace(recipe, found), predict_memory(model, recipe, found)
    phases = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE, Phase.EVALUATE]
    for phase in [p for p in phases if p in traced.phases]:
        want = traced.ledger.by_kind(phase)
        have = {k: n for k, n in ledger.by_kind(phase).items() if k is not Kind.FRAGMENTATION}
        assert {k: n for k, n in have.items() if n} == {k: n for k, n in want.items() if n}, phase


def test_the_search_may_choose_it_and_says_what_it_costs():
    stated = {
        "method": "full", "precision": "bf16", "micro_batch": 8, "loss": "chunked",
        "loss_chunk": 1024, "task.sequence_length": 4096, "recompute": "none", "offload": "none",
    }  # fmt: skip
    kept = api.plan(api.read("llama-3.2-1b", device="h100-sxm", changes=stated), levers=False)
    away = api.plan(
        api.read("llama-3.2-1b", device="h100-sxm", changes=stated | {"offload": "activations"}),
        levers=False,
    )
    assert away.memory.peak_allocated < 0.6 * kept.memory.peak_allocated
    assert away.time.step_seconds > kept.time.step_seconds
    limit = {"limits.memory": f"{away.memory.device_total + 2**30} B", "offload": "auto"}
    chosen = api.plan(
        api.read("llama-3.2-1b", device="h100-sxm", changes=stated | limit), levers=False
    )
    assert chosen.recipe.offload == "activations"
    assert "activations offloaded" in chosen.considered[0].label
    turned = api.predict_with_levers(api.state(kept)).levers
    levers = [lever for lever in turned if lever.changes == {"offload": "activations"}]
    # a lever's blocks are those of the chosen recipe's replay
    expected = pytest.approx(away.memory.peak_allocated, rel=0.02)
    assert [lever.peak_allocated for lever in levers] == [expected]
