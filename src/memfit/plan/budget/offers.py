"""What money and time buy on each of several offers: compute, which model, how many tokens.

    device_hours = the lesser of cost / price and devices x time
    compute      = device_hours x FLOP/s of a predicted step, or peak x MFU where MFU is stated
    two answers  : compute-optimal, 20 tokens a parameter (Hoffmann et al. 2203.15556), and
                   inference-first (`memfit.plan.budget.inference`)

Compute is 6 x parameters x tokens as everywhere in budgets, so the step's FLOP/s are counted that
way too: attention's own products take time and count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from memfit.catalog import CatalogModel, find_device, find_model, models
from memfit.catalog.machines import find_machine
from memfit.catalog.prices import choose_price
from memfit.core import units
from memfit.core.devices_as_written import read_devices
from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.plan.budget.budget import ASSUMED_MFU
from memfit.plan.budget.inference import (
    CHINCHILLA,
    InferenceRequest,
    read_inference,
    size_by_inference,
    split_by_demand,
)
from memfit.plan.budget.step_rate import Rate, predict_rate
from memfit.records import Record
from memfit.records.hardware import Device

STATES = 16  # bytes a parameter: fp32 weights, gradients and AdamW's two states
NEAREST = 3  # catalogue models named an answer


class Offer(Record, frozen=True, kw_only=True):
    """Devices of one kind, and how many of them."""

    device: str
    count: int = 1  # of all machines
    nodes: int = 0  # machines among which they are; 0: as few as their usual size allows

    @property
    def name(self) -> str:
        """As `--devices` reads it."""
        if not self.nodes:
            return f"{self.device}:{self.count}"
        return f"{self.device}:{self.nodes}x{self.count // self.nodes}"


class OffersRequest(Record, frozen=True, kw_only=True):
    """What may be spent, and where; cost or time or both."""

    offers: tuple[Offer, ...]
    cost: float | None = None  # US dollars
    time: float | None = None  # seconds
    model: str = ""  # a catalogue name: how many tokens it can read
    mfu: float | None = None  # None: predicted
    dtype: Literal["bf16", "fp16", "fp8", "tf32", "fp32"] = "bf16"  # whose peak `mfu` is of
    price: str = ""  # an amount, or a kind of price; see memfit.catalog.prices
    demand: float | None = None  # tokens to be served; None assumes the compute-optimal tokens
    inference: InferenceRequest | None = None  # sizes the inference-first model by memory instead


class Near(Record, frozen=True, kw_only=True):
    """A catalogue model, and what it could read."""

    model: str
    parameters: int
    tokens: float
    tokens_per_parameter: float
    fits: bool | None  # whether its states fit on all devices together; None: memory unknown


class Answer(Record, frozen=True, kw_only=True):
    """One way to spend the compute."""

    parameters: float
    tokens: float
    nearest: tuple[Near, ...]  # whose states fit, the nearest in size first
    because: str


class Spent(Record, frozen=True, kw_only=True):
    """One offer; `None` is unknown, and `because` says what is missing."""

    offer: Offer
    device_hours: float | None
    time: float | None  # seconds
    cost: float | None  # US dollars
    binds: str  # what ends it: time or cost
    flops: float | None  # 6 x parameters x tokens a second, of one device
    mfu: float | None
    compute: float | None  # FLOP of all devices
    optimal: Answer | None
    inference: Answer | None
    model: Near | None  # the one asked for
    because: tuple[str, ...]


class Offers(Record, frozen=True, kw_only=True):
    """Every offer under the same money and time."""

    schema: int = 1
    request: OffersRequest
    rows: tuple[Spent, ...]  # the most compute first, what is unknown last


def read_offers(text: str) -> tuple[Offer, ...]:
    """`h100-sxm:8,rtx-4090:4x2` -> offers with the catalogue's ids; a bare name is one device.

    `4x2` is 4 machines of 2 devices each; `8xH100` and a seller's machine are read too. Raises
    InvalidRequest or UnknownName: not a name and a whole number above 0, named twice.
    """
    found = []
    for piece in text.split(","):
        written = read_devices(piece)
        if not written.name or ":" in written.name:
            raise InvalidRequest(
                f"cannot read `{piece.strip()}` as an offer of devices",
                hint="write a device and how many: `h100-sxm:8,a100-sxm-80:64`;"
                " `rtx-4090:4x2` is 4 machines of 2",
            )
        device, nodes = find_device(written.name).id, written.nodes
        count = (written.number or 1) * (nodes or 1)
        if machine := find_machine(written.name):
            nodes = count if count > 1 or machine.devices > 8 else 0  # the usual size holds 8
            count *= machine.devices
        found.append(Offer(device=device, count=count, nodes=nodes))
    if len(set(found)) < len(found):
        raise InvalidRequest(f"`{text}` names an offer twice")
    return tuple(found)


def read_offers_request(
    *,
    devices: str,
    cost: str = "",
    time: str = "",
    model: str = "",
    mfu: float | None = None,
    dtype: Literal["bf16", "fp16", "fp8", "tf32", "fp32"] = "bf16",
    price: str = "",
    inference_tokens: str = "",
    inference_memory: str = "",
    context: int = 0,
    sequences: int = 1,
    weight_bytes: float = 2.0,
    cache_bytes: float = 2.0,
    **other: object,
) -> OffersRequest:
    """A request from texts with units, as `memfit.plan.budget.budget.read_budget` reads them.

    Raises InvalidRequest for what offers do not ask for: each has its own peak and its own count.
    """
    if stated := [name for name, value in other.items() if value]:
        raise InvalidRequest(
            f"`{stated[0]}` is solved for in each of the offers of `devices`, not given",
            hint="give cost, time, model; for one budget write a plain number of devices",
        )
    return OffersRequest(
        offers=read_offers(devices),
        cost=units.parse_usd(cost) if cost else None,
        time=units.parse_seconds(time) if time else None,
        model=model,
        mfu=mfu,
        dtype=dtype,
        price=price,
        demand=units.parse_count(inference_tokens) if inference_tokens else None,
        inference=read_inference(inference_memory, context, sequences, weight_bytes, cache_bytes),
    )


def compare_offers(request: OffersRequest) -> Offers:
    """What each offer buys. Raises InvalidRequest: no limit, a figure that is not above 0."""
    for name in ("cost", "time", "mfu", "demand"):
        value = getattr(request, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidRequest(f"`{name}: {value}` is not above 0")
    if request.mfu is not None and request.mfu > 1:
        raise InvalidRequest(f"`mfu: {request.mfu}` is above 1", hint="40 % is written 0.4")
    if request.cost is None and request.time is None:
        raise InvalidRequest(
            "offers are compared under a limit, and none is given",
            hint="`--cost '5000 USD'`, `--time '14 days'`, or both",
        )
    if request.model:
        find_model(request.model)
    rows = [_spend(request, offer) for offer in request.offers]
    rows.sort(key=lambda row: -(row.compute or 0))
    return Offers(request=request, rows=tuple(rows))


class _Hours(NamedTuple):
    device_hours: float | None
    price: float | None
    binds: str
    source: str


def _hours(request: OffersRequest, offer: Offer, device: Device) -> _Hours:
    """Device-hours that money and time allow, and which of them ends first."""
    price = choose_price(device, request.price)
    bounds = {}
    if request.time is not None:
        bounds["time"] = offer.count * request.time / units.HOUR
    if request.cost is not None and price.usd_per_hour is not None:
        bounds["cost"] = request.cost / price.usd_per_hour
    source = price.because
    if request.cost is not None and price.usd_per_hour is None:
        source += ": the money sets no limit here"
    if not bounds:
        return _Hours(None, price.usd_per_hour, "", source)
    binds = min(bounds, key=lambda name: bounds[name])
    return _Hours(bounds[binds], price.usd_per_hour, binds, source)


def _spend(request: OffersRequest, offer: Offer) -> Spent:
    device = find_device(offer.device)
    hours, price, binds, source = _hours(request, offer, device)
    model = find_model(request.model) if request.model else None
    flops, mfu, how = _rate(request, offer, device, hours, model)
    compute = hours * units.HOUR * flops if hours is not None and flops is not None else None
    optimal = inference = near = None
    if compute is not None:
        optimal = _optimal(compute, offer, device)
        inference = _inference_first(request, compute, offer, device)
        near = _near(model, compute, offer, device) if model else None
    return Spent(
        offer=offer,
        device_hours=hours,
        time=hours * units.HOUR / offer.count if hours is not None else None,
        cost=hours * price if hours is not None and price is not None else None,
        binds=binds,
        flops=flops,
        mfu=mfu,
        compute=compute,
        optimal=optimal,
        inference=inference,
        model=near,
        because=(source, how),
    )


def _rate(
    request: OffersRequest,
    offer: Offer,
    device: Device,
    hours: float | None,
    model: CatalogModel | None,
) -> tuple[float | None, float | None, str]:
    """FLOP/s of one device, MFU, and where both come from.

    A step of the request's model is predicted, or of the catalogue's nearest to the
    compute-optimal size, which is looked for twice: the size depends on the rate, a little.
    """
    if request.mfu is not None:
        peak, dtype = device.flops.get(request.dtype), request.dtype
        if peak is None:
            return None, request.mfu, f"no {dtype} peak of `{device.id}` is known (--dtype)"
        return peak * request.mfu, request.mfu, f"MFU of the {dtype} peak given"
    if hours is None:
        return None, None, "no device-hours, so no model to predict the rate of"
    rates = device.flops
    peak = rates.get("bf16") or rates.get("fp16") or rates.get("fp32")
    if peak is None:
        return None, None, f"no peak of `{device.id}` is known"
    first = model or _of_compute(hours * units.HOUR * peak * ASSUMED_MFU, offer, device)
    rate, predicted = _predict(first, offer, device)
    if rate is not None and model is None:
        second = _of_compute(hours * units.HOUR * rate, offer, device)
        rate, predicted = _predict(second, offer, device)
    return rate, predicted.mfu, predicted.because


def _predict(model: CatalogModel, offer: Offer, device: Device) -> tuple[float | None, Rate]:
    """FLOP/s of one device by 6 x the parameters that a token visits, and the step's own words."""
    found = predict_rate(model.id, device, offer.count)
    each = 6.0 * (model.active_parameters or model.parameters)
    return (each * found.tokens_per_second if found.tokens_per_second else None), found


def _of_compute(compute: float, offer: Offer, device: Device) -> CatalogModel:
    """The catalogue's nearest to the compute-optimal size, of those that can be planned."""
    size = math.sqrt(compute / (6 * CHINCHILLA))
    return _nearest(size, offer, device, planned=True)[0]


def _optimal(compute: float, offer: Offer, device: Device) -> Answer:
    parameters = math.sqrt(compute / (6 * CHINCHILLA))
    return Answer(
        parameters=parameters,
        tokens=CHINCHILLA * parameters,
        nearest=_named(parameters, compute, offer, device),
        because=f"{CHINCHILLA:.0f} tokens a parameter (Hoffmann et al. 2203.15556)",
    )


def _inference_first(
    request: OffersRequest, compute: float, offer: Offer, device: Device
) -> Answer:
    """The largest model that a stated memory serves, or the cheapest to train and serve."""
    if request.inference is not None:
        sized = size_by_inference(request.inference)
        parameters, because = sized.largest, f"the largest that can be served: {sized.because}"
        tokens = compute / (6 * parameters)
    else:
        demand = request.demand
        served = f"{units.show_count(demand or 0)} tokens"
        if demand is None:
            demand = CHINCHILLA * math.sqrt(compute / (6 * CHINCHILLA))
            served = "as many tokens as the compute-optimal answer reads (assumed)"
        parameters, tokens = split_by_demand(compute, demand, CHINCHILLA)
        because = (
            f"least training and serving for its quality where {served} will be served"
            " (Sardana et al. 2401.00448, with the exponents of 2404.10102)"
        )
    return Answer(
        parameters=parameters,
        tokens=tokens,
        nearest=_named(parameters, compute, offer, device),
        because=because,
    )


def _named(parameters: float, compute: float, offer: Offer, device: Device) -> tuple[Near, ...]:
    rows = [_near(m, compute, offer, device) for m in _nearest(parameters, offer, device)]
    return tuple(row for row in rows if row.fits is not False)


def _near(model: CatalogModel, compute: float, offer: Offer, device: Device) -> Near:
    active = model.active_parameters or model.parameters
    tokens = compute / (6 * active)
    return Near(
        model=model.id,
        parameters=model.parameters,
        tokens=tokens,
        tokens_per_parameter=tokens / active,
        fits=_fits(model, offer, device),
    )


def _fits(model: CatalogModel, offer: Offer, device: Device) -> bool | None:
    """Whether weights, gradients and states fit, cut evenly; activations come on top."""
    usable = device.planned_memory
    return None if usable is None else STATES * model.parameters <= offer.count * usable


def _nearest(
    parameters: float, offer: Offer, device: Device, *, planned: bool = False
) -> Sequence[CatalogModel]:
    """Dense decoders whose states fit, the nearest in size first; all where none fits.

    planned: of families that can be planned, which alone can be timed.
    """
    dense = [m for m in models() if m.active_parameters is None and m.model_type != "t5"]
    if planned:
        dense = [m for m in dense if m.model_type in families.names()]
    fitting = [m for m in dense if _fits(m, offer, device) is not False] or dense
    fitting.sort(key=lambda m: abs(math.log(m.parameters / parameters)))
    return fitting[:NEAREST]
