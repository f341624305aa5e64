"""torchtitan's configuration: a Python module, read as text and never run; or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from memfit import catalog
from memfit.check import ConfigReading, Reader, readers
from memfit.check.keys import NOT_DESCRIBED, ConfigKeys
from memfit.check.keys.torchtitan import MOVED, STILL
from memfit.check.python_source import read_python
from memfit.check.refused_files import is_script
from memfit.check.smaller_changes import Edit, shorter, smaller
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import check_data, read_text

MOST_TOML = 2**20  # bytes of a file
MODELS = {
    "llama3_8b": "llama-3.1-8b", "llama3_70b": "llama-3.1-70b", "llama3_405b": "llama-3.1-405b",
    "qwen3_0_6b": "qwen3-0.6b", "qwen3_1_7b": "qwen3-1.7b", "qwen3_14b": "qwen3-14b",
    "qwen3_32b": "qwen3-32b", "8B": "llama-3.1-8b",
    "70B": "llama-3.1-70b", "405B": "llama-3.1-405b",
}  # fmt: skip
AXES = {
    "data_parallel_replicate_degree": "dp_replicate", "data_parallel_shard_degree": "dp_shard",
    "tensor_parallel_degree": "tp", "context_parallel_degree": "cp",
    "pipeline_parallel_degree": "pp",
}  # fmt: skip
OWN_LENGTH, OWN_ROWS = 2048, 8  # of config/job_config.py in 2025, config/configs.py since
ADAMW = ("default_adamw", "OptimizersContainer", "OptimizersContainer.Config")
CHUNKED = ("ChunkedLossWrapper", "ChunkedCELoss")
TOKENS = ("", "CrossEntropyLoss", *CHUNKED)  # losses of next tokens
IMPLEMENTATIONS = {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}


@final
class TorchtitanReader(Reader):
    """What is assigned to the configuration, by name: `c.training.seq_len = 8192`."""

    name: ClassVar = "torchtitan"
    title: ClassVar = "torchtitan"
    still: ClassVar = STILL
    moved: ClassVar = MOVED

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        return file.suffix == ".toml" or (file.suffix == ".py" and not is_script(file))

    def load(
        self, file: Path, config: str, arguments: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Keys are dotted, and not nested."""
        if file.suffix == ".py":
            return read_python(file, config)
        self.refuse_config(file, config)
        return _toml(file)

    def change(self, data: dict[str, Any], key: str, value: Any) -> None:
        """See `Reader.change`."""
        data[key] = value

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """Recompute; smaller pieces of a stated global batch; shorter rows."""
        written = "activation_checkpoint" in data
        key, full = (
            ("activation_checkpoint", "FullAC")
            if written
            else ("activation_checkpoint.mode", "full")
        )
        if data.get(key) != full:
            yield [Edit({key: full})]
        local = data.get("training.local_batch_size")
        if isinstance(local, int) and data.get("training.global_batch_size", -1) > 0:
            yield [Edit({"training.local_batch_size": n}) for n in smaller(local)]
        yield shorter(data, "training.seq_len")

    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """See `Reader.read`."""
        reading.put_model(_find_model(taken, reading))
        reading.put("framework", "torchtitan")
        reading.put("task.objective", "pretrain")
        mesh = self._mesh(taken, reading)
        self._batch(taken, reading, mesh)
        for key, ours in (("training.steps", "task.steps"), ("debug.seed", "seed")):
            value = taken(key)
            if value is not None:
                reading.put(ours, value)
        self._optimizer(taken, reading)
        key = "activation_checkpoint"
        kind = taken(key, taken(f"{key}.mode", "selective"))
        kind = {"FullAC": "full", "SelectiveAC": "selective"}.get(kind, kind)
        if kind not in ("full", "selective", "none"):
            taken.leave(key, kind, "described: full, selective, none", "states")
            kind = "full"
        reading.put("recompute", kind)
        reading.put("compile", "blocks" if taken("compile.enable", False) else "none")
        if reading.get("options.version") is None:
            reading.assume(
                "the code is torchtitan's of 202508: of another, `--set options.version=202412`"
            )
        if taken("training.disable_cuda_graphs", False) is not True and _has_graphs(taken.file):
            reading.assume("no CUDA graphs, whose pools are not described")
        names = ("compile.enable_async_tensor_parallel", "parallelism.enable_async_tensor_parallel")
        if any([taken(name, False) for name in names]):
            reading.put("options.async_tp", True)
        _loss(taken, reading)
        taken.leave_unless("optimizer", ADAMW, "AdamW is described", "weights")

    def _mesh(self, taken: ConfigKeys, reading: ConfigReading) -> dict[str, Any]:
        mesh = {
            ours: found
            for theirs, ours in AXES.items()
            if (found := taken(f"parallelism.{theirs}", kind=int)) is not None
        }
        devices = reading.count("hardware.count") * reading.count("hardware.nodes")
        if mesh.get("dp_shard", -1) == -1:
            others = 1
            for name in ("dp_replicate", "tp", "cp", "pp"):
                others *= mesh.get(name, 1)
            mesh["dp_shard"] = max(1, devices // others)
        if mesh.get("tp", 1) > 1:
            mesh["sequence_parallel"] = taken("parallelism.enable_sequence_parallel", True)
        taken("parallelism.enable_sequence_parallel")
        policy = taken("parallelism.fsdp_reshard_after_forward", "default")
        mesh["reshard_after_forward"] = policy != "never" and (
            policy == "always" or mesh.get("pp", 1) == 1
        )
        schedule = taken("parallelism.pipeline_parallel_schedule", "1F1B")
        if mesh.get("pp", 1) > 1:
            reading.put("options.pipeline_schedule", schedule)
        taken("parallelism.pipeline_parallel_layers_per_stage")
        reading.put("parallel", mesh)
        world = mesh["dp_shard"]
        for name in ("dp_replicate", "tp", "cp", "pp"):
            world *= mesh.get(name, 1)
        reading.world = world
        return mesh

    def _batch(self, taken: ConfigKeys, reading: ConfigReading, mesh: Mapping[str, Any]) -> None:
        whole = taken.file.suffix == ".toml"  # Python's base may be another function's
        length = taken("training.seq_len", taken("training.max_context_length"), int)
        local = taken("training.local_batch_size", taken("training.batch_size"), int)
        total = taken("training.global_batch_size", -1)
        tokens = taken("training.num_tokens_per_microbatch_per_dp_rank", kind=int)
        step = taken("training.num_tokens_per_train_step", -1)
        if length is None and (whole or tokens is not None):
            length = OWN_LENGTH
            reading.assume(f"rows of {length:,} tokens, torchtitan's own default")
        if local is None and whole:
            local = OWN_ROWS
            reading.assume(f"micro-batches of {local} rows, torchtitan's own default")
        if tokens is not None and length:
            local, total = tokens // length, step // length if step > 0 else -1
        ranks = mesh.get("dp_replicate", 1) * mesh["dp_shard"]
        if length is not None:
            reading.put("task.sequence_length", length)
        else:
            reading.assume("rows of 4,096 tokens, as no file says their length")
        if local is None:
            reading.assume("micro-batches of one row, as no file says their size")
            local = 1
        micro = taken("parallelism.pipeline_parallel_microbatch_size", local)
        pieces = taken("parallelism.num_pp_microbatches", 1)
        reading.put("micro_batch", micro)
        reading.put("task.global_batch", total if total > 0 else local * pieces * ranks)

    def _optimizer(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        reading.put("optimizer.name", "adamw")
        made = taken("optimizer.implementation", "fused")
        reading.put("optimizer.implementation", IMPLEMENTATIONS.get(made, made))
        names = {"lr": "learning_rate", "eps": "eps", "weight_decay": "weight_decay"}
        for theirs, ours in names.items():
            value = taken(f"optimizer.{theirs}", kind=float)
            if value is not None:
                reading.put(f"optimizer.{ours}", value)
        if (betas := taken("optimizer.betas", kind=tuple[float, float])) is not None:
            reading.put("optimizer.beta1", betas[0])
            reading.put("optimizer.beta2", betas[1])
        if (norm := taken("training.max_norm", kind=float)) is not None:
            reading.put("optimizer.clip_norm", norm)
        if (steps := taken("lr_scheduler.warmup_steps")) is not None:
            reading.put("optimizer.warmup_steps", steps)
        flat = "lr_scheduler.decay_ratio" in taken.data and taken("lr_scheduler.decay_ratio") == 0
        kind = taken("lr_scheduler.decay_type", "linear")
        reading.put("optimizer.schedule", "constant" if flat else kind)


def _loss(taken: ConfigKeys, reading: ConfigReading) -> None:
    """Of whole logits or of chunks, and of next tokens alone."""
    chunks_set = "loss.num_chunks" in taken.data
    kind = taken("loss", CHUNKED[0] if chunks_set else "").removesuffix(".loss_fn")
    kind = kind if kind != "c.loss" else "CrossEntropyLoss"  # of a function's, unwrapped
    inner, chunks = taken("loss.loss_fn", ""), taken("loss.num_chunks", 8)
    for key, name in (("loss", kind), ("loss.loss_fn", inner)):
        if name not in TOKENS:
            taken.leave(key, name, NOT_DESCRIBED, "states")
            kind = ""
    loss = reading.get("loss")
    if loss is None and not kind:
        reading.assume("the loss is of whole logits, as torchtitan's was until 2025")
    chunked = kind in CHUNKED if loss is None else loss == "chunked"
    reading.put("loss", "chunked" if chunked else "plain")
    if chunked:
        reading.put("options.loss_chunks", chunks)


def _has_graphs(file: Path) -> bool:
    """Python configurations are of 0.3.0 or later, which replays CUDA graphs by default."""
    return file.suffix == ".py"


def _find_model(taken: ConfigKeys, reading: ConfigReading) -> str:
    """Of a function that is called, or of a flavour, whose family the tokenizer's folder names.

    Raises InvalidRequest where its model is unknown and the command line names none.
    """
    called, flavour = taken("model", kind=str), taken("model.flavor", kind=str)
    family, assets = taken("model.name", "llama3"), taken("hf_assets_path", "")
    assets = taken("model.hf_assets_path", assets)
    if called in MODELS:
        return MODELS[called]
    named = Path(assets).name.lower()
    if (
        flavour
        and named.endswith(f"-{flavour}".lower())
        and named in {m.id for m in catalog.models()}
    ):
        return named
    old = taken.file.suffix == ".toml" and family == "llama3"
    if old and not named and flavour in MODELS:
        return MODELS[flavour]
    if reading.model:
        return ""  # `put_model` takes the one asked for
    raise InvalidRequest(
        f"`{called or flavour}` in `{taken.file}` is no configuration that memfit knows",
        hint=f"known: {', '.join(MODELS)}; another's with `--set model=NAME`",
    )


def _toml(file: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(read_text(file, most=MOST_TOML))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"cannot read `{file}`: {error}") from None
    check_data(data, source=f"`{file}`")
    if not {"model", "training", "parallelism"} & data.keys():
        raise InvalidRequest(
            f"`{file}` is of no tool that memfit reads",
            hint="torchtitan's has tables `model`, `training` and `parallelism`",
        )
    return {
        f"{group}.{key}": value
        for group, keys in data.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }


readers.register("torchtitan")(TorchtitanReader())
