"""What is claimed about CUDA, each claim held against the rows of `make gpu`.

A claim looks at rows and gives findings: one a row that can judge it, held or failed, by how much,
and of a failed one the component that most likely made it fail.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from memfit import catalog
from memfit.catalog.overheads import find_overhead
from memfit.certify.tracing.workspace import RULES
from memfit.core.units import GIB, show_gib
from memfit.meta.workspace import product_workspace

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "bench" / "results" / "gpu" / "rows.jsonl"
sys.path.insert(0, str(ROOT / "bench"))
from gpu_grid import ALLOWED, TOTAL_FLOOR  # noqa: E402
from on_gpu import kernels  # noqa: E402
from on_gpu.probe import key_of  # noqa: E402

Row = Mapping[str, Any]
KERNEL_SHARE, KERNEL_FLOOR = 0.02, 64 * 1024  # by how much a kernel's bytes may differ from a rule
CERTIFIED = "recipes", "rollouts"  # slices whose units are certified as they are measured
UNRULED = 2**20  # bytes above which an operator without a rule should have one
EXPLAINED = 0.02  # of a peak that the certificate's tensors may leave unexplained
SHEET = 0.02  # above a data sheet's peak, by clocks that boost


class Finding(NamedTuple):
    """What one row says of a claim."""

    where: str  # device and unit
    held: bool
    off: float | None  # signed, as a fraction; None where there is no such figure
    figure: str
    component: str = ""  # the likely cause, of a failed one


class Claim(NamedTuple):
    """One statement about CUDA and who judges it."""

    name: str
    stands_in: str  # the document that says it
    judge: Callable[[Row], Iterable[Finding]]


def read(path: Path = ROWS) -> list[dict[str, Any]]:
    """The landed rows; none while there is no such file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [restate(row) for row in rows if not row.get("rehearsal")]


def restate(row: dict[str, Any]) -> dict[str, Any]:
    """The row with what today's rules say of its operators, in place of those of its day."""
    kind, _, what = row["name"].partition(": ")
    if row["slice"] != "kernels" or kind != "kernel" or "operators" not in row:
        return row
    said = kernels.say(what, row["device"])
    return row | {
        "operators": [
            one
            | {
                "stated": said.get(key_of(one["operator"], one["shapes"]), 0),
                "ruled": one["operator"] in RULES,
            }
            for one in row["operators"]
        ]
    }


def _where(row: Row) -> str:
    return f"{row['device']}: {row.get('recipe', row['name'])}"


def _compare(
    row: Row, said: int | None, measured: int | None, allowed: float, component: Callable[[], str],
    floor: float = 0.0,
) -> Iterator[Finding]:  # fmt: skip
    """One finding of a number that is said and measured.

    What is said of a compiled step is a bound: it is held by what stays below it, too.
    """
    if said is None or not measured:
        return
    off = said / measured - 1
    held = abs(off) <= allowed or abs(said - measured) <= floor
    held |= bool(row.get("compiled")) and off > 0
    figure = f"{show_gib(said)} against {show_gib(measured)}"
    yield Finding(_where(row), held, off, figure, "" if held else component())


def _number(source: str, name: str) -> Callable[[Row], Iterator[Finding]]:
    """A judge of one memory number of one source against what was measured."""
    floor = TOTAL_FLOOR if name == "device_total" else 0.0

    def judge(row: Row) -> Iterator[Finding]:
        if source in row and "measured" in row and row["slice"] in (*CERTIFIED, "grid"):
            said, measured = row[source][name], row["measured"][name]
            at = ALLOWED[name]
            yield from _compare(row, said, measured, at, lambda: _blame(row, source, name), floor)

    return judge


def _blame(row: Row, source: str, name: str) -> str:
    """The likely component of a memory number that is off."""
    certified, measured = row.get("certified"), row["measured"]
    if (
        source == "predicted" and certified and certified[name]
        and abs(certified[name] / measured[name] - 1) <= ALLOWED[name]
    ):  # fmt: skip
        return "the prediction alone: the certificate of the same recipe holds"
    if name == "device_total":
        outside = measured.get("outside_allocator")
        said = row[source]
        if outside is not None and None not in (said["device_total"], said["peak_reserved"]):
            stated = said["device_total"] - said["peak_reserved"]
            return f"context: {show_gib(stated)} said, {show_gib(outside)} outside the allocator"
    if name == "peak_reserved":
        said = row[source]["peak_allocated"]
        if said and abs(said / measured["peak_allocated"] - 1) <= ALLOWED["peak_allocated"]:
            return "the allocator's replay: allocated bytes agree, segments do not"
    return _largest_kind(row)


def _largest_kind(row: Row) -> str:
    """The kind of tensors that differs most where the measured peak is."""
    joined = row.get("joined") or {}
    for side, words in (("only_measured", "not in the certificate"),
                        ("only_certified", "certified, and not there")):  # fmt: skip
        if joined.get(f"{side}_bytes", 0) > 0.01 * joined.get("peak", 0):
            first = joined[side][0]
            return f"{first['what']}: {show_gib(first['bytes'])} {words}"
    held, said = row.get("kinds") or {}, row.get("certified_kinds") or {}
    phases = [phase for phase in held if phase in said]
    if not phases:
        return "not known: the row has no components"
    phase = max(phases, key=lambda p: sum(held[p].values()))
    kinds = {k: held[phase].get(k, 0) - said[phase].get(k, 0) for k in {*held[phase], *said[phase]}}
    kind = max(kinds, key=lambda k: abs(kinds[k]))
    gap = (row["measured"]["peak_allocated"] or 0) - (row["certified"]["peak_allocated"] or 0)
    if abs(kinds[kind]) < abs(gap) / 4:
        return "no tensor: memory inside kernels, or how the allocator rounds"
    return f"{kind} in {phase}: {kinds[kind] / GIB:+.3f} GiB beside the certificate"


def rehearsed(row: Row) -> int:
    """Bytes that the phase `load` of earlier rows held of the rehearsal before it.

    That is a cuBLAS workspace of each of two threads. `Meter` gives them back since, and rows that
    say `load_alone` were measured so.
    """
    return 2 * product_workspace(catalog.find_device(row["device"]))


def _phases(row: Row) -> Iterator[Finding]:
    if "certified_phases" not in row:
        return
    for phase, measured in row.get("phases", {}).items():
        said = row["certified_phases"].get(phase)
        if phase == "load" and not row.get("load_alone") and said is not None:
            said += rehearsed(row)
        for found in _compare(
            row, said, measured, ALLOWED["peak_allocated"], lambda: _largest_kind(row)
        ):
            yield found._replace(where=f"{found.where}, {phase}")


def _explained(row: Row) -> Iterator[Finding]:
    joined = row.get("joined")
    if joined and joined["whole"] and joined["peak"]:
        off = joined["only_measured_bytes"] / joined["peak"]
        figure = f"{show_gib(joined['only_measured_bytes'])} of {show_gib(joined['peak'])}"
        held = off <= EXPLAINED
        yield Finding(_where(row), held, off, figure, "" if held else _largest_kind(row))


def _replayed(row: Row) -> Iterator[Finding]:
    if row["slice"] == "allocator" and "divergence" in row:
        at = row["divergence"]
        figure = f"{row['entries']:,} entries"
        if at is None:
            yield Finding(_where(row), True, None, figure)
        else:
            told = f"entry {at['entry']}: torch {at['recorded']}; replay {at['replayed']}"
            yield Finding(_where(row), False, None, told, f"the allocator under {row['name']}")


def _kernels(row: Row) -> Iterator[Finding]:
    for one in row.get("operators", ()):
        if one["ruled"] and one["inside"] is not None:
            said, inside = one["stated"], one["inside"]
            off = said / inside - 1 if inside else (0.0 if not said else 1.0)
            held = abs(said - inside) <= max(KERNEL_FLOOR, KERNEL_SHARE * inside)
            figure = f"{said:,} B said, {inside:,} B taken: {'; '.join(one['shapes'][:3])}"
            what = "" if held else f"{one['operator']} (src/memfit/meta/workspace.py)"
            yield Finding(f"{_where(row)}, {one['operator']}", held, off, figure, what)


def _unruled(row: Row) -> Iterator[Finding]:
    if row["slice"] != "kernels" or "operators" not in row:
        return
    others = [o for o in row["operators"] if not o["ruled"] and (o["inside"] or 0) > UNRULED]
    if not others:
        yield Finding(_where(row), True, None, "no other operator takes more than 1 MiB")
    for one in others:
        figure = f"{one['inside']:,} B: {'; '.join(one['shapes'][:3])}"
        yield Finding(_where(row), False, None, figure, f"{one['operator']} has no rule")


def _context(row: Row) -> Iterator[Finding]:
    outside = row.get("outside")
    band = find_overhead(catalog.find_device(row["device"])) if outside else None
    if outside and band is not None:
        most = max(outside.values())
        held = band.low <= most <= band.high
        figure = f"{show_gib(most)}; said {show_gib(band.low)} to {show_gib(band.high)}"
        what = "" if held else "context (src/memfit/catalog/overheads.toml)"
        yield Finding(_where(row), held, most / band.typical - 1, figure, what)


def _seconds(row: Row) -> Iterator[Finding]:
    if row["slice"] != "speed" or "trainers" not in row:  # it failed as a whole
        return
    said, own = row["predicted"], row["trainers"].get("memfit", {})
    if said["step_seconds"] is None or "seconds" not in own:
        return
    low, high = said["step_seconds_low"], said["step_seconds_high"]
    held = low is not None and low <= own["seconds"] <= high
    figure = f"{said['step_seconds']:.3f} s ({low:.3f} to {high:.3f}); {own['seconds']:.3f} s"
    what = "" if held else f"the rates that it rests on: {said['basis'] or 'a data sheet'}"
    yield Finding(_where(row), held, said["step_seconds"] / own["seconds"] - 1, figure, what)


def trainer_peaks(allowed: float) -> Callable[[Row], Iterator[Finding]]:
    """A judge of the Trainer's peaks; allowed: what 90 % of published rows are within."""

    def judge(row: Row) -> Iterator[Finding]:
        if row["slice"] == "trainers" and "measured" in row:
            kinds = row["predicted_kinds"]
            largest = max(kinds, key=lambda kind: kinds[kind])
            calls = ", ".join(row["attention"]) or "no fused attention"
            blame = f"not known; of what is predicted {largest} is the most, and it ran {calls}"
            yield from _compare(row, row["predicted"], row["measured"], allowed, lambda: blame)

    return judge


def _tests(row: Row) -> Iterator[Finding]:
    for name in row.get("passed", ()) if row["slice"] == "tests" else ():
        yield Finding(f"{_where(row)}::{name}", True, None, "passed")
    for name, said in row.get("broken", {}).items():
        yield Finding(f"{_where(row)}::{name}", False, None, said.splitlines()[0], row["name"])


def _fits(row: Row) -> Iterator[Finding]:
    if row["slice"] == "cards" and row.get("ran") is not None:
        figure = f"{show_gib(row['reserved'])} reserved of {show_gib(row['allowed'])} allowed"
        if row["ran"]:
            yield Finding(_where(row), True, None, figure)
        else:
            yield Finding(_where(row), False, None, figure, f"reserved: {row['because']}")


def best_rate(curve: Row) -> float:
    """The highest rate of a curve, a second; of memory that of the largest copy.

    Copies of up to about 50 MB stay within an H100's L2 cache, which is faster than its memory.
    """
    points = curve["points"][-1:] if curve["work"] == "memory" else curve["points"]
    return float(max(rate for _, rate in points))


def _rates(row: Row) -> Iterator[Finding]:
    if row["slice"] != "rates":
        return
    device = catalog.find_device(row["device"])
    for curve in row.get("curves", ()):
        best = best_rate(curve)
        sheet = {"matmul": device.flops.get(curve["dtype"]), "memory": device.bandwidth}
        peak = sheet.get(curve["work"])
        if peak:
            held = best <= (1 + SHEET) * peak
            figure = f"{best:.3g} of {peak:.3g} a second"
            what = "" if held else f"the data sheet's peak of {curve['dtype'] or 'the memory'}"
            where = f"{_where(row)}, {curve['work']} {curve['dtype']}".rstrip()
            yield Finding(where, held, best / peak - 1, figure, what)


def claims(published: float) -> tuple[Claim, ...]:
    """All of them; published: within what 90 % of published runs are predicted."""
    certified, proof = "docs/trust.md", "certificate"
    numbers = {"peak_allocated": "allocated bytes", "peak_reserved": "reserved bytes",
               "device_total": "bytes of the device"}  # fmt: skip
    of_numbers = [
        Claim(f"{source} {words}, within {ALLOWED[name]:.0%}", stands, _number(source, name))
        for source, stands in (("certified", certified), ("predicted", "docs/accuracy.md"))
        for name, words in numbers.items()
    ]
    return (
        *of_numbers,
        Claim(f"certified bytes of each phase, within {ALLOWED['peak_allocated']:.0%}",
              f"docs/{proof}.md", _phases),
        Claim(f"the certificate names what is alive at the peak, but for {EXPLAINED:.0%}",
              f"docs/{proof}.md", _explained),
        Claim("the allocator's replay gives every address", "docs/allocator.md", _replayed),
        Claim("bytes inside kernels are the rules'", "docs/workspaces.md", _kernels),
        Claim("no other operator of a step takes more than 1 MiB", "docs/workspaces.md", _unruled),
        Claim("the context is within its band", "src/memfit/catalog/overheads.toml", _context),
        Claim("a plan that says fits runs within the card's bytes", "docs/founding.md", _fits),
        Claim("seconds of memfit's step are in the predicted range", "docs/time.md", _seconds),
        Claim(f"peaks of Hugging Face's Trainer, within {published:.1%}", "docs/accuracy.md",
              trainer_peaks(published)),
        Claim("tests marked gpu pass", "tests/gpu", _tests),
        Claim("no rate is above the data sheet", "src/memfit/catalog/devices.toml", _rates),
    )  # fmt: skip
