"""Predicted memory of one optimizer step: closed form over the segments of a small model.

`plan.blocks` simulates the first, a middle and the last of each run of equal blocks with sizes
only; here the segments are laid end to end for the whole depth, phase by phase, on top of what is
always there. A phase's peak is a maximum over instants, never a sum of maxima.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.core.system.collector import without_collecting
from memfit.core.units import show_gib
from memfit.families.capabilities.compiled import keep_as_lean
from memfit.meta.distributed.ring import Ring
from memfit.meta.layers.quantised import Quantised
from memfit.meta.workspace import find_grid, product_workspace
from memfit.parallelism.pipeline import shown_micro_batches, stage_model
from memfit.parallelism.shards import cut_model, fullest_rank
from memfit.plan.memory.explain import explain
from memfit.plan.memory.rollouts import (
    CALLS,
    OF_CALLS,
    SCORES,
    Calls,
    cache_of,
    explain_calls,
    inputs_of_answers,
    inputs_of_rewards,
    inputs_of_values,
    key_dtype,
    rest_of_answers,
    rest_of_rewards,
    rest_of_rounds,
    rest_of_update,
    scored_phases,
    walk_calls,
    walk_forward,
)
from memfit.plan.memory.saving import highest_gather
from memfit.plan.simulate.blocks import (
    AFTER_PRODUCT,
    ROUNDING,
    Part,
    Parts,
    Simulation,
    find_runs,
    repeats,
    shorten,
    split_rows,
)
from memfit.plan.simulate.closed_form import Answers, find_answers
from memfit.plan.simulate.fsdp_units import find_sharding
from memfit.plan.simulate.sampled.rollout import (
    Slots,
    find_admissions,
    find_limit,
    record_rollout,
)
from memfit.plan.simulate.sampled.turning import explain_turning, find_turning
from memfit.plan.simulate.segments import Level, Passes, Segment, cut, expand
from memfit.plan.simulate.setting import (
    Answering,
    Attention,
    Batch,
    Loss,
    MicroBatches,
    Precision,
    Repeat,
    Row,
    Run,
    Setting,
)
from memfit.plan.simulate.shared_products import SharedProducts
from memfit.plan.simulate.stages import find_stages, fullest_places, held_blocks
from memfit.plan.simulate.updates import Around, around_micro_batches, hold
from memfit.records.hardware import Device
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.model import DTYPE_BYTES, Model
from memfit.records.recipe import Parallel, Recipe
from memfit.records.reinforcement import loss_temperature, scores_old


def predict_memory(model: Model, recipe: Recipe, device: Device, rank: int | None = None) -> Ledger:
    """Bytes alive at the peak of each phase of a step, by kind and component, and why.

    model: after the adapter (`find_adapter(recipe).adapt`). On a CPU, live tensors; on CUDA, the
    caching allocator's blocks, with what its kernels are known to allocate inside.
    rank: of the recipe's mesh; None is the fullest.
    Raises InvalidRequest when the optimizer has no such implementation.
    """
    rank = find_fullest(model, recipe, device)[0] if rank is None else rank
    peaks = _peaks(model, recipe, device, rank)
    model = stage_model(model, recipe.parallel, rank)
    explained: dict[tuple[Part, int], str] = {}  # the same parts stand in many phases
    calls = explain_calls(model, recipe) if recipe.samples else {}
    entries = []
    for phase in Phase:
        for part, nbytes in sorted(peaks.get(phase, {}).items()):
            if not nbytes:
                continue
            kind, owner = part
            if (part, nbytes) not in explained:
                explained[part, nbytes] = explain(kind, owner, nbytes, model, recipe)
            because = explained[part, nbytes]
            if phase in calls and kind in OF_CALLS:
                because = calls[phase][kind is Kind.KV_CACHE]
            if phase in calls and kind is Kind.PARAMETERS:
                because += explain_turning(nbytes - peaks[Phase.FIRST_STEP].get(part, 0))
            entries.append(
                Entry(kind=kind, phase=phase, owner=owner, nbytes=nbytes, because=because)
            )
    return Ledger(entries=tuple(entries))


def with_blocks(ledger: Ledger, allocated: Mapping[Phase, int]) -> Ledger:
    """The ledger with what blocks are larger than their tensors as the allocator's replay had it.

    allocated: the highest sum of blocks in each phase. A phase whose tensors are more than the
    replay had is left as it was: not all of its instants are replayed.
    """
    entries: list[Entry] = []
    for phase in ledger.phases:
        here = ledger.at(phase)
        tensors = [e for e in here if (e.kind, e.owner) != ROUNDING]
        rest = allocated.get(phase, 0) - sum(e.nbytes for e in tensors)
        if rest < 0:
            entries += here
            continue
        entries += tensors
        if rest:
            kind, owner = ROUNDING
            because = "blocks are multiples of 512 B and keep remainders of up to 1 MiB"
            entry = Entry(kind=kind, phase=phase, owner=owner, nbytes=rest, because=because)
            entries.append(entry)
    return Ledger(entries=tuple(entries))


def predict_peak(model: Model, recipe: Recipe, device: Device, rank: int | None = None) -> int:
    """The ledger's peak alone, in bytes: what a search asks of most of its candidates."""
    if rank is None:
        return max(peak for _, peak in predict_stages(model, recipe, device))
    return max(sum(parts.values()) for parts in _peaks(model, recipe, device, rank).values())


def predict_rollout(model: Model, recipe: Recipe, device: Device) -> int:
    """The peak of sampling, which no knob of an update changes; 0 where nothing is sampled."""
    if not recipe.samples:
        return 0
    plain = replace(
        recipe, micro_batch=1, accumulation=recipe.own_rows, recompute_blocks=0,
        selective_blocks=0, loss="plain", loss_chunk=0, steps=0, seed=0,
    )  # fmt: skip
    return _peak_of_calls(model, plain, device)


@lru_cache(maxsize=64)
def _peak_of_calls(model: Model, recipe: Recipe, device: Device) -> int:
    peaks = _peaks(model, recipe, device, 0)
    return max(sum(parts.values()) for phase, parts in peaks.items() if phase in CALLS)


def predict_update(model: Model, recipe: Recipe, device: Device) -> int:
    """The peak of the other phases of an iteration."""
    peaks = _peaks(model, recipe, device, 0)
    return max(sum(parts.values()) for phase, parts in peaks.items() if phase not in CALLS)


def predict_stages(model: Model, recipe: Recipe, device: Device) -> Iterator[tuple[int, int]]:
    """Each rank that may be the fullest, with its peak: one a stage, the first stage's first."""
    parallel = recipe.parallel
    within = fullest_rank(model, parallel)[0] if parallel.world > 1 else 0
    each = parallel.world // parallel.pp
    places = fullest_places(recipe, model.architecture.layers) if parallel.pp > 1 else (0,)
    for place in places:
        rank = within + place * each
        yield rank, predict_peak(model, recipe, device, rank)


def find_fullest(model: Model, recipe: Recipe, device: Device) -> tuple[int, str]:
    """The rank that needs the most memory, and why; of stages, by the prediction of each.

    The first stage has the most micro-batches in flight and the embedding, the last one the logits
    and the head: which of them is the fullest depends on the recipe.
    """
    parallel = recipe.parallel
    if parallel.world == 1:
        return 0, ""
    within, why = fullest_rank(model, parallel)
    if parallel.pp == 1:
        return within, why
    peaks = dict(predict_stages(model, recipe, device))
    ranks = list(peaks)
    fullest = max(ranks, key=lambda rank: peaks[rank])
    end, other = ("first", ranks[0]) if fullest == ranks[-1] else ("last", ranks[-1])
    return fullest, (
        f"rank {fullest} of {parallel.world}, the fullest: stage {parallel.stage_place(fullest)} of"
        f" {parallel.pp} is predicted to need {show_gib(peaks[fullest])}, the {end} one"
        f" {show_gib(peaks[other])}"
    )


def _peaks(model: Model, recipe: Recipe, device: Device, rank: int) -> dict[Phase, Parts]:
    outline = find_outline(model, recipe, device, rank)
    step = _Step(outline, recipe, device)
    step.run()
    return {phase: parts for phase, (_, parts) in step.level.peaks.items()}


def describe(
    model: Model, recipe: Recipe, device: Device, rank: int = 0, *, shortened: bool = True
) -> tuple[Setting, list[Repeat]]:
    """What to simulate, and how often each simulated block stands in the model.

    shortened: False simulates every block, which the counts then do not speak of.
    """
    parallel = recipe.parallel
    tp, pp = parallel.tp, parallel.pp
    model = cut_model(model, recipe.parallel)
    outside, blocks = split_rows(
        model, recipe.recompute_blocks, recipe.selective_blocks,
        offloads=recipe.offload == "activations",
    )  # fmt: skip
    runs: tuple[Run, ...] = find_runs(blocks)
    stages = None
    if pp > 1:
        held = held_blocks(recipe, len(blocks), rank)
        pieces = [find_runs(blocks[i] for i in part) for part in held]
        runs = tuple(run for piece in pieces for run in piece)
        simulated = [len(repeats(p)) for p in pieces] if shortened else [len(p) for p in held]
        stages = find_stages(recipe, rank, simulated)
        outside, _ = split_rows(stage_model(model, recipe.parallel, rank), 0)
    cuda = not device.is_cpu
    has_loss = stages is None or stages.has_loss  # one simulation then serves every chunk
    setting = Setting(
        architecture=replace(model.architecture, layers=0, vocab=model.architecture.vocab // tp),
        outside=outside,
        runs=shorten(runs) if shortened else runs,
        attention=Attention(
            kernel=recipe.attention,
            ring=Ring(parallel.cp, parallel.place(rank)) if parallel.cp > 1 else None,
        ),
        precision=Precision(
            autocast=recipe.autocast and recipe.parallel.world == 1,
            compute=recipe.compute_dtype,
            scaled=recipe.scaled,
            narrow=recipe.precision == "fp8-mixed",
            qat=recipe.qat,
            quantised=Quantised.of(recipe),
        ),
        loss=Loss(
            chunk=recipe.loss_chunk if recipe.loss == "chunked" and has_loss else 0,
            rows="pairs" if recipe.prefers else "rated" if recipe.rates else "",
            mismatches=recipe.mismatches,
            learns=recipe.learns,
            precomputed=recipe.preference.reference == "precomputed",
            answers=describe_answers(recipe),
            references=recipe.references,
        ),
        cuda=cuda,
        grid=find_grid(device),
        adapter_dropout=recipe.lora.dropout > 0,
        lean=keep_as_lean(model.architecture, recipe),
        regularisation=recipe.regularisation,
        micro_batches=find_micro_batches(recipe),
        in_backward=recipe.optimizer if recipe.optimizer.in_backward else None,
        sharding=find_sharding(recipe, rank),
        stages=stages,
        program=SharedProducts(tp=tp) if tp > 1 else None,
    )
    return setting, repeats(runs)


def find_micro_batches(recipe: Recipe) -> MicroBatches:
    """How many micro-batches are simulated, and whether they are of one step."""
    if recipe.optimizer.in_backward:
        return "of_two_steps"
    return "of_one_step" if recipe.accumulation > 1 else "one"


def describe_answers(recipe: Recipe) -> Answering | None:
    """What a micro-batch of sampled answers has; None where nothing is sampled."""
    if not recipe.samples:
        return None
    return Answering(
        old=recipe.policy.num_iterations > 1
        or (not recipe.values and scores_old(recipe.objective, recipe.policy)),
        reference=recipe.policy.beta > 0 and not recipe.values,
        heated=loss_temperature(recipe.objective, recipe.rollout) != 1.0,
        values=recipe.values,
    )


def waiting_on_host(model: Model, recipe: Recipe, device: Device) -> int:
    """Bytes of one micro-batch's activations that wait in host memory as its loss begins; model:
    after its adapter."""
    if recipe.offload != "activations":
        return 0
    setting, counts = describe(model, recipe, device)
    with without_collecting():
        simulation = Simulation(setting, worst_batch(recipe), unrolled=False)
        simulation.run()
    return sum(simulation.waiting[index] * block.times for index, block in enumerate(counts))


def worst_batch(recipe: Recipe) -> Batch:
    """The micro-batch that needs the most memory of all that the recipe allows: full rows."""
    documents = replace(recipe, micro_batch=1).worst_documents  # the same in every row
    return Batch(
        rows=recipe.micro_batch,
        tokens=recipe.own_row,
        documents=None if documents is None else documents[0],
    )


@lru_cache(maxsize=64)
def simulate_calls(setting: Setting, slots: Slots, dtype: str) -> Calls:
    """Cached: of recipes that differ in their updates alone."""
    passes = cut(record_rollout(setting, slots, dtype))
    first = len(find_admissions(slots))
    return Calls(passes[:first], passes[first:])


class Outline:
    """All of a recipe's step that its rows and tokens do not change."""

    def __init__(self, model: Model, recipe: Recipe, device: Device, rank: int = 0) -> None:
        self.model = model
        self.setting, self.counts = describe(model, recipe, device, rank)
        self.around = _around(model, _without_recompute(recipe), device, rank)
        self.answers = find_answers(self.setting)
        self.evaluation = find_answers(without_history(self.setting))
        self.saving = _saving(model, _without_recompute(recipe), device, rank)

    def passes(self, recipe: Recipe) -> list[Passes]:
        """The segments of the first micro-batch, and of a later one where there is any."""
        return self._ask(self.answers, recipe)

    def evaluating(self, recipe: Recipe) -> list[Passes]:
        """The segments of an evaluated micro-batch, as large as a trained one."""
        return self._ask(self.evaluation, recipe)

    def slots(self, recipe: Recipe) -> Slots:
        """What sizes a rollout's calls."""
        return Slots.of(recipe, find_limit(self.model.architecture))

    def calls(self, recipe: Recipe) -> Calls:
        """Prompts that are read, and a decoding step."""
        setting = without_history(self.setting)
        return simulate_calls(setting, self.slots(recipe), key_dtype(self.model, recipe))

    def scoring(self, recipe: Recipe, phase: Phase) -> Passes:
        """A forward that scores the tokens of a micro-batch."""
        setting = without_history(self.setting).scoring(SCORES[phase])
        return self._ask(find_answers(setting), recipe)[0]

    def _ask(self, answers: Answers, recipe: Recipe) -> list[Passes]:
        def general(rows: int, tokens: int) -> Batch:
            whole = replace(recipe, micro_batch=rows, sequence_length=tokens)
            return worst_batch(replace(whole, parallel=Parallel()))  # tokens are a rank's own

        return answers.passes(worst_batch(recipe), general)


def without_history(setting: Setting) -> Setting:
    """The same forward and loss under `no_grad`: nothing is saved, recomputed or dropped out."""

    def frozen(rows: Iterable[Row]) -> tuple[Row, ...]:
        return tuple(replace(row, trainable=False) for row in rows)

    runs = tuple(
        replace(
            run,
            cycle=tuple(
                replace(
                    b,
                    rows=frozen(b.rows),
                    recomputed=False,
                    selective=False,
                    offloads=False,
                    first_offloaded=False,
                )
                for b in run.cycle
            ),
        )
        for run in setting.runs
    )
    return replace(
        setting,
        outside=frozen(setting.outside),
        runs=runs,
        adapter_dropout=False,
        in_backward=None,
        micro_batches="evaluated",  # after each of them the trainer frees what is gathered
        stages=None if setting.stages is None else setting.stages.evaluating(),
    )


def find_outline(model: Model, recipe: Recipe, device: Device, rank: int | None = None) -> Outline:
    """The outline of a recipe, made once for all of its shapes; rank: None is the fullest."""
    if rank is None:
        rank = find_fullest(model, recipe, device)[0]
    return _outline(model, without_shape(recipe), device, rank)


def without_shape(recipe: Recipe) -> Recipe:
    """The same for all rows, tokens and steps."""
    more = shown_micro_batches(recipe, 2)
    return replace(recipe, micro_batch=1, sequence_length=1, accumulation=more, steps=0, seed=0)


def _without_recompute(recipe: Recipe) -> Recipe:
    """The same however many blocks are recomputed, which nothing around the micro-batches reads."""
    return replace(recipe, recompute_blocks=0, selective_blocks=0)


@lru_cache(maxsize=256)
def _around(model: Model, recipe: Recipe, device: Device, rank: int) -> Around:
    """Cached: a search asks for many numbers of recomputed blocks, and sums over all weights."""
    return around_micro_batches(model, recipe, device, rank)


@lru_cache(maxsize=256)
def _saving(model: Model, recipe: Recipe, device: Device, rank: int) -> Parts:
    """While the model's files are gathered; cached for the same reason."""
    writes, away = device.is_cpu and rank == 0, recipe.offload == "parameters"
    # shards that rest on the host are gathered there
    gathered = [] if away else highest_gather(model, recipe, rank, copies=writes)
    return hold((Kind.TEMPORARY, "model"), gathered, device)


@lru_cache(maxsize=256)
def _outline(model: Model, recipe: Recipe, device: Device, rank: int) -> Outline:
    return Outline(model, recipe, device, rank)


class _Step:
    """Two optimizer steps, laid out instant by instant."""

    def __init__(self, outline: Outline, recipe: Recipe, device: Device) -> None:
        self.outline, self.recipe, self.device = outline, recipe, device
        self.passes = outline.passes(recipe)
        self.level = Level()
        self._cublas: Parts = {}
        if not device.is_cpu:
            self._cublas[Kind.WORKSPACE, "cublas"] = product_workspace(device)

    def run(self) -> None:
        """The peak of each phase and its parts, into `level.peaks`."""
        level, around = self.level, self.outline.around
        level.add(around.loaded)
        starting = find_adapter(self.recipe).loading(self.outline.model)
        if not starting:
            level.note(Phase.LOAD)
        for top in (around.reading, *around.filling):
            level.note(Phase.LOAD, top)
        if around.padded is not around.loaded:
            level.add(around.loaded, -1)
            level.add(around.padded)
        # the forward's, or of what loading computes; autograd's thread takes its own
        level.add(self._cublas)
        if starting:
            level.note(Phase.LOAD, hold((Kind.TEMPORARY, "blocks"), [starting], self.device))
        rests = {}
        if self.recipe.samples:
            rests = rest_of_update(self.recipe, self.device)
        level.add(rests)
        if self.recipe.optimizer.in_backward:  # states appear in the first backward alone
            half = len(self.passes) // 2  # the first step's
            self.passes, following = self.passes[:half], self.passes[half:]
        first = Phase.FIRST_STEP
        self._update((first, first, first, first, first), around.first, rests)
        if self.recipe.optimizer.in_backward:
            self.passes = following
        self._last_update((first, first, first, first, first), rests)
        if self.recipe.samples:
            level.add(rests, -1)
            self._roll_out()
            level.add(rests)
        later = Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP
        self._update(later, around.later, rests)
        self._last_update(later, rests)
        level.add(rests, -1)
        level.add(self._scaler())
        held = dict(level.live)
        if not self.recipe.samples:  # held-out prompts are answered within a rollout's bounds
            self._evaluate()
        level.reset(held)
        # the tensors of a checkpoint are there already; those of the model's files are gathered
        level.note(Phase.SAVE, self.outline.saving)

    def _update(self, phases: tuple[Phase, ...], around: Segment, rests: Parts) -> None:
        """All micro-batches, and the optimizer's update. rests: of a rollout's answers."""
        *within, last = phases
        self._scale_loss()
        self._micro_batches(*within)
        self.level.walk(last, [around], 1)
        self._release_gradients()
        self.level.add({p: n for p, n in rests.items() if p[0] is Kind.TEMPORARY})

    def _last_update(self, phases: tuple[Phase, ...], rests: Parts) -> None:
        """The last of several updates with one rollout; nothing is left of the others."""
        if self.recipe.samples and self.recipe.policy.num_iterations > 1:
            self._update(phases, self.outline.around.later, rests)

    def _roll_out(self) -> None:
        """Answers are sampled, and their tokens scored."""
        level, outline, recipe = self.level, self.outline, self.recipe
        slots, dtype = outline.slots(recipe), key_dtype(outline.model, recipe)
        cache = cache_of(outline.model.architecture, slots, dtype, self.device)
        held = dict(level.live)
        level.add(rest_of_rounds(recipe, self.device))
        turning = find_turning(outline.model, slots, self.device)
        walk_calls(level, cache, outline.calls(recipe), outline.counts, turning)
        level.reset(held)
        if recipe.scored_by_adapter:
            held = dict(level.live)
            level.add(rest_of_rewards(recipe, self.device))
            level.note(Phase.REWARD)
            level.add(inputs_of_rewards(recipe, self.device))
            walk_forward(level, Phase.REWARD, outline.scoring(recipe, Phase.REWARD), outline.counts)
            level.reset(held)
        for number, phase in enumerate(scored_phases(recipe), start=1):
            held = dict(level.live)
            level.add(rest_of_answers(recipe, self.device, number))
            level.note(phase)
            level.add(self._ids())
            walk_forward(level, phase, outline.scoring(recipe, phase), outline.counts)
            level.reset(held)

    def _ids(self) -> Parts:
        """Ids and labels of a micro-batch whose tokens are scored."""
        if self.device.is_cpu:
            return {}
        nbytes = self.recipe.tokens * DTYPE_BYTES["int64"]
        return hold((Kind.INPUT, "batch"), [nbytes, nbytes], self.device)

    def _evaluate(self) -> None:
        """Two held-out micro-batches: at the second, the first one's results are there, and what
        it gathered is not."""
        level, inputs = self.level, self._inputs()
        passes_ = self.outline.evaluating(self.recipe)
        results = {(Kind.TEMPORARY, "loss"): DTYPE_BYTES["float32"] + DTYPE_BYTES["int64"]}
        for _ in range(2):
            held = dict(level.live)
            level.add(inputs)
            for one in passes_:
                if self.outline.setting.stages is not None:
                    self._walk(one, Phase.EVALUATE, Phase.EVALUATE, Phase.EVALUATE)
                    continue
                for segments in (one.forward, one.loss):
                    for stretch, times in expand(segments, self.outline.counts):
                        level.walk(Phase.EVALUATE, stretch, times)
            level.reset(held)
            level.add(results)  # the loss, and of how many tokens

    def _inputs(self) -> Parts:
        if self.recipe.samples:
            return inputs_of_answers(self.recipe, self.device)
        row = self.recipe.own_row * DTYPE_BYTES["int64"]
        each = [self.recipe.micro_batch * row] * (3 if self.recipe.packing else 2)
        if self.recipe.learns == "conversations":
            each.append(self.recipe.micro_batch * row)
        if self.recipe.preference.reference == "precomputed":
            each.append(self.recipe.micro_batch * DTYPE_BYTES["float32"])
        if self.recipe.mismatches:  # ids, labels and reference of answers to other prompts
            each *= 2
        if self.recipe.parallel.cp > 1:
            each.append(row)  # positions
        if self.recipe.rates:
            each.append(self.recipe.micro_batch)  # whether each answer is desirable
        return hold((Kind.INPUT, "batch"), each, self.device)

    def _stages(self, forward: Phase, loss: Phase, backward: Phase, more: Phase) -> None:
        """As `train.pipeline.Telling` tells phases: from the second forward on all is `more`."""
        level, stages = self.level, self.outline.setting.stages
        assert stages is not None
        inputs = self._inputs()
        level.add(inputs, stages.micro_batches)
        begin, *pieces, end = self.passes
        self._walk(begin, forward, forward, forward)
        for piece, passes in zip(stages.order, pieces, strict=True):
            if piece.pass_ == "F" and piece.micro_batch == 1:
                forward = loss = backward = more
            self._walk(passes, forward, loss, backward)
        self._walk(end, more, more, more)
        level.add(inputs, -stages.micro_batches)

    def _walk(self, passes: Passes, forward: Phase, loss: Phase, backward: Phase) -> None:
        """One piece of a stage."""
        level = self.level
        for phase, segments in (
            (forward, passes.forward), (loss, passes.loss), (backward, passes.backward)
        ):  # fmt: skip
            for stretch, times in expand(segments, self.outline.counts):
                if stretch[0].name.endswith(AFTER_PRODUCT) and phase is Phase.FIRST_STEP:
                    level.add(self._cublas)
                    self._cublas = {}
                level.walk(phase, stretch, times)

    def _micro_batches(self, forward: Phase, loss: Phase, backward: Phase, more: Phase) -> None:
        if self.outline.setting.stages is not None:
            self._stages(forward, loss, backward, more)
            return
        level, counts = self.level, self.outline.counts
        inputs = self._inputs()
        level.add(inputs)
        first, *later = self.passes
        for phase, segments in (
            (forward, first.forward), (loss, first.loss), (backward, first.backward)
        ):  # fmt: skip
            for stretch, times in expand(segments, counts):
                if stretch[0].name.endswith(AFTER_PRODUCT) and phase is Phase.FIRST_STEP:
                    level.add(self._cublas)
                    self._cublas = {}
                level.walk(phase, stretch, times)
        level.note(backward)
        policies = 1 + (self.recipe.accumulation > 1)
        for number, one in enumerate(later, start=1):
            if self.recipe.values and number == policies:
                level.add(inputs, -1)
                inputs = inputs_of_values(self.recipe, self.device)
                level.add(inputs)
            for segments in (one.forward, one.loss, one.backward):
                for stretch, times in expand(segments, counts):
                    level.walk(more, stretch, times)
            level.note(more)
        level.add(inputs, -1)

    def _scaler(self) -> Parts:
        """fp16: the scaler's two numbers."""
        scalars = 2 * DTYPE_BYTES["float32"] if self.recipe.scaled else 0
        return {(Kind.TEMPORARY, "loss"): scalars} if scalars else {}

    def _scale_loss(self) -> None:
        """fp16: the scaler's two numbers, and the scale that this step uses."""
        if self.recipe.scaled:
            self.level.add({(Kind.TEMPORARY, "loss"): 3 * DTYPE_BYTES["float32"]})

    def _release_gradients(self) -> None:
        level = self.level
        gone = (Kind.GRADIENTS, Kind.TEMPORARY)  # and the 0-dim results of the first step
        level.add({p: -n for p, n in level.live.items() if p[0] in gone})
        if not self.device.is_cpu:
            level.add({ROUNDING: -self.outline.around.rounded})
