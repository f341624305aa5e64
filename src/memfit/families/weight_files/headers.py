"""What the safetensors of a model on this machine hold, from their headers: names and dtypes.

Needs neither torch nor safetensors. A file begins with the length of its header, 8 bytes, and the
header is JSON: name -> dtype, shape and place.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import is_folder, parse_json, read_json_table
from memfit.families.weight_files.hub_cache import hub_folder
from memfit.records.model import DTYPE_BYTES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# of a header; all others, such as integers, are no weights
STORED = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e4m3fn",
}  # fmt: skip
UNKNOWN = "float32"  # the widest that weights are published in
LONGEST = 2**27  # bytes of a header


def read_widths(source: str) -> dict[str, int]:
    """Tensor name -> bytes of a number, of a folder or hub id; {} where it cannot be read here."""
    folder = Path(source)
    try:
        files = _find_files(folder) if source and is_folder(folder) else _find_cached(source)
        headers = [_read_header(file) for file in files]
        return {
            name: DTYPE_BYTES[STORED.get(row["dtype"], UNKNOWN)]
            for header in headers for name, row in header.items() if name != "__metadata__"
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidRequest):
        return {}


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, of one file. Raises OSError, ValueError, KeyError: not safetensors."""
    header = _read_header(file)
    return {name: tuple(row["shape"]) for name, row in header.items() if name != "__metadata__"}


def _find_files(folder: Path) -> set[Path]:
    index = folder / INDEX
    if not index.exists():
        return {folder / SINGLE}
    return {folder / name for name in _names(index)}


def _names(index: Path) -> Iterable[str]:
    return set(read_json_table(index)["weight_map"].values())


def _find_cached(name: str) -> set[Path]:
    """The same of what the hub's cache holds; nothing is downloaded."""
    if not name or not hub_folder(name).is_dir():
        return set()
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return set()
    index, single = (try_to_load_from_cache(name, file) for file in (INDEX, SINGLE))
    if isinstance(index, str):
        found = [try_to_load_from_cache(name, file) for file in _names(Path(index))]
        return {Path(path) for path in found if isinstance(path, str)}
    return {Path(single)} if isinstance(single, str) else set()


def _read_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > LONGEST:
            raise ValueError(f"`{file}` is not safetensors")
        header: dict[str, Any] = parse_json(opened.read(length), source=f"the header of `{file}`")
        return header
