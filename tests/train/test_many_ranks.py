"""Runs on 2 and 4 processes against one: losses, weights, memory, and going on elsewhere."""

import json
import os
import shutil
import signal
import time
import warnings
from contextlib import contextmanager
from glob import glob
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from ranks_run import UNEVEN, Started, recipe_of
from safetensors.torch import load_file
from tiny_runs import tiny_recipe, write_text

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify.evidence.certificate import make_certificate
from memfit.families import read_model
from memfit.parallelism.shards import held_bytes
from memfit.records import read_json
from memfit.records.ledger import ROLLOUT, Phase
from memfit.records.recipe import Parallel
from memfit.records.request import Request, Task
from memfit.records.results import Run
from memfit.train.checkpoint.files import find_damage
from memfit.train.data.prepare import build_samplers, find_bounds, read_data
from memfit.train.run.generate import generate
from memfit.train.run.session import EXPOSED

SHARDS, BOTH = {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}
PRODUCTS = {"tp": 2, "sequence_parallel": True}
ROWS = {"cp": 2}
STOPPED = 5
LONGEST = 240  # seconds for which the ranks of a run may say nothing
GRACE = 120  # seconds that ranks have to end once one of them is lost
SHARDS_BEING_WRITTEN = ".unfinished-*/shard-*"
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Runs:
    """Starts the ranks of runs, hears how they end, and ends what a test that failed has left."""

    def __init__(self, folder):
        self.folder = folder
        self._started = None
        self._common = {"data": str(write_text(folder / "data")), "cache": str(folder / "cache")}

    def start(self, name, **order):
        self.clear()
        order = {"folder": str(self.folder / name), **self._common, **order}
        self._started = Started(order)
        return list(self.codes())

    def clear(self):
        """End what a test that failed has left."""
        for rank in self._started.alive() if self._started else ():
            rank.kill()
            rank.join(LONGEST)

    def codes(self):
        """How each rank ended, by its process's id; None of one that has not."""
        return {rank.pid: rank.exitcode for rank in self._started.ranks}

    def hear(self, seconds):
        """Wait until a rank ends, for so many seconds at most; whether one did."""
        return self._started.hear(seconds)

    def end(self):
        """How each rank ended. A rank that was lost leaves the others GRACE seconds to notice."""
        while alive := self._started.alive():
            lost = any(code not in (None, 0, STOPPED) for code in self.codes().values())
            if not self.hear(GRACE if lost else LONGEST):
                went_on, codes = [rank.pid for rank in alive], self.codes()
                self.clear()
                pytest.fail(f"ranks {went_on} went on after a loss or too long: {codes}")
        return list(self.codes().values())

    def wait_for(self, found, seconds=LONGEST):
        """Until `found` says so; fails as soon as a rank ends before that."""
        limit = time.monotonic() + seconds
        while not found():
            self.hear(0.001)
            ended = [code for code in self.codes().values() if code is not None]
            assert not ended or found(), f"a rank ended before its moment: {ended}"
            assert time.monotonic() < limit, "the moment never came"

    def whole(self, name, **order):
        """A run to its end, read back; begun again once where torch's heap was found corrupt.

        That was seen once in some thousand runs (`malloc(): unaligned tcache chunk detected` in a
        rank that went on from a checkpoint; docs/LOG.md), and not once in 300 with glibc's
        checking heap. It is said in the summary, with the stacks in the rank's own output.
        """
        ended = self.start_and_end(name, **order)
        if -signal.SIGABRT in ended:
            died = pytest.PytestWarning(f"a rank died of a signal: {name} ended with {ended}")
            warnings.warn(died, stacklevel=2)
            ended = self.start_and_end(name, **order)
        assert set(ended) == {0}
        return read_json(self.folder / name / "run.json", Run)

    def start_and_end(self, name, **order):
        self.start(name, **order)
        return self.end()

    def weights(self, name):
        file = next((self.folder / name / "model").glob("*.safetensors"))
        return load_file(file)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with start_runs(tmp_path_factory.mktemp("runs")) as made:
        yield made


@contextmanager
def start_runs(folder):
    made = Runs(folder)
    try:
        yield made
    finally:
        made.clear()


TWO_BLOCKS = {"config": {"num_hidden_layers": 2}}


@pytest.fixture(scope="module")
def alone(runs):
    return runs.whole("alone", **TWO_BLOCKS)


@pytest.fixture(scope="module")
def even_alone(runs):
    return runs.whole("even alone", even=True, **TWO_BLOCKS)


@pytest.fixture(scope="module")
def deep_alone(runs):
    return runs.whole("deep alone", **DEEP)


@pytest.fixture(scope="module")
def sharded(runs):
    """12 steps on two ranks, which nothing interrupts."""
    return runs.whole("whole", parallel=SHARDS, steps=12)


def same_learning(runs, name, run, want, other):
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(want.losses), **CLOSE)
    mine, theirs = (torch.tensor(r.evaluations) for r in (run, want))
    torch.testing.assert_close(mine, theirs, **CLOSE)
    weights, whole = runs.weights(name), runs.weights(other)
    assert weights.keys() == whole.keys()
    for key, value in whole.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=2e-5, msg=key)


WIDE = (pytest.param(mesh, marks=pytest.mark.wide) for mesh in (SHARDS, {"dp_replicate": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [BOTH, *WIDE], ids=str)
def test_a_run_of_many_ranks_learns_what_one_process_learns(parallel, runs, alone):
    name = f"many {parallel}"
    micro = 2  # of which a rank of two has two a step, a rank of four one
    run = runs.whole(name, parallel=parallel, micro_batch=micro, **TWO_BLOCKS)
    same_learning(runs, name, run, alone, "alone")
    held_to_certificates(runs, run, parallel, micro, **TWO_BLOCKS)
    said = [generate(runs.folder / one, "the", 8, temperature=0) for one in (name, "alone")]
    assert said[0] == said[1]
    logs = sorted((runs.folder / name / "ranks").glob("*/log.jsonl"))
    assert len(logs) == len(run.ranks) - 1
    assert {len(log.read_text().splitlines()) for log in logs} == {6}


def held_to_certificates(runs, run, parallel, micro, **order):
    """What the first and the last rank held is their certificates, to the byte, in every phase."""
    order |= {"parallel": parallel, "micro_batch": micro}
    recipe = recipe_of(order)
    data = str(runs.folder / "data")
    request = Request(model=recipe.model.config, task=Task(data=data, evaluation=data))
    bounds, held_out = find_bounds(request, recipe, runs.folder / "cache")
    for rank in {0, len(run.ranks) - 1}:
        held = run.ranks[rank]
        made = make_certificate(
            recipe, catalog.find_device("cpu-x86"), None, None,
            data=bounds, held_out=held_out, rank=rank,
        )  # fmt: skip
        # a run's weights come into shards that FSDP2 has padded in the rehearsal; a trace's before
        padding = padded(recipe, 0) - padded(recipe, rank)
        assert made.phases | {"load": made.phases["load"] + padding} == held, rank
    fullest = max(run.ranks, key=lambda held: max(held.values()))
    assert run.phases == (run.ranks[0] if recipe.parallel.pp == 1 else fullest)
    absent = {Phase.GENERATE, *ROLLOUT} | (
        {Phase.ACCUMULATE} if recipe.accumulation == 1 else set()
    )
    if recipe.parallel.pp > 1:  # the first stage's losses are another's
        absent |= {Phase.LOSS, Phase.BACKWARD}
    assert set(run.ranks[0]) == {str(phase) for phase in set(Phase) - absent}


def padded(recipe, rank):
    """Bytes of a rank's shards; the first one's are the most, which all are padded to."""
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    return held_bytes(model.weights, recipe.parallel, rank)


@pytest.mark.slow
def test_ranks_that_share_products_learn_what_one_process_learns(runs, even_alone):
    order = {"even": True, **TWO_BLOCKS}
    run = runs.whole("products", parallel=PRODUCTS, micro_batch=4, **order)
    same_learning(runs, "products", run, even_alone, "even alone")
    held_to_certificates(runs, run, PRODUCTS, 4, **order)


@pytest.mark.slow
def test_a_run_moves_between_layouts(runs, even_alone):
    """From 2 stages of 2 shards to 2 ranks that share products, to 2 stages."""
    order = {"even": True, "steps": 6, "micro_batch": 2, **TWO_BLOCKS}
    stop(runs, "changed", 2, parallel={"pp": 2, "dp_shard": 2}, **order | {"micro_batch": 1})
    stop(runs, "changed", 4, parallel=PRODUCTS, **order)
    moved = runs.whole("changed", parallel={"pp": 2}, **order)
    same_learning(runs, "changed", moved, even_alone, "even alone")


@pytest.mark.slow
@pytest.mark.wide  # the test before moves a run to and from each kind of layout
def test_ranks_that_share_products_move(runs, even_alone):
    """From 2 x 2 to 2 without shared products, to 2 with them."""
    order = {"even": True, "steps": 6, **TWO_BLOCKS}
    stop(runs, "moved products", 2, parallel={**SHARDS, **PRODUCTS}, **order)
    stop(runs, "moved products", 4, parallel=SHARDS, **order)
    moved = runs.whole("moved products", parallel=PRODUCTS, **order)
    same_learning(runs, "moved products", moved, even_alone, "even alone")


@pytest.mark.slow
@pytest.mark.wide  # their step is held to one process's in tests/certify/test_ranks.py
def test_ranks_that_share_rows_learn_what_one_process_learns_and_move(runs):
    """On 2 ranks; and from 2 that share rows to 2 with rows of their own."""
    alone = runs.whole("rows alone", micro_batch=4, packing=False)
    run = runs.whole("rows", parallel=ROWS, micro_batch=4, packing=False)
    same_learning(runs, "rows", run, alone, "rows alone")
    held_to_certificates(runs, run, ROWS, 4, packing=False)
    stop(runs, "moved rows", 2, parallel=ROWS, micro_batch=4, packing=False)
    moved = runs.whole("moved rows", parallel=SHARDS, packing=False)
    same_learning(runs, "moved rows", moved, alone, "rows alone")


SPARSE = {
    "config": {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 80,
    },
    "steps": 6,
}  # fmt: skip


@pytest.mark.slow
def test_dealt_experts_learn_what_one_process_learns_count_what_they_receive_and_move(runs):
    """From 2 ranks with dealt experts to 2 without, and back. Four: tests/certify."""
    alone = runs.whole("sparse alone", **SPARSE)
    dealt = {"dp_shard": 2, "ep": 2, "ep_imbalance": 1.0}
    stop(runs, "moved experts", 2, parallel=dealt, **SPARSE)
    stop(runs, "moved experts", 4, parallel=SHARDS, **SPARSE)
    run = runs.whole("moved experts", parallel=dealt, micro_batch=4, **SPARSE)
    same_learning(runs, "moved experts", run, alone, "sparse alone")
    received = run.measurements["experts.largest_imbalance"].value
    assert 0.5 < received <= 2  # of an untrained router: not even
    warned = any("`parallel.ep_imbalance`" in text for text in run.warnings)
    assert warned == (received > 1)


DEEP = {"config": {"num_hidden_layers": 5}, "steps": 6}


@pytest.mark.slow
def test_stages_learn_what_one_process_learns(runs, deep_alone):
    """On 2 ranks, interleaved."""
    chunks = {"pp": 2, "virtual_pp": 2}
    run = runs.whole("stages", parallel=chunks, micro_batch=2, **DEEP)
    same_learning(runs, "stages", run, deep_alone, "deep alone")
    held_to_certificates(runs, run, chunks, 2, **DEEP)


@pytest.mark.slow
@pytest.mark.wide  # as above
def test_stages_move(runs, deep_alone):
    """From 2 stages of 2 shards to 2 shards, to 2 stages."""
    order = DEEP
    stop(runs, "moved stages", 1, parallel={"pp": 2, "dp_shard": 2}, micro_batch=1, **order)
    stop(runs, "moved stages", 3, parallel=SHARDS, **order)
    moved = runs.whole("moved stages", parallel={"pp": 2}, micro_batch=2, **order)
    same_learning(runs, "moved stages", moved, deep_alone, "deep alone")


@pytest.mark.slow
@pytest.mark.wide  # of shards alone, the test of what is stopped has it
def test_stages_go_on_with_the_same_bits(runs):
    order = {"config": {"num_hidden_layers": 5}, "steps": 12, "micro_batch": 1,
             "parallel": {"pp": 2, "virtual_pp": 2}}  # fmt: skip
    run = runs.whole("stages unstopped", **order)
    stop(runs, "stages stopped", 3, **order)
    again = runs.whole("stages stopped", **order)
    assert again.losses == run.losses
    for key, value in runs.weights("stages unstopped").items():
        assert torch.equal(runs.weights("stages stopped")[key], value), key


@pytest.mark.slow
def test_a_rank_that_others_wait_for_is_named(runs):
    run = runs.whole("late", parallel=SHARDS, late=1, watch_every=2, steps=8)
    (said,) = (w for w in run.warnings if "late" in w)
    assert said.startswith("rank 1 is late: other ranks wait up to ")
    found = run.measurements["time.exposed_communication_seconds"]
    assert found.n == 3  # steps that were looked at: the fourth, and every second one after it
    least = found.counter.partition("mean of 2 ranks: rank 1 ")[2].split(" s, rank 0 ")
    less, more = (float(text.removesuffix(" s")) for text in least)
    assert more > 0.2  # which sleeps that long; the other one, only as long as computing takes
    assert less < more / 2
    log = runs.folder / "late" / "log.jsonl"
    looked = [row for row in map(json.loads, log.read_text().splitlines()) if EXPOSED in row]
    assert [row["step"] for row in looked] == [4, 6, 8]
    assert all(row["watched"] for row in looked)  # and left out of the rate
    for row in looked:
        assert 0.2 < row[EXPOSED] <= row["communication_seconds"] < row["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [SHARDS, pytest.param({"dp_replicate": 2}, marks=pytest.mark.wide)], ids=str
)
def test_a_collective_that_hangs_ends_in_an_error_within_its_time(runs, parallel):
    first, second = runs.start(f"hung {parallel}", parallel=parallel, hang=1, timeout=8)
    began = time.monotonic()
    runs.wait_for(lambda: runs.codes()[first] is not None)  # before the other one ends
    assert time.monotonic() - began < LONGEST / 2
    assert runs.codes()[first] == STOPPED  # the exit code of a run that failed
    assert runs.codes()[second] is None
    runs.clear()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["init_process_group", "new_group"])
def test_a_rank_that_waits_for_one_that_is_gone_ends_where_no_collective_would_fail(runs, call):
    assert runs.start_and_end(call, parallel=SHARDS, vanish=call) == [STOPPED, -signal.SIGKILL]


def is_ended_by(process, number):
    """Whether a signal ends a process at once, which neither catches nor ignores it."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    taken = int(fields["SigIgn"], 16) | int(fields["SigCgt"], 16)
    return not taken >> (number - 1) & 1


@pytest.mark.slow
def test_ctrl_c_ends_a_rank_that_waits_for_others_to_come(runs):
    """And what started them ends the others then, of which none could know."""
    first, _ = runs.start("nobody", parallel=SHARDS, absent=True)
    runs.wait_for(lambda: is_ended_by(first, signal.SIGINT))  # as of then it waits
    os.kill(first, signal.SIGINT)
    assert runs.end() == [-signal.SIGINT, -signal.SIGTERM]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2},  # each stage writes its part of the adapter's file
        pytest.param(PRODUCTS, marks=pytest.mark.wide),  # the step is of tests/certify
        pytest.param(SHARDS, marks=pytest.mark.wide),  # the next test has them
    ],
    ids=str,
)
def test_adapters_on_many_ranks(parallel, runs):
    order = {"method": "lora", "config": {"num_hidden_layers": 2}, "even": True, "steps": 3}
    want = runs.whole(f"lora alone {parallel}", **order, micro_batch=4)
    run = runs.whole(f"lora {parallel}", **order, parallel=parallel, micro_batch=4)
    same_learning(runs, f"lora {parallel}", run, want, f"lora alone {parallel}")
    assert len(run.ranks) == 2


@pytest.mark.slow
def test_adapters_over_nf4_on_many_ranks_go_on(runs):
    order = {"method": "lora", "base_format": "nf4", "micro_batch": 2}
    want = runs.whole("nf4 alone", **order)
    stop(runs, "nf4", 2, parallel=SHARDS, **order)
    run = runs.whole("nf4", parallel=SHARDS, **order)
    same_learning(runs, "nf4", run, want, "nf4 alone")
    held_to_certificates(runs, run, SHARDS, 2, method="lora", base_format="nf4")


def write_pairs(path):
    lines = []
    for n in range(13):  # of which no number of ranks has as many
        answers = {"chosen": f"{n + 1} does.", "rejected": "word " * (n % 7) or "no"}
        lines.append(json.dumps({"prompt": f"What follows {n}? ", **answers}))
    path.write_text("\n".join(lines))
    return str(path)


COMPARED = {
    "dpo, adapter off": {
        "objective": "dpo", "method": "lora",
        "preference": {"beta": 0.3, "reference": "adapter-off"},
    },
    "dpo, reference before": {
        "objective": "dpo", "preference": {"beta": 0.3, "reference": "precomputed"},
    },
    "orpo": {
        "objective": "orpo",
        "preference": {"beta": 0.3, "loss_type": "orpo", "cross_entropy": 1.0},
    },
    "reward": {
        "objective": "reward",
        "preference": {"beta": 1.0, "loss_type": "bradley_terry", "center": 0.01},
    },
    "rated, reference before": {
        "objective": "kto",
        "preference": {"beta": 0.3, "reference": "precomputed", "loss_type": "apo_zero_unpaired",
                       "desirable": 1.0, "undesirable": 1.0},
    },
}  # fmt: skip


# losses and references that tests/certify has on ranks, too (test_ranks.py, test_mesh_cells.py)
LIKE_ANOTHER = ("dpo, adapter off", "dpo, reference before", "orpo", "reward")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.wide] if n in LIKE_ANOTHER else []) for n in COMPARED],
)
def test_compared_answers_on_many_ranks_teach_what_they_teach_one_process(name, runs, tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl")
    order = {**COMPARED[name], "data": data, "packing": False, "steps": 4}
    found = []
    for parallel in ({}, SHARDS):
        run = runs.whole(f"{name} {len(parallel)}", **order, parallel=parallel, micro_batch=2)
        folder = runs.folder / f"{name} {len(parallel)}"
        lines = (folder / "log.jsonl").read_text().splitlines()
        keys = ("loss", "reward", "cross_entropy", "evaluation_", "grad_norm")
        rows = [{k: v for k, v in json.loads(x).items() if k.startswith(keys)} for x in lines]
        found.append((run, rows, runs.weights(f"{name} {len(parallel)}")))
    (one, want, weights), (many, rows, shared) = found
    assert len(rows) == len(want) == 4
    assert "reward_margin" in rows[-1]
    assert "evaluation_reward_margin" in rows[-1]
    for mine, other in zip(rows, want, strict=True):
        mine.pop("evaluation_error", None)  # of micro-batches that are cut otherwise
        other.pop("evaluation_error", None)
        assert mine == pytest.approx(other, rel=2e-5, abs=2e-6)
    for weight, values in weights.items():
        torch.testing.assert_close(shared[weight], values, rtol=1e-4, atol=2e-5)
    assert many.measurements["loss.final"].unit == one.measurements["loss.final"].unit


def stop(runs, name, after, **order):
    """Begin a run and ask one of its ranks to stop once it has that many steps, and one at least
    of its own: before, it may not be listening yet."""
    log = runs.folder / name / "log.jsonl"

    def steps():
        return len(log.read_text().splitlines()) if log.exists() else 0

    before = steps()
    ranks = runs.start(name, **order)
    runs.wait_for(lambda: steps() >= max(after, before + 1))
    os.kill(ranks[-1], signal.SIGTERM)
    assert set(runs.end()) == {STOPPED}


@pytest.mark.slow
@pytest.mark.wide  # of these tests' own helper
def test_a_lost_rank_ends_its_test_in_seconds_and_leaves_the_next_one_alone(runs, monkeypatch):
    monkeypatch.setitem(globals(), "GRACE", 1)
    first, second = runs.start("lost", parallel=SHARDS, steps=10_000)
    os.kill(first, signal.SIGSTOP)  # notices nothing
    os.kill(second, signal.SIGKILL)
    with pytest.raises(AssertionError, match="ended before its moment: \\[-9\\]"):
        runs.wait_for(lambda: False)
    with pytest.raises(pytest.fail.Exception, match=f"ranks \\[{first}\\] went on after a loss"):
        runs.end()
    runs.start("left", parallel=SHARDS, steps=10_000)
    assert set(runs.start_and_end("next", parallel=SHARDS, steps=1)) == {0}


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bits_or_on_other_ranks(runs, sharded):
    stop(runs, "stopped", 3, parallel=SHARDS, steps=12)
    shutil.copytree(runs.folder / "stopped", runs.folder / "moved")
    again = runs.whole("stopped", parallel=SHARDS, steps=12)
    assert again.losses == sharded.losses
    for key, value in runs.weights("whole").items():
        assert torch.equal(runs.weights("stopped")[key], value), key
    moved = runs.whole("moved", steps=12)
    torch.testing.assert_close(torch.tensor(moved.losses), torch.tensor(sharded.losses), **CLOSE)


@pytest.mark.slow
def test_ranks_that_are_killed_leave_no_hang_and_no_half_checkpoint(runs, sharded):
    """One rank, or all of them while a checkpoint is written meanwhile; then the same command."""
    order = {"parallel": SHARDS, "steps": 12, "asynchronous": True}
    chance = np.random.default_rng(7)
    for everyone in (False, True):  # more of each: bench/kills.py
        kill(runs, "killed", chance, within=0.05, everyone=everyone, **order)
    run = runs.whole("killed", **order)
    assert run.losses == sharded.losses
    assert not list((runs.folder / "killed" / "checkpoints").glob(".*"))


def kill(runs, name, chance, *, within, everyone, **order):
    """Begin a run, or go on with it, and kill one rank at a random moment, or all of them while a
    checkpoint is written. Returns the seconds until all had ended, the steps that were logged and
    the newest checkpoint.

    within: seconds after the first step.
    """
    log, folder = runs.folder / name / "log.jsonl", runs.folder / name / "checkpoints"
    before = log.read_text() if log.exists() else ""
    ranks = runs.start(name, **order)
    runs.wait_for(lambda: log.exists() and log.read_text() not in (before, ""))
    time.sleep(chance.uniform(0, within))
    if everyone:
        # glob's own: pathlib's raises where a folder is renamed meanwhile
        stale = set(glob(str(folder / SHARDS_BEING_WRITTEN)))  # of a killed run, or of this one
        runs.wait_for(lambda: set(glob(str(folder / SHARDS_BEING_WRITTEN))) - stale)
        time.sleep(chance.uniform(0, 0.01))
    killed = ranks if everyone else [ranks[chance.integers(len(ranks))]]
    for rank in killed:
        os.kill(rank, signal.SIGKILL)
    began = time.monotonic()
    ended = runs.end()
    seconds = time.monotonic() - began
    assert seconds < GRACE
    assert 0 not in ended, "killed too late to prove anything"
    assert ended.count(-signal.SIGKILL) == len(killed)
    assert all(not find_damage(c) for c in folder.glob("step-*"))
    newest = max((int(c.name.removeprefix("step-")) for c in folder.glob("step-*")), default=0)
    return seconds, len(log.read_text().splitlines()), newest


def test_ranks_that_share_rows_read_all_tokens_of_them_once(tmp_path):
    """Their positions too; rows are as long as one process's, or a few tokens of padding longer."""
    data = str(write_text(tmp_path / "data"))
    request = Request(model=UNEVEN, task=Task(data=data, evaluation=data))
    plain = tiny_recipe(micro_batch=2, accumulation=2, packing=False)
    found = read_data(request, plain.model, tmp_path / "cache")
    alone, _ = build_samplers(request, plain, found)
    shared = replace(plain, accumulation=1, parallel=Parallel(dp_replicate=2, cp=3, tp=2))
    ranks = [build_samplers(request, shared, found, rank)[0] for rank in range(12)]
    assert {r.bounds().tokens for r in ranks} == {-(-alone.bounds().tokens // 6) * 2}
    for step in range(2):
        for share, want in enumerate(alone.sample(step)):
            micros = [m for r in ranks[share * 6 : (share + 1) * 6] for m in r.sample(step)]
            assert sum(m.tokens for m in micros[::2]) == want.tokens
            parts = micros[::2]  # of those that share products, one
            for a, b in zip(parts, micros[1::2], strict=True):
                assert np.array_equal(a.input_ids, b.input_ids)
            places = np.concatenate([m.position_ids[0] for m in parts])
            assert sorted(places) == list(range(len(places)))
            width = want.input_ids.shape[1]
            order = np.argsort(places)
            for name in ("input_ids", "labels"):
                whole = np.concatenate([getattr(m, name) for m in parts], axis=1)[:, order]
                assert np.array_equal(whole[:, :width], getattr(want, name))
                assert whole.shape[1] < width + 6


def test_ranks_read_every_row_of_a_global_batch_once(tmp_path):
    data = str(write_text(tmp_path / "data"))
    request = Request(model=UNEVEN, task=Task(data=data, evaluation=data))
    plain = tiny_recipe(micro_batch=2, accumulation=6)
    found = read_data(request, plain.model, tmp_path / "cache")

    def rows(parallel, accumulation):
        recipe = tiny_recipe(micro_batch=2, accumulation=accumulation, parallel=parallel)
        samplers = [build_samplers(request, recipe, found, rank) for rank in range(parallel.dp)]
        steps = [
            [micro for turn in zip(*(s.sample(step) for s, _ in samplers), strict=True)
             for micro in turn]
            for step in range(3)
        ]  # fmt: skip
        held_out = [m for turn in zip(*(h.all_once() for _, h in samplers), strict=True)
                    for m in turn]  # fmt: skip
        assert len({s.bounds() for s, _ in samplers}) == 1
        return [np.concatenate([m.input_ids for m in step]) for step in steps], held_out

    want, once = rows(Parallel(), 6)
    for parallel, accumulation in ((Parallel(dp_shard=3), 2), (Parallel(dp_replicate=6), 1)):
        got, turns = rows(parallel, accumulation)
        for mine, theirs in zip(got, want, strict=True):
            assert np.array_equal(mine, theirs)
        filled = turns[: len(once)]
        assert all(np.array_equal(a.labels, b.labels) for a, b in zip(filled, once, strict=True))
        assert not any(micro.targets for micro in turns[len(once) :])
