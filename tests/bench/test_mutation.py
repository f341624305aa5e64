"""bench/mutation: faults of every kind, none in what only speaks, and none that stay."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "mutation"))
import choosing
import mutants
import naming
from running import Put

CODE = '''
def f(a, b: int = 3, *, c=True):
    """Adds 1 to 2."""
    if a <= b and not c:
        b.clear()
    return (a + 1) * b
'''
SPEAKS = """
from x import y
class A(B, frozen=True):
    @cached(maxsize=3)
    def __repr__(self):
        return "a" if self.n > 3 else "b"
    size: Annotated[int, 3]
    def g(self):
        print(1 + 2, f"{3 * 4}")
        raise InvalidRequest(f"{self.n + 1} of 3", hint="a" * 2)
"""


def found(code):
    sites = mutants.Sites("f.py", code.encode())
    sites.visit(ast.parse(code))
    return sites.found


def test_each_kind_of_fault_is_put_where_it_is_read():
    assert {(m.kind, m.before, m.after) for m in found(CODE)} == {
        ("constant", "3", "(3 + 1)"), ("boolean", "True", "False"), ("comparison", "<=", "<"),
        ("boolean", "and", "or"), ("boolean", "not c", "c"), ("dropped call", "b.clear()", "pass"),
        ("return none", "return (a + 1) * b", "return None"), ("arithmetic", "*", "//"),
        ("arithmetic", "+", "-"), ("constant", "1", "(1 + 1)"),
    }  # fmt: skip
    for mutant in found(CODE):
        assert ast.dump(ast.parse(mutant.put(CODE.encode()))) != ast.dump(ast.parse(CODE))
    blocks = {m.before: m.block for m in found(CODE)}
    assert (blocks["b.clear()"], blocks["*"], blocks["3"]) == (5, 2, 0)


def test_what_only_speaks_is_left_as_it_is():
    assert found(SPEAKS) == []
    (said,) = found("def f(notes):\n    notes.append('a sentence')\n")
    assert mutants.only_speaks(said)
    (kept,) = found("def f(rows):\n    rows.append(row)\n")
    assert not mutants.only_speaks(kept)


def test_a_mutant_is_in_the_tree_meanwhile_alone(tmp_path):
    file = tmp_path / "f.py"
    file.write_text(CODE)
    before = file.stat().st_mtime_ns
    mutant = next(m for m in found(CODE) if m.before == "<=")
    with Put(tmp_path, mutant):
        assert "a < b" in file.read_text()
        assert file.stat().st_mtime_ns != before
    assert (file.read_text(), file.stat().st_mtime_ns) == (CODE, before)


def test_tests_of_near_files_come_first_and_cost_no_more_than_they_may():
    costs = {
        "tests/plan/test_tape.py::a": 2.0, "tests/plan/test_tape.py::b": 9.0,
        "tests/plan/test_time.py::a": 0.1, "tests/train/test_step.py::a": 0.1,
        "tests/train/test_step.py::b": 3.0,
    }  # fmt: skip
    chosen = choosing.choose(list(costs), costs, 4.0, ["tests/plan/test_tape.py"])
    assert chosen == [
        "tests/plan/test_tape.py::a", "tests/plan/test_time.py::a", "tests/train/test_step.py::a",
    ]  # fmt: skip


def test_near_files_mirror_the_module_or_name_what_few_others_do():
    fault = next(m for m in mutants.find_sites("src/memfit/train/rl/values.py"))
    assert naming.find_near(fault, 1) == ["tests/train/rl/test_values.py"]
    noise = next(m for m in mutants.find_sites("src/memfit/train/step/build.py")
                 if m.before.startswith("add_noise("))  # fmt: skip
    near = naming.find_near(noise, 3)
    assert "tests/train/test_build.py" in near
    assert "tests/train/habits/test_regularisation.py" in near
    figures = next(m for m in mutants.find_sites("src/memfit/plan/step_time/work.py"))
    assert naming.find_near(figures, 1) == [naming.HOLDS_ALL]
