"""Counting what linear attention launches and moves: torch's dispatcher over the class itself."""

from collections import Counter
from itertools import product

import numpy
import torch
from counted import count_decode, make_counted
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.families import read_model
from memfit.plan.step_time.counts.linear_attention import (
    ChunkBytes,
    TokenBytes,
    list_growth,
)
from memfit.records.model import CHUNK
from memfit.train.step.step import Batch, autocast, step
from tiny_models import make_built

WRITES = ("zeros", "ones", "empty", "new_")  # operations that read none of what they are given
# (heads of keys, heads of values, elements of a key, of a value, hidden), chunks: as many as
# there are coefficients and more, in general position
SIZES = (
    (2, 4, 8, 12, 32), (2, 6, 8, 12, 32), (2, 6, 16, 8, 32), (3, 6, 4, 12, 48), (2, 4, 12, 4, 16),
    (3, 9, 8, 24, 64),
)  # fmt: skip
LENGTHS = (2, 3, 5)


class Moved(TorchDispatchMode):
    """Operations that are no views, and bytes that all but products by weights move."""

    def __init__(self):
        super().__init__()
        self.number, self.nbytes = Counter(), Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if any(r.alias_info and not r.alias_info.is_write for r in operator._schema.returns):
            return made
        way = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        self.number[way] += 1
        name = operator._schema.name.partition("::")[2]
        if name not in ("mm", "addmm"):
            read = () if name.startswith(WRITES) else args
            flat = [
                x
                for one in (*read, made)
                for x in (one if isinstance(one, tuple | list) else [one])
            ]
            self.nbytes[way] += sum(
                x.numel() * x.element_size() for x in flat if isinstance(x, torch.Tensor)
            )
        return made


def all_linear(recipe, sizes=None, layers=1):
    """The recipe with linear attention in every block."""
    config = {
        **recipe.model.config, "num_hidden_layers": layers, "max_position_embeddings": 4096,
        "layer_types": ["linear_attention"] * layers,
    }  # fmt: skip
    config.pop("full_attention_interval", None)
    if sizes:
        names = (
            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
            "linear_value_head_dim", "hidden_size",
        )  # fmt: skip
        config |= dict(zip(names, sizes, strict=True))
    return replace(recipe, model=replace(recipe.model, config=config))


def move(recipe, rows, tokens):
    """What the module of one block launches and moves, of so many rows of so many tokens."""
    built = make_built(recipe)
    module = built.model.model.layers[0].linear_attn
    dtype = next(module.parameters()).dtype
    x = torch.randn(rows, tokens, built.model.config.hidden_size, dtype=dtype, requires_grad=True)
    with Moved() as moved:
        with autocast(built):
            out = module(x)
        torch.autograd.grad(out, (x, *module.parameters()), torch.ones_like(out))
    return moved


def bytes_of_row(recipe, tokens):
    """(forward, backward) bytes of one more row: nothing that weights alone take."""
    one, two = (move(recipe, rows, tokens).nbytes for rows in (1, 2))
    return tuple(two[way] - one[way] for way in ("forward", "backward"))


def count_bytes(family, way):
    """What `Moved` says of both passes: the solution of more equations than it has numbers.

    What a row moves once, whatever its length (of its first and last turn), is left out.
    """
    recipe, rows, seen = make_counted(family, way), [], []
    for sizes, chunks in product(SIZES, LENGTHS):
        changed = all_linear(recipe, sizes)
        a, tokens = read_model(changed.model).architecture, chunks * CHUNK
        growth = list_growth(a.linear, a.hidden)
        once = [*growth["chunk"], *growth["state"]]
        rows.append([
            *(tokens * n for n in growth["token"]), *(tokens * chunks * n for n in growth["chunk"]),
            *(chunks * n for n in growth["state"]), *once,
        ])  # fmt: skip
        seen.append(bytes_of_row(changed, tokens))
    found = numpy.linalg.lstsq(numpy.array(rows), numpy.array(seen), rcond=None)[0]
    whole = found.T.round().astype(int).tolist()
    return {
        name: {
            "token": dict(zip(TokenBytes.__struct_fields__, numbers, strict=False)),
            "chunk": dict(zip(ChunkBytes.__struct_fields__, numbers[5:], strict=False)),
            "state": numbers[8],
        }
        for name, numbers in zip(("forward", "backward"), whole, strict=True)
    }  # fmt: skip


def count_passes(recipe):
    """Operations of one more block in one more micro-batch: {forward, backward}."""
    found = {}
    for layers, times in product((1, 2), (2, 3)):
        deep = replace(all_linear(recipe, layers=layers), micro_batch=1, accumulation=times)
        deep = replace(deep, recompute_blocks=min(recipe.recompute_blocks, 1) * layers)
        built, ids = make_built(deep), torch.zeros(1, deep.sequence_length, dtype=torch.int64)
        with Moved() as moved:
            step(built, [Batch(ids, ids)] * times, ids.numel() * times)
        found[layers, times] = moved.number
    return {
        way: found[2, 3][way] - found[2, 2][way] - found[1, 3][way] + found[1, 2][way]
        for way in ("forward", "backward")
    }


def count_launches(family, way):
    """What `Launches` says of a family: with two chunks in a row, and with three."""
    recipe = make_counted(family, way)
    two, three = (count_passes(replace(recipe, sequence_length=n * CHUNK)) for n in (2, 3))
    turn = {name: three[name] - two[name] for name in two}
    return {
        "forward": two["forward"] - 2 * turn["forward"], "turn": turn["forward"],
        "backward": two["backward"] - 2 * turn["backward"], "turn_back": turn["backward"],
        "decode": count_decode(all_linear(recipe, layers=1))[0],
    }  # fmt: skip
