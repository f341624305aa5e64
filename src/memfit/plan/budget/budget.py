"""Training budgets: parameters, tokens, compute, time, devices and money, each from the others.

    compute      = 6 x parameters x tokens          Kaplan et al. 2001.08361, section 2.1
    compute      = device_hours x peak x MFU
    device_hours = devices x time
    cost         = device_hours x price
    tokens       = 20 x parameters                  Hoffmann et al. 2203.15556, where nothing else
                                                    says how to split the compute

2 FLOP a parameter and token go forward and 4 backward. Attention's own products are left out (they
add sequence / (6 x hidden) of the whole: 3 % at 1,000 tokens of a 7B model) and so is recompute. Of
a mixture of experts, `parameters` are the active ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from memfit.catalog import find_device
from memfit.catalog.prices import choose_price
from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.plan.budget.inference import (
    CHINCHILLA,
    InferenceRequest,
    InferenceSize,
    read_inference,
    size_by_inference,
)
from memfit.plan.budget.lifetime import Lifetime, LifetimeRequest, find_cheapest, read_lifetime
from memfit.records import Record

ASSUMED_MFU = 0.4
LASTING = units.parse_count("200B")  # tokens
AGREE = 0.01  # given figures may be rounded: 7B for 6.74B is another model, 30 d for 30.1 d is not

Known = Literal["parameters", "tokens", "compute", "device_hours", "devices", "time", "cost"]
QUANTITIES: tuple[Known, ...] = (
    "parameters", "tokens", "compute", "device_hours", "devices", "time", "cost",
)  # fmt: skip
UNITS: dict[Known, str] = {
    "parameters": "", "tokens": "", "compute": "FLOP", "device_hours": "h", "devices": "",
    "time": "s", "cost": "USD",
}  # fmt: skip


class BudgetRequest(Record, frozen=True, kw_only=True):
    """What is known, in base units; what is `None` is solved for."""

    parameters: float | None = None
    tokens: float | None = None
    compute: float | None = None  # FLOP
    device_hours: float | None = None
    devices: float | None = None
    time: float | None = None  # seconds
    cost: float | None = None  # US dollars
    device: str = ""  # a catalogue name: its dense peak and its price
    dtype: Literal["bf16", "fp16", "fp8", "tf32", "fp32"] = "bf16"
    peak: float | None = None  # FLOP/s of one device, instead of the catalogue's
    mfu: float | None = None  # None assumes 0.4
    price: float | None = None  # US dollars a device-hour, instead of the catalogue's
    inference: InferenceRequest | None = None  # sizes `parameters` by what has to be served
    lifetime: LifetimeRequest | None = None  # what is served after the training


class Figure(Record, frozen=True, kw_only=True):
    """One quantity; `None` is unknown, and `because` says what is missing."""

    value: float | None
    unit: str
    because: str


class Budget(Record, frozen=True, kw_only=True):
    """A budget solved."""

    schema: int = 1
    request: BudgetRequest
    figures: dict[str, Figure]
    inference: InferenceSize | None
    warnings: tuple[str, ...]
    lifetime: Lifetime | None = None


class _Relation(NamedTuple):
    """constant = product of quantities to their powers, each 1 or -1."""

    powers: Mapping[Known, int]
    constant: float
    words: str  # the constant in words; "" when it is a change of units


def read_budget(
    *,
    parameters: str = "",
    tokens: str = "",
    compute: str = "",
    device_hours: str = "",
    devices: str = "",
    time: str = "",
    cost: str = "",
    device: str = "",
    dtype: Literal["bf16", "fp16", "fp8", "tf32", "fp32"] = "bf16",
    peak: str = "",
    mfu: float | None = None,
    price: str = "",
    inference_memory: str = "",
    inference_tokens: str = "",
    serve_on: str = "",
    serve_price: str = "",
    latency: str = "",
    context: int = 0,
    sequences: int = 1,
    weight_bytes: float = 2.0,
    cache_bytes: float = 2.0,
) -> BudgetRequest:
    """A request from texts with units: `7B`, `1.4T`, `1e21 FLOP`, `30 d`, `5000 USD`, `24 GiB`.

    Raises InvalidRequest for what is served without a word of how much, or where.
    """
    served: dict[str, Any] = {
        "context": context, "sequences": sequences, "weight_bytes": weight_bytes,
        "cache_bytes": cache_bytes,
    }  # fmt: skip
    lifetime = None
    if inference_tokens:
        serving = serve_on or device
        if not serving:
            raise InvalidRequest(
                f"where are `inference_tokens: {inference_tokens}` served?",
                hint="`--serve-on l40s`; without it they are served on `--device`",
            )
        served_there = {"price": serve_price, "latency": latency, **served}
        lifetime = read_lifetime(tokens=inference_tokens, device=serving, **served_there)
    else:
        for name, value in (("serve_on", serve_on), ("serve_price", serve_price),
                            ("latency", latency)):  # fmt: skip
            if value:
                raise InvalidRequest(
                    f"`{name}: {value}` is of a model's whole life, and nothing is served",
                    hint="`--inference-tokens 1T`: the tokens that it reads and writes",
                )

    def read(text: str, parse: Callable[[object], float]) -> float | None:
        return parse(text) if text else None

    return BudgetRequest(
        parameters=read(parameters, units.parse_count),
        tokens=read(tokens, units.parse_count),
        compute=read(compute, units.parse_flop),
        device_hours=read(device_hours, units.parse_count),
        devices=read(devices, units.parse_count),
        time=read(time, units.parse_seconds),
        cost=read(cost, units.parse_usd),
        device=device,
        dtype=dtype,
        peak=read(peak, units.parse_flops),
        mfu=mfu,
        price=read(price, units.parse_usd),
        inference=read_inference(
            inference_memory,
            0 if lifetime and not inference_memory else context,
            sequences,
            weight_bytes,
            cache_bytes,
        ),
        lifetime=lifetime,
    )


def solve_budget(request: BudgetRequest) -> Budget:
    """Solve for whatever is missing.

    Raises InvalidRequest: a figure that is not above 0, figures that contradict one another (both
    values named), or too few of them (what is missing is named). DoesNotFit: the inference memory
    holds no model of the catalogue, or not the stated parameters.
    """
    _check(request)
    rate, price, sources = _rates(request)
    found: dict[Known, float] = {
        name: value for name in QUANTITIES if (value := getattr(request, name)) is not None
    }
    because: dict[Known, str] = dict.fromkeys(found, "given")
    inference = _apply_inference(request, found, because)
    relations = _relations(rate, price)
    _propagate(relations, found, because)
    _split_by_chinchilla(found, because)
    _propagate(relations, found, because)
    if "compute" not in found or "parameters" not in found or "tokens" not in found:
        raise _too_little(request, rate, price)
    figures = _figures(found, because, rate, price) | sources
    return Budget(
        request=request,
        figures=figures,
        inference=inference,
        warnings=_warnings(found),
        lifetime=_live(request, found, rate, price),
    )


def _live(
    request: BudgetRequest, found: Mapping[Known, float], rate: float | None, price: float | None
) -> Lifetime | None:
    """The size that is cheapest to train and serve, as good as the one that was solved for."""
    if request.lifetime is None:
        return None
    if rate is None or price is None:
        missing = "FLOP/s" if rate is None else "price"
        raise InvalidRequest(
            f"what the training costs cannot be said: no {missing} of its device is given or known",
            hint="`--device h100-sxm`, or `--peak '989 TFLOP/s'` and `--price '2.5 USD'`",
        )
    return find_cheapest(
        request.lifetime,
        parameters=found["parameters"],
        tokens=found["tokens"],
        usd_per_flop=price / units.HOUR / rate,
        mfu=request.mfu or ASSUMED_MFU,
    )


def _check(request: BudgetRequest) -> None:
    for name in (*QUANTITIES, "peak", "mfu", "price"):
        value = getattr(request, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidRequest(
                f"`{name}: {value}` is not above 0", hint="left out, it follows from the rest"
            )
    if request.mfu is not None and request.mfu > 1:
        raise InvalidRequest(
            f"`mfu: {request.mfu}` is above 1", hint="40 % is written 0.4; above 1 nothing runs"
        )


def _rates(request: BudgetRequest) -> tuple[float | None, float | None, dict[str, Figure]]:
    """FLOP/s that one device sustains, its price an hour, and where both come from."""
    device = find_device(request.device) if request.device else None
    peak, peak_source = request.peak, "given"
    if peak is None:
        peak_source = "unknown: name a device or its peak"
    if peak is None and device is not None:
        peak = device.flops.get(request.dtype)
        peak_source = f"dense {request.dtype} of `{device.id}`"
        if peak is None:
            peak_source = f"unknown: the catalogue has no {request.dtype} rate of `{device.id}`"
    price, price_source = request.price, "given"
    if price is None and device is not None:
        chosen = choose_price(device)
        price, price_source = chosen.usd_per_hour, chosen.because
    mfu = request.mfu if request.mfu is not None else ASSUMED_MFU
    mfu_source = "given" if request.mfu is not None else "assumed; 0.3 to 0.5 is usual"
    sources = {
        "peak": Figure(value=peak, unit="FLOP/s", because=peak_source),
        "mfu": Figure(value=mfu, unit="", because=mfu_source),
        "price": Figure(value=price, unit="USD/h",
                        because=price_source if price else "unknown: no price is given or known"),
    }  # fmt: skip
    return (peak * mfu if peak else None), price, sources


def _apply_inference(
    request: BudgetRequest, found: dict[Known, float], because: dict[Known, str]
) -> InferenceSize | None:
    """Inference first: the largest model that can be served is the one to train."""
    if request.inference is None:
        return None
    sized = size_by_inference(request.inference, parameters=request.parameters)
    if "parameters" not in found:
        found["parameters"] = sized.largest
        because["parameters"] = f"the largest that the inference memory holds: {sized.because}"
    return sized


def _relations(rate: float | None, price: float | None) -> list[_Relation]:
    relations = [
        _Relation({"compute": 1, "parameters": -1, "tokens": -1}, 6.0, "6"),
        _Relation({"device_hours": 1, "devices": -1, "time": -1}, 1 / units.HOUR, ""),
    ]
    if rate is not None:
        relations.append(
            _Relation({"compute": 1, "device_hours": -1}, rate * units.HOUR, "peak x MFU")
        )
    if price is not None:
        relations.append(_Relation({"cost": 1, "device_hours": -1}, price, "price"))
    return relations


def _propagate(
    relations: list[_Relation], found: dict[Known, float], because: dict[Known, str]
) -> None:
    """Solve relations with one unknown until there are none; check those without unknowns."""
    changed = True
    while changed:
        changed = False
        for relation in relations:
            missing = [name for name in relation.powers if name not in found]
            if len(missing) == 1:
                (name,) = missing
                found[name] = _solve(relation, name, found)
                because[name] = _expression(relation, name)
                changed = True
    for relation in relations:
        if all(name in found for name in relation.powers):
            _check_agreement(relation, found, because)


def _solve(relation: _Relation, name: Known, found: Mapping[Known, float]) -> float:
    value = relation.constant
    for other, power in relation.powers.items():
        if other != name:
            value /= found[other] ** power
    return value if relation.powers[name] == 1 else 1 / value


def _expression(relation: _Relation, name: Known) -> str:
    """`compute / (6 x parameters)`: how a relation gives one of its quantities."""
    own = relation.powers[name]
    above = [relation.words] if own == 1 and relation.words else []
    below = [relation.words] if own == -1 and relation.words else []
    for other, power in relation.powers.items():
        if other != name:
            (above if power != own else below).append(other)
    over = " x ".join(above)
    under = " x ".join(below)
    under = f"({under})" if len(below) > 1 or " x " in under else under
    return f"{over} / {under}" if under else over


def _check_agreement(
    relation: _Relation, found: Mapping[Known, float], because: Mapping[Known, str]
) -> None:
    """Raise when the figures of one relation do not agree to a hundredth."""
    stated = [name for name in relation.powers if because[name] == "given"]
    name = stated[0] if stated else next(iter(relation.powers))
    implied = _solve(relation, name, found)
    if abs(implied / found[name] - 1) <= AGREE:
        return
    everything = [f"`{n}`" for n in QUANTITIES if because.get(n) == "given"]
    raise InvalidRequest(
        f"`{name}` is {_show(name, found[name])} ({because[name]}), but"
        f" {_show(name, implied)} by {_expression(relation, name)}",
        hint=f"leave one of {', '.join(everything)} out: it follows from the others",
    )


def _split_by_chinchilla(found: dict[Known, float], because: dict[Known, str]) -> None:
    """Set tokens a parameter, where no stated figure fixes them."""
    source = f"{CHINCHILLA:.0f} tokens a parameter (Chinchilla)"
    if "parameters" in found and "tokens" not in found:
        found["tokens"] = CHINCHILLA * found["parameters"]
        because["tokens"] = source
    elif "tokens" in found and "parameters" not in found:
        found["parameters"] = found["tokens"] / CHINCHILLA
        because["parameters"] = source
    elif "compute" in found and "parameters" not in found:
        found["parameters"] = math.sqrt(found["compute"] / (6 * CHINCHILLA))
        because["parameters"] = f"sqrt(compute / (6 x {CHINCHILLA:.0f})): {source}"


def _too_little(request: BudgetRequest, rate: float | None, price: float | None) -> InvalidRequest:
    """Name what would make the compute known."""
    hours = request.device_hours or (request.devices and request.time)
    if hours or (request.cost and price):
        missing = "the peak of one device: `--device h100-sxm` or `--peak '989 TFLOP/s'`"
    elif request.cost:
        missing = "the price of a device-hour: `--device h100-sxm` or `--price '2.5 USD'`"
    elif request.devices:
        missing = "`time` (or `device_hours`, `cost`)"
    elif request.time:
        missing = "`devices` (or `device_hours`, `cost`)"
    else:
        missing = "one of `parameters`, `tokens`, `compute`, `cost`, or `devices` with `time`"
    if rate is None and "peak" not in missing and (request.devices or request.time or request.cost):
        missing += ", and the peak of one device: `--device` or `--peak`"
    return InvalidRequest("too little is given to solve a budget", hint=f"missing: {missing}")


def _figures(
    found: Mapping[Known, float],
    because: Mapping[Known, str],
    rate: float | None,
    price: float | None,
) -> dict[str, Figure]:
    unknown: dict[Known, str] = {
        "device_hours": "unknown: name a device or its peak",
        "devices": "unknown: say in what `time`" if rate else "unknown: name a device or its peak",
        "time": "unknown: say with how many `devices`" if rate else "unknown: name a device",
        "cost": "unknown: no price is given or known" if price is None else "unknown: no peak",
    }
    figures = {
        name: Figure(
            value=found.get(name), unit=UNITS[name], because=because.get(name) or unknown[name]
        )
        for name in QUANTITIES
    }
    devices = found.get("devices")
    if devices is not None and because["devices"] != "given" and devices % 1:
        source = f"{because['devices']}; take {math.ceil(devices)}"
        figures["devices"] = Figure(value=devices, unit="", because=source)
    compute, parameters, tokens = found["compute"], found["parameters"], found["tokens"]
    best = math.sqrt(compute / (6 * CHINCHILLA))
    tau = rate * devices if rate is not None and devices is not None else None
    rows: list[tuple[str, float | None, str, str]] = [
        ("forward", compute / 3, "FLOP", "2 x parameters x tokens"),
        ("backward", compute * 2 / 3, "FLOP", "4 x parameters x tokens"),
        ("pflop_days", compute / units.PFLOP_DAY, "PFLOP-days", "compute / 8.64e19"),
        ("throughput", tau, "FLOP/s",
         "devices x peak x MFU" if tau else "unknown: needs devices and a peak"),
        ("tokens_per_parameter", tokens / parameters, "", "tokens / parameters"),
        ("chinchilla_tokens", CHINCHILLA * parameters, "", "20 x these parameters"),
        ("chinchilla_parameters", tokens / CHINCHILLA, "", "these tokens / 20"),
        ("optimal_parameters", best, "", "of this compute: sqrt(compute / 120)"),
        ("optimal_tokens", CHINCHILLA * best, "", "of this compute: 20 x optimal_parameters"),
    ]  # fmt: skip
    return figures | {n: Figure(value=v, unit=u, because=why) for n, v, u, why in rows}


def _warnings(found: Mapping[Known, float]) -> tuple[str, ...]:
    tokens, ratio = found["tokens"], found["tokens"] / found["parameters"]
    warnings = []
    if tokens < LASTING:
        warnings.append(
            f"{units.show_count(tokens)} tokens: a model meant to last is trained on at least"
            f" {units.show_count(LASTING)}; fewer suit an experiment"
        )
    if ratio < CHINCHILLA * (1 - AGREE):
        warnings.append(
            f"{ratio:.3g} tokens a parameter: a smaller model on more tokens would be better for"
            f" the same compute ({CHINCHILLA:.0f} a parameter)"
        )
    return tuple(warnings)


def _show(name: Known, value: float) -> str:
    if name == "time":
        return units.show_seconds(value)
    if name == "cost":
        return f"{value:,.0f} USD"
    if name == "compute":
        return f"{value:.4g} FLOP"
    return f"{value:.4g}" if name in ("devices", "device_hours") else units.show_count(value)
