"""Devices as people write them: `A100`, `3080`, `h100 80gb pcie`, `NVIDIA RTX 6000 Ada`.

Every word of the text must stand in the row's id or names, so that no text finds a device that it
contradicts. Where several rows are left the most usual one is taken, and a plan says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

# the most usual of the rows that one name may mean, the first that is among them
USUAL = (
    "h100-sxm", "a100-sxm-80", "a100-pcie-80", "h200-sxm", "v100-sxm2-16", "rtx-3080-10",
    "rtx-3060-12", "a100-sxm-40", "a800-sxm-80", "rtx-4060-ti-16", "rtx-5060-ti-16",
)  # fmt: skip
UNSPECIFIC = frozenset(
    {"nvidia", "geforce", "tesla", "amd", "instinct", "gpu", "gpus", "gb", "gib"}
)
# what is no device's name, and what to type instead
_THIS = "`auto` is what torch sees on this machine"
_APPLE = "`memfit devices apple` lists them"
INSTEAD = {
    **dict.fromkeys(("gpu", "cuda", "rocm", "local", "this", "nvidia-smi"), _THIS),
    **dict.fromkeys(("mac", "macbook", "mps", "metal"), _APPLE),
}
_SIZE = re.compile(r"\s*(\d+)\s*(?:gb|gib|g)\s*(?:gpu|card|vram)?\s*", re.IGNORECASE)
_SOCKET = re.compile(r"sxm\d?")
_MEMORY = re.compile(r"(\d+)(?:gb|gib|g)")
_GLUED = re.compile(r"(rtx|gtx)?(\d{4})(ti|super)?")  # rtx4090, 4060ti
_MODEL = re.compile(r"[a-z]+\d+[a-z]*|\d{4}")  # a100, l40s, 4090
_ACCELERATOR = re.compile(r"(mi\d{3})x?")


def split_words(text: str) -> frozenset[str]:
    """`NVIDIA A100-SXM4-80GB` -> a100, sxm, 80: what devices are compared by."""
    found: list[str] = []
    for word in re.split(r"[^a-z0-9.]+", text.lower()):
        if memory := _MEMORY.fullmatch(word):
            found.append(memory[1])
        elif _SOCKET.fullmatch(word):
            found.append("sxm")
        elif accelerator := _ACCELERATOR.fullmatch(word):
            found.append(accelerator[1])
        elif glued := _GLUED.fullmatch(word):
            found += [part for part in glued.groups() if part]
        elif word and word not in UNSPECIFIC:
            found.append(word)
    return frozenset(found)


def is_size(text: str) -> str:
    """`24GB` of a text that is a memory's size and nothing else: `24 gb`, `24G`; else ""."""
    match = _SIZE.fullmatch(text)
    return f"{match[1]}GB" if match else ""


def say_instead(name: str) -> str:
    """What to type instead of a word that is no device's name; "" of any other."""
    if size := is_size(name):
        return f"`memfit devices {size}` lists those of that memory"
    return INSTEAD.get(name.strip().lower(), "")


def find_alike(name: str, rows: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Ids of the rows that have every word of a name; rows: id -> its names."""
    words = split_words(name)
    if not any(_MODEL.fullmatch(word) for word in words):
        return ()  # `sxm`, `ada` or `80gb` alone are not a device
    return tuple(
        key for key, names in rows.items() if words <= split_words(" ".join((key, *names)))
    )


def choose(alike: Sequence[str]) -> str:
    """Return the only name, or the most usual one; "" where none of them is in `USUAL`."""
    if len(alike) == 1:
        return alike[0]
    return next((key for key in USUAL if key in alike), "")
