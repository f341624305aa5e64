"""What one rank of many holds, predicted, against the trace of FSDP2's own code, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from msgspec.structs import replace

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.meta import Meter
from memfit.meta.distributed.sharding import Sharding, Shared, Unit
from memfit.parallelism.shards import local_model
from memfit.plan.memory.predicted_memory import find_fullest, predict_memory
from memfit.plan.memory.saving import split_files
from memfit.plan.request.as_stated import read_stated
from memfit.plan.request.meshes import list_meshes
from memfit.plan.step_time.read import read_setting
from memfit.plan.step_time.step import predict_step
from memfit.records import from_data
from memfit.records.hardware import Device
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import LEAN, Freeze, Parallel, Preference, Quantisation, Recipe
from memfit.records.request import Request
from tiny_models import CONFIGS, FAMILIES, make_recipe

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
TRACED = tuple(phase for phase in Phase if phase is not Phase.GENERATE)
SCALARS = 16  # bytes
SCALAR_PHASES = (Phase.FIRST_STEP, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP)
UNEVEN = {**CONFIGS["llama"], "vocab_size": 251, "intermediate_size": 177}
EVEN = {**CONFIGS["llama"], "vocab_size": 250, "intermediate_size": 178}
DEEP = {**CONFIGS["llama"], "num_hidden_layers": 6}
MIXED = {"precision": "bf16-mixed"}
OVER_BF16 = {**MIXED, "base_format": "bf16", "method": "lora"}
OVER_NF4 = {"method": "lora", "base_format": "nf4", "quantisation": Quantisation(double=True)}
TWO = Parallel(dp_shard=2)
CASES = {
    "2 shards of uneven weights, recomputed, accumulated, mixed": make_recipe(
        config=UNEVEN, parallel=TWO, recompute_blocks=1, accumulation=3, **MIXED
    ),
    "2 copies of 3 shards, accumulated": make_recipe(
        config=UNEVEN, parallel=Parallel(dp_replicate=2, dp_shard=3), accumulation=2, **MIXED
    ),
    "gathered weights kept, the head tied": make_recipe(
        "gpt2", parallel=Parallel(dp_shard=2, reshard_after_forward=False)
    ),
    "lora over bf16, 8 shards": make_recipe(parallel=Parallel(dp_shard=8), **OVER_BF16),
    "lora over nf4, 3 shards of uneven codes and scales, recomputed": make_recipe(
        config=UNEVEN, parallel=Parallel(dp_shard=3), recompute_blocks=1, **MIXED, **OVER_NF4
    ),
    "chunked, selective, in backward": make_recipe(
        parallel=TWO, loss="chunked", loss_chunk=12, selective_blocks=1,
        optimizer={"in_backward": True, "clip_norm": 0.0},
    ),
    "2 stages of 2 uneven shards, mixed": make_recipe(
        config=UNEVEN, parallel=Parallel(pp=2, dp_shard=2), accumulation=5, recompute_blocks=1,
        **MIXED,
    ),
    "2 stages of 2 ranks to a product": make_recipe(
        config=EVEN, parallel=Parallel(pp=2, tp=2, sequence_parallel=True), accumulation=3,
        recompute_blocks=2,
    ),
    "2 stages of 2 ranks to a row": make_recipe(
        config=DEEP, parallel=Parallel(pp=2, cp=2), accumulation=2,
    ),
    "2 ranks to a product, one row, accumulated, mixed": make_recipe(
        config=EVEN, parallel=Parallel(tp=2, sequence_parallel=True), micro_batch=1,
        accumulation=2, **MIXED,
    ),
    "3 ranks to a row, recomputed, accumulated": make_recipe(
        config=EVEN, parallel=Parallel(cp=3), sequence_length=24, recompute_blocks=1,
        accumulation=2,
    ),
}  # fmt: skip
OFF = {"objective": "dpo", "method": "lora",
       "preference": Preference(beta=0.1, reference="adapter-off")}  # fmt: skip
CHUNKED = {"loss": "chunked", "loss_chunk": 12}
PAIRS = {
    "dpo": make_recipe(config=UNEVEN, parallel=TWO, recompute_blocks=1, **OFF),
    "dpo, chunked, kept, accumulated, mixed": make_recipe(
        "qwen3", parallel=Parallel(dp_shard=2, reshard_after_forward=False), accumulation=2,
        **OFF, **CHUNKED, **MIXED,
    ),
    "dpo, the head tied, 2 copies of 2 shards": make_recipe(
        "gpt2", parallel=Parallel(dp_replicate=2, dp_shard=2), **OFF
    ),
    "dpo, 2 copies, over nf4, mixed": make_recipe(
        "gpt_neox", parallel=Parallel(dp_replicate=2), **OFF, **MIXED, base_format="nf4",
        quantisation=Quantisation(double=True),
    ),
    "dpo, full, reference before, chunked, accumulated": make_recipe(
        "mistral", parallel=TWO, objective="dpo", accumulation=2, **CHUNKED,
        preference=Preference(beta=0.1, reference="precomputed"),
    ),
    "simpo, full, 3 uneven shards, mixed": make_recipe(
        config=UNEVEN, parallel=Parallel(dp_shard=3), objective="simpo", **MIXED,
        preference=Preference(beta=2.0, loss_type="simpo", gamma=0.5),
    ),
    "reward, mixed": make_recipe(
        "qwen2", parallel=TWO, objective="reward", **MIXED,
        preference=Preference(beta=1.0, loss_type="bradley_terry"),
    ),
    "orpo, chunked": make_recipe(
        "qwen2", parallel=TWO, objective="orpo", **CHUNKED,
        preference=Preference(beta=0.1, loss_type="orpo", cross_entropy=1.0),
    ),
    "cpo, lora, bf16": make_recipe(
        parallel=TWO, objective="cpo", method="lora", precision="bf16", base_format="bf16",
        preference=Preference(beta=0.1, cross_entropy=1.0),
    ),
    "rated, over bf16, mixed": make_recipe(
        parallel=TWO, objective="kto", **OVER_BF16,
        preference=Preference(beta=0.1, loss_type="apo_zero_unpaired", desirable=1.0,
                              undesirable=1.0, reference="adapter-off"),
    ),
}  # fmt: skip
SLOW = {
    "2 ranks to a product of 2 shards, recomputed": make_recipe(
        "qwen3",
        config=CONFIGS["qwen3"] | {"vocab_size": 250},
        recompute_blocks=1,
        parallel=Parallel(dp_shard=2, tp=2, sequence_parallel=True),
    ),
    "2 copies of 2 ranks to a product, the head tied, packed": make_recipe(
        "qwen2",
        config=CONFIGS["qwen2"] | {"vocab_size": 250, "tie_word_embeddings": True},
        parallel=Parallel(dp_replicate=2, tp=2, sequence_parallel=True),
        packing=True,
    ),
    "2 ranks to a row, 2 to a product, of 2 shards": make_recipe(
        "qwen3",
        config=CONFIGS["qwen3"] | {"vocab_size": 250},
        parallel=Parallel(dp_shard=2, cp=2, tp=2, sequence_parallel=True),
    ),
    "4 ranks to a row, adapters, lean, mixed": make_recipe(
        parallel=Parallel(cp=4), lean=LEAN, **OVER_BF16
    ),
    "lora over int8, 2 copies, accumulated": make_recipe(
        "qwen2",
        parallel=Parallel(dp_replicate=2),
        accumulation=2,
        precision="bf16",
        method="lora",
        base_format="int8",
        quantisation=Quantisation(outlier_threshold=6.0, outlier_share=0.1),
    ),
    "4 copies, accumulated": make_recipe(
        parallel=Parallel(dp_replicate=4), accumulation=2, **MIXED
    ),
    "64 shards, most of them empty": make_recipe(config=DEEP, parallel=Parallel(dp_shard=64)),
    "bf16, packed": make_recipe(
        "qwen2", parallel=TWO, precision="bf16", base_format="bf16", packing=True
    ),
    "last block trained": make_recipe(
        config=DEEP, method="freeze", freeze=Freeze(last_blocks=1), parallel=Parallel(dp_shard=4)
    ),
    "experts": make_recipe("qwen3_moe", parallel=TWO, recompute_blocks=1, **MIXED),
    "scaled embedding": make_recipe("gemma", parallel=TWO, **MIXED),
}


def held(recipe: Recipe, device: Device, rank: int) -> tuple[dict[Phase, int], ...]:
    """Bytes of tensors at the peaks that a certificate of many ranks has: predicted, and traced."""
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    predicted = predict_memory(model, recipe, device, rank)
    traced = trace(recipe, device, rank=rank).phases
    phases = [phase for phase in TRACED if phase in traced]
    return {p: predicted.live(p) for p in phases}, {p: traced[p] for p in phases}


def assert_alike(predicted: dict[Phase, int], traced: dict[Phase, int]) -> None:
    """To the byte, but for 0-dim results that a step's caller may still hold."""
    for phase, nbytes in traced.items():
        scalars = SCALARS if phase in SCALAR_PHASES else 0
        assert predicted[phase] == pytest.approx(nbytes, abs=scalars), phase


# one matrix of two tables: of the first the rank that holds the least, of the second the first
@pytest.mark.slow
@pytest.mark.covering(CASES | SLOW)
@pytest.mark.parametrize("name", CASES | SLOW)
def test_a_rank_holds_what_is_predicted(name: str) -> None:
    recipe = (CASES | SLOW)[name]
    last = recipe.parallel.world - 1  # holds the least: its shards are padded
    predicted, traced = held(recipe, CPU, last if name in CASES else 0)
    assert set(traced) >= {Phase.FIRST_STEP, Phase.BACKWARD, Phase.OPTIMIZER_STEP, Phase.EVALUATE}
    assert_alike(predicted, traced)


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}])
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_the_rank_that_writes_loads_and_saves_what_is_predicted(axes: Any, weights: Any) -> None:
    """Beside its shards it has whole tensors, and on a CPU the copies that wait for their file."""
    recipe = replace(
        make_recipe(config=EVEN, parallel=Parallel(**axes), accumulation=2), weights=weights
    )
    predicted, traced = held(recipe, CPU, 0)
    for phase in (Phase.LOAD, Phase.SAVE):
        assert predicted[phase] == traced[phase], phase


@pytest.mark.parametrize("most", [100, 50, 8])
def test_files_are_split_as_hugging_face_splits_them(most: int) -> None:
    sizes = [40, 60, 8, 60, 20, 4, 52, 96, 16]
    tensors = {str(i): torch.empty(n // 4, device="meta") for i, n in enumerate(sizes)}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=most)
    groups = sorted(sorted(map(int, names)) for names in split.filename_to_tensors.values())
    files = split_files(sizes, most)
    assert sorted([i for i, f in enumerate(files) if f == file] for file in {*files}) == groups


@pytest.mark.covering(PAIRS)
@pytest.mark.parametrize("device", [CPU, H100], ids=lambda device: device.id)
@pytest.mark.parametrize("name", PAIRS)
def test_a_rank_of_compared_answers_holds_what_is_predicted(name: str, device: Device) -> None:
    recipe = replace(PAIRS[name], device=device.id)
    if device is H100 and recipe.compute_dtype == "float32":
        recipe = replace(recipe, attention="efficient")
    predicted, traced = held(recipe, device, recipe.parallel.world - 1)
    assert set(traced) >= {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.EVALUATE}
    assert_alike(predicted, traced)


# families whose blocks have something of their own that is cut or cast; of copies, what is cast
OWN_PARTS = {
    "dp_shard": ("llama", "gpt2", "bloom", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3"),
    "dp_replicate": ("llama", "mpt"),
}  # fmt: skip
ON_TWO = [
    pytest.param(family, axis, marks=[] if family in own else [pytest.mark.wide])
    for axis, own in OWN_PARTS.items() for family in FAMILIES
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "axis"), ON_TWO)
def test_a_rank_of_two_holds_what_is_predicted_of_every_family(family: str, axis: str) -> None:
    """FSDP casts what a block is given, too: MPT's bias of positions is of 16 bits on two ranks."""
    recipe = make_recipe(family, parallel=Parallel(**{axis: 2}), attention="math", **MIXED)
    predicted, traced = held(recipe, CPU, 0)
    assert_alike(predicted, traced)


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_share_a_row_hold_on_a_gpu_what_is_predicted(rank: int) -> None:
    """Of all phases; and the rank that is taken for the fullest is."""
    recipe = make_recipe(
        config=EVEN, parallel=Parallel(cp=3), sequence_length=384, micro_batch=1, **MIXED
    )
    predicted, traced = held(recipe, H100, rank)
    assert_alike(predicted, traced)
    model = read_model(recipe.model)
    peaks = [predict_memory(model, recipe, H100, rank).peak for rank in range(3)]
    assert predict_memory(model, recipe, H100).peak == max(peaks)


ON_HOST = {
    "uneven shards, mixed, recomputed, accumulated": make_recipe(
        config=UNEVEN, parallel=Parallel(dp_shard=3), recompute_blocks=1, accumulation=2,
        offload="parameters", **MIXED,
    ),
    "2 copies of 2 shards in fp32, kept gathered": make_recipe(
        "gpt2", parallel=Parallel(dp_replicate=2, dp_shard=2, reshard_after_forward=False),
        offload="parameters", attention="efficient",
    ),
    "lora over nf4": make_recipe(
        parallel=TWO, recompute_blocks=1, offload="parameters", **MIXED, **OVER_NF4
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_HOST)
def test_a_rank_whose_shards_wait_on_the_host_holds_what_is_predicted(name: str) -> None:
    recipe = ON_HOST[name]
    predicted, traced = held(recipe, H100, 0)
    assert_alike(predicted, traced)
    assert predicted[Phase.LOAD] == traced[Phase.LOAD]  # no weight comes to the device
    kept, _ = held(replace(recipe, offload="none"), H100, 0)
    assert max(predicted.values()) < max(kept.values())


ALL_AXES = Parallel(pp=2, dp_shard=2, cp=2, tp=2, sequence_parallel=True)


@pytest.mark.parametrize("rank", [2, 8])
def test_a_rank_of_all_axes_holds_on_a_gpu_what_is_predicted(rank: int) -> None:
    recipe = make_recipe(
        config=EVEN, parallel=ALL_AXES, sequence_length=384, micro_batch=1, accumulation=3,
        recompute_blocks=1, **MIXED,
    )  # fmt: skip
    predicted, traced = held(recipe, H100, rank)
    assert_alike(predicted, traced)


STAGED = {
    "4 stages, packed": make_recipe(
        config=DEEP, parallel=Parallel(pp=4), accumulation=6, micro_batch=1, packing=True
    ),
    "2 x 2 stages, interleaved": make_recipe(
        config=CONFIGS["llama"] | {"num_hidden_layers": 7},
        parallel=Parallel(pp=2, virtual_pp=2),
        accumulation=4,
    ),
}


@pytest.mark.parametrize("name", STAGED)
def test_each_stage_holds_what_is_predicted_and_the_fullest_is_found(name: str) -> None:
    recipe = STAGED[name]
    peaks = []
    for rank in range(recipe.parallel.pp):
        predicted, traced = held(recipe, CPU, rank)
        for phase in predicted.keys() - {Phase.LOAD, Phase.EVALUATE}:
            assert predicted[phase] == pytest.approx(traced[phase], rel=0.005, abs=SCALARS), phase
        peaks.append(max(traced.values()))
    model = read_model(recipe.model)
    fullest, why = find_fullest(model, recipe, CPU)
    assert fullest == peaks.index(max(peaks))
    assert "stage" in why
    assert len(set(peaks)) == len(peaks)


def test_the_fullest_rank_is_predicted_unless_another_is_asked_for() -> None:
    recipe = make_recipe(config=UNEVEN, parallel=Parallel(dp_shard=5))
    model = read_model(recipe.model)
    peaks = [predict_memory(model, recipe, CPU, rank).peak for rank in range(5)]
    assert predict_memory(model, recipe, CPU).peak == max(peaks) > min(peaks)


def test_shards_of_all_ranks_are_the_model() -> None:
    recipe = make_recipe(config=UNEVEN)
    model, parallel = read_model(recipe.model), Parallel(dp_replicate=2, dp_shard=5)
    locals_ = [local_model(model, parallel, rank) for rank in range(5)]
    assert sum(part.parameters for part in locals_) == model.parameters


def test_a_unit_fetches_the_one_before_it_while_its_backward_runs() -> None:
    sharding = Sharding(shards=2, shard=0, copies=1, reshards=True, low="", wide="")
    meter = Meter()
    shared = Shared(meter, sharding, None)
    units = [Unit(shared, "blocks", reshards=True) for _ in range(2)]
    for unit in units:
        unit.add((6, 4), "float32", trainable=False)
        unit.gather()
        unit.leave(unit.weights[0][0].detached())
    shared.end_forward()
    before = len(meter.requested)
    units[1]._enter_backward()
    gathered = [n for n, kind in zip(meter.requested, meter.kinds, strict=True)
                if kind is Kind.ALL_GATHER][-3:]  # fmt: skip
    assert len(meter.requested) - before == 3  # its buffer, its weights, and the other's buffer
    assert gathered == [96, 96, 96]


def test_a_unit_on_the_host_copies_each_shard_to_the_device_and_casts_it_there() -> None:
    """`FSDPParam.all_gather_inputs` (torch 2.13): never a peak by itself, so no trace shows it."""
    sharding = Sharding(
        shards=2, shard=0, copies=1, reshards=True, low="bfloat16", wide="float32", on_host=True
    )
    meter = Meter()
    unit = Unit(Shared(meter, sharding, None), "blocks", reshards=True)
    for rows in (6, 3):  # of 3 the first rank has 2, and so has the second with its padding
        unit.add((rows, 4), "float32", trainable=False)
    before = len(meter.requested)
    unit.gather()
    copies = [3 * 4 * 4, 3 * 4 * 2, 2 * 4 * 4, 2 * 4 * 2]
    assert list(meter.requested)[before:] == [*copies, 2 * (24 + 16), 2 * 24, 2 * 16]


def ask(**changes: object) -> Request:
    stated = {
        "model": "llama-3.1-8b", "weights": "random", "method": "full", "precision": "bf16-mixed",
        "recompute": "full", "loss": "plain", "micro_batch": 1,
        "task": {"global_batch": 64, "sequence_length": 4096},
        "hardware": {"device": "h100-sxm", "count": 8, "nodes": 8},
    }  # fmt: skip
    return from_data({**stated, **changes}, Request, source="a test")


def test_predict_takes_what_certify_takes_of_many_devices() -> None:
    """The peak that bench/results/ranks.json has for the same recipe, by the certificate."""
    plan = api.predict(ask())
    assert plan.recipe_digest == read_stated(ask()).recipe.digest
    assert plan.memory.peak_allocated == pytest.approx(10_140_038_144, rel=0.02)
    assert "parallel 64 shards (not asked for)" in plan.assumptions
    assert "NCCL" in plan.memory.because


def test_a_mesh_is_chosen_among_those_that_fit() -> None:
    eight = {"device": "h100-sxm", "count": 8}
    task = {"global_batch": 8, "sequence_length": 2048}
    lean = ask(hardware=eight, limits={"memory": "40 GiB"}, task=task)
    plan = api.plan(lean, levers=False)
    assert plan.recipe.parallel.dp_shard == 8  # 16 bytes a weight do not fit on each device
    assert plan.memory.verdict == "fits"
    labels = [row.label for row in plan.considered]
    assert any("8 copies" in label for label in labels)


def test_meshes_of_several_nodes() -> None:
    found = {(p.dp_replicate, p.dp_shard) for p in list_meshes(ask())}
    assert found == {(1, 64), (8, 8), (64, 1)}
    assert len(list_meshes(ask(parallel={"dp_shard": 64}))) == 1
    with pytest.raises(InvalidRequest, match="names 8 ranks"):
        list_meshes(ask(parallel={"dp_shard": 8}))
    shared = list_meshes(ask(micro_batch=2))  # 128 rows on 64 devices, and only 64 are asked for
    assert {p.tp for p in shared} == {2, 4, 8}
    with pytest.raises(InvalidRequest, match="64 ranks x `micro_batch: 2`"):
        list_meshes(ask(micro_batch=2, hardware={"device": "h100-sxm", "nodes": 64}))


def test_what_no_prediction_describes_is_refused_and_certified() -> None:
    with pytest.raises(InvalidRequest, match="on 64 devices is not predicted yet") as error:
        api.predict(ask(offload="activations"))
    assert "memfit certify" in error.value.hint


def test_what_many_ranks_do_not_run_is_refused_in_the_steps_own_words() -> None:
    with pytest.raises(InvalidRequest, match=r"on 64 ranks(: | with )") as error:
        api.predict(ask(method="dora"))
    assert "one device" in error.value.hint


def test_weights_that_stay_gathered_are_fetched_once() -> None:
    recipe = replace(make_recipe(parallel=Parallel(dp_shard=8), **MIXED), device="h100-sxm")
    kept = replace(recipe, parallel=Parallel(dp_shard=8, reshard_after_forward=False))
    model = read_model(recipe.model)
    again, once = (
        predict_step(read_setting(r, model, H100)).gathering for r in (recipe, kept)
    )  # fmt: skip
    assert 0 < once < again


def test_a_quantised_base_is_gathered_as_it_is_stored() -> None:
    mesh, over = {"parallel": {"dp_shard": 64}}, {"method": "lora", "precision": "bf16"}
    dense, coded = (read_stated(ask(**mesh, **over, base_format=f)).recipe for f in ("bf16", "nf4"))
    model = read_model(dense.model)
    two, half = (read_setting(r, model, H100) for r in (dense, coded))
    assert two.layout.sent.gathered == 2
    assert half.layout.sent.gathered == pytest.approx(0.516, abs=1e-3)  # 4.127 bits
    assert predict_step(half).gathering < predict_step(two).gathering
