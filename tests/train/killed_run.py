"""A run in a process of its own, for the test that kills it."""

from pathlib import Path

from tiny_runs import CONFIG, tiny_recipe

from memfit.records.request import Request, Task
from memfit.train.run.loop import Cadence, train


def run(folder: Path, data: Path, cache: Path) -> None:
    request = Request(model=CONFIG, task=Task(data=str(data)))
    cadence = Cadence(save_every=2, watch_every=50)
    train(tiny_recipe(steps=80), request, folder, cadence=cadence, cache=cache)
