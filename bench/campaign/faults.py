"""Damage to every file of a run, and what becomes of the run when it goes on.

    python bench/campaign/faults.py [--seed N] [--count N] [--seconds S]

A tiny run is made once, stopped before its end and also finished. Of a copy one file is damaged,
and the same run is started again. Held: the losses and the final weights are those of a run that
nothing happened to, bit by bit, or the damage is said (a warning in run.json) or refused by name;
nothing is silent, and nothing ends in a traceback. Results: bench/results/campaign_faults.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "train")]

from mutate import cut, drop, flip, insert  # noqa: E402
from tiny_runs import CONFIG, tiny_recipe, write_text  # noqa: E402

from memfit.core.errors import Error  # noqa: E402
from memfit.records import write_atomically  # noqa: E402
from memfit.records.request import Request, Task  # noqa: E402
from memfit.train.run import loop  # noqa: E402
from memfit.train.run.loop import Cadence, train  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_faults.json"
STEPS, STOPPED = 6, 5
Damage = Callable[[random.Random, bytes], bytes]


def zeros(chance: random.Random, content: bytes) -> bytes:
    """A block of zeros, as a disk that lost power leaves."""
    at = chance.randrange(len(content) + 1)
    return content[:at] + bytes(min(512, len(content) - at)) + content[at + 512 :]


def empty(chance: random.Random, content: bytes) -> bytes:
    """Nothing."""
    del chance, content
    return b""


DAMAGES: dict[str, Damage] = {
    "bit": flip, "cut": cut, "drop": drop, "insert": insert, "zeros": zeros, "empty": empty,
}  # fmt: skip


class Stop(Exception):
    """Ends a run after a step, as a kill does."""


class Runs:
    """The two runs that are copied, and what an undamaged one learns."""

    def __init__(self, root: Path) -> None:
        self.root = root
        data = write_text(root / "data")
        self.request = Request(model=CONFIG, task=Task(data=str(data)))
        self.recipe = tiny_recipe(steps=STEPS)
        self.losses = self.go(root / "finished").losses
        self.weights = (root / "finished" / "model" / "model.safetensors").read_bytes()
        self._begin(root / "begun")

    def go(self, folder: Path) -> Any:
        """Train, or go on."""
        cadence = Cadence(save_every=2, watch_every=50)
        return train(self.recipe, self.request, folder, cadence=cadence, cache=self.root / "cache")

    def _begin(self, folder: Path) -> None:
        """A run that is lost after step STOPPED: its newest checkpoint is of the step before."""
        plain = loop._advance

        def advance(session: Any, built: Any, log: Any, index: int) -> None:
            if index == STOPPED:
                raise Stop
            plain(session, built, log, index)

        loop._advance = advance
        try:
            self.go(folder)
        except Stop:
            pass
        finally:
            loop._advance = plain


def become(runs: Runs, folder: Path, file: str) -> tuple[str, str]:
    """What a damaged run becomes, and in which words."""
    try:
        run = runs.go(folder)
    except Error as error:
        named = Path(file).name in str(error) or Path(file).parts[0] in str(error)
        return ("refused by name" if named else "refused without a name"), error.message
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    weights = (folder / "model" / "model.safetensors").read_bytes()
    equal = weights == runs.weights
    said = [text for text in run.warnings if "passing over" in text or "damaged" in text
            or "changed" in text]  # fmt: skip
    if equal and run.losses == runs.losses:
        return "bit-equal", "; ".join(said)
    return ("said" if equal and said else "silent"), "; ".join(said)


FAILED = ("silent", "traceback", "refused without a name")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    chance, until = random.Random(asked.seed), time.monotonic() + asked.seconds
    found: Counter[str] = Counter()
    by_file: dict[str, Counter[str]] = {}
    failures: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="memfit-") as place:
        runs = Runs(Path(place))
        kinds = {
            kind: sorted(
                str(path.relative_to(Path(place) / kind))
                for path in (Path(place) / kind).rglob("*")
                if path.is_file() and path.name != ".lock"
            )
            for kind in ("begun", "finished")
        }
        for _ in range(asked.count):
            if time.monotonic() > until:
                break
            kind = chance.choice(("begun", "begun", "finished"))
            file, damage = chance.choice(kinds[kind]), chance.choice((*DAMAGES, "missing"))
            folder = Path(place) / "damaged"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(Path(place) / kind, folder)
            if damage == "missing":
                (folder / file).unlink()
            else:
                content = (folder / file).read_bytes()
                (folder / file).write_bytes(DAMAGES[damage](chance, content))
            became, words = become(runs, folder, file)
            found[became] += 1
            by_file.setdefault(f"{kind}: {Path(file).name}", Counter())[became] += 1
            if became in FAILED:
                failures.append({"run": kind, "file": file, "damage": damage, "became": became,
                                 "words": words[:300]})  # fmt: skip
                print(failures[-1], flush=True)
    answer = {
        "seed": asked.seed, "faults": found.total(), "failed": len(failures),
        "became": dict(sorted(found.items())),
        "by_file": {name: dict(counts) for name, counts in sorted(by_file.items())},
        "failures": failures,
    }  # fmt: skip
    write_atomically(asked.out, (json.dumps(answer, indent=1) + "\n").encode())
    print(json.dumps(answer["became"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
