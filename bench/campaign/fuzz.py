"""Damaged inputs for every reader, and what is held: an answer, soon, in bounded memory.

    python bench/campaign/fuzz.py [--seed N] [--count N] [--seconds S] [--reader NAME]

`--count` inputs a reader, until `--seconds` are over. Held: no exit code 1 and no traceback, none
above 5 s of CPU or 1 GiB more than the process had. What fails is minimised and written to
tests/regressions/READER/, and the counts to bench/results/campaign_fuzz.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from mutate import minimise  # noqa: E402
from readers import Reader, all_readers, draw  # noqa: E402

from memfit.records import write_atomically  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_fuzz.json"
REGRESSIONS = ROOT / "tests" / "regressions"
MOST_SECONDS = 5.0  # of CPU
MOST_BYTES = 2**30
WHOLE = (0, 3, 4)  # exit codes: it fits, it does not, it may


class TooLong(BaseException):
    """Raised within a reader that takes more CPU than it may."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong after so many seconds of CPU."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {seconds:g} s of CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def judge(reader: Reader, content: bytes) -> tuple[str, int]:
    """Why the reader failed on it, empty where it did not; and its exit code."""
    folder = Path(tempfile.mkdtemp(prefix="memfit-"))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with limited(MOST_SECONDS):
            code = reader.read(content, folder)
    except TooLong as error:
        return str(error), -1
    except AssertionError as error:
        said = [line for line in str(error).splitlines() if line.startswith("error: ")]
        return said[0] if said else f"assertion: {error}"[:300], 1
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {error}"[
            :300
        ], 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held
    return (f"{grown} bytes more were held" if grown > MOST_BYTES else ""), code


def check_seeds(reader: Reader) -> None:
    """Raise where a whole input is refused: what is damaged must be worth reading."""
    for content in reader.seeds:
        with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
            code = reader.read(content, Path(folder))
        if code not in WHOLE:
            raise SystemExit(f"{reader.name}: a whole input ends with {code}: {content[:200]!r}")


def likeness(problem: str) -> str:
    """Failures of one cause, as far as its words tell."""
    return "".join(c for c in problem if c.isalpha() or c in "_.: ")[:90]


def keep(reader: Reader, content: bytes, problem: str) -> Path:
    """Minimise a failure and write it where the tests read it again."""
    kind = likeness(problem)
    small = minimise(content, lambda shorter: likeness(judge(reader, shorter)[0]) == kind, 120)
    name = hashlib.sha256(small).hexdigest()[:12]
    folder = REGRESSIONS / reader.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(small)
    return folder / name


def run_reader(reader: Reader, seed: int, count: int, until: float) -> dict[str, Any]:
    """What became of one reader's inputs."""
    chance = random.Random(f"{seed} {reader.name}")
    codes: dict[str, int] = {}
    failures: dict[str, str] = {}
    done = failed = 0
    slowest = 0.0
    check_seeds(reader)
    for _ in range(count):
        if time.monotonic() > until:
            break
        content = draw(reader, chance)
        start = time.process_time()
        problem, code = judge(reader, content)
        slowest = max(slowest, time.process_time() - start)
        done += 1
        codes[str(code)] = codes.get(str(code), 0) + 1
        if problem:
            failed += 1
            if likeness(problem) not in failures:
                failures[likeness(problem)] = problem
                path = keep(reader, content, problem)
                print(f"{reader.name}: {problem}\n  {path}", flush=True)
    return {
        "inputs": done, "failed": failed, "exit_codes": dict(sorted(codes.items())),
        "slowest_cpu_seconds": round(slowest, 2), "failures": sorted(failures.values()),
    }  # fmt: skip


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--reader", action="append")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("XDG_CONFIG_HOME", tempfile.mkdtemp(prefix="memfit-none-"))
    readers = [r for r in all_readers() if not asked.reader or r.name in asked.reader]
    until = time.monotonic() + asked.seconds
    found: dict[str, Any] = {}
    for at, reader in enumerate(readers):
        if not reader.seeds:
            continue
        share = time.monotonic() + (until - time.monotonic()) / (len(readers) - at)
        found[reader.name] = run_reader(reader, asked.seed, asked.count, share)
        row = found[reader.name]
        print(f"{reader.name:20} {row['inputs']:6} inputs  {row['failed']} failed", flush=True)
    total = sum(row["inputs"] for row in found.values())
    failed = sum(row["failed"] for row in found.values())
    answer = {"seed": asked.seed, "inputs": total, "failed": failed, "readers": found}
    write_atomically(asked.out, (json.dumps(answer, indent=1) + "\n").encode())
    print(f"{total} inputs, {failed} failed; wrote {asked.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
