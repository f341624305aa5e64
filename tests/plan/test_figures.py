"""Bytes and seconds of published runs, of every technique and of meshes are what they were.

Other tests hold predictions to what was measured, traced or worked by hand, a few at a time and
within an error; this one says which of all a change moves, however little. figures.json has, of
each case, the peak and the seconds, and a sum of all parts with weights of their names.
UPDATE_GOLDEN=1 pytest tests/plan/test_figures.py rewrites it: look at the rows that change.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest
from msgspec.structs import replace

from memfit.accuracy.corpus import read_corpus
from memfit.accuracy.time_errors import network_of
from memfit.adapters import find_adapter
from memfit.core.errors import Error
from memfit.families import read_model
from memfit.plan.memory.declared import describe_ledger, find_waiting, predict_ledger
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.request.problem import find_device
from memfit.plan.step_time.communication.traffic import describe_traffic
from memfit.plan.step_time.predicted_time import predict_timeline, sum_up
from memfit.plan.step_time.read import read_setting
from memfit.plan.step_time.step import predict_step
from share import choose, find_axes
from tiny_models import CONFIGS, make_recipe

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "bench"), str(TESTS / "certify"), str(TESTS / "plan")]
import grid_recipes  # noqa: E402
import mesh_cells  # noqa: E402
import predict_grid  # noqa: E402
import test_rollout_memory as sampled  # noqa: E402

FIGURES = Path(__file__).with_name("figures.json")
ROWS = read_corpus()
FRAMEWORKS = sorted({row.recipe.framework for row in ROWS})
AXES = mesh_cells.AXES
PLAYED = ("hf-trainer", "litgpt", "deepspeed")  # tens of milliseconds a row
CUT_TWICE = {  # cells of two axes, and of more than two ranks
    "FSDP2 and copies": {"dp_shard": 4, "dp_replicate": 2},
    "FSDP2 and tp": {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
    "FSDP2 and cp": {"dp_shard": 2, "cp": 4},
    "stages of FSDP2": {"pp": 4, "dp_shard": 2},
    "looped stages": {"pp": 2, "virtual_pp": 2},
    "kept whole": {"dp_shard": 4, "reshard_after_forward": False},
}


def weigh(*names):
    """Of a part's name: a number from 1 to 997."""
    return crc32(" ".join(map(str, names)).encode()) % 997 + 1


def sum_ledger(ledger):
    return sum(e.nbytes * weigh(e.phase, e.kind, e.owner) for e in ledger.entries)


def take_published(row):
    """Peak, all its parts, reserved and in all; seconds, and all their parts; bytes sent."""
    recipe, device = row.recipe, find_device(row.recipe.device)
    model, found = read_model(recipe.model), []
    try:
        if recipe.is_own:
            ledger = predict_memory(find_adapter(recipe).adapt(model, recipe), recipe, device)
            found += [ledger.peak, sum_ledger(ledger)]
        else:
            ledger = predict_ledger(recipe, model, device)
            waiting = find_waiting(recipe, model, device)
            memory = describe_ledger(ledger, recipe, device, device.memory, waiting)
            found += [ledger.peak, sum_ledger(ledger)]
            found += [memory.peak_reserved, memory.device_total]
    except Error as error:
        found.append(type(error).__name__)
    try:
        step = predict_step(read_setting(
            recipe, model, device, network=network_of(row),
            software=row.environment.get("framework", ""),
        ))  # fmt: skip
    except Error as error:
        return [*found, type(error).__name__]
    parts = step._asdict().items()
    found += [float(step.total), sum(float(s) * weigh(name) for name, s in parts)]
    return [*found, sum_traffic(sum_up(model), recipe)]


def take_own(recipe, device):
    """Peak and all its parts; seconds and all their spans, where a speed is known; bytes sent."""
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger = predict_memory(model, recipe, device)
    found = [ledger.peak, sum_ledger(ledger)]
    line = predict_timeline(sum_up(model), recipe, device)
    if line.seconds is not None:
        found += [line.seconds, sum(s.duration * weigh(s.op, s.stream) for s in line.spans)]
        found.append(sum(s.flop for s in line.spans))
    return [*found, sum_traffic(sum_up(model), recipe)]


def sum_traffic(totals, recipe):
    return sum(t.nbytes * weigh(t.axis, t.collective) for t in describe_traffic(totals, recipe))


class Case(NamedTuple):
    take: Callable[..., list]
    args: tuple
    axes: frozenset | None = None  # None: always; of others as few are kept as have all values


def grid():
    """Of bench/predict_grid.py: every technique and family on a device."""
    for name, recipe, device in grid_recipes.grid(everywhere=False):
        words = {*predict_grid.techniques(recipe), recipe.model.config["model_type"]}
        axes = frozenset((device.id, word) for word in words)
        yield f"{name} on {device.id}", Case(take_own, (recipe, device), axes)


def cells():
    """Every technique on the axes on which it trains, and on meshes of two axes; on one GPU's
    rank, in memory and in time."""
    device = find_device("h100-sxm")
    for technique, axis in mesh_cells.CELLS:
        recipe = mesh_cells.make_cell(technique, axis)
        yield mesh_cells.name_cell(technique, axis), on(recipe, device)
    for name, parallel in CUT_TWICE.items():
        for technique in ("LoRA", "AdamW in 8 bits"):
            base = mesh_cells.make_cell(technique, "FSDP2")
            config = base.model.config | {"num_hidden_layers": 8}
            recipe = replace(
                base, model=replace(base.model, config=config), accumulation=4,
                parallel=mesh_cells.Parallel(**parallel),
            )  # fmt: skip
            yield f"{technique}, {name}", on(recipe, device)

    # a head of its own beside positions that are learned: units of a token's and of the root's
    config = CONFIGS["gpt2"] | {"tie_word_embeddings": False, "vocab_size": 257, "n_embd": 20,
                                "n_positions": 33, "n_head": 4}  # fmt: skip
    recipe = make_recipe(config=config, parallel=AXES["FSDP2"], sequence_length=33)
    yield "a head of its own, FSDP2", on(recipe, device)


def iterations():
    """Iterations of reinforcement learning, on a GPU."""
    for name, setting in sampled.CASES.items():
        axes = frozenset(find_axes(setting, ""))
        yield name, on(sampled.make_short(name), find_device("h100-sxm"), axes)


def on(recipe, device, axes=None):
    kernel = "math" if recipe.attention == "math" else "flash"
    return Case(take_own, (replace(recipe, device=device.id, attention=kernel), device), axes)


def published(framework):
    """One row of each recipe."""
    rows = {row.recipe.digest: row for row in ROWS if row.recipe.framework == framework}
    for row in rows.values():
        axes = frozenset(find_axes(row.recipe, "")) if framework in PLAYED else None
        yield row.id, Case(take_published, (row,), axes)


GROUPS = {
    **{f"published {name}": partial(published, name) for name in FRAMEWORKS},
    "grid": grid,
    "mesh": cells,
    "sampled": iterations,
}


def choose_anew(cases):
    axes = {name: case.axes for name, case in cases.items() if case.axes is not None}
    return [name for name in cases if name not in axes] + sorted(choose(axes))


@pytest.mark.parametrize("group", GROUPS)
def test_no_figure_moves_unnoticed(group):
    cases = dict(GROUPS[group]())
    kept = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        chosen = choose_anew(cases)
        write(kept | {group: {name: cases[name].take(*cases[name].args) for name in chosen}})
        return
    gone = kept[group].keys() - cases.keys()
    assert not gone, "UPDATE_GOLDEN=1 chooses other cases"
    moved = {}
    for name, figures in kept[group].items():
        found = cases[name].take(*cases[name].args)
        if not same(figures, found):
            moved[name] = figures, found
    assert not moved


def same(kept, found):
    """Bytes to the byte, seconds but for another processor's last digit."""
    return len(kept) == len(found) and all(
        a == pytest.approx(b, rel=1e-9) if isinstance(b, float) else a == b
        for a, b in zip(kept, found, strict=True)
    )


def write(kept):
    """A case a line."""
    groups = []
    for group in sorted(kept):
        lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(kept[group].items()))
        groups.append(f" {json.dumps(group)}: {{\n" + ",\n".join(lines) + "\n }")
    FIGURES.write_text("{\n" + ",\n".join(groups) + "\n}\n", "utf-8")


def test_every_group_has_figures_and_nothing_else_does():
    kept = json.loads(FIGURES.read_text("utf-8"))
    assert kept.keys() == GROUPS.keys()
    assert len(kept["grid"]) > 40
    assert sum(map(len, kept.values())) > 1000
