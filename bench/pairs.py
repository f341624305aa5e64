"""What trainers of pairs hold in a step of DPO, beside what memfit predicts of it.

    python bench/pairs.py --env 1.9=PYTHON [--env 0.29=PYTHON ...] [--no-write]

The same tiny Llama and pairs of full rows on a CPU. Each trainer runs in a process of its own, with
the interpreter that --env names for it; a name is a value of `options.compares`. Its own training
loop makes three steps; the third's live bytes are counted by a dispatch mode, above what is there
before it: parameters, both models', and the batch. Rows of trainers without --env stay as they are
recorded. Writes bench/results/pairs.json: bytes at the highest instant of a step and of its
backward, measured and predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "pairs.json"
MODEL: dict[str, Any] = {
    "vocab_size": 768, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
PAIRS, TOKENS, LONG, RANK, TARGETS = 2, 40, 256, 4, ["q_proj", "v_proj"]
FEW = 96  # words, with which a block, not the loss, is a recomputed backward's highest instant
SAVED = "embed_tokens,lm_head"
FACTORY, TILED = "llamafactory", "1.16"
TILE = 64, 512  # tokens and columns
AUTOCAST = "bf16, autocast"  # over weights of 16 bits
PRECISIONS = {
    "full": ("fp32", "bf16", AUTOCAST, "bf16-mixed"), "lora": ("fp32", "bf16-mixed")
}  # fmt: skip
LIBRARIES = "torch", "transformers", "peft", "accelerate", "trl"
OUTSIDE = "parameters", "optimizer_state", "input", "workspace"


def count_on_tiles() -> None:
    """TRL's own kernels as they allocate on a GPU, in small tiles."""
    import trl.trainer.utils as utils
    from trl.kernels import chunked_logprob as kernels

    leave_out_triton()
    kernels.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE = TILE


def leave_out_triton() -> None:
    """TRL's own kernels as they allocate on a GPU, where Triton's do nothing else."""
    import trl.trainer.utils as utils
    from trl.kernels import chunked_logprob as kernels

    class Nothing:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: None

    for module in (kernels, utils):
        module._use_triton = lambda device: True
    kernels._forward_kernel = kernels._backward_kernel = Nothing()
    kernels.triton = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    kernels._addmm_fp32 = lambda acc, a, b: None


@contextmanager
def small_tiles() -> Iterator[None]:
    """Predictions of such tiles; none of them is remembered."""
    from memfit.meta.losses import tiled
    from memfit.plan.frameworks.shared.assembly import _describe
    from memfit.plan.simulate.closed_form import find_answers

    def forget() -> None:
        find_answers.cache_clear()
        _describe.cache_clear()

    before = tiled.TOKENS, tiled.COLUMNS
    forget()
    tiled.TOKENS, tiled.COLUMNS = TILE
    try:
        yield
    finally:
        tiled.TOKENS, tiled.COLUMNS = before
        forget()


def list_modes(name: str) -> list[dict[str, Any]]:
    """Each a change of the request, which the trainer's arguments say too.

    LLaMA-Factory computes no reference first, and trains 16-bit weights without autocast. Its
    checkpoints are reentrant unless `use_reentrant_gc` says otherwise; TRL's are not.
    """
    modes = [
        {
            "method": method, "precision": precision, "reference": reference, "recompute": again,
            "tokens": TOKENS,
        }
        for method, precisions in PRECISIONS.items()
        for precision in precisions
        for reference in ("adapter-off" if method == "lora" else "second-model", "precomputed")
        for again in ("none", "full")
    ]  # fmt: skip
    adapted = next(mode for mode in modes if mode["method"] == "lora")
    copies = {"saved": SAVED}  # the reference reads the embedding and the head that were copied
    modes += [modes[0] | {"tokens": LONG}, modes[-3] | {"tokens": LONG}]  # more than one chunk
    modes += [adapted | copies, adapted | copies | {"precision": "bf16-mixed"}]
    again = {"words": FEW, "recompute": "full"}
    blocks = [mode | again for mode in (modes[0], adapted, adapted | {"precision": "bf16-mixed"})]
    modes += blocks
    if name != FACTORY:
        return modes
    modes += [mode | {"reentrant": False} for mode in blocks]
    lacking = {"precomputed", AUTOCAST}
    return [mode for mode in modes if not lacking & {mode["reference"], mode["precision"]}]


def describe(mode: dict[str, Any]) -> dict[str, Any]:
    """The model of a mode."""
    return MODEL | {"vocab_size": mode.get("words", MODEL["vocab_size"])}


def predict(mode: dict[str, Any], compares: str) -> dict[str, int]:
    """Bytes above parameters, states and the batch."""
    from memfit.plan.memory.declared import predict_ledger
    from memfit.plan.request.defaults import read_defaults
    from memfit.plan.request.problem import find_device
    from memfit.records import from_data
    from memfit.records.ledger import Phase
    from memfit.records.request import Request

    mixed = mode["precision"] == "bf16-mixed"
    asked = {
        "framework": "trl", "model": {"model_type": "llama", **describe(mode)},
        "hardware": {"device": "cpu"}, "micro_batch": 2 * PAIRS, "method": mode["method"],
        "precision": "bf16" if mode["precision"] == AUTOCAST else mode["precision"],
        "recompute": mode["recompute"],
        "base_format": ("bf16" if mixed else "fp32") if mode["method"] == "lora" else "auto",
        "lora": {"rank": RANK, "targets": TARGETS}, 
        "options": {
            "padded": False,  # its rows are cut to one length
            "compares": compares, "fp32_outputs": mode["precision"] == AUTOCAST,
            "modules_to_save": mode.get("saved", ""),
            "reentrant": (
                compares == FACTORY and mode["recompute"] == "full" and mode.get("reentrant", True)
            ),
            "copies_dtype": "fp32" if compares == FACTORY and mode.get("saved") else "base",
        },
        "preference": {"reference": mode["reference"]},
        "task": {"objective": "dpo", "sequence_length": mode["tokens"], "global_batch": 2 * PAIRS},
    }  # fmt: skip
    recipe, model, _ = read_defaults(from_data(asked, Request, source="request"))
    with small_tiles() if compares == TILED else nullcontext():
        found = predict_ledger(recipe, model, find_device("cpu"))
    rise = {
        phase: sum(e.nbytes for e in found.at(phase) if str(e.kind) not in OUTSIDE)
        for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
    }
    return {"step": max(rise.values()), "backward": rise[Phase.BACKWARD]}


def _make(folder: Path, vocab: int) -> tuple[Any, Any]:
    """A tokenizer of as many words as the model knows, and pairs of rows that are cut."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(vocab - 2)]
    known = {word: i for i, word in enumerate([*words, "[UNK]", "[PAD]"])}
    made = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token=words[1], unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)
    answer = " " + " ".join(words[2 + i % (vocab - 8)] for i in range(LONG + 8))
    row = {"prompt": words[5], "chosen": answer, "rejected": answer}
    return tokenizer, Dataset.from_list([row] * 16)


def make_trl(mode: dict[str, Any], folder: Path) -> Any:
    """TRL's DPOTrainer, told what the mode says."""
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    lora = mode["method"] == "lora"
    mixed = mode["precision"] in (AUTOCAST, "bf16-mixed")
    low = mode["precision"] in (AUTOCAST, "bf16") or (mixed and lora)
    dtype = torch.bfloat16 if low else torch.float32
    torch.manual_seed(0)
    shape = describe(mode)
    config = LlamaConfig(**shape, attn_implementation="sdpa", use_cache=False)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    tokenizer, rows = _make(folder, shape["vocab_size"])
    arguments = DPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=PAIRS,
        max_length=mode["tokens"], bf16=mixed, fp16=False, use_cpu=True, report_to=[],
        max_steps=3, save_strategy="no",
        gradient_checkpointing=mode["recompute"] == "full", optim="adamw_torch",
        precompute_ref_log_probs=mode["reference"] == "precomputed", disable_tqdm=True,
        model_init_kwargs={"dtype": dtype, "attn_implementation": "sdpa"},
        dataloader_pin_memory=False, logging_steps=100,
    )  # fmt: skip
    saved = mode["saved"].split(",") if "saved" in mode else None
    adapter = LoraConfig(
        r=RANK, target_modules=TARGETS, task_type="CAUSAL_LM", modules_to_save=saved
    )
    return DPOTrainer(
        str(folder), args=arguments, train_dataset=rows, processing_class=tokenizer,
        peft_config=adapter if lora else None,
    )  # fmt: skip


def make_factory(mode: dict[str, Any], folder: Path) -> Any:
    """LLaMA-Factory's trainer, from the arguments of its own file; stopped before it trains."""
    import torch
    from llamafactory.hparams import parser
    from llamafactory.train.dpo import trainer as theirs
    from llamafactory.train.tuner import run_exp
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = torch.float32 if mode["precision"] == "fp32" else torch.bfloat16  # as published
    shape = describe(mode)
    LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).to(dtype).save_pretrained(folder)
    _, rows = _make(folder, shape["vocab_size"])
    told = {"file_name": "pairs.json", "ranking": True, "columns": {
        "prompt": "prompt", "chosen": "chosen", "rejected": "rejected",
    }}  # fmt: skip
    (folder / "pairs.json").write_text(json.dumps(list(rows)))
    (folder / "dataset_info.json").write_text(json.dumps({"pairs": told}))
    held: list[Any] = []
    real = theirs.CustomDPOTrainer.train

    def stop(trainer: Any, **_: Any) -> None:
        held.append(trainer)
        raise StopIteration

    theirs.CustomDPOTrainer.train = stop
    parser.is_torch_bf16_gpu_available = lambda: True  # or it would refuse `pure_bf16` on a CPU
    try:
        run_exp({
            "stage": "dpo", "do_train": True, "model_name_or_path": str(folder),
            "finetuning_type": mode["method"], "lora_rank": RANK, "lora_target": ",".join(TARGETS),
            "additional_target": mode.get("saved"), "dataset": "pairs",
            "dataset_dir": str(folder), "template": "default", "cutoff_len": mode["tokens"],
            "output_dir": str(folder / "out"), "use_cpu": True,
            "per_device_train_batch_size": PAIRS, "max_steps": 3, "save_strategy": "no",
            "bf16": mode["precision"] == "bf16-mixed", "pure_bf16": mode["precision"] == "bf16",
            "disable_gradient_checkpointing": mode["recompute"] == "none", "report_to": "none",
            "use_reentrant_gc": mode.get("reentrant", True),
            "flash_attn": "sdpa", "optim": "adamw_torch", "disable_tqdm": True,
            "overwrite_cache": True, "dataloader_pin_memory": False, "logging_steps": 100,
        })  # fmt: skip
    except StopIteration:
        pass
    finally:
        theirs.CustomDPOTrainer.train = real
    return held[0]


def count(trainer: Any) -> dict[str, int]:
    """Highest live bytes of the last step, and of its backward."""
    import torch

    sys.path.insert(0, str(HERE.parent / "tests"))
    from size_oracle import Births

    class Counted(Births):
        """Backwards of `gather` and of indices add in place; under a mode they would copy."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            func = in_place.get(func, func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    aten = torch.ops.aten
    in_place = {
        aten.scatter_add.default: aten.scatter_add_.default,
        aten._unsafe_index_put.default: aten.index_put_.default,
    }
    found: dict[str, int] = {}
    inner, backward = trainer.training_step, trainer.accelerator.backward

    def step(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        known = [*model.parameters(), *model.buffers(), *inputs.values()]
        if trainer.ref_model is not None:
            known += [*trainer.ref_model.parameters(), *trainer.ref_model.buffers()]
        begins = []
        with Counted(*known) as births:
            trainer.accelerator.backward = lambda *a, **k: (
                begins.append(len(births.events)), backward(*a, **k)
            )  # fmt: skip
            out = inner(model, inputs, *rest, **named)
        levels, level = [], 0
        for event in births.events:
            levels.append(level := level + event)
        found.update(step=max(levels), backward=max(levels[begins[0] :]))
        return out

    trainer.training_step = step
    trainer.train()
    return found


def measure(name: str, each: int = 1) -> dict[str, Any]:
    """Of every mode, or of each nth, in this process; with the versions that it has."""
    from importlib.metadata import version

    if name == TILED:
        count_on_tiles()
    rows, make = [], make_factory if name == FACTORY else make_trl
    for mode in list_modes(name)[::each]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(mode | {"measured": count(make(mode, Path(folder)))})
    libraries = (*LIBRARIES, *([FACTORY] if name == FACTORY else []))
    return {"versions": {each: version(each) for each in libraries}, "rows": rows}


def run_apart(name: str, python: str, each: int = 1) -> dict[str, Any]:
    """`measure` under another interpreter."""
    around = {
        **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent / "src"),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [python, "-W", "ignore", str(HERE / "pairs.py"), "--measure", name]
    command += ["--each", str(each)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--measure", metavar="NAME", help="in this process, as JSON")
    parser.add_argument("--each", type=int, default=1, metavar="N", help="mode, with --measure")
    parser.add_argument("--no-write", action="store_true")
    told = parser.parse_args()
    if told.measure:
        print(json.dumps(measure(told.measure, told.each)))
        return
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name, python in (each.split("=", 1) for each in told.env):
        found[name] = run_apart(name, python) | {"machine": platform.machine()}
    for name, part in sorted(found.items()):
        for row in part["rows"]:
            row["predicted"] = predict(row, name)
            off = {k: row["predicted"][k] / row["measured"][k] - 1 for k in row["measured"]}
            told_off = ", ".join(f"{k} {100 * share:+.2f}%" for k, share in off.items())
            print(name, row["method"], row["precision"], row["reference"], row["recompute"],
                  row["tokens"], told_off)  # fmt: skip
    if not told.no_write:
        OUT.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
