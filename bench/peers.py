"""Small models trained by memfit and by other trainers, step by step in turn.

    python bench/peers.py [--env TRAINER=PYTHON ...] [--sizes 20M ...] [--modes full-fp32 ...]
        [--rounds 5]

Llamas of 19M to 160M parameters; of a size, the same data, batch, precision and number of threads
(one). Each trainer runs in a process of its own, with the interpreter that --env names (default:
this one), which needs that trainer and memfit's base dependencies; one that cannot be imported, or
that fails, is said to be missing. All trainers of a setting are alive at once, and a step is made
by each in turn, so that what else the machine does falls on all alike.

memfit      what `memfit plan` chooses for a request that says `loss: chunked`, then its step.
hf-trainer  transformers.Trainer with fused AdamW, all else at its defaults.
trl         trl.SFTTrainer on rows that are already tokenised and full, with fused AdamW. Its own
            loss, which never holds whole logits: another loss costs it a second forward, and
            Liger's kernels have none for a CPU.
litgpt      its GPT under Fabric in the order of its `pretrain` (chunked cross-entropy), and with
            LoRA of its `finetune lora` (head in chunks of 128).

Each runs plain, and as NAME-compiled: memfit with `compile: blocks`, the Trainers with
`torch_compile`, litgpt with torch.compile of its GPT, as its `pretrain` does.

Figures: processor time of a step over memfit's of the same round (median); tokens in a second of
processor time and of the clock (medians of the timed steps); page faults of a step; the process's
largest resident set; bytes alive at a step's worst moment above those at its start, from torch's
profiler, and the same when its backward begins: what the forward has saved, and what its loss
holds. Losses show that all train the same thing. Writes bench/results/peers.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "peers.json"
# hidden, intermediate, blocks, heads, key-value heads, words; rows and tokens a step
SIZES = {
    "20M": (384, 1056, 4, 6, 3, 16000, 4, 256), "58M": (640, 1728, 8, 10, 5, 16000, 2, 256),
    "100M": (768, 2112, 10, 12, 6, 24000, 2, 256), "160M": (896, 2432, 12, 14, 7, 32000, 2, 256),
}  # fmt: skip
RATE = 3e-4
RANK, ALPHA, TARGETS = 16, 32.0, ("q_proj", "v_proj")
WARM, TIMED = 2, 5  # rounds; some compile in the first, and once more when gradients appeared
METHODS, PRECISIONS = ("full", "lora"), ("fp32", "bf16-mixed", "bf16")
MODES = {f"{method}-{kind}": (method, kind) for method in METHODS for kind in PRECISIONS}
LIBRARIES = "torch", "transformers", "peft", "accelerate", "trl", "litgpt", "lightning"


@dataclass(frozen=True, slots=True)
class Job:
    """What one process trains."""

    folder: Path  # of config.json and the first weights
    method: str
    precision: str
    compiled: bool
    rows: int
    length: int
    steps: int

    @property
    def model(self) -> dict[str, Any]:
        """The model's config."""
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    @property
    def dtype(self) -> Any:
        """What weights are stored in."""
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def config_of(size: str) -> dict[str, Any]:
    hidden, wide, layers, heads, groups, words, *_ = SIZES[size]
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": words,
        "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }  # fmt: skip


# The worker: a trainer asks `Turns` before each of its steps, and tells it after.


class Turns:
    """Steps made when the bench says so, each reported with its time, or with its bytes."""

    def __init__(self) -> None:
        self.profile: Any = None
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a trainer prints is no answer

    def answer(self, **what: object) -> None:
        self.answers.write(json.dumps(what) + "\n")
        self.answers.flush()

    def before(self) -> None:
        """Waits for the word; raises SystemExit when there is no further step."""
        word = sys.stdin.readline().strip()
        if word == "":
            raise SystemExit
        if word == "bytes":
            from torch.profiler import ProfilerActivity, profile

            self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profile.__enter__()
        self.faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.start = time.perf_counter(), time.process_time()

    def after(self, loss: float) -> None:
        wall, cpu = (time.perf_counter() - self.start[0], time.process_time() - self.start[1])
        if self.profile is None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self.faults
            self.answer(wall=wall, cpu=cpu, loss=loss, resident=peak, faults=faults)
            return
        self.profile.__exit__(None, None, None)
        found, self.profile = bytes_of(self.profile), None
        self.answer(loss=loss, **found)


def bytes_of(profile: Any) -> dict[str, int]:
    """Bytes above the start: the most, and those alive when the first backward operator begins."""
    changes: list[tuple[int, int]] = []
    begins = math.inf
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        elif event.name.startswith("autograd::engine::evaluate_function"):
            begins = min(begins, event.start_time_ns)
    alive = most = saved = 0
    for when, change in sorted(changes):
        alive += change
        most = max(most, alive)
        if when < begins:
            saved = alive
    return {"most": most, "saved": saved}


def batches(job: Job) -> Any:
    """(steps, rows, length + 1) token ids, the same for every trainer."""
    import numpy

    pick = numpy.random.default_rng(0)
    ids = pick.zipf(1.2, size=(job.steps, job.rows, job.length + 1)) % job.model["vocab_size"]
    return ids.astype("int64")


def plan(job: Job) -> Any:
    """The recipe that memfit runs."""
    from memfit import api
    from memfit.records import from_data
    from memfit.records.request import Request

    told = {
        "model": str(job.folder), "method": job.method, "precision": job.precision,
        "micro_batch": job.rows, "loss": "chunked",
        "task": {
            "sequence_length": job.length, "packing": False, "global_batch": job.rows, "steps": 100
        },
        "lora": {"rank": RANK, "alpha": ALPHA, "targets": list(TARGETS)},
        "optimizer": {"name": "adamw", "learning_rate": RATE}, "hardware": {"device": "cpu"},
    } | ({"compile": "blocks"} if job.compiled else {})  # fmt: skip
    return api.plan(from_data(told, Request, source="the bench")).recipe


def chosen(recipe: Any) -> dict[str, Any]:
    """What of a recipe a plan chose here."""
    knobs = "loss", "loss_chunk", "lean", "recompute_blocks", "attention", "compile", "allocator"
    return {name: getattr(recipe, name) for name in knobs}


def memfit(turns: Turns, job: Job) -> None:
    import torch

    from memfit.train.measure.resident import settle_heap
    from memfit.train.model.weights import fill_weights
    from memfit.train.step.build import Built, build_model, build_optimizer
    from memfit.train.step.step import Batch, step

    recipe = plan(job)
    settle_heap(recipe)  # as `memfit train` does; the others have what glibc does by itself
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    turns.answer(chose=chosen(recipe))
    for rows in torch.from_numpy(batches(job)):
        turns.before()
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        result = step(built, [batch], job.rows * job.length)
        turns.after(float(result.loss))


def hf_model(job: Job) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.folder, dtype=job.dtype).train()


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")


def callbacks(turns: Turns) -> Any:
    """A Trainer's callback; the loss is read as its own log has it, after the step."""
    from transformers import TrainerCallback

    class Wait(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.before()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.after(math.nan)

    return Wait()


def arguments(kind: Any, job: Job, **more: Any) -> Any:
    return kind(
        output_dir=str(job.folder / "out"), max_steps=job.steps, use_cpu=True,
        per_device_train_batch_size=job.rows, learning_rate=RATE, optim="adamw_torch_fused",
        bf16=job.precision == "bf16-mixed", save_strategy="no", report_to=[], disable_tqdm=True,
        logging_strategy="no", seed=0, torch_compile=job.compiled, **more,
    )  # fmt: skip


def hf_trainer(turns: Turns, job: Job) -> None:
    import torch
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments

    ids = torch.from_numpy(batches(job)).reshape(-1, job.length + 1)
    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in ids]  # it shifts by itself
    model = hf_model(job)
    trainer = Trainer(
        get_peft_model(model, lora_config()) if job.method == "lora" else model,
        arguments(TrainingArguments, job), train_dataset=rows, callbacks=[callbacks(turns)],
    )  # fmt: skip
    turns.answer(chose={})
    trainer.train()


def trl(turns: Turns, job: Job) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{n}": n for n in range(job.model["vocab_size"] - 2)}
    words |= {"<eos>": len(words), "<unk>": len(words) + 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<unk>")), eos_token="<eos>",
        pad_token="<eos>", unk_token="<unk>",
    )  # fmt: skip
    ids = batches(job).reshape(-1, job.length + 1)[:, :-1]
    trainer = SFTTrainer(
        hf_model(job),
        arguments(SFTConfig, job, max_length=job.length, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}), processing_class=tokenizer,
        peft_config=lora_config() if job.method == "lora" else None,
        callbacks=[callbacks(turns)],
    )  # fmt: skip
    turns.answer(chose={"loss_type": trainer.args.loss_type})
    trainer.train()


def gpt(job: Job) -> Any:
    """litgpt's model with random weights."""
    told = job.model
    sizes: dict[str, Any] = {
        "name": "bench", "block_size": told["max_position_embeddings"],
        "vocab_size": told["vocab_size"], "padded_vocab_size": told["vocab_size"],
        "n_layer": told["num_hidden_layers"], "n_head": told["num_attention_heads"],
        "n_query_groups": told["num_key_value_heads"], "n_embd": told["hidden_size"],
        "intermediate_size": told["intermediate_size"], "rotary_percentage": 1.0,
        "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm", "norm_eps": 1e-5,
        "mlp_class_name": "LLaMAMLP",
    }  # fmt: skip
    if job.method == "full":
        from litgpt.config import Config as Plain
        from litgpt.model import GPT as Whole

        return Whole(Plain(**sizes))
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    adapted = {"lora_r": RANK, "lora_alpha": int(ALPHA), "lora_query": True, "lora_value": True}
    model = GPT(Config(**sizes, **adapted))
    mark_only_lora_as_trainable(model)
    return model


def litgpt(turns: Turns, job: Job) -> None:
    import lightning
    import torch
    from litgpt.utils import chunked_cross_entropy

    names = {"fp32": "32-true", "bf16": "bf16-true"}
    precision: Any = names.get(job.precision, job.precision)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    with fabric.init_module():
        model = gpt(job)
    model = fabric.setup(torch.compile(model) if job.compiled else model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(trainable, lr=RATE, weight_decay=0.0, fused=True)
    )
    turns.answer(chose={})
    chunks = {"lm_head_chunk_size": 128} if job.method == "lora" else {}
    for rows in torch.from_numpy(batches(job)):
        turns.before()
        logits = model(rows[:, :-1].contiguous(), **chunks)
        loss = chunked_cross_entropy(logits, rows[:, 1:].contiguous())
        del logits
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.after(float(loss))


RUNS: dict[str, Callable[[Turns, Job], None]] = {
    "memfit": memfit, "hf-trainer": hf_trainer, "trl": trl, "litgpt": litgpt,
}  # fmt: skip
TRAINERS = [f"{name}{how}" for name in RUNS for how in ("", "-compiled")]


def job_of(folder: Path, trainer: str, size: str, mode: str, rounds: int = TIMED) -> Job:
    method, precision = MODES[mode]
    *_, rows, length = SIZES[size]
    compiled = trainer.endswith("-compiled")
    return Job(folder, method, precision, compiled, rows, length, WARM + rounds + 2)


def work(trainer: str, size: str, mode: str, folder: Path, rounds: int) -> None:
    """What a trainer's process does."""
    turns = Turns()
    turns.answer(versions=installed())
    RUNS[trainer.removesuffix("-compiled")](turns, job_of(folder, trainer, size, mode, rounds))


# The bench.


def write_model(folder: Path, size: str) -> None:
    """config.json and random weights, which all trainers start from but litgpt, whose GPT has
    weights of its own shape; random too."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config_of(size))).save_pretrained(folder)


class Worker:
    """A trainer's process."""

    def __init__(
        self, python: str, trainer: str, folder: Path, size: str, mode: str, rounds: int
    ) -> None:
        told = [python, "-W", "ignore", __file__, "--worker", trainer, "--modes", mode]
        told += ["--sizes", size, "--rounds", str(rounds)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = f"{HERE.parent / 'src'}"
        self.log = (folder / f"{trainer}-{mode}.log").open("w")
        self.process = subprocess.Popen(
            [*told, "--folder", str(folder)], env=environment, text=True, stderr=self.log,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = Path(self.log.name).read_text().strip().splitlines()
            raise RuntimeError(said[-1] if said else "no answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def compare(
    size: str, mode: str, pythons: dict[str, str], folder: Path, timed: int
) -> dict[str, Any]:
    """All trainers of one setting, step by step in turn."""
    found: dict[str, Any] = {}
    workers = {name: Worker(pythons[name], name, folder, size, mode, timed) for name in pythons}
    for name in list(workers):
        try:
            found[name] = {"versions": workers[name].read()["versions"]}
            found[name] |= workers[name].read()
        except RuntimeError as reason:
            found.setdefault(name, {})["missing"] = str(reason)
            workers.pop(name).end()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for word in ["step"] * (WARM + timed) + ["bytes"]:
        for name, worker in list(workers.items()):
            try:
                rounds[name].append(worker.ask(word))
            except RuntimeError as reason:
                found[name]["missing"] = str(reason)
                workers.pop(name).end()
    own = rounds["memfit"][WARM:-1] if "memfit" in workers else []
    for name, worker in workers.items():
        worker.end()
        cpu = [
            (mine["cpu"], its["cpu"]) for mine, its in zip(own, rounds[name][WARM:-1], strict=True)
        ]
        found[name]["time_over_memfit"] = round(median(its / mine for mine, its in cpu), 3)
        found[name]["first_step_seconds"] = round(rounds[name][0]["cpu"], 1)
        found[name] |= summary(rounds[name][WARM:], math.prod(SIZES[size][-2:]))
    return {"load_average": round(os.getloadavg()[0], 1), "trainers": found}


def summary(steps: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Of the timed steps, and of the last, whose bytes were recorded."""
    timed = steps[:-1]
    return {
        "tokens_a_cpu_second": round(tokens / median(s["cpu"] for s in timed), 1),
        "tokens_a_second": round(tokens / median(s["wall"] for s in timed), 1),
        "cpu_seconds": [round(s["cpu"], 4) for s in timed],
        "faults": round(median(s["faults"] for s in timed)),
        "resident_mib": round(timed[-1]["resident"] / 2**20),
        "step_mib": round(steps[-1]["most"] / 2**20, 1),
        "saved_mib": round(steps[-1]["saved"] / 2**20, 1),
        "losses": [None if math.isnan(s["loss"]) else round(s["loss"], 3) for s in steps],
    }  # fmt: skip


def installed() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", action="append", default=[], metavar="TRAINER=PYTHON")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--rounds", type=int, default=TIMED, help="steps of each that are timed")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--worker", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, *asked.sizes, *asked.modes, asked.folder, asked.rounds)
        return
    told = dict(one.split("=", 1) for one in asked.env)
    bare = {trainer: trainer.removesuffix("-compiled") for trainer in asked.trainers}
    pythons = {trainer: told.get(name, sys.executable) for trainer, name in bare.items()}
    for size in asked.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            write_model(Path(scratch), size)
            for mode in asked.modes:
                found = compare(size, mode, pythons, Path(scratch), asked.rounds)
                print(size, mode, json.dumps(brief(found)), flush=True)
                if asked.write:
                    keep(size, mode, found)


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """Time over memfit's and MiB saved of each trainer."""
    return {
        name: row.get("missing") or [row["time_over_memfit"], row["saved_mib"]]
        for name, row in found["trainers"].items()
    }


def keep(size: str, mode: str, found: dict[str, Any]) -> None:
    """Puts a setting's figures in the results file, whose others stay."""
    sizes = json.loads(OUT.read_text())["sizes"] if OUT.exists() else {}
    rows, length = SIZES[size][-2:]
    old = sizes.get(size, {"modes": {}})["modes"] | {mode: found}
    kept = {name: old[name] for name in MODES if name in old}
    sizes[size] = {"model": config_of(size), "rows": rows, "length": length, "modes": kept}
    result = {
        "machine": platform.machine(), "cores": os.cpu_count(), "threads": 1,
        "sizes": {name: sizes[name] for name in SIZES if name in sizes},
    }  # fmt: skip
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
