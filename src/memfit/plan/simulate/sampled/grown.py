"""transformers' `generate` and passes that score tokens, without data: what each call holds.

The cache grows by concatenation, so that the longest decoding step is the last one; where layers
slide over a window, the first step still holds what the prompt left of them.

Source: transformers 5.24 (generation/utils.py: _sample, _prefill; generation/logits_process.py),
torch 2.13 (ATen/native/Distributions.cpp: multinomial of one sample).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from memfit import meta
from memfit.core.system.collector import without_collecting
from memfit.families.capabilities.kv_cache import layer_caches
from memfit.families.shared.forward import Forward, Weights
from memfit.families.shared.masks import make_masks
from memfit.meta import Tensor
from memfit.meta.attending.grown import Grown, leave
from memfit.meta.elementwise import like
from memfit.plan.simulate.blocks import Simulation
from memfit.plan.simulate.setting import Batch, Recording, Setting
from memfit.records import Record

OWNER = "rollout"  # of what is alive beside the model's own
WARPERS = ("penalty", "temperature", "top_k", "top_p", "min_p")  # in the order in which they run


class Generating(Protocol):
    """What a framework's program does behind the backbone when it samples and scores."""

    def __hash__(self) -> int:
        """Of its content."""

    def logits(self, forward: Forward, weights: Weights, hidden: Tensor) -> Tensor:
        """The head's, as the class returns them."""

    def outputs(self, forward: Forward, weights: Weights, hidden: Tensor) -> list[Tensor]:
        """Numbers of each token."""


class Generation(Record, frozen=True, kw_only=True):
    """What sizes one call of `generate`."""

    rows: int
    prompt: int  # tokens
    completion: int
    padded: bool  # whether prompts differ in length
    widens: bool  # whether logits come back in fp32
    warpers: tuple[str, ...] = ()  # of `WARPERS`

    @property
    def last(self) -> int:
        """Tokens before the last decoding step's own; 0 where the prompt's call is all."""
        return self.prompt + self.completion - 2 if self.completion > 1 else 0


def record_generation(setting: Setting, generation: Generation, dtype: str) -> Recording:
    """Passes of the prompt's call, of the first decoding step and of the last, if there are any.

    dtype: of keys and values.
    """
    with without_collecting():
        return _Calls(setting, generation, dtype).record()


def cached_sizes(setting: Setting, layers: int, generation: Generation, before: int) -> list[int]:
    """Elements of each tensor of a cache that saw `before` tokens; layers: of the whole model."""
    a = replace(setting.architecture, layers=layers)
    sizes = []
    for layer in layer_caches(a):
        tokens = _stored(layer.window, before, generation.prompt)
        sizes += [generation.rows * layer.heads * tokens * n for n in (layer.key, layer.value)]
    return sizes


def _stored(window: int, before: int, prompt: int) -> int:
    """Tokens that the storage of a layer holds: a prompt's is whole, whatever is seen of it."""
    return before if not window or before == prompt else min(before, window)


class _Calls:
    """Calls of the model on one meter."""

    def __init__(self, setting: Setting, generation: Generation, dtype: str) -> None:
        batch = Batch(rows=generation.rows, tokens=1, documents=None)
        self.simulation = Simulation(setting, batch, unrolled=False)
        self.setting, self.generation, self.dtype = setting, generation, dtype
        self.meter = self.simulation.meter

    def record(self) -> Recording:
        g, passes = self.generation, []
        with self.meter.without_graph():
            self._call(g.prompt, 0)
            passes.append(self.simulation.marks)
            for before in dict.fromkeys([g.prompt, g.last] if g.last else []):
                self._call(1, before)
                passes.append(self.simulation.marks)
        return Recording(self.meter, passes, len(self.meter.events), [], 0)

    def _leave(self, before: int) -> list[tuple[Tensor, Tensor]]:
        """The cache of each simulated block."""
        a, rows, made = self.setting.architecture, self.generation.rows, []
        one = layer_caches(replace(a, layers=1, layer_kinds=()))[0]
        for _, block in self.simulation.blocks if before else ():
            tokens = _stored(a.window(block.kind), before, self.generation.prompt)
            shape = rows, one.heads, tokens
            made.append(leave(self.meter, shape, (one.key, one.value), self.dtype))
        return made

    def _call(self, tokens: int, before: int) -> None:
        meter, setting, simulation = self.meter, self.setting, self.simulation
        rows, simulation.marks = self.generation.rows, []
        now = Grown(meter, before, self._leave(before))
        simulation.mark("embedding", "embedding")
        chances = self._chances(rows) if before else []
        meter.casts = {} if setting.precision.caches else None
        ids = meta.empty(meter, (rows, tokens), "int64")
        places = meta.empty(meter, (rows, tokens), "int64")
        with meter.with_autocast(setting.precision.autocast):
            forward = self._forward(ids, places, now, before)
            hidden = simulation.find_hidden(forward, [])
            simulation.mark("loss", OWNER)
            last = meta.narrow(hidden, 1, tokens - 1, 1)
            del hidden
            program: Generating = simulation.program  # type: ignore[assignment]
            outputs = [program.logits(forward, simulation.outside, last)]
            del last, forward
        simulation._forget_casts(simulation.blocks, "loss")
        if self.generation.widens:
            outputs.append(meta.cast(outputs.pop(), "float32"))
        self._sample(outputs, chances)
        del ids, places, now, chances
        simulation.mark("end", "")

    def _forward(self, ids: Tensor, places: Tensor, now: Grown, before: int) -> Forward:
        setting, simulation = self.setting, self.simulation
        masks = None
        if setting.attention.masking is not None:
            masking = replace(
                setting.attention.masking, padded=self.generation.padded, laid_out=False
            )
            masks = make_masks(
                masking, setting.architecture, self.meter, (ids.shape[0], ids.shape[1]),
                simulation._embedded(), before=before,
            )  # fmt: skip
        return Forward(
            architecture=setting.architecture, meter=self.meter, kernel=setting.attention.kernel,
            input_ids=ids, position_ids=places, documents=None,
            adapter_dropout=setting.adapter_dropout, quantised=setting.precision.quantised,
            slots=now, masks=masks,
        )  # fmt: skip

    def _chances(self, rows: int) -> list[Tensor]:
        """What variables of the step before hold: logits, scores where they differ, chances."""
        shape = rows, self.setting.architecture.vocab
        count = 2 + bool(self.generation.warpers)
        return [meta.empty(self.meter, shape, "float32") for _ in range(count)]

    def _sample(self, outputs: list[Tensor], before: list[Tensor]) -> None:
        """(rows, 1, vocab) -> a token a row."""
        rows, _, vocab = outputs[0].shape
        logits = meta.empty(self.meter, (rows, vocab), "float32")
        if before:
            del before[0]
        scores = [logits]
        for name in self.generation.warpers:
            scores.append(_WARP[name](scores[-1]))
            del scores[1:-1]
        if len(before) > 1:
            del before[0]
        chances = like(scores[-1])
        before.clear()
        exponentials = like(chances)
        tokens = meta.empty(self.meter, (rows, 1), "int64")
        del exponentials, tokens, chances, scores, logits
        outputs.clear()


def _penalise(scores: Tensor) -> Tensor:
    """Those of tokens that a row has are gathered, changed and scattered into a copy."""
    return like(scores)


def _keep_most(scores: Tensor) -> Tensor:
    removed = meta.empty(scores.meter, scores.shape, "bool")
    left = like(scores)
    del removed
    return left


def _keep_share(scores: Tensor) -> Tensor:
    meter, shape = scores.meter, scores.shape
    ordered = like(scores)
    places = meta.empty(meter, shape, "int64")
    chances = like(ordered)
    summed = like(chances)
    del chances
    removed = meta.empty(meter, shape, "bool")
    del summed
    scattered = meta.empty(meter, shape, "bool")
    left = like(scores)
    del ordered, places, removed, scattered
    return left


def _keep_likely(scores: Tensor) -> Tensor:
    chances = like(scores)
    removed = meta.empty(scores.meter, scores.shape, "bool")
    left = like(scores)
    del chances, removed
    return left


_WARP: dict[str, Callable[[Tensor], Tensor]] = {
    "penalty": _penalise, "temperature": like, "top_k": _keep_most, "top_p": _keep_share,
    "min_p": _keep_likely,
}  # fmt: skip


def record_scoring(setting: Setting, batch: Batch, answered: int, *, of: str) -> Recording:
    """A pass without a gradient over rows whose last `answered` tokens are scored.

    of: the `policy`, or the `reference`.
    """
    with without_collecting():
        simulation = Simulation(setting, batch, unrolled=False)
        with simulation.meter.without_graph():
            _score(simulation, answered, of)
        stop = len(simulation.meter.events)
        return Recording(simulation.meter, [simulation.marks], stop, [], 0)


def _score(simulation: Simulation, answered: int, of: str) -> None:
    meter, setting, batch = simulation.meter, simulation.setting, simulation.batch
    inputs = simulation.make_batch()
    forward, _ = simulation.make_forward(inputs)
    simulation.marks = []
    simulation.mark("embedding", "embedding")
    labels = meta.empty(meter, (batch.rows, batch.tokens), "int64")
    program: Generating = simulation.program  # type: ignore[assignment]
    meter.casts = {} if setting.precision.caches else None
    outside, blocks = simulation.outside, simulation.blocks
    with meter.with_autocast(setting.precision.autocast):
        if of == "reference":
            blocks, meter.casts_frozen = simulation.base, bool(setting.loss.second)
            outside, hidden = simulation.find_reference(forward)
        else:
            hidden = simulation.find_hidden(forward, [])
        simulation.mark("loss", "loss")
        outputs = program.outputs(forward, outside, hidden)
        del hidden
    simulation._forget_casts(blocks, "loss")
    whole = meta.empty(meter, (batch.rows, answered), "float32")
    del outputs, labels, whole, inputs, forward
    simulation.mark("end", "")
