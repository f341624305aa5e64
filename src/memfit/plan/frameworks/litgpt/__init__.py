"""litgpt's finetuning step: `litgpt finetune lora` and `litgpt finetune full`.

Source: litgpt 0.5.13 (model.py, lora.py, utils.py, finetune/lora.py, finetune/full.py) and
Lightning Fabric 2.2 (wrappers.py: outputs in fp32; plugins/precision/bitsandbytes.py). On more
than one device: FSDP1, as litgpt used it until 0.5.12, one unit a block and the rest in the root's.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple, final

import msgspec

from memfit.base_formats import is_quantised
from memfit.core.errors import InvalidRequest
from memfit.core.units import show_bytes, show_count
from memfit.meta.layers.dequantised import QUANTISED_DTYPE
from memfit.optimizers import find_optimizer
from memfit.plan.frameworks import Framework, Job, Knob, Slack, TimeTraits, frameworks
from memfit.plan.frameworks.hugging_face.quantised import quantised_bytes
from memfit.plan.frameworks.litgpt.forward import LitProgram, LossKind, Norm, Order
from memfit.plan.frameworks.shared.assembly import (
    Held,
    assemble,
    attention_kernel,
    cublas,
    ddp_buckets,
    owners,
    rounded,
    run_passes,
)
from memfit.plan.frameworks.shared.fsdp1 import shard
from memfit.plan.memory.predicted_memory import without_shape
from memfit.records.ledger import Kind, Ledger
from memfit.records.model import DTYPE_BYTES, Architecture, Model, Weight
from memfit.records.recipe import Recipe

QUERY, KEY, VALUE, PROJECTION, MLP, HEAD = "query", "key", "value", "projection", "mlp", "head"
TARGETS = {  # Hugging Face's names for what litgpt's switches adapt
    "q_proj": (QUERY,), "k_proj": (KEY,), "v_proj": (VALUE,), "o_proj": (PROJECTION,),
    "query_key_value": (QUERY, KEY, VALUE), "dense": (PROJECTION,), "lm_head": (HEAD,),
    "gate_proj": (MLP,), "up_proj": (MLP,), "down_proj": (MLP,),
} | {name: (name,) for name in (QUERY, KEY, VALUE, PROJECTION, MLP, HEAD)}  # fmt: skip
# those whose blocks litgpt writes alike, but for what `_Form` reads off a model's weights
FAMILIES = (
    "falcon", "gemma", "gemma2", "gpt_neox", "llama", "mistral", "phi", "phi3", "qwen2", "stablelm",
)  # fmt: skip
PAGED = 100_000  # elements from which bitsandbytes' paged optimizers use managed memory


@final
class LitGpt(Framework):
    """All samples of the longest length, which litgpt puts first, so that an OOM comes early."""

    name = "litgpt"
    time = TimeTraits(narrow_gradients=True)
    title = "litgpt's finetuning step"
    source = "litgpt 0.5.13"
    values: ClassVar = {
        "precision": ("bf16", "fp16", "fp32"),
        "method": ("lora", "full"),
        "base_format": ("bf16", "fp16", "fp32", "nf4", "fp4"),
        "optimizer": ("adamw",),
        "implementation": ("foreach",),
        "recompute": ("none", "full"),
        "attention": ("flash", "efficient", "math"),
        "loss": ("chunked", "plain"),  # plain: extensions/thunder/pretrain.py
        "compile": ("none",),
        "offload": ("none",),
    }
    axes = ("dp_shard", "dp_replicate")
    knobs: ClassVar = {
        "double_quantisation": Knob(default=False, means="quantise the scales too: bnb.nf4-dq"),
        "release": Knob(
            default="0.5", means="`0.4` multiplies by RMSNorm's weight in 16 bits, and with a"
            " chunked head leaves out the cap of Gemma 2's logits",
            values=("0.5", "0.4"),
        ),
        "longest_samples": Knob(
            default="many", means="whether only the first micro-batch is of the full length",
            values=("many", "one"),
        ),
    }  # fmt: skip
    slack = Slack(
        low=1.0, typical=1.04, high=1.1,
        source="bench/certify.py's replays of the allocator over steps without recompute",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        recipe = job.recipe
        quantised = is_quantised(recipe.base_format)
        if recipe.method == "full" and quantised:
            raise InvalidRequest(
                f"`method: full` cannot train weights stored as"
                f" `base_format: {recipe.base_format}`",
                hint="`method: lora`",
            )
        _targets(recipe)
        if recipe.parallel.dp_shard > 1 and quantised:
            raise InvalidRequest(
                f"litgpt quantises on one device only, and `parallel.dp_shard` is"
                f" {recipe.parallel.dp_shard}",
                hint="`base_format: bf16`, or one device",
            )
        full, plain = (
            recipe.recompute_blocks == job.model.architecture.layers,
            recipe.loss == "plain",
        )
        if plain and recipe.method != "full":
            raise InvalidRequest("`loss: plain` is of litgpt's pretraining, without adapters")
        if full != (recipe.parallel.dp_shard > 1 and not plain):
            raise InvalidRequest(
                "litgpt recomputes every block on more than one device and none on one:"
                f" `recompute_blocks` is {recipe.recompute_blocks}, `parallel.dp_shard`"
                f" {recipe.parallel.dp_shard}",
                hint="`recompute: full` with `parallel.dp_shard` above 1, `recompute: none` else",
            )
        if recipe.parallel.dp_replicate > 1 and recipe.parallel.dp_shard > 1:
            raise InvalidRequest("FSDP over copies (`parallel.dp_replicate`) is not described")
        family = job.model.architecture.family
        if family not in FAMILIES:
            raise InvalidRequest(
                f"litgpt's model for the family `{family}` is not described",
                hint=f"described: {', '.join(FAMILIES)}",
            )

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`."""
        recipe, device, longest_repeats = (
            job.recipe,
            job.device,
            job.option("longest_samples") == "many",
        )
        old = recipe.options["release"] == "0.4"
        fixed = _describe(job.model, without_shape(recipe))
        form, model, a = fixed.form, fixed.model, fixed.form.architecture
        program = LitProgram(
            norm=form.norm if form.norm == "layer" or not old else "narrow-rms",
            order=form.order,
            loss_kind=_loss_kind(recipe),
            gated=form.gated,
            capped_scores=a.attention_cap > 0,
            # litgpt of 2024 left the cap out where it chunked the head (lora.py, GPT.forward)
            capped_logits=a.logit_cap > 0 and not (old and recipe.method == "lora"),
            scaled_embedding=form.scaled_embedding,
        )  # fmt: skip
        simulated = run_passes(
            job, model, program, attention_kernel(job), two_steps=longest_repeats
        )
        if not longest_repeats:
            simulated = msgspec.structs.replace(simulated, later=None)
        states, update = fixed.states, fixed.update
        if recipe.parallel.dp_shard > 1:
            return shard(job, model, simulated, states, update)
        weights = {**fixed.weights, **_rotary(model, recipe)}
        held = {**weights, **states, **cublas(device)}
        if recipe.parallel.dp_replicate > 1:
            held |= ddp_buckets(model)
        return assemble(job, simulated, load=weights, held=held, update=update)


class _Form:
    """Which of litgpt's modules a model is made of, read off its weights."""

    def __init__(self, model: Model) -> None:
        a = self.architecture = model.architecture
        block = [w for w in model.weights if w.layer == 0]
        norms = [w for w in block if len(w.shape) == 1 and ("norm" in w.name or ".ln" in w.name)]
        self.norm_bias = any(w.name.endswith(".bias") for w in norms)
        outer = [w for w in norms if w.name.endswith("weight") and w.shape == (a.hidden,)]
        feed = sum(w.numel for w in block if len(w.shape) == 2 and "mlp" in w.name)
        self.gated = feed > 2.5 * a.hidden * a.ffn
        self.norm: Norm = "layer" if self.norm_bias else "rms"
        self.norms = len(outer)
        self.shared_norm = a.parallel_residual and self.norms == 1
        self.post_norms = self.norms == 4
        self.scaled_embedding = a.family.startswith("gemma")

    @property
    def order(self) -> Order:
        """How attention and feed-forward follow each other."""
        if self.architecture.parallel_residual:
            return "parallel-shared-norm" if self.shared_norm else "parallel"
        return "post-norms" if self.post_norms else "sequential"

    def rows(self) -> list[tuple[str, tuple[int, ...]]]:
        """The weights of a block under litgpt's names."""
        a = self.architecture
        queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
        rows: list[tuple[str, tuple[int, ...]]] = []

        def linear(name: str, out: int, columns: int, bias: bool) -> None:
            rows.append((f"{name}.weight", (out, columns)))
            if bias:
                rows.append((f"{name}.bias", (out,)))

        names = ["norm_1"] if self.shared_norm else ["norm_1", "norm_2"]
        if self.post_norms:
            names += ["post_attention_norm", "post_mlp_norm"]
        for name in names:
            rows.append((f"{name}.weight", (a.hidden,)))
            if self.norm_bias:
                rows.append((f"{name}.bias", (a.hidden,)))
        linear("attn.qkv", queries + 2 * keys, a.hidden, a.attention_bias)
        linear("attn.proj", a.hidden, queries, a.output_bias)
        for name in ("mlp.fc_1", "mlp.fc_2") if self.gated else ("mlp.fc",):
            linear(name, a.ffn, a.hidden, a.mlp_bias)
        linear("mlp.proj", a.hidden, a.ffn, a.mlp_bias)
        return rows


def _loss_kind(recipe: Recipe) -> LossKind:
    if recipe.loss == "plain":
        return "whole"
    return "chunked-head" if recipe.method == "lora" else "chunked"


class _Fixed(NamedTuple):
    """What does not depend on the shape of a micro-batch."""

    form: _Form
    model: Model
    weights: Held
    states: Held
    update: Held


@lru_cache(maxsize=256)
def _describe(model: Model, recipe: Recipe) -> _Fixed:
    form = _Form(model)
    adapted = _adapt(form, model, recipe)
    return _Fixed(
        form, adapted, _parameters(adapted, recipe), _states(adapted, recipe),
        _update(adapted, recipe),
    )  # fmt: skip


def _adapt(form: _Form, model: Model, recipe: Recipe) -> Model:
    """litgpt's parameters with their dtypes; the head is never tied to the embedding."""
    a = form.architecture
    dtype, full = recipe.compute_dtype, recipe.method == "full"
    quantised = is_quantised(recipe.base_format)
    targets, rank = _targets(recipe), recipe.lora.rank

    def base(name: str, shape: tuple[int, ...], part: str, layer: int) -> Weight:
        matrix = len(shape) == 2 and part != "embedding"
        return Weight(
            name=name, shape=shape, part=part, layer=layer,
            dtype=QUANTISED_DTYPE if quantised and matrix else dtype, trainable=full,
        )  # fmt: skip

    def pair(name: str, shapes: tuple[tuple[int, int], ...], part: str, layer: int) -> list[Weight]:
        low: dict[str, Any] = {"part": part, "layer": layer, "dtype": dtype, "trainable": True}
        return [
            Weight(name=f"{name}.lora_{letter}", shape=shape, **low)
            for letter, shape in zip("AB", shapes, strict=True)
        ]

    rows = [base("transformer.wte.weight", (a.vocab, a.hidden), "embedding", -1)]
    for layer in range(a.layers):
        prefix = f"transformer.h.{layer}."
        for name, shape in form.rows():
            rows.append(base(prefix + name, shape, "block", layer))
            module = name.removesuffix(".weight")
            shapes = _low_rank(module, shape, a, targets, rank) if module != name else None
            if shapes:
                rows += pair(prefix + module, shapes, "block", layer)
    rows.append(base("transformer.ln_f.weight", (a.hidden,), "norm", -1))
    if form.norm_bias:
        rows.append(base("transformer.ln_f.bias", (a.hidden,), "norm", -1))
    rows.append(base("lm_head.weight", (a.vocab, a.hidden), "head", -1))
    if a.head_bias:
        rows.append(base("lm_head.bias", (a.vocab,), "head", -1))
    if HEAD in targets:
        rows += pair("lm_head", ((rank, a.hidden), (a.vocab, rank)), "head", -1)
    return Model(name=model.name, architecture=a, weights=tuple(rows))


def _low_rank(
    module: str, shape: tuple[int, ...], a: Architecture, targets: set[str], rank: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Shapes of A and B beside a projection; the fused one has a part for each that is adapted."""
    if module == "attn.qkv":
        keys = a.kv_heads * a.head_dim
        parts = {QUERY: a.heads * a.head_dim, KEY: keys, VALUE: keys}
        wanted = [size for name, size in parts.items() if name in targets]
        return ((rank * len(wanted), shape[1]), (sum(wanted), rank)) if wanted else None
    adapted = PROJECTION if module == "attn.proj" else MLP
    if len(shape) != 2 or adapted not in targets:
        return None
    return (rank, shape[1]), (shape[0], rank)


def _targets(recipe: Recipe) -> set[str]:
    """litgpt's `lora_*` switches that are on."""
    if recipe.method != "lora":
        return set()
    found: set[str] = set()
    for target in recipe.lora.targets:
        if target not in TARGETS:
            known = ", ".join(sorted({name for names in TARGETS.values() for name in names}))
            raise InvalidRequest(
                f"`lora.targets`: litgpt has no switch for `{target}`", hint=f"one of: {known}"
            )
        found |= set(TARGETS[target])
    return found


def _parameters(model: Model, recipe: Recipe) -> Held:
    double = bool(recipe.options["double_quantisation"])

    def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
        if dtype == QUANTISED_DTYPE:
            return quantised_bytes(recipe.base_format, shape, double=double)
        return prod(shape) * DTYPE_BYTES[dtype]

    held = {}
    for owner, each in owners(model, nbytes).items():
        stored = "4-bit codes and scales, the rest " if owner in ("blocks", "head") else ""
        quantised = stored if is_quantised(recipe.base_format) else ""
        reason = f"{len(each)} tensors, {quantised}{recipe.compute_dtype}: {show_bytes(sum(each))}"
        held[Kind.PARAMETERS, owner] = (rounded(each), reason)
    return held


def _rotary(model: Model, recipe: Recipe) -> Held:
    turn = 2 * recipe.sequence_length * model.architecture.rotary_dim * DTYPE_BYTES["float32"]
    return {(Kind.PARAMETERS, "rotary"): (turn, "cosines and sines of every position, fp32")}


def _states(model: Model, recipe: Recipe) -> Held:
    """Two moments in the parameters' dtype; quantised: bitsandbytes' paged AdamW, in fp32."""
    trainable, ranks = [w for w in model.weights if w.trainable], recipe.parallel.dp_shard
    count = show_count(sum(w.numel for w in trainable) // ranks)
    if is_quantised(recipe.base_format):
        each = [w.numel * DTYPE_BYTES["float32"] for w in trainable if w.numel < PAGED]
        reason = (
            f"two fp32 moments of those of {count} parameters whose tensors are too small to page"
        )
        return {(Kind.OPTIMIZER_STATE, "optimizer"): (2 * rounded(each), reason)}
    each = [w.nbytes // ranks for w in trainable]
    reason = f"two moments of {count} parameters in their own dtype"
    return {(Kind.OPTIMIZER_STATE, "optimizer"): (2 * rounded(each), reason)}


def _update(model: Model, recipe: Recipe) -> Held:
    if is_quantised(recipe.base_format):
        return {}
    specs = [w.spec for w in model.weights if w.trainable]
    optimizer = find_optimizer(recipe.optimizer)
    nbytes = optimizer.step_temporaries(specs, recipe.optimizer, "blocks")
    reason = "AdamW's denominators, all at once (foreach)"
    return {(Kind.TEMPORARY, "optimizer"): (nbytes // recipe.parallel.dp_shard, reason)}


frameworks.register("litgpt")(LitGpt())
