"""request.yaml for people and editors: what each key means, a commented file, a JSON Schema.

One description a key serves both; a test holds the keys to those that `Request` declares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from memfit.base_formats import list_base_formats
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import exists
from memfit.core.wording import as_yaml
from memfit.records import write_atomically
from memfit.records.request import Request

KEYS = {
    "schema": "version of this file's format",
    "model": "catalogue name (`memfit models`), hub id, folder with config.json, or its content",
    "weights": "pretrained | random; auto: pretrained where there is something to load",
    "task": "what to train on, and for how long",
    "task.objective": "pretrain (every token) | sft (the answer's tokens) | dpo, simpo, orpo, cpo"
    " (pairs of answers) | kto (rated answers) | reward (a score of each answer of a pair) | grpo,"
    " rloo, ppo (rewards of sampled answers) | online_dpo (pairs of sampled answers)",
    "task.data": "text, JSONL, CSV or parquet file, or a folder of them; several: a=0.7, b=0.3",
    "task.evaluation": "held-out data of the same kinds; of sampled answers, held-out prompts",
    "task.evaluation_share": "of the documents of task.data, held out of training, such as 0.05",
    "task.chat_template": "a Jinja file, or its text, in place of the tokenizer's own",
    "task.learns": "of conversations under sft: answers | last-answer | all",
    "task.sequence_length": "tokens; auto: the model's own, up to 4096; of sampled"
    " answers a prompt's and its answer's",
    "task.packing": "fill rows with whole documents, each seeing only itself; auto: not of pairs"
    " or sampled answers",
    "task.global_batch": "sequences per optimizer step, in however many micro-batches; a pair is 2",
    "task.steps": "optimizer steps; or give epochs or tokens instead",
    "task.epochs": "passes over the data, instead of steps",
    "task.tokens": "tokens to train on, instead of steps",
    "preference": "used when the objective is dpo, simpo, orpo, cpo, kto or reward",
    "preference.beta": "how strongly the policy is held to the reference; auto: 0.1; of reward 1",
    "preference.label_smoothing": "share of the pairs taken to be the wrong way round",
    "preference.reference": "adapter-off | precomputed; auto: the first with lora, else the second;"
    " second-model: of other trainers; the other objectives have none",
    "preference.loss_type": "of dpo: sigmoid | ipo | hinge | apo_zero | robust, …; auto: sigmoid",
    "preference.gamma": "of loss_type simpo: by how much the preferred reward is to be the larger;"
    " auto: 0.5",
    "preference.tau": "of discopop: its temperature; auto: 0.05",
    "preference.desirable": "of kto: weight of the losses of desirable answers; auto: 1",
    "preference.undesirable": "of kto: and of the others; auto: 1",
    "preference.cross_entropy": "of cpo: weight of the preferred answers' cross-entropy; auto: 1",
    "preference.center": "of reward: weight of the square of both scores' sum",
    "rollout": "how answers are sampled; used when the objective is grpo, rloo, ppo or online_dpo",
    "rollout.num_generations": "answers to each prompt; divides task.global_batch; auto: 8 of grpo,"
    " 2 of rloo and online_dpo, 1 of ppo",
    "rollout.max_prompt_length": "tokens; longer prompts are left out and counted; auto: what a"
    " stated task.sequence_length leaves, else 512",
    "rollout.max_completion_length": "tokens of an answer at most",
    "rollout.temperature": "logits are divided by it while sampling, and in the losses of grpo and"
    " rloo; auto: 1.0, of online_dpo 0.9",
    "rollout.rows": "answers in flight at once, each with a slot of the cache; auto: a whole"
    " rollout's",
    "rollout.top_k": "draw from so many of the likeliest tokens; 0: from all",
    "rollout.top_p": "draw from the likeliest tokens that have this share together",
    "rollout.min_p": "draw from tokens at least so likely as this share of the likeliest one",
    "rollout.repetition_penalty": "makes tokens that a row has less likely; 1: it does not",
    "rollout.stop_words": "texts that end an answer, and stay in it",
    "rollout.dynamic_sampling": "further rounds of prompts in place of groups of equal rewards",
    "policy": "the policy's loss; used when the objective is grpo, rloo or online_dpo",
    "policy.loss_type": "of grpo: dapo | grpo | dr_grpo; auto: dapo; of online_dpo: sigmoid |"
    " ipo; auto: sigmoid",
    "policy.beta": "weight of the KL from the base without its adapter; auto: 0 of grpo, 0.05 of"
    " rloo with an adapter; of online_dpo what log ratios are multiplied by; auto: 0.1",
    "policy.epsilon": "of grpo and rloo: ratios below 1 - epsilon are clipped",
    "policy.epsilon_high": "and above 1 + epsilon_high; auto: epsilon",
    "policy.delta": "of grpo: the unclipped ratio is capped here; 0: it is not",
    "policy.importance_sampling_level": "of grpo: token | sequence (GSPO); auto: token",
    "policy.use_bias_correction_kl": "of grpo: the KL estimate is multiplied by the ratio; auto:"
    " true",
    "policy.scale_rewards": "of grpo, what divides an advantage: group | batch | none; auto: group",
    "policy.normalize_advantages": "of rloo: whitened over the rollout",
    "policy.mask_truncated_completions": "of grpo and rloo: answers that reached their limit do not"
    " count",
    "policy.num_iterations": "of grpo and rloo: updates with each rollout",
    "ppo": "all of the losses, by the names of TRL's PPOConfig; used when the objective is ppo",
    "ppo.num_ppo_epochs": "updates with each rollout",
    "ppo.kl_coef": "weight of the KL from the base without its adapter, a part of the rewards",
    "ppo.cliprange": "ratios below 1 - cliprange and above 1 + cliprange are clipped",
    "ppo.cliprange_value": "a value is clipped that differs by more from the rollout's",
    "ppo.vf_coef": "weight of the value's loss",
    "ppo.gamma": "by which later rewards count less, a token",
    "ppo.lam": "generalised advantage estimation's lambda",
    "ppo.whiten_rewards": "rewards are divided by their standard deviation over the rollout",
    "reward": "who judges the answers; used when the objective is grpo, rloo, ppo or online_dpo",
    "reward.funcs": "a list of: number | regex:PATTERN | format | length | FILE.py:NAME |"
    " adapter:FOLDER",
    "reward.weights": "of each function; empty: 1 each",
    "reward.timeout": "seconds of one call; an answer judged by none in time has no reward",
    "reward.memory": "of a function's process",
    "reward.missing_eos_penalty": "is taken off the rewards of answers that reached their limit",
    "reward.adapter": "of adapter:FOLDER, a reward model's adapter that is not there yet",
    "reward.adapter.rank": "of its matrices; auto: this and the next three as the folder has them",
    "reward.adapter.alpha": "auto, where there is no folder: twice the rank",
    "reward.adapter.targets": "last parts of the names of the projections that it adapts",
    "reward.adapter.scaling": "plain (alpha / rank) | rank-stabilised (alpha / sqrt(rank))",
    "method": "full | freeze | lora | dora; auto: full where it fits, else lora",
    "lora": "used when the method is lora or dora",
    "lora.rank": "rank of the adapter's two matrices",
    "lora.alpha": "scale of the adapter: alpha / rank",
    "lora.scaling": "plain | rank-stabilised, which is alpha / sqrt(rank)",
    "lora.dropout": "share of the adapter's inputs dropped",
    "lora.targets": "names of the layers adapted; auto: queries and values; or all-linear",
    "freeze": "used when the method is freeze",
    "freeze.last_blocks": "the last n blocks stay trainable, with the final norm and the head",
    "freeze.patterns": "parameter names that stay trainable, such as '*norm*'",
    "base_format": "storage of frozen weights: fp32 | bf16 | fp16; beside adapters int8, nf4, fp4",
    "quantisation": "used where base_format stores codes with scales: int8, nf4, fp4",
    "quantisation.double": "nf4, fp4: scales are quantised too, 4.13 bits a weight in place of 4.5",
    "quantisation.outlier_threshold": "int8: columns with such a number stay in 16 bits; 0: none",
    "quantisation.outlier_share": "int8: share of columns certified for outliers; runs count them",
    "precision": "fp32 | bf16 | bf16-mixed, fp16-mixed, fp8-mixed (fp32 weights, narrow products)",
    "regularisation": "what holds the loss of pretrain and sft back; evaluations are without it",
    "regularisation.label_smoothing": "share of each target that is spread over all words, such as"
    " 0.1",
    "regularisation.z_loss": "weight of the squared log of what the softmax divides by, such as"
    " 1e-4",
    "regularisation.neftune_alpha": "noise on token embeddings while it trains, such as 5",
    "optimizer": "the optimizer, its schedule and clipping",
    "optimizer.name": "adamw | adamw8bit | adamw4bit | adamwfp8 | adamwbf16 | muon | …",
    "optimizer.implementation": "fused | foreach | loop: equal results, different memory",
    "optimizer.learning_rate": "auto: 2e-5 full, 2e-4 lora; from scratch by size",
    "optimizer.weight_decay": "decoupled weight decay",
    "optimizer.decays": "all | matrices, which spares biases and norms; auto: matrices, as the"
    " Trainer of transformers",
    "optimizer.layer_decay": "learning rate of a layer over that of the one above it; 0: one rate",
    "optimizer.lora_plus": "of lora and dora: learning rate of B over that of A, such as 16; 0: one"
    " rate",
    "optimizer.beta1": "AdamW's decay of the mean",
    "optimizer.beta2": "AdamW's decay of the squares",
    "optimizer.eps": "AdamW's epsilon",
    "optimizer.momentum": "SGD's momentum",
    "optimizer.schedule": "constant | linear | cosine | polynomial | inverse-sqrt | wsd",
    "optimizer.warmup_steps": "steps of linear warm-up",
    "optimizer.warmup_ratio": "the same as a share of all steps",
    "optimizer.floor": "the last rate over the full one: linear, cosine, polynomial, wsd",
    "optimizer.power": "of polynomial",
    "optimizer.decay_ratio": "of wsd: the share of all steps in which the rate falls",
    "optimizer.clip_norm": "largest gradient norm; 0 does not clip",
    "optimizer.in_backward": "update each weight within backward; no clipping, one micro-batch",
    "optimizer.stochastic_rounding": "round updated bf16 weights by chance, so that none is"
    " lost; auto: where the optimizer can",
    "recompute": "none | selective | full | {blocks: n, selective: m}: computed twice, not kept",
    "recompute.blocks": "the first n blocks",
    "recompute.selective": "the next m blocks, but for products and attention (own step)",
    "attention": "math | flash | efficient | cudnn | varlen (packed); auto: what torch takes",
    "loss": "plain | chunked: whether all logits exist at once; others' steps: fused",
    "loss_chunk": "tokens per chunk of the loss; 0 chooses",
    "micro_batch": "sequences per forward and backward; divides task.global_batch",
    "qat": "train for weights that will be rounded: none | int8 (a scale a row) | int4 (for 32)",
    "lean": "blocks that keep less for the backward: none | all | [norm, mlp]; auto: all there are",
    "compile": "none | blocks: each block by torch.compile; others' steps: model",
    "offload": "none | activations, optimizer: in host memory; others' steps: parameters",
    "framework": "whose training step it is: memfit; others' are predicted, never run",
    "options": "knobs that only another framework has; `memfit predict` names them",
    "parallel": "axes of the device mesh",
    "parallel.dp_replicate": "copies of the model, each on its own share of the batch",
    "parallel.dp_shard": "devices among which FSDP2 cuts weights, gradients and states",
    "parallel.reshard_after_forward": "free gathered weights between forward and backward (ZeRO-3)",
    "parallel.zero": "what dp_shard cuts in others' steps: 1 states, 2 gradients, 3 weights too",
    "parallel.tp": "devices that share each matrix product",
    "parallel.sequence_parallel": "cut tokens among the tp devices; memfit's own step always does",
    "parallel.cp": "devices that share the tokens of a sequence",
    "parallel.pp": "devices that hold the blocks one after the other",
    "parallel.virtual_pp": "pieces of the model that one pp device holds",
    "parallel.ep": "expert parallelism: devices of dp_shard that divide a mixture's experts",
    "parallel.ep_imbalance": "tokens that a device may receive for its experts, over an even share",
    "allocator": "as in PYTORCH_ALLOC_CONF; on a CPU keep_freed:True (fast) or keep_freed:False",
    "hardware": "on what to train",
    "hardware.device": "catalogue name (`memfit devices`); auto: this machine",
    "hardware.count": "devices per node",
    "hardware.nodes": "machines",
    "hardware.network": "what joins machines (`memfit networks`); empty: the device's usual one",
    "hardware.price": "of a device-hour: 2.50 USD | on-demand | reserved | capacity block | spot",
    "hardware.grid": "whose electricity, for CO2: france, DEU, world, … or 0.4 kg/kWh",
    "hardware.load": "share of the devices' rated power that they draw; empty: 0.85 is assumed",
    "hardware.pue": "power of the whole site over that of the devices; 1 counts these alone",
    "limits": "what may be spent; empty sets no limit of its own",
    "limits.memory": "for example 72 GiB: the whole device on CUDA, the whole process on a CPU",
    "limits.host_memory": "for example 64 GiB: of each machine, for what `offload` keeps there",
    "limits.tight": "true takes a recipe that fits by typical figures, without a margin",
    "limits.time": "for example 48 h",
    "limits.cost": "for example 5000 USD",
    "run": "how a run goes on around its steps; it may change when the run goes on",
    "run.save_every": "steps between checkpoints; below 1 a share of the run; 0: a tenth of it",
    "run.evaluate_every": "steps between evaluations of the held-out data, stated alike",
    "run.evaluate_tokens": "held-out tokens of each evaluation; 0: all after the last step, and"
    " before it what a twentieth of the time allows; all each time with best_by",
    "run.keep": "newest checkpoints that stay; the best one is among them",
    "run.best_by": "an evaluation's figure, such as loss: the run ends with the best one's weights",
    "run.best_is": "auto | most | least: auto takes the least of a name that ends in loss",
    "run.metrics": "a list of functions, FILE.py:NAME or by a package, that give figures of each"
    " evaluation",
    "run.patience": "evaluations in turn that are no better, after which the run stops; 0: never",
    "run.min_improvement": "that counts as better for patience",
    "run.skip_non_finite": "steps in turn that may update nothing, for a gradient norm that is"
    " not finite; 0: the run stops at the first",
    "run.samples": "held-out prompts that are answered while the model trains; 0: none",
    "run.sample_every": "evaluations between two times that they are",
    "run.sample_tokens": "tokens of each answer, at most",
    "run.callbacks": "a list of functions, FILE.py:NAME or by a package: called with each line",
    "run.trackers": "a list of: tensorboard | wandb | mlflow | trackio | … (accelerate's trackers)",
    "tokenizer": "folder or hub id; empty uses the model's own",
    "seed": "names the run: data order, dropout and random weights follow from it",
}
SCHEMA_FILE = "request.schema.json"
STARTERS = {"model": "llama-3.1-8b", "task.data": "data/", "hardware.device": "h100-sxm"}


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of request.yaml, with a description of every key."""
    (root,), components = msgspec.json.schema_components([Request], ref_template="#/$defs/{name}")
    name = root["$ref"].rsplit("/", 1)[-1]
    described = components.pop(name)
    _describe(described, "", components)
    names = [declared.name for declared in list_base_formats()]
    described["properties"]["base_format"]["enum"] = ["auto", *names]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "memfit request",
        **{k: v for k, v in described.items() if k != "title"},
        "$defs": components,
    }


def _describe(record: dict[str, Any], prefix: str, components: dict[str, Any]) -> None:
    for key, field in record["properties"].items():
        field["description"] = KEYS[prefix + key]
        for option in [field, *field.get("anyOf", ())]:
            if "$ref" in option:
                _describe(
                    components[option["$ref"].rsplit("/", 1)[-1]], f"{prefix}{key}.", components
                )


def template() -> str:
    """A commented request.yaml: every key at its default, switched on where one has to choose."""
    lines = [
        f"# yaml-language-server: $schema=./{SCHEMA_FILE}",
        "# What to train. Any knob may be `auto`: `memfit plan` decides it and says why.",
        "# Keys behind `#` show their defaults; delete what you do not need.",
        "",
    ]
    for field in msgspec.structs.fields(Request):
        lines += _lines(field, "", off=False)
    return "\n".join(lines) + "\n"


def _lines(field: Any, prefix: str, *, off: bool) -> list[str]:
    key = prefix + field.encode_name
    indent = "  " * prefix.count(".")
    made = field.default_factory is not msgspec.NODEFAULT
    default = field.default_factory() if made else field.default
    if isinstance(default, msgspec.Struct):
        inner = msgspec.structs.fields(type(default))
        on = any(f"{key}.{f.encode_name}" in STARTERS for f in inner)
        mark = "" if on else "# "
        nested = [line for f in inner for line in _lines(f, f"{key}.", off=not on)]
        return [f"{mark}{indent}{field.encode_name}:  # {KEYS[key]}", *nested]
    value = STARTERS.get(key, default)
    mark = "" if key in STARTERS and not off else "# "
    text = f"{indent}{field.encode_name}: {_yaml(value)}"
    return [f"{mark}{text.ljust(40 - len(mark))}  # {KEYS[key]}"]


def _yaml(value: Any) -> str:
    """A default as YAML writes it."""
    if value == {}:
        return "{}"
    return '""' if value == "" else as_yaml(value)


def write_template(path: Path) -> Path:
    """Write the commented request and, beside it, the schema that its first line names.

    Raises InvalidRequest when the file exists: what somebody wrote is not overwritten.
    """
    if exists(path):
        raise InvalidRequest(
            f"`{path}` exists already", hint="name another file: `memfit init second.yaml`"
        )
    text = json.dumps(schema(), indent=2) + "\n"
    write_atomically(path.parent / SCHEMA_FILE, text.encode())
    write_atomically(path, template().encode())
    return path
