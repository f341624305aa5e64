"""Every code block of the documentation is run by a test, or says why it is not."""

import re
import shlex

import pytest
from code_blocks import FENCE, ROOT, pages, read_blocks
from test_docs import PAGES

from memfit import api
from typed_commands import quick

BLOCKS = [block for page in pages() for block in read_blocks(page)]
# run whole, in order, by tests/docs/test_docs.py
ELSEWHERE = {*PAGES, ROOT / "docs" / "quickstart.md", ROOT / "docs" / "certificate.md",
             ROOT / "docs" / "objectives.md"}  # fmt: skip
API = ROOT / "docs" / "api.md"  # its Python is run by tests/docs/test_api_page.py
COMMANDS = [
    pytest.param(block, id=block.name)
    for block in BLOCKS
    if block.language == "sh" and not block.reason and block.page not in ELSEWHERE
]
REQUESTS = [
    pytest.param(block, id=block.name)
    for block in BLOCKS
    if block.language == "yaml" and not block.reason
]


def test_every_fence_is_a_block():
    assert len(BLOCKS) > 60
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^```", text, re.M)) == 2 * len(FENCE.findall(text)), page


def test_every_block_is_run_or_says_why_not():
    for block in BLOCKS:
        if block.reason:
            assert len(block.reason.split()) >= 3, block.name
        elif block.language == "python":
            assert block.page == API, block.name
        else:
            assert block.language in ("sh", "yaml", "text"), block.name


def lines(body):
    return re.sub(r"\\\n\s*", "", body).splitlines()


def type_line(line):
    """The exit code of one line, with what it said on stderr."""
    name, *words = shlex.split(line, comments=True)
    assert name == "memfit", line
    code, out, err = quick(*words)
    assert out or err
    return code, err


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
@pytest.mark.parametrize("block", COMMANDS)
def test_the_commands_of_a_block_run(block, tmp_path, monkeypatch):
    """In a folder with the page's own request, and with what a command checks: TRL's files."""
    monkeypatch.chdir(tmp_path)
    for other in read_blocks(block.page):
        if other.language == "yaml" and other.number < block.number:
            (tmp_path / "request.yaml").write_text(other.body)
    (tmp_path / "config.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 512\nper_device_train_batch_size: 1\n"
    )
    (tmp_path / "train.py").write_text(
        "from trl import SFTTrainer\nSFTTrainer('Qwen/Qwen3-0.6B', train_dataset=rows).train()\n"
    )
    for line in lines(block.body):
        code, err = type_line(line)
        assert code == (3 if "exits with 3" in line else 0), (line, err)


@pytest.mark.parametrize("block", REQUESTS)
def test_a_request_of_a_page_is_read(block, tmp_path):
    file = tmp_path / "request.yaml"
    file.write_text(block.body)
    assert api.read(file).model


def test_readme_is_one_screen():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 55
    (block,) = (b for b in read_blocks(ROOT / "README.md") if b.language == "sh")
    assert len(lines(block.body)) == 3
    assert len(re.findall(r"^\| .*\d.* \|$", text.partition("## How good")[2], re.M)) == 5
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).exists(), target
