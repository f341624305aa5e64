"""Ranks that share products: what each holds, and what they refuse."""

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.parallelism.limits import check_ranks
from memfit.parallelism.shards import cut_model, held_bytes
from memfit.parallelism.tensor import find_degrees
from memfit.plan.request.meshes import list_meshes
from memfit.records import from_data
from memfit.records.recipe import LEAN, Lora, Parallel
from memfit.records.request import Request
from tiny_models import CONFIGS, make_recipe

EVEN = {**CONFIGS["llama"], "vocab_size": 250, "intermediate_size": 178}
TWO = Parallel(tp=2, sequence_parallel=True)


@pytest.mark.parametrize(("changes", "said", "hint"), [
    ({"config": {**EVEN, "vocab_size": 251}}, "does not divide the 251 tokens of the vocabulary",
     "use tp in [1]"),
    ({"config": {**EVEN, "intermediate_size": 177}}, "does not divide the 177 columns", "[1]"),
    ({"config": {**EVEN, "num_key_value_heads": 1}}, "does not divide the 1 key and value", "[1]"),
    ({"config": EVEN, "sequence_length": 15}, "does not divide the 15 tokens of a row", "[1]"),
    ({"config": EVEN, "loss": "chunked", "loss_chunk": 8}, "`loss: chunked` takes whole rows",
     "loss: plain"),
    ({"config": EVEN, "lean": LEAN}, "`lean: norm, mlp` does not take tokens", "lean: none"),
    ({"config": EVEN, "method": "dora"}, "`method: dora` measures rows", "dp_shard"),
    ({"config": EVEN, "method": "lora", "base_format": "nf4"}, "codes of whole weights", "16 or"),
    ({"config": EVEN, "method": "lora", "lora": Lora(rank=2, alpha=4.0, dropout=0.1)},
     "`lora.dropout: 0.1` would be drawn", "lora.dropout: 0"),
    ({"config": EVEN, "qat": "int4"}, "groups of 32 inputs of the", "use tp in [1]"),
    ({"config": EVEN, "optimizer": {"name": "muon", "implementation": "loop", "in_backward": True,
                                    "clip_norm": 0.0}}, "within backward", "in_backward: false"),
    ({"config": EVEN, "compile": "blocks"}, "into its graph", "compile: none"),
    ({"config": EVEN, "optimizer": {"in_backward": True, "clip_norm": 0.0}}, "within backward",
     "in_backward: false"),
    ({"config": {**EVEN, "mlp_bias": True}}, "with biases on summed products", "dp_shard"),
    ({"config": EVEN, "parallel": Parallel(tp=2)}, "without `sequence_parallel`", "true"),
])  # fmt: skip
def test_what_such_ranks_cannot_run_is_refused_with_a_hint(changes, said, hint) -> None:
    recipe = make_recipe(**{"parallel": TWO, **changes})
    with pytest.raises(InvalidRequest) as error:
        check_ranks(recipe)
    assert said in error.value.message.replace("optimizer.name: ", "")
    assert hint in error.value.hint
    if "parallel" not in changes:
        check_ranks(replace(recipe, parallel=Parallel()))


def test_other_blocks_are_refused_by_name() -> None:
    recipe = make_recipe("gemma", parallel=TWO)
    with pytest.raises(InvalidRequest, match="and those of `gemma` are `gemma`"):
        check_ranks(recipe)


def test_degrees_divide_everything() -> None:
    recipe = make_recipe(config={**EVEN, "num_attention_heads": 4, "num_key_value_heads": 4,
                                 "vocab_size": 252, "intermediate_size": 180})  # fmt: skip
    recipe = replace(recipe, sequence_length=16)
    assert find_degrees(recipe, read_model(recipe.model).architecture) == [1, 2, 4]


def test_parts_of_all_ranks_are_the_model_but_for_norms() -> None:
    model, parallel = (
        read_model(make_recipe(config=EVEN).model),
        Parallel(dp_replicate=2, dp_shard=3, tp=2, sequence_parallel=True),
    )
    norms = sum(w.nbytes for w in model.weights if len(w.shape) == 1)
    held = [held_bytes(model.weights, parallel, rank) for rank in range(12)]
    assert held[:6] == held[6:]
    assert held[:6:2] == held[1:6:2]
    assert sum(held[:6]) == sum(w.nbytes for w in model.weights) + norms
    assert 2 * sum(w.nbytes for w in cut_model(model, parallel).weights) == sum(held[:6])


def ask(**changes) -> Request:
    stated = {
        "model": "llama-3.1-8b", "weights": "random",
        "task": {"global_batch": 8, "sequence_length": 4096},
        "hardware": {"device": "h100-sxm", "count": 8}, "parallel": {"dp_shard": 4, "tp": 2},
    }  # fmt: skip
    return from_data({**stated, **changes}, Request, source="a test")


@pytest.mark.levers
def test_a_search_leaves_what_such_ranks_lack() -> None:
    found = api.plan(ask(), levers=False).recipe
    assert found.parallel == Parallel(dp_shard=4, tp=2, sequence_parallel=True)
    assert (found.method, found.loss, found.lean) == ("full", "plain", ())
    assert found.global_batch == 8
    assert api.plan(ask(loss="plain")).levers


def test_shares_of_a_batch_are_of_ranks_with_rows_of_their_own() -> None:
    assert ask().shares == 4
    assert list_meshes(ask(micro_batch=2)) == (Parallel(dp_shard=4, tp=2, sequence_parallel=True),)
    with pytest.raises(InvalidRequest, match="4 ranks x `micro_batch: 4`"):
        list_meshes(ask(micro_batch=4))
    with pytest.raises(InvalidRequest, match=r"names 16 ranks \(1 x 8 x 2\)"):
        list_meshes(ask(parallel={"dp_shard": 8, "tp": 2}))
    with pytest.raises(InvalidRequest, match="`loss: chunked` takes whole rows"):
        api.plan(ask(loss="chunked"), levers=False)


def test_a_search_shares_products_where_nothing_else_fits() -> None:
    """A row of 32k tokens on 8 devices: FSDP2 cuts weights, and what is kept is of tokens."""
    long = {"global_batch": 8, "sequence_length": 32768}
    stated = {"method": "full", "precision": "bf16-mixed", "loss": "plain", "lean": "none"}
    whole = ask(parallel="auto", task=long, recompute="none", **stated)
    plan = api.plan(whole, levers=False)
    assert plan.recipe.parallel == Parallel(tp=8, sequence_parallel=True)
    assert plan.memory.verdict == "fits"
    short = {"global_batch": 8, "sequence_length": 4096}
    less = api.plan(ask(parallel="auto", task=short, recompute="full", **stated), levers=False)
    assert less.recipe.parallel.tp == 1
    cut = ask(
        parallel="auto", task=long, recompute="selective", **stated, limits={"memory": "20 GiB"}
    )
    assert api.plan(cut, levers=False).recipe.parallel.tp == 1
