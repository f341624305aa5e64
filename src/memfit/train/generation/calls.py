"""Calls of the model: prompts whole, then one token a row. Only the last logits are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.libraries import quiet_import
from memfit.families import find_family
from memfit.parallelism import run_as_forward
from memfit.records.model import Architecture
from memfit.train.generation.attending import decoding
from memfit.train.generation.slots import Decode, Prefill, Slots
from memfit.train.model.hugging_face import base_model

with quiet_import():
    from transformers.modeling_outputs import CausalLMOutputWithPast


Together = Callable[[bool], bool]  # whether this rank calls the model -> whether any does


def cache_name() -> str:
    """What transformers calls the key-value cache of a call: `cache` from 5.24 on."""
    new = "cache" in CausalLMOutputWithPast.__dataclass_fields__
    return "cache" if new else "past_key_values"


class Caller:
    """Hugging Face's module, with or without an adapter around it, as the loop calls it.

    Ranks that share weights gather them in each call, so that all call as often as the one whose
    answers are the longest: `together` comes before each call.
    """

    def __init__(self, model: nn.Module, a: Architecture, together: Together | None = None) -> None:
        self.model, self.base, self.architecture = model, base_model(model), a
        self.together = together
        self.masked = a.alibi  # its class attends with code of its own
        self.placed = "position_ids" in signature(type(self.base).forward).parameters
        self.cache = cache_name()
        gates = tuple(f".{name}" for name in find_family(a.family).state_gates)
        self.gates = [m for name, m in self.base.named_modules() if name.endswith(gates)]
        self.embedding = self.base.get_input_embeddings().weight
        self.device: torch.device = self.embedding.device

    def key_dtype(self) -> torch.dtype:
        """Of keys and values: autocast's, where that is on."""
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        dtype: torch.dtype = self.embedding.dtype
        return dtype

    def prefill(self, slots: Slots, prompts: Sequence[Sequence[int]], now: Prefill) -> Tensor:
        """Read prompts into slots; returns the (prompts, vocab) logits after each one's last token.

        Padded on the right, where causality makes padding harmless, but to states of rows: their
        gates are closed there.
        """
        ids = torch.zeros(len(prompts), now.longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        slots.begin(now)
        with _only_last(self.base.get_output_embeddings(), now.lengths), _close(self.gates, now):
            return self._call(slots, ids)

    def decode(
        self, slots: Slots, tokens: Sequence[int], positions: list[int], columns: int = 0
    ) -> Tensor:
        """The (rows, vocab) logits after a new token of each of the first slots.

        columns: how many of them attention reads; 0 is as many as the longest row has.
        """
        now = Decode(positions, self.device, columns)
        ids = torch.tensor(tokens)[:, None]
        placed = {"position_ids": now.positions[:, None]} if self.placed else {}
        with decoding(self.base.config, slots, now, masked=self.masked):
            return self._call(slots, ids, **placed)

    def _call(self, slots: Slots, ids: Tensor, **more: Any) -> Tensor:
        if self.together is not None:
            self.together(True)
        named = {self.cache: slots, "use_cache": True, **more}
        return self._logits(ids.to(self.device), **named)[:, -1]

    def _logits(self, ids: Tensor, **named: Any) -> Tensor:
        """All of it is the forward of FSDP2's root where there is one; peft's wrapper would call
        the class's own forward, without the hooks that gather."""
        if self.together is None:
            logits: Tensor = self.model(input_ids=ids, **named).logits
            return logits
        base = self.base

        def work() -> Tensor:
            made: Tensor = type(base).forward(base, input_ids=ids, **named).logits
            return made

        return run_as_forward(base, work)

    def wait(self) -> None:
        """Gather weights with the other ranks until none of them calls the model any more."""
        while self.together is not None and self.together(False):
            ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            self._logits(ids, use_cache=False)


@contextmanager
def _only_last(head: nn.Module, lengths: Tensor) -> Iterator[None]:
    """The head sees the last token of each row alone: logits of whole prompts would be large."""

    def choose(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module
        hidden, *others = inputs
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return (hidden[rows, lengths - 1][:, None], *others)

    hook = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _close(gates: Sequence[nn.Module], now: Prefill) -> Iterator[None]:
    """What these modules make, (rows, tokens, heads), is minus infinity at padding: no token
    there changes a state."""

    def close(module: nn.Module, inputs: tuple[Tensor, ...], made: Tensor) -> Tensor:
        del module, inputs
        return made.masked_fill_(now.padding, -torch.inf)

    hooks = [gate.register_forward_hook(close) for gate in gates]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
