"""What the configurations of torchtitan's versions have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

from memfit.core.errors import InvalidRequest, UnknownName
from memfit.export.files import OPTIMIZER_SAYS, File
from memfit.export.target import Draft, Job
from memfit.export.torchrun import torchrun
from memfit.records.recipe import Recipe

MODULE = "memfit_plan"
NAME = f"{MODULE}.py"
CHUNKS = 8  # of the loss, as torchtitan's own configurations have it
AXES = frozenset({"dp_replicate", "dp_shard", "tp", "cp", "pp", "virtual_pp"})
SAYS = frozenset({
    "precision", *OPTIMIZER_SAYS, "recompute_blocks", "attention", "compile", "offload",
    "sequence_length", "micro_batch", "accumulation", "steps", "seed", "objective", "weights",
    "packing", "loss", "loss_chunk", "parallel", "method",
    "options.pipeline_schedule", "options.async_tp", "options.loss_chunks",
})  # fmt: skip
# models that torchtitan has a configuration of: ours -> (module, function)
MODELS = {
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
}


class Numbers(NamedTuple):
    """torchtitan's dtypes of a precision."""

    stored: str
    computed: str


NUMBERS = {
    "bf16-mixed": Numbers("float32", "bfloat16"),
    "bf16": Numbers("bfloat16", "bfloat16"),
    "fp32": Numbers("float32", "float32"),
}


def arguments() -> str:
    """What torchrun starts."""
    return f"-m torchtitan.train --module {MODULE} --config plan"


def write_module(job: Job, batch: list[str]) -> Draft:
    """The module; batch: the lines that the versions write differently."""
    recipe = job.recipe
    model = MODELS.get(recipe.model.name.lower())
    if model is None:
        see = "torchtitan has configurations of " + ", ".join(MODELS)
        raise UnknownName("model of torchtitan's", recipe.model.name, MODELS, see=see)
    left: dict[str, str] = {}
    lines = [
        *batch,
        *_training(recipe, left),
        *_mesh(job, left),
        *_optimizer(recipe, left),
        *_memory(job, left),
        "c.loss = c.loss.loss_fn  # of whole logits, as was predicted",
    ]
    # what flex attention keeps for the backward is what flash attention keeps
    becomes: dict[str, Any] = {"packing": True, "attention": "flash"}
    if recipe.recompute_blocks:
        becomes["recompute_blocks"] = job.architecture.layers
    if recipe.loss != "plain":
        lines[-1] = f"c.loss.num_chunks = {recipe.options.get('loss_chunks', CHUNKS)}"
        becomes["loss"] = "chunked"
    body = "".join(f"    {line}\n" for line in lines)
    text = (
        "from torchtitan.components.optimizer import default_adamw\n"
        "from torchtitan.config import CompileConfig\n"
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC\n"
        f"from torchtitan.models.{model[0]}.config_registry import {model[1]}\n"
        "from torchtitan.trainer import Trainer\n\n\n"
        f'def plan() -> Trainer.Config:\n    """Plan {job.plan.recipe_digest} of memfit\'s."""\n'
        f"    c = {model[1]}()\n{body}    return c\n"
    )
    start = f"{torchrun(job)} {arguments()}"
    return Draft(
        files=(File(name=NAME, text=text, checked=True),), left=left, start=start, becomes=becomes,
        notes=read_notes(job),
    )  # fmt: skip


def read_notes(job: Job) -> tuple[str, ...]:
    """What the module leaves to its reader; raises InvalidRequest where its length is not known."""
    check_steps(job, "torchtitan")
    return (
        "weights: random ones; to go on from published ones set c.checkpoint.initial_load_path",
        "data: those of torchtitan's own configuration of the model; set c.dataloader for yours",
    )


def check_steps(job: Job, tool: str) -> None:
    """Raise InvalidRequest where the number of steps follows from data that nobody has counted."""
    if not job.steps:
        raise InvalidRequest(
            f"`{tool}` is told a number of steps, and that of one pass over `task.data` is not"
            " known before it is tokenised",
            hint=f"`--set task.steps={job.recipe.steps or 1000}`, or `--set task.tokens=100000000`",
        )


def _training(recipe: Recipe, left: dict[str, str]) -> list[str]:
    numbers = NUMBERS.get(recipe.precision)
    if numbers is None:
        numbers = NUMBERS["bf16-mixed"]
        left["precision"] = f"{recipe.precision}: a converter of the model's own configuration"
    if recipe.objective != "pretrain":
        left["objective"] = f"{recipe.objective}: the data are the model's own configuration's"
    if recipe.attention != "flash":
        left["attention"] = f"{recipe.attention}: the model's own configuration has one (flex)"
    if not recipe.packing:
        left["packing"] = "false: rows are full"
    if recipe.loss == "chunked" and recipe.loss_chunk:
        left["loss_chunk"] = f"{recipe.loss_chunk}: chunks of torchtitan's own number"
    if recipe.loss not in ("plain", "chunked"):
        left["loss"] = f"{recipe.loss}: whole logits, or chunks"
    return [
        f"c.training.steps = {recipe.steps}",
        f"c.training.max_norm = {_norm(recipe)}",
        f'c.training.dtype = "{numbers.stored}"',
        f'c.training.mixed_precision_param = "{numbers.computed}"',
        'c.training.mixed_precision_reduce = "float32"',
        f"c.debug.seed = {recipe.seed}",
        # graphs keep pools of their own, which were not predicted; pipelines cannot have them
        "c.training.disable_cuda_graphs = True",
    ]


def _norm(recipe: Recipe) -> str:
    """torchtitan always clips: a norm that no gradient reaches stands for none."""
    return repr(recipe.optimizer.clip_norm) if recipe.optimizer.clip_norm else 'float("inf")'


def _mesh(job: Job, left: dict[str, str]) -> list[str]:
    recipe, p = job.recipe, job.recipe.parallel
    if p.dp_shard > 1 and p.zero != 3:
        left["parallel.zero"] = f"{p.zero}: FSDP2 cuts weights, too"
    lines = [
        f"c.parallelism.data_parallel_replicate_degree = {p.dp_replicate}",
        f"c.parallelism.data_parallel_shard_degree = {p.dp_shard}",
        "c.parallelism.fsdp_reshard_after_forward ="
        f' "{"always" if p.reshard_after_forward else "never"}"',
        f"c.parallelism.tensor_parallel_degree = {p.tp}",
        f"c.parallelism.enable_sequence_parallel = {p.sequence_parallel or p.tp == 1}",
        f"c.parallelism.context_parallel_degree = {p.cp}",
        f"c.parallelism.pipeline_parallel_degree = {p.pp}",
    ]
    if p.pp > 1:
        schedule = recipe.options.get("pipeline_schedule", "1F1B")
        stages = p.pp * p.virtual_pp
        each = -(-(job.architecture.layers + 2) // stages)  # the embedding and the head count
        if -(-(job.architecture.layers + 2) // each) != stages:
            left["parallel.virtual_pp"] = f"{p.virtual_pp}: blocks do not fill {stages} stages"
        lines += [
            f'c.parallelism.pipeline_parallel_schedule = "{schedule}"',
            f"c.parallelism.pipeline_parallel_layers_per_stage = {each}",
        ]
    return lines


def _optimizer(recipe: Recipe, left: dict[str, str]) -> list[str]:
    made = recipe.optimizer
    names = {"fused": "fused", "foreach": "foreach", "loop": "for-loop"}
    decays = made.schedule != "constant"
    if made.schedule in ("polynomial", "inverse-sqrt"):
        left["optimizer.schedule"] = f"{made.schedule}: none of torchtitan's"
    ratio = made.decay_ratio or None if decays else 0.0
    kind = made.schedule if made.schedule in ("linear", "cosine") else "linear"
    return [
        f"c.optimizer = default_adamw(lr={made.learning_rate!r},"
        f" betas=({made.beta1!r}, {made.beta2!r}),",
        f"    eps={made.eps!r}, weight_decay={made.weight_decay!r})",
        f'c.optimizer.implementation = "{names[made.implementation]}"',
        f"c.lr_scheduler.warmup_steps = {made.warmup(recipe.steps)}",
        f"c.lr_scheduler.decay_ratio = {ratio}",
        f'c.lr_scheduler.decay_type = "{kind}"',
        *([f"c.lr_scheduler.min_lr_factor = {made.floor!r}"] if made.floor else []),
    ]


def _memory(job: Job, left: dict[str, str]) -> list[str]:
    recipe, layers = job.recipe, job.architecture.layers
    kind = "None"
    if recipe.recompute_blocks:
        kind = "SelectiveAC.Config()" if recipe.recompute == "selective" else "FullAC.Config()"
    if 0 < recipe.recompute_blocks < layers:
        left["recompute_blocks"] = f"{recipe.recompute_blocks} of {layers}: all blocks or none"
    if recipe.offload not in ("none", "parameters"):
        left["offload"] = f"{recipe.offload}: parameters with states, or nothing"
    if recipe.compile == "model":
        left["compile"] = "model: torchtitan compiles block by block"
    compiled = recipe.compile != "none"
    asynchronous = bool(recipe.options.get("async_tp"))
    if asynchronous and not compiled:
        left["options.async_tp"] = "true: of a compiled model alone"
    more = ", enable_async_tensor_parallel=True" if asynchronous and compiled else ""
    return [
        f"c.activation_checkpoint = {kind}",
        f"c.training.enable_cpu_offload = {recipe.offload == 'parameters'}",
        f'c.compile = CompileConfig(enable={compiled}, components=["model"]{more})',
    ]
