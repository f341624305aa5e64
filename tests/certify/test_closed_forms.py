"""Traces of the recipes that ship, and of real sizes, against formulas that use no trace.

Per block and per token: Korthikanti et al. 2205.05198 for what is kept, with the terms of Hugging
Face's llama (its table is of GPT); the loss and the optimizer by what torch's kernels return.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tiny_steps import CONFIGS, H100, make_recipe

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.certify.tracing.runs import find_runs, with_runs
from memfit.families import family_of, read_model
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Recipe

# All but the one that starts from the model that the demo's first run leaves behind.
RECIPES = [
    path
    for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    if path.stem != "demo-llama_lora_cpu"
    and not any(name in path.stem for name in ("-grpo", "-ppo"))  # traced as iterations
]
# An RTX 3090's recipes of the 20B model are an RTX 4090's for another card, and those of pairs hold
# the weights and states of those with adapters.
CASES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.wide] if "20b" in path.stem
                 and ("rtx-3090" in path.stem or "dpo" in path.stem) else [])
    for path in RECIPES
]  # fmt: skip
STEMS = {path: path.stem.split("_") for path in RECIPES}  # model, method and device
BF16 = {"precision": "bf16", "base_format": "bf16"}
SHALLOW = 2  # blocks of each kind: closed forms of weights and loss do not need them all


@cache
def planned(path: Path) -> Recipe:
    return api.plan(api.read(path), levers=False).recipe


@cache
def shallow(path: Path) -> Recipe:
    recipe = planned(path)
    return with_runs(recipe, [min(n, SHALLOW) for n in find_runs(recipe)])


@cache
def traced(path: Path) -> Any:
    recipe = shallow(path)
    return trace(recipe, catalog.find_device(recipe.device))


@pytest.mark.covering(STEMS)
@pytest.mark.parametrize("path", CASES)
def test_weights_gradients_and_states_of_the_recipes(path: Path) -> None:
    recipe = shallow(path)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    trained = [w for w in model.weights if w.trainable]
    kinds = traced(path).ledger.by_kind(Phase.OPTIMIZER_STEP)
    buffers = sum(b.nbytes for b in family_of(recipe.model).buffers(model.architecture))
    assert kinds[Kind.PARAMETERS] == sum(w.nbytes for w in model.weights) + buffers
    assert kinds[Kind.GRADIENTS] == sum(w.nbytes for w in trained)
    if recipe.offload == "optimizer":
        assert Kind.OPTIMIZER_STATE not in kinds  # it is the host's
        return
    if recipe.optimizer.name == "adamw8bit":  # torchao: codes, a scale of 256, a table of codes
        assert all(w.numel >= 4096 for w in trained)
        moments = sum(2 * (w.numel + 4 * (w.numel // 256) + 4 * 256) for w in trained)
        assert kinds[Kind.OPTIMIZER_STATE] == moments  # its counters are the host's
        return
    assert recipe.optimizer.name == "adamw"
    on_device = recipe.optimizer.implementation == "fused" or "cpu" in recipe.device
    counters = 4 * len(trained) if on_device else 0
    assert kinds[Kind.OPTIMIZER_STATE] == 2 * sum(w.nbytes for w in trained) + counters


@pytest.mark.covering(STEMS)
@pytest.mark.parametrize("path", CASES)
def test_logits_of_the_recipes(path: Path) -> None:
    """8 bytes a token and word in the loss (fp32 logits, their log-softmax), 12 in backward (the
    log-softmax, its gradient, the logits'); 14 for who keeps the bf16 logits, which the step drops.
    A chunk: the logits, their fp32 copy (of bf16 ones) and the log-softmax.
    """
    recipe, ledger = shallow(path), traced(path).ledger
    if recipe.prefers:
        pytest.skip("log-probabilities of pairs: held to the prediction in plan/test_memory.py")
    vocab = read_model(recipe.model).architecture.vocab
    if recipe.loss == "chunked":
        tokens = min(recipe.loss_chunk, recipe.tokens)
        each = 8 if recipe.compute_dtype == "float32" else 10
        assert most_alive(traced(path), Kind.LOGITS, Phase.LOSS) == each * tokens * vocab
    else:
        assert ledger.by_kind(Phase.LOSS)[Kind.LOGITS] == 8 * recipe.tokens * vocab
        assert most_alive(traced(path), Kind.LOGITS, Phase.BACKWARD) == 12 * recipe.tokens * vocab


def most_alive(found: Any, kind: Kind, phase: Phase) -> int:
    """The most bytes of one kind alive at once in a phase, read off the tape."""
    sizes = {
        e.tensor: e.nbytes for e in found.tape
        if e.nbytes and found.tensor(e.tensor).kind == kind
    }  # fmt: skip
    alive = most = 0
    edges = [0, *found.marks, len(found.tape)]
    for stretch, (start, stop) in zip(found.stretches, pairwise(edges), strict=True):
        for event in found.tape[start:stop]:
            if event.tensor in sizes:
                alive += event.nbytes or -sizes[event.tensor]
                most = max(most, alive) if stretch is phase else most
    return most


def real(name: str, **changes: Any) -> Recipe:
    reference = catalog.find_model(name).reference()
    base = make_recipe(config=reference.config, **BF16, micro_batch=1, sequence_length=4096)
    return replace(base, model=reference, **changes)


def per_block(recipe: Recipe, kind: Kind, phase: Phase = Phase.LOSS) -> int:
    """Bytes that one more block adds."""
    three, four = (trace(with_runs(recipe, [n]), H100).ledger for n in (3, 4))
    return four.by_kind(phase)[kind] - three.by_kind(phase)[kind]


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-8b", "llama-3-70b"])
def test_a_block_of_a_real_llama_keeps_the_closed_form(name: str) -> None:
    a = read_model(real(name).model).architecture
    n, h, kv = 4096, a.hidden, a.kv_heads * a.head_dim
    kept = 20 * n * h + 4 * n * kv + 8 * n * a.ffn + 4 * n * a.heads + 8 * n + 24
    assert per_block(real(name), Kind.ACTIVATIONS) == kept
    if name == "llama-2-7b":
        # torch's saved-tensor hooks on Hugging Face's own block count 766,017,560 B: they count
        # the cosines and sines in every block, which all blocks share.
        assert kept + 2 * 2 * n * a.head_dim == 766_017_560


def test_a_recomputed_block_keeps_its_input_and_is_alive_alone_in_backward() -> None:
    """Inputs of all blocks, and one block's saved set: the second term is often forgotten."""
    layers, n, h, f, heads, kv = 6, 96, 64, 176, 4, 32
    recipe = make_recipe(
        config={**CONFIGS["llama"], "num_hidden_layers": layers}, **BF16, recompute_blocks=layers
    )
    assert per_block(recipe, Kind.ACTIVATIONS) == 2 * n * h
    block = 20 * n * h + 4 * n * kv + 8 * n * f + 4 * n * heads + 8 * n + 24
    found = most_alive(trace(recipe, H100), Kind.ACTIVATIONS, Phase.BACKWARD)
    rotary = 2 * 2 * n * (h // heads)
    kept = rotary + 2 * n * h * layers
    assert kept + block - 2 * n * h <= found <= kept + block  # its own output is not remade


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("bf16-mixed", 4)])
def test_foreach_holds_one_more_state_and_loop_three_of_the_largest(precision, size) -> None:
    base = with_runs(real("llama-3.1-8b", precision=precision, sequence_length=128), [2])
    base = replace(base, base_format="bf16" if size == 2 else "fp32")
    weights = [prod(w.shape) for w in read_model(base.model).weights]

    def temporaries(implementation: str) -> int:
        optimizer = replace(base.optimizer, implementation=implementation, clip_norm=0.0)
        ledger = trace(replace(base, optimizer=optimizer), H100).ledger
        return ledger.by_kind(Phase.OPTIMIZER_STEP).get(Kind.TEMPORARY, 0)

    alone = temporaries("fused")
    assert alone == 4  # the loss, which the loop reads later
    assert temporaries("foreach") - alone == size * sum(weights)
    before = [0, *weights]  # the denominator of the weight before is still named
    largest = max(b + 2 * w for b, w in zip(before, weights, strict=False))
    assert temporaries("loop") - alone == size * largest
