"""What gloo holds is taken out of a count, whenever its thread or a handle lets go of it."""

import os
import subprocess
import sys
import textwrap

import pytest

# Two forked ranks. A copy of gloo's own that is counted, and a tensor that it keeps, would show in
# `live`, which is read while the handle of each collective is alive.
BEGIN = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from memfit.train.distributed import gloo
from memfit.train.measure.live import LiveBytes

rank = 0 if os.fork() else 1
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + sys.argv[1])
group = dist.group.WORLD
"""
END = """
dist.barrier()
if rank:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""

IN_PLACE = """
def check(run, made, want, handle):
    mine = torch.nn.Parameter(torch.arange(1000.0).add_(rank))
    result = torch.zeros(made) if made else mine
    held = [x.untyped_storage() for x in (mine, result)]
    versions = mine._version
    with LiveBytes("cpu") as live, gloo.without_gloo(live):
        live.register_batch(mine, result)
        users = [torch._C._storage_Use_Count(x._cdata) for x in held]
        before = live.live
        work = run(mine, result, handle)
        assert live.live == before == live.peak, (live.live, before, live.peak)
        assert users == [torch._C._storage_Use_Count(x._cdata) for x in held]
        if handle:
            work.wait()
            assert live.live == before == live.peak
        assert torch.equal(result, want), result
    assert made == 0 or mine._version == versions  # autograd may have saved it


low, sums = torch.arange(1000.0), 2 * torch.arange(1000.0) + 1
both = torch.cat([low, low + 1])
halves = torch.cat([low[rank * 500:][:500], low[rank * 500:][:500] + 1])
cases = (
    (lambda x, y, h: dist.all_reduce(y, async_op=h), 0, sums),
    (lambda x, y, h: dist.broadcast(y, 1, async_op=h), 0, low + 1),
    (lambda x, y, h: dist.all_gather_into_tensor(y, x, async_op=h), 2000, both),
    (lambda x, y, h: dist.all_gather([*y.chunk(2)], x, async_op=h), 2000, both),
    (lambda x, y, h: dist.reduce_scatter_tensor(y, x, async_op=h), 500, sums[rank * 500:][:500]),
    (lambda x, y, h: dist.all_to_all_single(y, x, async_op=h), 1000, halves),
)
for run, made, want in cases:
    for handle in (False, True):
        check(run, made, want, handle)
"""

FUNCTIONAL = """
low, sums = torch.arange(1000.0), 2 * torch.arange(1000.0) + 1
halves = torch.cat([low[rank * 500:][:500], low[rank * 500:][:500] + 1])
cases = (
    (lambda x: funcol.all_reduce(x, "sum", group), sums),
    (lambda x: funcol.all_gather_tensor(x, 0, group), torch.cat([low, low + 1])),
    (lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, group), sums[rank * 500:][:500]),
    (lambda x: funcol.all_to_all_single(x, None, None, group), halves),
    (lambda x: funcol.permute_tensor(x, [1, 0], group), low + 1 - rank),
    (lambda x: funcol.broadcast(x, 1, group), low + 1),
    (lambda x: funcol.all_reduce_inplace(x, "sum", group), sums),
)
for run, want in cases:
    mine = low + rank
    with LiveBytes("cpu") as live, gloo.without_gloo(live):
        live.register_batch(mine)
        before, users = live.live, torch._C._storage_Use_Count(mine.untyped_storage()._cdata)
        out = run(mine)
        out = out.wait() if hasattr(out, "elem") else out
        made = 0 if out.data_ptr() == mine.data_ptr() else 4 * len(want)
        assert live.live == before + made, (live.live, before, made)
        assert torch.equal(out, want)
        del out
        assert live.live == before  # nothing else holds what the collective made
        assert users == torch._C._storage_Use_Count(mine.untyped_storage()._cdata)
"""

SENT = """
mine = torch.full((1000,), float(rank))
with LiveBytes("cpu") as live, gloo.without_gloo(live):
    live.register_batch(mine)
    if rank:
        sent = dist.isend(mine, 0)
        before, mine = live.live, None
        assert live.live == before - 4000  # the handle, which is alive, holds a copy
        sent.wait()
    else:
        found = torch.zeros(1000)
        (received,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, found, 1)])
        received.wait()
        assert found.sum() == 1000
"""


@pytest.mark.parametrize("program", [IN_PLACE, FUNCTIONAL, SENT], ids=["in place", "new", "sent"])
def test_what_gloo_holds_is_not_counted(program, tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    text = BEGIN + textwrap.dedent(program) + END
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text, str(tmp_path / "store")],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
