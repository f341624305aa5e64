"""Tokens per CPU second of memfit's generation and of Hugging Face's two, random weights.

Answers are greedy. `uneven`: each has a length of its own, drawn once, at which each engine ends
it, as an end of text would; `even`: all have the same length. The engines take turns in each round,
so that what else the machine does falls on all; CPU seconds of the process are counted, on one
thread, and a ratio is the median of the rounds' own. `generate` takes the prompts of a wave
together, padded on the left, and waits for its longest answer; continuous batching has pages for as
many rows. All give the same tokens, which is checked. Run: `python bench/generation.py --write`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
)

from memfit.train.generation.loop import Settings, generate_batch
from memfit.train.model.attention import register_attention

RESULTS = Path(__file__).resolve().parent / "results" / "generation.json"
LAYERS, HIDDEN, VOCAB = 8, 512, 8192
PROMPT, LONGEST, PAGE = 64, 64, 32  # tokens
Answers = list[list[int]]
Engine = Callable[[Any, Answers, list[int], int], Answers]


def make_model(attention: str) -> Any:
    """A Llama of 40 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def ours(model: Any, prompts: Answers, lengths: list[int], rows: int) -> Answers:
    """Each answer ends at its own length: by a watched limit, as no token is a stop for all."""
    made = generate_batch(model, prompts, Settings(
        max_new_tokens=max(lengths), rows=rows, temperature=0, limits=tuple(lengths)))  # fmt: skip
    return [list(m.ids) for m in made]


def theirs(model: Any, prompts: Answers, lengths: list[int], rows: int) -> Answers:
    """Waves of `rows` prompts, each as long as its longest answer; what is beyond is cut off."""
    made: Answers = []
    for at in range(0, len(prompts), rows):
        wave, wanted = prompts[at : at + rows], lengths[at : at + rows]
        width = max(len(p) for p in wave)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in wave])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in wave])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(wanted), do_sample=False, pad_token_id=0,
        )  # fmt: skip
        made += [row[:n] for row, n in zip(out[:, width:].tolist(), wanted, strict=True)]
    return made


def continuous(model: Any, prompts: Answers, lengths: list[int], rows: int) -> Answers:
    """Hugging Face's continuous batching: a row that ends makes room for the next one."""
    pages = -(-(PROMPT + max(lengths)) // PAGE)
    config = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=rows * pages, max_requests_per_batch=rows,
        max_batch_tokens=rows * PROMPT, use_cuda_graph=False, use_async_batching=False,
        allow_block_sharing=False,
    )  # fmt: skip
    told = GenerationConfig(
        do_sample=False, max_new_tokens=max(lengths), pad_token_id=0, eos_token_id=-1
    )
    made: dict[int, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=told, continuous_batching_config=config, block=True, warmup=False
    ) as manager:
        for at, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            manager.add_request(prompt, request_id=str(at), max_new_tokens=length)
        while len(made) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                made[int(result.request_id)] = result.generated_tokens
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching ended before its answers")
    return [made[at] for at in range(len(prompts))]


def draw(rows: int, uneven: bool) -> tuple[Answers, list[int]]:
    """Prompts, and the length of each one's answer."""
    chance = random.Random(rows)
    prompts = [
        [chance.randrange(1, VOCAB) for _ in range(chance.randint(PROMPT // 2, PROMPT))]
        for _ in range(2 * rows if uneven else rows)
    ]
    return prompts, [chance.randint(16, LONGEST) if uneven else LONGEST for _ in prompts]


def measure(
    engines: dict[str, tuple[Engine, Any]], rows: int, uneven: bool, rounds: int
) -> dict[str, Any]:
    """One case; a few tokens of each engine come first, which are not counted."""
    prompts, lengths = draw(rows, uneven)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    alike: dict[str, int] = {}
    for run, model in engines.values():
        run(model, prompts[:rows], [2] * rows, rows)
    for _ in range(rounds):
        answers = {}
        for name, (run, model) in engines.items():
            start = time.process_time()
            answers[name] = run(model, prompts, lengths, rows)
            seconds[name].append(time.process_time() - start)
        alike = {name: sum(map(list.__eq__, answers["memfit"], made))
                 for name, made in answers.items() if name != "memfit"}  # fmt: skip
    rates = {name: round(sum(lengths) / median(s), 1) for name, s in seconds.items()}
    found: dict[str, Any] = {
        "rows": rows, "lengths": "uneven" if uneven else "even", "answers": len(prompts),
        "tokens": sum(lengths), "tokens_per_cpu_second": rates,
    }  # fmt: skip
    for name, same in alike.items():
        ratios = [b / a for a, b in zip(seconds["memfit"], seconds[name], strict=True)]
        found[f"memfit_over_{name}"] = round(median(ratios), 2)
        found[f"answers_as_{name}"] = same
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="bench/results/generation.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    mine = make_model(register_attention("flash")).to(dtype)
    waves, pages = make_model("sdpa").to(dtype), make_model("sdpa").to(dtype)
    for other in (waves, pages):
        other.load_state_dict(mine.state_dict())
    engines = {
        "memfit": (ours, mine),
        "generate": (theirs, waves),
        "continuous": (continuous, pages),
    }
    found = []
    for rows in args.rows:
        for uneven in (True, False):
            found.append(measure(engines, rows, uneven, args.rounds))
            print(found[-1], flush=True)
    if args.write:
        about = {"parameters": sum(p.numel() for p in mine.parameters()), "dtype": args.dtype,
                 "threads": 1, "rounds": args.rounds, "torch": torch.__version__,
                 "machine": platform.machine(), "processor": processor(),
                 "transformers": transformers.__version__, "cases": found}  # fmt: skip
        RESULTS.write_text(json.dumps(about, indent=1) + "\n")


def processor() -> str:
    """Its name, as Linux has it; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else ""


if __name__ == "__main__":
    main()
