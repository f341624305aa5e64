"""What a run on a CPU takes as a process: the whole command, watched from outside."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.core.units import MIB, parse_bytes
from memfit.families import read_model
from memfit.files.run_folder import read_plan
from memfit.records import read_json
from memfit.records.results import Certificate, Run
from memfit.train.measure.counters import Meter, synthetic_micro
from memfit.train.measure.resident import read_anonymous

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from container import run_within

ATTEMPTS = 3  # of a run whose peak the watcher may miss
LINUX = pytest.mark.skipif(read_anonymous() is None, reason="the system does not count them")
MODEL = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def write_request(folder: Path, memory: str, allocator: str = "") -> Path:
    (folder / "data.txt").write_text("a few words of text that a tokenizer can learn from\n" * 4000)
    request = {
        "model": MODEL, "weights": "random", "precision": "fp32", "limits": {"memory": memory},
        "hardware": {"device": "cpu"}, "method": "full", "micro_batch": 16, "recompute": "none",
        "loss": "plain", "optimizer": {"name": "adamw"}, "allocator": allocator,
        "task": {
            "data": str(folder / "data.txt"), "sequence_length": 256, "global_batch": 16,
            "steps": 2,
        },
    }  # fmt: skip
    path = folder / "request.yaml"
    path.write_text(json.dumps(request))
    return path


FREED = """
import torch
from memfit.train.measure.resident import Resident, give_back_freed, read_anonymous
assert give_back_freed()
with Resident() as seen:
    before = read_anonymous()
    tensors = [torch.ones(2**20) for _ in range(16)]  # 4 MiB each
    while_alive = seen.note()
    kept = tensors[1::2]
    del tensors
    after = read_anonymous()
print(before, while_alive, after, seen.peak)
"""


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_a_run_lives_within_its_limit_and_holds_what_was_predicted(
    tmp_path, monkeypatch, kept
) -> None:
    """All processes of `memfit train` together; where control groups can be made, in one.

    The watcher looks every few milliseconds, and later on a busy machine, so that it may miss an
    instant at which the run counted its own peak: then the run is made once more.
    """
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    request = write_request(tmp_path, "1 GiB", f"keep_freed:{kept}")
    for attempt in range(ATTEMPTS):
        folder = tmp_path / f"run-{attempt}"
        command = [sys.executable, "-m", "memfit", "train", str(request), "--folder", str(folder)]
        held = run_within(command, parse_bytes("1 GiB"))
        assert held.code == 0, held.stderr
        assert not held.kills
        plan, proof = read_plan(folder / "plan.json"), folder / "certificate.json"
        for memory in (plan.memory, read_json(proof, Certificate).memory):
            assert memory.verdict == "fits"
            assert memory.total_low <= held.anonymous <= memory.total_high
            assert held.anonymous == pytest.approx(memory.device_total, rel=0.15)
        own = read_json(folder / "run.json", Run).measurements["memory.device_total"].value
        if own <= held.anonymous + MIB:
            break
    assert 0.9 * held.anonymous < own <= held.anonymous + MIB
    alive = plan.memory.peak_allocated
    (process,) = [e for e in plan.memory.entries if e.owner == "process"]
    assert process.nbytes == plan.memory.device_total - alive
    assert process.nbytes > 2 * alive / 3  # or the test would say nothing of the process


@LINUX
def test_a_limit_that_imports_alone_exceed_is_refused_before_anything_runs(tmp_path) -> None:
    request = write_request(tmp_path, "150 MiB")
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "plan", str(request), "--why"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3
    assert "imported libraries" in " ".join(done.stdout.split())


@LINUX
def test_what_is_freed_goes_back_to_the_system() -> None:
    """By default glibc raises its threshold to the first large tensor that is freed.

    In a process of its own: the heap of one that ran other tests has room for tensors.
    """
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, while_alive, after, peak = map(int, done.stdout.split())
    assert while_alive - before >= 60 * MIB
    assert after - before < 36 * MIB  # every second one is alive
    assert while_alive <= peak < while_alive + MIB  # of the interpreter a few pages more


def test_a_rehearsal_leaves_the_weights_alone_behind(tiny_recipe) -> None:
    """The optimizer is a cycle with its hooks: its states stayed until Python collected them."""
    gc.collect()
    gc.disable()
    before = {id(o) for o in gc.get_objects() if isinstance(o, torch.Tensor)}
    try:
        meter = Meter(torch.device("cpu"))
        vocab = read_model(tiny_recipe.model).architecture.vocab
        model = meter.rehearse(tiny_recipe, [synthetic_micro(tiny_recipe, vocab)])
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    finally:
        gc.enable()
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    left = [
        t.shape for t in tensors
        if id(t) not in before and t.numel() > 1000 and t.untyped_storage().data_ptr() not in own
    ]  # fmt: skip
    assert left == []
