"""What the page shows of a verdict, of what fits instead, and of plans far from the others."""

import json
from contextlib import contextmanager

import pytest
from looking import AXE, SMALL, find_barriers, opened, rest

from memfit import api
from memfit.core import units
from memfit.objectives import objectives


def barriers(page):
    return find_barriers(page) if AXE.exists() else []


@contextmanager
def altered(page, change):
    """Every plan that the server answers is changed on its way."""

    def answer(route):
        response = route.fetch()
        plan = response.json()
        change(plan)
        route.fulfill(response=response, body=json.dumps(plan))

    page.route("**/api/plan?*", answer)
    page.route("**/api/draft?*", answer)
    yield
    page.unroute_all(behavior="ignoreErrors")


def test_what_does_not_fit_offers_what_does_and_each_keeps_its_promise(browser, server):
    plan = api.plan(api.read("gpt2", changes={
        "hardware.device": "l4", "method": "full", "limits.memory": "200 MiB",
    }))  # fmt: skip
    assert plan.ways_out
    asked = "model=gpt2&hardware.device=l4&method=full&limits.memory=200%20MiB"
    with opened(browser, server, f"plan?{asked}") as page:
        rest(page)
        assert page.text_content("#verdict").startswith("DOES NOT FIT")
        page.wait_for_selector("#ways-out a.way")
        assert page.locator("#usd").count() == 0  # nothing runs: it has no days and no price
        assert page.locator("#total-seconds").count() == 0
        titles = page.locator("#ways-out a.way").all_text_contents()
        assert titles == [way.title for way in plan.ways_out]
        assert barriers(page) == []
        for way in plan.ways_out[:2]:
            page.get_by_role("link", name=way.title, exact=True).click()
            page.wait_for_function(
                "() => document.querySelector('#verdict .verdict')?.textContent === 'FITS'"
            )
            rest(page)
            needs = way.peak_allocated if way.device_total is None else way.device_total
            assert f"needs {units.show_bytes(needs)}" in page.text_content("#verdict")
            page.go_back()
            page.wait_for_selector("#ways-out a.way")


def test_a_mesh_is_named_where_there_is_one(browser, server):
    """A share of tokens that experts may get is a number above 1, and no axis of a mesh."""
    small = "model=gpt2&hardware.device=l4&method=full&micro_batch=1&task.sequence_length=64"
    for more, says in (("", "loss plain. "), ("&hardware.count=2", " on dp_shard 2. ")):
        with opened(browser, server, f"plan?{small}&loss=plain{more}") as page:
            rest(page)
            assert says in page.text_content("p.soft:has-text('Chosen: ')")


def test_what_is_learned_is_chosen_and_an_iteration_has_its_phases(browser, server):
    names = ["prefill", "decode", "update"]
    with opened(browser, server, "plan?model=qwen3-0.6b&hardware.device=l4&method=lora") as page:
        rest(page)
        assert page.locator("[aria-label='Phases of an iteration']").count() == 0
        assert page.locator("#objective option").count() == len(objectives.names())
        page.select_option("#objective", "grpo")
        page.wait_for_selector("[aria-label='Phases of an iteration']")
        rows = page.locator("[aria-label='Phases of an iteration'] tbody tr")
        phases = {row.split("\t")[0]: row for row in rows.all_inner_texts()}
        assert set(names) <= set(phases)
        assert "tokens of keys and values" in phases["decode"]
        assert barriers(page) == []
        page.reload()
        rest(page)
        assert page.input_value("#objective") == "grpo"


def test_at_risk_is_tight_with_its_range_and_never_green(browser, server):
    def change(plan):
        memory = plan["memory"]
        usable = memory["usable"] = memory["device_total"] + 25 * 2**20
        memory |= {
            "verdict": "at_risk", "total_low": usable - 2**30, "total_high": usable + 2**29,
        }  # fmt: skip

    with opened(browser, server) as page, altered(page, change):
        page.goto(f"{server.url}/#/plan?{SMALL}")
        page.wait_for_selector("#verdict .at_risk")
        rest(page)
        said = page.text_content("#verdict")
        assert said.startswith("TIGHT")
        assert "it may not fit" in said
        assert "to spare" not in said
        assert " to " in said.split("(")[1]
        colours = page.evaluate(
            "() => ['fits', 'at_risk', 'does_not_fit'].map((name) => {"
            " const mark = document.createElement('span'); mark.className = `verdict ${name}`;"
            " document.body.append(mark); const colour = getComputedStyle(mark).color;"
            " mark.remove(); return colour; })"
        )
        assert len(set(colours)) == 3
        assert page.locator(".limit .range").count() == 1


def test_explore_is_not_crushed_by_a_few_and_shows_what_was_chosen(browser, server):
    def change(plan):
        first = plan["considered"][-1]
        for factor in (40.0, 90.0):
            plan["considered"].append({
                **first, "chosen": False, "label": f"{factor:.0f} times as slow",
                "relative_time": factor, "changes": {},
            })  # fmt: skip
        chosen = next(row for row in plan["considered"] if row["chosen"])
        twin = {**chosen, "chosen": False, "label": "its twin", "changes": {}}
        plan["considered"].append(twin)  # at the same place, drawn after it

    with opened(browser, server) as page, altered(page, change):
        page.goto(f"{server.url}/#/explore?{SMALL}")
        page.wait_for_selector(".headline .verdict")
        page.wait_for_selector(".answer:not([aria-busy=true])")
        chart = page.locator("svg.free").first
        width, xs, edges = chart.evaluate(  # at once: a late answer draws the marks anew
            """(chart) => [
              chart.getBoundingClientRect().width,
              [...chart.querySelectorAll(".dot:not(.edge)")].map(
                (mark) => mark.getBoundingClientRect().x),
              chart.querySelectorAll(".dot.edge").length,
            ]"""
        )
        assert max(xs) - min(xs) > 0.3 * width
        assert edges >= 2
        assert "beyond the right edge" in page.text_content(".beyond")
        page.wait_for_function(  # at once: a late answer moves the chart
            """() => {
              const mark = document.querySelector("svg.free rect.chosen");
              mark.scrollIntoView({ block: "center" });
              const box = mark.getBoundingClientRect();
              const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
              return document.elementFromPoint(x, y) === mark;
            }"""
        )
        assert page.text_content(".dotlabel") == "chosen"


def test_what_was_meant_is_a_click_away(browser, server):
    with opened(browser, server, "plan?model=pythia-70n&hardware.device=rtx-4090") as page:
        page.click(".trouble a >> nth=0")
        page.wait_for_selector(".trouble", state="detached")
        rest(page)
        assert page.text_content("#verdict").startswith("FITS")


def test_on_a_telephone_the_answer_is_in_the_first_screen(browser, server):
    with opened(browser, server, f"plan?{SMALL}") as page:
        page.set_viewport_size({"width": 360, "height": 740})
        page.reload()
        rest(page)
        top = page.locator("main section").first.bounding_box()["y"]
        assert top < 500
        page.get_by_text("Method, lengths and limits").click()
        page.get_by_label("Full fine-tuning").check()
        page.wait_for_function("() => location.hash.includes('method=full')")


@pytest.mark.parametrize("words", ["2 hours", "90 minutes", "1 week"])
def test_durations_may_be_written_in_words(words):
    assert units.parse_seconds(words) in (7200, 5400, 604800)
