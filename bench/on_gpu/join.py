"""PyTorch's own history of an allocator joined with a certificate, at the highest instant of both.

The history says which blocks were alive and which line asked for each; the certificate says of
which component each tensor is. Blocks and tensors of as many bytes are taken for each other, so
that what is left over on either side is what the certificate lacks, or has too much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ROUND = 512  # bytes; the allocator gives whole blocks
MOST = 12  # rows of each kind that are kept
LIBRARY = ("/torch/", "<frozen", "/contextlib.py", "/functools.py")


def join_snapshot(
    snapshot: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]], max_entries: int
) -> dict[str, Any]:
    """What the certificate's tensors explain of the blocks alive at the measured peak.

    tensors: `Certificate.at_peak` as data. Bytes are whole blocks on both sides.
    """
    traces = max(snapshot["device_traces"], key=len, default=[])
    peak, blocks = find_peak(traces)
    certified: dict[int, Counter[str]] = {}
    for tensor in tensors:
        size = _blocks(tensor["nbytes"])
        name = f"{tensor['kind']}: {tensor['module'] or tensor['op']}"
        certified.setdefault(size, Counter())[name] += tensor.get("count", 1)
    matched: Counter[str] = Counter()
    extra: Counter[str] = Counter()
    for size, frame in blocks:
        names = certified.get(size)
        if names:
            name = next(iter(names))
            names[name] -= 1
            matched[name.partition(":")[0]] += size
            names += Counter()  # drops what is used up
        else:
            extra[frame] += size
    absent = Counter({
        name: count * size for size, names in certified.items() for name, count in names.items()
    })  # fmt: skip
    return {
        "peak": peak, "held_before": snapshot.get("held_before", 0),
        "whole": len(traces) < max_entries,
        "explained": dict(matched), "only_measured": _top(extra), "only_certified": _top(absent),
        "only_measured_bytes": extra.total(), "only_certified_bytes": absent.total(),
    }  # fmt: skip


def find_peak(entries: Iterable[Mapping[str, Any]]) -> tuple[int, list[tuple[int, str]]]:
    """Bytes at the highest instant of a history, and the blocks alive then with their lines."""
    alive: dict[int, int] = {}
    held = peak = 0
    best = -1
    kept = list(entries)
    for number, entry in enumerate(kept):
        held += _change(entry, alive)
        if held > peak:
            peak, best = held, number
    blocks: dict[int, tuple[int, str]] = {}
    for entry in kept[: best + 1]:
        if entry["action"] == "alloc":
            blocks[entry["addr"]] = _blocks(entry["size"]), _line(entry.get("frames", ()))
        elif entry["action"] == "free_completed":
            blocks.pop(entry["addr"], None)
    return peak, list(blocks.values())


def _change(entry: Mapping[str, Any], alive: dict[int, int]) -> int:
    if entry["action"] == "alloc":
        alive[entry["addr"]] = _blocks(entry["size"])
        return alive[entry["addr"]]
    return -alive.pop(entry["addr"], 0) if entry["action"] == "free_completed" else 0


def _blocks(nbytes: int) -> int:
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line outside torch that asked for a block."""
    for frame in frames:
        name = frame["filename"]
        if name.endswith(".py") and not any(part in name for part in LIBRARY):
            return f"{'/'.join(name.split('/')[-2:])}:{frame['line']} {frame['name']}"
    return frames[0]["name"] if frames else "no line"


def _top(found: Counter[str]) -> list[dict[str, Any]]:
    return [{"what": name, "bytes": n} for name, n in found.most_common(MOST)]
