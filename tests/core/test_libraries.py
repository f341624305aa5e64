"""Imports of libraries that log while they are imported stay quiet, and errors are shown."""

import gc
import logging
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from memfit.core.libraries import (
    TALKATIVE,
    install_extra,
    quiet_import,
    read_cudnn,
    uncollected,
)

IMPORT_PEFT = (
    "from memfit.core.libraries import quiet_import\nwith quiet_import():\n    import peft"
)


def test_warnings_are_left_out_while_importing_and_only_then():
    said = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())
    for name in TALKATIVE:
        logging.getLogger(name).addHandler(heard)
        with quiet_import():
            logging.getLogger(name).warning("noise")
            logging.getLogger(name).error("trouble")
        logging.getLogger(name).warning("news")
        logging.getLogger(name).removeHandler(heard)
    assert said == ["trouble", "news"] * len(TALKATIVE)


def test_importing_says_nothing():
    code = f"import memfit.train.run.loop\n{IMPORT_PEFT}"
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


@pytest.mark.parametrize(
    ("noted", "typed"),
    [
        (None, "pip install 'memfit[train]'"),  # from an index
        ('{"url": "file:///a/memfit-1.whl", "archive_info": {}}',
         "pip install 'memfit[train] @ file:///a/memfit-1.whl'"),
        ('{"url": "file:///a/clone", "dir_info": {}}',
         "pip install 'memfit[train] @ file:///a/clone'"),
        ('{"url": "file:///a/clone", "dir_info": {"editable": true}}',
         "pip install -e '/a/clone[train]'"),
        ("broken", "pip install 'memfit[train]'"),
    ],
)  # fmt: skip
def test_an_extra_is_installed_from_where_memfit_came_from(monkeypatch, noted, typed):
    class Installed:
        def read_text(self, name):
            assert name == "direct_url.json"
            return noted

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    assert install_extra("train") == typed


def test_without_an_installation_the_extra_is_named(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    assert install_extra("ui") == "pip install 'memfit[ui]'"


def test_what_is_imported_uncollected_is_never_looked_at_again():
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        left = [[] for _ in range(1000)]
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() - before >= len(left)
    finally:
        gc.unfreeze()


def test_the_folders_of_models_are_read_once():
    """transformers' own word for how often: the function remembers what it was asked."""
    code = (
        "from memfit.core.libraries import SCANNER, scan_models_once\n"
        "from transformers.utils import import_utils\n"
        "found = getattr(import_utils, SCANNER)\n"
        "{}\n"
        "before = found.cache_info().misses\n"
        "import transformers.models\n"
        "print(found.cache_info().misses - before)\n"
        "assert transformers.models.llama.LlamaConfig.model_type == 'llama'"
    )
    plain, once = (
        int(subprocess.run(
            [sys.executable, "-c", code.format(line)], capture_output=True, text=True, check=True
        ).stdout)
        for line in ("", "scan_models_once()")
    )  # fmt: skip
    assert plain > 0
    assert once == 0


@pytest.mark.parametrize(
    ("installed", "version"),
    [
        ((), None),
        (("nvidia_cudnn_cu12-9.10.2.21.dist-info",), (9, 10, 2)),
        (
            ("nvidia_cudnn_cu12-9.1.0.70.dist-info", "nvidia_cudnn_cu13-9.20.0.48.dist-info"),
            (9, 20, 0),
        ),
        (("nvidia_cudnn_frontend-1.9.0.dist-info",), None),
    ],
)
def test_the_version_of_cudnn_is_that_of_its_package(installed, version, tmp_path, monkeypatch):
    for name in installed:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "missing"), str(tmp_path)])
    read_cudnn.cache_clear()
    try:
        assert read_cudnn() == version
    finally:
        read_cudnn.cache_clear()
