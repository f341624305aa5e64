"""Imports of libraries that log while they are imported stay quiet, and errors are shown."""

import logging
import subprocess
import sys

import pytest

from memfit.core.libraries import TALKATIVE, quiet_import

IMPORT_PEFT = (
    "from memfit.core.libraries import quiet_import\nwith quiet_import():\n    import peft"
)


def test_warnings_are_left_out_while_importing_and_only_then(caplog):
    for name in TALKATIVE:
        with quiet_import():
            logging.getLogger(name).warning("noise")
            logging.getLogger(name).error("trouble")
        logging.getLogger(name).warning("news")
    assert [r.message for r in caplog.records] == ["trouble", "news"] * len(TALKATIVE)


@pytest.mark.parametrize("code", [IMPORT_PEFT, "import memfit.train.run.loop"])
def test_importing_says_nothing(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_hidden_packages_are_as_if_they_were_not_installed():
    code = (
        "import sys, importlib.util\n"
        "from memfit.core.libraries import hidden_packages\n"
        "finders = list(sys.meta_path)\n"
        "import json\n"
        "with hidden_packages(['wave', 'json']):\n"
        "    assert importlib.util.find_spec('wave') is None\n"
        "    assert importlib.util.find_spec('csv') is not None\n"
        "    import json, csv\n"  # what is imported stays, what is not hidden is found
        "    try:\n"
        "        import wave\n"
        "    except ImportError as error:\n"
        "        print(error, error.name)\n"
        "import wave\n"
        "assert sys.meta_path == finders and importlib.util.find_spec('wave')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "`wave` is hidden wave\n"
