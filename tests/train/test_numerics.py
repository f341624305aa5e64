"""Every numeric test of docs/numerics.toml fails of the bugs that stand beside it there."""

import __future__

import importlib
import inspect
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
from numerics_page import read_numerics

ASKED = {*range(1, 14), *range(18, 23)}  # of what memfit's own step computes on one device
BUGS = [(row.number, bug) for row in read_numerics() for bug in row.bug]
# of a check; of memfit's own check of itself; of one that wants an error
DIES = (AssertionError, ValueError, pytest.fail.Exception)


def find(where):
    """(module, plain function) of `module:function` or `module:class.function`."""
    name, _, path = where.partition(":")
    found = module = importlib.import_module(name)
    for part in path.split("."):
        found = getattr(found, part)
    return module, inspect.unwrap(found)


def rewrite(function, line, instead):
    """The code of the function with a part of its source replaced, which must be there once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__} has {source.count(line)} `{line}`"
    made = {}
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(line, instead), "<bug>", "exec", flags, dont_inherit=True)
    exec(code, function.__globals__, made)
    found = made[function.__name__]
    return inspect.unwrap(getattr(found, "__func__", found)).__code__


@contextmanager
def seeded(bug):
    """The function has the bug, whoever imported it; what its module cached is made anew."""
    module, function = find(bug.where)

    def forget():
        for value in vars(module).values():
            getattr(value, "cache_clear", lambda: None)()

    plain, function.__code__ = function.__code__, rewrite(function, bug.line, bug.instead)
    forget()
    try:
        yield
    finally:
        function.__code__ = plain
        forget()


def arguments(test, bug, request):
    names = inspect.signature(test).parameters
    assert bug.given.keys() <= names.keys()
    return bug.given | {n: request.getfixturevalue(n) for n in names if n not in bug.given}


@pytest.mark.parametrize("bug", [b for _, b in BUGS], ids=[f"{n}: {b.name}" for n, b in BUGS])
def test_a_bug_is_found(bug, request, monkeypatch):
    file, _, name = bug.test.partition("::")
    folder = Path(__file__).parents[1] / Path(file).parent
    monkeypatch.syspath_prepend(folder)  # whose tests need not be run beside these
    test = getattr(importlib.import_module(Path(file).stem), name)
    given = arguments(test, bug, request)
    with seeded(bug), pytest.raises(DIES) as died:
        test(**given)
    if died.type is pytest.fail.Exception:  # which is what a test that takes too long raises, too
        assert "DID NOT RAISE" in str(died.value)


def test_every_number_is_there():
    assert {row.number for row in read_numerics()} >= ASKED


def test_a_bug_whose_line_has_gone_is_told():
    _, bug = BUGS[0]
    with pytest.raises(AssertionError, match="has 0 `no such line`"):
        rewrite(find(bug.where)[1], "no such line", "")
