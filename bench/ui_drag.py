"""What dragging costs: a local round trip for each stop of a slider.

    python bench/ui_drag.py

The server runs in this process; a stop's answer is the plan without its levers, as the page asks
for it while one drags. CPU seconds stand beside wall seconds, since other work on the machine adds
to the latter alone. Three times in turn:

- `first`: in a new process, straight after the plan that stands there before one drags. What the
  planner must simulate anew is simulated here.
- `rested`: every stop again, but of another global batch, which nobody asked for: new plans, worked
  out from what is known by then. This is what a page that has stood still for a while has behind
  it, for at rest it asks for all the stops of its sliders.
- `again`: the same once more; what was asked ahead of the slider costs this, or nothing where the
  page itself has it.

Each drag begins in a process of its own. Writes bench/results/ui_drag.json.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from urllib.parse import urlencode

import uvicorn

from memfit.ui import app

SOURCE = Path(__file__).resolve().parent.parent / "src"
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


def drag(name: str) -> dict[str, object]:
    """One drag's rows, in a process that has planned nothing yet."""
    base, stops = DRAGS[name]
    other = base | {"task.global_batch": 32}
    with app.listen(0) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(app.configure(app.make_app("bench", Path("runs"))))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        ask(port, base)  # what stands there before one drags
        found = {"first": [ask(port, base | stop) for stop in stops]}
        ask(port, other)
        for when in ("rested", "again"):
            found[when] = [ask(port, other | stop) for stop in stops]
        server.should_exit = True
        thread.join(10)
    return {
        when: {
            key: {"median": round(median(r[key] for r in rows), 1),
                  "most": round(max(r[key] for r in rows), 1)}
            for key in ("wall_ms", "cpu_ms")
        }
        for when, rows in found.items()
    }  # fmt: skip


def main() -> None:
    rows = {}
    for name in DRAGS:
        code = f"import json, ui_drag; print(json.dumps(ui_drag.drag({name!r})))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=True,
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
        rows[name] = json.loads(done.stdout)
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
