"""The certificate while training: a leak is named, a clean run is not, and a shortage explained."""

import json

import pytest
import torch
from msgspec.structs import replace
from tiny_runs import CONFIG, tiny_recipe, write_text
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit import catalog
from memfit.certify.evidence.certificate import make_certificate
from memfit.core.errors import RunFailed
from memfit.records import read_json
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.recipe import Parallel
from memfit.records.request import Request, Task
from memfit.records.results import OutOfMemory
from memfit.train.checkpoint.files import find_damage
from memfit.train.data.prepare import find_bounds
from memfit.train.run.drift import (
    ABSOLUTE,
    RELATIVE,
    Counters,
    Watcher,
    compare_entries,
    find_drift,
    is_beyond,
)
from memfit.train.run.guard import explained_out_of_memory
from memfit.train.run.loop import Cadence, train
from memfit.train.run.oom_report import find_alive
from memfit.train.step import build as building
from memfit.train.step import step as stepping

MIB = 2**20


@pytest.fixture(scope="module")
def request_(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    data, held_out = write_text(root / "data"), write_text(root / "held_out", 3)
    return Request(model=CONFIG, task=Task(data=str(data), evaluation=str(held_out)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def certified(request_, cache):
    """The tiny recipe's certificate on this data, with a limit."""
    recipe = tiny_recipe()
    data, held_out = find_bounds(request_, recipe, cache)
    device = catalog.find_device("cpu-x86")
    return make_certificate(recipe, device, 1024 * MIB, None, data=data, held_out=held_out)


@pytest.fixture
def go(request_, cache, tmp_path, certified):
    def start(**options):
        options = {"cadence": Cadence(save_every=2, evaluate_every=3)} | options
        options.setdefault("certificate", certified)
        return train(tiny_recipe(), request_, tmp_path / "run", cache=cache, **options)

    return start


@pytest.fixture
def in_blocks(monkeypatch):
    """Run something after each call of the first block's MLP, from its first step on."""

    def install(hook):
        build = building.build_model

        def build_hooked(recipe, device):
            model = build(recipe, device)
            model.model.layers[0].mlp.register_forward_hook(hook)
            return model

        monkeypatch.setattr("memfit.train.measure.counters.build_model", build_hooked)

    return install


def test_a_clean_run_says_nothing(go):
    run = go()
    assert run.warnings == ()
    assert run.finished


def test_activations_that_stay_are_named_before_the_limit_is_near(go, in_blocks):
    kept = []

    def leak(module, arguments, output):
        if module.training and torch.is_grad_enabled():
            kept.append(output.detach().repeat(64, 1, 1))

    in_blocks(leak)
    run = go()
    said = [w for w in run.warnings if w.startswith("optimizer_step")]
    # 64 copies of (2, 32, 32) fp32 of each micro-batch are still there at the update: two of the
    # rehearsal's first step, and two of its second
    assert "optimizer_step before the first step holds" in said[0]
    assert "activations of blocks hold 2.00 MiB more" in said[0]
    assert "model.layers.0" in said[0]
    assert "MiB are left below the limit" in said[0]
    assert max(run.phases.values()) < 64 * MIB
    assert go().warnings == run.warnings  # finished: it is returned as it was written


def test_what_a_step_holds_for_a_moment_is_named_in_its_own_phase(go, in_blocks):
    def swell(module, arguments, output):
        if module.training:
            torch.ones(MIB)

    in_blocks(swell)
    run = go()
    names = {w.partition(" ")[0] for w in run.warnings}
    # above the certified forward though far below the run's peak elsewhere
    assert "forward" in names
    assert "optimizer_step" not in names
    (said,) = [w for w in run.warnings if w.startswith("forward")]
    assert "temporary of blocks hold 4.00 MiB more" in said


# -- the comparison, by hand -----------------------------------------------------------------


def entry(kind, owner, nbytes, phase=Phase.BACKWARD):
    return Entry(kind=kind, phase=phase, owner=owner, nbytes=nbytes, because="1 tensor")


def with_phase(made, nbytes, **memory):
    held = entry(Kind.ACTIVATIONS, "blocks", nbytes)
    return replace(
        made, phases={"backward": nbytes}, ledger=Ledger(entries=(held,)),
        memory=replace(made.memory, peak_allocated=nbytes, **memory),
    )  # fmt: skip


def test_the_band_is_relative_and_absolute():
    assert not is_beyond(ABSOLUTE, 0)
    assert is_beyond(ABSOLUTE + 1, 0)
    large = 1000 * MIB
    assert not is_beyond(round(large * (1 + RELATIVE)), large)
    assert is_beyond(round(large * (1 + RELATIVE)) + 1, large)


def test_components_are_compared_by_kind_and_owner():
    held = [entry(Kind.ACTIVATIONS, "blocks", 30), entry(Kind.LOGITS, "loss", 7)]
    promised = [entry(Kind.ACTIVATIONS, "blocks", 10), entry(Kind.GRADIENTS, "head", 4)]
    rows = [(row.kind, row.owner, row.excess) for row in compare_entries(held, promised)]
    assert rows == [("activations", "blocks", 20), ("logits", "loss", 7), ("gradients", "head", -4)]


def test_the_allocators_figures_drift_too(certified):
    made = with_phase(certified, 100 * MIB, peak_reserved=120 * MIB, device_total=600 * MIB)
    counters = Counters({Phase.BACKWARD: 100 * MIB}, Ledger(entries=()), 140 * MIB, 900 * MIB)
    found = {drift.name: drift for drift in find_drift(made, counters)}
    assert set(found) == {"reserved", "device_total"}
    assert "fragmentation" in found["reserved"].component
    assert found["device_total"].excess == 300 * MIB


def test_a_drift_is_said_once_and_again_when_it_has_doubled(certified):
    memory, no_ledger = certified.memory, Ledger(entries=())
    beside = memory.device_total - 10 * MIB  # of the process: what is no tensor
    made = with_phase(certified, 10 * MIB, usable=32 * MIB + beside)

    def look(mib, step, ledger=no_ledger):
        peaks = {Phase.BACKWARD: round(mib * MIB)}
        return list(watcher.look(Counters(peaks, ledger), step))

    watcher = Watcher(made)
    assert look(10.05, 1) == []
    (said,) = look(12, 2)
    assert "backward after step 2 holds 12.00 MiB, 2.00 MiB above the certified 10.00 MiB" in said
    assert "20.00 MiB are left below the limit" in said
    assert watcher.wants_names  # nobody watched: the next step is
    assert look(13, 3) == []
    held = Ledger(entries=(entry(Kind.ACTIVATIONS, "blocks", 13 * MIB),))
    (named,) = look(13, 3, held)
    assert "activations of blocks hold 3.00 MiB more" in named
    assert not watcher.wants_names
    (doubled,) = look(40, 9, held)
    assert "8.00 MiB above the limit" in doubled


def test_a_stage_is_held_to_its_own_phases(certified):
    staged = replace(certified.recipe, parallel=Parallel(pp=3))
    made = replace(
        certified, recipe=staged, phases={"forward": 90 * MIB, "save": 10 * MIB},
        memory=replace(certified.memory, peak_allocated=90 * MIB),
        stages={"0": {"forward": 90 * MIB, "save": 10 * MIB},
                "2": {"forward": 40 * MIB, "save": 30 * MIB}},
    )  # fmt: skip
    held = Counters({Phase.FORWARD: 80 * MIB, Phase.SAVE: 30 * MIB}, Ledger(entries=()))

    def drifts(certificate, place):
        return {d.name: d.certified // MIB for d in find_drift(certificate, held, place)}

    assert drifts(made, 0) == {"save": 10}
    assert drifts(made, 1) == {"save": 10}  # of no stage of its own: the one before it
    assert drifts(made, 2) == {"forward": 40}
    # where one rank alone was traced, the others hold no more than its peak, whatever the phase
    assert drifts(replace(made, stages={}), 2) == {}


# -- memory that ends ------------------------------------------------------------------------


@pytest.fixture
def fail_at(monkeypatch):
    """Let the loss, or the update, of one step find no memory. Rehearsals take 2 + 1 steps."""

    def install(step, where="loss"):
        name = "_loss" if where == "loss" else "_clip"
        plain, calls = getattr(stepping, name), [0]

        def failing(built, *arguments):
            calls[0] += built.model.training
            per_step = 2 if where == "loss" else 1
            if calls[0] > (REHEARSED + step - 1) * per_step:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried 2.00 GiB.\nmore")
            return plain(built, *arguments)

        monkeypatch.setattr(stepping, name, failing)

    return install


REHEARSED = 2


@pytest.mark.parametrize("watch_every", [1, 100])
def test_memory_that_ends_inside_a_step_costs_nothing_but_the_step(
    go, fail_at, monkeypatch, tmp_path, watch_every
):
    whole = tmp_path / "whole"
    run = go()
    (tmp_path / "run").rename(whole)
    fail_at(5 if watch_every == 1 else 6)
    done = 4 if watch_every == 1 else 5
    cadence = Cadence(save_every=3, evaluate_every=3, watch_every=watch_every)
    with pytest.raises(RunFailed, match=rf"out of memory in step {done + 1}: CUDA out") as failure:
        go(cadence=cadence)
    assert failure.value.exit_code == 5
    folder = tmp_path / "run" / "checkpoints" / f"step-{done:06}"
    assert str(folder) in failure.value.hint  # saved now: the step had changed nothing
    assert find_damage(folder) == ""
    found = read_json(tmp_path / "run" / "out_of_memory.json", OutOfMemory)
    assert found.checkpoint == str(folder)
    assert (found.phase, found.where) == ("loss", f"step {done + 1}")
    assert found.complete is (watch_every == 1)
    held = {row.kind for row in found.components if row.held}
    assert {Kind.PARAMETERS, Kind.OPTIMIZER_STATE} <= held
    if found.complete:
        assert Kind.ACTIVATIONS in held
        assert found.held <= found.certified
    monkeypatch.undo()
    resumed = go()
    assert resumed.losses == run.losses
    assert resumed.finished


def test_memory_that_ends_inside_the_update_keeps_the_last_checkpoint(go, fail_at, tmp_path):
    fail_at(4, "update")
    with pytest.raises(RunFailed, match="out of memory in step 4") as failure:
        go()
    assert "step-000002" in failure.value.hint
    assert not (tmp_path / "run" / "checkpoints" / "step-000003").exists()
    found = json.loads((tmp_path / "run" / "out_of_memory.json").read_text())
    assert found["phase"] == "optimizer_step"


def test_the_difference_names_what_nobody_certified(go, in_blocks, fail_at, tmp_path):
    kept = []
    in_blocks(lambda module, _, output: kept.append(output.detach().repeat(256, 1, 1)))
    fail_at(1)
    with pytest.raises(RunFailed, match="out of memory in step 1") as failure:
        go()
    assert "activations of blocks held" in failure.value.hint
    assert "checkpoints" not in failure.value.hint
    found = read_json(tmp_path / "run" / "out_of_memory.json", OutOfMemory)
    assert (found.components[0].kind, found.components[0].owner) == ("activations", "blocks")
    assert found.tensors[0].shape == (512, 32, 32)
    assert found.tensors[0].module == "model.layers.0"
    assert found.held > found.certified
    assert found.checkpoint == found.snapshot == ""


def test_what_is_alive_is_found_among_tensors_without_a_storage():
    with FakeTensorMode():
        fake = torch.ones(1009)
    strangers = [torch.eye(3).to_sparse(), torch.ones(4).to_mkldnn(), fake]
    mine = torch.ones(123)
    found = find_alive(None, Phase.LOSS, torch.device("cpu"))
    shapes = {row.shape for _, row in found.tensors}
    assert tuple(mine.shape) in shapes
    assert tuple(fake.shape) not in shapes
    assert len(strangers) == 3  # all alive


def test_memory_that_ends_in_the_rehearsal_is_explained_too(go, fail_at, tmp_path):
    fail_at(-1)
    with pytest.raises(RunFailed, match="out of memory in the rehearsal"):
        go()
    found = read_json(tmp_path / "run" / "out_of_memory.json", OutOfMemory)
    assert found.phase in ("first_step", "loss")
    assert found.complete


def test_every_allocators_word_for_it_is_understood_and_no_other(tmp_path):
    with (
        pytest.raises(RunFailed, match="out of memory in step 4"),
        explained_out_of_memory(tmp_path, "step 4"),
    ):
        torch.empty(2**55, dtype=torch.int8)
    with (
        pytest.raises(RunFailed, match="the system gave none"),
        explained_out_of_memory(tmp_path, "step 4"),
    ):
        raise MemoryError
    with pytest.raises(RuntimeError, match="ours"), explained_out_of_memory(tmp_path, "step 5"):
        raise RuntimeError("a bug of ours")
