"""One small model trained by memfit and by other trainers, step by step in turn.

    python bench/peers.py [--env TRAINER=PYTHON ...] [--modes full-fp32 ...] [--no-write]

The same Llama of 19M parameters, data, batch, precision and number of threads (one). Each trainer
runs in a process of its own, with the interpreter that --env names (default: this one), which needs
that trainer and memfit's base dependencies; one that cannot be imported is said to be missing. All
trainers of a mode are alive at once, and a step is made by each in turn, so that what else the
machine does falls on all alike.

memfit      what `memfit plan` chooses for a request that says `loss: chunked`, then its step.
memfit-compiled  the same with `compile: blocks`, which keeps what lean blocks keep.
hf-trainer  transformers.Trainer with fused AdamW, all else at its defaults.
trl         trl.SFTTrainer on rows that are already tokenised and full, with fused AdamW.
litgpt      its GPT under Fabric in the order of its `pretrain` (compiled, chunked cross-entropy),
            and with LoRA of its `finetune lora` (not compiled, head in chunks of 128).

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "peers.json"
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16000,
    "hidden_size": 384, "intermediate_size": 1056, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
ROWS, LENGTH, RATE = 4, 256, 3e-4
RANK, ALPHA, TARGETS = 16, 32.0, ("q_proj", "v_proj")
STEPS = {"fp32": (2, 8), "bf16-mixed": (1, 3)}  # warm (some compile) and timed
MOST = max(map(sum, STEPS.values())) + 2
MODES = {
    "full-fp32": ("full", "fp32"), "full-bf16": ("full", "bf16-mixed"),
    "lora-fp32": ("lora", "fp32"), "lora-bf16": ("lora", "bf16-mixed"),
}  # fmt: skip
LIBRARIES = "torch", "transformers", "peft", "accelerate", "trl", "litgpt", "lightning"


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


def batches(count: int) -> Any:
    """(count, rows, length + 1) token ids, the same for every trainer."""
    import numpy

    pick = numpy.random.default_rng(0)
    ids = pick.zipf(1.2, size=(count, ROWS, LENGTH + 1)) % MODEL["vocab_size"]
    return ids.astype("int64")


def compiled(turns: Turns, folder: Path, method: str, precision: str) -> None:
    memfit(turns, folder, method, precision, compile="blocks")


def plan(folder: Path, method: str, precision: str, **more: object) -> Any:
    """The recipe that memfit runs."""
    from memfit import api
    from memfit.records import from_data
    from memfit.records.request import Request

    told = {
        "model": str(folder), "method": method, "precision": precision, "micro_batch": ROWS,
        "task": {"sequence_length": LENGTH, "packing": False, "global_batch": ROWS, "steps": 100},
        "lora": {"rank": RANK, "alpha": ALPHA, "targets": list(TARGETS)},
        "optimizer": {"name": "adamw", "learning_rate": RATE}, "hardware": {"device": "cpu"},
        "loss": "chunked", **more,
    }  # fmt: skip
    return api.plan(from_data(told, Request, source="the bench")).recipe


def chosen(recipe: Any) -> dict[str, Any]:
    """What of a recipe a plan chose here."""
    knobs = "loss", "loss_chunk", "lean", "recompute_blocks", "attention", "compile"
    return {name: getattr(recipe, name) for name in knobs}


def memfit(turns: Turns, folder: Path, method: str, precision: str, **more: object) -> None:
    import torch

    from memfit.train.model.weights import fill_weights
    from memfit.train.step.build import Built, build_model, build_optimizer
    from memfit.train.step.step import Batch, step

    recipe = plan(folder, method, precision, **more)
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    turns.answer(chose=chosen(recipe))
    for rows in torch.from_numpy(batches(MOST)):
        turns.before()
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        result = step(built, [batch], ROWS * LENGTH)
        turns.after(float(result.loss))


def hf_model(folder: Path, method: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if method == "lora":
        from peft import get_peft_model

        model = get_peft_model(model, lora_config())
    return model.train()


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


def arguments(kind: Any, folder: Path, precision: str, **more: Any) -> Any:
    return kind(
        output_dir=str(folder / "out"), max_steps=MOST, use_cpu=True,
        per_device_train_batch_size=ROWS, learning_rate=RATE, optim="adamw_torch_fused",
        bf16=precision == "bf16-mixed", save_strategy="no", report_to=[], disable_tqdm=True,
        logging_strategy="no", seed=0, **more,
    )  # fmt: skip


def hf_trainer(turns: Turns, folder: Path, method: str, precision: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    ids = torch.from_numpy(batches(MOST)).reshape(-1, LENGTH + 1)
    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in ids]  # it shifts by itself
    trainer = Trainer(
        hf_model(folder, method), arguments(TrainingArguments, folder, precision),
        train_dataset=rows, callbacks=[callbacks(turns)],
    )  # fmt: skip
    turns.answer(chose={})
    trainer.train()


def trl(turns: Turns, folder: Path, method: str, precision: str) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{n}": n for n in range(MODEL["vocab_size"] - 2)}
    words |= {"<eos>": len(words), "<unk>": len(words) + 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<unk>")), eos_token="<eos>",
        pad_token="<eos>", unk_token="<unk>",
    )  # fmt: skip
    ids = batches(MOST).reshape(-1, LENGTH + 1)[:, :-1]
    trainer = SFTTrainer(
        hf_model(folder, "full"),
        arguments(SFTConfig, folder, precision, max_length=LENGTH, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}), processing_class=tokenizer,
        peft_config=lora_config() if method == "lora" else None, callbacks=[callbacks(turns)],
    )  # fmt: skip
    turns.answer(chose={"loss_type": trainer.args.loss_type})
    trainer.train()


def litgpt(turns: Turns, folder: Path, method: str, precision: str) -> None:
    import lightning
    import torch
    from litgpt.utils import chunked_cross_entropy

    fabric = lightning.Fabric(
        accelerator="cpu", devices=1,
        precision="bf16-mixed" if precision == "bf16-mixed" else "32-true",
    )  # fmt: skip
    sizes: dict[str, Any] = {
        "name": "bench", "block_size": MODEL["max_position_embeddings"],
        "vocab_size": MODEL["vocab_size"], "padded_vocab_size": MODEL["vocab_size"],
        "n_layer": MODEL["num_hidden_layers"], "n_head": MODEL["num_attention_heads"],
        "n_query_groups": MODEL["num_key_value_heads"], "n_embd": MODEL["hidden_size"],
        "intermediate_size": MODEL["intermediate_size"], "rotary_percentage": 1.0,
        "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm", "norm_eps": 1e-5,
        "mlp_class_name": "LLaMAMLP",
    }  # fmt: skip
    if method == "lora":
        from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

        told = {"lora_r": RANK, "lora_alpha": int(ALPHA), "lora_query": True, "lora_value": True}
        model = GPT(Config(**sizes, **told))
        mark_only_lora_as_trainable(model)
    else:
        from litgpt.config import Config as Plain
        from litgpt.model import GPT as Whole

        model = torch.compile(Whole(Plain(**sizes)))
    model = fabric.setup(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(trainable, lr=RATE, weight_decay=0.0, fused=True)
    )
    turns.answer(chose={})
    for rows in torch.from_numpy(batches(MOST)):
        turns.before()
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if method == "lora":
            logits = model(inputs, lm_head_chunk_size=128)
            loss = chunked_cross_entropy(logits, targets)
        else:
            logits = model(inputs)
            loss = chunked_cross_entropy(logits, targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.after(float(loss))


TRAINERS: dict[str, Callable[[Turns, Path, str, str], None]] = {
    "memfit": memfit, "memfit-compiled": compiled, "hf-trainer": hf_trainer, "trl": trl,
    "litgpt": litgpt,
}  # fmt: skip


# The bench.


def write_model(folder: Path) -> None:
    """config.json and random weights, which all trainers start from but litgpt, whose GPT has
    weights of its own shape; random too."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)


class Worker:
    """A trainer's process."""

    def __init__(self, python: str, trainer: str, folder: Path, mode: str) -> None:
        told = [python, "-W", "ignore", __file__, "--worker", trainer, "--mode", mode]
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


def compare(mode: str, pythons: dict[str, str], folder: Path) -> dict[str, Any]:
    """All trainers of one mode, step by step in turn."""
    found: dict[str, Any] = {}
    workers = {name: Worker(pythons[name], name, folder, mode) for name in pythons}
    for name in list(workers):
        try:
            found[name] = {"versions": workers[name].read()["versions"]}
            found[name] |= workers[name].read()
        except RuntimeError as reason:
            found.setdefault(name, {})["missing"] = str(reason)
            workers.pop(name).end()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    warm, timed = STEPS[MODES[mode][1]]
    for word in ["step"] * (warm + timed) + ["bytes"]:
        for name, worker in list(workers.items()):
            try:
                rounds[name].append(worker.ask(word))
            except RuntimeError as reason:
                found[name]["missing"] = str(reason)
                workers.pop(name).end()
    own = rounds["memfit"][warm:-1] if "memfit" in workers else []
    for name, worker in workers.items():
        worker.end()
        cpu = [
            (mine["cpu"], its["cpu"]) for mine, its in zip(own, rounds[name][warm:-1], strict=True)
        ]
        found[name]["time_over_memfit"] = round(median(its / mine for mine, its in cpu), 3)
        found[name]["first_step_seconds"] = round(rounds[name][0]["cpu"], 1)
        found[name] |= summary(rounds[name][warm:])
    return {"load_average": round(os.getloadavg()[0], 1), "trainers": found}


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the timed steps, and of the last, whose bytes were recorded."""
    timed, tokens = steps[:-1], ROWS * LENGTH
    return {
        "tokens_a_cpu_second": round(tokens / median(s["cpu"] for s in timed), 1),
        "tokens_a_second": round(tokens / median(s["wall"] for s in timed), 1),
        "cpu_seconds": [round(s["cpu"], 2) for s in timed],
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
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--worker", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        turns = Turns()
        turns.answer(versions=installed())
        TRAINERS[asked.worker](turns, asked.folder, *MODES[asked.mode])
        return
    told = dict(one.split("=", 1) for one in asked.env)
    pythons = {trainer: told.get(trainer, sys.executable) for trainer in asked.trainers}
    modes = json.loads(OUT.read_text())["modes"] if OUT.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch))
        for mode in asked.modes:
            modes[mode] = compare(mode, pythons, Path(scratch))
            print(mode, json.dumps(modes[mode], indent=2), flush=True)
    result = {
        "machine": platform.machine(), "cores": os.cpu_count(), "threads": 1,
        "model": MODEL, "rows": ROWS, "length": LENGTH,
        "modes": {mode: modes[mode] for mode in MODES if mode in modes},
    }  # fmt: skip
    if asked.write:
        OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
