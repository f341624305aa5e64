"""Measured steps that cannot be: more FLOP/s than the device's data sheet states for them."""

from __future__ import annotations

from memfit.catalog import find_device
from memfit.core.errors import InvalidRequest
from memfit.plan.step_time.read import read_basis
from memfit.records.recipe import Recipe
from memfit.records.results import Plan, Run


def check_possible(recipe: Recipe, flop: float, seconds: float) -> None:
    """Raise InvalidRequest where `flop`, of all devices, in `seconds` exceed the dense peaks.

    flop: what the mathematics needs, without anything computed twice. A CPU, and a device or a
    precision without a data sheet's figure, are not checked.
    """
    device, dtype = find_device(recipe.device), read_basis(recipe).dtype
    peak = device.flops.get(dtype)
    if device.is_cpu or not peak or seconds <= 0:
        return
    world = recipe.parallel.world
    reached = flop / seconds / world
    if reached <= peak:
        return
    raise InvalidRequest(
        f"a step of {seconds:.4g} s reaches {reached / 1e12:.4g} TFLOP/s a device, and"
        f" `{device.id}` has {peak / 1e12:.4g} in {dtype}: an MFU of {reached / peak:.0%} is no"
        " measurement",
        hint="time must be taken once the device has finished (`torch.cuda.synchronize`), and the"
        " device, their number and the batch must be those that ran",
    )


def check_run(plan: Plan, run: Run) -> None:
    """As `check_possible`, of what a run measured: by tokens a second and not by steps, as its rows
    may be shorter than planned."""
    rate, flop = run.measurements.get("time.tokens_per_second"), plan.time.model_flops_per_step
    tokens = run.recipe.global_batch * run.recipe.sequence_length
    if rate and rate.value > 0 and flop:
        check_possible(run.recipe, flop, tokens / rate.value)
