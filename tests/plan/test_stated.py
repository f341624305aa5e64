"""A request for many ranks becomes a recipe without a search, or one clear error."""

import pytest

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.plan.request.as_stated import read_stated
from memfit.records import from_data
from memfit.records.recipe import Parallel
from memfit.records.request import Request

BASE = {"model": "llama-3.1-8b", "hardware": {"device": "h100-sxm", "count": 8, "nodes": 2}}


def read(**changes) -> Request:
    data = {**BASE, "task": {"global_batch": 64}, **changes}
    return from_data(data, Request, source="the test")


def test_auto_is_sharding_over_all_devices_and_plain_knobs_that_are_said():
    found = read_stated(read())
    recipe = found.recipe
    assert recipe.parallel == Parallel(dp_shard=16)
    assert (recipe.micro_batch, recipe.accumulation, recipe.global_batch) == (1, 4, 64)
    assert (recipe.method, recipe.precision, recipe.loss) == ("full", "bf16-mixed", "plain")
    assert recipe.recompute_blocks == 0
    assert found.defaults["parallel"] == "dp_shard 16"
    assert set(found.defaults) == {
        "method", "precision", "optimizer.name", "optimizer.implementation",
        "optimizer.learning_rate", "recompute", "attention", "loss", "micro_batch", "parallel",
    }  # fmt: skip
    assert found.usable == api.find_device("h100-sxm").memory


def test_what_is_stated_is_kept_and_not_called_a_default():
    found = read_stated(
        read(
            method="lora", precision="bf16", base_format="bf16", recompute="full", micro_batch=2,
            loss="chunked", attention="math", optimizer={"name": "sgd", "learning_rate": 1e-3},
            parallel={"dp_replicate": 2, "dp_shard": 8, "reshard_after_forward": False},
        )
    )  # fmt: skip
    recipe = found.recipe
    assert recipe.parallel == Parallel(dp_replicate=2, dp_shard=8, reshard_after_forward=False)
    assert (recipe.recompute_blocks, recipe.loss_chunk) == (32, 1024)
    assert (recipe.micro_batch, recipe.accumulation, recipe.global_batch) == (2, 2, 64)
    assert set(found.defaults) == {"optimizer.implementation"}
    assert recipe.optimizer.implementation == "foreach"  # ranks cannot have fused SGD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"dp_shard": 8}}, "names 8 ranks .* has `count: 8` x `nodes: 2` devices"),
        ({"parallel": {"dp_shard": 64}}, "names 64 ranks .* has `count: 8` x `nodes: 2` devices"),
        ({"task": {"global_batch": 40}}, "`task.global_batch: 40` is not a multiple of 16"),
        ({"micro_batch": 8}, "`task.global_batch: 64` is not a multiple of 128: 16 ranks x"),
    ],
)
def test_numbers_that_do_not_agree_are_both_named(changes, message):
    with pytest.raises(InvalidRequest, match=message):
        read_stated(read(**changes))


def test_several_machines_are_not_started_from_one_and_nothing_is_written(tmp_path):
    request = read(task={"global_batch": 64, "data": str(tmp_path)})
    with pytest.raises(InvalidRequest, match="the request is for 2 machines"):
        api.train(request, tmp_path / "run")
    assert not (tmp_path / "run").exists()
