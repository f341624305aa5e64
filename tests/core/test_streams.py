"""Output that cannot be written ends nothing that is under way."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.cli.app import run
from memfit.cli.options import note
from memfit.core.errors import InvalidRequest
from memfit.core.system.streams import Guarded, guard, guarded_output
from memfit.screens.widgets.terminal import Console, Styled
from memfit.train.run.progress import Plain

SOURCE = str(Path(__file__).parents[2] / "src")


class Broken(io.StringIO):
    """Fails from its second writing on."""

    def __init__(self, error):
        super().__init__()
        self.left, self.failure = 1, error

    def write(self, text):
        if not self.left:
            raise self.failure
        self.left -= 1
        return super().write(text)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), False),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (ValueError("I/O operation on closed file"), True),
    ],
)
def test_what_cannot_be_written_is_dropped_and_known(error, lost):
    stream = guard(Broken(error))
    assert guard(stream) is stream
    for word in ("one", "two", "three"):
        assert stream.write(word) == len(word)
    stream.flush()
    assert stream._stream.getvalue() == "one"
    assert stream.is_lost is lost


def test_what_the_encoding_lacks_becomes_a_question_mark():
    bytes_ = io.BytesIO()
    stream = guard(io.TextIOWrapper(bytes_, encoding="ascii"))
    stream.write("naïve \udc80")
    stream.flush()
    assert bytes_.getvalue() == b"na?ve ?"
    assert stream.error is None


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (MemoryError(), "memory ran out (MemoryError", 5),
        (ImportError("libx.so: failed to map segment from shared object"), "memory ran out", 5),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory ran out", 5),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory ran out", 5),
        (OSError(errno.ENOSPC, "No space left on device", "/x/plan.json"),
         "cannot write `/x/plan.json`: No space left on device", 5),
        (PermissionError(errno.EACCES, "Permission denied", "/x/plan.json"),
         "this user may not use `/x/plan.json`: Permission denied", 2),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "may not use `/x`: Read-only", 2),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 400), "cannot use `xxx", 2),
        (OSError(errno.EIO, "Input/output error"), "this is a bug", 1),
    ],
)  # fmt: skip
def test_what_the_system_refuses_is_no_bug(error, said, code, capsys):
    def fail():
        raise error

    assert run(fail) == code
    assert said in capsys.readouterr().err


NAME = "a\x1b[2J\x1b]0;t\x07b\x9bc\nerror: no\u2028d\u202ee\x85f"


def test_names_steer_no_terminal(capsys):
    def fail():
        raise InvalidRequest(f"unknown `{NAME}`", hint=NAME)

    assert run(fail) == 2
    console = Console(io.StringIO(), width=80, colour=True)
    console.write([Styled(NAME, "bold"), Styled("x")])
    note(quiet=False)(NAME)
    shown = Plain(io.StringIO())
    shown.note(NAME)
    lines = console.file.getvalue()
    assert lines.count("\n") == 1
    for text in (capsys.readouterr().err, lines, shown._stream.getvalue()):
        bare = text.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\n", "")
        assert bare.isprintable(), repr(bare)
        assert "\N{REPLACEMENT CHARACTER}" in bare


def test_streams_come_back(capsys):
    before = sys.stdout, sys.stderr
    with guarded_output() as (out, err):
        assert isinstance(sys.stdout, Guarded)
        assert (out, err) == (sys.stdout, sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("code", [0, 3, 5])
def test_a_reader_that_goes_changes_no_exit_code(code, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    finished = []

    def work():
        for _ in range(9):
            print("x")  # noqa: T201
        finished.append(True)
        return code

    assert run(work) == code
    assert finished


def test_a_full_disk_is_said_where_all_else_is_well(monkeypatch, capsys):
    full = Broken(OSError(errno.ENOSPC, "No space left on device"))
    for code, want in ((0, 2), (3, 3)):
        monkeypatch.setattr(sys, "stdout", full)
        assert run(lambda code=code: print("x" * 9) or print("y") or code) == want  # noqa: T201
    assert "could not be written: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "want"), [(None, 0), (0, 0), (7, 7), ("words", 1)])
def test_a_library_that_exits_keeps_its_code(code, want):
    def leave():
        raise SystemExit(code)

    assert run(leave) == want


def test_a_pipe_that_is_not_stdout_and_breaks_is_no_success(capsys):
    def fail():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert run(fail) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


def shell(command, cwd):
    environment = {**os.environ, "PYTHONPATH": SOURCE, "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_a_process_without_streams_writes_into_no_file(tmp_path):
    done = shell("$PYTHON -m memfit formats 1 --json 0<&- 1>&- 2>&-; echo $?", tmp_path)
    assert done.stdout == "0\n"
    code = (
        "import os; from memfit.core.system.streams import open_closed_streams as start; start();"
        "file = open('written', 'w'); os.write(1, b'printed'); file.close()"
    )
    shell(f'$PYTHON -c "{code}" 0<&- 1>&- 2>&-', tmp_path)
    assert (tmp_path / "written").read_text() == ""


def test_a_verdict_survives_head(tmp_path):
    done = shell(
        "$PYTHON -m memfit plan gpt2 --device h100-sxm --memory '1 KiB' | head -1;"
        " echo ${PIPESTATUS[0]}", tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["DOES NOT FIT  gpt2 on h100-sxm", "3"]
