"""The certificate of one rank of a world that is not here."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from tiny_steps import A100, CONFIGS, CPU, H100, make_device, make_recipe
from torch.distributed.tensor import DTensor, Shard

from memfit.adapters import find_adapter
from memfit.allocator.tape import CAUGHT_UP, FREED, USED, Event
from memfit.catalog.overheads import find_outside, find_overhead
from memfit.certify import trace
from memfit.certify.evidence.certificate import certify_stages, make_certificate
from memfit.certify.tracing.fake_device import fake_device
from memfit.certify.tracing.recorder import Recorder
from memfit.certify.tracing.world import fake_world
from memfit.core.errors import InvalidRequest, NotCertified
from memfit.core.units import GIB
from memfit.families import read_model
from memfit.optimizers import find_optimizer
from memfit.parallelism import make_mesh
from memfit.parallelism.shards import fullest_rank, held_bytes, local_shape
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Parallel, Recipe
from memfit.train.measure.live import LiveBytes
from memfit.train.step.build import build_model

RAGGED = {**CONFIGS["llama"], "vocab_size": 251, "intermediate_size": 177}
MIXED = {"precision": "bf16-mixed"}


def model_of(recipe: Recipe):
    return find_adapter(recipe).adapt(read_model(recipe.model), recipe)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 64, 251])
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8, 64])
def test_shards_are_those_of_torch_chunk(rows: int, shards: int) -> None:
    parallel = Parallel(dp_shard=shards)
    chunks = [tuple(c.shape) for c in torch.empty(rows, 6, device="meta").chunk(shards)]
    mine = [local_shape((rows, 6), parallel, rank) for rank in range(shards)]
    assert [shape for shape in mine if shape[0]] == chunks
    assert mine == sorted(mine, reverse=True)


def test_copies_of_the_model_are_alike() -> None:
    model, parallel = model_of(make_recipe(config=RAGGED)), Parallel(dp_replicate=2, dp_shard=3)
    held = [held_bytes(model.weights, parallel, rank) for rank in range(6)]
    assert held[:3] == held[3:]
    assert sum(held[:3]) == sum(w.nbytes for w in model.weights)


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "config"), [(4, "llama"), (5, "ragged")])
def test_no_rank_holds_more_than_the_fullest(shards: int, config: str) -> None:
    configs = {"llama": CONFIGS["llama"] | {"vocab_size": 256}, "ragged": RAGGED}
    recipe = make_recipe(config=configs[config], parallel=Parallel(dp_shard=shards), **MIXED)
    fullest, why = fullest_rank(model_of(recipe), recipe.parallel)
    made = {r: make_certificate(recipe, H100, None, None, rank=r) for r in range(shards)}
    numbers = {r: (c.memory.peak_allocated, c.memory.peak_reserved) for r, c in made.items()}
    assert all(n <= numbers[fullest][0] for n, _ in numbers.values())
    assert all(n <= numbers[fullest][1] for _, n in numbers.values())
    assert ("alike" in why) == (len({c.phases["optimizer_step"] for c in made.values()}) == 1)
    assert made[fullest].bounds[0] == f"rank {fullest} of {shards}, which was asked for"


def test_a_certificate_says_which_rank_it_is_of() -> None:
    recipe = make_recipe(config=RAGGED, parallel=Parallel(dp_shard=5))
    made = make_certificate(recipe, CPU, GIB, None)
    assert made.bounds[0].startswith("rank 0 of 5, the fullest: it holds ")
    assert made.generation is None
    with pytest.raises(InvalidRequest, match="rank 5 is not one of 5"):
        make_certificate(recipe, CPU, GIB, None, rank=5)


@pytest.mark.parametrize("loss", ["small", "large"])
def test_the_certificate_of_a_run_has_the_phases_of_every_stage(loss: str) -> None:
    """And is of the stage that is the fullest, whichever that is: the first or the last one."""
    config = CONFIGS["llama"] | {"vocab_size": 97 if loss == "small" else 4096}
    recipe = make_recipe(config=config, parallel=Parallel(pp=2), accumulation=4)
    each = [make_certificate(recipe, CPU, GIB, None, rank=rank) for rank in range(2)]
    made = certify_stages(recipe, CPU, GIB)
    assert made.stages == {"0": each[0].phases, "1": each[1].phases}
    peaks = [one.memory.peak_allocated for one in each]
    assert made.memory == each[peaks.index(max(peaks))].memory
    assert made.phases == made.phases_at(peaks.index(max(peaks)))
    # what made the warning: in some phase the other stage holds more than the fullest one
    other = made.phases_at(peaks.index(min(peaks)))
    assert any(other[phase] > made.phases[phase] for phase in other.keys() & made.phases.keys())


def test_persistent_bytes_fall_with_the_number_of_ranks() -> None:
    one, four = (
        trace(make_recipe(**MIXED, parallel=Parallel(dp_shard=n), config=CONFIGS["llama"] | {
            "vocab_size": 256}), CPU).ledger.by_kind(Phase.OPTIMIZER_STEP)
        for n in (1, 4)
    )  # fmt: skip
    buffers = 2 * 8 * 4  # the rotary frequencies, on every rank
    assert 4 * (four[Kind.PARAMETERS] - buffers) == one[Kind.PARAMETERS] - buffers
    assert 4 * four[Kind.GRADIENTS] == one[Kind.GRADIENTS]


def test_gathered_and_reduced_buffers_have_kinds_and_streams_of_their_own() -> None:
    recipe = make_recipe(**MIXED, parallel=Parallel(dp_shard=4))
    found = trace(recipe, H100)
    forward = found.ledger.by_kind(Phase.FORWARD)
    block = 2 * sum(w.numel for w in model_of(recipe).weights if w.layer == 0)
    assert forward[Kind.ALL_GATHER] == 2 * block  # what is gathered, and the weights cut of it
    assert Kind.REDUCE_SCATTER in found.ledger.by_kind(Phase.FIRST_STEP)
    streams = {e.stream for e in found.tape if e.nbytes > 0}
    assert 0 in streams
    assert len(streams) == 3  # compute, gathering, reducing
    assert {e.stream for e in trace(recipe, CPU).tape} == {0}
    assert {e.stream for e in trace(make_recipe(**MIXED), H100).tape} == {0}


def test_kept_weights_are_held_until_backward_and_resharded_ones_are_not() -> None:
    def gathered(reshard: bool) -> int:
        parallel = Parallel(dp_shard=2, reshard_after_forward=reshard)
        found = trace(make_recipe(**MIXED, parallel=parallel), CPU)
        return found.ledger.by_kind(Phase.LOSS).get(Kind.ALL_GATHER, 0)

    block = 2 * sum(w.numel for w in model_of(make_recipe()).weights if w.layer == 0)
    assert gathered(False) - gathered(True) >= 2 * block


def test_memory_of_a_rank_does_not_depend_on_how_many_copies_there_are() -> None:
    peaks = [
        trace(make_recipe(**MIXED, parallel=Parallel(dp_replicate=n, dp_shard=2)), H100).phases
        for n in (2, 32)
    ]
    assert peaks[0] == peaks[1]


def test_more_ranks_than_rows_leave_empty_shards() -> None:
    recipe = make_recipe(parallel=Parallel(dp_shard=300), **MIXED)
    fullest, last = (trace(recipe, H100, rank=rank) for rank in (0, 299))
    assert last.phases[Phase.OPTIMIZER_STEP] < fullest.phases[Phase.OPTIMIZER_STEP]


def test_a_world_of_thousands_costs_what_a_world_of_tens_costs() -> None:
    small, large = (
        trace(make_recipe(parallel=Parallel(dp_shard=n), **MIXED), CPU) for n in (64, 4096)
    )
    assert len(small.tape) == len(large.tape)


def test_foreach_temporaries_are_those_of_the_shards() -> None:
    config = CONFIGS["llama"] | {"vocab_size": 256}
    recipe = make_recipe(
        config=config, parallel=Parallel(dp_shard=2), implementation="foreach", clip_norm=0.0
    )
    whole = find_optimizer(recipe.optimizer).step_temporaries(
        [w.spec for w in model_of(recipe).weights], recipe.optimizer
    )
    kinds = trace(recipe, CPU).ledger.by_kind(Phase.OPTIMIZER_STEP)
    assert kinds[Kind.TEMPORARY] == whole // 2


def test_the_whole_shapes_that_sharding_is_propagated_on_are_nobodys_memory() -> None:
    with fake_world(Parallel(dp_shard=4), 0, "cpu", lambda _: None, lambda *_: None):
        mesh = make_mesh(Parallel(dp_shard=4), "cpu")
        shard = DTensor.from_local(torch.ones(250, 999), mesh, [Shard(0)], run_check=False)
        with LiveBytes("cpu") as live:
            doubled = shard * 2
    assert live.peak == 250 * 999 * 4
    assert doubled.shape == (1000, 999)


def test_communicators_widen_the_band_outside_the_allocator() -> None:
    alone, one, two = (
        find_outside(H100, p)
        for p in (Parallel(), Parallel(dp_shard=8), Parallel(dp_replicate=2, dp_shard=8))
    )
    assert alone == find_overhead(H100)
    assert one.high - alone.high == two.high - one.high > 0
    assert one.low > alone.low
    assert "NCCL" in one.source
    assert find_outside(replace(H100, vendor="Intel"), Parallel(dp_shard=8)) is None


def test_near_the_limit_communicators_make_a_certificate_at_risk() -> None:
    recipe = make_recipe(parallel=Parallel(dp_shard=2), **MIXED)
    reserved = make_certificate(recipe, A100, None, None).memory.peak_reserved
    usable = reserved + find_overhead(A100).high  # the context fits, NCCL's band does not
    assert make_certificate(recipe, A100, usable, None).memory.verdict == "at_risk"


def test_what_ranks_cannot_run_is_refused() -> None:
    shards = Parallel(dp_shard=2)
    with pytest.raises(InvalidRequest, match="`fused` sgd cannot update the shards of 2 ranks"):
        trace(make_recipe(name="sgd", parallel=shards), CPU)
    with pytest.raises(InvalidRequest, match="`precision: fp16-mixed` skips steps"):
        trace(make_recipe(precision="fp16-mixed", parallel=shards), H100)
    with pytest.raises(InvalidRequest, match="names 2 ranks, and this process is one of 1"):
        build_model(make_recipe(parallel=shards), "cpu")


def test_weights_gathered_for_no_gradient_are_waited_for_without_a_driver() -> None:
    """Of frozen blocks FSDP2 gathers some ahead whose backward never asks for them."""
    recipe = make_recipe(method="lora", parallel=Parallel(dp_shard=8), **MIXED)
    frozen, full = trace(recipe, H100), trace(replace(recipe, method="full"), H100)
    assert frozen.phases[Phase.OPTIMIZER_STEP] < full.phases[Phase.OPTIMIZER_STEP]


def test_everything_is_undone_after_a_trace() -> None:
    before = torch.cuda.current_device, torch.Tensor.record_stream, torch.UntypedStorage.resize_
    trace(make_recipe(**MIXED, parallel=Parallel(dp_replicate=2, dp_shard=2)), H100)
    with pytest.raises(NotCertified):
        trace(make_recipe(parallel=Parallel(dp_shard=2)), make_device("Intel", "gaudi", None))
    after = torch.cuda.current_device, torch.Tensor.record_stream, torch.UntypedStorage.resize_
    assert before == after
    assert not torch.distributed.is_initialized()


def test_a_storage_used_on_another_stream_waits_for_it_until_a_step_begins() -> None:
    recorder = Recorder("cuda", None)
    shards = Parallel(dp_shard=2)
    world = fake_world(shards, 0, "cuda", recorder.be_on, recorder.use)
    with world, fake_device(H100), recorder:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensor = torch.empty(1000, device="cuda")
        tensor.record_stream(torch.cuda.current_stream())
        del tensor
        recorder.enter(Phase.FORWARD)
        kept = torch.empty(1000, device="cuda")
    one, two = side.stream_id, 0
    assert recorder.trace(()).tape == (
        Event(0, 4000, one), Event(0, USED, two), Event(0, FREED, one), Event(-1, CAUGHT_UP, two),
        Event(1, 4000, two),
    )  # fmt: skip
    assert recorder.trace(()).bounds == ("streams have caught up when a step begins",)
    del kept
