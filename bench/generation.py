"""Tokens per CPU second of memfit's generation and of Hugging Face's, random weights.

Answers are greedy. `ragged`: each has a length of its own, drawn once, at which each engine ends
it, as an end of text would; `even`: all have the same length. The engines take turns, so that what
else the machine does falls on both; CPU seconds of the process are counted, on one thread.
`generate` takes the prompts of a wave together, padded on the left, and waits for its longest
answer. Run: `python bench/generation.py --write`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from memfit.train.generation.loop import Settings, generate_batch
from memfit.train.model.attention import register_attention

RESULTS = Path(__file__).resolve().parent / "results" / "generation.json"
LAYERS, HIDDEN, VOCAB = 8, 512, 8192
PROMPT, LONGEST = 64, 128


def make_model(attention: str) -> Any:
    """A Llama of some 30 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def ours(model: Any, prompts: list[list[int]], lengths: list[int], rows: int) -> int:
    """Each answer ends at its own length: by a watched limit, as no token is a stop for all."""
    made = generate_batch(model, prompts, Settings(
        max_new_tokens=LONGEST, rows=rows, temperature=0, limits=tuple(lengths)))  # fmt: skip
    return sum(len(m.ids) for m in made)


def theirs(model: Any, prompts: list[list[int]], lengths: list[int], rows: int) -> int:
    """Waves of `rows` prompts, each as long as its longest answer."""
    for at in range(0, len(prompts), rows):
        wave = prompts[at : at + rows]
        width = max(len(p) for p in wave)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in wave])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in wave])
        model.generate(
            ids, attention_mask=mask, max_new_tokens=max(lengths[at : at + rows]), do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    return sum(lengths)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="bench/results/generation.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    args = parser.parse_args()
    torch.set_num_threads(1)
    mine, other = make_model(register_attention("flash")), make_model("sdpa")
    other.load_state_dict(mine.state_dict())
    found: list[dict[str, Any]] = []
    for rows in args.rows:
        for ragged in (True, False):
            chance = random.Random(rows)
            count = 3 * rows if ragged else rows
            prompts = [
                [chance.randrange(1, VOCAB) for _ in range(chance.randint(PROMPT // 2, PROMPT))]
                for _ in range(count)
            ]
            lengths = [chance.randint(16, LONGEST) if ragged else LONGEST for _ in prompts]
            seconds: dict[str, list[float]] = {"memfit": [], "generate": []}
            for _ in range(args.rounds):
                for name, run, model in (("memfit", ours, mine), ("generate", theirs, other)):
                    start = time.process_time()
                    tokens = run(model, prompts, lengths, rows)
                    seconds[name].append(time.process_time() - start)
            rates = {name: round(sum(lengths) / median(s), 1) for name, s in seconds.items()}
            assert tokens == sum(lengths)
            ratio = round(median(seconds["generate"]) / median(seconds["memfit"]), 2)
            found.append({"rows": rows, "lengths": "ragged" if ragged else "even", "answers": count,
                          "tokens": sum(lengths), "tokens_per_cpu_second": rates,
                          "memfit_over_generate": ratio})  # fmt: skip
            print(found[-1], flush=True)
    if args.write:
        about = {"parameters": sum(p.numel() for p in mine.parameters()), "threads": 1,
                 "rounds": args.rounds, "torch": torch.__version__, "machine": platform.machine(),
                 "transformers": transformers.__version__, "cases": found}  # fmt: skip
        RESULTS.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
