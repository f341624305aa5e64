"""Explore, timeline, runs, export and budget in a real browser, and the report of a real run."""

import json
import shutil
from contextlib import chdir
from itertools import pairwise
from urllib.parse import quote, urlencode

import pytest
from looking import AXE, SMALL, TINY, check_look, find_barriers, opened, watched
from tabbing import tab_to

from memfit import api
from memfit.allocator.tape import Event
from memfit.certify import in_this_process
from memfit.certify.evidence.recording import Recording
from memfit.core import units
from memfit.records import from_data, read_json
from memfit.records.ledger import Phase
from memfit.records.request import Request
from memfit.records.results import Certificate, Report
from memfit.report.curve import draw_curve
from memfit.report.page.timeline import render_timeline
from memfit.screens.budget import show_figure
from memfit.screens.widgets.memory import parts_of
from memfit.ui.asking import read_query
from typed_commands import quick

TEXT = "The cat sat on a mat while the rain fell over old hills. " * 20


@pytest.fixture(scope="session")
def run(server, tmp_path_factory):
    """The folder of a real run of a few steps on this machine's processor."""
    place = tmp_path_factory.mktemp("asked")
    (place / "data").mkdir()
    for number in range(4):
        (place / "data" / f"{number}.txt").write_text(f"Chapter {number}. {TEXT}")
    asked = {
        "model": {"name": "tiny", **TINY}, "weights": "random", "method": "full",
        "hardware": {"device": "cpu"}, "limits": {"memory": "1 GiB"},
        "task": {"data": "data", "sequence_length": 64, "global_batch": 4, "steps": 5},
    }  # fmt: skip
    (place / "request.json").write_text(json.dumps(asked))
    folder = server.runs / "first"
    with chdir(place), in_this_process():
        code, _, said = quick("train", "request.json", "--folder", folder, "--quiet")
    assert code == 0, said
    return folder


def test_axe_is_there_where_node_is():
    """`make test` installs it; without Node nothing is judged, and that is said."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make page-tools")


def test_explore_says_why_each_was_not_chosen(browser, server):
    asked = "&".join((SMALL, "_why_not=micro_batch%3D16", "_offers=rtx-4090,rtx-3090"))
    with opened(browser, server, f"explore?{asked}") as page:
        page.wait_for_selector("#why-answer")
        page.wait_for_selector("[aria-label=Offers] td")
        request = api.read("pythia-70m", device="rtx-4090")
        plan = api.plan(request)
        own = len(plan.considered) + len(plan.levers)  # levers come after the rest
        page.wait_for_selector(f"[aria-label=Considered] tbody tr:nth-child({own})")
        rows = page.locator("[aria-label=Considered] tbody tr").all_text_contents()
        assert len(rows) == len(plan.considered) + len(plan.levers)
        for row in (*plan.considered, *plan.levers):
            assert any(row.label in said and row.because in said for said in rows), row
        answer = api.why_not(request, {"micro_batch": 16})
        assert page.text_content("#why-answer") == (
            f"{answer.answer.replace('_', ' ')}: {'; '.join(answer.because)}"
        )
        found = api.compare(api.read("pythia-70m"), "rtx-4090,rtx-3090")
        offers = page.locator("[aria-label=Offers] tbody tr").all_text_contents()
        for row, said in zip(found.rows, offers, strict=True):
            assert f"1 x {row.offer.device}" in said
            assert row.because in said
            assert units.show_bytes(row.needs) in said
        page.check("#only-fits")
        fitting = [row for row in (*plan.considered, *plan.levers) if row.fits]
        page.wait_for_function(
            "(n) => document.querySelectorAll('[aria-label=Considered] tbody tr').length === n",
            arg=len(fitting),
        )
        assert "_fits=1" in page.url
        page.get_by_role("radio", name="recompute=full, left").check()
        page.fill("#two_right", "hardware.device=a100-sxm-80; task.sequence_length=512")
        page.keyboard.press("Enter")
        show_two(page)
        page.reload()  # the address is the whole state
        show_two(page)
        check_look(page, "explore")
        page.fill("#two_right", "nonsense")
        page.keyboard.press("Enter")
        assert "cannot read `nonsense`" in page.text_content("#two .trouble")


def show_two(page):
    """That two freely chosen plans stand there with the figures of `memfit plan`."""
    page.wait_for_selector("[aria-label='Left and right'] td")
    rows = page.locator("[aria-label='Left and right'] tbody tr").evaluate_all(  # at once
        "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => cell.textContent))"
    )
    shown = {cells[0]: cells[1:] for cells in rows if cells}
    wanted = (
        {"recompute": "full"},
        {"hardware.device": "a100-sxm-80", "task.sequence_length": 512},
    )
    plans = [
        api.plan(
            api.read("pythia-70m", changes={"hardware.device": "rtx-4090", **own}), levers=False
        )
        for own in wanted
    ]
    sizes = [plan.memory.device_total for plan in plans]
    assert shown["needs"][:2] == [units.show_bytes(size) for size in sizes]
    word = "more" if sizes[1] > sizes[0] else "less"
    assert shown["needs"][2] == f"{units.show_bytes(abs(sizes[1] - sizes[0]))} {word}"
    assert shown["one step"][:2] == [units.show_seconds(p.time.step_seconds) for p in plans]
    kinds = [dict(parts_of(plan.memory)) for plan in plans]
    for kind in {*kinds[0], *kinds[1]}:
        assert shown[f"– {kind.replace('_', ' ')}"][:2] == [
            units.show_bytes(own.get(kind, 0)) for own in kinds
        ]
    said = page.text_content("[aria-label='Keys that differ']")
    assert "recompute" in said
    assert "sequence_length" in said
    assert "seed" not in said


RANKS = {
    "model": json.dumps(TINY), "hardware.device": "rtx-4090", "hardware.count": "2",
    "weights": "random", "method": "full", "task.steps": "3", "micro_batch": "64",
    "task.global_batch": "128",
}  # fmt: skip


def test_the_timeline_is_the_certificates(browser, server):
    """Of many ranks that of their plan, with what each stream holds below."""
    with opened(browser, server, f"timeline?{urlencode(RANKS)}") as page:
        page.wait_for_selector("#seconds .bar")  # predicted, before anything is certified
        tab_to(page, "#certify")
        page.keyboard.press("Enter")
        page.wait_for_selector("#curve")
        assert page.evaluate("document.activeElement.id") == "certify"  # it was busy, and is kept
        reading = page.text_content("#reading")
        assert "(the peak)" in reading
        tab_to(page, "#curve")
        page.keyboard.press("ArrowLeft")
        page.wait_for_function(
            "(old) => document.querySelector('#reading').textContent !== old", arg=reading
        )
        page.keyboard.press("Home")
        page.wait_for_function(
            "(old) => document.querySelector('#reading').textContent === old", arg=reading
        )
        tab_to(page, "[aria-label='Alive at the peak']")  # the curve takes arrows, and is no trap
        rows = page.locator("[aria-label='Alive at the peak'] tbody tr").all_text_contents()
        assert any(".py:" in row and "model.layers" in row for row in rows), rows[:4]
        lanes = page.locator("#streams .lane p").all_text_contents()
        assert lanes[0].startswith("computing")
        assert any("all gather" in lane for lane in lanes[1:])
        check_look(page, "timeline")
    with opened(browser, server, f"timeline?{SMALL}", token=False) as page:
        page.click("#certify")
        assert "the token is missing" in page.text_content(".trouble")


def test_of_anothers_step_the_timeline_is_what_is_predicted(browser, server):
    """Its pipeline piece by piece, and no certificate."""
    more = {"framework": "megatron", "parallel": "{pp: 2}", "task.sequence_length": "128"}
    with opened(browser, server, f"timeline?{urlencode({**RANKS, **more})}") as page:
        page.wait_for_selector("#strip")
        assert "there is none of megatron's" in page.text_content("#no-certificate")
        assert page.locator("#certify").count() == 0
        plan = api.plan(read_query(tuple({**RANKS, **more}.items())), levers=False)
        strip = api.draw_pipeline(plan)
        rows = page.locator("[aria-label='Ranks of the pipeline'] tbody tr").all_text_contents()
        for slots, row in zip(strip.ranks, rows, strict=True):
            works = sum(slot.end - slot.start for slot in slots)
            assert units.show_seconds(works) in row
        tab_to(page, "#strip")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelector('#piece').textContent.startsWith('rank 1')")
        assert find_barriers_here(page) == []


def find_barriers_here(page):
    """In the dark and narrow, where most goes wrong; nothing sticks out."""
    if not AXE.exists():
        return []
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 320, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    return find_barriers(page)


def test_a_run_is_followed_and_compared(browser, server, run):
    with opened(browser, server, "run") as page:
        page.get_by_role("checkbox", name="first").check()
        page.wait_for_selector("[aria-label='Comparisons of first'] td")
        report = read_json(run / "report.json", Report)
        assert "step 5 of 5, finished" in page.text_content("main")
        rows = page.locator("[aria-label='Comparisons of first'] tbody tr").all_text_contents()
        assert len(rows) == len(report.comparisons)
        (peak,) = [c for c in report.comparisons if c.name == "memory.peak_allocated"]
        assert units.show_bytes(peak.measured) in next(r for r in rows if peak.name in r)
        assert page.locator(".chart polyline.line").count() == 3
        check_look(page, "run")


def test_a_plan_is_exported_as_the_command_line_writes_it(browser, server, tmp_path):
    with opened(browser, server, f"export?{SMALL}&_to=axolotl") as page:
        plan = api.plan(api.read("pythia-70m", device="rtx-4090"), levers=False)
        made = api.export(plan, "axolotl")
        (name,) = made.files
        page.wait_for_selector("pre.file")
        assert page.text_content("pre.file") == made.files[name]
        with page.expect_download() as got:
            page.get_by_role("button", name=f"Download {name}").click()
        got.value.save_as(tmp_path / name)
        assert (tmp_path / name).read_text() == made.files[name]
        check_look(page, "export")
        page.select_option("#target", "slurm")
        page.wait_for_function(
            "() => document.querySelector('pre.file')?.textContent.includes('SBATCH')"
        )


def test_move_one_figure_of_a_budget_and_the_others_follow(browser, server):
    with opened(browser, server, "budget?_b_parameters=7B&_b_devices=8&_b_device=h100-sxm") as page:
        page.wait_for_selector("[aria-label=Budget] td")
        page.focus("#budget-devices-range")
        page.keyboard.press("End")
        page.wait_for_function("() => location.hash.includes('_b_devices=100000')")
        known = {"parameters": "7B", "devices": "100000", "device": "h100-sxm"}
        found = api.budget(**known)
        shown = show_figure("time", found.figures["time"])
        page.wait_for_function(
            "(time) => document.querySelector('[aria-label=Budget]').textContent.includes(time)",
            arg=shown,
        )
        page.fill("#budget-cost-text", "1 apple")
        page.keyboard.press("Tab")
        page.wait_for_selector(".trouble")
        assert "cannot read `1 apple` as an amount of money" in page.text_content(".trouble")
        page.get_by_label("let Money follow").click()
        page.wait_for_selector("[aria-label=Budget] td")
        check_look(page, "budget")


def test_the_report_of_a_real_run_opens_from_the_disk(browser, run):
    """No server: nothing but the file itself is asked for."""
    report = read_json(run / "report.json", Report)
    address = f"file://{quote(str(run / 'report.html'))}"
    with watched(browser, address) as page:
        page.goto(address)
        text = page.text_content("main")
        for said in ("FITS", "Memory at the peak", "Instants", "Loss", "Predicted, certified",
                     "Certificate", "Asked and planned", "How to repeat"):  # fmt: skip
            assert said in text
        for row in report.comparisons:
            assert row.name in text
        titles = page.locator("section h2").all_text_contents()
        assert page.locator("nav a").all_text_contents() == titles
        page.click("nav a >> nth=-1")
        page.wait_for_function("() => location.hash === '#how-to-repeat'")
        check_look(page, "report")


def test_the_page_of_a_certified_step_is_read_on_a_telephone(browser, run):
    """Of the real run's certificate; its table is scrolled along, not broken into letters."""
    certificate = read_json(run / "certificate.json", Certificate)
    tensors = {n: tensor for n, tensor in enumerate(certificate.at_peak)}
    recording = Recording(
        events=tuple(Event(n, tensor.nbytes) for n, tensor in tensors.items()), marks=(1,),
        stretches=(Phase.LOAD, Phase.FORWARD), tensors=tensors, settings=None,
    )  # fmt: skip
    path = run / "drawn.html"
    path.write_text(render_timeline(draw_curve(recording), certificate), encoding="utf-8")
    address = f"file://{quote(str(path))}"
    with watched(browser, address) as page:
        page.goto(address)
        assert "(the peak)" in page.text_content("#read")
        page.set_viewport_size({"width": 320, "height": 900})
        assert find_barriers_here(page) == []
        lines = page.evaluate(
            "() => Math.max(...[...document.querySelectorAll('td code')].map((cell) =>"
            " new Set([...cell.getClientRects()].map((line) => line.top)).size))"
        )
        assert lines <= 4
        spans = page.evaluate(
            "() => [...document.querySelectorAll('.x')].map((at) => at.getBoundingClientRect())"
            ".filter((box) => box.width).map((box) => [box.left, box.right])"
        )
        assert all(left[1] < right[0] for left, right in pairwise(sorted(spans)))


def test_a_pasted_config_is_the_request_with_it(server):
    """What the timeline asks for above is what `memfit plan request.json` reads."""
    keys = (("model", json.dumps(TINY)), ("task.steps", "3"), ("limits.memory", "1 GiB"))
    stated = {"model": TINY, "task": {"steps": 3}, "limits": {"memory": "1 GiB"}}
    assert read_query(keys) == from_data(stated, Request, source="a test")


def test_a_run_that_samples_shows_rewards_and_answers_and_why_it_ended(browser, server, run):
    """The real run's files with what a sampled run has beside: the page draws what rows hold."""
    folder = server.runs / "sampled"
    shutil.copytree(run, folder)
    made = json.loads((folder / "run.json").read_text())
    answer = {"step": 2, "prompt": "2+1=", "completion": "3\n<b>", "reward": 0.5}
    made |= {"ended_early": "`own.py:stop` asked for it", "answers": [answer]}
    (folder / "run.json").write_text(json.dumps(made))
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"reward": row["step"] / 8, "kl": None}) for row in rows]
    (folder / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))
    try:
        with opened(browser, server, "run?_runs=sampled") as page:
            page.wait_for_selector("[aria-label='Sampled answers'] td")
            assert ", finished early: `own.py:stop` asked for it" in page.text_content(".headline")
            assert "5 of 5, ended early" in page.text_content("[aria-label=Runs]")
            said = page.locator("[aria-label='Sampled answers'] td").all_text_contents()
            assert said == ["2", "2+1=", "3\n<b>", "0.5"]
            charts = page.locator("figure.chart h3").all_text_contents()
            assert "Mean reward of sampled answers" in charts
            assert not any("Divergence" in title for title in charts)  # nobody knows it
            check_look(page, "a sampled run")
    finally:
        shutil.rmtree(folder)
