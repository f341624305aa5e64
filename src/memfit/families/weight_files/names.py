"""What a parameter is called in files, and how many tensors of a file make it up.

Hugging Face's module has all experts of a layer in two 3-D parameters; published files store each
expert's projections on their own, and so does memfit's export. Those of gpt-oss store all of a
layer in MXFP4: codes of 4 bits, two a byte, with a power of two for 32 of them (OCP Microscaling
Formats 1.0, section 5), transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from math import prod
from typing import NamedTuple

OTHER_NAMES = {"lm_head.weight": "embed_out.weight"}  # what GPT-NeoX's files still call the head
MLP, EXPERTS = ".mlp.", ".mlp.experts."
BLOCKS, SCALES = "_blocks", "_scales"  # what follows a parameter's name where it is in MXFP4
GROUP = 32  # weights that share a scale
MIXTRAL = ".block_sparse_moe."  # what Mixtral's files still call a layer's experts and router
Place = tuple[int | slice, ...]


class Part(NamedTuple):
    """A tensor of a file, and where in the parameter it belongs; () is all of it."""

    name: str
    shape: tuple[int, ...]
    place: Place = ()

    @property
    def packed(self) -> bool:
        """Whether it is in MXFP4: of the tensor, which has all experts, this is one."""
        return bool(self.place) and self.name.endswith(BLOCKS)

    def reading(self, width: int) -> int:
        """Bytes alive while it is read; width: of a number of the file. See `unpack_expert`."""
        if not self.packed:
            return prod(self.shape) * width
        codes = prod(self.shape)  # of all experts, which the file is mapped with
        return codes + 2 * codes // GROUP + UNPACKING * codes // self.shape[0] + TABLE


# beside the codes and scales of an expert: an int32 index of each byte and two numbers of 16 bits;
# all pairs of numbers that a byte can mean
UNPACKING, TABLE = 4 + 4, 256 * 2 * 2


class Style(NamedTuple):
    """How a family's files name a layer's experts."""

    folder: str
    gate: str
    up: str
    down: str


STYLES = {
    **dict.fromkeys(("mixtral", "minimax_m2"), Style(f"{MIXTRAL}experts.", "w1", "w3", "w2")),
    "": Style(EXPERTS, "gate_proj", "up_proj", "down_proj"),
}
# families whose files are so
APART = (
    "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "minimax_m2",
    "glm4_moe_lite", "olmoe", "qwen3_next",
)  # fmt: skip


def find_parts(
    name: str, shape: tuple[int, ...], prefix: str, has: Callable[[str], bool]
) -> list[Part]:
    """Return a file's tensors that make up a parameter of that name; empty when one is missing.

    prefix: of the backbone; a bare backbone's file has none. has: whether a file holds a name.
    """
    for stored in _names(name, prefix):
        if has(stored):
            return [Part(stored, shape)]
    if not _stacks_experts(name):
        return []
    for stored in _names(name, prefix):
        if has(stored + BLOCKS) and has(stored + SCALES):
            count, rows, columns = shape
            packed = (count, columns, rows // GROUP, GROUP // 2)
            return [Part(stored + BLOCKS, packed, (expert,)) for expert in range(count)]
    for style in STYLES.values():
        parts = list(_apart(name, shape, style))
        for start in (f"{prefix}.", "", _within(prefix)):
            named = [p._replace(name=start + p.name.removeprefix(f"{prefix}.")) for p in parts]
            if all(has(part.name) for part in named):
                return named
    return []


def file_parts(name: str, shape: tuple[int, ...], family: str) -> list[Part]:
    """How a family's published files, and memfit's export, store a parameter."""
    style = STYLES.get(family, STYLES[""])
    if family in APART and _stacks_experts(name):
        return list(_apart(name, shape, style))
    if style.folder.startswith(MIXTRAL):
        name = name.replace(MLP, MIXTRAL)
    return [Part(name, shape)]


def _stacks_experts(name: str) -> bool:
    """Whether a parameter is the matrices of all experts, which files may hold one by one."""
    _, _, leaf = name.partition(EXPERTS)
    return leaf in ("gate_up_proj", "down_proj")


def _names(name: str, prefix: str) -> Iterator[str]:
    """Yield the names that files may have for a parameter; a bare backbone's have no prefix.

    Where a vision tower stands in the same files, the text model is a part of the backbone.
    """
    within = name.replace(f"{prefix}.", _within(prefix), 1)
    older = (OTHER_NAMES.get(name, name), name.replace(MLP, MIXTRAL), within)
    return chain((name, name.removeprefix(f"{prefix}.")), older)


def _within(prefix: str) -> str:
    return f"{prefix}.language_model."


def _apart(name: str, shape: tuple[int, ...], style: Style) -> Iterator[Part]:
    """One tensor an expert and projection; (experts, rows, columns) is gate over up, or down."""
    layer, _, leaf = name.partition(EXPERTS)
    count, rows, columns = shape
    half = rows // 2
    halves = [(style.gate, slice(0, half)), (style.up, slice(half, rows))]
    projections = halves if leaf == "gate_up_proj" else [(style.down, slice(0, rows))]
    for expert in range(count):
        for projection, place in projections:
            stored = f"{layer}{style.folder}{expert}.{projection}.weight"
            yield Part(stored, (place.stop - place.start, columns), (expert, place))
