"""How the tests of the page look at it."""

import os
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from tabbing import check_round

ROOT = Path(__file__).parent.parent.parent
AXE = ROOT / "ui" / "node_modules" / "axe-core" / "axe.min.js"
PATIENCE = 240_000  # ms; machines that run tests are busy, and a proof is a process of its own
WIDTHS = (320, 768, 1440)
# each width and each scheme is looked at by `make test`; `make test-wide` looks at all pairs
VIEWS = tuple(product(("light", "dark"), WIDTHS))
SHARE = (("light", 320), ("light", 768), ("dark", 1440))
# up to 900 px all stands in one column, above it in two (ui/src/app.css): between them `make test`
# looks for what sticks out alone
LAYOUTS = (320, 1440)
SMALL = "model=pythia-70m&hardware.device=rtx-4090"
TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
RESTING = """() => document.querySelector('.answer')
  && !document.querySelector('.answer[aria-busy=true]')"""
TURN = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))"

# where the card ends that goes on behind 700 px: a picture that ends there cuts no chart
END = """() => Math.min(1400, ...[...document.querySelectorAll('main section')]
  .map((card) => Math.ceil(card.getBoundingClientRect().bottom) + 12)
  .filter((bottom) => bottom > 700))"""


@contextmanager
def opened(browser, server, screen="", *, token=True):
    """A fresh page; on leaving, that it asked nobody else and complained of nothing."""
    with watched(browser, server.url) as page:
        page.goto(f"{server.url}/#token={server.token}" if token else server.url)
        page.wait_for_selector("nav")
        if screen:
            page.goto(f"{server.url}/#/{screen}")
        page.wait_for_selector("h1")
        yield page


@contextmanager
def watched(browser, own):
    """A page of a context of its own; `own`: how the addresses that it may ask begin."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE)
    page, asked, said = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    yield page
    assert [url for url in asked if not url.startswith((own, "blob:"))] == []
    # the browser's own line about a refusal that the page explains, or what a test did not answer
    own = ("status of 4", "net::ERR_FAILED")
    assert [line for line in said if not any(words in line for words in own)] == []
    context.close()


def rest(page):
    """Until the whole plan of what is asked stands there."""
    page.evaluate(TURN)  # what a click just asked for is what is waited for
    page.wait_for_function(RESTING)
    page.wait_for_selector("#download:not([disabled]), .trouble")


def check_look(page, name):
    """Widths, light and dark: nothing sticks out, and axe finds nothing serious; Tab gets
    everywhere and is seen there.

    Set MEMFIT_SCREENSHOTS to a folder to keep a picture of each; MEMFIT_PICTURES to docs/pictures
    to make the documentation's anew.
    """
    if (folder := os.environ.get("MEMFIT_PICTURES")) and name != "plan-error":
        page.set_viewport_size({"width": 1200, "height": 800})
        page.mouse.move(1, 799)  # over nothing that answers to it
        page.evaluate(
            "() => { document.activeElement.blur();"
            " for (const at of [window, document.querySelector('aside')]) at?.scrollTo(0, 0); }"
        )
        page.set_viewport_size({"width": 1200, "height": page.evaluate(END)})
        page.screenshot(path=Path(folder) / f"{name}.png")
    every = os.environ.get("MEMFIT_EXAMPLES") == "new"
    seen = set()
    for scheme, width in VIEWS if every else SHARE:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
        if folder := os.environ.get("MEMFIT_SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"{name}-{width}-{scheme}.png", full_page=True)
        if not (every or width in LAYOUTS):
            continue
        if AXE.exists():
            assert find_barriers(page) == [], (name, width, scheme)
        if width not in seen:
            check_round(page)
        seen.add(width)


def find_barriers(page):
    """What axe-core calls serious or critical: (rule, where, why)."""
    if not page.evaluate("typeof axe !== 'undefined'"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    return [
        (rule["id"], node["target"], node["failureSummary"])
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
