"""NEFTune (Jain et al. 2310.05914): noise on the token embeddings while a model trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memfit.parallelism.context import own_parts
from memfit.records.recipe import Parallel

ALONE = Parallel()


def add_noise(
    embedding: nn.Module, alpha: float, parallel: Parallel = ALONE, rank: int = 0
) -> None:
    """Add to each embedding what is uniform within alpha / sqrt(tokens x width), as transformers.

    Drawn from the step's seed, so that a run that goes on draws the same. Evaluations have none.
    Ranks draw the noise of all rows, row after row, and keep that of their own tokens: from one
    seed it is the noise of one process.
    """
    sharers = parallel.tp * parallel.cp

    def noisy(module: nn.Module, _: object, output: Tensor) -> Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return output
        most = alpha / (output.shape[1] * sharers * output.shape[2]) ** 0.5
        return output + _draw(torch.zeros_like(output), most, parallel, rank)

    if any(True for _ in embedding.parameters()):  # of stages, only the first has it
        embedding.register_forward_hook(noisy)


def _draw(own: Tensor, most: float, parallel: Parallel, rank: int) -> Tensor:
    """`own` (rows, tokens, width), filled."""
    rows, tokens, width = own.shape
    sharers = parallel.tp * parallel.cp
    if parallel.dp * sharers == 1:
        for row in own:
            row.uniform_(-most, most)
        return own
    first = parallel.share(rank) * rows
    row, parts = own.new_empty(tokens * sharers, width), _own_tokens(tokens, parallel, rank)
    for number in range(rows * parallel.dp):
        row.uniform_(-most, most)
        if first <= number < first + rows:
            filled = 0
            for part in parts:
                there = own[number - first, filled : filled + len(part)]
                filled += len(there.copy_(row[part.start : part.stop]))
    return own


def _own_tokens(tokens: int, parallel: Parallel, rank: int) -> list[range]:
    """Which tokens of whole rows a rank has between products, `tokens` in all."""
    parts: tuple[range, ...] = (range(tokens * parallel.tp),)
    if parallel.cp > 1:
        parts = own_parts(tokens * parallel.tp * parallel.cp, parallel, rank)
    start = rank % parallel.tp * tokens
    found = []
    for part in parts:
        found.append(part[max(start, 0) : max(start + tokens, 0)])
        start -= len(part)
    return found
