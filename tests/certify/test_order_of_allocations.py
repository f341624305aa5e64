"""What a kernel takes beside its results is on the tape where a recording of an H100 has it.

Where blocks lie decides what a later one can reuse: the workspace of autograd's products, taken
before the first result instead of after it, once hid 6 % of what a run reserved.
"""

import gzip
import json
import tarfile
from pathlib import Path

import pytest
import torch

from memfit.catalog import find_device
from memfit.certify.tracing.fake_device import fake_device
from memfit.certify.tracing.recorder import Recorder
from memfit.certify.tracing.workspace import RULES
from memfit.core.units import MIB
from memfit.meta.workspace import find_grid

H100 = find_device("h100-sxm")
RECORDINGS = Path(__file__).parents[2] / "bench" / "results" / "gpu" / "recordings.tar"
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


@pytest.fixture(scope="module")
def recorded():
    """(bytes asked for where something is allocated; 0 where something is freed), in order."""
    with tarfile.open(RECORDINGS) as archive:
        packed = archive.extractfile("step__lora__recompute_none__native.json.gz").read()
    (entries,) = json.loads(gzip.decompress(packed))["device_traces"]
    wanted = {"alloc", "free_requested"}
    return [e["size"] * (e["action"] == "alloc") for e in entries if e["action"] in wanted]


def record(work):
    """The same of work on fake tensors of an H100."""
    with fake_device(H100), Recorder("cuda", H100) as recorder:
        kept = work()
        tape = recorder.trace(()).tape
    del kept
    return [event.nbytes for event in tape]


def where(sizes, run):
    return [at for at in range(len(sizes)) if sizes[at : at + len(run)] == run]


def test_a_products_workspace_is_taken_once_its_result_is_there(recorded):
    """Of the forward's first product, 2 x 64 x 1024 in fp32, and of autograd's, 2048 x 1024: once
    in the recorded rehearsal and once in the steps after it."""
    made = record(
        lambda: torch.bmm(
            torch.empty(2, 64, 1, device="cuda"), torch.empty(2, 1, 1024, device="cuda")
        )
    )
    *factors, result, workspace, _, _ = made
    assert (len(factors), result, workspace) == (2, 524288, 32 * MIB)
    assert len(where(recorded, [result, workspace])) == 2
    assert len(where(recorded, [4 * MIB, 32 * MIB])) == 2  # of 2048 x 1024 in bf16


def test_flashs_backward_takes_each_piece_once_its_gradients_are_there(recorded):
    """28 blocks, documents of 1 and of 1023 tokens, 16 heads of 128 and 8 of keys."""
    for tokens in (1, 1023):
        query, key = (torch.empty(1, n, tokens, 128, device="meta") for n in (16, 8))
        halves = [x.to(torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2) for x in
                  (query, query, key, key, query)]  # fmt: skip
        rule = RULES["aten._scaled_dot_product_flash_attention_backward.default"]
        pieces = [n for n in rule.pieces(halves, find_grid(H100)) if n]
        assert len(pieces) == 4
        gradients = [x.numel() * 2 for x in (query, key, key)]
        found = where(recorded, gradients + pieces + [0] * 4)
        assert found
        assert len(found) == len(where(recorded, gradients + pieces))
        assert len(found) % 28 == 0


def test_partial_sums_are_taken_once_the_result_is_there():
    made = record(lambda: torch.empty(8192, 64, device="cuda").sum(0))
    assert made == [8192 * 64 * 4, 64 * 4, MIB, 512, 0, 0, 0]


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("turned", [False, True])
def test_a_sum_over_heads_and_tokens_takes_what_an_h100_took(heads, turned):
    """The weight of a norm of heads, in either order of heads and tokens (slice `kernels`)."""
    x = torch.empty(2, heads, 2048, 128, device="meta").transpose(1, 2)
    x = x if turned else x.contiguous()
    rule = RULES["aten.sum.dim_IntList"]
    grid = find_grid(H100)
    assert rule.nbytes([x, [0, 1, 2]], grid) == heads * 4 * MIB + 512
    assert rule.nbytes([x, [3]], grid) == 0
