"""One optimizer step. The certificate traces this very code on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from memfit.adapters import find_adapter
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.objectives import find_objective
from memfit.parallelism import clip_sharded, let_go, run_as_forward
from memfit.parallelism.tensor import sharing
from memfit.records.ledger import Phase
from memfit.train.distributed.pipeline import PhaseTracker, Stage, alone, find_pipeline, run_stages
from memfit.train.model.attention import Documents, make_band
from memfit.train.model.hugging_face import parts, reward_head, score_head
from memfit.train.rl.policy_loss import Answers, policy_loss
from memfit.train.rl.token_log_probs import TokenLogProbs, token_log_probs
from memfit.train.rl.values import Aims, value_loss
from memfit.train.step.build import Built
from memfit.train.step.in_backward import updating
from memfit.train.step.loss import IGNORE, See, loss_mean
from memfit.train.step.preference import (
    Rewards,
    count_pairs,
    count_sums,
    judge,
    row_log_probs,
    row_scores,
)
from memfit.train.step.rated import count_answers, find_baseline, judge_rated
from memfit.train.step.scaling import current_scale, unscale, update

Enter = Callable[[Phase], None]


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """What rated answers are, and answers to other prompts where the loss has them."""

    desirable: Tensor  # (micro_batch,) bool
    input_ids: Tensor | None = None  # (micro_batch, tokens): a row's prompt, another one's answer
    labels: Tensor | None = None
    reference: Tensor | None = None  # (micro_batch,) fp32: precomputed log-probabilities
    baseline: Tensor | None = None  # 0-dim: where stages have computed it before they learn


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, on the model's device."""

    input_ids: Tensor  # (micro_batch, tokens) int64
    labels: Tensor  # (micro_batch, tokens) int64: what each position predicts, or -100
    # (micro_batch, tokens), restarting in each document; (1, tokens) of ranks that share rows
    position_ids: Tensor | None = None
    documents: Documents | None = None  # lengths of each row's documents; None = one a row
    reference: Tensor | None = None  # (micro_batch,) fp32: precomputed log-probabilities of rows
    answers: Answers | None = None  # of reinforcement learning: what its loss is computed with
    # (micro_batch, tokens) int64, of pairs: labels of what preferred rows say beside their answers
    context: Tensor | None = None
    # what the cross-entropy beside the loss of pairs is a mean over: tokens of the global batch
    beside: float = 1.0
    rated: RatedBatch | None = None  # of answers that are desirable or not
    aims: Aims | None = None  # of a value that is learned of sampled answers, in the policy's place
    see: See | None = None  # of an evaluation: what is given its logits

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What the data put on the device."""
        own = self.input_ids, self.labels, self.position_ids, self.reference, self.context
        rated = self.rated
        if rated is None:
            return own
        return *own, rated.desirable, rated.input_ids, rated.labels, rated.reference


@dataclass(frozen=True, slots=True)
class StepResult:
    """0-dim tensors, read by the loop after the step so that no step waits for the device."""

    loss: Tensor  # mean over the target tokens of the global batch; of ranks, this one's share
    grad_norm: Tensor | None  # before clipping; None without clipping
    scale: Tensor | None = None  # what the loss was multiplied by; None when it was not
    # (3,) or (4,) of pairs: `preference.Rewards.sums`; (6,) of answers: `LossAndSums.sums`, entropy
    rewards: Tensor | None = None
    values: Tensor | None = None  # (3,) where a value is learned: `ValueLoss.sums`
    skipped: bool = False  # nothing was updated: the gradient norm is not finite


def nowhere(phase: Phase) -> None:
    """The `enter` of a step that nobody watches."""


def step(
    built: Built,
    batches: Iterable[Batch],
    target_tokens: int,
    enter: Enter = nowhere,
    *,
    skips: bool = False,
) -> StepResult:
    """Accumulate the gradients of all micro-batches, clip, update, release the gradients.

    `target_tokens` counts the labels that are not -100 in all micro-batches (of all ranks)
    together, or the pairs of a recipe that prefers: each loss is divided by it, so that how a
    global batch is cut does not change the gradient. On many ranks gradients are summed, and
    `loss` is this rank's share of the mean. skips: a gradient norm that is not finite, which is the
    same on all ranks, updates nothing; to know it the step waits for the device.
    """
    if target_tokens < 1:
        raise InvalidRequest("a global batch holds no target token", hint="check the data's labels")
    total: Tensor | None = None
    scale = current_scale(built.scaler, built.device)
    rewards, values = Rewards(), Rewards()
    if built.recipe.parallel.pp > 1:
        with sharing(built.recipe.parallel):
            total = _run_stages(built, list(batches), target_tokens, enter, rewards)
            batches = ()
    for index, batch in enumerate(batches):
        if index:
            enter(Phase.ACCUMULATE)
        inside = nowhere if index else enter  # all of a later micro-batch is `accumulate`
        sums = rewards if batch.aims is None else values
        loss = _accumulate(built, batch, target_tokens, scale, inside, sums)
        total = loss if total is None else total.add_(loss)
        del loss, batch
    if total is None:
        raise InvalidRequest("a global batch holds no micro-batch")
    enter(Phase.OPTIMIZER_STEP)
    if built.recipe.optimizer.in_backward:
        # all is updated, and no gradient is left
        return StepResult(total, None, rewards=rewards.sums, values=values.sums)
    unscale(built.scaler, built.optimizer)
    norm = _clip(built)
    skipped = skips and _is_broken(norm) and built.scaler is None  # which skips by itself
    if not skipped:
        update(built.scaler, built.optimizer)
    built.optimizer.zero_grad(set_to_none=True)
    return StepResult(total, norm, scale, rewards.sums, values.sums, skipped)


def _is_broken(norm: Tensor | None) -> bool:
    return norm is not None and not math.isfinite(float(norm))


def _run_stages(
    built: Built, batches: Sequence[Batch], target_tokens: int, enter: Enter, rewards: Rewards
) -> Tensor:
    """All micro-batches through all stages; this rank's share of the mean loss.

    Of answers, ranks without the last stage add rewards of 0, so that all ranks have as many sums.
    """
    if built.recipe.references or built.recipe.mismatches:
        enter(Phase.FORWARD)
        batches = [_score_before(built, batch) for batch in batches]
    telling = PhaseTracker(batches, enter)

    def finish(batch: Batch, hidden: Tensor) -> Tensor:
        telling.enter(Phase.LOSS)
        if built.recipe.rates:
            policy = _log_probs(built, hidden, batch)
            return _judge_rated(built, batch, policy, target_tokens, rewards)
        if not built.recipe.prefers:
            return _loss(built, hidden, batch, target_tokens, None)
        return _judge_pairs(built, batch, hidden, target_tokens, rewards)

    return _through_stages(built, batches, telling, finish, rewards)


def _through_stages(
    built: Built,
    batches: Sequence[Batch],
    telling: PhaseTracker,
    finish: Callable[[Batch, Tensor], Tensor],
    rewards: Rewards,
) -> Tensor:
    """The sum of what `finish` makes of each micro-batch's hidden states, 0-dim."""

    def run(stage: Stage, batch: Batch, received: tuple[Tensor, ...]) -> Tensor:
        telling.begin(batch)

        def work() -> Tensor:
            hidden = _hidden(built, batch, *received)
            return finish(batch, hidden) if stage.last else hidden

        with alone(built.model, stage):
            out = run_as_forward(parts(built.model).base, work)
        if stage.last:
            telling.enter(Phase.BACKWARD)
        return out

    total = run_stages(built.model, built.recipe, batches, run, built.device)
    if built.recipe.compares and rewards.sums is None:
        rewards.add(torch.zeros(count_sums(built.recipe), device=built.device))
    return total


def _score_before(built: Built, batch: Batch) -> Batch:
    """A micro-batch with what all stages make of it without a gradient, each time by a schedule of
    its own: its reference, and the baseline of rated answers."""

    def score(batch: Batch, *, base: bool) -> Tensor:
        off = find_adapter(built.recipe).switched_off(built.model) if base else nullcontext()
        with torch.no_grad(), evaluating(built.model), off:
            found = _log_probs_of_stages(built, batch)
        let_go(parts(built.model).base)  # no backward comes that would let go of the tail
        return found

    if built.recipe.references:
        batch = replace(batch, reference=score(batch, base=True))
    rated = batch.rated
    if rated is None or (other := _others(batch, rated)) is None:
        return batch
    below = score(other, base=True) if built.recipe.references else other.reference
    _check_reference(built, below)
    assert below is not None
    own = score(other, base=False)
    found = find_baseline(own, below, other.labels, built.together)
    return replace(batch, rated=replace(rated, baseline=found))


def evaluate(built: Built, batch: Batch, rewards: Rewards | None = None) -> tuple[Tensor, Tensor]:
    """(sum of losses, number of target tokens or of pairs), 0-dim; nothing is saved and nothing
    changes. rewards: what those of pairs are added to."""
    was_training = built.model.training
    built.model.eval()
    try:
        with torch.no_grad(), autocast(built), sharing(built.recipe.parallel):
            if built.recipe.parallel.pp > 1:
                loss = _run_stages(built, [batch], 1, nowhere, rewards or Rewards())
            else:
                loss = _forward(built, batch, 1, None, nowhere, rewards or Rewards())
    finally:
        built.model.train(was_training)
        if built.recipe.parallel.world > 1:  # no backward comes that would let go of the tail
            let_go(parts(built.model).base)
    if built.recipe.rates:
        return loss, count_answers(batch.labels, built.together)
    if built.recipe.prefers:
        return loss, count_pairs(batch.labels, built.together)
    return loss, (batch.labels != IGNORE).sum()


def log_probs(built: Built, batch: Batch) -> Tensor:
    """(rows,) fp32 of each row's targets under the model as it is; nothing is saved."""

    def work() -> Tensor:
        return _log_probs(built, _hidden(built, batch), batch)

    shared = sharing(built.recipe.parallel)
    with evaluating(built.model), torch.no_grad(), autocast(built), shared:
        if built.recipe.parallel.world == 1:
            return work()
        if built.recipe.parallel.pp > 1:
            found = _log_probs_of_stages(built, batch)
        else:
            found = run_as_forward(parts(built.model).base, work)
        let_go(parts(built.model).base)  # no backward comes that would let go of the tail
        return found


def _log_probs_of_stages(built: Built, batch: Batch) -> Tensor:
    """Of the last stage's ranks; others have NaN."""
    found = torch.full(batch.labels.shape[:1], torch.nan, device=built.device)

    def finish(batch: Batch, hidden: Tensor) -> Tensor:
        return found.copy_(_log_probs(built, hidden, batch)).sum()

    _through_stages(built, [batch], PhaseTracker([batch], nowhere), finish, Rewards())
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Nothing is dropped out within."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def answer_log_probs(built: Built, batch: Batch, temperature: float) -> TokenLogProbs:
    """Of each target token under the model as it is; nothing is saved."""

    def work() -> TokenLogProbs:
        return _token_log_probs(built, _hidden(built, batch), batch.labels, temperature)

    with evaluating(built.model), torch.no_grad(), autocast(built):
        if built.recipe.parallel.world == 1:
            return work()
        base = parts(built.model).base
        with sharing(built.recipe.parallel):
            found = run_as_forward(base, work)
        let_go(base)  # no backward comes that would let go of the tail
        return found


def row_values(built: Built, batch: Batch) -> Tensor:
    """(rows, tokens) fp32 of each token under the value as it is, without a gradient."""
    valuing = find_adapter(built.recipe).valuing(built.model)
    with evaluating(built.model), torch.no_grad(), autocast(built), valuing:
        return _values(built, _hidden(built, batch))


def answer_scores(built: Built, batch: Batch) -> Tensor:
    """(rows,) fp32: what the reward model's adapter and head make of each row's labelled token."""
    judging = find_adapter(built.recipe).judging(built.model)
    with evaluating(built.model), torch.no_grad(), autocast(built), judging:
        return row_scores(reward_head(built.model), _hidden(built, batch), batch.labels)


def autocast(built: Built) -> AbstractContextManager[object]:
    """Mixed precision of the recipe. Uncached: a cache would keep every weight's cast alive.

    Sharded weights are gathered in bf16 instead: see `parallelism.shard`.
    """
    if not built.recipe.autocast or built.recipe.parallel.world > 1:
        return nullcontext()
    dtype: torch.dtype = getattr(torch, built.recipe.compute_dtype)
    return torch.autocast(built.device.type, dtype, cache_enabled=False)


def _accumulate(
    built: Built,
    batch: Batch,
    target_tokens: int,
    scale: Tensor | None,
    enter: Enter,
    rewards: Rewards,
) -> Tensor:
    """Forward, loss and backward of one micro-batch; returns its share of the mean loss.

    A value's adapter runs in the backward, too, where blocks are recomputed.
    """
    enter(Phase.FORWARD)
    valued = batch.aims is not None
    running = find_adapter(built.recipe).valuing(built.model) if valued else nullcontext()
    with sharing(built.recipe.parallel), running:
        with autocast(built):
            loss = _forward(built, batch, target_tokens, scale, enter, rewards)
        enter(Phase.BACKWARD)
        value = loss.detach()
        product = loss if scale is None else loss * scale
        del loss
        with updating(built.optimizer) if built.recipe.optimizer.in_backward else nullcontext():
            product.backward()  # type: ignore[no-untyped-call]
    return value


def _forward(
    built: Built,
    batch: Batch,
    target_tokens: int,
    scale: Tensor | None,
    enter: Enter,
    rewards: Rewards,
) -> Tensor:
    """The loss of one micro-batch; all of it is the forward of FSDP2's root where there is one."""

    def work() -> Tensor:
        if batch.aims is not None:
            return _value(built, batch, batch.aims, enter, rewards)
        if batch.answers is not None:
            return _reinforce(built, batch, batch.answers, enter, rewards)
        if built.recipe.rates:
            return _rate(built, batch, target_tokens, enter, rewards)
        if built.recipe.prefers:
            return _prefer(built, batch, target_tokens, enter, rewards)
        hidden = _hidden(built, batch)
        enter(Phase.LOSS)
        return _loss(built, hidden, batch, target_tokens, scale)

    if built.recipe.parallel.world == 1:
        return work()
    return run_as_forward(parts(built.model).base, work)


def _prefer(built: Built, batch: Batch, pairs: int, enter: Enter, rewards: Rewards) -> Tensor:
    """The loss of a micro-batch of pairs: the reference, if any, without a gradient, then the
    policy."""
    reference = batch.reference
    if built.recipe.references:
        off = find_adapter(built.recipe).switched_off(built.model)
        with torch.no_grad(), off:
            reference = _log_probs(built, _hidden(built, batch), batch)
    _check_reference(built, reference)
    hidden = _hidden(built, batch)
    enter(Phase.LOSS)
    policy = _log_probs(built, hidden, batch)
    del hidden
    return judge(
        policy, reference, batch.labels, built.recipe, pairs, rewards, batch.beside, built.together
    )


def _judge_pairs(
    built: Built, batch: Batch, hidden: Tensor, pairs: int, rewards: Rewards
) -> Tensor:
    """The loss of pairs whose hidden states are there; the reference, if any, is the batch's."""
    _check_reference(built, batch.reference)
    policy = _log_probs(built, hidden, batch)
    recipe, reference, together = built.recipe, batch.reference, built.together
    return judge(policy, reference, batch.labels, recipe, pairs, rewards, batch.beside, together)


def _check_reference(built: Built, reference: Tensor | None) -> None:
    if reference is None and find_objective(built.recipe.objective).refers:
        raise InvalidRequest(
            "a batch comes without its reference's log-probabilities",
            hint="the recipe says `preference.reference: precomputed`: compute them first",
        )


def _others(batch: Batch, rated: RatedBatch) -> Batch | None:
    """Answers to other prompts beside a batch of rated answers; None where it has none."""
    if rated.input_ids is None or rated.labels is None:
        return None
    places = batch.position_ids  # which tokens of rows these are, of ranks that share them
    return Batch(rated.input_ids, rated.labels, places, reference=rated.reference)


def _rate(built: Built, batch: Batch, answers: int, enter: Enter, rewards: Rewards) -> Tensor:
    """The loss of a micro-batch of rated answers: what needs no gradient, then the policy."""
    rated, reference = batch.rated, batch.reference
    if rated is None:
        raise InvalidRequest("a batch of rated answers comes without their labels")
    other = _others(batch, rated)
    with torch.no_grad(), evaluating(built.model):
        below = None if other is None else other.reference
        if built.recipe.references:
            with find_adapter(built.recipe).switched_off(built.model):
                reference = _log_probs(built, _hidden(built, batch), batch)
                if other is not None:
                    below = _log_probs(built, _hidden(built, other), other)
        baseline = None
        if other is not None:
            _check_reference(built, below)
            assert below is not None
            own = _log_probs(built, _hidden(built, other), other)
            baseline = find_baseline(own, below, other.labels, built.together)
            del own, below
    _check_reference(built, reference)
    hidden = _hidden(built, batch)
    enter(Phase.LOSS)
    policy = _log_probs(built, hidden, batch)
    del hidden
    batch = replace(batch, reference=reference, rated=replace(rated, baseline=baseline))
    return _judge_rated(built, batch, policy, answers, rewards)


def _judge_rated(
    built: Built, batch: Batch, policy: Tensor, answers: int, rewards: Rewards
) -> Tensor:
    """The loss of rated answers whose reference and baseline are the batch's."""
    rated, reference = batch.rated, batch.reference
    assert rated is not None
    assert reference is not None
    return judge_rated(
        policy, reference, rated.baseline, rated.desirable, batch.labels, built.recipe, answers,
        rewards, built.together,
    )  # fmt: skip


def _reinforce(
    built: Built, batch: Batch, answers: Answers, enter: Enter, rewards: Rewards
) -> Tensor:
    """The policy's loss of a micro-batch of sampled answers."""
    hidden = _hidden(built, batch)
    enter(Phase.LOSS)
    scored = _token_log_probs(built, hidden, batch.labels, answers.temperature)
    del hidden
    loss, sums = policy_loss(scored.log_probs, answers)
    entropy = (scored.entropy * answers.mask).sum()
    rewards.add(torch.cat([sums, entropy.unsqueeze(0)]))
    return loss


def _value(built: Built, batch: Batch, aims: Aims, enter: Enter, sums: Rewards) -> Tensor:
    """The value's loss of a micro-batch of sampled answers."""
    hidden = _hidden(built, batch)
    enter(Phase.LOSS)
    values = _values(built, hidden)
    del hidden
    loss, more = value_loss(values, aims)
    sums.add(more)
    return loss


def _values(built: Built, hidden: Tensor) -> Tensor:
    """(rows, tokens) fp32: what the head of one number makes of each token."""
    values: Tensor = score_head(built.model)(hidden)
    return values.float().squeeze(2)


def _hidden(built: Built, batch: Batch, received: Tensor | None = None) -> Tensor:
    """(micro_batch, tokens, hidden), after the final norm; received: what a stage begins with."""
    extra: dict[str, object] = {} if batch.documents is None else {"documents": batch.documents}
    tokens = batch.input_ids.shape[1]
    a = read_model(built.recipe.model).architecture
    if built.recipe.attention == "varlen":  # which needs no mask
        from memfit.train.model.varlen import find_starts

        documents = batch.documents or ((tokens,),) * batch.input_ids.shape[0]
        extra["starts"] = find_starts(documents, built.device)
    elif a.banded(tokens):  # one mask for all blocks
        compute = getattr(torch, built.recipe.compute_dtype)
        extra["band"] = make_band(tokens, a.sliding_window, compute, built.device)
    places = batch.position_ids
    if places is None and built.recipe.parallel.tp > 1:  # the class would count its own tokens
        places = torch.arange(tokens, device=built.device).unsqueeze(0)
    tokens_in = {"input_ids": batch.input_ids} if received is None else {"inputs_embeds": received}
    out = parts(built.model).backbone(**tokens_in, position_ids=places, use_cache=False, **extra)
    hidden: Tensor = out.last_hidden_state
    return hidden


def _loss(
    built: Built, hidden: Tensor, batch: Batch, target_tokens: int, scale: Tensor | None
) -> Tensor:
    found = parts(built.model)
    cap, divisor = _bends(found.base)
    if divisor is not None:
        hidden = hidden / divisor
    return loss_mean(
        found.head, hidden, batch.labels, built.recipe, target_tokens, scale, cap, batch.see
    )


def _log_probs(built: Built, hidden: Tensor, batch: Batch) -> Tensor:
    found = parts(built.model)
    if built.recipe.scores:
        scores = row_scores(found.head, hidden, batch.labels, built.together)
        return built.together.sum_tokens(scores)
    cap, divisor = _bends(found.base)
    if divisor is not None:
        hidden = hidden / divisor
    own = row_log_probs(found.head, hidden, batch.labels, built.recipe, cap, batch.context)
    return built.together.sum_tokens(own)


def _token_log_probs(
    built: Built, hidden: Tensor, labels: Tensor, temperature: float
) -> TokenLogProbs:
    found = parts(built.model)
    cap, divisor = _bends(found.base)
    if cap is not None:  # bent first, cooled afterwards
        cap = cap / temperature
    elif temperature != 1.0:
        divisor = (divisor or 1.0) * temperature
    if divisor is not None:
        hidden = hidden / divisor
    return token_log_probs(found.head, hidden, labels, built.recipe, cap)


def _bends(base: nn.Module) -> tuple[float | None, float | None]:
    """The cap of logits, under which a tanh holds them, and their divisor.

    To divide what logits are made of is the same as to divide them, and costs less.
    """
    cap = getattr(base.config, "final_logit_softcapping", None)  # Gemma's
    factor = getattr(base, "logit_scale", None)  # Cohere's, which multiplies
    if factor is not None:
        return cap, 1.0 / factor
    return cap, getattr(base.config, "logits_scaling", cap)  # Granite's


def _clip(built: Built) -> Tensor | None:
    clip_norm = built.recipe.optimizer.clip_norm
    if not clip_norm:
        return None
    trainable = [p for group in built.optimizer.param_groups for p in group["params"]]
    if built.recipe.parallel.world == 1:
        return nn.utils.clip_grad_norm_(trainable, clip_norm, foreach=True)
    pipeline = find_pipeline(built.model)
    return clip_sharded(trainable, clip_norm, None if pipeline is None else pipeline.group)
