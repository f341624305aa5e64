"""The join of a run folder, and the page made of it."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

import made_by_hand as made
from memfit import api
from memfit.catalog import find_device
from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB, MIB
from memfit.core.wording import COLOURS, INKS
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records import from_data, write_json
from memfit.records.ledger import Kind, Ledger
from memfit.records.request import Request
from memfit.records.results import Measurement, Run
from memfit.report.join import join, read_report
from memfit.report.page import render_page
from tiny_models import CONFIGS


def folder_of(path: Path, plan, certificate=None, run=None):
    write_json(path / "plan.json", plan)
    if certificate:
        write_json(path / "certificate.json", certificate)
    if run:
        write_json(path / "run.json", run)
    return path


def row(report, name):
    (found,) = [c for c in report.comparisons if c.name == name]
    return found


def test_a_run_folder_joins_on_the_digest(tmp_path):
    plan = made.plan()
    certificate, run = made.certificate(plan), made.run(plan)
    report = read_report(folder_of(tmp_path, plan, certificate, run))
    assert (report.plan, report.certificate, report.run) == (plan, certificate, run)
    peak = row(report, "memory.peak_allocated")
    measured = plan.ledger.peak + MIB
    assert (peak.predicted, peak.certified, peak.measured) == (
        plan.ledger.peak, plan.ledger.peak, measured)  # fmt: skip
    assert peak.error_predicted == peak.error_certified == plan.ledger.peak / measured - 1


def test_seconds_in_which_no_device_computes_so_much_are_refused():
    """They gave an MFU of several hundred per cent, beside the prediction's error."""
    plan = made.plan()
    device = find_device(plan.recipe.device)
    assert device.flops["bf16"] > 1
    run = made.run(plan)
    rate = run.measurements["time.tokens_per_second"]
    tokens = plan.recipe.global_batch * plan.recipe.sequence_length
    most = device.flops["bf16"] * plan.recipe.parallel.world * tokens

    def report_of(share):
        found = msgspec.structs.replace(rate, value=share * most / plan.time.model_flops_per_step)
        told = {**run.measurements, "time.tokens_per_second": found}
        return join(plan, None, msgspec.structs.replace(run, measurements=told))

    good, bad = report_of(0.99), report_of(1.01)
    assert (good.refused, row(good, "time.mfu").measured is None) == ("", False)
    assert "an MFU of 101% is no measurement" in bad.refused
    assert all(c.measured is None for c in bad.comparisons if c.name.startswith("time."))
    assert row(bad, "memory.peak_allocated").measured is not None
    assert "measured seconds are not shown" in render_page(bad, folder="runs/x")


WAITED = Measurement(value=0.5, unit="s", counter="the test")


def test_each_rank_is_held_against_its_own_prediction_and_waiting_against_the_plan():
    """Two stages: one holds the embedding, the other the head; the fuller one is certified."""
    request = from_data(
        {
            "model": {**CONFIGS["llama"], "vocab_size": 301},
            "weights": "random", "method": "full", "precision": "bf16-mixed", "micro_batch": 1,
            "task": {"sequence_length": 64, "global_batch": 4}, "parallel": {"pp": 2},
            "hardware": {"device": "h100-sxm", "count": 2}, "attention": "efficient",
        },
        Request, source="the test",
    )  # fmt: skip
    plan = api.plan(request, levers=False)
    run = msgspec.structs.replace(
        made.run(plan),
        ranks=({"backward": 30 * MIB, "load": MIB}, {"backward": 29 * MIB}),
        measurements={"time.exposed_communication_seconds": WAITED},
    )
    report = join(plan, made.certificate(plan), run)
    rows = [row(report, f"memory.rank.{rank}") for rank in range(2)]
    where = read_model(plan.recipe.model), plan.recipe, find_device("h100-sxm")
    own = [predict_memory(*where, rank).peak for rank in (0, 1)]
    assert [r.predicted for r in rows] == own
    assert own[0] != own[1]
    peak = report.certificate.memory.peak_allocated
    assert [r.certified for r in rows] == [peak if n == max(own) else None for n in own]
    assert [r.measured for r in rows] == [30 * MIB, 29 * MIB]
    waits = row(report, "time.exposed_communication_seconds")
    spans = {span.op: span.duration for span in plan.timeline.spans}
    assert (waits.predicted, waits.measured) == (spans["sending"] + spans["bubble"], 0.5)
    assert "<h3>Memory by rank" in render_page(report, folder="runs/first")
    assert ">rank 1 <code" in render_page(report, folder="runs/first")


def test_errors_are_signed_against_the_latest_source():
    plan = made.plan()
    certificate = made.certificate(plan, more=GIB)
    alone = row(join(plan, certificate, None), "memory.phase.backward")
    assert alone.error_predicted == plan.ledger.peak / (plan.ledger.peak + GIB) - 1 < 0
    assert alone.error_certified is None
    both = row(join(plan, certificate, made.run(plan)), "memory.phase.backward")
    assert both.error_certified > 0  # certified one GiB, measured one MiB more
    assert row(join(plan, None, None), "memory.phase.backward").error_predicted is None


def test_kinds_are_compared_at_one_instant_whatever_the_sources_peaks_are():
    """The run peaks in another phase than the plan: every column shows the run's phase."""
    plan = made.plan()
    run = made.run(plan)
    forward = tuple(
        msgspec.structs.replace(e, nbytes=e.nbytes * 9) if e.phase == "forward" else e
        for e in run.ledger.entries
    )
    run = msgspec.structs.replace(run, ledger=Ledger(entries=forward))
    found = row(join(plan, None, run), "memory.kind.activations")
    assert (found.predicted, found.measured) == (9 * GIB, 81 * GIB)
    gradients = [c.name for c in join(plan, None, run).comparisons if "gradients" in c.name]
    assert not gradients  # none are alive at the end of forward


def test_a_source_without_the_phase_says_nothing_rather_than_zero():
    plan = made.plan()
    run = msgspec.structs.replace(made.run(plan), ledger=Ledger(entries=()))
    found = row(join(plan, None, run), "memory.kind.gradients")
    assert found.predicted == 15 * GIB
    assert found.measured is None


def test_warnings_and_the_verdict_of_generating_are_on_the_page_and_only_where_there_are_some():
    plan = made.plan()
    certificate, run = made.certificate(plan), made.run(plan)
    plain = render_page(join(plan, certificate, run), folder="runs/x")
    assert "Warnings" not in plain
    assert "process of its own" not in plain
    later = msgspec.structs.replace(certificate.memory, verdict="does_not_fit", because="by <hand>")
    certificate = msgspec.structs.replace(certificate, generation=later)
    run = msgspec.structs.replace(run, warnings=("backward holds 2 GiB & more",))
    page = render_page(join(plan, certificate, run), folder="runs/x")
    assert "<li>backward holds 2 GiB &amp; more</li>" in page
    assert "by &lt;hand&gt;" in page


def test_measured_utilisation_follows_the_measured_tokens_a_second():
    """A step of rows that are shorter than planned is quick, and no better used for that."""
    plan = made.plan()
    run = made.run(plan)
    rate = run.measurements["time.tokens_per_second"]
    slower = msgspec.structs.replace(rate, value=plan.time.tokens_per_second / 4)
    told = {**run.measurements, "time.tokens_per_second": slower}
    found = row(join(plan, None, msgspec.structs.replace(run, measurements=told)), "time.mfu")
    assert found.measured == pytest.approx(0.41 / 4)


def test_a_folder_without_a_plan_is_refused_with_a_hint(tmp_path):
    with pytest.raises(InvalidRequest, match=r"no plan\.json") as caught:
        read_report(tmp_path)
    assert "memfit train" in caught.value.hint


@pytest.mark.parametrize("name", ["certificate", "run"])
def test_files_of_two_recipes_are_never_joined(tmp_path, name):
    plan = made.plan()
    other = msgspec.structs.replace(getattr(made, name)(plan), recipe_digest="0" * 16)
    with pytest.raises(InvalidRequest, match=f"{name}.json.* is of recipe 0000000000000000"):
        read_report(folder_of(tmp_path, plan, **{name: other}))


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    VOID = frozenset({"meta", "polyline", "br", "wbr", "link", "img"})

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def luminance(colour):
    """Of `#rgb` or `#rrggbb`, by WCAG 2.2's definition of relative luminance."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_kind_has_a_colour_and_an_ink_that_can_be_read_on_it():
    assert set(COLOURS) == set(INKS) == set(Kind)
    for kind, colour in COLOURS.items():
        low, high = sorted((luminance(colour), luminance(INKS[kind])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, kind


def test_every_table_of_the_page_can_be_scrolled_by_keyboard():
    """In a narrow window they are wider than it."""
    found = [keys for _, keys in Page(whole_page()).tags if keys.get("class") == "scroll"]
    names = [keys["aria-label"] for keys in found]
    assert len(names) == len(set(names)) > 5
    assert all((keys["tabindex"], keys["role"]) == ("0", "region") for keys in found)


def whole_page(**keys):
    plan = made.plan(data="text", **keys)
    report = join(plan, made.certificate(plan), made.run(plan), sample="x < y & z")
    return render_page(report, folder="runs/first")


def test_the_page_is_well_formed_and_holds_every_part():
    page = Page(whole_page())
    assert page.open == []
    for said in ("FITS", "Memory at the peak", "Instants", "Loss", "Predicted, certified, measured",
                 "Considered", "Certificate", "Asked and planned", "How to repeat", "x < y & z",
                 "memfit train runs/first/plan.json"):  # fmt: skip
        assert said in page.text


def test_the_page_asks_for_nothing_outside_itself():
    html = whole_page()
    page = Page(html)
    assert not {t for t, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base"}
    for _, attributes in page.tags:
        assert not {"src", "action", "srcset", "data"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")  # its own contents
        assert not [a for a in attributes if a.startswith("on")]
    assert not re.search(r"url\(|@import|https?:", html)
    (policy,) = [a["content"] for t, a in page.tags if "http-equiv" in a]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")


@pytest.mark.parametrize("place", ["model", "sample", "module", "folder", "environment", "task"])
def test_no_text_of_a_users_becomes_markup(place):
    name = f'{made.HOSTILE}"><img src=x>'
    plan = made.plan(name=name if place == "model" else "m", data=name if place == "task" else "")
    certificate = made.certificate(plan, module=name if place == "module" else "mlp")
    run = made.run(plan)
    if place == "environment":
        run = msgspec.structs.replace(run, environment={name: name})
    report = join(plan, certificate, run, sample=name if place == "sample" else "")
    page = Page(render_page(report, folder=name if place == "folder" else "runs/a"))
    assert not {t for t, _ in page.tags} & {"script", "img"}
    assert "<script>alert(" in page.text


def test_bars_share_one_scale_and_the_limit_stands_on_it():
    html = whole_page()
    (at,) = {float(m) for m in re.findall(r'class="limit" style="left:calc\(([\d.]+)%', html)}
    assert at == 100  # the limit is the largest of all
    plan = made.plan(usable=60 * GIB, verdict="does_not_fit")
    html = render_page(join(plan, None, None), folder="runs/a")
    (at,) = {float(m) for m in re.findall(r'class="limit" style="left:calc\(([\d.]+)%', html)}
    assert at == pytest.approx(100 * 60 * GIB / plan.ledger.peak, abs=1e-3)
    assert "DOES NOT FIT" in html


def test_a_run_without_losses_or_certificate_still_has_a_page():
    plan = made.plan(cuda=False)
    run = msgspec.structs.replace(made.run(plan), losses=(), evaluations=())
    assert isinstance(run, Run)
    assert "Certificate" not in Page(render_page(join(plan, None, run), folder="r")).text
    assert "not trained" in Page(render_page(join(plan, None, None), folder="r")).text
