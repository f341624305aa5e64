"""The syntax of PYTORCH_ALLOC_CONF: what memfit reads is what torch's own parser reads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import settings as testing
from hypothesis import strategies as st

from memfit import api, catalog
from memfit.allocator.settings import (
    INTERVALS,
    KEYS,
    UNLIMITED,
    Settings,
    check_allocator,
    read_settings,
)
from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB, MIB

DEFAULTS = (20 * MIB, 2**64 - 1, 20 * MIB)
CLASS = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig"


class Parsed(NamedTuple):
    """What torch keeps of a setting's text."""

    large_segment_size: int
    max_split_size: int
    max_non_split_rounding: int
    divisions: tuple[int, ...]
    threshold: float
    expandable: bool


class TorchParser:
    """torch's parser, through its public entry, and what it keeps, by the layout of its header."""

    def __init__(self) -> None:
        found = sorted((Path(torch.__file__).parent / "lib").glob("libc10.so"))
        library = ctypes.CDLL(str(found[0]))
        instance = getattr(library, f"{CLASS}8instanceEv")
        instance.restype = ctypes.c_void_p
        self._divisions = getattr(library, f"{CLASS}24roundup_power2_divisionsEm")
        self._divisions.argtypes, self._divisions.restype = [ctypes.c_size_t], ctypes.c_size_t
        self._at = instance()

    def reset(self) -> None:
        """torch keeps these two from one text to the next; a process starts with the defaults."""
        self.parse("expandable_segments:False,large_segment_size_mb:20")

    def parse(self, text: str) -> Parsed:
        torch._C._accelerator_setAllocatorSettings(text)
        return self.parsed

    @property
    def parsed(self) -> Parsed:
        at = self._at
        sizes = [ctypes.c_size_t.from_address(at + 8 * i).value for i in range(3)]
        divisions = tuple(self._divisions(MIB << i) for i in range(INTERVALS))
        threshold = ctypes.c_double.from_address(at + 48).value
        return Parsed(*sizes, divisions, threshold, ctypes.c_bool.from_address(at + 56).value)


@pytest.fixture(scope="module")
def oracle() -> Iterator[TorchParser]:
    try:
        parser = TorchParser()
        parser.reset()
        same = parser.parsed == Parsed(*DEFAULTS, (0,) * INTERVALS, 0.0, False)
    except (AttributeError, IndexError, OSError, ValueError) as error:
        pytest.skip(f"torch {torch.__version__} has its parser elsewhere: {error}")
    if not same:
        pytest.skip(f"torch {torch.__version__} keeps its settings in another layout")
    yield parser
    parser.reset()


def as_torch(ours: Settings) -> Parsed:
    return Parsed(
        ours.large_segment_size,
        2**64 - 1 if ours.max_split_size == UNLIMITED else ours.max_split_size,
        ours.max_non_split_rounding,
        ours.roundup_power2_divisions or (0,) * INTERVALS,
        ours.garbage_collection_threshold,
        ours.expandable_segments,
    )


TAKEN = (
    "",
    "expandable_segments:True",
    "expandable_segments:False",
    " max_split_size_mb : 64 , garbage_collection_threshold : 0.6 ",
    "max_split_size_mb:20",
    "large_segment_size_mb:64",
    "max_split_size_mb:64,large_segment_size_mb:64",
    "max_non_split_rounding_mb:40",
    "backend:native,expandable_segments:True",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[64:8,16:4]",
    "roundup_power2_divisions:[64:8,>:4,128:2]",
    "roundup_power2_divisions:[>:4,8:2]",
    "roundup_power2_divisions:[64:0,>:4],max_split_size_mb:30",
    "roundup_power2_divisions:[1048576:4]",
)


@pytest.mark.parametrize("text", TAKEN)
def test_memfit_reads_what_torch_reads(oracle: TorchParser, text: str) -> None:
    oracle.reset()
    assert as_torch(read_settings(text)) == oracle.parse(text)


REFUSED_BY_BOTH = (
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[3:1]",
    "roundup_power2_divisions:[64:3]",
    "max_split_size_mb:19",
    "max_split_size_mb:abc",
    "max_split_size_mb:30,large_segment_size_mb:64",
    "large_segment_size_mb:10",
    "large_segment_size_mb:64,max_non_split_rounding_mb:20",
    "max_non_split_rounding_mb:10",
    "expandable_segments:true",
    "expandable_segments",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:x",
    ",",
)


@pytest.mark.parametrize("text", REFUSED_BY_BOTH)
def test_what_torch_refuses_is_refused(oracle: TorchParser, text: str) -> None:
    oracle.reset()
    with pytest.raises((ValueError, RuntimeError)):
        oracle.parse(text)
    with pytest.raises(InvalidRequest):
        read_settings(text)


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("expandable_segment:True", "unknown setting of the allocator", "`expandable_segments`"),
        ("zzz:1", "`zzz`", "max_split_size_mb, per_process_memory_fraction"),
        ("pinned_use_background_threads:True", "`pinned_use_background_threads`", "known"),
        ("backend:cudaMallocAsync", "replays `native` only", "leave `backend` out"),
        ("max_split_size_mb:64,max_split_size_mb:32", "twice: `64` and `32`", ""),
        ("max_split_size_mb:-1", "at least 20", ""),
        ("max_split_size_mb:64.5", "`64.5`", ""),
        ("expandable_segments:True,", "not `key:value` pairs", "such as"),
        ("expandable_segments:yes", "`yes`: it is `True` or `False`", "`True`"),
        ("roundup_power2_divisions:[4", "not `key:value` pairs", "such as"),
        ("per_process_memory_fraction:1.5", "above 0 and at most 1", ""),
    ],
)
def test_a_bad_setting_is_one_clear_error(text: str, said: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_settings(text)
    assert said in caught.value.message
    assert hint in caught.value.hint


powers = st.integers(0, 12).map(lambda n: 2**n)
values = st.fixed_dictionaries(
    {},
    optional={
        "expandable_segments": st.sampled_from(["True", "False"]),
        "garbage_collection_threshold": st.floats(0.01, 0.99).map(str),
        "large_segment_size_mb": st.integers(11, 64).map(str),
        "max_split_size_mb": st.integers(64, 4096).map(str),
        "max_non_split_rounding_mb": st.integers(64, 512).map(str),
        "roundup_power2_divisions": st.one_of(
            powers.map(str),
            st.lists(
                st.tuples(st.one_of(st.just(">"), powers.map(str)), st.one_of(st.just(0), powers)),
                min_size=1,
                max_size=4,
            ).map(lambda pairs: "[" + ",".join(f"{a}:{b}" for a, b in pairs) + "]"),
        ),
    },
)


@given(values)
@testing(max_examples=100)
def test_any_mixture_is_read_as_torch_reads_it(oracle: TorchParser, drawn: dict) -> None:
    text = ",".join(f"{key}:{value}" for key, value in drawn.items())
    oracle.reset()
    ours = read_settings(text)
    assert as_torch(ours) == oracle.parse(text)
    assert read_settings(ours.text) == ours  # what it writes, it reads


@given(
    st.sampled_from([*KEYS, "", "x"]),
    st.text(alphabet="0123456789.:,[]>-+eTrueFalse_ ²٣", max_size=12),
)
@testing(max_examples=300)
def test_whatever_is_written_is_read_or_refused(key: str, value: str) -> None:
    text = f"{key}:{value}"
    try:
        read = read_settings(text)
    except InvalidRequest:
        return
    assert read_settings(read.text) == read


def test_a_fraction_of_the_device_is_what_torch_allows_itself() -> None:
    half = read_settings("per_process_memory_fraction:0.5", device_memory=80 * GIB)
    assert half.allowed == 40 * GIB
    assert read_settings("").allowed is None
    assert read_settings("per_process_memory_fraction:1").allowed is None


def test_a_cpu_has_other_settings_than_a_gpu() -> None:
    cpu, gpu = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
    for text in ("", "keep_freed:True", "keep_freed:False"):
        check_allocator(text, cpu)
    check_allocator("expandable_segments:True", gpu)
    with pytest.raises(InvalidRequest, match=r"expandable_segments:True.*keep_freed:True"):
        check_allocator("expandable_segments:True", cpu)
    with pytest.raises(InvalidRequest, match="keep_freed"):
        check_allocator("keep_freed:True", gpu)


@pytest.mark.parametrize(
    ("device", "text"),
    [("h100-sxm", "expandable_segment:True"), ("cpu", "expandable_segments:True")],
)
def test_a_plan_refuses_it_before_it_plans(device: str, text: str) -> None:
    request = api.read("smollm2-135m", device=device, changes={"allocator": text})
    with pytest.raises(InvalidRequest, match="allocator"):
        api.plan(request, levers=False)
