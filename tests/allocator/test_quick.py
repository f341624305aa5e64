"""The planner's quick replay against the allocator's own, on random tapes and on plans' tapes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.allocator.caching import replay
from memfit.allocator.orders import OTHERS, RISING
from memfit.allocator.quick import Ask, Held, is_quick, replay_quickly, reserve_large
from memfit.allocator.settings import Settings, read_settings
from memfit.allocator.tape import FREED, Line
from memfit.core.units import GIB, KIB, MIB
from memfit.families import read_model
from memfit.plan.memory.tape import Tape, write_tape
from memfit.records.recipe import Parallel

H100 = catalog.find_device("h100-sxm")
LIKE = [0, 1, 512, 513, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB + 512]
asked = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(LIKE), st.integers(1, 4 * KIB), st.integers(1, 2 * MIB),
            st.integers(MIB, 90 * MIB),
        ),
        st.integers(0, 1),  # the stream
        st.integers(0, 12),  # storages that are born before it dies; 12 lives to the end
    ),
    min_size=1,
    max_size=150,
)  # fmt: skip
settings = st.builds(
    Settings,
    large_segment_size=st.sampled_from([20 * MIB, 24 * MIB]),
    roundup_power2_divisions=st.sampled_from([(), (4,) * 16, (8, 1, 2) + (0,) * 13]),
)


def replay_slowly(codes: list[int], asks: list[Ask], conf: Settings, marks: list[int]) -> Held:
    """The same events through the allocator that the certifier uses."""
    lines: list[Line] = [(c, *asks[c]) if c >= 0 else (~c, FREED, 0) for c in codes]
    found = replay(lines, conf, marks)
    assert found.failure is None
    allocated = [stretch.allocated for stretch in found.stretches]
    return Held(allocated, found.peaks.reserved, reserve_small(lines, conf))


def reserve_small(lines: list[Line], conf: Settings) -> int:
    """What those of at most 1 MiB reserve alone."""
    small = {tensor for tensor, nbytes, _ in lines if 0 < nbytes <= MIB}
    return replay([line for line in lines if line[0] in small], conf).peaks.reserved


@given(asked, settings, st.lists(st.floats(0, 1), max_size=3))
def test_random_tapes(drawn: list[Any], conf: Settings, cuts: list[float]) -> None:
    codes: list[int] = []
    for number, _ in enumerate(drawn):
        codes += [~n for n in range(number) if drawn[n][2] < 12 and n + drawn[n][2] == number - 1]
        codes.append(number)
    codes.append(~0)  # the first may be dead already: nothing is freed twice
    asks = [(nbytes, stream) for nbytes, stream, _ in drawn]
    marks = sorted(int(cut * len(codes)) for cut in cuts)
    quick = replay_quickly(codes, asks, conf, marks)
    assert quick == replay_slowly(codes, asks, conf, marks)
    lines: list[Line] = [(c, *asks[c]) if c >= 0 else (~c, FREED, 0) for c in codes]
    orders = RISING, *OTHERS
    for order, large in zip(orders, reserve_large(codes, asks, conf, orders), strict=True):
        assert quick.small + large == replay(lines, conf, order=order).peaks.reserved


PLANS: dict[str, tuple[str, dict[str, Any], Parallel]] = {
    "full": ("qwen3-0.6b", {"method": "full"}, Parallel()),
    "recomputed": ("gemma-3-1b-it", {"method": "lora", "recompute": "full"}, Parallel()),
    "selective": ("qwen3-0.6b", {"method": "full", "recompute": "selective"}, Parallel()),
    "a loss in chunks": ("gpt2", {"loss": "chunked", "loss_chunk": 256}, Parallel()),
    "over nf4": ("qwen3-0.6b", {"method": "lora", "base_format": "nf4"}, Parallel()),
    "within backward": ("qwen3-0.6b", {"optimizer.in_backward": True, "micro_batch": 4,
                                       "optimizer.clip_norm": 0}, Parallel()),
    "rounded up": ("qwen3-0.6b", {"allocator": "roundup_power2_divisions:4"}, Parallel()),
    "experts": ("qwen1.5-moe-a2.7b", {"method": "lora"}, Parallel()),
    "shards": ("qwen3-0.6b", {"method": "lora"}, Parallel(dp_shard=4)),
    "stages": ("pythia-70m", {"lean": "none"}, Parallel(dp_shard=2, pp=2)),
    "shared products": ("qwen3-0.6b", {"lean": "none"},
                        Parallel(dp_shard=2, tp=2, sequence_parallel=True)),
}  # fmt: skip


def write(name: str) -> tuple[Tape, Settings]:
    model_name, changes, parallel = PLANS[name]
    stated = {
        "method": "full", "precision": "bf16-mixed", "micro_batch": 2, "recompute": "none",
        "loss": "plain", "task.sequence_length": 1024, "task.global_batch": 4,
    } | changes  # fmt: skip
    recipe = api.predict(api.read(model_name, device="h100-sxm", changes=stated)).recipe
    recipe = replace(recipe, parallel=parallel)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    conf = read_settings(recipe.allocator, device_memory=H100.memory_driver or 0)
    return write_tape(model, recipe, H100), conf


@pytest.mark.parametrize("name", PLANS)
def test_tapes_of_plans(name: str) -> None:
    tape, conf = write(name)
    assert is_quick(conf)
    quick = replay_quickly(tape.codes, tape.asks, conf, tape.cuts)
    slow = replay(tape.events, conf, tape.marks)
    allocated = [stretch.allocated for stretch in slow.stretches]
    assert quick == Held(allocated, slow.peaks.reserved, reserve_small(tape.events, conf))
    (large,) = reserve_large(tape.codes, tape.asks, conf, [RISING])
    assert quick.small + large == quick.reserved


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True", "max_split_size_mb:128", "per_process_memory_fraction:0.5",
        "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
    ],
)  # fmt: skip
def test_what_gives_memory_back_is_replayed_by_the_allocator(text: str) -> None:
    assert not is_quick(read_settings(text))
    assert not is_quick(Settings(capacity=GIB))
    assert is_quick(read_settings("roundup_power2_divisions:4,large_segment_size_mb:32"))
