"""Attention kernels by hand: each line is one condition of torch's sdp_utils.cpp, at its edge."""

import pytest

from memfit import api, catalog
from memfit.core.errors import InvalidRequest
from memfit.meta.attending.kernels import Heads, refusal, usable
from memfit.plan.request import problem

BF16, FP16, FP32 = "bfloat16", "float16", "float32"


@pytest.mark.parametrize(
    ("kernel", "dtype", "head", "at", "said"),
    [
        ("flash", BF16, 128, (8, 0), ""),
        ("flash", FP16, 36, (9, 0), ""),  # padded to 40
        ("flash", BF16, 256, (9, 0), ""),
        ("flash", BF16, 257, (9, 0), "up to 256 elements"),
        ("flash", FP32, 128, (9, 0), "computes in 16 bits, not in float32"),
        ("flash", FP16, 128, (7, 5), "compute capability 8.0 to 12.1"),
        ("flash", BF16, 128, (10, 0), ""),
        ("flash", BF16, 128, (12, 1), ""),
        ("flash", BF16, 128, (13, 0), "compute capability 8.0 to 12.1"),
        ("flash", BF16, 192, (8, 6), ""),
        ("flash", BF16, 200, (8, 6), "does not train heads of 200"),
        ("flash", BF16, 224, (12, 0), "does not train heads of 224"),
        ("flash", BF16, 225, (8, 9), ""),  # larger ones are served again, without dropout
        ("flash", BF16, 200, (8, 0), ""),
        ("flash", BF16, 200, (10, 0), ""),
        ("flash", BF16, 200, None, ""),
        ("efficient", FP16, 64, (7, 5), ""),
        ("efficient", BF16, 64, (7, 5), "does not compute in bfloat16"),
        ("efficient", FP32, 33, (7, 5), ""),
        ("efficient", FP16, 36, (7, 0), "a multiple of 8 elements"),
        ("efficient", FP16, 33, (6, 1), ""),
        ("efficient", FP32, 36, (8, 0), ""),
        ("efficient", FP32, 34, (8, 0), "a multiple of 4 elements"),
        ("efficient", BF16, 36, (8, 0), "a multiple of 8 elements"),
        ("efficient", BF16, 512, (12, 0), ""),
        ("efficient", "float64", 64, (8, 0), "does not compute in float64"),
        ("efficient", FP16, 64, (3, 7), "compute capability 5.0 to 12.1"),
        ("cudnn", BF16, 128, (9, 0), ""),
        ("cudnn", FP16, 64, (8, 0), ""),
        ("cudnn", FP16, 64, (7, 5), "compute capability 8.0 to 12.1"),
        ("cudnn", FP32, 64, (9, 0), "computes in 16 bits"),
        ("cudnn", BF16, 136, (9, 0), "up to 128 elements"),
        ("cudnn", BF16, 60, (9, 0), "a multiple of 8 up to 128"),
        ("varlen", BF16, 256, (9, 0), ""),
        ("varlen", FP16, 128, (8, 0), ""),
        ("varlen", FP16, 64, (7, 5), "compute capability 8.0 to 12.1"),
        ("varlen", FP32, 64, (9, 0), "computes in 16 bits"),
        ("varlen", BF16, 60, (9, 0), "a multiple of 8 elements"),
        ("varlen", BF16, 264, (9, 0), "up to 256 elements"),
        ("math", "float64", 7, (3, 0), ""),
    ],
)
def test_each_condition_holds_at_its_edge(kernel, dtype, head, at, said):
    found = refusal(kernel, dtype, Heads(head), capability=at)
    assert said in found if said else not found


def test_other_platforms_lack_kernels():
    assert not refusal("flash", FP32, Heads(33), platform="cpu")
    assert "exists on CUDA only" in refusal("efficient", FP32, Heads(64), platform="cpu")
    assert "exists on CUDA only" in refusal("cudnn", BF16, Heads(64), platform="cpu")
    assert "exists on CUDA only" in refusal("varlen", BF16, Heads(64), platform="cpu")
    for kernel in ("cudnn", "varlen"):
        assert "NVIDIA" in refusal(kernel, BF16, Heads(64), platform="rocm")
    assert not refusal("flash", BF16, Heads(64), platform="rocm")


def test_kernels_that_serve_come_in_torchs_order():
    late = ("flash", "efficient", "math")
    for at in ((8, 0), (8, 9), (12, 0), None):
        assert usable(BF16, Heads(64), platform="cuda", capability=at) == late
    for at in ((9, 0), (10, 0), (10, 3)):
        assert usable(BF16, Heads(64), platform="cuda", capability=at) == ("cudnn", *late)
    for heads in (Heads(192), Heads(96, 64), Heads(64, windowed=True)):
        assert "cudnn" not in usable(BF16, heads, platform="cuda", capability=(9, 0))
    assert usable(FP32, Heads(64), platform="cuda", capability=(9, 0)) == ("efficient", "math")
    assert usable(FP16, Heads(64), platform="cuda", capability=(7, 5)) == ("efficient", "math")
    assert usable(BF16, Heads(64), platform="cuda", capability=(7, 5)) == ("math",)
    assert usable(FP32, Heads(64), platform="cpu", capability=None) == ("flash", "math")


def plan(device, **knobs):
    return api.plan(api.read("gpt2", hardware={"device": device}, **knobs), levers=False).recipe


def test_a_plan_takes_the_first_kernel_that_serves():
    t4, h100 = (catalog.find_device(d).id for d in ("t4", "h100-sxm"))
    fixed = {"task": {"sequence_length": 512}, "method": "full"}
    assert plan(h100, **fixed).attention == "flash", "documents of packed rows differ in length"
    assert plan(t4, precision="fp16-mixed", **fixed).attention == "efficient"
    assert plan(t4, **fixed).precision == "fp32", "first where there is no bf16"
    assert plan(h100, attention="cudnn", **fixed).attention == "cudnn"
    for device, attention, precision in (
        (t4, "flash", "fp16-mixed"), (t4, "cudnn", "fp16-mixed"), (h100, "cudnn", "fp32"),
        (h100, "flash", "fp32"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=f"`attention: {attention}`") as caught:
            plan(device, attention=attention, precision=precision, **fixed)
        assert "efficient" in caught.value.hint


UNPACKED = {"task": {"sequence_length": 512, "packing": False}, "method": "full"}


def test_a_plan_takes_cudnns_kernel_where_torch_does(monkeypatch):
    assert plan("h100-sxm", **UNPACKED).attention == "cudnn"
    assert plan("b200-sxm", **UNPACKED).attention == "cudnn"
    assert plan("a100-sxm-80gb", **UNPACKED).attention == "flash"
    assert plan("h100-sxm", framework="hf-trainer", **UNPACKED).attention == "flash"
    assert plan("h100-sxm", precision="fp32", **UNPACKED).attention == "efficient"
    monkeypatch.setattr(problem, "read_cudnn", lambda: (9, 10, 2))
    assert plan("h100-sxm", **UNPACKED).attention == "flash", "rows of 100 tokens need 9.15.1"


def test_a_device_without_bf16_falls_back_to_fp16_where_fp32_does_not_fit():
    tight = {"task": {"sequence_length": 1024, "global_batch": 8}, "method": "full",
             "recompute": "none", "loss": "plain", "micro_batch": 8, "lean": "none",
             "offload": "none"}  # fmt: skip
    assert plan("t4", **tight).precision == "fp16-mixed"
    assert plan("t4", **tight).base_format == "fp32", "nothing is frozen"


def test_another_attention_is_refused_with_those_there_are():
    with pytest.raises(InvalidRequest, match="invalid enum value 'flex'") as caught:
        plan("h100-sxm", attention="flex")
    assert "cudnn" in caught.value.hint


@pytest.mark.parametrize(
    ("kernel", "heads", "said"),
    [
        ("flash", Heads(192, 128), ""),  # values are widened
        ("efficient", Heads(192, 128), ""),
        ("efficient", Heads(192, 100), "a multiple of 8 elements, and the model's have 100"),
        ("cudnn", Heads(96, 64), "values as wide as keys"),
        ("cudnn", Heads(96, 96), ""),
        ("math", Heads(192, 100), ""),
        ("flash", Heads(64, sinks=True), "attention sinks"),
        ("efficient", Heads(64, sinks=True), "attention sinks"),
        ("math", Heads(64, sinks=True), ""),
    ],
)
def test_what_a_model_asks_beyond_the_size_of_its_heads(kernel, heads, said):
    found = refusal(kernel, BF16, heads, capability=(9, 0))
    assert said in found if said else not found
