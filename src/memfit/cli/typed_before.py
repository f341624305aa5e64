"""What `memfit plan` printed for the same words before, found before anything heavy is imported.

A plan of a catalogue's name depends on the words, on memfit's files and libraries, on the user's
catalogue and on where it prints to. All of that is in the key, but for the files of libraries,
which stand with the answer. An audit hook watches the run whose answer is to be cached: one that
reads any other file, writes one, starts a process, looks into the hub's cache or uses the network
is not. Words that may be a path or a hub id are left alone: a model's folder is read each time.
What cannot be read or written is passed over: a cache is never a reason to fail.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any, NamedTuple, TextIO, cast

from memfit.core.cache_folder import cache_folder, is_switched_off, remove_oldest
from memfit.core.own_folder import own_folder
from memfit.core.system.streams import guarded_output

LARGEST = 8 * 2**20  # bytes of the folder; the answers that were used longest ago go first
CODES = (0, 3)  # fits, and does not: what else a run ends with is told anew
PLAIN = re.compile(r"[A-Za-z0-9.:=,+_-]+")  # of a word without paths, hub ids and spaces
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARY = os.path.dirname(os.path.abspath(os.__file__))  # Python's own
ENDINGS = (".py", ".toml", ".json")
# of the environment: what decides files, colours, widths, languages
NAMES = (
    "HOME", "COLUMNS", "LINES", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "LANG", "LANGUAGE",
)  # fmt: skip
PREFIXES = ("MEMFIT_", "XDG_", "HF_", "HUGGINGFACE_", "LC_", "PYTHON")
READS = ("open", "os.listdir", "os.scandir")
ACTS = (
    "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec",
    "socket.connect", "socket.getaddrinfo", "socket.bind", "ctypes.dlopen", "memfit.hub_folder",
)  # fmt: skip
ITSELF = ("ctypes.dlopen", None)  # the process's own symbols, which importing ctypes opens
CODE = (".py", ".pyc")  # read by imports alone: the files of modules stand with the answer
WRITES = os.O_WRONLY | os.O_RDWR
Stamp = tuple[int, int]  # bytes and time of change of a file


class Answer(NamedTuple):
    """What a command printed, and how it ended."""

    text: str
    code: int


def run_typed(words: Sequence[str]) -> int | None:
    """Print what these words printed before, and return the exit code; None where it is unknown.

    Where the answer may be cached, everything from here on is watched, see `keep_typed`.
    """
    if is_switched_off() or not is_plain(words):
        return None
    place = _place_of(words)
    answer = _find(place)
    if answer is None:
        if sys.stdout is not None and sys.stderr is not None:
            _Watch.now = _Watch(place)
        return None
    with guarded_output() as (out, _):
        out.write(answer.text)
        out.flush()
        return None if out.is_lost else answer.code  # which is told by who runs it anew


def keep_typed(code: int) -> None:
    """Keep what has been printed since `run_typed`, where it depends on nothing else."""
    watch = _Watch.now
    if watch is not None and code in CODES:
        watch.keep(code)


def is_plain(words: Sequence[str]) -> bool:
    """Whether these are `plan`, one name, and options, none of which is, or names, a path."""
    if words[:1] != ["plan"] or not all(map(PLAIN.fullmatch, words)):
        return False
    names = list(takewhile(lambda word: not word.startswith("-"), words[1:]))
    parts = {part for word in words[1:] for part in (word, *word.split("="))}
    return len(names) == 1 and not any(map(os.path.lexists, parts - {""}))


def _place_of(words: Sequence[str]) -> str:
    """The file of an answer: its name is the digest of all that it depends on."""
    facts = [
        list(words), sys.version, sys.executable, sys.path, _describe_terminal(),
        _read_environment(), os.sysconf("SC_PHYS_PAGES"), _stamp_below(PACKAGE, ENDINGS),
        _stamp_below(str(own_folder()), ("",)), [_stamp(folder) for folder in sys.path],
    ]  # fmt: skip
    return str(cache_folder() / "plans" / f"{sha256(repr(facts).encode()).hexdigest()}.txt")


def _describe_terminal() -> list[object]:
    """Where it is printed: colours, width and characters depend on it."""
    found: list[object] = []
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stands = stream is not None and stream.isatty()
        size = os.get_terminal_size(stream.fileno()) if stands else None
        found.append((stands, size, getattr(stream, "encoding", ""), getattr(stream, "errors", "")))
    return found


def _read_environment() -> list[tuple[str, str]]:
    pairs = os.environ.items()
    return sorted((k, v) for k, v in pairs if k in NAMES or k.startswith(PREFIXES))


def _stamp(path: str) -> Stamp:
    """Size and time of change; (-1, 0) of what is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


def _stamp_below(top: str, endings: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every file below a folder."""
    found: list[tuple[str, int, int]] = []
    waiting = [top]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.name.endswith(endings):
                        stat = entry.stat()
                        found.append((entry.path, stat.st_size, stat.st_mtime_ns))
                    elif entry.name != "__pycache__" and entry.is_dir():
                        waiting.append(entry.path)
        except OSError:
            continue
    return sorted(found)


def _find(place: str) -> Answer | None:
    """The answer of this file; None where it is damaged, or a library's file has changed since."""
    try:
        with open(place, "rb") as file:
            digest, _, content = file.read().partition(b"\n")
        if digest != sha256(content).hexdigest().encode():
            return None
        data = json.loads(content)
        if any(_stamp(path) != tuple(stamp) for path, stamp in data["files"].items()):
            return None
        os.utime(place)  # it was used just now
        return Answer(data["text"], data["code"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


class _Copied:
    """A stream whose texts are collected as they are written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.parts: list[str] = []
        self.failed = False

    def write(self, text: str) -> int:
        """Write and keep."""
        try:
            written = self._stream.write(text)
        except BaseException:
            self.failed = True
            raise
        self.parts.append(text)
        return written

    def flush(self) -> None:
        """Flush; what fails leaves later texts unwritten."""
        try:
            self._stream.flush()
        except BaseException:
            self.failed = True
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Watch:
    """What one run reads, does and prints."""

    now: _Watch | None = None

    def __init__(self, place: str) -> None:
        self.place, self.start = place, time.time_ns()
        self.is_alone = True  # it has read nothing but memfit's, its libraries' and the key's files
        self.out, self.err = _Copied(sys.stdout), _Copied(sys.stderr)
        sys.stdout, sys.stderr = cast(TextIO, self.out), cast(TextIO, self.err)
        self._known = (PACKAGE, LIBRARY, sys.prefix, sys.base_prefix, str(own_folder()))
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in READS:
            self.is_alone = self.is_alone and self._is_known(event, arguments)
        elif event in ACTS and (event, *arguments) != ITSELF:
            self.is_alone = False

    def _is_known(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Whether what is read is in the key or will stand with the answer."""
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a descriptor: of which file is not said
        text = os.path.abspath(os.fsdecode(path))
        if event != "open":
            return text in sys.path or text.startswith(self._known)
        if "__pycache__" in text or text.endswith(CODE):
            return True
        _, mode, flags = arguments
        writes = flags & WRITES or set(mode or "") & set("wax+")
        return not writes and text.startswith(self._known)

    def keep(self, code: int) -> None:
        """Write the answer under its key."""
        failed = self.out.failed or self.err.failed or self.err.parts
        if failed or not self.is_alone or not self.out.parts:
            return
        files = dict(_stamp_libraries())
        if any(changed >= self.start for _, changed in files.values()):
            return  # it may have been imported before it changed
        from pathlib import Path

        from memfit.records import write_atomically

        text = "".join(self.out.parts)
        content = json.dumps({"code": code, "files": files, "text": text}).encode()
        try:
            place = Path(self.place)
            write_atomically(place, sha256(content).hexdigest().encode() + b"\n" + content)
            remove_oldest(place.parent, LARGEST)
        except OSError:  # a full disk, a folder that is not ours
            return


def _stamp_libraries() -> Iterator[tuple[str, Stamp]]:
    """The files of imported modules but for memfit's and Python's own."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or PACKAGE
        own = file.startswith((PACKAGE, LIBRARY)) and "-packages" not in file
        if not own:
            yield file, _stamp(file)
