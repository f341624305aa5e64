"""Every screen gone through with Tab, Enter, Space and arrows alone."""

import json

from looking import opened, rest
from tabbing import tab_to

from memfit import api
from memfit.screens.budget import show_figure


def go_to(page, screen):
    """By the links above, from wherever the focus is."""
    tab_to(page, f'nav a[href^="#/{screen}"]', back=True)
    page.keyboard.press("Enter")
    page.wait_for_function("(s) => location.hash.startsWith(`#/${s}`)", arg=screen)


def write(page, text):
    """Into the field that has the focus, and taken."""
    page.keyboard.press("Control+A")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def download(page, selector, folder):
    tab_to(page, selector)
    with page.expect_download() as got:
        page.keyboard.press("Enter")
    got.value.save_as(folder / got.value.suggested_filename)
    return (folder / got.value.suggested_filename).read_text()


def clipboard(page, selector):
    """What the button that `selector` names puts there."""
    tab_to(page, selector)
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.textContent === 'Copied'")
    return page.evaluate("navigator.clipboard.readText()")


def test_every_screen_by_keyboard_alone(browser, server):
    folder = server.runs / "by-keyboard"
    with opened(browser, server) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        rest(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"

        tab_to(page, "#model")
        write(page, "pythia-70m")
        tab_to(page, "[id='slider-task.sequence_length']")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        tab_to(page, "[id='slider-limits.memory']")
        page.keyboard.press("Home")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "() => document.querySelector('#command')?.textContent.includes('memory')"
        )
        rest(page)
        limit = page.text_content("output[for='slider-limits.memory']")
        changes = {"task.sequence_length": 512}
        request = api.read("pythia-70m", device="h100-sxm", memory=limit, changes=changes)
        plan = api.plan(request, levers=False)
        plan_json = download(page, "#download", folder)
        assert json.loads(plan_json)["recipe_digest"] == plan.recipe_digest
        asked = clipboard(page, "#download + button")
        assert asked == page.text_content("#command").splitlines()[0]

        go_to(page, "explore")
        page.wait_for_selector("[aria-label=Considered] td")
        tab_to(page, "#why-not")
        write(page, "micro_batch=4")
        page.wait_for_selector("[aria-label='Chosen and asked'] td")
        assert page.text_content("#why-answer").startswith(
            api.why_not(request, {"micro_batch": 4}).answer.replace("_", " ")
        )
        tab_to(page, "#two_right", back=True)
        write(page, "model=pythia-160m")
        page.wait_for_selector("[aria-label='Left and right'] td")
        tab_to(page, "[name=_right]", back=True)  # and a row of the table instead, by arrows
        page.keyboard.press("ArrowDown")
        page.wait_for_function("() => !location.hash.includes('pythia-160m')")
        page.wait_for_selector("[aria-label='Left and right'] td")
        tab_to(page, "[aria-label=Considered] td a", back=True)
        page.keyboard.press("Enter")  # the focus is on a row that is no more: it goes to the answer
        page.wait_for_function("() => location.hash.startsWith('#/plan')")
        # the address is the new one before the screen is drawn, and the focus comes with the screen
        page.wait_for_function("() => document.activeElement.id === 'main'")
        page.go_back()
        page.wait_for_function("() => location.hash.startsWith('#/explore')")

        go_to(page, "timeline")  # what it draws: test_the_timeline_is_the_certificates
        tab_to(page, "#rank")
        write(page, "0")
        page.wait_for_function("() => location.hash.includes('_rank=0')")
        tab_to(page, "#certify")

        go_to(page, "run")
        tab_to(page, "[aria-label=Runs] input")
        page.keyboard.press("Space")
        page.wait_for_selector("[aria-label='Comparisons of by-keyboard'] td")

        go_to(page, "export")
        page.wait_for_selector("pre.file")
        tab_to(page, "#target")
        page.keyboard.type("axo")  # a list goes to what begins so
        page.wait_for_function("() => location.hash.includes('_to=axolotl')")
        page.wait_for_selector("pre.file")
        made = api.export(plan, "axolotl")
        (name,) = made.files
        assert clipboard(page, "section p > button") == made.files[name]
        assert download(page, "section p > button.main", folder) == made.files[name]

        go_to(page, "budget")
        page.wait_for_selector("[aria-label=Budget] td")
        tab_to(page, "#budget-cost-text")
        write(page, "5000 USD")
        tab_to(page, "[aria-label='let Devices follow']")
        page.keyboard.press("Enter")  # the button is done with: the focus is in the field beside
        assert page.evaluate("document.activeElement.id") == "budget-devices-text"
        known = {"parameters": "7B", "device": "h100-sxm", "cost": "5000 USD"}
        page.wait_for_function(
            "(time) => document.querySelector('[aria-label=Budget]').textContent.includes(time)",
            arg=show_figure("tokens", api.budget(**known).figures["tokens"]),
        )
