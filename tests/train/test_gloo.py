"""What gloo holds is taken out of a count, however late another rank comes to a collective."""

import inspect
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.distributed.tensor import placement_types
from torch.distributed.tensor.parallel import loss

from memfit.train.distributed import gloo

# Two forked ranks, of which the second comes late. Whoever waited for what a handle holds would
# wait for an hour.
PROGRAM = """
import os, sys, time, warnings
import torch
import torch.distributed as dist
from memfit.train.distributed import gloo
from memfit.train.measure.live import LiveBytes

warnings.simplefilter("error", UserWarning)
gloo.LONGEST = 3600.0
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + sys.argv[1])
mine, whole = torch.ones(1000), torch.empty(2000)

def users():
    return mine._use_count(), whole._use_count()

with LiveBytes("cpu") as live, gloo.without_gloo(live):
    for handle in (False, True):
        whole.zero_()
        before = users()
        if rank:
            time.sleep(0.5)
        work = dist.all_gather_into_tensor(whole, mine, async_op=handle)
        assert handle or users() == before, (users(), before)
        if work is not None:
            work.wait()
        del work
        assert whole.sum() == 2000
dist.barrier()
if rank:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_what_gloo_holds_is_waited_for_and_what_a_handle_holds_is_its_callers(tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "store")],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_what_is_never_let_go_is_said(monkeypatch):
    tensor = torch.ones(1)
    monkeypatch.setattr(gloo, "LONGEST", 0.01)
    users = gloo._users(tensor)
    gloo._wait_until_let_go([tensor], [users])
    with pytest.warns(UserWarning, match="more is counted than is held"):
        gloo._wait_until_let_go([tensor], [users - 1])


def test_every_collective_that_dtensor_calls_is_waited_for():
    """An input that gloo's thread still holds would count as alive in what follows."""
    called = set()
    for module in (placement_types, loss):
        called |= set(re.findall(r"\bfuncol\.([a-z_0-9]+)\(", inspect.getsource(module)))
    assert len(called) >= 3
    assert called <= {*gloo.FUNCTIONAL, "wait_tensor"}
