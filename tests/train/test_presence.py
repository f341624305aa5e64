"""What ends a rank that waits where it would not notice that another one is gone."""

import threading
from contextlib import suppress
from ipaddress import ip_address
from queue import Empty, SimpleQueue

import pytest

from memfit.core.errors import RunFailed
from memfit.train.distributed import presence
from memfit.train.distributed.presence import NotHere, watched

SOON = 60.0  # seconds: of a busy machine


class Store:
    """Of torch's, what is asked of it."""

    def __init__(self):
        self.said = SimpleQueue()

    def set(self, key, value):
        for _ in range(9):
            self.said.put(value.encode())

    def get(self, key):
        return self.said.get(timeout=SOON)


class Rank:
    """One of the ranks, in a thread: within `watched` until it is told how to leave."""

    def __init__(self, rank, size, store):
        self.lost, self.here = SimpleQueue(), threading.Event()
        self._orders, self._about = SimpleQueue(), (rank, size, store)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        with suppress(RunFailed, KeyboardInterrupt), watched(*self._about, self.lost.put):
            self.here.set()
            if (error := self._orders.get()) is not None:
                raise error

    def leave(self, error=None):
        self._orders.put(error)
        self.thread.join(SOON)

    def hears(self, seconds=SOON):
        try:
            return self.lost.get(timeout=seconds)
        except Empty:
            return None


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(presence, "NOTICE", 0.05)
    monkeypatch.setattr(presence, "LOOK", 0.02)
    store = Store()
    made = [Rank(rank, 3, store) for rank in range(3)]
    assert all(rank.here.wait(SOON) for rank in made)
    yield made
    for rank in made:
        rank.leave()


def test_all_others_hear_of_a_rank_that_is_gone(three):
    first, second, third = three
    third.leave(KeyboardInterrupt())
    assert (first.hears(), second.hears()) == (2, 0)  # the first one told the second


def test_a_rank_that_is_done_or_explains_itself_is_not_gone(three):
    first, second, third = three
    second.leave()
    third.leave(RunFailed("out of memory"))
    assert first.hears(0.5) is None


def test_a_rank_that_explains_itself_leaves_the_others_their_time(three, monkeypatch):
    monkeypatch.setattr(presence, "LEAVING", 0.1)
    first, _, third = three
    third.leave(RunFailed("out of memory"))
    assert first.hears() == 2


def test_the_loss_of_the_first_rank_is_heard(three):
    three[0].leave(KeyboardInterrupt())
    assert [rank.hears() for rank in three[1:]] == [0, 0]


def test_a_rank_that_does_not_come_and_one_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(presence, "COMING", 0.05)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = Store()
    with pytest.raises(NotHere, match=r"ranks \[1\] did not come"), watched(0, 2, store, print):
        pass
    with (
        pytest.raises(NotHere, match=r"rank 0 cannot be reached at `127.0.0.1:"),
        watched(1, 2, store, print),
    ):
        pass


def test_ranks_of_one_machine_are_reached_on_its_loopback_address_alone(monkeypatch):
    for address in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", address)
        with presence._listen(2) as door:
            assert ip_address(door.getsockname()[0]).is_loopback
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # another machine's, as each has its own
    with presence._listen(2) as door:
        assert ip_address(door.getsockname()[0]).is_unspecified
