"""docs/trust.md and README's headlines: rows whose figures come from files are written from them.

A row is found by its first cell; a row that this file does not know is left as it is.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_claims
import gpu_page
from peers_page import speed

from memfit.accuracy.memory_errors import Accuracy, Compared, summarise
from memfit.accuracy.time_errors import NEAR, TimeAccuracy, TimeGroup

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "trust.md"
RESULTS = ROOT / "bench" / "results"

Cells = tuple[str, str, str, str]  # what, against what, figure, file


def pages(found: Accuracy, times: TimeAccuracy) -> dict[Path, str]:
    """Both pages with today's figures. ValueError where one lacks a row."""
    return {
        PAGE: put(PAGE, rows(found, times)),
        README: put(README, headlines(found, times)),
    }


def put(page: Path, rows: Iterable[tuple[str, ...]]) -> str:
    """The page with these rows in the place of those that begin alike."""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for cells in rows:
        places = [i for i, line in enumerate(lines) if line.startswith(f"| {cells[0]} |")]
        if len(places) != 1:
            raise ValueError(f"{page.name} has {len(places)} rows `{cells[0]}`")
        lines[places[0]] = f"| {' | '.join(cells)} |\n"
    return "".join(lines)


def headlines(found: Accuracy, times: TimeAccuracy) -> tuple[tuple[str, str], ...]:
    """README's five figures, from the same files."""
    _, exact_against, exact, _ = _exactness()
    _, runs, errors, _ = next(iter(_published(found)))
    _, steps, spread, _ = next(iter(_seconds(times)))
    return (
        ("certified, beside the same step on real tensors",
         f"{exact}: {exact_against.partition(': ')[2]}"),
        *_on_gpus(),
        ("predicted peaks of other trainers' steps", f"{errors}: {runs.partition(' (')[0]}"),
        ("predicted step times", f"{spread.partition(';')[0]}: {steps.partition(';')[0]}"),
        ("seconds of CPU, as typed", _typed()),
    )  # fmt: skip


def _on_gpus() -> Iterable[tuple[str, str]]:
    """Certificates beside the allocator's and the driver's own counts, a line a GPU."""
    rows = [r for r in gpu_claims.read() if r["slice"] in gpu_claims.CERTIFIED]
    rows = [r for r in rows if "certified" in r]
    for name in sorted({row["environment"]["device"] for row in rows}):
        off = {
            what: [
                abs(row["certified"][what] / row["measured"][what] - 1)
                for row in rows
                if row["environment"]["device"] == name
            ]
            for what in ("peak_allocated", "device_total")
        }
        allocated, total = off["peak_allocated"], off["device_total"]
        yield (
            f"certified, beside a real {name}",
            f"allocated bytes within {max(allocated):.2%} ({allocated.count(0)} of"
            f" {len(allocated)} recipes to the byte), the device's within {max(total):.1%}",
        )


def _typed() -> str:
    found = _read("cold_start.json")
    quick, certified = found["beside python -c pass"], found['beside python -c "import torch"']
    plan = next(row for name, row in quick.items() if name.startswith("memfit plan"))
    cold = certified["memfit certify llama-3.1-8b --no-cache"]
    cached = next(row for name, row in certified.items() if name.endswith("from the cache"))
    seconds = [f"{row['cpu_ms'] / 1e3:.1f}" for row in (plan, cold, cached)]
    return (
        f"`memfit plan` {seconds[0]}; `memfit certify llama-3.1-8b` {seconds[1]}, which is"
        f" {cold['cpu_ratio']:.1f} times `import torch`, and {seconds[2]} from the cache"
    )


def rows(found: Accuracy, times: TimeAccuracy) -> tuple[Cells, ...]:
    """Every row of which a file has the figures."""
    return (
        _exactness(), _parity(), *_published(found), *_seconds(times), *_search(),
        _block(), _step(), _prediction(), _certificates(), _reserved(), _containers(),
        gpu_page.trust(found),
    )  # fmt: skip


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _exactness() -> Cells:
    name = "exactness_cpu.jsonl"
    every = _lines(name)
    worst = max(abs(n) for row in every for n in row["difference"].values())
    families = len({row["family"] for row in every})
    against = f"the same step on real CPU tensors: {len(every)} recipes, {families} families"
    figure = f"{worst} bytes of difference in every phase of the step"
    return "certified peak of live tensors", against, figure, f"`bench/results/{name}`"


def _parity() -> Cells:
    name = "allocator_parity_public.json"
    every = _read(name)["rows"]
    equal = sum(row["divergence"] is None for row in every)
    against = (
        f"{len(every)} public recordings of real GPUs (native allocator, one stream),"
        f" {sum(row['entries'] for row in every):,} entries"
    )
    figure = "every address and segment equal" if equal == len(every) else f"{equal} of them equal"
    return "the allocator's replay", against, figure, f"`bench/results/{name}`"


def _published(found: Accuracy) -> Iterable[Cells]:
    file = "`docs/accuracy.md`"
    other, golden = _halves(c for c in found.compared if c.headline)
    yield (
        "predicted peak of other frameworks' steps",
        f"{len(other)} published runs (NeMo, DeepSpeed, nanotron, torchtitan, torchtune, litgpt,"
        " peft, …) whose memory counter is known",
        _errors(other),
        file,
    )
    what = f"{len(golden)} runs on A100, H100, GB200"
    yield "the same, of Megatron-LM's golden values", what, _errors(golden), file
    right = sum(o.right for o in found.outcomes)
    wrong = sum(o.verdict == "fits" for o in found.outcomes)
    figure = f"{right} of {len(found.outcomes)}; {wrong or 'none'} said to fit"
    yield "runs that ran out of memory", "predicted to", figure, file


def _halves(compared: Iterable[Compared]) -> tuple[list[Compared], list[Compared]]:
    every = list(compared)
    return gpu_page.of_others(every), [c for c in every if c.source == gpu_page.GOLDEN]


def _errors(compared: list[Compared]) -> str:
    g = summarise("", compared)
    if g is None:
        raise ValueError("the corpus has no such figures")
    return f"median {g.median:.1%}, 90 % within {g.p90:.1%}, bias {g.bias:+.1%}"


def _seconds(times: TimeAccuracy) -> Iterable[Cells]:
    file = "`docs/accuracy_time.md`"
    every, test = times.headline, times.test
    if every is None or test is None or times.tau is None:
        raise ValueError("the corpus has no times")
    yield (
        f"predicted step time of {every.sources} sources, one weight each",
        f"{every.rows:,} published steps; of those, {test.rows} that no constant was fitted on",
        f"{_spread(every)}; {_spread(test)}",
        file,
    )
    near = sum(c.near for c in times.choices)
    yield (
        "which layout is the fastest",
        f"{len(times.choices)} jobs of which several layouts were published",
        f"within {NEAR:.0%} of the fastest in {near}; order inside {len(times.sweeps)} sweeps:"
        f" Kendall's tau {times.tau:.2f}",
        file,
    )


def _spread(g: TimeGroup) -> str:
    return f"median {g.median:.1%}, 90 % within {g.p90:.1%}"


def _search() -> Iterable[Cells]:
    found = _read("search.json")
    cases, file = found["cases"], "`bench/results/search.json`"
    large = ("llama-3.1-405b on 16,384 h100-sxm", "deepseek-v3 on 16,384 h100-sxm")
    of = [f"{cases[name]['candidates'] / 1e6:.1f} million" for name in large]
    small = "llama-3.1-8b on 8 h100-sxm"
    seconds = [f"{cases[name]['search_seconds']:.1f} s" for name in (*large, small)]
    yield (
        "the best mesh, warm",
        f"405B ({of[0]} configurations) and 671B ({of[1]}) on 16,384 GPUs; 8B on 8",
        f"{', '.join(seconds)} of one core",
        file,
    )
    peers = [
        found["peers"][name]["times_memfit"] for name in ("llm_analysis", "calculon", "simumax")
    ]
    own = 1e6 / cases["llama-2-70b on 512 h100-sxm"]["a_second_of_cpu"]
    yield (
        "a configuration, bytes and seconds, in such a search",
        "llm-analysis, calculon, SimuMax, asked in the same run",
        f"{own:.1f} µs; {' and '.join(f'{n:,}' for n in peers)} times that".replace(
            " and ", ", ", 1
        ),
        file,
    )


def _block() -> Cells:
    lean, eager = (_read("lean.json")["rows"]["bf16"][name] for name in ("lean", "eager"))
    return (
        "what a Llama block keeps in bf16, and its time",
        "Hugging Face's eager block, on a CPU",
        f"{lean['bytes']:.1f} against {eager['bytes']:.1f} bytes a token and hidden unit,"
        f" {lean['time']:.2f} times the time",
        "`bench/results/lean.json`",
    )


def _step() -> Cells:
    trainers = _read("peers.json")["sizes"]["20M"]["modes"]["full-fp32"]["trainers"]
    own = trainers["memfit-compiled"]
    peers = {name: row for name, row in trainers.items() if _is_peer(name, row)}
    each = [f"{1 / speed(own, row):.2f}" for row in peers.values()]
    saved = [f"{own['saved_mib'] / row['saved_mib']:.0%}" for row in peers.values()]
    return (
        "a small model's step in fp32 and what it saves for the backward, `compile: blocks`",
        f"{', '.join(peers)} in the same run on a CPU",
        f"{', '.join(each)} of their time trained whole; {', '.join(saved)} of their bytes",
        "`docs/peers.md`",
    )


def _is_peer(name: str, row: dict[str, Any]) -> bool:
    return not name.startswith("memfit") and "missing" not in row


def _prediction() -> Cells:
    found = _read("predict_speed.json")
    peers = {name: row["wall"]["median_ms"] for name, row in found["peers"].items()}
    slow = peers.pop("SimuMax")
    names = ", ".join(sorted(peers, key=str.lower))
    return (
        "a prediction, warm, by `api.predict`",
        f"SimuMax {slow:.0f} ms; {names} {min(peers.values()):.2f} to {max(peers.values()):.1f} ms"
        " without instants",
        f"{found['api.predict']['wall']['median_ms']:.1f} ms in the median, its time included",
        "`bench/results/predict_speed.json`",
    )


def _certificates() -> Cells:
    alone, ranks = _read("certify.json")["certificates"], _read("ranks.json")["rows"]
    small = statistics.median(row["wall"] for row in alone if row["model"] == "llama-3.1-8b")
    large = [row["wall"] for row in alone if row["model"] == "llama-3-70b"]
    world = max(
        row["wall_seconds"] for row in ranks
        if row["model"] == "llama-3.1-70b" and row["dp_shard"] == 512
    )  # fmt: skip
    return (
        "seconds to certify, imports included, 2 cores",
        "Llama 8B · 70B · 70B on 512 ranks",
        f"{small:.0f} s · {min(large):.0f} to {max(large):.0f} s · {world:.0f} s",
        "`bench/results/certify.json`, `ranks.json`",
    )


def _reserved() -> Cells:
    name = "plan_vs_certificate.json"
    found, rows = _read(name), _lines(f"{name}l")
    made = [row for row in rows if "certified" in row]
    off = [abs(r["predicted"]["peak_reserved"] / r["certified"]["peak_reserved"] - 1) for r in made]
    over, models = len(found["exceed_usable"]), len({row["model"] for row in made})
    cards = max(row["count"] * row["nodes"] for row in made)
    return (
        "reserved bytes of a plan",
        f"its certificate's: {len(made)} plans of {models} catalogue models, whole and with LoRA,"
        f" each on the smallest offer that the plan says fits, up to {cards} GPUs",
        f"{over or 'none'} of them beyond the usable memory; equal in {off.count(0)}, the furthest"
        f" {max(off):.2%} off",
        f"`bench/results/{name}`",
    )


def _containers() -> Cells:
    rows = _lines("limits_cpu.jsonl")
    off = [row["predicted"] / row["measured"] - 1 for row in rows]
    limits = [row["limit"] / 2**30 for row in rows]
    return (
        f"`memfit train` in control groups of {min(limits):g} to {max(limits):g} GiB",
        "anonymous memory of the whole command, on a CPU",
        f"{sum(row['kills'] == 0 for row in rows)} of {len(rows)} end; predicted within"
        f" {max(map(abs, off)):.1%}",
        "`bench/results/limits_cpu.jsonl`",
    )


def _lines(name: str) -> list[Any]:
    return [json.loads(n) for n in (RESULTS / name).read_text(encoding="utf-8").splitlines()]
