"""What goes on while the page does something else: certificates, runs, and the way back."""

import json
import shutil
from urllib.parse import urlencode

import pytest
from looking import SMALL, TINY, opened, rest

from memfit import api
from memfit.records import write_json
from memfit.ui.asking import read_query

KEYS = {
    "model": json.dumps(TINY), "hardware.device": "rtx-4090", "weights": "random",
    "method": "full", "task.steps": "4",
}  # fmt: skip


@pytest.fixture
def tidy(server):
    yield
    server.jobs.close()


@pytest.mark.usefixtures("tidy")
def test_a_certificate_goes_on_while_the_page_is_elsewhere(browser, server):
    with opened(browser, server, f"timeline?{urlencode(KEYS)}") as page:
        page.click("#certify")
        page.wait_for_selector("#progress")
        page.click("nav a[href^='#/budget']")
        page.wait_for_selector("[aria-label=Budget] td")
        page.goto(server.url)  # and the page is loaded anew
        page.goto(f"{server.url}/#/timeline?{urlencode(KEYS)}")
        page.wait_for_selector("#curve")
        assert "a pasted config.json, rtx-4090" in page.text_content("#jobs")
        assert page.text_content("#jobs td:nth-child(3)") == "FITS"
        page.get_by_role("button", name="forget a pasted config.json").first.click()
        page.wait_for_selector("#curve", state="detached")


@pytest.mark.usefixtures("tidy")
def test_a_certificate_is_cancelled(browser, server):
    asked = {**KEYS, "seed": "5"}
    with opened(browser, server, f"timeline?{urlencode(asked)}") as page:
        page.click("#certify")
        page.wait_for_selector("#cancel")
        page.click("#cancel")
        page.wait_for_function(
            "() => document.querySelector('.headline').textContent === 'cancelled'"
        )
        assert page.evaluate("document.activeElement.id") == "certify"
        assert server.jobs.rows()[0].state == "cancelled"


@pytest.fixture
def planned(server):
    """A run folder that holds a plan alone, and how a second one comes to be."""
    plan = api.plan(read_query(tuple(KEYS.items())))
    made = [server.runs / "from, afar", server.runs / "later"]
    made[0].mkdir()
    write_json(made[0] / "plan.json", plan)
    yield lambda: shutil.copytree(made[0], made[1])
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def test_following_a_run_survives_a_server_that_does_not_answer(browser, server, planned):
    with opened(browser, server, "run") as page:
        lost = []

        def answer(route):
            if lost:
                route.abort()
            else:
                route.continue_()

        page.route("**/api/run*", answer)
        page.get_by_role("checkbox", name="from, afar").check()  # a name with a comma
        page.wait_for_selector("[aria-label='Comparisons of from, afar'] td")
        lost.append(True)
        page.wait_for_function("() => document.querySelectorAll('.reconnecting').length === 2")
        assert page.locator("[aria-label='Comparisons of from, afar'] td").count()
        assert page.locator(".trouble").count() == 0
        planned()  # a new run, which appears without a reload
        lost.clear()
        page.wait_for_function("() => !document.querySelector('.reconnecting')")
        page.get_by_role("checkbox", name="later").check()
        page.wait_for_selector("[aria-label='Comparisons of later'] td")
        page.reload()
        page.wait_for_selector("[aria-label='Comparisons of from, afar'] td")
        page.wait_for_selector("[aria-label='Comparisons of later'] td")


def test_back_undoes_the_last_change(browser, server):
    with opened(browser, server, f"plan?{SMALL}") as page:
        rest(page)
        before = page.url
        page.get_by_label("Full fine-tuning").check()
        page.wait_for_function("() => location.hash.includes('method=full')")
        slider = page.locator("[id='slider-task.sequence_length']")
        for _ in range(3):  # one way of one slider
            slider.press("ArrowRight")
        page.wait_for_function("() => location.hash.includes('=1024')")
        rest(page)
        page.go_back()
        page.wait_for_function("() => !location.hash.includes('sequence_length')")
        assert "method=full" in page.url
        page.go_back()
        page.wait_for_function("() => !location.hash.includes('method')")
        assert page.url == before
        rest(page)
        assert page.get_by_label("memfit decides").is_checked()
        page.go_forward()
        page.wait_for_function("() => location.hash.includes('method=full')")
        page.wait_for_function("() => document.querySelector('[value=full]').checked")
