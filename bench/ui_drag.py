"""What dragging costs: a local round trip for each stop of a slider, the first time and again.

    python bench/ui_drag.py

The server runs in this process; a stop's answer is the plan without its levers, as the page asks
for it while one drags. CPU seconds stand beside wall seconds, since other work on the machine adds
to the latter alone. `again` is what a stop costs that was asked before, by hand or by the page,
which asks for the three stops on either side of a slider at rest. Writes
bench/results/ui_drag.json.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlencode

import uvicorn

from memfit.ui import app

RESULT = Path(__file__).resolve().parent / "results" / "ui_drag.json"
LENGTHS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
DRAGS = {
    "llama-3.1-8b on h100-sxm, sequence length": (
        {"model": "llama-3.1-8b", "hardware.device": "h100-sxm"},
        [{"task.sequence_length": n} for n in LENGTHS],
    ),
    "llama-3.1-8b by LoRA on rtx-4090, sequence length": (
        {"model": "llama-3.1-8b", "hardware.device": "rtx-4090", "method": "lora"},
        [{"task.sequence_length": n} for n in LENGTHS],
    ),
    "llama-3.1-8b on h100-sxm, memory limit": (
        {"model": "llama-3.1-8b", "hardware.device": "h100-sxm"},
        [{"limits.memory": f"{n} GiB"} for n in range(72, 40, -4)],
    ),
}


def ask(port: int, keys: dict[str, object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    link.request("GET", f"/api/draft?{urlencode(keys)}")
    answer = link.getresponse()
    answer.read()
    assert answer.status == 200
    link.close()
    return {
        "wall_ms": 1e3 * (time.perf_counter() - wall),
        "cpu_ms": 1e3 * (time.process_time() - cpu),
    }


def main() -> None:
    with app.listen(0) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(app.configure(app.make_app("bench", Path("runs"))))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        rows = {}
        for name, (base, stops) in DRAGS.items():
            ask(port, base)  # what stands there before one drags
            first = [ask(port, base | stop) for stop in stops]
            again = [ask(port, base | stop) for stop in stops]
            rows[name] = {
                when: {
                    key: {"median": round(median(r[key] for r in found), 1),
                          "most": round(max(r[key] for r in found), 1)}
                    for key in ("wall_ms", "cpu_ms")
                }
                for when, found in (("first", first), ("again", again))
            }  # fmt: skip
        server.should_exit = True
        thread.join(10)
    load = [round(n, 1) for n in os.getloadavg()]
    result = {
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "load": load,
        "drags": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
