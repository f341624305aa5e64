"""From logits to tokens, for all rows of a step at once.

A row's random numbers are its own, drawn before its first token: one number a token, which picks
from the cumulated chances. So neither the slot nor the rows beside it change what a row says,
but for the rounding of its logits, which depends on how many rows are multiplied together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.train.generation.settings import Settings

Decoder = Callable[[Sequence[int]], str]
NewTokens = tuple[list[int], list[float]]  # of one row: tokens, and log-probabilities of them
# (rows,) tokens and their log-probabilities, on the device -> what each row goes on with. One token
# each; where nothing is computed, nobody knows which, and it may be as many as the third argument
# says, throughout which all steps have the same shapes.
Read = Callable[[Tensor, Tensor, int], list[NewTokens]]


def draw_numbers(seed: int, prompt: int, answer: int, count: int) -> np.ndarray:
    """(count,) fp64 from 0 to 1, 1 excluded, on the host: of an answer to a prompt alone.

    No tensor, as nothing is computed with it: drawn outside of whatever watches tensors.
    """
    named = blake2b(f"{seed} {prompt} {answer}".encode(), digest_size=8).digest()
    with _disable_current_modes():
        chance = torch.Generator().manual_seed(int.from_bytes(named, "little"))
        return torch.rand(count, generator=chance, dtype=torch.float64).numpy()


def read_token(tokens: Tensor, chosen: Tensor, most: int) -> list[NewTokens]:
    """See `Read`: the token that was sampled for each row."""
    del most
    return [([t], [c]) for t, c in zip(tokens.tolist(), chosen.tolist(), strict=True)]


def sample(
    logits: Tensor, numbers: Tensor | None, settings: Settings, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rows, vocab) logits -> (rows,) tokens and their (rows,) log-probabilities.

    numbers: (rows,) fp64, read where the temperature is above 0. seen: (rows, vocab), which tokens
    a row has, read by the penalty.
    """
    logits = logits.float()
    heat = settings.temperature or 1.0
    plain = logits if heat == 1.0 else logits / heat
    total = torch.logsumexp(plain, dim=-1)
    bent = plain
    if settings.repetition_penalty != 1.0 and seen is not None:
        bent = _penalise(logits, seen, settings.repetition_penalty) / heat
    if settings.temperature == 0:
        tokens = bent.argmax(dim=-1)
    else:
        assert numbers is not None
        tokens = pick(keep_likely(bent, settings), numbers)
    chosen = plain.gather(1, tokens[:, None])[:, 0] - total
    return tokens, chosen


def has_stop_word(ids: Sequence[int], words: Sequence[str], decode: Decoder) -> bool:
    """Whether the text of a row's newest tokens has one. A token may hold less than a character."""
    if not words:
        return False
    longest = max(len(word.encode()) for word in words)
    text = decode(ids[-longest - 8 :])
    return any(word in text for word in words)


def keep_likely(scores: Tensor, settings: Settings) -> Tensor:
    """(rows, vocab): -inf where top-k, top-p or min-p leave a token out.

    Each filter is a least score, so that tokens of equal scores stay or go together.
    """
    k, p = settings.top_k, settings.top_p
    limited = 0 < k < scores.shape[-1]
    if not limited and p == 1.0 and settings.min_p == 0:
        return scores
    least = scores.new_full((scores.shape[0], 1), -torch.inf)
    if limited or p < 1.0:
        ordered = scores.topk(k if limited else scores.shape[-1], dim=-1).values
        if limited:
            least = ordered[:, -1:]
        if p < 1.0:
            chances = torch.softmax(ordered, dim=-1)
            before = chances.cumsum(dim=-1) - chances
            last = (before < p).sum(dim=-1, keepdim=True) - 1
            least = torch.maximum(least, ordered.gather(1, last.clamp_(min=0)))
    if settings.min_p > 0:
        shortfall = torch.log(torch.tensor(settings.min_p)).to(scores)
        least = torch.maximum(least, scores.amax(dim=-1, keepdim=True) + shortfall)
    return scores.masked_fill(scores < least, -torch.inf)


def pick(scores: Tensor, numbers: Tensor) -> Tensor:
    """(rows, vocab) scores, (rows,) numbers -> (rows,) tokens: the first whose cumulated chance is
    above the number. The sum is fp64: in fp32 a large vocabulary's rare tokens would be lost. It
    is made in place, as `cumsum` with another dtype makes a copy inside of itself."""
    summed = torch.exp(scores - scores.amax(dim=-1, keepdim=True)).double().cumsum_(dim=-1)
    aim = numbers.to(summed.device)[:, None] * summed[:, -1:]
    tokens = torch.searchsorted(summed, aim, right=True)[:, 0]
    return tokens.clamp_(max=scores.shape[-1] - 1)


def mark(seen: Tensor, row: int, tokens: Sequence[int]) -> None:
    """Make a row of `seen` that of these tokens and no others."""
    seen[row] = False
    seen[row, torch.tensor(tokens, device=seen.device)] = True


def _penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Seen tokens made less likely, whatever their logit's sign (CTRL, 1909.05858)."""
    bent = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, bent, logits)
