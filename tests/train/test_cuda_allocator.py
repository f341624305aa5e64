"""A recipe's allocator settings reach torch, or nothing runs; CUDA's counters by phase."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace

from memfit import api, catalog
from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB, MIB
from memfit.records.ledger import Phase
from memfit.train.measure import cuda_allocator
from memfit.train.measure.counters import Meter, start_device
from memfit.train.measure.cuda_allocator import set_allocator
from memfit.train.run import machine

PLAIN = "expandable_segments:False,large_segment_size_mb:20"


@pytest.fixture
def plain() -> Iterator[None]:
    torch._C._accelerator_setAllocatorSettings(PLAIN)
    yield
    torch._C._accelerator_setAllocatorSettings(PLAIN)


def running() -> str:
    return torch._C._accelerator_getAllocatorSettings()


def test_torch_gets_the_recipes_settings_once(plain: None) -> None:
    set_allocator("")
    assert running() == PLAIN  # the same as nothing set
    set_allocator("max_split_size_mb:64")
    assert running() == "max_split_size_mb:64"
    set_allocator("max_split_size_mb : 64")
    with pytest.raises(InvalidRequest, match=r"`max_split_size_mb:64`.*`max_split_size_mb:32`"):
        set_allocator("max_split_size_mb:32")
    with pytest.raises(InvalidRequest, match="PYTORCH_ALLOC_CONF"):
        set_allocator("")


def test_what_no_recipe_can_name_is_not_the_default(plain: None) -> None:
    torch._C._accelerator_setAllocatorSettings("pinned_use_background_threads:True")
    with pytest.raises(InvalidRequest, match="pinned_use_background_threads"):
        set_allocator("")


def test_what_this_torch_does_not_know_is_one_clear_error(
    plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(  # as an older torch: torch's own words for a value that it does not take
        torch._C, "_accelerator_setAllocatorSettings", lambda text: real("max_split_size_mb:1")
    )
    with pytest.raises(InvalidRequest, match=r"does not take .*large_segment_size_mb:64.*small"):
        set_allocator("large_segment_size_mb:64")


def test_nothing_is_set_once_memory_is_held(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {0: 0, 1: 2 * MIB}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", held.__getitem__)
    set_allocator("")
    with pytest.raises(InvalidRequest, match="one process runs one setting"):
        set_allocator("expandable_segments:True")
    held[1] = 0  # CUDA has started, as by an import of torchao on a machine with a GPU
    set_allocator("expandable_segments:True")
    assert running() == "expandable_segments:True"


@pytest.mark.parametrize(("recipe", "code"), [("", 2), ("expandable_segments:True", 0)])
def test_the_environment_may_not_say_otherwise(recipe: str, code: int) -> None:
    program = (
        "import sys\n"
        "from memfit.core.errors import InvalidRequest\n"
        "from memfit.train.measure.cuda_allocator import set_allocator\n"
        f"try: set_allocator({recipe!r})\n"
        "except InvalidRequest as e: print(e); sys.exit(2)"
    )
    environment = os.environ | {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("`expandable_segments:True`" in done.stdout) == bool(code)


def test_a_recipe_for_a_cpu_has_no_setting_of_cuda(tiny_recipe) -> None:
    recipe = replace(tiny_recipe, device="cpu-x86", allocator="expandable_segments:True")
    with pytest.raises(InvalidRequest, match="a CPU's is `keep_freed:True`"):
        api.measure(recipe)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tiny_recipe) -> None:
    with pytest.raises(InvalidRequest, match=r"h100-sxm.*no GPU here"):
        start_device(tiny_recipe, catalog.find_device("h100-sxm"))


class Counters:
    """Stands in for torch.cuda's counters: what they are now, and their peaks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = self.reserved = self.peak_reserved = 0
        self.others = GIB
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak_reserved)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.reset())
        patch.setattr(
            torch.cuda,
            "mem_get_info",
            lambda device: (80 * GIB - self.reserved - self.others, 80 * GIB),
        )

    def reset(self) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def reach(self, allocated: int, reserved: int) -> None:
        self.peak, self.peak_reserved = allocated, max(reserved, self.peak_reserved)
        self.reserved = reserved


def test_cudas_peaks_are_the_highest_of_all_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(monkeypatch)
    meter = Meter(torch.device("cuda", 0))
    meter._enter(Phase.LOAD)
    counters.reach(100 * MIB, 120 * MIB)
    meter._enter(Phase.FORWARD)
    counters.reach(900 * MIB, 1000 * MIB)
    counters.others += MIB
    meter._enter(Phase.BACKWARD)
    counters.reach(500 * MIB, 600 * MIB)  # the cache was emptied in between
    found = {name: m.value for name, m in meter.measurements().items()}
    assert meter.peaks[Phase.LOAD] == 100 * MIB
    assert meter.peaks[Phase.FORWARD] == 900 * MIB
    assert meter.peaks[Phase.BACKWARD] == 500 * MIB
    assert found["memory.peak_allocated"] == 900 * MIB
    assert found["memory.peak_reserved"] == 1000 * MIB
    assert found["memory.device_total"] == 1000 * MIB + GIB + MIB
    assert found["memory.outside_allocator"] == GIB + MIB


def test_what_comes_after_the_phases_counts_towards_the_peak_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = Counters(monkeypatch)
    meter = Meter(torch.device("cuda", 0))
    meter._enter(Phase.LOAD)
    counters.reach(100 * MIB, 120 * MIB)
    meter.leave()
    counters.reach(700 * MIB, 800 * MIB)
    found = {name: m.value for name, m in meter.measurements().items()}
    assert meter.peaks == {Phase.LOAD: 100 * MIB}
    assert found["memory.peak_allocated"] == 700 * MIB
    assert found["memory.peak_reserved"] == 800 * MIB


def test_a_measured_figure_names_the_allocator_and_the_driver(
    plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: type("Properties", (), {"total_memory": GIB}),
    )
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    found = machine.describe_environment(torch.device("cuda", 0))
    assert (found["allocator"], found["driver"]) == (PLAIN, "unknown")
    assert found["device_memory"] == str(GIB)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/bin/echo")
    asked = machine.describe_environment(torch.device("cuda", 0))["driver"]
    assert asked == "--query-gpu=driver_version"  # what the tool says first


def test_a_torch_that_cannot_be_asked_is_remembered(
    plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 has no `_accelerator_getAllocatorSettings`."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(cuda_allocator, "_set", [])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:32")
    assert cuda_allocator.running_settings() == "max_split_size_mb:32"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert cuda_allocator.running_settings() == ""
    set_allocator("max_split_size_mb:64")
    assert cuda_allocator.running_settings() == "max_split_size_mb:64"
    with pytest.raises(InvalidRequest, match=r"`max_split_size_mb:64`.*`max_split_size_mb:32`"):
        set_allocator("max_split_size_mb:32")
