"""Programs run where `make neighbours` has installed TRL, as oracles; skipped where it has not.

One process has imported TRL, which takes 8 CPU seconds, and forks for each program.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NEIGHBOURS = Path(sys.prefix) / "neighbours"
PYTHON = NEIGHBOURS / "trainers" / "bin" / "python"
SERVER = """
import json, os, runpy, sys, traceback
import torch, datasets, trl
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, RewardTrainer, SFTTrainer


def run(asked):
    streams = (("input", os.O_RDONLY), ("output", os.O_WRONLY), ("errors", os.O_WRONLY))
    for number, (name, how) in enumerate(streams):
        os.dup2(os.open(asked[name], how), number)
    sys.stdin = open(0, closefd=False)
    sys.argv = asked["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
for line in sys.stdin:
    child = os.fork()
    if not child:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""


def run_program(path, *arguments, text=""):
    """Run a program of `tests/other_trainers`, or another by its whole path, with memfit and the
    tests to import, and return its output.

    text: its stdin.
    """
    if not PYTHON.exists():
        pytest.skip("`make neighbours` installs TRL")
    with tempfile.TemporaryDirectory(prefix="memfit-neighbours-") as folder:
        files = {name: Path(folder) / name for name in ("input", "output", "errors")}
        for name, file in files.items():
            file.write_text(text if name == "input" else "")
        argv = [TESTS / "other_trainers" / path, *arguments]
        asked = {"argv": [*map(str, argv)]} | {name: str(file) for name, file in files.items()}
        server = find_server()
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        code = server.stdout.readline()
        assert code == "0\n", f"{code or 'TRL did not start'}: {files['errors'].read_text()}"
        return files["output"].read_text()


def run_with_older(folder, name, home, *arguments):
    """Run a program of `tests/other_trainers` in a process of its own, whose packages are first
    those of this folder of the neighbours; home: a folder that is its HOME."""
    first = NEIGHBOURS / folder
    if not (PYTHON.exists() and first.exists()):
        pytest.skip("`make neighbours` installs TRL")
    around = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, (first, TESTS.parent / "src", TESTS))),
        "HOME": str(home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", str(TESTS / "other_trainers" / name), *map(str, arguments)],
        capture_output=True, text=True, check=False, env=around,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@cache
def find_server():
    """The process that has imported TRL; it ends with this one."""
    home = tempfile.TemporaryDirectory(prefix="memfit-home-")
    around = {
        **os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}",
        "HOME": home.name, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    server = subprocess.Popen(
        [str(PYTHON), "-W", "ignore", "-c", SERVER], env=around, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def end():
        with suppress(OSError):
            server.stdin.close()
        server.wait()
        server.stdout.close()
        home.cleanup()

    atexit.register(end)
    return server
