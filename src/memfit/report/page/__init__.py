"""report.html: one self-contained page with the request, plan, certificate and measurements.

It opens from the disk with no network: no script, no font, no picture comes from elsewhere, and the
page's own Content-Security-Policy forbids it.
"""

from __future__ import annotations

import shlex

from memfit.core import units
from memfit.core.wording import VERDICTS, short_name, show_error, show_value
from memfit.plan.memory.verdict import needs
from memfit.records import to_data
from memfit.records.ledger import Ledger, Phase
from memfit.records.request import Request
from memfit.records.results import Memory, Report
from memfit.report.join import peak_phase, phase_seconds, warnings_of
from memfit.report.join import sections as compared
from memfit.report.page.parts import (
    contents,
    curve,
    dotted,
    key,
    pairs,
    phase_bars,
    section,
    stacked_bars,
    table,
    text,
)
from memfit.report.page.style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
TENSORS = 12


def render_page(report: Report, *, folder: str) -> str:
    """The whole page of a report; `folder` is how the commands that repeat the run name it."""
    sections = "".join(
        (
            _warnings(report),
            _memory(report),
            _instants(report),
            _rewards(report),
            _losses(report),
            _answers(report),
            _comparisons(report),
            _considered(report),
            _certificate(report),
            section("Sample", f"<pre>{text(report.sample)}</pre>" if report.sample else ""),
            _request(report),
            _repeat(report, folder),
        )
    )
    body = _header(report) + contents(sections) + sections
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>memfit: {text(report.title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def _figure(value: str, what: str) -> str:
    return f'<div class="figure"><b>{text(value)}</b><span>{text(what)}</span></div>'


def _header(report: Report) -> str:
    plan, run = report.plan, report.run
    memory = (report.certificate or plan).memory
    source = "certified" if report.certificate else "predicted"
    figures = [_figure(units.show_bytes(needs(memory)), f"{source} need")]
    if memory.usable is not None:
        figures.append(_figure(units.show_bytes(memory.usable), "may be used"))
    measured = {c.name: c.measured for c in report.comparisons}
    if (peak := measured.get("memory.peak_allocated")) is not None:
        figures.append(_figure(units.show_bytes(peak), "measured peak"))
    if (rate := measured.get("time.tokens_per_second")) is not None:
        figures.append(_figure(f"{rate:,.0f}", "tokens a second"))
    if run and (shown := run.rewards or run.losses):
        what = "reward" if run.rewards else "training loss"
        figures.append(_figure(f"{shown[0][1]:.3f} → {shown[-1][1]:.3f}", what))
    state = "not trained"
    if run is not None:
        state = f"{run.steps_done:,} steps, {run.state}"
    return (
        f'<header><h1>{text(report.title)}</h1><p class="soft">recipe '
        f"<code>{text(report.recipe_digest)}</code>, {text(state)}</p>"
        f'<p><span class="verdict {memory.verdict}" role="status">{VERDICTS[memory.verdict]}</span>'
        f"{text(_room(memory))}</p>"
        f'<div class="figures">{"".join(figures)}</div></header>\n'
    )


def _warnings(report: Report) -> str:
    items = "".join(f"<li>{text(line)}</li>" for line in warnings_of(report))
    return section("Warnings", f"<ul>{items}</ul>" if items else "")


def _room(memory: Memory) -> str:
    if memory.usable is None:
        return "how much may be used is unknown"
    left = memory.usable - needs(memory)
    return f"{units.show_bytes(abs(left))} {'to spare' if left >= 0 else 'too much'}"


def _ledgers(report: Report) -> list[tuple[str, Ledger, dict[str, int]]]:
    """Each source with its ledger and its phases' peaks, in the order in which they were made."""
    plan, certificate, run = report.plan, report.certificate, report.run
    predicted = {str(p): plan.ledger.total(p) for p in plan.ledger.phases}
    found = [("predicted", plan.ledger, predicted)]
    if certificate is not None:
        found.append(("certified", certificate.ledger, certificate.phases))
    if run is not None and run.ledger.entries:
        found.append(("measured", run.ledger, run.phases))
    return found


def _memory(report: Report) -> str:
    phase = peak_phase(report.plan, report.certificate, report.run)
    sources = _ledgers(report)
    held = [(name, ledger.by_kind(phase)) for name, ledger, _ in sources if phase in ledger.phases]
    usable = report.plan.memory.usable
    bars = stacked_bars(
        [(name, {str(k): n for k, n in kinds.items()}) for name, kinds in held], limit=usable
    )
    kinds = [k for k in dict.fromkeys(k for _, sums in held for k in sums)]
    rows = [
        (key(kind), *(text(units.show_bytes(sums.get(kind, 0))) for _, sums in held))
        for kind in kinds
    ]
    limit = (
        f'<p class="soft small">The thick line is the limit: {units.show_bytes(usable)} '
        f"({text(report.plan.memory.because)}). All bars show the instant "
        f"“{text(short_name(phase))}”.</p>"
        if usable is not None
        else ""
    )
    names = [name for name, _ in held]
    return section(
        "Memory at the peak",
        bars,
        limit,
        table(["kind", *names], rows, numbers=len(names), label="kinds at the peak"),
    )


def _instants(report: Report) -> str:
    sources = _ledgers(report)
    full = max((n for _, _, peaks in sources for n in peaks.values()), default=1)
    pieces = []
    for name, _, peaks in sources:
        ordered = {str(p): peaks[p] for p in Phase if p in peaks}
        top = max(ordered, key=ordered.__getitem__, default="")
        pieces.append(
            f"<div><h3>{text(name)}</h3>{phase_bars(ordered, full=full, peak_phase=top)}</div>"
        )
    return section("Instants: the peak of each phase", f'<div class="two">{"".join(pieces)}</div>')


def _rewards(report: Report) -> str:
    """Of a run that samples answers: rewards, seconds of each part of an iteration, answers."""
    run = report.run
    if run is None or not run.rewards:
        return ""
    parts = phase_seconds(run)
    seconds = [(text(name), text(show_value(m.value, m.unit))) for name, m in parts.items()]
    answers = [
        (
            text(str(a.step)), f"<code>{text(a.prompt)}</code>",
            f"<code>{text(a.completion)}</code>",
            "none" if a.reward is None else text(f"{a.reward:.3g}"),
        )
        for a in run.answers
    ]  # fmt: skip
    drawn = section("Reward", curve(run.rewards, (), "reward"))
    divergence = "KL divergence from the reference, nats a token"
    drawn += section(divergence, curve(run.divergences, (), "KL divergence"))
    drawn += section("Loss of the values", curve(run.value_losses, (), "loss of the values"))
    timed = table(["part", "median"], seconds, numbers=1, label="seconds of an iteration")
    heads = ["step", "prompt", "answer", "reward"]
    sampled = table(heads, answers, numbers=1, label="sampled answers")
    return drawn + section("Seconds of an iteration", timed) + section("Sampled answers", sampled)


def _answers(report: Report) -> str:
    """Of a run that answered a few held-out prompts while it trained: the first and the last."""
    run = report.run
    if run is None or run.rewards or not run.answers:
        return ""
    rows = [
        (text(str(a.step)), f"<code>{text(a.prompt)}</code>", f"<code>{text(a.completion)}</code>")
        for a in run.answers
    ]
    heads = ["step", "prompt", "answer"]
    return section("Sampled answers", table(heads, rows, numbers=1, label="sampled answers"))


def _losses(report: Report) -> str:
    run = report.run
    if run is None or run.rewards:  # a policy's loss says nothing of its progress
        return ""
    held_out = ""
    if run.evaluations:
        shown = ", ".join(f"{v:.3f} at step {s:,}" for s, v in run.evaluations[-3:])
        held_out = f'<p class="soft small">Held-out loss (dashed): {text(shown)}.</p>'
    return section("Loss", curve(run.losses, run.evaluations), held_out)


def _comparisons(report: Report) -> str:
    heads = (
        "",
        "predicted",
        "certified",
        "measured",
        "error of prediction",
        "error of certificate",
    )
    pieces = []
    for title, rows in compared(report.comparisons):
        cells = [
            (
                f'{text(short_name(r.name))} <code class="soft">{text(r.name)}</code>',
                *(text(show_value(v, r.unit)) for v in (r.predicted, r.certified, r.measured)),
                text(show_error(r.error_predicted)),
                text(show_error(r.error_certified)),
            )
            for r in rows
        ]
        pieces.append(f"<h3>{text(title)}</h3>{table(heads, cells, numbers=5, label=title)}")
    legend = (
        '<p class="soft small">Errors are signed: predicted / truth - 1, where the truth is the '
        "measurement, or the certificate where nothing was measured; 0 is exact equality.</p>"
    )
    return section("Predicted, certified, measured", *pieces, legend)


def _considered(report: Report) -> str:
    rows = [
        (
            "✔" if c.chosen else "",
            text(c.label),
            text(c.because),
            text(
                ("" if c.exact else "~")
                + units.show_bytes(c.peak_allocated if c.device_total is None else c.device_total)
            ),
            f"{c.relative_time:.2f}x",
        )
        for c in report.plan.considered
    ]
    heads = ("", "recipe", "why", "needs", "time")
    return section("Considered", table(heads, rows, numbers=2, label="recipes considered"))


def _certificate(report: Report) -> str:
    made = report.certificate
    if made is None:
        return ""
    tensors = [
        (text(t.kind), f"<code>{dotted(t.module)}</code>", f"<code>{dotted(t.op)}</code>",
         text(units.show_bytes(t.nbytes)))
        for t in made.at_peak[:TENSORS]
    ]  # fmt: skip
    bounds = "".join(f"<li>{text(b)}</li>" for b in made.bounds)
    later = made.generation
    generating = ""
    if later is not None:
        verdict = (
            f"{VERDICTS[later.verdict]}, needs {units.show_bytes(needs(later))}; {later.because}"
        )
        generating = f"<h3>Generating, in a process of its own</h3><p>{text(verdict)}</p>"
    return section(
        "Certificate",
        f"<p>The trainer's own step ran on fake tensors in {units.show_seconds(made.seconds)}. "
        "Largest tensors alive at the peak:</p>",
        table(
            ("kind", "module", "made by", "bytes"),
            tensors,
            numbers=1,
            label="largest tensors at the peak",
        ),
        generating,
        f"<h3>Holds for</h3><ul>{bounds}</ul>" if bounds else "",
    )


def _request(report: Report) -> str:
    request = _flat(to_data(report.plan.request))
    usual = _flat(to_data(Request(model="")))
    stated = {key: value for key, value in request.items() if usual.get(key) != value}
    rest = {key: value for key, value in request.items() if key not in stated}
    left = (
        f"<details><summary>Left to memfit, or at its default: {len(rest)} keys</summary>"
        f"{pairs(rest, label='the rest of the request')}</details>"
    )
    made = pairs(_flat(to_data(report.plan.recipe)), label="recipe")
    return section(
        "Asked and planned",
        f'<div class="two"><div><h3>Request</h3>{pairs(stated, label="request")}{left}</div>'
        f"<div><h3>Recipe</h3>{made}</div></div>",
    )


def _flat(data: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted keys; a model's config is left to request.json, where it is whole."""
    found: dict[str, object] = {}
    for name, value in data.items():
        if name == "config":
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = _shown(value)
    return found


def _shown(value: object) -> object:
    """As request.yaml would have it; - for nothing."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value in ("", None) else value


def _repeat(report: Report, folder: str) -> str:
    file = shlex.quote(f"{folder}/plan.json")
    commands = [f"memfit certify {file}"]
    if report.plan.request.task.data:
        commands.append(f"memfit train {file} --folder {shlex.quote(folder + '-again')}")
    commands.append(f"memfit report {shlex.quote(folder)}")
    versions = (report.certificate or report.plan).versions
    environment = report.run.environment if report.run else {}
    return section(
        "How to repeat",
        f"<pre>{text(chr(10).join(commands))}</pre>",
        "<h3>Versions and environment</h3>",
        pairs({**versions, **environment}, label="versions and environment"),
    )
