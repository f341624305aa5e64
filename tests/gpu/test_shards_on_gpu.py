"""Two GPUs whose shards wait on the host, against two that hold them: skipped without two."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from memfit import catalog  # noqa: E402
from memfit.certify import trace  # noqa: E402
from memfit.certify.tracing.trace_step import worst_shapes  # noqa: E402
from memfit.records.recipe import Parallel  # noqa: E402
from memfit.train.measure.counters import synthetic_micro, to_batch  # noqa: E402
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights  # noqa: E402
from memfit.train.step.step import step  # noqa: E402
from tiny_models import make_recipe  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds no two CUDA devices"),
]
RANKS, STEPS = 2, 3
CONFIG = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def recipe(offload):
    return make_recipe(
        config=CONFIG, parallel=Parallel(dp_shard=RANKS), sequence_length=1024, offload=offload,
        precision="bf16-mixed", recompute_blocks=2, accumulation=2,
    )  # fmt: skip


def be_rank(rank, store, folder, device="cuda", backend="cpu:gloo,cuda:nccl"):
    """Losses of some steps, and their peak, with the shards here and there."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=RANKS, init_method=f"file://{store}")
    found = {offload: train(recipe(offload), device) for offload in ("none", "parameters")}
    (Path(folder) / f"{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def train(asked, device):
    model = build_model(asked, device)
    fill_weights(model, replace(asked, seed=1))
    with torch.no_grad():  # whichever generator drew them: the same on both
        for number, weight in enumerate(model.parameters()):
            local = weight.to_local()
            random = torch.Generator().manual_seed(number)
            local.copy_(0.02 * torch.randn(local.shape, generator=random))
    built = Built(asked, model, build_optimizer(asked, model))
    micros = [synthetic_micro(asked, CONFIG["vocab_size"], s) for s in worst_shapes(asked)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses = []
    for _ in range(STEPS):
        batches = (to_batch(micro, built.device) for micro in micros)
        result = step(built, batches, RANKS * sum(micro.targets for micro in micros))
        losses.append(float(result.loss))
    return losses, torch.cuda.max_memory_allocated() if device == "cuda" else 0


def test_two_gpus_whose_shards_wait_on_the_host_learn_the_same_and_hold_what_is_certified(tmp_path):
    processes.spawn(be_rank, (str(tmp_path / "store"), str(tmp_path)), RANKS)
    device = catalog.find_device("h100-sxm")
    for rank in range(RANKS):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found["parameters"][0] == pytest.approx(found["none"][0], rel=1e-3)
        traced = trace(recipe("parameters"), device, rank=rank)
        certified = max(n for phase, n in traced.phases.items() if phase.value != "load")
        assert found["parameters"][1] == pytest.approx(certified, rel=0.02)
