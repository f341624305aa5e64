"""What a run costs: device-hours, money, electricity, CO2. What nobody states stays unknown.

    device_hours = devices x time
    usd          = device_hours x price                       which price: memfit.catalog.prices
    kwh          = device_hours x rated power x load x PUE
    kg_co2       = kwh x the grid's intensity                 memfit.catalog.grids

The power is the devices' alone: hosts, network and cooling are in `hardware.pue` where it is
stated. (Eight H100s with their host and network drew at most 8.4 kW in training, 1.5 times the
devices' rated 5.6 kW: 2412.08602.)
"""

from __future__ import annotations

from memfit.catalog.grids import find_grid
from memfit.catalog.prices import choose_price
from memfit.core import units
from memfit.records.hardware import Device
from memfit.records.request import Hardware, Request
from memfit.records.results import Cost, Time

# OLMo's runs drew between 15 % and 85 % of their H100s' rated power (2503.05804, abstract): a
# step that computes is at the high end, and pauses are not in a predicted time.
ASSUMED_LOAD = 0.85


def describe_cost(time: Time, device: Device, request: Request) -> Cost:
    """Return the figures of the JSON's `cost` object: of all steps, on all the request's devices.

    Raises InvalidRequest: `hardware.price` or `hardware.grid` is none.
    """
    hardware = request.hardware
    price = choose_price(device, hardware.price)
    grid = find_grid(hardware.grid) if hardware.grid else None
    watts, load = _power(device, hardware)
    if time.total_seconds is None:
        why = f"the run's time is unknown; {price.because}"
        return Cost(device_hours=None, usd=None, kwh=None, kg_co2=None, because=why)
    hours = request.ranks * time.total_seconds / units.HOUR
    kwh = hours * watts * hardware.pue / 1e3 if watts else None
    carbon = grid.because if grid else "CO2 unknown: no `hardware.grid` is stated"
    return Cost(
        device_hours=hours,
        usd=hours * price.usd_per_hour if price.usd_per_hour is not None else None,
        kwh=kwh,
        kg_co2=kwh * grid.kg_per_kwh if kwh is not None and grid else None,
        because="; ".join((price.because, load, carbon)),
    )


def _power(device: Device, hardware: Hardware) -> tuple[float | None, str]:
    """Watts that one device draws, and in words."""
    if not device.watts:
        return None, f"the power of `{device.id}` is unknown"
    share = ASSUMED_LOAD if hardware.load is None else hardware.load
    whose = "assumed" if hardware.load is None else "as asked"
    site = f", x PUE {hardware.pue:g}" if hardware.pue > 1 else ", without host and cooling"
    return device.watts * share, f"{share:.0%} of {device.watts:.0f} W ({whose}){site}"
