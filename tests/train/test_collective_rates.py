"""The bus bandwidth of all_reduce: a call takes as long as its slowest rank."""

import torch
from torch import distributed

from memfit.train.distributed import collective_rates


def test_a_call_takes_what_the_slowest_of_the_ranks_says(monkeypatch):
    calls = []

    def all_reduce(tensor, op=distributed.ReduceOp.SUM):
        calls.append(op)
        if op is distributed.ReduceOp.MAX:
            assert 0 <= float(tensor) < 1.0  # this rank was quicker
            tensor.fill_(7.5)

    monkeypatch.setattr(distributed, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    assert collective_rates._seconds(torch.zeros(4), torch.device("cpu")) == 7.5
    ops = [distributed.ReduceOp.SUM] * collective_rates.CALLS + [distributed.ReduceOp.MAX]
    assert calls == ["barrier", *ops]
