"""Storage formats of weights that are not trained, one file each: what they hold, and what goes
with them.

Planner, tracer and trainer read the same declaration: how many bytes a matrix takes, which
tensors hold it, how it becomes dense, and what may be trained beside it. No other module names a
format to decide what it can do. The package imports nothing but `memfit.core`, so that the records
of a model and of a recipe can import it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from memfit.core.errors import InvalidRequest, UnknownName
from memfit.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, dtype

DOUBLE = "-double"  # ends the coding of a format whose scales are quantised themselves
FP32 = 4  # bytes of a number

# How an input is multiplied by a coded weight. `dense`: the weight is made dense for each product,
# in the forward and in the backward. `int8`: LLM.int8's product of codes (2208.07339).
Product = Literal["dense", "int8"]


class Stored(NamedTuple):
    """One tensor of a quantised matrix, under its name inside the module."""

    leaf: str
    shape: tuple[int, ...]
    dtype: str


class Unpacking(NamedTuple):
    """Tensors (shape, dtype) that are alive beside a weight while it becomes dense."""

    before: tuple[tuple[tuple[int, ...], str], ...] = ()  # made first, and kept meanwhile
    after: tuple[tuple[tuple[int, ...], str], ...] = ()  # made when the dense weight exists


class Held(Protocol):
    """A module that holds a quantised weight: its tensors are attributes, by leaf."""

    shape: tuple[int, ...]  # (out, in), or (experts, rows, columns)
    dtype: dtype  # of the weight where it is dense
    doubled: bool  # whether the scales are quantised, too
    weight: Tensor  # the codes

    def numbers(self, leaf: str) -> Tensor:
        """Stored fp32 numbers (n,), a view of their bytes."""


class BaseFormat(ABC):
    """One way of storing the weights of a model that are not trained.

    A plain format stores every frozen weight in one dtype of torch. A quantised one stores the
    matrices of blocks in fewer bits, and everything else in the compute dtype.
    """

    name: str  # as `base_format` names it
    bits: int  # of one weight, without its share of a scale
    dtype: str = ""  # torch's dtype, of a plain format; a coded one has none
    library: str = ""  # whose kernels store the codes and multiply by them; "" is torch
    own: bool = True  # whether memfit's own step stores its base so
    unknown: str = ""  # why nothing predicts the bytes of a format that only others' steps have
    doubles: bool = False  # whether the scales can be quantised (`quantisation.double`)
    product: Product = "dense"
    offered: bool = False  # whether plans propose it: of its bits, the one that people use
    multiplies: bool = False  # its library has a kernel for a `dense` product on CUDA
    unpacking_passes: float = 0.0  # over 10 bytes of each element, to make it dense (its time)
    cut_as_numbers: bool = True  # FSDP1 and ZeRO 3 can flatten and cut what holds the codes
    why_not_compiled: str = "have not been proven when they are compiled"

    # What a coded format goes with. What is not declared is refused by name.
    methods: ClassVar[tuple[str, ...]] = ("lora",)  # what may be trained beside codes
    columns: ClassVar[int] = 1  # a row of a matrix must be a multiple of so many weights
    codes_experts: ClassVar[bool] = False  # 3-D parameters of all experts of a layer
    most_weights: ClassVar[int] = 0  # that one parameter may have; 0: any number
    codes_transposed: ClassVar[bool] = False  # weights that are stored as (in, out)

    @property
    def quantised(self) -> bool:
        """Whether matrices are stored as codes with scales."""
        return not self.dtype

    @abstractmethod
    def tensors(self, shape: tuple[int, ...], *, double: bool) -> tuple[Stored, ...]:
        """The tensors that hold a matrix of (rows, columns); their bytes are their elements."""

    @abstractmethod
    def quantising(
        self, shape: tuple[int, ...], dtype: str, width: int, *, double: bool
    ) -> list[list[int]]:
        """Sizes of what is alive at the instants of coding one dense matrix, which is the first.

        dtype, width: of the dense matrix, and the bytes of an element of it.
        """

    @abstractmethod
    def unpacking(self, shape: tuple[int, ...], *, double: bool) -> Unpacking:
        """What is alive beside a matrix while `dequantise` makes it dense."""

    def kernel_bytes(self, shape: tuple[int, ...], tokens: int, width: int, *, double: bool) -> int:
        """Bytes inside the kernel that `multiplies`, on CUDA; width: of an element of the input."""
        raise NotImplementedError(f"`{self.name}` declares no kernel that multiplies by its codes")

    def fused_rows(self, capability: str | None) -> int:
        """Rows of an input up to which a kernel multiplies by the codes of any large matrix, and
        makes none dense; capability: of the device, as CUDA counts them. 0: no kernel does."""
        del capability
        return 0

    def load_library(self) -> None:  # noqa: B027 - formats of torch alone need no other
        """Import what `quantise` calls; raises InvalidRequest where it is not installed."""

    @abstractmethod
    def quantise(self, dense: Tensor, held: Held) -> None:
        """Code a dense weight of `held.shape` and write the codes and scales into `held`."""

    @abstractmethod
    def dequantise(self, held: Held) -> Tensor:
        """The weight of `held.shape` that the codes stand for, in `held.dtype`."""

    @abstractmethod
    def scales(self, held: Held) -> Tensor:
        """One of each row or block, or its code where scales are quantised, too."""

    def multiply(self, x: Tensor, held: Held, bias: Tensor | None) -> Tensor:
        """(tokens, in) -> (tokens, out) by the kernel that `multiplies`, on an accelerator.

        Without such a kernel, and on a CPU, products are made with what `dequantise` returns.
        """
        raise NotImplementedError(f"`{self.name}` declares no kernel that multiplies by its codes")


base_formats: Registry[BaseFormat] = Registry("base format", "memfit.base_formats")


def find_base_format(name: str) -> BaseFormat:
    """The format of that name; raises UnknownName, which lists the known ones."""
    return base_formats.find(name)


def is_quantised(name: str) -> bool:
    """Return whether a format is quantised; `auto` is not. Raises UnknownName."""
    return name != "auto" and find_base_format(name).quantised


def is_quantised_in(bits: int, name: str) -> bool:
    """Return whether memfit's own step stores a format in `bits` bits. Raises UnknownName."""
    declared = find_base_format(name)
    return declared.own and declared.quantised and declared.bits == bits


def list_base_formats() -> list[BaseFormat]:
    """All formats: the widest first, of the same bits the ones that plans propose."""
    found = [base_formats.find(name) for name in base_formats]
    return sorted(found, key=lambda f: (-f.bits, not f.offered, not f.own, f.name))


def own_formats() -> tuple[str, ...]:
    """The names of those that memfit's own step has."""
    return tuple(f.name for f in list_base_formats() if f.own)


def offered_formats() -> tuple[str, ...]:
    """Return the names of the quantised formats that plans propose, the most bits first."""
    return tuple(f.name for f in list_base_formats() if f.offered and f.quantised)


def check_base_format(name: str) -> None:
    """Raise InvalidRequest, with the names that a request can have, for a name of no format."""
    try:
        find_base_format(name)
    except UnknownName as unknown:
        known = ", ".join(("auto", *(f.name for f in list_base_formats())))
        near = f"did you mean {unknown.near}? " if unknown.near else ""
        raise InvalidRequest(
            f"`base_format: {name}`: no format of that name is known", hint=f"{near}one of: {known}"
        ) from None


# -- codings: a format, and whether its scales are quantised -------------------------------------


def name_coding(base_format: str, *, double: bool) -> str:
    """`int8`, `nf4`, `nf4-double`, …; "" for a plain format."""
    declared = find_base_format(base_format)
    if not declared.quantised:
        return ""
    return base_format + (DOUBLE if double and declared.doubles else "")


@lru_cache(maxsize=64)
def find_coding(coding: str) -> tuple[BaseFormat, bool]:
    """The format of a coding, and whether its scales are quantised, too.

    Raises UnknownName for a coding of no known format, and ValueError (our bug) for `-double` of a
    format whose scales cannot be quantised.
    """
    declared, double = find_base_format(coding.removesuffix(DOUBLE)), coding.endswith(DOUBLE)
    if (double and not declared.doubles) or not declared.quantised:
        raise ValueError(f"`{coding}` is no coding of `{declared.name}`")
    return declared, double


def stored_tensors(coding: str, shape: tuple[int, ...]) -> tuple[Stored, ...]:
    """The tensors that hold a matrix (rows, columns) in a coding."""
    declared, double = find_coding(coding)
    return declared.tensors(shape, double=double)


def stored_bytes(coding: str, shape: tuple[int, ...]) -> int:
    """Bytes of all of them."""
    return sum(prod(t.shape) for t in stored_tensors(coding, shape))  # all are of one byte


def numbers(leaf: str, count: int) -> Stored:
    """Return the tensor of `count` fp32 numbers, stored as (count, 4) bytes.

    FSDP2 gathers bytes unchanged; it would cast fp32 to its compute dtype, which rounds every
    weight of a row or block by up to 0.4 %.
    """
    return Stored(leaf, (count, FP32), "uint8")
