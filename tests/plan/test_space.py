"""The candidates of a request: against every configuration tried one by one; rules by name."""

from itertools import product

import numpy
import pytest

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks.shared.columns import with_columns
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.meshes import divisors
from memfit.plan.request.problem import find_device
from memfit.plan.search.candidates import explain, span
from memfit.records import from_data
from memfit.records.request import Request

LLAMA = {
    "name": "llama", "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
MIXTRAL = {**LLAMA, "name": "mixtral", "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2}  # fmt: skip
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


def ask(model=LLAMA, count=8, nodes=1, batch=16, length=4096, **more):
    request = {
        "model": model, "framework": "megatron",
        "hardware": {"device": "h100-sxm", "count": count, "nodes": nodes},
        "task": {"sequence_length": length, "global_batch": batch}, **more,
    }  # fmt: skip
    return from_data(request, Request, source="test")


def found(space):
    return [part.recipe_of(row) for part in space.parts for row in range(part.size)]


def one_by_one(model, devices, batch, experts, attention):
    """Digests of all configurations that read_defaults and predict accept, without a search."""
    ranks, digests = divisors(devices), set()
    for tp, cp, pp, copies, ep in product(ranks, ranks, ranks, ranks, divisors(experts)):
        if devices % (tp * cp * pp * copies) or tp > 8 or 4096 // cp < 1024:
            continue
        mesh = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp_replicate": copies, "zero": 1,
                "dp_shard": devices // (tp * cp * pp * copies)}  # fmt: skip
        for chunks, cut, micro in product(range(1, 9), {False, tp > 1}, divisors(batch)):
            for counted, blocks in product(product((False, True), repeat=2), (*range(7), None)):
                options = dict(zip((EMBEDDING, LOSS), counted, strict=True))
                request = ask(
                    model, devices, batch=batch, micro_batch=micro, options=options,
                    parallel=mesh | {"virtual_pp": chunks, "sequence_parallel": cut},
                    recompute="selective" if blocks is None else {"blocks": blocks},
                    attention=attention,
                )  # fmt: skip
                each, pieces = (6 + sum(counted)) // (pp * chunks), pp * chunks
                sizes = [each] * pieces
                sizes[0] -= counted[0]
                sizes[-1] -= counted[1]
                if (pp == 1 and any(counted)) or (blocks or 0) > max(sizes):
                    continue  # the same as another
                try:
                    recipe, read, _ = read_defaults(request)
                    predict_ledger(recipe, read, find_device("h100-sxm"))
                except InvalidRequest:
                    continue
                digests.add(recipe.digest)
    return digests


@pytest.mark.parametrize(
    ("model", "devices", "batch", "experts", "attention"),
    [(LLAMA, 4, 4, 1, "flash"), (LLAMA, 2, 4, 1, "eager"), (MIXTRAL, 4, 2, 4, "flash")],
)
def test_the_space_is_what_trying_everything_finds(model, devices, batch, experts, attention):
    space = span(ask(model, devices, batch=batch, attention=attention))
    recipes = found(space)
    digests = {recipe.digest for recipe in recipes}
    assert len(digests) == len(recipes) == space.size > 100
    assert digests == one_by_one(model, devices, batch, experts, attention)


def test_what_is_stated_is_fixed():
    open_, stated = ask(), ask(micro_batch=2, recompute="selective", attention="cudnn")
    assert {r.attention for r in found(span(open_))} == {"flash", "cudnn", "eager"}
    recipes = found(span(stated))
    words = {(r.micro_batch, r.recompute, r.attention) for r in recipes}
    assert words == {(2, "selective", "cudnn")}
    mesh = {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 1}
    recipes = found(span(ask(parallel=mesh, recompute="none")))
    assert {r.parallel for r in recipes} == {read_defaults(ask(parallel=mesh))[0].parallel}
    assert {r.recompute_blocks for r in recipes} == {0}
    assert {r.accumulation * r.micro_batch for r in recipes} == {8}


def test_what_is_learned_is_not_traded_for_speed():
    recipes = found(span(ask(count=2, batch=2)))
    learned = {(r.precision, r.method, r.base_format, r.optimizer.name) for r in recipes}
    assert learned == {("bf16-mixed", "full", "fp32", "adamw")}


def test_every_candidate_uses_all_devices_and_the_whole_batch():
    space = span(ask(MIXTRAL, 8, 4, batch=24))
    for part in space.parts:
        for recipes in part.slices(500):
            assert (recipes.parallel.world == 32).all()
            assert (recipes.global_batch == 24).all()
            assert (recipes.parallel.tp <= 8).all()
            assert recipes.devices_per_node == 8


def test_slices_hold_the_candidates_in_order():
    part = span(ask()).parts[0]
    pieces = [with_columns(recipes, {}) for recipes in part.slices(50)]
    assert sum(len(p.micro_batch) for p in pieces) == part.size
    assert max(len(p.micro_batch) for p in pieces) <= 50
    blocks = numpy.concatenate([p.recompute_blocks for p in pieces])
    rows = [0, 3, 49, 50, 51, part.size - 1]
    assert [part.recipe_of(row).recompute_blocks for row in rows] == list(blocks[rows])


def test_uneven_stages_where_no_even_split_exists():
    model = LLAMA | {"num_hidden_layers": 11}
    recipes = found(span(ask(model, recompute="none", attention="flash")))
    uneven = {
        (r.parallel.pp, r.options[FIRST], r.options[LAST]) for r in recipes if r.options[FIRST]
    }
    # 4 stages: 11 + 1 counted blocks are 4 x 3; 8 stages: 11 = 2 x 6 - 1, and no end is left
    assert uneven == set()
    model = LLAMA | {"num_hidden_layers": 13}
    recipes = found(span(ask(model, recompute="none", attention="flash")))
    uneven = {
        (r.parallel.pp, r.options[FIRST], r.options[LAST]) for r in recipes if r.options[FIRST]
    }
    assert uneven == {(4, 1, 4), (4, 2, 3), (4, 3, 2), (4, 4, 1)}


BREAKS = [
    ("devices", {"tp": 3, "dp_shard": 1}),
    ("devices", {"dp_shard": 2}),
    ("node", {"tp": 16, "dp_shard": 1}),
    ("share of a sequence", {"cp": 8, "dp_shard": 2}),
    ("global batch", {"dp_shard": 16, "global": 12}),
    ("micro-batch", {"dp_shard": 16, "micro_batch": 3}),
    ("megatron", {"tp": 8, "dp_shard": 2}),
    ("megatron", {"pp": 4, "dp_shard": 4}),
]


@pytest.mark.parametrize(("rule", "change"), BREAKS)
def test_a_configuration_is_refused_by_name(rule, change):
    space = span(ask(count=8, nodes=2, batch=change.pop("global", 16)))
    recipe = space.parts[0].recipe
    broken = explain(space, with_columns(recipe, {"dp_shard": 16, "accumulation": 1} | change))
    assert broken is not None
    assert (broken.name, bool(broken.broken)) == (rule, True)
    assert "{" not in broken.sentence


def test_a_candidate_breaks_no_rule():
    space = span(ask(MIXTRAL, 4, batch=4))
    assert all(explain(space, recipe) is None for recipe in found(space)[::7])


def test_rules_say_what_they_removed():
    space = span(ask())
    said = {removed.rule: removed for removed in space.removed}
    assert said["share of a sequence"].sentence.startswith("`parallel.cp: 8` leaves a rank 512")
    assert said["key-value heads"].number > 0
    assert "cuts the 4 key-value heads of `llama` into 8 parts" in said["key-value heads"].sentence
    with pytest.raises(InvalidRequest, match="cuts the 4 key-value heads"):
        span(ask(parallel={"tp": 8, "zero": 1}))
    with pytest.raises(InvalidRequest, match="cannot be dealt"):
        span(ask(parallel={"pp": 8, "virtual_pp": 3, "zero": 1}))


def test_a_node_is_what_the_request_or_the_catalogue_says():
    nodes = [span(ask(count=count, nodes=n)).limits.node for count, n in ((2, 4), (2, 1), (16, 1))]
    assert nodes == [2, 2, 8]


def test_every_micro_batch_that_divides_a_ranks_share_is_tried():
    space = span(ask(count=2, batch=12, recompute="none", attention="flash"))
    found_ = {}
    for recipe in found(space):
        if recipe.parallel.pp == recipe.parallel.cp == 1:
            found_.setdefault(recipe.parallel.dp, set()).add(recipe.micro_batch)
    assert found_ == {1: {1, 2, 3, 4, 6, 12}, 2: {1, 2, 3, 6}}
