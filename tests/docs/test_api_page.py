"""The Python of docs/api.md runs as it stands, and prints what is said beside it."""

import re

import pytest
from code_blocks import ROOT, read_blocks

pytestmark = [pytest.mark.levers, pytest.mark.ways_out]
PAGE = ROOT / "docs" / "api.md"
BLOCKS = [b.body for b in read_blocks(PAGE) if b.language == "python" and not b.reason]


def test_the_page_has_examples():
    assert len(BLOCKS) == 7


@pytest.mark.parametrize("at", range(len(BLOCKS)))
def test_an_example_runs(at, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text('{"text": "a cat"}\n')
    exec(compile(BLOCKS[at], f"docs/api.md, block {at}", "exec"), {})
    out = capsys.readouterr().out
    for said in re.findall(r"#\s(.*)", BLOCKS[at]):
        if not said.startswith("which"):
            assert said.rstrip("…>").strip() in out
