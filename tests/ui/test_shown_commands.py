"""What the page says to type can be typed, as it stands there."""

import shlex

import pytest
from looking import SMALL, opened, rest

from typed_commands import quick


def run(line):
    """A command line of the page, run; its output."""
    verb, *words = shlex.split(line)[1:]
    code, out, err = quick(verb, *words)
    assert code in (0, 3), (line, err)
    return out


@pytest.mark.parametrize(
    ("keys", "verbs"),
    [
        (f"{SMALL}&task.sequence_length=128", ["plan", "certify"]),
        (f"{SMALL}&framework=trl", ["plan", "predict"]),
        ("model=gpt2&hardware.device=l4&limits.memory=200%20MiB&method=full", ["plan"]),
    ],
)
@pytest.mark.usefixtures("certified_here")
def test_the_plan_screens_commands_run(browser, server, keys, verbs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(browser, server, f"plan?{keys}") as page:
        rest(page)
        lines = page.text_content("#command").splitlines()
        digest = page.text_content("main p:has-text('recipe') code >> nth=-1")
        verdict = page.text_content("#verdict .verdict")
    assert [line.split()[1] for line in lines] == verbs
    shown = [run(line) for line in lines]
    assert digest in run(f"{lines[0]} --why")
    assert all(text.startswith(verdict) for text in shown)


@pytest.mark.usefixtures("certified_here")
def test_the_timelines_and_the_exports_commands_run(browser, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = f"{SMALL}&task.sequence_length=128"
    for screen in ("timeline", "export"):
        with opened(browser, server, f"{screen}?{keys}") as page:
            page.wait_for_selector("pre")
            lines = page.text_content("pre >> nth=0").splitlines()
        assert lines
        for line in lines:
            run(line)
    assert (tmp_path / "runs" / "first" / "timeline.html").exists()
    assert (tmp_path / "trl" / "trl.yaml").exists()
