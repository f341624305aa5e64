"""NEFTune (Jain et al. 2310.05914): noise on the token embeddings while a model trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def add_noise(embedding: nn.Module, alpha: float) -> None:
    """Add to each embedding what is uniform within alpha / sqrt(tokens x width), as transformers.

    Drawn from the step's seed, so that a run that goes on draws the same. Evaluations have none.
    """

    def noisy(module: nn.Module, _: object, output: Tensor) -> Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return output
        most = alpha / (output.shape[1] * output.shape[2]) ** 0.5
        return output + torch.zeros_like(output).uniform_(-most, most)

    embedding.register_forward_hook(noisy)
