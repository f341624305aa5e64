"""Bytes that a plan says a rank sends in a step, beside those of torch's own collectives."""

from collections import Counter

import pytest
import torch.distributed as dist

from memfit import api
from memfit.adapters import find_adapter
from memfit.certify.tracing.world import fake_world
from memfit.families import read_model
from memfit.plan.step_time.communication.traffic import compare_with_copies, describe_traffic
from memfit.plan.step_time.predicted_time import sum_up
from memfit.records.recipe import Parallel
from memfit.train.step.step import step
from tiny_models import CONFIGS, make_batch, make_built, make_recipe, targets_of

WIDE = {**CONFIGS["llama"], "hidden_size": 128, "intermediate_size": 320}  # norms weigh little
MESHES = {"copies": {"dp_replicate": 4}, "of two": {"dp_replicate": 2}}
PRECISIONS = {"fp32": "fp32", "bf16-mixed": "fp32", "bf16": "bf16"}


@pytest.fixture
def asked(monkeypatch):
    """Bytes of the messages that each collective is called with, by collective and ranks."""
    seen = Counter()

    def record(name, collective, whole):
        plain = getattr(dist, name)

        def called(*arguments, **named):
            if name == "all_reduce":
                tensor, group = named.get("tensor", (arguments or (None,))[0]), named.get("group")
            elif name == "all_to_all_single":
                tensor, group = arguments[1], named.get("group")
            elif collective == "all_gather":
                tensor = named.get(whole, (arguments or (None,))[0])
                group = named.get("group")
            else:
                tensor, group = named.get("input"), named.get("group")
            seen[collective, dist.get_world_size(group)] += tensor.numel() * tensor.element_size()
            return plain(*arguments, **named)

        monkeypatch.setattr(dist, name, called)

    record("all_gather_into_tensor", "all_gather", "output_tensor")
    record("reduce_scatter_tensor", "reduce_scatter", "input")
    for later in ("all_gather_single", "reduce_scatter_single"):  # their names from torch 2.13 on
        if hasattr(dist, later):
            record(later, later.removesuffix("_single"), "output_tensor")
    record("all_reduce", "all_reduce", "tensor")
    record("all_to_all_single", "all_to_all", "input")
    return seen


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_a_plans_bytes_are_those_of_the_collectives_that_torch_is_asked_for(mesh, precision, asked):
    parallel = Parallel(**mesh)
    recipe = make_recipe(
        config=WIDE, parallel=parallel, precision=precision, base_format=PRECISIONS[precision],
        optimizer={"implementation": "foreach", "clip_norm": 0.0}, accumulation=2,
    )  # fmt: skip
    predicted = describe_traffic(
        sum_up(find_adapter(recipe).adapt(read_model(recipe.model), recipe)), recipe
    )
    batches = [make_batch(seed=0), make_batch(seed=1)]
    with fake_world(parallel, 0, "cpu", lambda _: None, lambda *_: None):
        built = make_built(recipe)
        asked.clear()
        step(built, batches, target_tokens=targets_of(*batches))
    for row in predicted:
        share = (row.ranks - 1) / row.ranks * (2 if row.collective == "all_reduce" else 1)
        seen = share * asked[row.collective, row.ranks]
        assert row.nbytes == pytest.approx(seen, rel=0.02), row
    assert {r.collective for r in predicted} == {c for (c, _), n in asked.items() if n > 4096}


@pytest.mark.parametrize("recompute_blocks", [0, 3])
def test_experts_are_gathered_among_their_own_ranks_and_tokens_sent_to_them(
    recompute_blocks, asked
):
    parallel = Parallel(dp_shard=4, ep=2, ep_imbalance=1.0)
    config = {**CONFIGS["mixtral"], "hidden_size": 128, "intermediate_size": 320}
    recipe = make_recipe(
        "mixtral", config=config, parallel=parallel, recompute_blocks=recompute_blocks,
        optimizer={"implementation": "foreach", "clip_norm": 0.0},
    )  # fmt: skip
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    predicted = describe_traffic(sum_up(model), recipe)
    batch = make_batch(seed=0)
    with fake_world(parallel, 0, "cpu", lambda _: None, lambda *_: None):
        built = make_built(recipe)
        asked.clear()
        step(built, [batch], target_tokens=targets_of(batch))
    found = {(row.axis, row.collective, row.ranks): row for row in predicted}
    assert found.keys() == {
        ("dp_shard", "all_gather", 4), ("dp_shard", "reduce_scatter", 4),
        ("dp_shard", "all_gather", 2), ("dp_shard", "reduce_scatter", 2), ("ep", "all_to_all", 2),
    }  # fmt: skip
    for (_, collective, ranks), row in found.items():
        seen = (ranks - 1) / ranks * asked[collective, ranks]
        assert row.nbytes == pytest.approx(seen, rel=0.02), row


def plan(**changes):
    stated = {"hardware.count": 8, "method": "full", "recompute": "none", **changes}
    return api.plan(api.read("llama-3.2-1b", device="h200-sxm", changes=stated), levers=False)


def test_shards_of_one_dtype_send_half_as_much_again_as_copies():
    """ZeRO's 1.5 (1910.02054, section 7.2), less what stays gathered between the passes."""
    cut = plan(precision="fp32", **{"parallel.dp_shard": 8}).traffic
    copied = plan(precision="fp32", **{"parallel.dp_replicate": 8, "micro_batch": 2}).traffic
    assert {row.axis for row in cut} == {"dp_shard"}
    assert [(row.axis, row.collective) for row in copied] == [("dp_replicate", "all_reduce")]
    ratio = sum(r.nbytes for r in cut) / sum(r.nbytes for r in copied)
    assert ratio == pytest.approx(compare_with_copies(cut), rel=1e-6)
    assert 1.35 < ratio <= 1.5
    assert compare_with_copies(copied) is None


def test_every_axis_has_its_rows_and_one_device_none():
    axes = {"parallel.tp": 2, "parallel.pp": 2, "parallel.dp_shard": 2}
    found = api.plan(
        api.read("llama-3.1-8b", device="h200-sxm",
                 changes={"hardware.count": 8, "method": "full", **axes}), levers=False,
    ).traffic  # fmt: skip
    assert {row.axis for row in found} == {"dp_shard", "tp", "pp"}
    assert all(row.nbytes > 0 and row.ranks == 2 for row in found)
    ring = {"parallel.cp": 4, "parallel.dp_shard": 2, "task.packing": False}
    assert "cp" in {row.axis for row in plan(**ring).traffic}
    assert api.plan(api.read("pythia-70m", device="h100-sxm"), levers=False).traffic == ()
    other = api.read("llama-3.1-8b", device="h100-sxm",
                     changes={"framework": "megatron", "hardware.count": 8})  # fmt: skip
    assert {row.axis for row in api.plan(other, levers=False).traffic}
