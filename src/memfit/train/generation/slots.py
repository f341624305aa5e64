"""Keys, values and states of all rows in flight: one tensor a layer and kind, allocated once.

A slot is a row of these tensors. A row's token at position p lies in column p, of a sliding layer
in column p modulo its columns: the ring then holds the last tokens of the window. So of every
layer a row at position p sees the columns up to p and no others: whatever a slot held before lies
behind them, or is overwritten. Order does not matter to a softmax, so a ring needs no turning.

A state (of linear attention) has no columns: a prompt writes all of it, and each step renews it.

Beside the slots a spare row holds a prompt whose last answers wait, and is no longer than prompts
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import
from memfit.families.capabilities.kv_cache import LayerCache

with quiet_import():
    from transformers import __version__ as version
    from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """The slots of one layer; `Slots` says which are read and written."""

    is_croppable = False

    def __init__(
        self, cache: LayerCache, slots: int, tokens: int, spare: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.is_sliding = bool(cache.window)
        self.columns = cache.columns(tokens)

        def allocate(rows: int, columns: int, size: int) -> Tensor:
            # zeros and not left empty: what is masked is multiplied by 0, and 0 x NaN is NaN
            return torch.zeros(rows, cache.heads, columns, size, dtype=dtype, device=device)

        self.keys = allocate(slots, self.columns, cache.key)
        self.values = allocate(slots, self.columns, cache.value)
        # (1, heads, columns, size) each: a prompt; empty where no answer of a read prompt waits
        self.spares: tuple[Tensor, ...] = ()
        if spare:
            columns = cache.columns(spare)
            self.spares = (allocate(1, columns, cache.key), allocate(1, columns, cache.value))
        self.is_initialized = True
        self.now: Prefill | Decode = Decode.nothing()  # replaced for each call of the model

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """(rows, heads, tokens, size) of the new tokens -> those that they are attended with."""
        return self.now.store(self, key_states, value_states)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the slots exist already."""

    def get_seq_length(self) -> int:
        """Tokens before those of this call; while decoding, of the longest row."""
        return self.now.before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a call attends with, and 0."""
        return self.now.before + query_length, 0

    def get_max_length(self) -> int:
        """Columns of a slot."""
        return self.columns

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy a row of `tokens` tokens to another slot."""
        columns = min(tokens, self.columns)
        for held in (self.keys, self.values):
            held[target, :, :columns].copy_(held[source, :, :columns])

    def begin_spared(self, target: int, tokens: int) -> None:
        """Copy the spare row, a prompt of `tokens` tokens, to a slot."""
        columns = min(tokens, self.columns)
        for spare, held in zip(self.spares, (self.keys, self.values), strict=True):
            held[target, :, :columns].copy_(spare[0, :, :columns])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return self.keys, self.values, *self.spares


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The states of one layer, in place of keys and values; `Slots` says who reads and writes."""

    is_croppable = False

    def __init__(
        self, cache: LayerCache, slots: int, spare: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()

        def allocate(rows: int) -> dict[str, Tensor]:
            # zeros, as keys are: idle rows of a step are computed, too
            return {
                state.name: torch.zeros(
                    rows, *state.shape, device=device,
                    dtype=getattr(torch, state.dtype) if state.dtype else dtype,
                )
                for state in cache.states
            }  # fmt: skip

        self.states = allocate(slots)
        self.spares = allocate(1) if spare else {}  # of a prompt, as `SlotLayer` has it
        self.now: Prefill | Decode = Decode.nothing()

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """(rows, channels, tokens) of whole prompts -> the same; their last columns are stored."""
        assert isinstance(self.now, Prefill), "a step renews this state in its place"
        self.now.store_tail(self, conv_states)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """(rows, ...) after the tokens of this call -> the same; they are stored."""
        self.now.store_state(self, recurrent_states)
        return recurrent_states

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing: the slots exist already."""

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy a row to another slot, however many tokens it has."""
        del tokens
        for held in self.states.values():
            held[target].copy_(held[source])

    def begin_spared(self, target: int, tokens: int) -> None:
        """Copy the spare row to a slot."""
        del tokens
        for name, held in self.states.items():
            held[target].copy_(self.spares[name][0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return *self.states.values(), *self.spares.values()


class Slots(Cache):  # type: ignore[misc]
    """What Hugging Face's classes take as their cache."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        slots: int,
        tokens: int,
        spare: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """tokens: of a slot; spare: of the row that keeps a prompt, 0 for none.

        Raises InvalidRequest where a layer has states and transformers is too old: it would write
        those that padding leaves, and read none.
        """
        if any(layer.states for layer in layers) and not hasattr(Cache, "get_conv_state"):
            raise InvalidRequest(
                f"answers of linear attention are not sampled with transformers {version}, whose"
                " cache does not hand out states",
                hint="pip install --upgrade 'transformers>=5.24'",
            )
        # attention of a decoding step, for classes that ask for no name; set meanwhile
        self.attending: Callable[..., tuple[Tensor, None]] | None = None
        self.slots, self.tokens, self.device, self.dtype = slots, tokens, device, dtype
        super().__init__(
            layers=[
                StateLayer(layer, slots, spare, dtype, device) if layer.states
                else SlotLayer(layer, slots, tokens, spare, dtype, device)
                for layer in layers
            ]
        )  # fmt: skip

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        """As `SlotLayer.update` has it."""
        layer = self.layers[layer_idx]
        return layer.now.store(layer, key_states, value_states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(rows, channels, columns) that a step reads and renews; None while prompts are read."""
        del state_idx
        layer = self.layers[layer_idx]
        state: Tensor | None = layer.now.state(layer, "conv")
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(rows, ...) that a step begins with; None while prompts are read."""
        del state_idx
        layer = self.layers[layer_idx]
        state: Tensor | None = layer.now.state(layer, "recurrent")
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those of this call, whatever the layer is."""
        before: int = self.layers[layer_idx].now.before
        return before

    def begin(self, now: Prefill | Decode) -> None:
        """Say what the next call of the model is."""
        for layer in self.layers:
            layer.now = now

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy a row of `tokens` tokens to another slot, in every layer."""
        for layer in self.layers:
            layer.move(source, target, tokens)

    def begin_spared(self, target: int, tokens: int) -> None:
        """Copy the spare row, a prompt of `tokens` tokens, to a slot, in every layer."""
        for layer in self.layers:
            layer.begin_spared(target, tokens)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and states of all layers."""
        return tuple(x for layer in self.layers for x in layer.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, and of the spare row."""
        return sum(x.nbytes for x in self.tensors)


class Prefill:
    """A call over whole prompts, padded on the right: causal attention alone, as in training.

    sources, targets: row of the call -> slot that keeps it; a row may go to several slots.
    spared: whether the last row of the call also fills the spare row. gated: whether gates of
    states are closed at padding, which `padding` (rows, tokens, 1) then says.
    """

    before = 0

    def __init__(
        self, lengths: Sequence[int], sources: list[int], targets: list[int], spared: bool,
        device: torch.device, *, gated: bool = False,
    ) -> None:  # fmt: skip
        self.spared = spared
        self.lengths = torch.tensor(lengths, device=device)
        self.longest = max(lengths)
        self.sources = torch.tensor(sources, device=device)
        self.targets = torch.tensor(targets, device=device)
        self.rings: dict[int, Tensor] = {}
        self.tails: dict[int, tuple[Tensor, Tensor]] = {}
        if gated:
            counted = torch.arange(self.longest, device=device)
            self.padding = (counted >= self.lengths[:, None])[:, :, None]

    def store(self, layer: SlotLayer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write what the prompts leave; they attend with their own keys and values."""
        columns = layer.columns
        spares = layer.spares if self.spared else (None, None)
        for new, held, spare in zip((key, value), (layer.keys, layer.values), spares, strict=True):
            if self.longest > columns:
                index = self._ring(columns)[:, None, :, None]
                filled = new.gather(2, index.expand(-1, new.shape[1], -1, new.shape[3]))
            else:
                filled = new
            held[self.targets, :, : filled.shape[2]] = filled[self.sources].to(held.dtype)
            if spare is not None:
                spare[0, :, : filled.shape[2]].copy_(filled[-1])
        return key, value

    def state(self, layer: StateLayer, name: str) -> None:
        """None: prompts begin without one."""

    def store_tail(self, layer: StateLayer, new: Tensor) -> None:
        """Write the last columns of each prompt, zeros where it has fewer tokens."""
        place, missing = self._tail(layer.states["conv"].shape[2])
        filled = new.gather(2, place[:, None].expand(-1, new.shape[1], -1))
        self._write(layer, "conv", filled.masked_fill_(missing[:, None], 0))

    def store_state(self, layer: StateLayer, new: Tensor) -> None:
        """Write what the prompts left."""
        self._write(layer, "recurrent", new)

    def _write(self, layer: StateLayer, name: str, new: Tensor) -> None:
        held = layer.states[name]
        held[self.targets] = new[self.sources].to(held.dtype)
        if self.spared:
            layer.spares[name][0].copy_(new[-1])

    def _tail(self, columns: int) -> tuple[Tensor, Tensor]:
        """(rows, columns): the last positions of each row; and which of them it does not have."""
        if columns not in self.tails:
            counted = torch.arange(columns, device=self.lengths.device)
            place = self.lengths[:, None] - columns + counted
            missing = place < 0
            self.tails[columns] = place.clamp_(min=0), missing
        return self.tails[columns]

    def _ring(self, columns: int) -> Tensor:
        """(rows, columns): the last position of each row that has its place in each column."""
        if columns not in self.rings:
            last = self.lengths[:, None] - 1
            place = torch.arange(columns, device=last.device)
            self.rings[columns] = (last - (last - place) % columns).clamp_(min=0)
        return self.rings[columns]


class Decode:
    """A call over one new token of each of the first `len(positions)` slots.

    positions: of the new tokens; columns: how many of them attention reads at most.
    """

    def __init__(self, positions: list[int], device: torch.device, columns: int = 0) -> None:
        self.rows = len(positions)
        self.reach = columns or 1 + max(positions, default=0)
        self.before = self.reach - 1
        self.positions = torch.tensor(positions, device=device)
        self.uneven = columns > 0 or min(positions, default=0) < self.before
        self.places: dict[tuple[int, int], Tensor] = {}
        self.masks: dict[tuple[int, torch.dtype], Tensor] = {}

    @staticmethod
    def nothing() -> Decode:
        """A call over no rows: before the first one."""
        return Decode([], torch.device("cpu"))

    def store(self, layer: SlotLayer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens; returns the columns in sight, as views."""
        keys, values = layer.keys, layer.values
        heads, columns = keys.shape[1], layer.columns
        place = self.places.get((heads, columns))
        if place is None:
            place = self._places(heads, columns)
        for new, held in ((key, keys), (value, values)):
            size = held.shape[3]
            flat = new.reshape(-1, size)
            held.view(-1, size).index_copy_(0, place, flat.to(held.dtype))
        columns = min(columns, self.reach)
        return keys[: self.rows, :, :columns], values[: self.rows, :, :columns]

    def state(self, layer: StateLayer, name: str) -> Tensor:
        """(rows, ...) of a state, as a view."""
        return layer.states[name][: self.rows]

    def store_state(self, layer: StateLayer, new: Tensor) -> None:
        """Write what this step makes of the recurrent state."""
        layer.states["recurrent"][: self.rows].copy_(new)

    def mask(self, columns: int, dtype: torch.dtype) -> Tensor:
        """(rows, 1, 1, columns): 0 where a row sees a column, else the dtype's least number."""
        key = (columns, dtype)
        if key not in self.masks:
            hidden = torch.arange(columns, device=self.positions.device) > self.positions[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.masks[key] = mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]
        return self.masks[key]

    def _places(self, heads: int, columns: int) -> Tensor:
        """(rows * heads): where a row's new token lies, of all tokens of a layer's tensor."""
        row = torch.arange(self.rows, device=self.positions.device)[:, None] * heads
        head = torch.arange(heads, device=self.positions.device)
        place = ((row + head) * columns + self.positions[:, None] % columns).flatten()
        self.places[heads, columns] = place
        return place
