"""Prompts with sampled answers as rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from memfit.core.errors import InvalidRequest
from memfit.train.step.loss import IGNORE
from memfit.train.step.step import Batch

Ids = Sequence[int]
Cut = Callable[[int, int], Sequence[slice]]  # rows, those of a micro-batch -> micro-batches


def cut_all(rows: int, each: int) -> Sequence[slice]:
    """All micro-batches of the rows."""
    return [slice(start, start + each) for start in range(0, rows, each)]


def lay_out(prompts: Sequence[Ids], completions: Sequence[Ids], width: int) -> Batch:
    """Rows of `width` tokens on the host: a prompt, its answer, padding on the right.

    Labels are the answer's tokens, each at the position before it. Raises InvalidRequest where a
    row does not fit, a prompt is empty, or an answer is.
    """
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORE)
    for row, (prompt, answer) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt), len(prompt) + len(answer)
        if not prompt or not answer:
            raise InvalidRequest(
                f"a row of {start} prompt tokens and {len(answer)} answer tokens: both need one"
            )
        if end > width:
            raise InvalidRequest(f"a prompt and its answer have {end} tokens, and a row {width}")
        ids[row, :start] = torch.tensor(list(prompt))
        ids[row, start:end] = torch.tensor(list(answer))
        labels[row, start - 1 : end - 1] = ids[row, start:end]
    return Batch(ids, labels)


def lay_out_scored(prompts: Sequence[Ids], completions: Sequence[Ids], width: int) -> Batch:
    """The same rows; of each, the last token alone is labelled, which a reward model scores."""
    batch = lay_out(prompts, completions, width)
    labels = batch.labels.fill_(IGNORE)
    for row, (prompt, answer) in enumerate(zip(prompts, completions, strict=True)):
        labels[row, len(prompt) + len(answer) - 1] = 0
    return batch


def answer_mask(labels: Tensor, counted: Tensor) -> Tensor:
    """(rows, tokens) fp32: 1 at each token of an answer that counts; counted: (rows,) bool."""
    return (labels != IGNORE).float() * counted.float().unsqueeze(1)
