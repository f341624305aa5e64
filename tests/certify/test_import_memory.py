"""What a run's imports take is measured once for each set of packages, and never guessed."""

import json
import subprocess
import sys

import pytest

from memfit import certify as certification
from memfit.certify import Order, cache, import_memory
from memfit.plan.request.problem import find_device
from memfit.records import to_json
from memfit.train.measure import resident
from memfit.train.measure.resident import read_anonymous

LINUX = pytest.mark.skipif(read_anonymous() is None, reason="the system does not count them")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.delenv(cache.SWITCH)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "imports"


@pytest.fixture
def measured(monkeypatch):
    """What was asked of the process, which answers with other figures each time."""
    seen = []

    def measure(*, adapters):
        seen.append(adapters)
        return 1000 + len(seen)

    monkeypatch.setattr(resident, "measure_imports", measure)
    return seen


def test_the_second_figure_is_the_first_one(place, measured):
    assert import_memory.measure_imports(adapters=False) == 1001
    assert import_memory.measure_imports(adapters=False) == 1001
    assert measured == [False]


def test_what_importing_leaves_in_the_environment_changes_no_key(place, monkeypatch):
    seen = []

    def measure(*, adapters):
        seen.append(adapters)
        monkeypatch.setenv("TORCH_LEFT_BEHIND", str(len(seen)))
        return 1000

    monkeypatch.setattr(resident, "measure_imports", measure)
    before = import_memory.make_key(adapters=False)
    import_memory.measure_imports(adapters=False)
    (file,) = place.iterdir()
    assert file.name == before


def test_a_run_of_adapters_imports_more(place, measured):
    assert import_memory.measure_imports(adapters=False) == 1001
    assert import_memory.measure_imports(adapters=True) == 1002
    assert import_memory.measure_imports(adapters=False) == 1001


@pytest.mark.parametrize("damage", [b"", b"9", b"a\n1", None], ids=["empty", "9", "other", "flip"])
def test_a_damaged_figure_is_measured_again(place, measured, damage):
    import_memory.measure_imports(adapters=False)
    (file,) = place.iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\n1001", b"\n1009") if damage is None else damage)
    assert import_memory.measure_imports(adapters=False) == 1002


def test_what_is_unknown_is_not_kept(place, monkeypatch):
    monkeypatch.setattr(resident, "measure_imports", lambda *, adapters: None)
    assert import_memory.measure_imports(adapters=False) is None
    assert not place.exists()


def test_switched_off_it_is_measured_each_time(place, measured, monkeypatch):
    monkeypatch.setenv(cache.SWITCH, "1")
    assert import_memory.measure_imports(adapters=False) == 1001
    assert import_memory.measure_imports(adapters=False) == 1002
    assert not place.exists()


def test_a_folder_that_cannot_be_written_is_no_failure(place, measured):
    place.parent.mkdir()
    place.write_text("a file where the folder should be")
    assert import_memory.measure_imports(adapters=False) == 1001
    assert import_memory.measure_imports(adapters=False) == 1002


def installed(folder, monkeypatch):
    (folder / "scipy-9.9.dist-info").mkdir()


def upgraded(folder, monkeypatch):
    (folder / "pandas-1.0.dist-info").rename(folder / "pandas-2.0.dist-info")


def another_interpreter(folder, monkeypatch):
    monkeypatch.setattr(sys, "version", "3.99")


def another_kernel(folder, monkeypatch):
    monkeypatch.setattr(import_memory.platform, "release", lambda: "9.9")


def another_machine(folder, monkeypatch):
    monkeypatch.setattr(import_memory.platform, "node", lambda: "elsewhere")


def another_allocator(folder, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")


def other_code(folder, monkeypatch):
    monkeypatch.setattr(cache, "describe_files", lambda top, endings: "another file")


@pytest.mark.parametrize(
    "change",
    [
        installed, upgraded, another_interpreter, another_kernel, another_machine,
        another_allocator, other_code,
    ],
)  # fmt: skip
def test_whatever_it_depends_on_makes_it_another_figure(
    place, measured, tmp_path, monkeypatch, change
):
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "pandas-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    before = import_memory.make_key(adapters=False)
    assert import_memory.make_key(adapters=False) == before
    change(folder, monkeypatch)
    assert import_memory.make_key(adapters=False) != before


@LINUX
@pytest.mark.slow
def test_a_known_figure_gives_the_certificate_that_measuring_gives(place, tiny_recipe):
    """Two processes: one imports all that a run imports, the other what the step needs."""
    order = Order(recipe=tiny_recipe, device=find_device("cpu"), usable=2**33)
    certificates, imported = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "memfit.certify"],
            input=to_json(order, indent=-1), capture_output=True, text=True, check=True,
            env=certification.child_environment(),
        )  # fmt: skip
        certificates.append(json.loads(done.stdout))
        imported.append("memfit.train.run.session" in done.stderr)
        del certificates[-1]["seconds"]
    assert imported == [True, False]
    assert certificates[0] == certificates[1]
    (process,) = [e for e in certificates[1]["memory"]["entries"] if e["owner"] == "process"]
    (file,) = place.iterdir()
    assert process["nbytes"] >= int(file.read_bytes().partition(b"\n")[2]) > 2**26
