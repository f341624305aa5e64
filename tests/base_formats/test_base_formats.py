"""Every declared base format against its library's own class, and against what its code holds.

The tests go through the registry: a format that is added is tested without an edit here, where its
library is one of `ORACLES`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.base_formats import (
    base_formats,
    find_base_format,
    find_coding,
    list_base_formats,
    name_coding,
    offered_formats,
    stored_bytes,
    stored_tensors,
)
from memfit.core.errors import Error, InvalidRequest, UnknownName
from memfit.core.libraries import quiet_import
from memfit.records.model import DTYPE_BYTES, TensorSpec, Weight
from memfit.records.recipe import Quantisation
from memfit.records.request import Request
from memfit.train.model.quantised import QuantisedLinear
from tiny_models import make_recipe

with quiet_import():
    import bitsandbytes as bnb

OWN = [f.name for f in list_base_formats() if f.own]
CODINGS = [
    name_coding(f.name, double=double)
    for f in list_base_formats()
    if f.own and f.quantised
    for double in ((False, True) if f.doubles else (False,))
]
SHAPES = [(96, 192), (64, 64), (32, 320)]


def layer_of(coding: str, dense: torch.Tensor) -> QuantisedLinear:
    """A projection that holds `dense` (out, in) in a coding."""
    declared, doubled = find_coding(coding)
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dense.dtype]
    recipe = make_recipe(
        "llama", method="lora", base_format=declared.name, precision=precision,
        quantisation=Quantisation(double=doubled),
    )  # fmt: skip
    old = nn.Linear(dense.shape[1], dense.shape[0], bias=False, dtype=dense.dtype)
    made = QuantisedLinear(old, recipe)
    for name, parameter in made.stored().items():
        made._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"), False)
    made.store(dense)
    return made


def dense_of(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(shape, dtype=torch.float32).mul_(0.02).to(dtype)


# -- the library's own class ---------------------------------------------------------------------


def by_bitsandbytes(coding: str, dense: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Bytes and values of `Params4bit`'s tensors, or of `Int8Params`'."""
    declared, doubled = find_coding(coding)
    if declared.bits == 8:
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(dense.to(torch.float16))
        values = codes.to(dense.dtype) * (scales / 127).unsqueeze(1)
        return codes.nbytes + scales.nbytes, values.to(dense.dtype)
    codes, state = bnb.functional.quantize_4bit(
        dense.reshape(1, -1), blocksize=64, compress_statistics=doubled, quant_type=declared.name
    )
    held = [codes, state.absmax]
    held += [state.state2.absmax, state.state2.code, state.offset] if doubled else []
    return sum(t.nbytes for t in held), bnb.functional.dequantize_4bit(codes, state).view_as(dense)


def by_torchao(coding: str, dense: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Bytes and values of torchao's microscaling tensor (OCP MX 1.0): blocks of 32 in a row."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    element = {4: torch.float4_e2m1fn_x2, 8: torch.float8_e4m3fn}[find_coding(coding)[0].bits]
    made = MXTensor.to_mx(dense, element, 32)
    return made.qdata.nbytes + made.scale.nbytes, made.dequantize(dense.dtype)


ORACLES = {"bitsandbytes": by_bitsandbytes, "torchao": by_torchao}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coding", CODINGS)
def test_bytes_and_values_are_those_of_the_librarys_own_class(coding, shape):
    dense = dense_of(shape)
    nbytes, values = ORACLES[find_coding(coding)[0].library](coding, dense)
    made = layer_of(coding, dense)
    assert stored_bytes(coding, shape) == nbytes
    assert sum(p.nbytes for p in made.parameters()) == nbytes
    torch.testing.assert_close(made.dense(), values, rtol=2**-7, atol=0)  # rounded once to bf16


@pytest.mark.parametrize("coding", CODINGS)
def test_codes_take_the_bits_that_are_declared(coding):
    declared, _ = find_coding(coding)
    codes, *rest = stored_tensors(coding, (256, 512))
    assert codes.leaf == "weight"
    assert prod(codes.shape) * DTYPE_BYTES[codes.dtype] * 8 == declared.bits * 256 * 512
    assert rest, "codes without a scale"
    assert all(DTYPE_BYTES[t.dtype] == 1 for t in (codes, *rest)), "FSDP2 would cast it"


@pytest.mark.parametrize("coding", CODINGS)
def test_what_is_coded_comes_back_within_one_step_of_its_codes(coding):
    """Coarser by half at most than values that lie evenly: 2 ** bits of them up to the largest."""
    declared, _ = find_coding(coding)
    dense = dense_of((64, 128), torch.float32)
    found = layer_of(coding, dense).dense()
    assert (found - dense).abs().max() <= dense.abs().max() * 2.0 ** (1 - declared.bits) * 1.5
    assert found.unique().numel() > 2 ** (declared.bits - 1)


# -- what coding and unpacking hold --------------------------------------------------------------


class Alive(TorchDispatchMode):
    """The most bytes of storages that were alive at once, of those made within."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        for tensor in tree_leaves(result):
            if is_tensor(tensor):
                self.add(tensor, inputs)
        return result

    def add(self, tensor: torch.Tensor, inputs: set[int]) -> None:
        import weakref

        storage = tensor.untyped_storage()
        if storage._cdata in self.live or storage._cdata in inputs:
            return
        self.live[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.live.values()))


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("coding", CODINGS)
def test_unpacking_holds_what_is_declared(coding):
    shape = (512, 512)
    declared, doubled = find_coding(coding)
    made = layer_of(coding, dense_of(shape))
    with Alive() as alive:
        dense = made.dense()
    beside = declared.unpacking(shape, double=doubled)
    specs = [TensorSpec(shape=s, dtype=d) for s, d in (*beside.before, *beside.after)]
    wanted = dense.nbytes + sum(s.nbytes for s in specs)
    assert alive.most == pytest.approx(wanted, abs=256)  # a table of values is not declared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("coding", CODINGS)
def test_coding_holds_what_is_declared(coding, dtype):
    shape = (512, 512)
    declared, doubled = find_coding(coding)
    dense = dense_of(shape, dtype)
    made = layer_of(coding, dense)
    with Alive() as alive:
        made.store(dense)
    name = str(dtype).removeprefix("torch.")
    instants = declared.quantising(shape, name, dense.element_size(), double=doubled)
    wanted = max(sum(instant) for instant in instants) - dense.nbytes
    assert alive.most == pytest.approx(wanted, abs=256)  # numbers that torch makes tensors of


# -- plain formats, names, refusals --------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in OWN if not find_base_format(n).quantised])
def test_a_plain_format_is_one_tensor_of_its_dtype(name):
    declared = find_base_format(name)
    (only,) = declared.tensors((8, 4), double=False)
    assert (only.leaf, only.shape) == ("weight", (8, 4))
    assert torch.empty(only.shape, dtype=getattr(torch, only.dtype)).element_size() * 8 == (
        declared.bits
    )
    assert name_coding(name, double=True) == ""
    assert not declared.library


@pytest.mark.parametrize("name", list(base_formats))
def test_a_format_is_registered_under_its_own_name(name):
    declared = find_base_format(name)
    assert declared.name == name
    assert declared.quantised or declared.bits == 8 * DTYPE_BYTES[declared.dtype]
    assert declared.own or declared.unknown, "nothing says why its bytes are not described"
    assert declared.own or not declared.offered


def test_what_plans_propose_has_ever_fewer_bits():
    bits = [find_base_format(name).bits for name in offered_formats()]
    assert len(bits) > 1
    assert bits == sorted(set(bits), reverse=True)


@pytest.mark.parametrize("name", [f.name for f in list_base_formats() if f.unknown])
def test_a_format_whose_bytes_are_unknown_gives_none(name):
    with pytest.raises(Error, match=f"`base_format: {name}`"):
        stored_bytes(name, (64, 64))


def test_an_unknown_coding_is_an_error_everywhere():
    """It was once planned with the layout of another format of 4 bits."""
    row = Weight(name="q_proj.weight", shape=(64, 64), part="block", coding="mxfp9")
    for ask in (
        lambda: row.nbytes,
        lambda: row.stored,
        lambda: stored_bytes("mxfp9-double", (64, 64)),
        lambda: name_coding("mxfp9", double=True),
        lambda: make_recipe("llama", method="lora", base_format="mxfp9"),
    ):
        with pytest.raises(UnknownName, match="unknown base format: `mxfp9`"):
            ask()
    with pytest.raises(InvalidRequest, match="`base_format: mxfp9`") as caught:
        Request(model="gpt2", base_format="mxfp9")
    assert "nf4" in caught.value.hint


@pytest.mark.parametrize("coding", ["int8-double", "bf16", "bf16-double"])
def test_a_coding_that_its_format_does_not_have_is_an_error(coding):
    with pytest.raises(ValueError, match="is no coding of"):
        stored_bytes(coding, (64, 64))


def test_declarations_are_read_without_torch():
    code = (
        "import sys; from memfit.base_formats import list_base_formats, stored_bytes;"
        "[stored_bytes(f.name, (64, 64)) for f in list_base_formats() if f.own and f.quantised];"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- rows that a kernel multiplies by codes ------------------------------------------------------

MULTIPROCESSORS = {  # of devices of each compute capability, the smallest and the largest
    "7.5": (40, 40), "8.0": (108, 108), "8.6": (20, 84), "8.9": (20, 142), "9.0": (114, 132),
    "10.0": (148, 148), "12.0": (30, 188), "12.1": (48, 48),
}  # fmt: skip
# (out, in) of 4 million weights or more: Llama's, Qwen's and GPT-NeoX's projections
LARGE = [
    (1024, 4096), (1024, 5120), (4096, 4096), (14336, 4096), (4096, 14336), (5120, 5120),
    (13824, 5120), (5120, 13824),
    (18432, 6144), (6144, 6144), (24576, 6144), (6144, 24576), (12288, 4096), (4096, 12288),
    (8192, 8192), (28672, 8192), (8192, 28672), (3072, 8192), (8192, 3072),
]  # fmt: skip


def bitsandbytes_choice():
    """Its own rule of which product takes the fused kernel, without the CUDA build around it."""
    path = Path(bnb.__file__).parent / "backends" / "cuda" / "ops.py"
    name = "_gemm_4bit_use_custom_cuda"
    (rule,) = (
        node for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )  # fmt: skip
    rule.decorator_list = []
    device = {}
    space = {
        "torch": torch, "_GEMM_4BIT_CUSTOM_FLOOR_M": 4,
        "_gpu_dispatch_props": lambda index: device["props"],
    }  # fmt: skip
    exec(compile(ast.Module([rule], []), str(path), "exec"), space)
    return space[name], device


@pytest.mark.parametrize("capability", MULTIPROCESSORS)
def test_rows_that_are_multiplied_by_codes_are_bitsandbytes_own_choice(capability):
    fused, device = bitsandbytes_choice()
    most = find_base_format("nf4").fused_rows(capability)
    major, minor = map(int, capability.split("."))
    dtype = torch.float16 if major == 7 else torch.bfloat16
    every = []
    for count in MULTIPROCESSORS[capability]:
        device["props"] = (count, major, minor)
        for rows in range(1, 300):
            every += [(rows, all(fused(0, dtype, rows, n, k) for n, k in LARGE))]
    dense = [rows for rows, all_fused in every if not all_fused]
    assert most == min(dense) - 1


def test_formats_without_such_a_kernel_have_no_fused_rows():
    assert find_base_format("int8").fused_rows("9.0") == 0
    assert find_base_format("nf4").fused_rows(None) == 0  # a CPU makes its weights dense
    assert find_base_format("nf4").fused_rows("99.0") == 4
