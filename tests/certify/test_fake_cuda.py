"""A CUDA step on a machine without one: closed forms, kernels, and nothing left behind."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
import torch.utils._foreach_utils as foreach_utils
from tiny_steps import (
    A100,
    ANY_KERNEL,
    CONFIGS,
    CPU,
    FAMILIES,
    H100,
    RECURRENT,
    make_device,
    make_recipe,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM

from memfit.allocator.caching import replay
from memfit.allocator.settings import Settings
from memfit.catalog import find_device
from memfit.certify import trace
from memfit.certify.tracing.cuda_kernels import attention_backend
from memfit.certify.tracing.fake_device import device_type, fake_device
from memfit.certify.tracing.trace_step import trace_step
from memfit.certify.tracing.workspace import RULES
from memfit.core.errors import InvalidRequest, NotCertified
from memfit.core.units import KIB, MIB
from memfit.families import find_family, read_model
from memfit.meta.workspace import LARGEST, Grid, find_grid, product_workspace
from memfit.records.ledger import Kind, Phase

BF16 = {"precision": "bf16", "base_format": "bf16"}
TOKENS = 96  # two rows of 48


def count_parameters(family: str) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[family]))
    return sum(p.numel() for p in model.parameters())


def by_kind(traced, phase: Phase) -> dict[Kind, int]:
    return traced.ledger.by_kind(phase)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_gradients_and_adamw_take_their_bytes(family: str) -> None:
    other = {"attention": "efficient"} if family in ANY_KERNEL else {}
    traced = trace(make_recipe(family, **other), H100)
    kinds = by_kind(traced, Phase.OPTIMIZER_STEP)
    n = count_parameters(family)
    recipe = make_recipe(family)
    architecture = read_model(recipe.model).architecture
    buffers = sum(spec.nbytes for spec in find_family(family).buffers(architecture))
    assert kinds[Kind.PARAMETERS] - buffers == 4 * n
    assert kinds[Kind.GRADIENTS] == 4 * n
    steps = kinds[Kind.OPTIMIZER_STATE] - 8 * n  # one fp32 step count a tensor, on the device
    assert 0 < steps == 4 * count_tensors(family)


def count_tensors(family: str) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[family]))
    return len(list(model.parameters()))


@pytest.mark.parametrize(("kv_heads", "micro_batch"), [(4, 1), (2, 2), (1, 3)])
def test_a_llama_block_saves_what_the_closed_form_says(kv_heads: int, micro_batch: int) -> None:
    """20 Nh + 4 N kv + 8 Nf + 4 N heads + 8 N + 24 bytes, bf16 and flash (Korthikanti et al.'s
    table has 34 sbh for GPT). 24: the random state that flash keeps, seed and offset.
    """

    def saved(layers: int) -> int:
        config = {
            **CONFIGS["llama"], "num_hidden_layers": layers, "num_key_value_heads": kv_heads,
        }  # fmt: skip
        recipe = make_recipe(config=config, micro_batch=micro_batch, **BF16)
        return by_kind(trace(recipe, H100), Phase.LOSS)[Kind.ACTIVATIONS]

    n, h, heads, f, kv = 48 * micro_batch, 64, 4, 176, kv_heads * 16
    assert saved(4) - saved(3) == 20 * n * h + 4 * n * kv + 8 * n * f + 4 * n * heads + 8 * n + 24


def test_recomputed_blocks_keep_their_input_alone() -> None:
    def saved(layers: int) -> int:
        config = {**CONFIGS["llama"], "num_hidden_layers": layers}
        recipe = make_recipe(config=config, recompute_blocks=layers, **BF16)
        return by_kind(trace(recipe, H100), Phase.LOSS)[Kind.ACTIVATIONS]

    assert saved(4) - saved(3) == 2 * TOKENS * 64


def test_plain_loss_holds_8_and_12_bytes_of_logits_a_token_and_word() -> None:
    traced = trace(make_recipe(**BF16), H100)
    logits = TOKENS * 250
    assert by_kind(traced, Phase.LOSS)[Kind.LOGITS] == 8 * logits  # fp32 and its log-softmax
    assert by_kind(traced, Phase.BACKWARD)[Kind.LOGITS] == 12 * logits  # and two gradients


def test_foreach_adamw_holds_one_more_copy_of_a_state() -> None:
    def peak(implementation: str) -> int:
        recipe = make_recipe(attention="efficient", implementation=implementation, clip_norm=0.0)
        return trace(recipe, H100).phases[Phase.OPTIMIZER_STEP]

    on_device = 4 * count_tensors("llama")  # fused keeps its step counts on the device
    assert peak("foreach") - (peak("fused") - on_device) == 4 * count_parameters("llama")


def test_math_attention_keeps_the_square_of_the_sequence_and_flash_does_not() -> None:
    def activations(attention: str, length: int) -> int:
        recipe = make_recipe(attention=attention, sequence_length=length, micro_batch=1, **BF16)
        return by_kind(trace(recipe, H100), Phase.LOSS)[Kind.ACTIVATIONS]

    assert activations("flash", 128) <= 2 * activations("flash", 64)
    assert activations("math", 128) > 2.2 * activations("math", 64)


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize("family", ANY_KERNEL)
def test_every_family_runs_on_fake_cuda_with_the_flash_kernel(family: str, precision: str) -> None:
    recipe = make_recipe(
        family, precision=precision, base_format="bf16" if precision == "bf16" else "fp32",
        recompute_blocks=1, accumulation=2, packing=family not in RECURRENT,
    )  # fmt: skip
    traced = trace(recipe, H100)
    assert traced.peak == max(traced.phases.values()) == traced.ledger.peak
    assert not any("bmm" in t.op or "softmax.default" in t.op for t in traced.at_peak
                   if "attn" in t.module and "linear_attn" not in t.module)  # fmt: skip


def heads(dtype: torch.dtype, n: int = 4, kv: int = 4, dim: int = 64) -> list[torch.Tensor]:
    query = torch.empty(2, n, 32, dim, dtype=dtype)
    key = torch.empty(2, kv, 32, dim, dtype=dtype)
    return [query, key, key]


FLASH, EFFICIENT, MATH, CUDNN = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)  # fmt: skip


def one_key() -> list[torch.Tensor]:
    return [x[:, :, :1] for x in heads(torch.bfloat16)]


def longer_keys() -> list[torch.Tensor]:
    query, key, _ = heads(torch.bfloat16)
    return [query[:, :, :8], key, key]


def transposed() -> list[torch.Tensor]:
    return [x.transpose(2, 3) for x in heads(torch.bfloat16)]


@pytest.mark.parametrize(
    ("inputs", "options", "enabled", "chosen"),
    [
        (heads(torch.bfloat16), {}, None, FLASH),
        (heads(torch.float32), {}, None, EFFICIENT),
        (heads(torch.bfloat16), {"masked": True}, None, EFFICIENT),
        (heads(torch.bfloat16), {"capability": (7, 5)}, None, MATH),
        (heads(torch.float16), {"capability": (7, 5)}, None, EFFICIENT),
        (heads(torch.float16, dim=36), {"capability": (7, 5)}, None, MATH),
        (heads(torch.float32, dim=33), {"capability": (7, 5)}, None, EFFICIENT),
        (heads(torch.bfloat16, dim=200), {"capability": (8, 6)}, None, EFFICIENT),
        (heads(torch.bfloat16, dim=200), {"capability": (12, 0)}, None, EFFICIENT),
        (heads(torch.bfloat16, dim=200), {"capability": (10, 0)}, None, FLASH),
        (longer_keys(), {"causal": True}, None, EFFICIENT),
        (longer_keys(), {}, None, FLASH),
        (transposed(), {}, None, MATH),
        (heads(torch.bfloat16), {}, CUDNN, CUDNN),
        (heads(torch.bfloat16, kv=2), {"grouped": True}, CUDNN, CUDNN),
        (heads(torch.bfloat16), {"capability": (7, 5)}, CUDNN, None),
        (heads(torch.bfloat16, dim=136), {}, CUDNN, None),
        (one_key(), {}, CUDNN, None),
        (heads(torch.bfloat16, dim=264), {}, None, EFFICIENT),
        (heads(torch.bfloat16, dim=36), {}, None, FLASH),
        (heads(torch.float32, dim=36), {}, None, EFFICIENT),
        (heads(torch.float32, dim=34), {}, None, MATH),
        (heads(torch.bfloat16, kv=2), {"grouped": True}, None, FLASH),
        (heads(torch.float32, kv=2), {"grouped": True}, None, MATH),
        (heads(torch.float64), {}, None, MATH),
        (heads(torch.bfloat16), {}, MATH, MATH),
        (heads(torch.bfloat16), {}, EFFICIENT, EFFICIENT),
        (heads(torch.float32), {}, FLASH, None),
    ],
)
def test_attention_runs_on_the_kernel_that_torch_would_choose(
    inputs, options, enabled, chosen
) -> None:
    facts = {"masked": False, "grouped": False, "capability": (9, 0), **options}
    with sdpa_kernel(enabled or [FLASH, EFFICIENT, MATH]):
        assert attention_backend(*inputs, **facts) is chosen


def test_a_device_leaves_torch_as_it_was() -> None:
    def state() -> tuple:
        return (
            list(torch_optimizer._foreach_supported_types),
            list(foreach_utils._foreach_supported_types),
            torch.accelerator.current_accelerator(), torch.cuda.is_bf16_supported,
            torch.autograd.is_multithreading_enabled(),
            torch._subclasses.fake_tensor.FakeTensorMode.__dict__["avoid_device_init"],
        )  # fmt: skip

    before = state()
    with fake_device(H100):
        assert torch.empty(2, device="cuda").device.type == "cuda"
        assert state() != before
    assert state() == before
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
    assert torch.isfinite(x.grad).all()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(2, device="cuda")


def test_a_device_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(NotCertified, match="tpu-v5e"):
        device_type(make_device("Google", "tpu-v5e", None))
    assert device_type(make_device("AMD", "mi300x", None)) == "cuda"


def test_workspaces_are_counted_apart_and_can_be_left_out() -> None:
    recipe = make_recipe(**BF16)
    full, bare = trace(recipe, H100), trace_step(recipe, H100, workspaces=False)
    kinds = by_kind(full, Phase.BACKWARD)
    assert kinds.pop(Kind.WORKSPACE) >= 2 * 32 * MIB  # cuBLAS: the forward's thread and autograd's
    assert kinds == by_kind(bare, Phase.BACKWARD)
    assert Kind.WORKSPACE not in by_kind(trace(make_recipe(), CPU), Phase.BACKWARD)


def test_workspace_rules_count_what_the_sources_allocate() -> None:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def nbytes(operator: str, *args: object) -> int:
        return RULES[f"aten.{operator}.default"].nbytes(args, None)

    flash = "_scaled_dot_product_flash_attention_backward"
    by_token = tensor(2, 100, 8, 80).transpose(1, 2)
    query, key = tensor(2, 8, 100, 80), tensor(2, 2, 100, 80)
    rows = 2 * 8 * 128
    inside = rows * 4 + rows * 96 * 4
    assert nbytes(flash, by_token, query, query, query, by_token) == inside
    copied = 2 * 8 * 100 * 80 * 2
    assert nbytes(flash, query, query, query, query, by_token) == inside + copied
    assert nbytes(flash, query, query, query, query, query) == inside + 2 * copied
    expanded = 2 * (2 * 8 * 100 * 80) * 2
    assert nbytes(flash, by_token, query, key, key, by_token) == inside + expanded
    embedding = "embedding_dense_backward"
    assert nbytes(embedding, tensor(3072, 64), tensor(3072, dtype=torch.int64), 1000) == 0
    found = nbytes(embedding, tensor(3073, 64), tensor(3073, dtype=torch.int64), 1000)
    sums = 307 + 1000  # one for every 10 of 3073 indices, one for each of 1000 rows
    assert found == sums * 64 * 4 + (3 * 3073 + 2 * 1000 + sums) * 8 + 2 * 512
    efficient = "_scaled_dot_product_efficient_attention_backward"
    tile = 128 * 128 * 4 + 16  # one for 100 tokens and 80 elements
    assert nbytes(efficient, query, query, query, query) == 2 * 8 * (100 * 4 + tile)
    small = tensor(2, 8, 100, 32)
    assert nbytes(efficient, small, small, small, small) == 2 * 8 * (100 * 4 + 128 * 64 * 4 + 16)
    large = tensor(2, 8, 100, 200)  # four tiles; dk and dv of two parts of 64 keys, 256 elements
    assert nbytes(efficient, large, large, large, large) == 2 * 8 * (
        400 + 4 * (128 * 64 * 4 + 16) + 2 * 64 * 2 * 256 * 4
    )
    wide = query.float()
    tiles = 2 * 2 * (64 * 64 * 4 + 16)
    assert nbytes(efficient, wide, wide, wide, wide) == 2 * 8 * (100 * 4 + tiles)
    assert nbytes(flash, *[tensor(1, 1, 128, 160)] * 5) == 128 * 4 * (1 + 192)
    norm = RULES["aten._foreach_norm.Scalar"]
    assert norm.nbytes([[tensor(65537), tensor(5)]], None) == 2 * 2 * 4
    layer_norm, weight = "native_layer_norm_backward", tensor(768)

    def of_rows(rows: int, wanted: tuple[bool, ...], columns: int = 768) -> int:
        x = tensor(rows, columns)
        return nbytes(layer_norm, x, x, [columns], x, x, weight, weight, wanted)

    assert of_rows(65536, (True, True, True)) == 0
    assert of_rows(65537, (True, True, True)) == 2 * (32768 // 24) * 768 * 2
    assert of_rows(65537, (True, True, False)) == (32768 // 24) * 768 * 2
    assert of_rows(65537, (True, True, True), 4096) == 0


def test_a_sum_over_all_rows_takes_partial_results_and_no_other_sum_does() -> None:
    grid = Grid(multiprocessors=108, threads=2048)
    rule = RULES["aten.sum.dim_IntList"]
    x = torch.empty(4, 512, 1024, device="meta")
    assert rule.nbytes([x, [0, 1], True], grid) == 16 * MIB + 512  # 2048 rows, as on a real A100
    assert rule.nbytes([x, [-3, -2], True], grid) == 16 * MIB + 512
    assert rule.nbytes([x, [0, 1], True], None) == 0
    assert rule.nbytes([x, [2], True], grid) == 0
    assert rule.nbytes([x, [0], True], grid) == 0
    turned = x.transpose(0, 1)  # torch sorts dimensions by strides: an H100 took as much for heads
    assert rule.nbytes([turned, [0, 1], True], grid) == 16 * MIB + 512
    assert rule.nbytes([x[:, ::2], [0, 1], True], grid) == 0


def test_the_grid_is_the_devices_the_largest_where_unknown_and_none_off_cuda() -> None:
    assert find_grid(find_device("a100-sxm-80")) == Grid(multiprocessors=108, threads=2048)
    assert find_grid(find_device("rtx-4090")) == Grid(multiprocessors=128, threads=1536)
    assert find_grid(find_device("gb300")) == LARGEST
    assert find_grid(find_device("mi300x")) is None
    assert find_grid(find_device("cpu-x86")) is None


def test_products_keep_a_workspace_of_the_devices_size() -> None:
    def of(vendor: str, capability: str | None) -> int:
        return product_workspace(make_device(vendor, "a device", capability))

    assert of("NVIDIA", "8.0") == of("NVIDIA", "7.5") == of("NVIDIA", "8.9") == 8 * MIB + 128 * KIB
    assert of("NVIDIA", "9.0") == of("NVIDIA", "10.0") == of("NVIDIA", "12.0") == 32 * MIB
    assert of("NVIDIA", None) == 32 * MIB, "the larger one when nobody knows"
    assert of("AMD", "gfx942") == of("AMD", "gfx950") == 128 * MIB
    assert of("AMD", "gfx90a") == 32 * MIB


def test_the_tape_is_balanced_and_gives_the_traced_peak_back() -> None:
    traced = trace(make_recipe(**BF16, accumulation=2), A100)
    alive: dict[int, int] = {}
    peaks = []
    edges = [0, *traced.marks, len(traced.tape)]
    for start, stop in pairwise(edges):
        top = sum(alive.values())
        for event in traced.tape[start:stop]:
            if event.nbytes:
                assert event.tensor not in alive
                alive[event.tensor] = event.nbytes
            else:
                del alive[event.tensor]
            top = max(top, sum(alive.values()))
        peaks.append(top)
    assert dict(zip(traced.stretches, peaks, strict=True)) == dict(traced.phases)
    replayed = replay(traced.tape, Settings(), traced.marks)
    assert [p.requested for p in replayed.stretches] == peaks
    assert replayed.peaks.reserved >= replayed.peaks.allocated >= traced.peak


def test_an_evaluation_needs_less_than_a_step() -> None:
    traced = trace(make_recipe(**BF16), H100)
    assert traced.phases[Phase.EVALUATE] < traced.phases[Phase.LOSS]


def test_a_step_that_cannot_run_is_not_certified() -> None:
    broken = SimpleNamespace(rows=2, tokens=48, documents=((30, 10), (48,)))  # 40 of 48 tokens
    with pytest.raises(NotCertified, match="failed on fake tensors"):
        trace(make_recipe(packing=True), CPU, (broken,))


def test_cudnns_kernel_is_the_one_traced_and_its_workspace_is_said_to_be_assumed() -> None:
    traced, flash = (
        trace(make_recipe(attention=kernel, **BF16), H100) for kernel in ("cudnn", "flash")
    )
    assert any("cuDNN decides" in bound for bound in traced.bounds)
    assert not any("cuDNN decides" in bound for bound in flash.bounds)
    saved, other = (by_kind(t, Phase.LOSS)[Kind.ACTIVATIONS] for t in (traced, flash))
    assert other - saved == 3 * 8  # blocks; flash keeps a seed of two words, cuDNN of one


def test_a_kernel_that_the_device_lacks_is_refused_before_the_trace() -> None:
    turing = make_device("NVIDIA", "t4", "7.5")
    with pytest.raises(InvalidRequest, match=r"needs compute capability 8\.0") as caught:
        trace(make_recipe(precision="fp16-mixed"), turing)
    assert "efficient" in caught.value.hint
    assert trace(make_recipe(precision="fp16-mixed", attention="efficient"), turing).peak
