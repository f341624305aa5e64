"""Certificates as jobs of the page's server: in the background, cancelled, kept."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from looking import TINY
from test_server import ask, query, refused

from memfit import api
from memfit.core.system.processes import child_environment
from memfit.ui.asking import read_query

KEYS = {
    "model": json.dumps(TINY), "hardware.device": "rtx-4090", "weights": "random",
    "method": "full", "task.steps": "3",
}  # fmt: skip
DRAFT = {"model": "pythia-70m", "hardware.device": "rtx-4090"}


def create(server, **keys):
    """A new job's row."""
    body = json.dumps({"query": {**KEYS, **keys}})
    status, _, answer = ask(
        server, "/api/jobs", method="POST", body=body, x_memfit_token=server.token
    )
    assert status == 201, answer
    return json.loads(answer)


def row_of(server, job):
    return json.loads(ask(server, f"/api/jobs/{job['id']}")[2])


def remove(server, job):
    path = f"/api/jobs/{job['id']}"
    return json.loads(ask(server, path, method="DELETE", x_memfit_token=server.token)[2])


def wait(server, job, *states, seconds=300):
    """The job's row once it is in one of the states."""
    until = time.monotonic() + seconds
    while (row := row_of(server, job))["state"] not in states:
        assert time.monotonic() < until, row
        time.sleep(0.05)
    return row


def group(leader):
    """The processes of a group that are alive."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, own, *_ = (place / "stat").read_text().rpartition(")")[2].split()
            if int(own) == leader and state != "Z":
                found.append(int(place.name))
    return found


@pytest.fixture
def tidy(server):
    """Nothing is left running behind a test."""
    yield
    server.jobs.close()


@pytest.mark.usefixtures("tidy")
def test_a_job_gives_what_the_verb_gives_and_keeps_it(server):
    job = create(server)
    assert create(server)["id"] == job["id"]  # the same request is one job while it is open
    row = wait(server, job, "done", "failed")
    assert row["failure"] is None
    assert row["elapsed"] > 0
    made = json.loads(ask(server, f"/api/jobs/{job['id']}/result")[2])
    plan = api.plan(read_query(tuple(KEYS.items())), levers=False)
    assert made["certificate"]["recipe_digest"] == plan.recipe_digest
    assert made["certificate"]["memory"]["verdict"] == row["verdict"] == "fits"
    assert (
        sum(made["curve"]["points"][made["curve"]["peak"]][6])
        == (made["certificate"]["memory"]["peak_allocated"])
    )
    assert job["id"] in [one["id"] for one in json.loads(ask(server, "/api/jobs")[2])]
    again = create(server)
    assert again["id"] != job["id"]
    assert again["expected"] == pytest.approx(row["elapsed"], abs=1)
    assert remove(server, again)["state"] == "cancelled"
    refused(server, f"/api/jobs/{again['id']}/result", 400, "is cancelled: it has no result")
    assert remove(server, job)["state"] == "done"  # and is forgotten
    refused(server, f"/api/jobs/{job['id']}", 400, "there is no certificate")


@pytest.mark.usefixtures("tidy")
def test_drafts_do_not_wait_behind_a_certificate(server):
    job = create(server)
    wait(server, job, "running")
    for length in ("640", "896"):
        status, _, _ = ask(server, f"/api/draft?{query({**DRAFT, 'task.sequence_length': length})}")
        assert status == 200
    assert row_of(server, job)["state"] == "running"


@pytest.mark.usefixtures("tidy")
def test_a_cancelled_job_ends_its_processes_and_those_they_started(server):
    first, second = create(server), create(server, seed="2")
    until = time.monotonic() + 300
    wait(server, first, "running")
    leader = server.jobs._jobs[first["id"]].child.pid
    while len(group(leader)) < 2:  # the job and the process that traces the step
        assert time.monotonic() < until
        time.sleep(0.02)
    assert row_of(server, second)["state"] == "waiting"
    assert remove(server, first)["state"] == "cancelled"
    while group(leader):  # they have been told to end
        assert time.monotonic() < until
        time.sleep(0.02)
    wait(server, second, "running")  # the next one begins
    assert remove(server, second)["state"] == "cancelled"


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize(
    ("keys", "words"),
    [({"model": "no-such-model"}, "unknown model: `no-such-model`"),
     ({"framework": "megatron", "precision": "bf16-mixed"}, "another framework's step")],
)  # fmt: skip
def test_a_job_that_fails_says_why(server, keys, words):
    row = wait(server, create(server, **keys), "failed", "done")
    assert words in row["failure"]["error"]
    assert row["failure"]["exit_code"] == 2


def test_a_job_ends_with_the_server():
    child = subprocess.Popen(
        [sys.executable, "-m", "memfit.ui.job"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=child_environment(), start_new_session=True,
    )  # fmt: skip
    child.stdin.write(json.dumps({"query": KEYS}).encode() + b"\n")
    child.stdin.flush()
    assert b"planning" in child.stdout.readline()
    until = time.monotonic() + 300
    while len(group(child.pid)) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    child.stdin.close()  # as when the server is killed
    child.wait(300)
    child.stdout.close()
    while group(child.pid):  # its own child, which dies with it
        assert time.monotonic() < until
        time.sleep(0.02)
