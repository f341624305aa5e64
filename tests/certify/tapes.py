"""Random tapes and random settings of the allocator."""

from __future__ import annotations

from hypothesis import strategies as st

from memfit.allocator.settings import UNLIMITED, Settings
from memfit.allocator.tape import CAUGHT_UP, FREED, USED, Event
from memfit.core.units import GIB, KIB, MIB

requests = st.lists(
    st.tuples(
        st.one_of(
            st.integers(1, 4 * KIB),
            st.integers(1, 2 * MIB),
            st.integers(MIB, 90 * MIB),
            st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB]),
        ),
        st.integers(0, 1),  # the stream
        st.integers(0, 5),  # how long it lives: 5 = to the end
        st.integers(0, 9),  # another stream that uses it (0 to 2), or that catches up (3 to 5)
    ),
    min_size=1,
    max_size=120,
)
configurations = st.builds(
    Settings,
    capacity=st.one_of(st.none(), st.integers(100, 900).map(lambda n: n * MIB)),
    device_memory=st.just(GIB),
    expandable_segments=st.booleans(),
    large_segment_size=st.sampled_from([20 * MIB, 24 * MIB]),
    max_split_size=st.sampled_from([UNLIMITED, 24 * MIB, 64 * MIB]),
    roundup_power2_divisions=st.sampled_from([(), (4,) * 16, (8, 1, 2) + (0,) * 13]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.2]),
    memory_fraction=st.sampled_from([1.0, 0.4]),
)


def tape_of(drawn: list[tuple[int, int, int, int]], streams: bool = True) -> list[Event]:
    """Allocations whose storages die after a drawn number of later allocations."""
    tape: list[Event] = []
    for i, (nbytes, stream, _, other) in enumerate(drawn):
        dying = (j for j in range(i) if drawn[j][2] < 5 and j + drawn[j][2] * 3 == i - 1)
        tape += [Event(j, FREED, drawn[j][1]) for j in dying]
        tape.append(Event(i, nbytes, stream))
        if streams and other < 3:
            tape.append(Event(i, USED, other))
        elif streams and other < 6:
            tape.append(Event(-1, CAUGHT_UP, other - 3))
    return tape
