"""What backward needs of a block waits in host memory, copied beside the computing of others.

Torch's hooks on saved tensors give each one up in the forward and bring it back in the backward.
On CUDA copies run on a stream of their own. Every device tensor is allocated and freed on the main
stream: what a block saved stays until the block after it has run and the main stream has waited
for its copies; a block's tensors come back as the backward of the block above it begins.

On a CPU the host is the device: the same copies are made, and nothing is saved but the numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def offload_blocks(blocks: Sequence[nn.Module]) -> None:
    """Offload what every block saves, but for the last one's, which is needed as soon as it is
    saved. Of a recomputed block that is its input. Before sharding.
    """
    lane = _Lane()
    for index, block in enumerate(blocks):
        _wrap(block, lane, begins=index == 0, offloads=index < len(blocks) - 1)


def _wrap(block: nn.Module, lane: _Lane, *, begins: bool, offloads: bool) -> None:
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        before = None if begins else lane.newest
        load = None
        if offloads:
            held = (*block.parameters(), *block.buffers(), *_tensors((args[1:], kwargs)))
            load = Load(lane, before, {t.untyped_storage()._cdata for t in held})
            with saved_tensors_hooks(load.pack, load.unpack):
                out = plain(*args, **kwargs)
            load.leave()
        else:
            out = plain(*args, **kwargs)
        if before is not None:
            before.give_up()
        lane.newest = load
        return out

    block.forward = forward


def _tensors(arguments: Any) -> Iterator[Tensor]:
    """All of them, however deep."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _tensors(tuple(arguments.values()))
    elif isinstance(arguments, list | tuple):
        for part in arguments:
            yield from _tensors(part)


class _Lane:
    """The stream of the copies, made at its first use, and the block that came last."""

    def __init__(self) -> None:
        self.newest: Load | None = None
        self._side: Any = None

    def side(self) -> Any:
        """Return the side stream, which has waited for all work queued on the main stream."""
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream())
        return self._side


class _Parcel:
    """One storage: on the host, then back on the device. It lives as long as a saved tensor."""

    __slots__ = ("__weakref__", "device", "host")

    def __init__(self, host: Tensor) -> None:
        self.host: Tensor | None = host
        self.device: Tensor | None = None


class _Ticket(NamedTuple):
    """A saved tensor: where in a parcel it lies."""

    parcel: _Parcel
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class Load:
    """What one call of a block saves."""

    def __init__(self, lane: _Lane, before: Load | None, others: set[int]) -> None:
        self._lane, self._before, self._others = lane, before, others
        self._known: dict[int, _Parcel] = {}
        self._parcels: list[weakref.ref[_Parcel]] = []
        self._leaving: list[Tensor] = []  # on the device until `give_up`
        self._loaded = self._arrived = self._cuda = False
        self._event: Any = None

    def pack(self, x: Tensor) -> Tensor | _Ticket:
        """Numbers of two or more dimensions that are not of the block's weights or arguments."""
        key = x.untyped_storage()._cdata
        if key in self._others or not x.is_floating_point() or x.dim() < 2:
            return x
        parcel = self._known.get(key)
        if parcel is None:
            with torch.no_grad():
                numel = x.untyped_storage().nbytes() // x.element_size()
                self._cuda = x.device.type == "cuda"
                whole = x.detach().as_strided((numel,), (1,), 0)
                parcel = self._known[key] = _Parcel(self._to_host(whole))
            self._parcels.append(weakref.ref(parcel))
            self._leaving.append(whole)
        return _Ticket(parcel, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, saved: Tensor | _Ticket) -> Tensor:
        """Return the tensor on the device, and prefetch the block below."""
        if isinstance(saved, Tensor):
            return saved
        if not self._arrived:
            self.bring_back()
            if self._event is not None:
                torch.cuda.current_stream().wait_event(self._event)
            self._arrived = True
            if self._before is not None:
                self._before.bring_back()
        assert saved.parcel.device is not None
        return saved.parcel.device.as_strided(saved.shape, saved.strides, saved.offset)

    def leave(self) -> None:
        """The block's forward is over: nothing more is saved."""
        self._known.clear()
        if self._cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(self._lane.side())

    def give_up(self) -> None:
        """Free the device's tensors, once the main stream has waited for their copies."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._leaving.clear()

    def bring_back(self) -> None:
        """Make room on the main stream, and copy on the other."""
        if self._loaded:
            return
        self._loaded = True
        parcels = [parcel for ref in self._parcels if (parcel := ref()) is not None]
        with torch.no_grad():
            for parcel in parcels:
                assert parcel.host is not None
                device = "cuda" if self._cuda else "cpu"
                parcel.device = torch.empty_like(parcel.host, device=device)
                if not self._cuda:
                    parcel.device.copy_(parcel.host)
                    parcel.host = None
            if self._cuda:
                self._copy_beside(parcels)

    def _copy_beside(self, parcels: Iterable[_Parcel]) -> None:
        side = self._lane.side()
        with torch.cuda.stream(side):
            for parcel in parcels:
                assert parcel.device is not None
                assert parcel.host is not None
                parcel.device.copy_(parcel.host, non_blocking=True)
                parcel.host = None  # torch keeps pinned memory until its copies are done
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(side)

    def _to_host(self, whole: Tensor) -> Tensor:
        if not self._cuda:
            return whole.clone()
        with torch.cuda.stream(self._lane.side()):
            return whole.to("cpu", non_blocking=True)  # into pinned memory
