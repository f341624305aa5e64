"""Weights that lie by columns while a CPU samples: what is held beside those of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memfit.core.units import show_bytes
from memfit.families import find_family
from memfit.families.capabilities.turned import find_piece, find_turned_rows
from memfit.plan.simulate.blocks import Parts, owner_of
from memfit.plan.simulate.sampled.rollout import OWNER, Slots
from memfit.records.hardware import Device
from memfit.records.ledger import Kind
from memfit.records.model import Model, Weight

AROUND = (".project_out.weight", ".project_in.weight")  # of small embeddings, around the blocks


class Turning(NamedTuple):
    """Parts beside all weights as they lie."""

    spare: Parts  # rows that nobody reads, while answers are sampled
    begins: Parts  # at the highest instant while weights are turned
    ends: Parts  # and while they are turned back


def find_turning(model: Model, slots: Slots, device: Device) -> Turning:
    """As train/generation/products.py does it, one weight after the other, where torch has MKL and
    oneDNN, as its builds for x86 do; elsewhere weights stay as they lie, and take less."""
    if not slots.turns or not device.is_cpu:
        return Turning({}, {}, {})
    spare: Parts = {}
    begins, ends = [], []
    for weight in find_turned(model):
        part, rows = (Kind.PARAMETERS, owner_of(weight.part)), weight.shape[0]
        each = weight.nbytes // rows
        more = (find_turned_rows(weight.shape, weight.dtype) - rows) * each
        spare = {**spare, part: spare.get(part, 0) + more}
        ends.append({**spare, part: spare[part] + weight.nbytes})
        begins.append({**ends[-1], (Kind.TEMPORARY, OWNER): find_piece(rows) * each})
    return Turning(spare, _highest(begins), _highest(ends))


def explain_turning(nbytes: int) -> str:
    """Of what weights take in a phase that samples, beside what they take in a step."""
    return f", and {show_bytes(nbytes)} as they lie by columns meanwhile" if nbytes else ""


def _highest(instants: list[Parts]) -> Parts:
    return max(instants, key=lambda parts: sum(parts.values()), default={})


def find_turned(model: Model) -> Iterator[Weight]:
    """The weights of `nn.Linear`s that are turned, in the order in which a module names them."""
    a = model.architecture
    plain = find_family(a.family).plain_linears
    outside = "embedding" if a.tied_embeddings else "head"
    heads = [w for w in model.weights if w.part == outside][:1]
    around = [w for w in model.weights if w.name.endswith(AROUND)]
    blocks = [w for w in model.weights if plain and w.part == "block"]
    for weight in (*around, *blocks, *heads):
        beside = ".lora_" in weight.name or weight.chooses  # routers are no `nn.Linear`
        if beside or weight.coding or weight.of_value:
            continue
        if find_turned_rows(weight.shape, weight.dtype):
            yield weight
