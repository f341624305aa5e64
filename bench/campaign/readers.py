"""Every reader of memfit's, each with whole inputs to be damaged and the command that reads them.

A reader takes the damaged content and a folder of its own, and returns an exit code: that of the
command line, run in this process. 0, 2, 3, 4 and 5 are answers, 1 is a bug.
"""

from __future__ import annotations

import io
import json
import random
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit import api
from memfit.cli.app import app, run
from memfit.core.errors import Error

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "attention_bias": False,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
MIXED = {
    "model_type": "gpt_oss", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 128,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
    "sliding_window": 32, "sliding_window_pattern": 6, "max_position_embeddings": 128,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "max_position_embeddings": 128,
}  # fmt: skip
REQUEST = {
    "model": CONFIG, "weights": "random", "method": "lora", "precision": "bf16-mixed",
    "lora": {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"], "dropout": 0.0},
    "task": {"sequence_length": 64, "global_batch": 4, "steps": 3, "objective": "sft"},
    "optimizer": {"name": "adamw", "learning_rate": 1e-4}, "micro_batch": 2, "seed": 1,
    "recompute": "none", "loss": "plain", "attention": "flash",
    "hardware": {"device": "h100-sxm", "count": 1}, "limits": {"memory": "40 GiB"},
}  # fmt: skip
YAML = b"""# a comment
model: gpt2
framework: torchtitan
task: {sequence_length: 512, global_batch: 16}
micro_batch: 2
recompute: selective
parallel: {dp_shard: 8}
hardware: {device: h100-sxm, count: 8}
"""
STATED = tuple(
    word
    for key in ("method=full", "precision=bf16-mixed", "recompute=none", "loss=plain",
                "micro_batch=1", "task.sequence_length=64", "task.global_batch=8")
    for word in ("--set", key)
)  # fmt: skip
BASE = ("predict", "gpt2", "--device", "h100-sxm", *STATED)
FLAGS = (
    (*BASE, "--set", "task.steps=5"), (*BASE, "--memory", "40 GiB"), (*BASE, "--device", "8xH100"),
    (*BASE, "--gpus", "8"), (*BASE, "--set", "optimizer.learning_rate=2e-4"), (*BASE, "--json"),
    (*BASE, "--tokens", "50M"), (*BASE, "--why"), (*BASE, "--set", "freeze.patterns=['*norm*']"),
    ("plan", "gpt2", "--device", "h100-sxm", "--seq-len", "64", "--method", "lora", "--set",
     "lora.targets=[c_proj]"), ("budget", "--cost", "5000 USD", "--devices", "h100-sxm:8"),
    ("formats", "3.14159"), ("models", "qwen"), ("devices", "80GB"), ("rules", "llama-2-7b"),
    ("solve", "sequence_length", "gpt2", "--device", "h100-sxm"), ("schema",),
    ("plan", "gpt2", "lora", "dpo", "1k", "in", "bf16", "on", "2", "x", "h100"),
    ("plan", "qwen3", "0.6b", "grpo", "4bit", "on", "4090"),
    ("plan", "gpt2", "--devices", "h100-sxm:8,a100-sxm-80:8", "--objective", "cheapest"),
)  # fmt: skip
TOOLS = {
    "axolotl.yaml": {
        "base_model": "Qwen/Qwen3-0.6B", "micro_batch_size": 2, "gradient_accumulation_steps": 4,
        "sequence_len": 2048, "adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"],
        "bf16": "auto", "datasets": [{"path": "x", "type": "alpaca"}], "optimizer": "adamw_torch",
        "gradient_checkpointing": True, "flash_attention": True, "val_set_size": 0.1,
    },
    "llamafactory.yaml": {
        "model_name_or_path": "Qwen/Qwen3-0.6B", "stage": "sft", "finetuning_type": "lora",
        "lora_rank": 8, "cutoff_len": 1024, "per_device_train_batch_size": 1, "bf16": True,
        "gradient_accumulation_steps": 8, "deepspeed": {"zero_optimization": {"stage": 3}},
        "quantization_bit": 4, "lora_target": "all", "dataset": "x", "do_eval": True,
    },
    "trl.yaml": {
        "model_name_or_path": "Qwen/Qwen3-0.6B", "use_peft": True, "dtype": "bfloat16",
        "max_length": 1024, "per_device_train_batch_size": 2, "packing": True, "bf16": True,
        "optim": "adamw_torch_fused", "load_in_4bit": True, "fsdp": "full_shard", "fsdp_config": {},
    },
    "deepspeed.json": {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer":
                              {"device": "cpu"}}, "gradient_clipping": 1.0,
    },
    "accelerate.yaml": {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8,
        "mixed_precision": "bf16", "num_machines": 1, "fsdp_config": {
            "fsdp_version": 2, "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    },
}  # fmt: skip
TITAN = b"""[model]
flavor = "8B"
name = "llama3"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
"""
TITAN_PY = b"""
c = llama3_8b()
c.training.local_batch_size = 2 * 1
c.training.seq_len = 8 * 1024
c.parallelism.data_parallel_shard_degree = 16 // 2
c.activation_checkpoint = SelectiveAC.Config()
"""
LOG = b"""step 3
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity
of 79.10 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.89 GiB
memory in use. Of the allocated memory 70.10 GiB is allocated by PyTorch, and 6.20 GiB is reserved
by PyTorch but unallocated.
"""
ROWS = (
    b'{"text": "one two three"}\n{"text": "four"}\n',
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    b'{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n',
    b'{"instruction": "a", "input": "", "output": "b"}\n',
    b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n',
    b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
)
OWN = b"""[my-gpu]
like = "h100-sxm"
memory = "100 GiB"
bandwidth = "3.0 TB/s"
flops = { bf16 = "900 TFLOP/s", fp32 = "60 TFLOP/s" }
match = ["My GPU 100GB"]
[h100-sxm]
bandwidth = "3.2 TB/s"
"""


@dataclass(frozen=True)
class Reader:
    """What reads; seeds: whole inputs."""

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes, Path], int]


def dump(data: Any) -> bytes:
    """JSON as bytes."""
    return json.dumps(data, indent=1).encode()


def command(*words: object) -> int:
    """Type a command in this process; its exit code."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        typed = [str(word) for word in words]
        code = run(lambda: app.main(typed, prog_name="memfit", standalone_mode=False))
    if code == 1:
        raise AssertionError(said.getvalue().strip()[-3000:])
    return code


def answer(work: Callable[[], object]) -> int:
    """The exit code of a call that raises memfit's errors."""
    try:
        work()
    except Error as error:
        return error.exit_code
    return 0


def put(folder: Path, name: str, content: bytes) -> Path:
    """Write a file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def read_request(content: bytes, folder: Path) -> int:
    """`memfit predict request.yaml`."""
    return command("predict", put(folder, "request.yaml", content))


def read_flags(content: bytes, folder: Path) -> int:
    """Words of a command line, one a line; some change one of them."""
    del folder
    words = content.decode("utf-8", "surrogateescape").replace("\x00", "").split("\n")
    return command(*words)


def read_config(content: bytes, folder: Path) -> int:
    """A folder with config.json, as a model."""
    put(folder, "model/config.json", content)
    return command("predict", folder / "model", "--device", "h100-sxm", *STATED)


def read_header(content: bytes, folder: Path) -> int:
    """A folder whose safetensors have such a header."""
    put(folder, "model/config.json", dump(CONFIG))
    length = struct.pack("<Q", len(content))
    file = put(folder, "model/model.safetensors", length + content + bytes(64))
    code = command("predict", folder / "model", "--device", "h100-sxm", *STATED)
    return max(code, answer(lambda: _weights(file)))


def _weights(file: Path) -> None:
    from memfit.train.model.weights import names_in

    names_in(file)


def read_index(content: bytes, folder: Path) -> int:
    """A folder with such an index of its safetensors."""
    from memfit.train.model import weights

    put(folder, "model/config.json", dump(CONFIG))
    index = put(folder, "model/model.safetensors.index.json", content)
    code = command("predict", folder / "model", "--device", "h100-sxm", *STATED)
    return max(code, answer(lambda: weights._weight_map(index)))


def read_rows(content: bytes, folder: Path) -> int:
    """JSONL as data: counted by a plan, and read by the trainer."""
    from memfit.train.data import readers
    from memfit.train.data.shards import split

    file = put(folder, "rows.jsonl", content)
    code = command(
        "predict", "gpt2", "--device", "h100-sxm", *STATED, "--set",
        f"task.data={file}", "--set", "task.epochs=1",
    )  # fmt: skip

    def texts() -> None:
        for _ in split.read_texts(readers.find_sources(str(file))):
            pass

    return max(code, answer(texts))


def read_parquet(content: bytes, folder: Path) -> int:
    """The same of a parquet file."""
    from memfit.train.data import readers
    from memfit.train.data.shards import split

    file = put(folder, "rows.parquet", content)
    code = command("predict", "gpt2", "--device", "h100-sxm", *STATED, "--set", f"task.data={file}")
    return max(code, answer(lambda: list(split.read_texts(readers.find_sources(str(file))))))


def read_tool(name: str) -> Callable[[bytes, Path], int]:
    """`memfit check FILE`."""

    def read(content: bytes, folder: Path) -> int:
        more = ("--set", "model=gpt2") if name.startswith(("deepspeed", "accelerate")) else ()
        file = put(folder, name, content)
        return command("check", file, "--device", "h100-sxm", "--count", "8", *more)

    return read


def read_log(content: bytes, folder: Path) -> int:
    """`memfit check FILE --oom LOG`."""
    file = put(folder, "trl.yaml", dump(TOOLS["trl.yaml"]))
    log = put(folder, "log.txt", content)
    return command("check", file, "--device", "h100-sxm", "--oom", log)


def read_own(content: bytes, folder: Path) -> int:
    """A user's own devices."""
    import os

    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    try:
        put(folder, "memfit/devices.toml", content)
        return max(command("devices"), command("predict", "gpt2", "--device", "my-gpu", *STATED))
    finally:
        os.environ.pop("XDG_CONFIG_HOME")
        if before is not None:
            os.environ["XDG_CONFIG_HOME"] = before


def read_plan(content: bytes, folder: Path) -> int:
    """A plan, exported and shown."""
    file = put(folder, "plan.json", content)
    return command("export", file, "--to", "slurm", "--out", folder / "out")


def read_run_file(name: str) -> Callable[[bytes, Path], int]:
    """A file of a run folder, with the others whole: report, and the page's view of it."""

    def read(content: bytes, folder: Path) -> int:
        for other, whole in whole_run().items():
            put(folder, f"runs/r/{other}", whole)
        put(folder, f"runs/r/{name}", content)
        code = command("report", folder / "runs" / "r")
        answer(lambda: api.list_runs(folder / "runs"))
        answer(lambda: api.read_run(folder / "runs", "r", 0))
        return code

    return read


def read_manifest(content: bytes, folder: Path) -> int:
    """manifest.json of a checkpoint."""
    from memfit.train.checkpoint.files import find_damage

    put(folder, "state.json", b"{}")
    put(folder, "manifest.json", content)
    find_damage(folder)
    return 0


_RUN: dict[str, bytes] = {}


def whole_run() -> dict[str, bytes]:
    """The files of a run folder, made up of a plan."""
    if not _RUN:
        from memfit.records import to_data
        from memfit.records.results import Run

        plan = api.plan(api.read_data(REQUEST), levers=False)
        made = Run(
            recipe_digest=plan.recipe_digest, recipe=plan.recipe, measurements={}, phases={},
            ledger=plan.ledger, losses=((1, 5.0), (2, 4.5)), evaluations=(), steps_done=2,
            finished=False, environment={"data": "d" * 32}, warnings=(),
        )  # fmt: skip
        row = {
            "step": 1, "loss": 5.0, "learning_rate": 1e-3, "tokens": 32, "seconds": 0.1,
            "tokens_per_second": 320.0, "memory_peak_allocated": 10, "watched": True,
        }  # fmt: skip
        log = b"".join(json.dumps({**row, "step": n}).encode() + b"\n" for n in (1, 2))
        _RUN.update(
            {"plan.json": dump(to_data(plan)), "run.json": dump(to_data(made)), "log.jsonl": log}
        )
    return _RUN


def _parquet_seed() -> tuple[bytes, ...]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return ()
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one two", "three"]}), out)
    return (out.getvalue(),)


def all_readers() -> tuple[Reader, ...]:
    """Every one, by name."""
    run_files = whole_run()
    header = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
        "__metadata__": {"format": "pt"},
    }
    weights = {"metadata": {"total_size": 64}, "weight_map": {"a": "one.safetensors"}}
    listed = {"schema": 1, "files": {"state.json": {"bytes": 2, "sha256": "0" * 64},
                                     "x": {"bytes": 1, "sha256": ""}}}  # fmt: skip
    flags = tuple("\n".join(words).encode() for words in FLAGS)
    return (
        Reader("request", (dump(REQUEST), YAML), read_request),
        Reader("flags", flags, read_flags),
        Reader("config", tuple(map(dump, (CONFIG, MIXED, GEMMA, DEEPSEEK))), read_config),
        Reader("header", (dump(header),), read_header),
        Reader("index", (dump(weights),), read_index),
        Reader("rows", ROWS, read_rows),
        Reader("parquet", _parquet_seed(), read_parquet),
        *(Reader(name.partition(".")[0], (dump(data),), read_tool(name))
          for name, data in TOOLS.items()),
        Reader("torchtitan", (TITAN,), read_tool("titan.toml")),
        Reader("torchtitan-python", (TITAN_PY,), read_tool("titan.py")),
        Reader("log", (LOG,), read_log),
        Reader("devices", (OWN,), read_own),
        Reader("plan", (run_files["plan.json"],), read_plan),
        *(Reader(name.replace(".", "-"), (content,), read_run_file(name))
          for name, content in run_files.items()),
        Reader("manifest", (dump(listed),), read_manifest),
    )  # fmt: skip


def draw(reader: Reader, chance: random.Random) -> bytes:
    """A damaged input of a reader's."""
    from mutate import mutate

    return mutate(chance, chance.choice(reader.seeds))


def main(arguments: Sequence[str]) -> int:
    """Read one input: READER FILE FOLDER; for a look at what failed."""
    name, file, folder = arguments
    reader = next(one for one in all_readers() if one.name == name)
    return reader.read(Path(file).read_bytes(), Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
