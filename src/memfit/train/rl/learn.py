"""One iteration: a rollout, what its answers' rewards say of each, and the updates with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import fsum, nan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memfit.adapters import find_adapter
from memfit.core.errors import InvalidRequest
from memfit.records.ledger import Phase
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import (
    Online,
    Policy,
    ValueSettings,
    loss_temperature,
    pair_losses,
    scores_old,
)
from memfit.train.measure.observer import NOBODY, Observer
from memfit.train.rl.advantages import (
    find_judged_pairs,
    group_advantages,
    leave_one_out_advantages,
    order_pairs,
    penalise,
)
from memfit.train.rl.policy_loss import Answers, Counts, name_sums
from memfit.train.rl.rewards.adapter import scores_of
from memfit.train.rl.rollout import STOPPED, Experience, Prompt, Sampling, own_part, roll_out
from memfit.train.rl.rows import Cut, answer_mask, cut_all, lay_out
from memfit.train.rl.values import Aims, aim, find_counted
from memfit.train.step.build import Built
from memfit.train.step.step import Batch, StepResult, answer_log_probs, row_values, step

SAMPLES = 2  # answers of an iteration that the log shows


@dataclass(frozen=True, slots=True)
class Learning:
    """What is learned, and from what."""

    objective: Online
    policy: Policy
    sampling: Sampling
    value: ValueSettings = field(default_factory=ValueSettings)  # of PPO
    held_out: Sequence[Prompt] = ()  # prompts that no rollout draws

    @property
    def heat(self) -> float:
        """What logits are divided by in scores and in the loss."""
        return loss_temperature(self.objective, self.sampling.rollout)

    def check(self, recipe: Recipe) -> None:
        """Raise InvalidRequest where a recipe cannot be learned by."""
        if recipe.packing:
            raise InvalidRequest(
                f"`packing: true` under `objective: {self.objective}`: a row holds one answer",
                hint="use `packing: false`",
            )
        if recipe.lora.dropout:
            raise InvalidRequest(
                f"`lora.dropout: {recipe.lora.dropout}` under `objective: {self.objective}`: ratios"
                " of probabilities would compare two masks of dropout",
                hint="use `lora.dropout: 0`",
            )
        if self.policy.beta and not (recipe.adapted or recipe.copies_reference):
            raise InvalidRequest(
                f"`policy.beta: {self.policy.beta}` under `method: {recipe.method}`, whose recipe"
                f" has `policy.beta: {recipe.policy.beta}` and holds no reference",
                hint="state the same `policy.beta` in the recipe",
            )
        if recipe.parallel.world != self.sampling.ranks.size:
            raise InvalidRequest(
                f"a recipe of {recipe.parallel.world} ranks, and {self.sampling.ranks.size} sample",
                hint="every rank of the recipe takes part in its iterations",
            )
        group = self.sampling.rollout.num_generations
        answers = self.sampling.groups * group
        if answers != recipe.global_batch:
            raise InvalidRequest(
                f"a rollout of {self.sampling.groups} prompts with {group} answers each has"
                f" {answers} rows, and the global batch {recipe.global_batch}",
                hint="make `task.global_batch` a multiple of `rollout.num_generations`",
            )


class Summary(NamedTuple):
    """What an iteration's line of the log says."""

    figures: dict[str, float]
    rewards_by_function: tuple[float | None, ...]  # means; None where a function judged nothing
    failures: dict[str, int]
    samples: tuple[dict[str, Any], ...]
    update_tokens: int  # of prompts and answers, of one pass over the rollout


def iterate(
    built: Built, learning: Learning, iteration: int,
    *, observer: Observer = NOBODY, cut: Cut = cut_all, all_updates: bool = True,
) -> Summary:  # fmt: skip
    """Sample, judge and update; the weights afterwards are a function of those before.

    observer: learns of phases and batches. cut: a trace leaves out micro-batches like others, and,
    unless `all_updates`, of several updates with a rollout those between the first and the last.
    """
    learning.check(built.recipe)
    at_work = _Work(built, learning, observer, cut)
    rollout, ranks = learning.sampling.rollout, learning.sampling.ranks
    judge = scores_of(built, rollout, observer, cut)
    experience = roll_out(built, learning.sampling, iteration, judge)
    own = own_part(len(experience.prompts), ranks)  # of all answers, those that this rank learns
    start = time.perf_counter()
    batch = lay_out(
        [p.ids for p in experience.prompts[own]],
        [c.ids for c in experience.completions[own]],
        rollout.pad(max(len(p.ids) + len(c.ids) for p, c in zip(*experience[:2], strict=True))),
    )
    observer.register_batch(batch.input_ids, batch.labels)
    counted = _find_counted(learning, experience)
    mask = answer_mask(batch.labels, counted[own])
    scored = _score(at_work, batch)
    target, scored = _find_target(at_work, experience, batch, scored, mask)
    scoring = time.perf_counter()
    rows = int(counted.sum()) if pair_losses(learning.objective) else len(counted)
    counts = Counts(rows, ranks.total(float(mask.sum())), rollout.max_completion_length)
    results: list[_Update] = []
    for number in range(times := learning.policy.num_iterations):
        if not all_updates and 0 < number < times - 1:
            results.append(results[-1])
            continue
        observer.enter(Phase.FORWARD)  # its inputs are no part of the update before it
        micros = _micro_batches(at_work, batch, counts, mask, target, scored)
        results.append(_read(step(built, micros, 1, observer.enter)))
    updated = time.perf_counter()
    figures = _sum_up(built, learning, experience, results, target.divergence, counts)
    tokens = sum(len(p.ids) + len(c.ids) for p, c in zip(*experience[:2], strict=True))
    figures |= {
        "score_seconds": scoring - start,
        "update_seconds": updated - scoring,
        "update_tokens_per_second": tokens * learning.policy.num_iterations / (updated - scoring),
    }
    columns = zip(*experience.by_function.tolist(), strict=True)
    by_function = tuple(None if (m := _mean(c)) != m else m for c in columns)
    shown = _show(experience, rollout.num_generations)
    return Summary(figures, by_function, dict(experience.failures), shown, tokens)


def _find_counted(learning: Learning, experience: Experience) -> Tensor:
    """(answers,) bool: those that the loss is of."""
    if pair_losses(learning.objective):
        return find_judged_pairs(experience.rewards)
    if learning.objective == "ppo":
        return find_counted(experience.rewards)
    if learning.policy.mask_truncated_completions:
        return ~experience.truncated
    return torch.ones(len(experience.rewards), dtype=torch.bool)


class _Update(NamedTuple):
    """What one update says of itself, in numbers: tensors would be held until the next is over."""

    loss: float
    norm: float
    sums: list[float]
    values: list[float] | None


def _read(result: StepResult) -> _Update:
    assert result.rewards is not None
    norm = float("nan") if result.grad_norm is None else float(result.grad_norm)
    values = None if result.values is None else result.values.tolist()
    return _Update(float(result.loss), norm, result.rewards.tolist(), values)


def _add_up(lists: Iterable[list[float]]) -> list[float]:
    return [sum(numbers) for numbers in zip(*lists, strict=True)]


def _mean(values: Iterable[float]) -> float:
    """Of those that are not NaN; NaN where there is none."""
    found = [value for value in values if value == value]
    return fsum(found) / len(found) if found else nan


def _sum_up(
    built: Built, learning: Learning, experience: Experience, results: Sequence[_Update],
    divergence: float | None, counts: Counts,
) -> dict[str, float]:  # fmt: skip
    """Figures of all updates with a rollout; made of numbers, as no ledger has them."""
    total = _add_up(result.sums for result in results)
    loss, ranks = results[-1].loss, learning.sampling.ranks
    if ranks.size > 1:
        shares = ranks.gather(loss, *total)
        loss, *total = (sum(numbers) for numbers in zip(*shares, strict=True))
    figures = _describe(experience, loss)
    figures |= name_sums(learning.objective, total, counts.rows)
    if learning.sampling.rollout.dynamic_sampling:
        figures["sampled_reward"] = experience.sampled_reward
    if learning.sampling.rollout.num_generations > 1:
        figures["even_groups"] = experience.even_groups / experience.sampled_groups
    if built.recipe.optimizer.clip_norm:
        figures["grad_norm"] = results[-1].norm
    if learning.policy.beta:
        own = total[2] / max(total[4], 1.0)
        figures["kl"] = own if divergence is None else divergence / max(counts.tokens, 1.0)
    values = [result.values for result in results if result.values is not None]
    if values:
        clipped, places, squares = _add_up(values)
        figures["value_loss"] = squares / 2 / max(places, 1.0)
        figures["clipped_values"] = clipped / max(places, 1.0)
    return figures


class _Scored(NamedTuple):
    """(answers, tokens) fp32 on the host; None where the loss does not need them."""

    old: Tensor | None
    reference: Tensor | None


class _Target(NamedTuple):
    """What an update aims at."""

    advantages: Tensor  # (answers,), or (answers, tokens)
    divergence: float | None  # sum of the KL estimates that rewards are less by
    aims: Aims | None  # of values, where they are learned


class _Work(NamedTuple):
    """The arguments that every part of an iteration shares."""

    built: Built
    learning: Learning
    observer: Observer
    cut: Cut

    def put(self, batch: Batch, at: slice) -> Batch:
        """The micro-batch of these rows, on the model's device."""
        device = self.built.device
        made = Batch(batch.input_ids[at].to(device), batch.labels[at].to(device))
        self.observer.register_batch(made.input_ids, made.labels)
        return made

    def slices(self, rows: int) -> Sequence[slice]:
        """Micro-batches of the rows."""
        return self.cut(rows, self.built.recipe.micro_batch)


def _score(work: _Work, batch: Batch) -> _Scored:
    """Log-probabilities under the policy that sampled and the reference, in the update's shapes.

    The sampler's own are of other shapes, in which 16-bit products round differently.
    """
    policy = work.learning.policy
    old = reference = None
    if scores_old(work.learning.objective, policy):
        work.observer.enter(Phase.SCORE)
        old = _by_micro_batch(work, batch, _log_probs)
    if policy.beta:
        work.observer.enter(Phase.REFERENCE)
        with find_adapter(work.built.recipe).switched_off(work.built.model):
            reference = _by_micro_batch(work, batch, _log_probs)
    return _Scored(old, reference)


def _by_micro_batch(work: _Work, batch: Batch, of: Callable[[_Work, Batch], Tensor]) -> Tensor:
    """(answers, tokens) on the host: one number a token."""
    found = torch.zeros(batch.labels.shape)
    work.observer.register_batch(found)
    for at in work.slices(len(found)):
        found[at] = of(work, work.put(batch, at)).cpu()
    return found


def _log_probs(work: _Work, batch: Batch) -> Tensor:
    heat = work.learning.heat
    return answer_log_probs(work.built, batch, heat).log_probs


def _values(work: _Work, batch: Batch) -> Tensor:
    return row_values(work.built, batch)


def _find_target(
    work: _Work, experience: Experience, batch: Batch, scored: _Scored, mask: Tensor
) -> tuple[_Target, _Scored]:
    """What the update aims at, and what it still needs of what was scored."""
    learning = work.learning
    if learning.objective != "ppo":
        return _Target(*_find_advantages(learning, experience, scored, mask), None), scored
    work.observer.enter(Phase.VALUES)
    values = _by_micro_batch(work, batch, _values)
    most = learning.sampling.rollout.max_completion_length
    starts = torch.tensor([len(p.ids) for p in experience.prompts])
    lengths = torch.tensor([len(c.ids) for c in experience.completions])
    made = aim(
        learning.policy, learning.value, experience.rewards, starts, lengths, *scored, values, most
    )  # fmt: skip
    old = scored.old if learning.policy.num_iterations > 1 else None
    return _Target(*made), _Scored(old, None)


def _find_advantages(
    learning: Learning, experience: Experience, scored: _Scored, mask: Tensor
) -> tuple[Tensor, float | None]:
    """Advantages, and of RLOO the sum of the KL estimates that its rewards are less by."""
    group, policy = learning.sampling.rollout.num_generations, learning.policy
    rewards, ranks = experience.rewards, learning.sampling.ranks
    own = own_part(len(rewards), ranks)
    if learning.objective == "grpo":
        return _only(group_advantages(rewards, group, policy), own), None
    if pair_losses(learning.objective):
        return order_pairs(rewards), None
    divergence = None
    if policy.beta and scored.old is not None and scored.reference is not None:
        divergence = ranks.total(float(((scored.old - scored.reference) * mask).sum()))
        mine = penalise(rewards[own], scored.old, scored.reference, mask, policy.beta)
        rewards = torch.tensor([r for share in ranks.gather(*mine.tolist()) for r in share])
    return _only(leave_one_out_advantages(rewards, group, policy), own), divergence


def _only(advantages: Tensor, own: slice) -> Tensor:
    """Those of this rank's answers, which keep no others alive."""
    return advantages if own == slice(0, len(advantages)) else advantages[own].clone()


def _micro_batches(
    work: _Work,
    batch: Batch,
    counts: Counts,
    mask: Tensor,
    target: _Target,
    scored: _Scored,
) -> Iterator[Batch]:
    """Those of the update, each made when its turn comes: the policy's, then the value's."""
    device = work.built.device
    heat = work.learning.heat

    def make(at: slice) -> Batch:
        piece = work.put(batch, at)
        old, reference = (None if t is None else t[at].to(device) for t in scored)
        answers = Answers(
            work.learning.objective, work.learning.policy, counts, heat,
            mask[at].to(device), target.advantages[at].to(device), old, reference,
        )  # fmt: skip
        work.observer.register_batch(answers.mask, answers.advantages, old, reference)
        return Batch(piece.input_ids, piece.labels, answers=answers)

    def value(aims: Aims, at: slice) -> Batch:
        piece = work.put(batch, at)
        old, returns, places = (t[at].to(device) for t in aims[:3])
        work.observer.register_batch(old, returns, places)
        return Batch(
            piece.input_ids, piece.labels, aims=Aims(old, returns, places, *aims[3:])
        )  # fmt: skip

    for at in work.slices(len(mask)):
        yield make(at)
    if target.aims is not None:
        for at in work.slices(len(mask)):
            yield value(target.aims, at)


def _describe(experience: Experience, loss: float) -> dict[str, float]:
    """Figures of the rollout that every iteration has, and the loss of its last update."""
    rewards: list[float] = experience.rewards.tolist()
    mean = _mean(rewards)
    lengths = [len(c.ids) for c in experience.completions]
    return {
        "loss": loss,
        "reward": mean,
        "reward_std": sqrt(_mean((reward - mean) ** 2 for reward in rewards)),
        "unjudged": _mean(reward != reward for reward in rewards),
        "length": sum(lengths) / len(lengths),
        "longest": float(max(lengths)),
        "truncated": _mean(c.ended not in STOPPED for c in experience.completions),
        "rollout_seconds": experience.rollout_seconds,
        "rollout_tokens_per_second": experience.sampled_tokens / experience.rollout_seconds,
        "reward_seconds": experience.reward_seconds,
    }


def _show(experience: Experience, size: int) -> tuple[dict[str, Any], ...]:
    """The first answers of an iteration, each to a prompt of its own."""
    return tuple(
        {
            "prompt": experience.prompts[row].columns["prompt"],
            "completion": experience.texts[row],
            "reward": None if (r := float(experience.rewards[row])) != r else r,
        }
        for row in range(0, min(len(experience.texts), SAMPLES * size), size)
    )
