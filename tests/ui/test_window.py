"""The plan's screen in a real browser: as a newcomer, by keyboard, dragging, refused."""

import json

import pytest
from looking import SMALL, TINY, check_look, opened, rest

from memfit import api
from memfit.core import units
from memfit.screens.plan import time_rows
from memfit.screens.widgets.memory import parts_of
from typed_commands import quick


def plan_small(**asked):
    """What the page plans of SMALL; of its levers no test here reads anything."""
    return api.plan(api.read("pythia-70m", device="rtx-4090", **asked), levers=False)


def show_of(page, plan):
    """That the page says of a plan what the terminal says of it; the page is read at once."""
    verdict, kinds, seconds, tokens, usd, whole = page.evaluate("""() => {
        const said = (place) => document.querySelector(place).textContent
        return [
            said('#verdict'),
            [...document.querySelectorAll('.reasons details')].map(d =>
                [d.id.slice(5), d.querySelector('[data-bytes]').textContent]),
            said('#step-seconds b'), said('#tokens-per-second b'), said('#usd b'), said('main'),
        ]
    }""")
    assert verdict.startswith(
        {"fits": "FITS", "at_risk": "TIGHT", "does_not_fit": "DOES NOT FIT"}[plan.memory.verdict]
    )
    assert dict(kinds) == {kind: units.show_bytes(n) for kind, n in parts_of(plan.memory)}
    told = dict(time_rows(plan.time, plan.cost, plan.recipe.steps))
    assert seconds == told["one step"].split(" (")[0]
    assert tokens == told["tokens/s"]
    assert usd == told["cost"].split(", ")[0]
    assert plan.recipe_digest in whole


def test_a_newcomer_gets_from_the_first_look_to_a_plan_that_certify_accepts(
    browser, server, tmp_path, certified_here
):
    with opened(browser, server) as page:
        rest(page)  # there is a plan before anything was asked
        assert page.text_content("#verdict").startswith("FITS")
        page.get_by_text("or paste a config.json").click()
        page.fill("#config", json.dumps(TINY))
        page.fill("#device", "cpu-x86")
        page.keyboard.press("Enter")
        page.get_by_label("From scratch").check()
        page.locator("[id='slider-limits.memory']").press("ArrowRight")
        page.fill("#other", "task.steps=3")
        page.get_by_role("button", name="Set", exact=True).click()
        page.wait_for_function(
            "() => document.querySelector('#command').textContent.includes('steps=3')"
        )
        rest(page)
        summary = page.locator("#kind-parameters summary")
        summary.click()
        assert "because" in page.text_content("#kind-parameters li")
        with page.expect_download() as got:
            page.click("#download")
        got.value.save_as(tmp_path / "plan.json")
        link = page.url
    with opened(browser, server, link.split("#/")[1]) as page:  # the address is the whole state
        rest(page)
        assert json.loads((tmp_path / "plan.json").read_text())[
            "recipe_digest"
        ] in page.text_content("main")
    code, out, said = quick("certify", tmp_path / "plan.json", "--json")
    assert code == 0, (link, said)
    assert json.loads(out)["memory"]["verdict"] == "fits"


def test_by_keyboard_alone_a_slider_gives_what_the_command_line_prints(browser, server):
    with opened(browser, server, f"plan?{SMALL}") as page:
        rest(page)
        page.locator("body").press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "slider-task.sequence_length":
                break
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        page.wait_for_function(
            "() => document.querySelector('#command').textContent.includes('=1024')"
        )
        rest(page)
        asked = page.text_content("#command").splitlines()[0]
        assert asked == ("memfit plan pythia-70m --device rtx-4090 --set task.sequence_length=1024")
        changes = {"task.sequence_length": 1024}
        show_of(page, plan_small(changes=changes))
        for _ in range(40):  # on to the reasons, past the other controls
            page.keyboard.press("Tab")
            if (
                page.evaluate("document.activeElement.closest('details')?.id")
                == "kind-optimizer_state"
            ):
                break
        page.keyboard.press("Enter")
        page.locator("#kind-optimizer_state li").first.wait_for(state="visible")
        page.keyboard.press("Enter")
        page.locator("#kind-optimizer_state li").first.wait_for(state="hidden")


def test_dragging_shows_each_stop_and_ends_at_the_last(browser, server):
    with opened(browser, server, f"plan?{SMALL}") as page:
        rest(page)
        slider = page.locator("[id='slider-limits.memory']")
        box = slider.bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 4, middle)
        page.mouse.down()
        for part in (0.2, 0.8, 0.06):
            page.mouse.move(box["x"] + part * box["width"], middle, steps=3)
        page.mouse.up()
        rest(page)
        value = page.text_content("output[for='slider-limits.memory']")
        plan = plan_small(memory=value)
        show_of(page, plan)
        assert plan.memory.usable == units.parse_bytes(value)


def test_a_page_at_rest_has_the_stops_beside_its_sliders(browser, server):
    """What it asked for ahead is not asked for again, and is the plan of that stop."""
    with opened(browser, server, f"plan?{SMALL}&task.sequence_length=512") as page:
        drafts = []
        page.on("requestfinished", lambda r: "/api/draft?" in r.url and drafts.append(r.url))
        rest(page)
        ahead = (
            f"{server.url}/api/draft?hardware.device=rtx-4090&model=pythia-70m"
            "&task.sequence_length=768"
        )
        for _ in range(600):
            if ahead in drafts:
                break
            page.wait_for_timeout(100)
        assert ahead in drafts
        page.wait_for_timeout(200)  # until the page has read it
        page.locator("[id='slider-task.sequence_length']").press("ArrowRight")
        page.wait_for_function("() => location.hash.includes('=768')")
        rest(page)
        assert drafts.count(ahead) == 1
        changes = {"task.sequence_length": 768}
        show_of(page, plan_small(changes=changes))


def test_explore_never_says_the_verdict_of_what_was_asked_before(browser, server):
    with opened(browser, server, f"explore?{SMALL}") as page:
        page.wait_for_selector(".headline .verdict")
        page.wait_for_selector(".answer:not([aria-busy=true])")
        answers = []  # that are kept back
        page.route(
            "**/api/*seed=7*",
            lambda route: route.continue_() if answers is None else answers.append(route),
        )
        page.fill("#other", "seed=7")
        page.get_by_role("button", name="Set", exact=True).click()
        page.wait_for_function("() => location.hash.includes('seed=7')")
        page.wait_for_function(
            "() => document.querySelector('.headline').textContent === 'planning…'"
        )
        while not answers:
            page.wait_for_timeout(20)
        kept, answers = answers, None
        for route in kept:
            route.continue_()
        page.wait_for_selector(".headline .verdict")


@pytest.mark.parametrize(
    ("keys", "arguments"),
    [
        ("model=llama-3.1-8c", ["llama-3.1-8c"]),
        ("model=some-org/some-model", ["some-org/some-model"]),  # the hub, without a network
        ("model=pythia-70m&hardware.device=h1000", ["pythia-70m", "--device", "h1000"]),
        (
            f"{SMALL}&micro_batch=3&task.global_batch=16",
            [
                "pythia-70m",
                "--device",
                "rtx-4090",
                "--set",
                "micro_batch=3",
                "--set",
                "task.global_batch=16",
            ],
        ),
    ],
)
def test_errors_are_the_command_lines_own(browser, server, keys, arguments):
    _, _, errors = quick("plan", *arguments)
    with opened(browser, server, f"plan?{keys}") as page:
        page.wait_for_selector(".trouble")
        said = page.locator(".trouble p").all_text_contents()
        assert [line.strip() for line in said] == errors.strip().splitlines()
        assert page.text_content("#verdict") == "NO PLAN"


def test_the_plan_screen_looks_right(browser, server):
    with opened(browser, server, f"plan?{SMALL}") as page:
        rest(page)
        page.click("#kind-activations summary")
        check_look(page, "plan")
        page.goto(f"{server.url}/#/plan?model=nothing")
        page.wait_for_selector(".trouble")
        check_look(page, "plan-error")
