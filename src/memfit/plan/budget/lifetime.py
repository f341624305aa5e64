"""A model's whole life: of all sizes of one quality, the cheapest to train and then to serve.

    quality  : A / N^alpha + B / D^beta of the budget's own model, which every other size N reaches
               with its own tokens D (Sardana et al. 2401.00448, section 2; exponents of 2404.10102)
    training : 6 N D at the budget's FLOP/s and price
    serving  : tokens x seconds of a token x price, where one token of each of the sequences at once
               takes the longer of reading weights and caches once (bytes / bandwidth) and of
               computing them (2 N a sequence, at the peak x MFU)

Serving reads all weights for each token of a batch, so a smaller model that was trained longer is
cheaper from some number of served tokens on, and the only one where an answer may not take long.
Prompts are tokens like others here: reading them is faster, so the serving is one from above, and
from below as bandwidth is the data sheet's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from memfit.catalog import CatalogModel, find_device, models
from memfit.catalog.prices import choose_price
from memfit.core import units
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.plan.budget.inference import ALPHA, BETA, CHINCHILLA, is_dense_decoder, weigh_loss
from memfit.records import Record
from memfit.records.hardware import Device

STEPS = 1000  # sizes tried, less than 1 % apart
SMALLEST, LARGEST = 1e-3, 4.0  # of them, as a share of the budget's own


class LifetimeRequest(Record, frozen=True, kw_only=True):
    """What the trained model has to serve, and where."""

    tokens: float  # read and written over its life
    device: str  # a catalogue name; the model is on one of them
    price: str = ""  # US dollars a device-hour, or a kind of price; see memfit.catalog.prices
    latency: float | None = None  # seconds from one token of an answer to the next, at most
    context: int = 0  # tokens of each sequence; 0 leaves the cache out
    sequences: int = 1  # served at once
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0


class Size(Record, frozen=True, kw_only=True):
    """A model's size that reaches the target quality."""

    parameters: float
    tokens: float  # to train on
    training: float  # US dollars
    serving: float  # US dollars
    latency: float  # seconds a token of each sequence
    fits: bool  # in the device's memory, and within the latency
    nearest: str  # the catalogue's model whose cache's shape it has

    @property
    def total(self) -> float:
        """US dollars of the whole life."""
        return self.training + self.serving


class Lifetime(Record, frozen=True, kw_only=True):
    """The budget's own size beside the cheapest."""

    request: LifetimeRequest
    own: Size
    cheapest: Size
    because: tuple[str, ...]


class _Served(NamedTuple):
    """A size on the device: what it needs there, and how long a token takes."""

    nbytes: float
    seconds: float


def read_lifetime(
    *,
    tokens: str,
    device: str,
    price: str = "",
    latency: str = "",
    context: int = 0,
    sequences: int = 1,
    weight_bytes: float = 2.0,
    cache_bytes: float = 2.0,
) -> LifetimeRequest:
    """A request from texts with units: `1T` tokens, `2.5 USD` or `spot`, `30 ms`."""
    return LifetimeRequest(
        tokens=units.parse_count(tokens),
        device=device,
        price=price,
        latency=units.parse_seconds(latency) if latency else None,
        context=context,
        sequences=sequences,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
    )


def find_cheapest(
    request: LifetimeRequest, *, parameters: float, tokens: float, usd_per_flop: float, mfu: float
) -> Lifetime:
    """The size that costs the least over its life, of the quality of these parameters and tokens.

    Raises InvalidRequest: a figure that is not above 0, or no bandwidth or price of the device is
    known. DoesNotFit: no size of that quality can be served there.
    """
    _check(request)
    device = find_device(request.device)
    price = choose_price(device, request.price)
    if device.bandwidth is None or price.usd_per_hour is None:
        missing = price.because if device.bandwidth else f"no bandwidth of `{device.id}` is known"
        raise InvalidRequest(
            f"what serving on `{device.id}` costs cannot be said: {missing}",
            hint="`--serve-price '2 USD'`, or another `--serve-on`",
        )
    weight = weigh_loss(6 * parameters * tokens, CHINCHILLA)

    def judge(size: float) -> Size | None:
        needed = _tokens_for(size, parameters, tokens, weight)
        if needed is None:
            return None
        shape = _nearest(size, request)
        served = _serve(request, size, device, shape, mfu)
        usable = device.planned_memory
        fits = usable is None or served.nbytes <= usable
        each = served.seconds / request.sequences / units.HOUR * (price.usd_per_hour or 0)
        return Size(
            parameters=size, tokens=needed, training=6 * size * needed * usd_per_flop,
            serving=request.tokens * each, latency=served.seconds, nearest=shape.id,
            fits=fits and (request.latency is None or served.seconds <= request.latency),
        )  # fmt: skip

    own = judge(parameters)
    assert own is not None  # its own quality
    ratio = (LARGEST / SMALLEST) ** (1 / STEPS)
    tried = [judge(parameters * SMALLEST * ratio**n) for n in range(STEPS + 1)]
    served = [size for size in (*tried, own) if size is not None and size.fits]
    if not served:
        raise DoesNotFit(
            f"no size of this quality can be served on one `{device.id}`{_within(request)}: the"
            f" smallest has {units.show_count(min(s.parameters for s in tried if s))} parameters",
            hint="allow more latency, name a device with more memory or bandwidth, or spend less"
            " on training",
        )
    cheapest = min(served, key=lambda size: size.total)
    return Lifetime(
        request=request,
        own=own,
        cheapest=cheapest,
        because=_reasons(request, device, price.because, mfu),
    )


def _check(request: LifetimeRequest) -> None:
    for name in ("tokens", "latency", "sequences", "weight_bytes", "cache_bytes"):
        value = getattr(request, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidRequest(f"`{name}: {value}` of serving is not above 0")


def _within(request: LifetimeRequest) -> str:
    latency = request.latency
    return "" if latency is None else f" within {units.show_seconds(latency)} a token"


def _tokens_for(size: float, parameters: float, tokens: float, weight: float) -> float | None:
    """Tokens after which this size is as good; None: after none (A is `weight` times B here)."""
    left = weight * (parameters**-ALPHA - size**-ALPHA) + tokens**-BETA
    needed: float = left ** (-1 / BETA) if left > 0 else 0.0
    return needed or None


def _nearest(size: float, request: LifetimeRequest) -> CatalogModel:
    """The dense model nearest in size, whose cache's shape stands for this size's."""
    served = [m for m in models() if is_dense_decoder(m) and m.max_sequence >= request.context]
    if not served:
        raise InvalidRequest(f"no dense catalogue model reads {request.context:,} tokens")
    return min(served, key=lambda m: abs(math.log(m.parameters / size)))


def _serve(
    request: LifetimeRequest, size: float, device: Device, shape: CatalogModel, mfu: float
) -> _Served:
    rows = request.sequences
    elements = shape.kv_elements_per_token * size / shape.parameters
    cache = elements * rows * request.context * request.cache_bytes
    nbytes = size * request.weight_bytes + cache
    reading = nbytes / (device.bandwidth or math.inf)
    peak = device.flops.get("bf16") or device.flops.get("fp16") or device.flops.get("fp32")
    computing = 2 * size * rows / (peak * mfu) if peak else 0.0
    return _Served(nbytes, max(reading, computing))


def _reasons(request: LifetimeRequest, device: Device, price: str, mfu: float) -> tuple[str, ...]:
    cache = (
        f"each of {request.context:,} tokens, its size in proportion to the catalogue's nearest"
        if request.context
        else "whose caches are left out (--context)"
    )
    return (
        "all sizes reach the quality of the budget's own (Sardana et al. 2401.00448, with the"
        " exponents of 2404.10102); below some size no tokens do",
        f"serving: one `{device.id}` a model, {request.sequences} sequences at once, {cache},"
        f" {request.weight_bytes:g} bytes a parameter; {price}",
        f"the bandwidth is the data sheet's, so that a token takes at least so long; products at"
        f" {mfu:.0%} of the peak",
    )
