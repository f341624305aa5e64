"""A page gone through by keyboard alone, and what has the focus seen at every key."""

TABS = 400  # more than any screen has places
ROUNDS = 3
PLACES = """() => {
  const groups = new Set();
  return [...document.querySelectorAll(
    'a[href], button, input, select, textarea, summary, [tabindex="0"]')].filter((place) => {
    if (place.disabled || !place.checkVisibility({visibilityProperty: true})) return false;
    if (place.type !== 'radio') return true;  // Tab stops once in a group
    const first = !groups.has(place.name);
    groups.add(place.name);
    return first;
  });
}"""
SEEN = """(at) => {
  const box = at.getBoundingClientRect();
  const [left, right] = [Math.max(box.left, 0), Math.min(box.right, innerWidth)];
  const [top, bottom] = [Math.max(box.top, 0), Math.min(box.bottom, innerHeight)];
  const parts = [0.02, 0.25, 0.5, 0.75, 0.98];
  return right > left && bottom > top && parts.some((across) => parts.some((down) => {
    const [x, y] = [left + across * (right - left), top + down * (bottom - top)];
    const hit = document.elementFromPoint(x, y);
    return hit && at.contains(hit);
  }));
}"""
FOCUS = f"""() => {{
  const at = document.activeElement;
  if (at === document.body) return null;
  const style = getComputedStyle(at);
  window.passed ??= [];
  const before = window.passed.includes(at);
  if (!before) window.passed.push(at);
  return {{
    what: `${{at.tagName.toLowerCase()}} ${{at.id || at.textContent.trim().slice(0, 30)}}`,
    before, seen: ({SEEN})(at),
    ringed: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
  }};
}}"""
SCROLLED = 5000  # milliseconds in which a busy browser has scrolled to what has the focus


def focused(page):
    """What has the focus, which is seen and marked; None where nothing has."""
    found = page.evaluate(FOCUS)
    if found is not None:
        seen = found["seen"] or _comes_into_sight(page)
        assert seen, f"{found['what']} has the focus and is covered or outside the window"
        assert found["ringed"], f"{found['what']} has the focus, and nothing marks it"
    return found


def _comes_into_sight(page):
    """Whether what has the focus is seen before the deadline."""
    from playwright.sync_api import TimeoutError as TooLate

    try:
        page.wait_for_function(f"() => ({SEEN})(document.activeElement)", timeout=SCROLLED)
    except TooLate:
        return False
    return True


def tab_to(page, selector, *, back=False):
    """Tab, or Shift+Tab, until what `selector` names has the focus."""
    passed = []
    for _ in range(TABS):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        found = focused(page)
        passed.append(found and found["what"])
        if page.evaluate("(s) => document.activeElement.matches(s)", selector):
            return
    raise AssertionError(f"Tab never gets to {selector}: {passed[-80:]}")


def check_round(page):
    """From the page's beginning Tab stops at every place, each seen, and leaves at the end.

    A page that draws itself anew meanwhile loses the focus: it is gone through once more.
    """
    for _ in range(ROUNDS):
        places, passed = go_round(page)
        if len(passed) == places:
            return
    raise AssertionError((len(passed), places, passed))


def go_round(page):
    """How many places the page has, and what of them has the focus one after the other."""
    places = page.evaluate(f"() => ({PLACES})().length")
    page.evaluate(f"() => {{ window.passed = []; ({PLACES})()[0].focus(); }}")
    page.keyboard.press("Tab")  # and back: the focus is marked where a key has brought it
    page.keyboard.press("Shift+Tab")
    passed = [focused(page)["what"]]
    for _ in range(TABS):
        page.keyboard.press("Tab")
        found = focused(page)
        if found is None or found["before"]:
            break
        passed.append(found["what"])
    return places, passed
