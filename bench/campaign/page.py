"""Damaged requests to the page's server: each is answered, none with a status of 500 or more.

    python bench/campaign/page.py [--seed N] [--count N] [--sockets N] [--seconds S]

Most requests go to the application itself, as its server would hand them over; `--sockets` more are
damaged bytes sent to a real server, each with a time limit on its socket. Held: no exception leaves
the application, no status from 500 on, none above 5 s of CPU, and the server still answers after
the last. Certifying is left out: an order that can be read is refused before a process begins.
Results: bench/results/campaign_page.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

import uvicorn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from fuzz import MOST_BYTES, MOST_SECONDS, TooLong, likeness, limited  # noqa: E402
from mutate import TEXTS, VALUES, mutate  # noqa: E402
from readers import CONFIG, MIXED, whole_run  # noqa: E402

from memfit.core.errors import InvalidRequest  # noqa: E402
from memfit.records import write_atomically  # noqa: E402
from memfit.ui.app import configure, listen, make_app  # noqa: E402
from memfit.ui.asking import read_query  # noqa: E402
from memfit.ui.job import Wanted  # noqa: E402
from memfit.ui.jobs import Jobs  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "campaign_page.json"
TOKEN = "the-token"
STATED = {
    "model": "gpt2", "hardware.device": "h100-sxm", "method": "full", "precision": "bf16-mixed",
    "recompute": "none", "loss": "plain", "micro_batch": "1", "task.sequence_length": "64",
    "task.global_batch": "8",
}  # fmt: skip
QUERIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("draft", STATED), ("plan", STATED), ("pipeline", STATED), ("export", {**STATED, "to": "trl"}),
    ("draft", {**STATED, "model": json.dumps(CONFIG)}), ("draft", {**STATED, "task.data": "data"}),
    ("draft", {**STATED, "model": json.dumps(MIXED)}), ("why_not", {**STATED, "why_not.loss": "x"}),
    ("compare", {**STATED, "devices": "h100-sxm:1,a100-sxm-80:1", "objective": "cheapest"}),
    *[("budget", {"cost": "5000 USD", "device": "h100-sxm", "time": "30 d", "mfu": "0.4"})] * 3,
    *[("run", {"name": "r", "after": "1"})] * 4, *[("runs", {})] * 2, ("words", {}),
    ("models", {}), ("devices", {}), ("jobs", {}), ("jobs/abc", {}), ("jobs/abc/result", {}),
)  # fmt: skip
METHODS = ("GET",) * 24 + ("HEAD", "POST", "POST", "PUT", "DELETE", "OPTIONS", "FOO")
HEADERS = ("host", "origin", "content-length", "x-memfit-token", "sec-fetch-site", "content-type",
           "transfer-encoding", "range", "accept", "cookie", "if-none-match")  # fmt: skip


class NoJobs(Jobs):
    """Reads an order and starts nothing."""

    def create(self, wanted: Wanted) -> Any:
        """Raise InvalidRequest once the order has been read."""
        read_query(tuple(wanted.query.items()))
        raise InvalidRequest("nothing is certified in the campaign")


class Asked:
    """One request, drawn from a seed."""

    def __init__(self, chance: random.Random) -> None:
        name, query = chance.choice(QUERIES)
        pairs = list(query.items())
        for _ in range(chance.choice((0, 1, 1, 2, 3))):
            _damage(chance, pairs)
        self.method = chance.choice(METHODS)
        self.path = f"/api/{name}"
        if chance.random() < 0.1:
            self.path = unquote(mutate(chance, self.path.encode()).decode("utf-8", "replace"))
        text = urlencode(pairs, errors="surrogatepass").encode()
        text = mutate(chance, text) if chance.random() < 0.15 else text
        # h11, which reads for the application, refuses any other byte in an address
        self.query = b"".join(b"%c" % c if 33 <= c < 127 else b"%%%02X" % c for c in text)
        self.body = b""
        if self.method != "GET":
            order = json.dumps({"query": STATED, "rank": None}).encode()
            self.body = mutate(chance, order) if chance.random() < 0.9 else order
        self.headers = {"host": "127.0.0.1:1", "x-memfit-token": TOKEN}
        if self.body:
            self.headers["content-length"] = str(len(self.body))
        if chance.random() < 0.2:
            said = chance.choice((*map(str, VALUES[:12]), "127.0.0.1", "chunked", "[::1", "\xff"))
            self.headers[chance.choice(HEADERS)] = said

    @property
    def scope(self) -> dict[str, Any]:
        """As a server tells it to an application."""
        headers = [(k.encode(), v.encode("latin-1", "replace")) for k, v in self.headers.items()]
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": self.method, "path": self.path, "raw_path": quote(self.path).encode(),
            "query_string": self.query, "headers": headers, "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip

    @property
    def wire(self) -> bytes:
        """As it goes over a socket."""
        target = quote(self.path).encode() + b"?" + self.query
        lines = [f"{k}: {v}".encode("latin-1", "replace") for k, v in self.headers.items()]
        start = self.method.encode() + b" " + target + b" HTTP/1.1"
        return b"\r\n".join([start, *lines, b"connection: close", b"", self.body])


def _damage(chance: random.Random, pairs: list[tuple[str, str]]) -> None:
    """Another value, or a key more or less."""
    value = chance.choice((*VALUES, *(text.decode("latin-1") for text in TEXTS)))
    try:
        said = value if isinstance(value, str) else json.dumps(value)
    except ValueError:
        said = "9" * 5000
    at = chance.randrange(len(pairs) + 1)
    if at == len(pairs):
        keys = ("name", "to", "rank", "lora.rank", "limits.memory", "optimizer.name", "hardware")
        pairs.append((chance.choice(keys), said))
    elif chance.random() < 0.1:
        pairs.pop(at)
    elif chance.random() < 0.2:
        pairs[at] = (said[:300], pairs[at][1])
    else:
        pairs[at] = (pairs[at][0], said)


async def ask(app: Any, asked: Asked) -> int:
    """The status of the application's answer."""
    told: list[dict[str, Any]] = []
    sent = iter([{"type": "http.request", "body": asked.body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(sent, {"type": "http.disconnect"})

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    await asyncio.wait_for(app(asked.scope, receive, send), 60)
    return int(told[0]["status"])


def judge(loop: asyncio.AbstractEventLoop, app: Any, asked: Asked) -> tuple[int, str]:
    """The status, and why the request failed; "" where it did not."""
    began = time.process_time()
    try:
        with limited(60):
            status = loop.run_until_complete(ask(app, asked))
    except TooLong as error:
        return 0, str(error)
    except Exception as error:
        return 500, f"{type(error).__name__}: {error}"[:300]
    taken = time.process_time() - began
    if status >= 500 or not status:
        return status, f"status {status}"
    return status, f"{taken:.1f} s of CPU" if taken > MOST_SECONDS else ""


def send_bytes(port: int, content: bytes, chance: random.Random) -> str:
    """The first digit of the status that a server gives damaged bytes; "-" where it gives none."""
    with socket.create_connection(("127.0.0.1", port), 5) as link:
        link.settimeout(1 if chance.random() < 0.9 else 0.05)  # some leave before the answer
        try:
            link.sendall(content)
            if chance.random() < 0.7:
                link.shutdown(socket.SHUT_WR)
            answer = link.recv(64)
        except OSError:
            return "-"
    return answer[9:10].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "-"


def over_sockets(runs: Path, seed: int, count: int, until: float) -> dict[str, int]:
    """Statuses by first digit, of damaged bytes; raises where the server no longer answers."""
    chance, found = random.Random(f"{seed} sockets"), Counter[str]()
    jobs = NoJobs()
    with listen(0) as listener:
        port = int(listener.getsockname()[1])
        quiet = configure(make_app(TOKEN, runs, jobs))
        quiet.log_config, quiet.log_level = None, "critical"
        server = uvicorn.Server(quiet)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        for _ in range(count):
            if time.monotonic() > until:
                break
            asked = Asked(chance)
            asked.headers["host"] = asked.headers["host"].replace(":1", f":{port}")
            content = mutate(chance, asked.wire) if chance.random() < 0.7 else asked.wire
            found[send_bytes(port, content, chance)] += 1
        whole = f"GET /api/words HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", port), 60) as link:
            link.sendall(whole)
            assert link.recv(64).startswith(b"HTTP/1.1 200")
        server.should_exit = True
        thread.join(30)
    jobs.close()
    return dict(sorted(found.items()))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--sockets", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    until = time.monotonic() + given.seconds
    statuses: Counter[int] = Counter()
    failures: dict[str, str] = {}
    failed, slowest = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="memfit-") as place:
        runs = Path(place) / "runs"
        (runs / "r").mkdir(parents=True)
        for name, content in whole_run().items():
            (runs / "r" / name).write_bytes(content)
        jobs, loop = NoJobs(), asyncio.new_event_loop()
        app = make_app(TOKEN, runs, jobs)
        for number in range(given.count):
            if time.monotonic() > until:
                break
            asked = Asked(random.Random(f"{given.seed} {number}"))
            began = time.process_time()
            status, problem = judge(loop, app, asked)
            slowest = max(slowest, time.process_time() - began)
            statuses[status] += 1
            if problem:
                failed += 1
                if likeness(problem) not in failures:
                    failures[likeness(problem)] = problem
                    print(number, problem, asked.method, asked.path, asked.query[:300], flush=True)
            if number % 1000 == 999:
                print(f"{number + 1} requests, {failed} failed", flush=True)
        sent = over_sockets(runs, given.seed, given.sockets, until)
        jobs.close()
        loop.close()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    answer = {
        "seed": given.seed, "requests": statuses.total(), "over_sockets": sum(sent.values()),
        "failed": failed + sent.get("5", 0), "statuses": dict(sorted(statuses.items())),
        "statuses_over_sockets": sent, "slowest_cpu_seconds": round(slowest, 2),
        "most_bytes_held": held, "failures": sorted(failures.values()),
    }  # fmt: skip
    write_atomically(given.out, (json.dumps(answer, indent=1) + "\n").encode())
    print(json.dumps(answer))
    return 1 if answer["failed"] or held > MOST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
