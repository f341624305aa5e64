"""The code blocks of the documentation, each with its language and, where it is not run, why."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*?) -->\n)?```(?P<language>[^\n]*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)


class Block(NamedTuple):
    """One block; `reason` is why no test runs it, "" of one that is run."""

    page: Path
    number: int
    language: str
    body: str
    reason: str

    @property
    def name(self):
        """Page and number, as a test is called."""
        return f"{self.page.relative_to(ROOT)}:{self.number}"


def read_blocks(page):
    """The blocks of a page, in order."""
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [
        Block(page, at, m["language"], m["body"], m["reason"] or "") for at, m in enumerate(found)
    ]


def pages():
    """README and docs, but for what exports wrote."""
    return [
        page
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        if "targets" not in page.parts
    ]
