"""Relations that answers must keep: requests in pairs, of which one asks for more than the other.

    python bench/campaign/relations.py [--seed N] [--count N] [--seconds S]

Each of `--count` requests is drawn from a seed and asked twice, changed in one thing: more layers,
longer rows or a larger micro-batch never need less memory for tensors; the same request has the
same answer; the plan of a request is the prediction of the plan's own recipe, stated; with more
memory the plan is never slower among those of one precision and method (the rule of the search: a
wider precision goes before a faster step). Results: bench/results/campaign_relations.json, written
as the campaign goes; where it has fewer requests of the same seed than asked for, the campaign goes
on from there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from memfit import api
from memfit.core.errors import Error
from memfit.files.run_folder import state
from memfit.records import from_data, to_json, write_atomically
from memfit.records.ledger import Kind
from memfit.records.request import Request
from memfit.records.results import Plan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "campaign_relations.json"


def draw(chance: random.Random) -> dict[str, Any]:
    """A small model and everything stated but what moves memory for time."""
    heads = chance.choice((4, 8, 12))
    config = {
        "model_type": chance.choice(("llama", "qwen2", "mistral")),
        "vocab_size": chance.choice((512, 5001, 32000)), "hidden_size": 16 * heads,
        "intermediate_size": chance.choice((100, 384, 1000)), "num_attention_heads": heads,
        "num_hidden_layers": chance.randrange(1, 20), "max_position_embeddings": 8192,
        "num_key_value_heads": chance.choice((1, 2, 4)),
        "tie_word_embeddings": chance.random() < 0.5,
    }  # fmt: skip
    micro = chance.choice((1, 2, 3, 4))
    length = chance.choice((32, 100, 512, 2048))
    return {
        "model": config, "weights": "random", "micro_batch": micro, "seed": 1,
        "precision": chance.choice(("fp32", "bf16", "bf16-mixed")),
        "method": chance.choice(("full", "lora")), "loss": chance.choice(("plain", "chunked")),
        "recompute": chance.choice(("none", "full", "selective")), "compile": "none",
        "lean": "none",
        "optimizer": {"name": chance.choice(("adamw", "sgd")), "learning_rate": 1e-4},
        "task": {"sequence_length": length, "global_batch": micro * 12, "steps": 3},
        "hardware": {"device": chance.choice(("h100-sxm", "a100-sxm-80", "rtx-4090"))},
    }  # fmt: skip


def ask(data: dict[str, Any]) -> Plan:
    """The plan, without its levers."""
    return api.plan(from_data(data, Request, source="the campaign"), levers=False)


def held(plan: Plan) -> int:
    """Bytes of the tensors at the fullest instant.

    What the allocator adds to them is left out: how blocks that were cut fit the next request is
    no monotone function of anything (4.2 MB of fragmentation at one row, 1.9 MB at two).
    """
    ledger = plan.ledger
    return max(
        ledger.total(phase) - ledger.by_kind(phase).get(Kind.FRAGMENTATION, 0)
        for phase in {entry.phase for entry in ledger.entries}
    )


def more(path: str, grow: Callable[[int], int]) -> Callable[[dict[str, Any], Plan], str]:
    """A relation: more of a number never needs less memory."""

    def check(data: dict[str, Any], made: Plan) -> str:
        larger = json.loads(json.dumps(data))
        *way, last = path.split(".")
        holder = larger
        for key in way:
            holder = holder[key]
        holder[last] = grow(holder[last])
        if path == "micro_batch":
            larger["task"]["global_batch"] = holder[last] * 12
        before, after = held(made), held(ask(larger))
        return "" if after >= before else f"{path}: {before} B, of more {after} B"

    return check


def twice(data: dict[str, Any], made: Plan) -> str:
    """The same request, the same answer."""
    return "" if to_json(ask(data)) == to_json(made) else "another answer to the same request"


def stated(data: dict[str, Any], made: Plan) -> str:
    """A plan's own recipe, predicted."""
    del data
    again = api.predict(state(made))
    same = again.recipe_digest == made.recipe_digest
    equal = again.memory.peak_allocated == made.memory.peak_allocated
    close = again.time.step_seconds == made.time.step_seconds
    return "" if same and equal and close else "the plan stated is predicted otherwise"


def never_slower(data: dict[str, Any], made: Plan) -> str:
    """With every knob of memory free, more memory is never slower."""
    free = {k: v for k, v in data.items() if k not in ("recompute", "loss", "micro_batch", "lean")}
    need = made.memory.peak_allocated
    found = []
    for limit in (need // 2, need, need * 3):
        try:
            plan = ask({**free, "limits": {"memory": f"{limit + 2**30} B"}})
        except Error:
            continue
        if plan.memory.verdict == "fits" and plan.time.step_seconds is not None:
            found.append(plan.time.step_seconds)
    slower = any(b > a * (1 + 1e-9) for a, b in pairwise(found))
    return f"seconds with more memory: {found}" if slower else ""


RELATIONS: dict[str, Callable[[dict[str, Any], Plan], str]] = {
    "more layers": more("model.num_hidden_layers", lambda n: n + 1),
    "longer rows": more("task.sequence_length", lambda n: n * 2),
    "larger micro-batch": more("micro_batch", lambda n: n + 1),
    "the same twice": twice, "plan = predict": stated, "more memory": never_slower,
}  # fmt: skip


def read_before(out: Path, seed: int) -> dict[str, Any]:
    """What was found before with the same seed, if anything was."""
    if out.exists() and (found := json.loads(out.read_bytes()))["seed"] == seed:
        return found
    return {"seed": seed, "requests": 0, "refused": 0, "relations": {}, "violations": []}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    answer = read_before(given.out, given.seed)
    counts, violations = Counter[str](answer["relations"]), answer["violations"]
    for number in range(answer["requests"], given.count):
        if time.monotonic() > until:
            break
        chance = random.Random(f"{given.seed} {number}")
        data, name = draw(chance), list(RELATIONS)[number % len(RELATIONS)]
        try:
            wrong = RELATIONS[name](data, ask(data))
        except Error as error:
            answer["refused"] += 1
            wrong = "" if error.exit_code in (2, 3) else str(error)
        counts[name] += 1
        if wrong:
            violations.append({"request": number, "relation": name, "wrong": wrong, "data": data})
            print(number, name, wrong, json.dumps(data), flush=True)
        answer |= {"requests": number + 1, "relations": dict(sorted(counts.items()))}
        write_atomically(given.out, (json.dumps(answer, indent=1) + "\n").encode())
    print({key: value for key, value in answer.items() if key != "violations"}, len(violations))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
