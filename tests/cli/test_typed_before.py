"""Plans that were typed before: the same text again, and a new one when anything has changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import typed_before
from memfit.cli.typed_before import is_plain
from memfit.core.own_folder import own_folder

WORDS = ["plan", "gpt2", "--device", "h100-sxm"]
SOURCE = Path(typed_before.PACKAGE)
# runs the command as the installed script does, and tells whether the command line was built
SCRIPT = """
import sys
from memfit.cli import main
try:
    main()
finally:
    print("built" if "click" in sys.modules else "found", file=open("../how", "w"))
"""


class Typed:
    """A folder in which commands are typed, with a cache and a configuration of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, folder / "bin" / "memfit"
        self.script.parent.mkdir()
        self.script.write_text(SCRIPT)
        self.there = folder / "there"
        self.there.mkdir()
        self.plans = folder / "cache" / "plans"

    def run(self, *words: str, **more: str) -> tuple[str, int, bool]:
        """What it printed, its exit code, and whether it was found in the cache."""
        names = ("MEMFIT_NO_CACHE", "COLUMNS", "NO_COLOR")
        environment = {k: v for k, v in os.environ.items() if k not in names} | {
            "MEMFIT_CACHE": str(self.folder / "cache"), "XDG_CONFIG_HOME": str(self.folder), **more,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(self.script), *words], cwd=self.there, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stderr == "", done.stderr
        found = (self.folder / "how").read_text() == "found\n"
        return done.stdout, done.returncode, found


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    return Typed(tmp_path)


def test_the_same_words_print_the_same_text_without_planning_anew(typed: Typed) -> None:
    for words in (WORDS, [*WORDS, "--json"], [*WORDS, "--memory", "1MiB"]):
        first, second = typed.run(*words), typed.run(*words)
        assert (first[2], second[2]) == (False, True)
        assert first[:2] == second[:2]
        assert first[0].strip()
    assert second[1] == 3
    assert len(list(typed.plans.iterdir())) == 3


def test_a_damaged_or_outdated_answer_is_planned_anew(typed: Typed) -> None:
    first = typed.run(*WORDS)
    (kept,) = typed.plans.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole.replace(b"gpt2", b"gpt3"))
    assert typed.run(*WORDS) == first
    content = re.sub(rb'(core\.py": \[)\d+', rb"\g<1>1", kept.read_bytes().partition(b"\n")[2])
    kept.write_bytes(sha256(content).hexdigest().encode() + b"\n" + content)
    assert typed.run(*WORDS) == first  # a library has changed since


def test_prices_and_folders_of_the_users_own_are_read_at_once(typed: Typed) -> None:
    first = typed.run(*WORDS)
    own = typed.folder / "memfit"
    own.mkdir()
    (own / "prices.toml").write_text('[h100-sxm]\nprices = [{ usd_per_hour = "900 USD" }]\n')
    dear = typed.run(*WORDS)
    assert dear[0] != first[0]
    assert not dear[2]
    assert typed.run(*WORDS) == (*dear[:2], True)
    (typed.there / "gpt2").mkdir()
    (typed.there / "gpt2" / "config.json").write_text("{}")
    assert not is_there(typed, "gpt2")


def is_there(typed: Typed, name: str) -> bool:
    before = Path.cwd()
    os.chdir(typed.there)
    try:
        return is_plain(["plan", name])
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "more", [["--device", "cpu-x86"], [], ["--device", "h100-sxm", "--folder", "run"]], ids=str
)
def test_what_asks_the_machine_or_writes_files_is_not_kept(typed: Typed, more: list[str]) -> None:
    environment = {"MEMFIT_CACHE": str(typed.folder / "cache"), "MEMFIT_NO_CACHE": ""}
    subprocess.run(
        [sys.executable, str(typed.script), "plan", "gpt2", *more], cwd=typed.there, check=False,
        capture_output=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert (typed.folder / "how").read_text() == "built\n"
    assert not typed.plans.exists()


def test_the_switch_of_certificates_is_that_of_plans(typed: Typed) -> None:
    assert not typed.run(*WORDS, MEMFIT_NO_CACHE="1")[2]
    assert not typed.plans.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "gpt2"], ["plan"], ["plan", "--device", "h100-sxm"], ["plan", "gpt2", "xl"],
        ["plan", "openai/gpt2"], ["plan", "./gpt2"], ["plan", "~"], ["plan", "my model"],
        ["plan", "gpt2", "--set", "data=here.jsonl"], ["plan", "gpt2", "--set=data=here.jsonl"],
        ["plan", "here.jsonl"], ["plan", "gpt2", "--set", "lora.targets=[q_proj]"],
    ],
)  # fmt: skip
def test_words_that_may_name_files_or_hub_ids_are_left_alone(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.jsonl").touch()
    assert not is_plain(words)
    assert is_plain([*WORDS, "--set", "task.sequence_length=8192", "--gpus=8"])


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "a width": lambda _, patch: patch.setenv("COLUMNS", "120"),
    "colours": lambda _, patch: patch.setenv("NO_COLOR", "1"),
    "a language": lambda _, patch: patch.setenv("LC_ALL", "C"),
    "another cache of the hub": lambda _, patch: patch.setenv("HF_HOME", "/elsewhere"),
    "a terminal": lambda _, patch: patch.setattr(sys, "stdout", Terminal()),
    "a module": lambda top, _: edit(top / "package" / "code.py"),
    "a catalogue": lambda top, _: edit(top / "package" / "catalog" / "devices.toml"),
    "a new module": lambda top, _: (top / "package" / "new.py").touch(),
    "a device of one's own": lambda top, _: edit(top / "memfit" / "devices.toml"),
    "a calibration": lambda top, _: (top / "memfit" / "more.toml").touch(),
    "an installed plugin": lambda top, _: (top / "libraries" / "plugin.dist-info").mkdir(),
    "another Python": lambda _, patch: patch.setattr(sys, "version", "4.0"),
    "memory of the machine": lambda _, patch: patch.setattr(os, "sysconf", lambda name: 1),
}


class Terminal:
    encoding, errors = "utf-8", "strict"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return os.open("/dev/null", os.O_RDONLY)


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_plan_depends_on_is_in_its_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, own, libraries = (tmp_path / n for n in ("package", "memfit", "libraries"))
    for folder in (package / "catalog", own, libraries):
        folder.mkdir(parents=True)
    for file in (package / "code.py", package / "catalog" / "devices.toml", own / "devices.toml"):
        file.write_text("row")
    monkeypatch.setattr(typed_before, "PACKAGE", str(package))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(libraries)])
    monkeypatch.setattr(os, "get_terminal_size", lambda _: (100, 30))
    assert own_folder() == own
    before = typed_before._place_of(WORDS)
    assert typed_before._place_of(WORDS) == before
    CHANGES[name](tmp_path, monkeypatch)
    assert typed_before._place_of(WORDS) != before
    assert typed_before._place_of([*WORDS, "--json"]) != typed_before._place_of(WORDS)


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("open", ("/proc/meminfo", "r", 0)), ("open", ("data.jsonl", "r", 0)),
        ("open", (7, "r", 0)),
        ("open", (str(SOURCE / "made.toml"), "w", 0)),
        ("open", (str(SOURCE / "made.toml"), None, os.O_WRONLY | os.O_CREAT)),
        ("os.scandir", ("/sys",)), ("os.listdir", ("/srv",)), ("subprocess.Popen", ("nvidia-smi",)),
        ("socket.connect", (None, "huggingface.co")), ("ctypes.dlopen", ("libnvidia-ml.so",)),
        ("memfit.hub_folder", ("Qwen/Qwen3-0.6B",)),
    ],
)  # fmt: skip
def test_what_a_key_does_not_know_of_is_noticed(
    event: str, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "addaudithook", lambda _: None)
    streams = sys.stdout, sys.stderr
    try:
        watch = typed_before._Watch("nowhere")
    finally:
        sys.stdout, sys.stderr = streams
    for mine in (("open", (str(SOURCE / "catalog" / "devices.toml"), "r", 0)),
                 ("open", (str(own_folder() / "prices.toml"), "r", 0)),
                 ("os.listdir", (sys.path[-1],)), ("ctypes.dlopen", (None,))):  # fmt: skip
        watch._hear(*mine)
        assert watch.is_alone, mine
    watch._hear(event, arguments)
    assert not watch.is_alone


PLANNING = (
    "adapters", "allocator", "base_formats", "catalog", "cli", "core", "families", "files", "meta",
    "objectives", "optimizers", "parallelism", "plan", "records", "screens",
)  # fmt: skip


def test_every_name_of_the_environment_that_planning_reads_is_in_the_key() -> None:
    found = set()
    for package in PLANNING:
        for file in (SOURCE / package).rglob("*.py"):
            text = file.read_text()
            found |= set(re.findall(r'environ(?:ment)?(?:\.get\(|\[)"([A-Z_]+)"', text))
    assert {"NO_COLOR", "MEMFIT_CACHE", "XDG_CONFIG_HOME", "COLUMNS"} <= found
    for name in found:
        assert name in typed_before.NAMES or name.startswith(typed_before.PREFIXES), name


def test_the_folder_keeps_what_was_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.core.cache_folder import remove_oldest

    for number in range(5):
        file = tmp_path / str(number)
        file.write_bytes(b"x" * 100)
        os.utime(file, (number, 99 - number))
    remove_oldest(tmp_path, 250)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]
