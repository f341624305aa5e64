"""What a run's imports take is measured once for each set of packages, and never guessed."""

import json
import logging
import subprocess
import sys

import pytest

from memfit import certify as certification
from memfit.certify import Order, cache, import_memory
from memfit.core.errors import NotCertified
from memfit.core.system.processes import child_environment
from memfit.plan.request.problem import find_device
from memfit.records import to_json
from memfit.train.measure.resident import read_anonymous

LINUX = pytest.mark.skipif(read_anonymous() is None, reason="the system does not count them")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.delenv(cache.SWITCH)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "imports"


@pytest.fixture
def measured(monkeypatch):
    """What was asked of the process that measures, which finds another figure each time."""
    seen = []

    def start(words, environment):
        seen.append(words)
        figure = 1000 + len(seen)
        return lambda: figure

    monkeypatch.setattr(import_memory, "_start", start)
    return seen


def measure(*, adapters=False, lean=True):
    return import_memory.start_measuring(
        child_environment(), adapters=adapters, lean=lean
    )()  # fmt: skip


def test_the_second_figure_is_the_first_one(place, measured):
    assert measure() == 1001
    assert measure() == 1001
    assert measured == [(import_memory.LEAN,)]


def test_what_importing_leaves_in_the_environment_changes_no_key(place, measured, monkeypatch):
    """Libraries change `os.environ`; the key is of the environment before them."""
    environment = child_environment()
    monkeypatch.setenv("TORCH_LEFT_BEHIND", "1")
    import_memory.start_measuring(environment, adapters=False, lean=True)()
    monkeypatch.delenv("TORCH_LEFT_BEHIND")
    assert measure() == 1001


@pytest.mark.parametrize("more", [{"adapters": True}, {"lean": False}])
def test_a_run_that_imports_more_has_a_figure_of_its_own(place, measured, more):
    assert measure() == 1001
    assert measure(**more) == 1002
    assert measure() == 1001


# a certificate that has such a process, and what a switch turns off, are below
@pytest.mark.wide
@pytest.mark.parametrize("switch", ["", "1"])
def test_a_process_beside_this_one_measures(place, monkeypatch, switch):
    """It answers as often as it is asked, and what it found is kept where anything is."""
    monkeypatch.setenv(cache.SWITCH, switch)
    asked = {"adapters": False, "lean": True}
    wait = import_memory.start_measuring(child_environment(), **asked)
    found = wait()
    assert wait() == found
    if found is None:
        pytest.skip("the system does not count anonymous pages")
    assert found > 2**26
    assert place.exists() == (not switch)
    if not switch:
        monkeypatch.setattr(import_memory, "_start", None)
        assert measure() == found


@pytest.mark.parametrize("damage", [b"", b"9", b"a\n1", None], ids=["empty", "9", "other", "flip"])
def test_a_damaged_figure_is_measured_again(place, measured, damage):
    measure()
    (file,) = place.iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\n1001", b"\n1009") if damage is None else damage)
    assert measure() == 1002


def test_what_is_unknown_is_not_kept(place, monkeypatch):
    monkeypatch.setattr(import_memory, "_start", lambda words, environment: lambda: None)
    assert measure() is None
    assert not place.exists()


def test_switched_off_it_is_measured_each_time(place, measured, monkeypatch):
    monkeypatch.setenv(cache.SWITCH, "1")
    assert measure() == 1001
    assert measure() == 1002
    assert not place.exists()


def test_a_folder_that_cannot_be_written_is_no_failure(place, measured):
    place.parent.mkdir()
    place.write_text("a file where the folder should be")
    assert measure() == 1001
    assert measure() == 1002


def test_a_process_that_cannot_measure_is_not_taken_for_one_that_knows_nothing(place):
    environment = {**child_environment(), "PYTHONPATH": ""}
    environment["PYTHONSTARTUP"] = environment["PYTHONHOME"] = "/nowhere"
    wait = import_memory.start_measuring(environment, adapters=False, lean=True)
    with pytest.raises(NotCertified, match="ended with code 1"):
        wait()


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
    before = import_memory.make_key((import_memory.LEAN,))
    assert import_memory.make_key((import_memory.LEAN,)) == before
    change(folder, monkeypatch)
    assert import_memory.make_key((import_memory.LEAN,)) != before


@LINUX
@pytest.mark.slow
def test_a_known_figure_gives_the_certificate_that_measuring_gives(place, tiny_recipe):
    """The first has a process beside it import all that a run imports, the second has none."""
    order = Order(recipe=tiny_recipe, device=find_device("cpu"), usable=2**33)
    certificates, imported = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "memfit.certify"],
            input=to_json(order, indent=-1), capture_output=True, text=True, check=True,
            env={**child_environment(), "PYTHONPROFILEIMPORTTIME": "1"},
        )  # fmt: skip
        certificates.append(json.loads(done.stdout))
        imported.append("memfit.train.run.session" in done.stderr)
        del certificates[-1]["seconds"]
    assert imported == [True, False]
    assert certificates[0] == certificates[1]
    (process,) = [e for e in certificates[1]["memory"]["entries"] if e["owner"] == "process"]
    (file,) = place.iterdir()
    assert process["nbytes"] >= int(file.read_bytes().partition(b"\n")[2]) > 2**26


@pytest.mark.parametrize(("free", "waits"), [(2**30, 1), (2**33, 0)])
def test_where_memory_is_short_one_process_follows_the_other(tiny_recipe, monkeypatch, free, waits):
    asked = []

    def start(environment, *, adapters, lean):
        return lambda: asked.append(lean)

    monkeypatch.setattr(import_memory, "start_measuring", start)
    monkeypatch.setattr(certification, "find_free", lambda: free)
    order = Order(recipe=tiny_recipe, device=find_device("cpu"), usable=2**33)
    certification.start_measuring([to_json(order, indent=-1)], {})
    assert asked == [True] * waits


@pytest.mark.parametrize("lean", [False, True])
def test_libraries_that_are_imported_say_nothing_that_nobody_can_act_on(monkeypatch, capfd, lean):
    """bitsandbytes, which peft imports, warns of a package on processors that compute in bf16."""

    def warn(*names, **rest):
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning("no kernels")

    monkeypatch.setattr(import_memory, "import_module", warn)
    monkeypatch.setattr(import_memory, "import_lean", warn)
    import_memory.import_for_run(adapters=True, lean=lean)
    assert capfd.readouterr().err == ""
    warn()
    assert "no kernels" in capfd.readouterr().err
