"""Fit the constants of a step's time to published runs; writes src/memfit/catalog/rates.toml.

    python scripts/fit_rates.py            (needs numpy and scipy)

Robust least squares on the logarithm of seconds, over rows of the corpus's `fit` half alone. Each
constant starts from a prior, what physics or a data sheet says, and pays for leaving it; a source
weighs as the root of its rows or so, that no table of two hundred rows decides alone.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from scipy.optimize import least_squares

from memfit import families
from memfit.accuracy.corpus import Row, read_corpus
from memfit.accuracy.time_errors import clock_basis, network_of, time_rows
from memfit.plan.request.problem import find_device
from memfit.plan.step_time.adapters import list_matrices, with_adapters
from memfit.plan.step_time.arrays import gather, list_names, list_numbers
from memfit.plan.step_time.communication.collectives import Links
from memfit.plan.step_time.rates import (
    DEVICE_FIELDS,
    FRAMEWORK_FIELDS,
    NOBODYS,
    Machine,
    Rates,
    Setting,
    names,
)
from memfit.plan.step_time.read import read_layout, read_machine, read_shape
from memfit.plan.step_time.step import predict_step
from memfit.plan.step_time.work import Layout, Shape

OUT = Path(__file__).parent.parent / "src" / "memfit" / "catalog" / "rates.toml"
NOISE = 0.05  # relative, of a published time: releases and repetitions (published.md)


class Prior(NamedTuple):
    """What a constant is before any row is seen."""

    value: float
    spread: float  # standard deviation of its logarithm
    unit: str
    most: float = float("inf")


PRODUCTS = Prior(0.9, 0.1, "of the best product measured", 1.0)
NARROW_PRODUCTS = Prior(0.7, 0.2, "of the best product measured", 1.0)
ATTENTION = {"math": 0.6, "triton": 0.3, "flash1": 0.3, "flash2": 0.4, "fused": 0.55}
PRIORS = {
    "memory": Prior(0.7, 0.1, "of the bandwidth", 1.0),
    "link": Prior(0.9, 0.15, "of what large messages reach", 1.0),
    "network": Prior(0.85, 0.15, "of what large messages reach", 1.0),
    "tile": Prior(100, 0.3, "elements"),
    "weight_traffic": Prior(1.0, 0.4, "share"),
    "narrow_head": Prior(0.2, 0.4, "exponent"),
    "misaligned": Prior(3.0, 0.4, "ratio"),
    "ring_attention": Prior(0.06, 0.7, "share"),
    "grouped": Prior(1.1, 0.15, "ratio"),
    "cast": Prior(0.5, 0.5, "passes"),
    "unpack": Prior(1.0, 0.4, "x 10 B an element"),
    "adapter": Prior(1.0, 0.3, "passes"),
    "selective": Prior(1.0, 0.5, "ratio"),
    "clamp": Prior(1.5, 0.3, "ratio"),
    "permute": Prior(1.0, 0.5, "ratio"),
    "dispatch": Prior(0.5, 0.4, "share"),
    "dispatch_across": Prior(0.8, 0.4, "share"),
    "dispatch_overlapped": Prior(0.6, 0.4, "ratio"),
    "fused": Prior(0.7, 0.2, "ratio"),
    "asynchronous": Prior(0.7, 0.3, "ratio"),
    "link_latency": Prior(3e-5, 0.3, "s"),
    "context_latency": Prior(7e-6, 0.7, "s"),
    "ring_latency": Prior(1e-6, 1.5, "s a rank"),
    "send_latency": Prior(5e-5, 0.8, "s"),
    "adapter_launch": Prior(0.7, 0.5, "share"),
    "tensor_launch": Prior(0.3, 0.5, "share"),
    "slowdown": Prior(1.0, 0.06, "ratio"),
    "passes": Prior(1.0, 0.4, "ratio"),
    "launch": Prior(2e-3, 1.0, "s a block"),
    "expert_launch": Prior(3e-3, 1.0, "s a block"),
    "exposed_data": Prior(0.3, 0.7, "share"),
    "exposed_all_reduce": Prior(0.3, 0.7, "share"),
    "exposed_tensor": Prior(0.7, 0.3, "share"),
    "fixed": Prior(1e-2, 0.4, "s"),
    "straggling": Prior(5e-3, 0.6, "share a doubling of nodes"),
}


OWN = {
    # hybrid ZeRO sends each rank's share of the weights in a broadcast of its own, one by one
    "internevo.ring_latency": Prior(1e-3, 1.0, "s a rank"),
}


def prior_of(name: str) -> Prior:
    """The prior of a constant by its name."""
    if name in OWN:
        return OWN[name]
    what, *_, last = name.split(".")
    if what == "products":
        return NARROW_PRODUCTS if last in ("nvfp4", "fp8-rowwise", "fp8-blockwise") else PRODUCTS
    if what == "attention":
        faster = 1.3 if "ampere" in name and last != "math" else 1.0
        return Prior(ATTENTION[last] * faster, 0.2, "of the dense peak", 1.0)
    return PRIORS[last]


class Table(NamedTuple):
    """Published runs, a column each field."""

    shape: Shape
    layout: Layout
    machine: Machine
    chains: list[dict[str, tuple[str, ...]]]
    seconds: Any
    sources: list[str]
    fit: Any


def tabulate(rows: Iterable[Row]) -> Table:
    """All rows of time that can be predicted, stacked."""
    shapes, layouts, machines, chains, seconds, sources, fit = [], [], [], [], [], [], []
    for row in rows:
        recipe, device = row.recipe, find_device(row.recipe.device)
        basis, network = clock_basis(row), network_of(row)
        model = families.read_model(recipe.model)
        shape, layers = read_shape(model), model.architecture.layers
        layout = read_layout(recipe, shape, basis)
        shapes.append(shape)
        layouts.append(with_adapters(layout, recipe, list_matrices(model), layers))
        machines.append(read_machine(device, recipe, basis, network))
        chains.append(names(device, basis.stack, basis.narrow, basis.kernel))
        seconds.append(row.measurements["time.step_seconds"].value)
        sources.append(row.source.name.split(" ")[0])
        fit.append(row.split == "fit")
    return Table(
        Shape(*numpy.array(shapes).T), stack_layouts(layouts),
        _stack(machines), chains, numpy.array(seconds), sources,
        numpy.array(fit),
    )  # fmt: skip


def stack_layouts(layouts: Sequence[Layout]) -> Layout:
    """One layout whose numbers are arrays, an element for each of `layouts`."""
    rows = [list_numbers(layout) for layout in layouts]
    return gather(Layout, {name: numpy.array([row[name] for row in rows]) for name in rows[0]})


def _stack(machines: Sequence[Machine]) -> Machine:
    links = Links(*numpy.array([machine.links for machine in machines]).T)
    others = [machine._replace(links=0.0, own=0.0) for machine in machines]  # type: ignore[arg-type]
    return Machine(*numpy.array(others).T)._replace(links=links, own=NOBODYS)


class Fit:
    """Constants over a table: their names, priors, and which row takes which."""

    def __init__(self, table: Table) -> None:
        self.table = table
        known = {row[field][0] for row in table.chains for field in list_names(Rates)}
        self.names = sorted(known)
        at = {name: i for i, name in enumerate(self.names)}
        self.index = {
            field: numpy.array([at[row[field][0]] for row in table.chains])
            for field in list_names(Rates)
        }
        priors = [prior_of(name) for name in self.names]
        self.start = numpy.log([p.value for p in priors])
        self.spread = numpy.array([p.spread for p in priors])
        self.most = numpy.log([p.most * (1 + 1e-9) for p in priors])

    def seconds(self, x: Any) -> Any:
        """Predicted seconds of all rows."""
        values = numpy.exp(x)
        rates = gather(Rates, {field: values[i] for field, i in self.index.items()})
        t = self.table
        return predict_step(Setting(t.shape, t.layout, t.machine, rates)).total

    def solve(self, mask: Any) -> Any:
        """Logarithms of the constants that fit the masked rows best."""
        t = self.table
        count = Counter(s for s, used in zip(t.sources, mask, strict=True) if used)
        weight = numpy.array([(1 / max(count[s], 1)) ** 0.6 for s in t.sources])
        weight = numpy.sqrt(numpy.minimum(1, 12 * weight))[mask] / NOISE

        def residuals(x: Any) -> Any:
            error = numpy.log(self.seconds(x) / t.seconds)[mask] * weight
            soft = numpy.sign(error) * numpy.sqrt(2 * (numpy.sqrt(1 + error**2) - 1))
            return numpy.concatenate([soft, (x - self.start) / self.spread])

        return least_squares(residuals, self.start, bounds=(-40, self.most), max_nfev=60).x


def write(fit: Fit, x: Any, mask: Sequence[bool]) -> None:
    """catalog/rates.toml: each constant, its unit, its prior and how many rows it was fitted on."""
    used = Counter(
        name
        for row, counts in zip(fit.table.chains, mask, strict=True)
        if counts
        for name in {row[field][0] for field in list_names(Rates)}
    )
    found = {name: float(numpy.exp(v)) for name, v in zip(fit.names, x, strict=True)}
    _write({**_others(), **_middle(found, used), **found}, used)


def _middle(found: dict[str, float], used: Counter[str]) -> dict[str, float]:
    """What is taken of a framework without rows: the median of those with."""
    middle = {}
    for field in FRAMEWORK_FIELDS:
        values = [v for name, v in found.items() if used[name] and name.endswith(f".{field}")]
        if values:
            middle[f"other.{field}"] = float(numpy.median(values))
    return middle


def _write(values: dict[str, float], used: Counter[str]) -> None:
    lines = [
        "# Constants of a step's time, written by scripts/fit_rates.py. `rows`: published runs of",
        "# the corpus's `fit` half that one was fitted on, from the prior in `source`.",
        "",
    ]
    for name, value in values.items():
        prior = prior_of(name)
        source = f"prior {prior.value:.3g}" + (", fitted" if used[name] else "")
        middle = name.startswith("other.")
        kept = value if used[name] or middle else prior.value
        source = "median of all frameworks with rows" if middle else source
        lines.append(
            f'[[rate]]\nname = "{name}"\nvalue = {kept:.4g}\nunit = "{prior.unit}"\n'
            f'source = "{source}"\nrows = {used[name]}\n'
        )
    OUT.write_text("\n".join(lines), encoding="utf-8")


def _others() -> dict[str, float]:
    """Constants of devices and frameworks that no published run tells of: priors."""
    kinds = ("bf16", "fp8", "mxfp8", "nvfp4", "tf32", "fp32")
    made = [f"products.other.{kind}" for kind in kinds]
    made += [f"attention.other.{kernel}" for kernel in ATTENTION]
    made += [
        f"{'other' if field in FRAMEWORK_FIELDS else 'shared'}.{field}"
        for field in list_names(Rates)
        if field not in DEVICE_FIELDS
    ]
    return {name: prior_of(name).value for name in made}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    if not OUT.exists() or any(name not in OUT.read_text() for name in _others()):
        _write(_others(), Counter())
    table = tabulate(time_rows(read_corpus()))
    fit = Fit(table)
    x = fit.solve(table.fit)
    write(fit, x, table.fit)
    error = numpy.abs(fit.seconds(x) / table.seconds - 1)
    for name, mask in (("fit", table.fit), ("test", ~table.fit)):
        print(f"{name}: {mask.sum()} rows, median {numpy.median(error[mask]):.1%} by row")


if __name__ == "__main__":
    main()
