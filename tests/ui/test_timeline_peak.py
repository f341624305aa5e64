"""The peak of a timeline is seen, however few events it lasts, on the page and in its file."""

import json
from urllib.parse import quote, urlencode

import pytest
from drawn import BEFORE, SPIKE, draw_spike, height_of
from looking import AXE, TINY, WIDTHS, find_barriers, opened, watched
from msgspec.structs import replace

import made_by_hand
from memfit.core import units
from memfit.core.wording import COLOURS
from memfit.report.curve import pack
from memfit.report.page.timeline import render_timeline
from memfit.report.step_memory import StepMemory
from memfit.ui import answers
from memfit.ui.job import Wanted
from memfit.ui.jobs import Job

KEYS = {"model": json.dumps(TINY), "hardware.device": "cpu-x86", "seed": "77"}


@pytest.fixture(scope="module")
def certificate():
    """Of the made-up tape, as far as a timeline reads it."""
    made = made_by_hand.certificate(made_by_hand.plan())
    memory = replace(
        made.memory, peak_allocated=SPIKE, peak_reserved=None, device_total=None,
        usable=8 * units.GIB,
    )  # fmt: skip
    return replace(made, memory=memory)


def show_peak(page, drawing, mark):
    """That the spike is seen at its height at every width, and is marked with its figure."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.mouse.move(1, 1)
        page.locator(drawing).scroll_into_view_if_needed()
        flat = height_of(page, drawing, COLOURS["parameters"], 0.6)
        assert flat > 0.1
        share = (BEFORE + 1) / draw_spike().events  # of the width, where the spike is
        seen = height_of(page, drawing, COLOURS["logits"], share)
        assert seen == pytest.approx(flat * SPIKE / units.GIB, rel=0.05), width
        assert page.text_content(mark).strip() == f"peak {units.show_bytes(SPIKE)}"
        box, figure = (page.locator(name).bounding_box() for name in (drawing, mark))
        assert figure["x"] + figure["width"] <= box["x"] + box["width"] + 1
        assert figure["y"] + figure["height"] <= box["y"] + (1 - seen) * box["height"] + 1
        assert find_barriers_here(page) == []


def find_barriers_here(page):
    """None where nothing judges: axe-core comes with Node."""
    return find_barriers(page) if AXE.exists() else []


def show_zoom(page, drawing):
    """The spike is a pixel wide in the whole step, and part of a shape in a narrower view."""
    page.set_viewport_size({"width": 1440, "height": 900})
    size = page.locator(drawing).bounding_box()

    def view():
        return [float(n) for n in page.get_attribute(drawing, "viewBox").split()]

    everything = view()
    assert everything[2] == draw_spike().events
    page.click("#to-peak")
    page.wait_for_function(f"document.querySelector('{drawing}').viewBox.baseVal.width < 200")
    assert view()[0] < BEFORE < view()[0] + view()[2]
    assert height_of(page, drawing, COLOURS["logits"], 0.5) > 0.8
    page.click("#whole")
    page.wait_for_function(f"document.querySelector('{drawing}').viewBox.baseVal.width > 9000")
    assert view() == everything
    page.focus(drawing)
    for key, factor in (("+", 0.25), ("-", 4)):
        before = view()[2]
        page.keyboard.press(key)
        page.wait_for_function(
            f"(n) => Math.abs(document.querySelector('{drawing}').viewBox.baseVal.width - n) < 1",
            arg=before * factor,
        )
    box = page.locator(drawing).bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.30 * size["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.40 * size["width"], middle, steps=4)
    page.mouse.up()
    page.wait_for_function(f"document.querySelector('{drawing}').viewBox.baseVal.width < 10000")
    assert view()[2] == pytest.approx(0.1 * everything[2], rel=0.1)
    assert view()[0] == pytest.approx(0.3 * everything[2], rel=0.1)


def test_the_pages_timeline_shows_its_peak(browser, server, certificate):
    made = StepMemory(
        certificate=certificate, plan=None, because="made by hand", ranks=1, rank=None,
        curve=pack(draw_spike()),
    )  # fmt: skip
    job = Job("made-by-hand", Wanted(query=KEYS), None, state="done")
    job.result = answers.encode(made)
    server.jobs._jobs[job.id] = job
    with opened(browser, server, f"timeline?{urlencode(KEYS)}") as page:
        page.wait_for_selector("#curve")
        show_peak(page, "#curve", "#peak-figure")
        show_zoom(page, "#curve")
    del server.jobs._jobs[job.id]


def test_the_file_of_a_timeline_shows_its_peak(browser, certificate, tmp_path):
    path = tmp_path / "timeline.html"
    path.write_text(render_timeline(draw_spike(), certificate), encoding="utf-8")
    address = f"file://{quote(str(path))}"
    with watched(browser, address) as page:
        page.goto(address)
        show_peak(page, "#svg", "#peak span")
        show_zoom(page, "#svg")
