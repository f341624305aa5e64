"""Cached certificates: found by everything that they depend on, and by nothing less."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from made_by_hand import certificate, plan
from memfit import certify as certification
from memfit.certify import Order, cache
from memfit.core.errors import NotCertified
from memfit.plan.request.problem import find_device
from memfit.records import to_data
from typed_commands import STATED, quick, strict, write

GIB = 2**30


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.delenv(cache.SWITCH)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "certificates"


@pytest.fixture
def runs(monkeypatch):
    """The orders that were run, of which none is slow: the answers are made up."""
    seen = []

    def answer(orders):
        seen.extend(orders)
        return [made(order) for order in orders]

    monkeypatch.setattr(certification, "_run", answer)
    return seen


def made(order):
    return msgspec.structs.replace(certificate(plan()), recipe=order.recipe, device=order.device.id)


@pytest.fixture
def order(tiny_recipe):
    recipe = msgspec.structs.replace(tiny_recipe, device="h100-sxm")
    return Order(recipe=recipe, device=find_device("h100-sxm"), usable=GIB)


def certify(order):
    (found,) = certification.certify_all([order])
    return found


def test_the_second_answer_comes_from_the_cache_and_is_the_first(place, runs, order):
    first, second = certify(order), certify(order)
    assert len(runs) == 1
    assert (first.from_cache, second.from_cache) == (False, True)
    assert msgspec.structs.replace(second, from_cache=False) == first


def changed_file(monkeypatch):
    monkeypatch.setattr(cache, "describe_files", lambda top, endings: "another file")


def changed_library(monkeypatch):
    monkeypatch.setattr(cache, "installed_versions", lambda names: {"torch": "9.9"})


@pytest.mark.parametrize("change", [changed_file, changed_library])
def test_other_code_is_another_certificate(place, runs, order, monkeypatch, change):
    certify(order)
    change(monkeypatch)
    assert not certify(order).from_cache
    assert certify(order).from_cache


@pytest.mark.parametrize(
    "change",
    [
        {"usable": 2 * GIB},
        {"device": find_device("a100-sxm-80")},
        {"rank": 1},
        {"recipe": {"micro_batch": 1}},
        {"recipe": {"allocator": "expandable_segments:True"}},
        {"recipe": {"sequence_length": 8}},
    ],
    ids=str,
)
def test_another_order_is_another_certificate(place, runs, order, change):
    certify(order)
    if isinstance(inner := change.get("recipe"), dict):
        change = {"recipe": msgspec.structs.replace(order.recipe, **inner)}
    assert not certify(msgspec.structs.replace(order, **change)).from_cache
    assert certify(order).from_cache


def test_weights_that_come_to_this_machine_make_another_certificate(place, order, tmp_path):
    home = tmp_path / "model"
    home.mkdir()
    keys = {cache.make_key("", str(home), on_cpu=False)}
    (home / "model.safetensors").write_bytes(b"1")
    keys.add(cache.make_key("", str(home), on_cpu=False))
    (home / "model.safetensors").write_bytes(b"12")
    keys.add(cache.make_key("", str(home), on_cpu=False))
    assert len(keys) == 3


def test_files_of_the_hubs_cache_are_seen(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    before = cache.describe_source("meta/llama")
    home = tmp_path / "models--meta--llama" / "snapshots" / "1"
    home.mkdir(parents=True)
    (home / "model.safetensors").write_bytes(b"1")
    assert "model.safetensors" in cache.describe_source("meta/llama")
    assert not before


@pytest.mark.parametrize("damage", [b"", b"x", b"a\n{}", None], ids=["empty", "x", "other", "flip"])
def test_a_damaged_entry_is_ignored_and_replaced(place, runs, order, damage):
    first = certify(order)
    (file,) = place.iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"h100", b"h200") if damage is None else damage)
    assert certify(order) == first
    assert len(runs) == 2
    assert file.read_bytes() == content


def test_an_entry_that_cannot_be_read_or_written_is_no_failure(place, runs, order):
    place.parent.mkdir()
    place.write_text("a file where the folder should be")
    assert not certify(order).from_cache
    assert not certify(order).from_cache


def test_the_oldest_go_first(place, runs, order, monkeypatch):
    one = certify(order)
    size = next(place.iterdir()).stat().st_size
    monkeypatch.setattr(cache, "LARGEST", int(2.5 * size))
    for at in range(2, 5):
        os.utime(place / sorted(f.name for f in place.iterdir())[0])
        certify(msgspec.structs.replace(order, usable=at * GIB))
        assert sum(f.stat().st_size for f in place.iterdir()) <= cache.LARGEST
    assert certify(msgspec.structs.replace(order, usable=4 * GIB)).from_cache
    assert not one.from_cache
    assert len(list(place.iterdir())) == 2


def test_errors_are_not_kept(place, order, monkeypatch):
    monkeypatch.setattr(certification, "_run", lambda orders: [NotCertified("no", hint="")])
    (found,) = certification.certify_all([order])
    assert isinstance(found, NotCertified)
    assert not place.exists()


def test_switched_off_nothing_is_read_or_written(place, runs, order, monkeypatch):
    with certification.without_cache():
        certify(order)
    monkeypatch.setenv(cache.SWITCH, "1")
    certify(order)
    assert not place.exists()
    assert len(runs) == 2


def test_several_orders_are_answered_in_their_order(place, runs, order):
    orders = [msgspec.structs.replace(order, rank=n) for n in range(3)]
    certify(orders[1])
    found = certification.certify_all(orders)
    assert [c.from_cache for c in found] == [False, True, False]
    assert [to_data(o)["rank"] for o in runs] == [1, 0, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_the_screen_says_that_an_answer_came_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(cache.SWITCH, "")
    file = write(tmp_path, STATED)
    code, first, said = quick("certify", file)
    assert code == 0, said
    assert "from the cache" not in first
    _, second, _ = quick("certify", file)
    assert "from the cache" in second
    assert "--no-cache" in second
    _, third, _ = quick("certify", file, "--no-cache", "--json")
    assert strict(third)["from_cache"] is False


def test_no_cache_is_a_flag(tmp_path, monkeypatch):
    seen = []

    def refuse(orders):
        seen.append(certification._FRESH.get())
        raise NotCertified("not now", hint="")

    monkeypatch.setattr(certification, "certify_all", refuse)
    for flags in ((), ("--no-cache",)):
        quick("certify", write(tmp_path, STATED), *flags)
    assert seen == [False, True]


def test_the_hubs_cache_is_where_its_library_says():
    code = (
        "from memfit.families.weight_files.hub_cache import hub_folder; before = hub_folder('a/b');"
        "from huggingface_hub import constants, file_download as f;"
        "name = f.repo_folder_name(repo_id='a/b', repo_type='model');"
        "import pathlib; there = pathlib.Path(constants.HF_HUB_CACHE) / name;"
        "assert before == hub_folder('a/b') == there, (before, there)"
    )
    for change in ({}, {"HF_HOME": "/x"}, {"XDG_CACHE_HOME": "/y"}, {"HF_HUB_CACHE": "$HOME/z"}):
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **change})


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), max_size=6), st.integers(0, 12))
def test_a_full_cache_loses_its_oldest_and_no_more_than_it_has_to(sizes, largest):
    """Beside the longest run of the newest entries that fits."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "LARGEST", largest)
        for age, size in enumerate(sizes):  # the newest last
            file = Path(folder) / f"{age}"
            file.write_bytes(b"x" * size)
            os.utime(file, (age, age))
        cache._remove_oldest(Path(folder))
        left = sorted(int(file.name) for file in Path(folder).iterdir())
    first = next(at for at in range(len(sizes) + 1) if sum(sizes[at:]) <= largest)
    assert left == list(range(first, len(sizes)))
