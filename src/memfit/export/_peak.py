"""The predicted peak of an exported plan under the target's own step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit import units
from memfit.errors import InvalidRequest
from memfit.nouns import Noun, from_data, to_data
from memfit.plan import foreign
from memfit.plan.frameworks import Framework, find_framework
from memfit.reading import change
from memfit.recipe import ADAPTED
from memfit.request import Request
from memfit.results import Memory, Plan

BITSANDBYTES = {"adamw8bit-bnb": False, "adamw8bit-paged": True}  # of memfit's own step: paged
LOW_BIT = ("adamw8bit", "adamw4bit", "adamwfp8")  # torchao's in memfit's own step
THEIRS = LOW_BIT[:2]  # of them, those that the Trainer has, too
TORCHAO = "adamw8bit"  # the knob that says whose `optimizer: adamw8bit` is


class Peak(Noun, frozen=True, kw_only=True):
    """Bytes of the fullest device; None is unknown."""

    framework: str  # whose step was predicted; "" where none was
    peak_allocated: int | None
    device_total: int | None  # with what the allocator and the driver hold beside
    because: str  # whose description it is, or why nothing is known

    @property
    def words(self) -> str:
        """In one line."""
        if self.peak_allocated is None:
            return f"unknown: {self.because}"
        total = ""
        if self.device_total is not None:
            total = f"{units.show_bytes(self.device_total)} of the device, "
        return f"{total}{units.show_bytes(self.peak_allocated)} allocated ({self.because})"


def unknown(because: str) -> Peak:
    """No figure, and why."""
    return Peak(framework="", peak_allocated=None, device_total=None, because=because)


def planned(plan: Plan) -> Peak:
    """The plan's own prediction."""
    name = plan.recipe.framework
    title = "memfit's own step" if name == "memfit" else find_framework(name).title
    return _peak(plan.memory, name, title)


def predict_there(
    plan: Plan, name: str, why: str, left: frozenset[str], becomes: Mapping[str, Any]
) -> Peak:
    """Of the framework `name`: the plan's own figure where the plan is of it, else a prediction.

    left: keys that the target cannot say; they take the framework's own defaults, or `becomes`.
    """
    if not name:
        return unknown(why)
    framework = find_framework(name)
    if plan.recipe.framework == name and not left and not becomes:
        return planned(plan)
    try:
        coded = plan.recipe.optimizer.name if plan.recipe.framework == "memfit" else ""
        if coded in LOW_BIT and not (coded in THEIRS and TORCHAO in framework.knobs):
            raise InvalidRequest(
                f"`optimizer: {coded}` is torchao's in memfit's own step, and not described for"
                f" {framework.title}"
            )
        found = foreign.predict_foreign(change(restate(plan, name, left), becomes))
    except InvalidRequest as error:
        return unknown(error.message)
    if found.memory.peak_allocated is None:
        return unknown(found.memory.because)
    return _peak(found.memory, name, f"{framework.title}: {framework.source}")


def _peak(memory: Memory, name: str, title: str) -> Peak:
    if memory.peak_allocated is None:
        return unknown(memory.because)
    return Peak(
        framework=name,
        peak_allocated=memory.peak_allocated,
        device_total=memory.device_total,
        because=title,
    )


def _takes(framework: Framework, other: str, key: str) -> bool:
    """Whether a knob of the framework `other` is this one's: some share a name alone."""
    if other == "memfit":
        return False  # whose own options no framework has
    knobs = find_framework(other).knobs
    return key in framework.knobs and framework.knobs[key] == knobs.get(key)


def restate(plan: Plan, name: str, left: frozenset[str]) -> Request:
    """The recipe as a request for the framework `name`; keys in `left` stay on its defaults."""
    recipe, framework = plan.recipe, find_framework(name)
    recompute: Any = recipe.recompute if recipe.recompute_blocks else "none"
    if recompute not in framework.values["recompute"]:
        recompute = "full"  # of the tools that recompute whole blocks, or none
    some = framework.recomputes_some and recipe.recompute_blocks and recompute == "full"
    if some and "recompute_blocks" not in left:
        recompute = {"blocks": recipe.recompute_blocks}
    knobs: dict[str, Any] = {
        "precision": recipe.precision,
        "attention": recipe.attention,
        "recompute": recompute,
        "compile": recipe.compile,
        "offload": recipe.offload,
    }
    optimizer = {k: v for k, v in to_data(recipe.optimizer).items() if f"optimizer.{k}" not in left}
    data: dict[str, Any] = {
        "model": plan.request.model,
        "framework": name,
        "task": {
            "objective": recipe.objective,
            "sequence_length": recipe.sequence_length,
            "packing": recipe.packing,
            "global_batch": recipe.global_batch,
            "steps": recipe.steps,
        },
        "method": recipe.method,
        "optimizer": optimizer,
        "micro_batch": recipe.micro_batch,
        "hardware": {
            "device": recipe.device,
            "count": recipe.devices_per_node or recipe.parallel.world,
            "nodes": recipe.parallel.world // (recipe.devices_per_node or recipe.parallel.world),
            "network": recipe.network,
        },
        "seed": recipe.seed,
    }
    data |= {key: value for key, value in knobs.items() if key not in left}
    if recipe.method != "full":
        data["base_format"] = recipe.base_format
    if recipe.method in ADAPTED:
        data["lora"] = to_data(recipe.lora)
    if recipe.prefers:
        data["preference"] = {
            k: v for k, v in to_data(recipe.preference).items() if f"preference.{k}" not in left
        }
    if recipe.method == "freeze":
        data["freeze"] = to_data(recipe.freeze)
    if recipe.parallel.world > 1:
        data["parallel"] = {
            key: value
            for key, value in to_data(recipe.parallel).items()
            if f"parallel.{key}" not in left
        }
    data["options"] = {
        key: value
        for key, value in recipe.options.items()
        if f"options.{key}" not in left and _takes(framework, recipe.framework, key)
    }
    if optimizer.get("name") in BITSANDBYTES and "paged" in framework.knobs:
        data["options"]["paged"] = BITSANDBYTES[optimizer["name"]]
        optimizer["name"] = "adamw8bit"  # bitsandbytes' in the Trainer's step
    elif recipe.framework == "memfit" and optimizer.get("name") in THEIRS:
        data["options"][TORCHAO] = "torchao"
        optimizer["implementation"] = "fused"  # the Trainer compiles it
    if recipe.quantisation.double and "double_quantisation" in framework.knobs:
        data["options"]["double_quantisation"] = True
    return from_data(data, Request, where="the exported plan")
