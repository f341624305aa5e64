"""Tiny text, a cache, and runs on them; what tests/train shares is imported from there."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiny_runs import CONFIG, write_text

from memfit.records.request import Request, Task


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def request_(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    data, held_out = write_text(root / "data"), write_text(root / "held_out", 12)
    return Request(model=CONFIG, task=Task(data=str(data), evaluation=str(held_out)))


@pytest.fixture
def go(request_, cache, tmp_path):
    from memfit.train.run.loop import train

    def start(recipe, folder="run", **options):
        return train(recipe, request_, tmp_path / folder, cache=cache, **options)

    return start
