"""docs/answer.svg, README's picture: a screen of a real run, and today's."""

import re
import sys
from functools import cache
from xml.etree import ElementTree

from typed_commands import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import answer_picture

printed = cache(answer_picture.screen)  # by a process of its own
SVG = "{http://www.w3.org/2000/svg}"


def words(svg):
    root = ElementTree.fromstring(svg)
    return " ".join("".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ").split())


def test_the_picture_is_what_the_command_prints_today(monkeypatch):
    monkeypatch.setattr(answer_picture, "screen", printed)
    held = answer_picture.PICTURE.read_text(encoding="utf-8")
    assert held == answer_picture.picture(), "run `make docs`"


def test_the_picture_shows_the_command_and_the_whole_screen():
    held = answer_picture.PICTURE.read_text(encoding="utf-8")
    shown = words(held)
    assert f"$ {answer_picture.COMMAND}" in shown
    screen = answer_picture.SGR.sub("", printed())
    assert "FITS" in screen
    for word in set(re.findall(r"[\w.%]+", screen)):
        assert word in shown


def test_readme_shows_the_picture_and_its_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/answer.svg)" in text
    assert answer_picture.COMMAND in text
