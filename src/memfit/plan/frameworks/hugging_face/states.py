"""The optimizers of transformers' Trainer: torch's, bitsandbytes' and torchao's.

Source: transformers 5.23 (trainer_optimizer.py), bitsandbytes 0.50 (optim/optimizer.py), torchao
(optim/adam.py), to whose moments of 4 bits, too, the Trainer gives scales of 256 elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from memfit.core.errors import InvalidRequest
from memfit.core.units import show_count
from memfit.optimizers import OptimizerFamily, find_optimizer, optimizers
from memfit.optimizers.bits_and_bytes import BitsAndBytesAdamW
from memfit.optimizers.low_bit import LowBitAdamW
from memfit.optimizers.shared.low_bit_update import Code
from memfit.plan.frameworks import Job, Knob
from memfit.plan.frameworks.shared.assembly import Held, rounded
from memfit.records.ledger import Kind
from memfit.records.model import Model, TensorSpec
from memfit.records.recipe import Recipe

NAMES = ("adamw", "adamw8bit", "adamw4bit", "sgd")
KNOBS = {
    "paged": Knob(
        default=False,
        means="paged_adamw_8bit and paged_adamw_32bit: large states wait in managed memory",
    ),
    "adamw8bit": Knob(
        default="bitsandbytes", means="whose `optimizer: adamw8bit`: adamw_8bit's, or"
        " adamw_torch_8bit's (torchao)",
        values=("bitsandbytes", "torchao"),
    ),
}  # fmt: skip
MOST = 2**31 - 1  # bitsandbytes/backends/cuda/ops.py: `ct.c_int32(g.numel())`
FOUR_BIT = LowBitAdamW("AdamW4bit", Code(bits=4, block=256, dtype="uint8", entries=16))
PAGED_32, WHOLE_32 = (BitsAndBytesAdamW(paged=paged, bits=32) for paged in (True, False))


def _family(recipe: Recipe) -> OptimizerFamily:
    """What describes the optimizer's states, and its update."""
    name, paged = recipe.optimizer.name, bool(recipe.options.get("paged"))
    if name == "adamw4bit":
        return FOUR_BIT
    if name == "adamw8bit" and recipe.options.get("adamw8bit", "bitsandbytes") == "bitsandbytes":
        return optimizers.find("adamw8bit-paged" if paged else "adamw8bit-bnb")
    if name == "adamw" and paged:
        return PAGED_32
    return find_optimizer(recipe.optimizer)


def _families(model: Model, recipe: Recipe) -> Iterator[tuple[OptimizerFamily, TensorSpec]]:
    """What is trained, each with what describes its states.

    The Trainer tells bitsandbytes to keep fp32 moments of embeddings (`register_module_override`),
    which it finds by identity: ranks' shards of them are other tensors.
    """
    family = _family(recipe)
    wide = family
    if isinstance(family, BitsAndBytesAdamW) and recipe.parallel.dp_shard == 1:
        wide = PAGED_32 if family.paged else WHOLE_32
    for w in model.weights:
        if w.trainable:
            table = w.part == "embedding" and len(w.shape) == 2
            yield (wide if table else family), w.spec


def by_bitsandbytes(recipe: Recipe) -> bool:
    """Whether the optimizer is one of bitsandbytes'."""
    return isinstance(_family(recipe), BitsAndBytesAdamW)


def check_counted(recipe: Recipe, elements: int) -> None:
    """Raise InvalidRequest for a tensor of more elements than bitsandbytes' kernels count."""
    if elements > MOST:
        raise InvalidRequest(
            f"`optimizer: {recipe.optimizer.name}` of bitsandbytes counts up to {MOST:,} elements"
            f" of a tensor, and a rank's flat share has {elements:,}",
            hint="more ranks, or `parallel: {zero: 3}` with a smaller `options.sub_group_size`",
        )


@lru_cache(maxsize=256)
def hold_states(model: Model, recipe: Recipe) -> Held:
    """The optimizer's state on the device."""
    return _hold(list(_families(model, recipe)), recipe)


@lru_cache(maxsize=256)
def hold_flat_states(sizes: tuple[int, ...], recipe: Recipe) -> Held:
    """States of flat fp32 tensors of these sizes, such as ZeRO's shares of a parameter group."""
    family = _family(recipe)
    return _hold([(family, TensorSpec(shape=(size,))) for size in sizes], recipe)


def _hold(trainable: Sequence[tuple[OptimizerFamily, TensorSpec]], recipe: Recipe) -> Held:
    settings = recipe.optimizer
    nbytes = sum(rounded(s.nbytes for s in f.on_device(p, settings)) for f, p in trainable)
    shared = next((f for f, p in trainable if f.shares(p, settings)), None)
    if shared is not None:
        nbytes += rounded(s.nbytes for s in shared.shared_state(settings))
    count = show_count(sum(p.numel for _, p in trainable))
    reason = f"{settings.name}'s states of {count} parameters"
    if recipe.options.get("paged"):
        reason += ", the large ones in managed memory"
    return {(Kind.OPTIMIZER_STATE, "optimizer"): (nbytes, reason)}


@lru_cache(maxsize=256)
def hold_update(model: Model, recipe: Recipe) -> Held:
    """Temporaries of the optimizer's step."""
    specs = [w.spec for w in model.weights if w.trainable]
    nbytes = _family(recipe).step_temporaries(specs, recipe.optimizer, "blocks")
    reason = f"{recipe.optimizer.name}'s temporaries ({recipe.optimizer.implementation})"
    return {(Kind.TEMPORARY, "optimizer"): (nbytes, reason)}


def check_optimizer(job: Job) -> None:
    """Raise InvalidRequest for optimizers that the Trainer has not."""
    recipe, family = job.recipe, _family(job.recipe)
    settings = recipe.optimizer
    if settings.implementation not in family.implementations:
        raise InvalidRequest(
            f"`optimizer: {settings.name}` of the Trainer has no"
            f" `implementation: {settings.implementation}`",
            hint=f"one of: {', '.join(family.implementations)}",
        )
    if recipe.options.get("paged") and not isinstance(family, BitsAndBytesAdamW):
        raise InvalidRequest(
            f"`options.paged` of `optimizer: {settings.name}`: bitsandbytes alone pages states",
            hint="`optimizer: adamw`, or `adamw8bit` of bitsandbytes",
        )
