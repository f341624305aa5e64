"""How trainers over Hugging Face's classes compare pairs of answers (DPO, loss `sigmoid`).

Chosen and rejected rows are one batch. The policy's forward comes first, with its graph; the
reference's runs while the policy's logits are held. Every token is taken to be of an answer.

Source: trl 0.29, 1.9 and 1.16 (trainer/dpo_trainer.py: _compute_loss; trainer/utils.py:
selective_log_softmax, entropy_from_logits), LLaMA-Factory 0.9.5 (train/dpo/trainer.py,
train/trainer_utils.py: get_batch_logps, create_ref_model; model/loader.py), accelerate 1.15
(prepare_model, which returns the outputs of an autocast forward in fp32).
"""

from __future__ import annotations

from collections.abc import Callable

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.core.units import show_bytes
from memfit.meta import Tensor
from memfit.meta.losses.selected import (
    gather_last,
    log_softmax_last,
    logsumexp_last,
    stack,
    sum_all,
    unbind,
)
from memfit.plan.frameworks import Job, Knob
from memfit.plan.frameworks.hugging_face.sampled import second_policy
from memfit.plan.frameworks.shared.assembly import Held, rounded
from memfit.records.ledger import Kind
from memfit.records.model import DTYPE_BYTES, Model

Refer = Callable[[], list[Tensor]] | None  # the reference; None: log-probabilities come given
ENTROPY_CHUNK = 128  # tokens
TILED = "1.16"  # TRL's version whose log-probabilities are made from tiles of the logits
COPIES, BY_VERSION, LLAMA_FACTORY = "0.29", "auto", "llamafactory"
WHOSE = ("1.9", TILED, COPIES, LLAMA_FACTORY)
COMPARES = {
    "compares": Knob(
        default="1.9", means="whose DPO: TRL's of a version, or LLaMA-Factory's", values=WHOSE
    ),
    "fp32_outputs": Knob(
        default=False, means="of pairs: logits of 16-bit weights under autocast come back in fp32"
    ),
}  # fmt: skip


def whose(job: Job) -> str:
    """Whose DPO a job's is; of TRL's own step by its version."""
    stated = str(job.option("compares"))
    return str(job.option("version")) if stated == BY_VERSION else stated


def compare(outputs: list[Tensor], refer: Refer, whose: str) -> Tensor:
    """The policy's outputs, which the caller holds, and the reference's -> the loss."""
    if whose == TILED:
        held = outputs if refer is None else [*outputs, *refer()]
        return sum_all(held[0])
    if whose == LLAMA_FACTORY:
        return _factory(outputs[0], refer)
    return _trl(outputs[0], refer, copies=whose == COPIES)


def _trl(logits: Tensor, refer: Refer, *, copies: bool) -> Tensor:
    """`DPOTrainer._compute_loss`, whose local variables live until the metrics are made."""
    shifted = _shift(logits, copies=copies)
    log_probs = _select(shifted)
    if refer is not None:
        outputs = refer()
        theirs = _shift(outputs[0], copies=copies)
        theirs_selected = _select(theirs)
    loss = sum_all(log_probs)
    _measure(shifted.detached())
    if refer is not None:
        del outputs, theirs, theirs_selected
    return loss


def _shift(logits: Tensor, *, copies: bool) -> Tensor:
    shifted = meta.narrow(logits, 1, 0, logits.shape[1] - 1)
    return meta.contiguous(shifted) if copies else shifted


def _select(logits: Tensor) -> Tensor:
    """`selective_log_softmax`: (rows, tokens, vocab) -> (rows, tokens), row by row."""
    if logits.dtype == "float32":
        picked = gather_last(logits)
        sums = stack([logsumexp_last(row) for row in unbind(logits)])
        return meta.subtract(picked, sums)
    found = []
    for row in unbind(logits):
        chances = log_softmax_last(row)
        found.append(gather_last(chances))
    return stack(found)


def _measure(logits: Tensor) -> None:
    """The entropy, by chunks of tokens, and the mean logits of either answers."""
    rows, tokens, vocab = logits.shape
    flat = meta.reshape(logits, rows * tokens, vocab)
    chunk = min(ENTROPY_CHUNK, rows * tokens)
    chances = meta.empty(logits.meter, (chunk, vocab), logits.dtype)
    powers = meta.empty(logits.meter, (chunk, vocab), logits.dtype)
    product = meta.empty(logits.meter, (chunk, vocab), logits.dtype)
    del powers, product, chances, flat
    answers = meta.empty(logits.meter, (rows // 2 * tokens, vocab), logits.dtype)
    del answers


def _factory(logits: Tensor, refer: Refer) -> Tensor:
    """`CustomDPOTrainer.get_batch_loss_metrics`, which holds the policy's logits to its end."""
    log_probs = _sum_rows(logits)
    if refer is not None:
        outputs = refer()
        sums = _sum_rows(outputs[0])
        del outputs, sums
    return sum_all(log_probs)


def _sum_rows(logits: Tensor) -> Tensor:
    """`get_batch_logps`: -> (rows, tokens)."""
    return gather_last(log_softmax_last(_shift(logits, copies=False)))


def second_dtype(job: Job) -> str:
    """The dtype of a second model's weights, "" where there is none.

    TRL loads it as it loads the first; LLaMA-Factory as it is published, which is taken to be what
    products are computed in, and makes fp32 of what is trained alone.
    """
    recipe = job.recipe
    if recipe.preference.reference != "second-model":
        return ""
    factory = whose(job) == LLAMA_FACTORY
    return recipe.compute_dtype if factory else recipe.trainable_dtype


def hold_reference(job: Job, model: Model) -> Held:
    """The second model, on every rank; model: as the first is stored."""
    dtype = second_dtype(job) or second_policy(job.recipe)
    if not dtype:
        return {}
    nbytes = rounded(w.numel * DTYPE_BYTES[dtype] for w in model.weights)
    reason = f"a second model of {dtype}, the reference: {show_bytes(nbytes)}"
    return {(Kind.PARAMETERS, "reference"): (nbytes, reason)}


def check_compared(job: Job) -> None:
    """Raise InvalidRequest for pairs whose bytes are not described."""
    recipe = job.recipe
    if not recipe.prefers:
        return
    if recipe.loss != "plain":
        raise InvalidRequest(
            f"`loss: {recipe.loss}` with `objective: dpo` is not described: it is a loss of tokens",
            hint="`loss: plain`",
        )
    shards = recipe.parallel.dp_shard
    if shards > 1 and recipe.options["fsdp_version"] == 2:
        raise InvalidRequest(
            f"`objective: dpo` with `parallel.dp_shard: {shards}` under accelerate's FSDP2 is not"
            " described",
            hint="`options.fsdp_version: 1`, or `parallel: {dp_replicate: N}`",
        )
    if shards > 1 and recipe.preference.reference == "second-model":
        raise InvalidRequest(
            f"`preference.reference: second-model` with `parallel.dp_shard: {shards}`: a second"
            " model that ranks share is not described",
            hint="`preference.reference: precomputed`, or `method: lora`",
        )
