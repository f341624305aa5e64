"""Two GPUs that share the tokens of rows, against one: skipped where there are no two."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as processes  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from memfit import catalog  # noqa: E402
from memfit.certify import trace  # noqa: E402
from memfit.certify.tracing.trace_step import worst_shapes  # noqa: E402
from memfit.parallelism.context import own_parts  # noqa: E402
from memfit.records.recipe import Parallel  # noqa: E402
from memfit.train.distributed.ring import attend_in_ring  # noqa: E402
from memfit.train.measure.counters import synthetic_micro, to_batch  # noqa: E402
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights  # noqa: E402
from memfit.train.step.step import step  # noqa: E402
from tiny_models import make_recipe  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds no two CUDA devices"),
]
RANKS, TOKENS = 2, 1024
CLOSE = {"rtol": 0, "atol": 2e-2}  # of the largest element, in bf16
CONFIG = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def recipe():
    return make_recipe(
        config=CONFIG, parallel=Parallel(cp=RANKS), sequence_length=TOKENS, precision="bf16-mixed",
        recompute_blocks=2,
    )  # fmt: skip


def be_rank(rank, store, folder, device="cuda", backend="nccl"):
    """Attention of this rank's tokens against that of whole rows, and the peak of two steps."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=RANKS, init_method=f"file://{store}")
    compare(rank, device)
    peak = train(device)
    (Path(folder) / f"{rank}").write_text(str(peak))
    dist.destroy_process_group()


def compare(rank, device):
    group = init_device_mesh(device, (RANKS,)).get_group()
    torch.manual_seed(0)
    shapes = [(2, heads, TOKENS, 64) for heads in (16, 4, 4)]
    whole = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    weight = torch.randn(shapes[0], device=device).bfloat16()
    columns = [n for part in own_parts(TOKENS, Parallel(cp=RANKS), rank) for n in part]
    mine = [x.detach()[:, :, columns].requires_grad_() for x in whole]
    out = torch.nn.functional.scaled_dot_product_attention(
        *whole, is_causal=True, scale=0.1, enable_gqa=True
    )
    (out * weight).sum().backward()
    ring = attend_in_ring(*mine, group, 0.1)
    (ring * weight[:, :, columns]).sum().backward()
    for got, want in zip([ring, *(x.grad for x in mine)], [out, *(x.grad for x in whole)]):  # noqa: B905
        largest = want.abs().max()
        torch.testing.assert_close(got / largest, want[:, :, columns] / largest, **CLOSE)


def train(device):
    asked = recipe()
    model = build_model(asked, device)
    fill_weights(model, asked)
    built = Built(asked, model, build_optimizer(asked, model))
    micros = [synthetic_micro(asked, CONFIG["vocab_size"], s) for s in worst_shapes(asked)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        batches = (to_batch(micro, built.device) for micro in micros)
        result = step(built, batches, RANKS * micros[0].targets)
        assert torch.isfinite(result.loss)
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def test_two_gpus_that_share_rows_attend_as_one_and_hold_what_is_certified(tmp_path):
    processes.spawn(be_rank, (str(tmp_path / "store"), str(tmp_path)), RANKS)
    device = catalog.find_device("h100-sxm")
    for rank in range(RANKS):
        traced = trace(recipe(), device, rank=rank)
        certified = max(n for phase, n in traced.phases.items() if phase.value != "load")
        assert int((tmp_path / str(rank)).read_text()) == pytest.approx(certified, rel=0.02)
