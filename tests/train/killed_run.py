"""Runs in processes of their own, for the test that kills them.

Reads `folder data cache` from each line of its input and trains there in a forked process: the
libraries are imported once, and each run is still a process that `kill -9` can end anywhere.
Writes the process's id when it has begun and its exit status when it has ended.
"""

import gc
import os
import sys
import traceback
from pathlib import Path

import torch
from tiny_runs import CONFIG, tiny_recipe

from memfit.records.request import Request, Task
from memfit.train.run.loop import Cadence, train
from memfit.train.step.build import build_model


def run(folder: Path, data: Path, cache: Path) -> None:
    request = Request(model=CONFIG, task=Task(data=str(data)))
    cadence = Cadence(save_every=2, watch_every=50)
    train(tiny_recipe(steps=80), request, folder, cadence=cadence, cache=cache)


def main() -> None:
    assert torch.get_num_threads() == 1, "OMP_NUM_THREADS=1 is missing"  # see ranks_run.py
    build_model(tiny_recipe(), "cpu")  # imports what is only imported when it is needed
    gc.freeze()  # which no collection need look at again
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                run(*map(Path, line.split()))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{os.waitpid(child, 0)[1]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
