"""The documentation's site: every page has its place, and every link leads somewhere."""

import re
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)")


def paths_of(nav):
    for entry in nav:
        inner = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(inner, str):
            yield inner
        else:
            yield from paths_of(inner)


def test_every_page_has_one_place_on_the_site():
    nav = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(paths_of(nav)) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_every_link_leads_to_a_file():
    lost = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        links = [link for link in LINK.findall(text) if not re.match(r"\w+:|#", link)]
        lost += [(page, to) for to in links if not (page.parent / to.split("#")[0]).exists()]
    assert lost == []


def test_every_picture_is_shown():
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    assert {path.resolve() for path in (DOCS / "pictures").iterdir()} <= shown
