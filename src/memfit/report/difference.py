"""Two certificates side by side: what changed in recipe and libraries, and which bytes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import exists, is_file, is_folder
from memfit.files.run_folder import read_plan
from memfit.plan.request.problem import read_own_problem
from memfit.plan.search.search import search
from memfit.records import to_data
from memfit.records.ledger import Phase
from memfit.records.results import Certificate, Change, Diff, Plan, Side, Tensor, without_index
from memfit.workflows.certify_request import certify
from memfit.workflows.load_inputs import read, read_certificate, what_is

NUMBERS = ("peak_allocated", "peak_reserved", "device_total", "usable")


def find_certificate(target: str, say: Callable[[str], None]) -> Certificate:
    """Of a certificate.json, a run folder, a plan.json or a request: as it stands, or made now.

    Raises InvalidRequest (none of these, or another schema), NotCertified.
    """
    path = Path(target)
    home = path if is_folder(path) else path.parent
    known = home / "certificate.json"
    if is_folder(path) and not exists(path / "config.json"):
        if known.exists():
            return read_certificate(known)
        path = path / "plan.json"
        if not exists(path):
            raise InvalidRequest(
                f"`{target}` holds neither certificate.json nor plan.json",
                hint="name a run's folder, a certificate, a plan or a request",
            )
    if is_file(path) and path.suffix == ".json" and path.name != "config.json":
        if what_is(path) not in ("a plan", "a request"):
            return read_certificate(path)
        if what_is(path) == "a plan":
            made = read_plan(path)
            if known.exists() and (certificate := read_certificate(known)).recipe == made.recipe:
                return certificate
            return _certify_now(made, say)
    return _certify_now(search(read_own_problem(read(str(path))), levers=False), say)


def _certify_now(made: Plan, say: Callable[[str], None]) -> Certificate:
    say(f"certifying recipe {made.recipe_digest} for {made.recipe.placed_on}")
    return certify(made.recipe, usable=made.memory.usable)


def compare(a: Certificate, b: Certificate, *, names: tuple[str, str]) -> Diff:
    """What B has otherwise than A; names: how each is called."""
    return Diff(
        a=_side(a, names[0]),
        b=_side(b, names[1]),
        recipe=_values(_flat(to_data(a.recipe)), _flat(to_data(b.recipe))),
        versions=_values(a.versions, b.versions),
        numbers=tuple(
            Change(name=name, a=getattr(a.memory, name), b=getattr(b.memory, name))
            for name in NUMBERS
        ),
        phases=_changes(a.phases, b.phases, order=[str(phase) for phase in Phase]),
        components=_changes(_components(a), _components(b)),
        modules=_changes(_modules(a), _modules(b)),
        appeared=_more(b.at_peak, a.at_peak),
        disappeared=_more(a.at_peak, b.at_peak),
    )


def _side(certificate: Certificate, name: str) -> Side:
    return Side(
        name=name,
        recipe_digest=certificate.recipe_digest,
        model=certificate.recipe.model.name,
        device=certificate.device,
        verdict=certificate.memory.verdict,
        peak_phase=certificate.memory.peak_phase,
    )


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _values(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (old, new) where they differ; None where one has no such name."""
    names = dict.fromkeys((*a, *b))
    return {n: (a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n)}


def _components(certificate: Certificate) -> dict[str, int]:
    """`phase/kind` -> bytes at that phase's own peak."""
    ledger = certificate.ledger
    return {f"{p}/{kind}": n for p in ledger.phases for kind, n in ledger.by_kind(p).items()}


def _modules(certificate: Certificate) -> dict[str, int]:
    """Module, blocks' indices as `*` -> bytes at the largest peak."""
    sums: dict[str, int] = {}
    for tensor in certificate.at_peak:
        name = without_index(tensor.module)
        sums[name] = sums.get(name, 0) + tensor.total
    return sums


def _changes(
    a: Mapping[str, int], b: Mapping[str, int], order: list[str] | None = None
) -> tuple[Change, ...]:
    """Return every name of either, in `order` or the largest difference first."""
    names = dict.fromkeys((*a, *b))
    rows = [Change(name=n, a=a.get(n), b=b.get(n)) for n in names]
    if order is not None:
        return tuple(sorted(rows, key=lambda row: order.index(row.name)))
    return tuple(sorted(rows, key=lambda row: -abs(row.difference or 0)))


def _more(of: Iterable[Tensor], than: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Tensors that one has and the other has fewer of, the most bytes first.

    A line that moved makes no other tensor, and neither does another block's index.
    """
    left = _counted(than)
    rows = []
    for key, (tensor, count) in _counted(of).items():
        known = left[key][1] if key in left else 0
        if count > known:
            rows.append(replace(tensor, count=count - known))
    return tuple(sorted(rows, key=lambda row: -row.total))


def _counted(tensors: Iterable[Tensor]) -> dict[Tensor, tuple[Tensor, int]]:
    found: dict[Tensor, tuple[Tensor, int]] = {}
    for tensor in tensors:
        key = replace(tensor, module=without_index(tensor.module), count=1, source="")
        known = found[key][1] if key in found else 0
        found[key] = (tensor, known + tensor.count)
    return found
