"""The trainer's own build and step, run on fake tensors under a recorder."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.certify.repeating.alike import Unlike
from memfit.certify.tracing.fake_device import device_type, fake_device, set_while
from memfit.certify.tracing.fast_fake import FastFakeMode
from memfit.certify.tracing.outliers import outlier_bounds, outlier_rules
from memfit.certify.tracing.recorder import Recorder, Trace, make_recorder
from memfit.certify.tracing.runs import find_runs, with_runs
from memfit.core.errors import Error, InvalidRequest, NotCertified
from memfit.core.units import show_bytes
from memfit.families import family_of, read_model
from memfit.families.capabilities.compiled import compiled_bounds
from memfit.meta.attending.kernels import heads_of
from memfit.optimizers import find_optimizer
from memfit.optimizers.shared.offloaded import COPIES, host_bytes
from memfit.parallelism.pipeline import shown_micro_batches
from memfit.parallelism.shards import local_model
from memfit.records.hardware import Device
from memfit.records.ledger import Phase
from memfit.records.recipe import Parallel, Recipe
from memfit.records.shapes import BatchShape, bounds_of
from memfit.train.checkpoint.export import gather_files
from memfit.train.checkpoint.files import checkpoint_tensors, on_host
from memfit.train.generation.products import quick_products
from memfit.train.generation.sampling import sample
from memfit.train.generation.settings import Settings
from memfit.train.measure.live import LiveBytes
from memfit.train.model.attention import check_attention
from memfit.train.model.weights import EmptyWeights, fill_weights
from memfit.train.run.generate import advance, build_generator, fill_generator
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.step import Batch, RatedBatch, evaluate, step

EVALUATED = 2  # evaluation batches: at the second, the first one's results are there
_BUILT: set[str] = set()  # digests of recipes that this process has built once
TRACED_MICRO_BATCHES = 2  # from the second on, all are alike: gradients exist and are added to


def worst_shapes(recipe: Recipe) -> tuple[BatchShape, ...]:
    """The micro-batches that a recipe is held to where no data is named, as `bounds` say.

    All rows at full length; packed ones in the documents of `Recipe.worst_documents`. Data with
    more documents needs more on a GPU, and is certified with its own (`memfit.records.shapes`).
    """
    tokens, documents = recipe.own_row, recipe.worst_documents
    shape = BatchShape(rows=recipe.micro_batch, tokens=tokens, documents=documents)
    return (shape,) * shown_micro_batches(recipe, TRACED_MICRO_BATCHES)


def trace_step(
    recipe: Recipe,
    device: Device,
    batches: Sequence[BatchShape] | None = None,
    steps: int = 2,
    *,
    workspaces: bool = True,
    also: Sequence[BatchShape] = (),
    evaluation: Sequence[BatchShape] = (),
    rank: int = 0,
    recorder: Recorder | None = None,
) -> Trace:
    """A run's instants in this process: load, `steps` optimizer steps, an evaluation, a checkpoint.

    The first step makes the optimizer's state. also: micro-batches each of which a further step
    takes as often as the recipe accumulates. evaluation: held-out micro-batches; none of them takes
    the first of the batches.
    workspaces: count what CUDA kernels allocate inside themselves (`workspace.RULES`).
    rank: of the recipe's mesh; its shards, in a world of `recipe.parallel.world`.
    recorder: what records; None takes one under which every block runs.
    Raises InvalidRequest (the recipe can run nowhere) and NotCertified (or not be traced here).
    """
    shapes = tuple(batches) if batches else worst_shapes(recipe)
    kind = device_type(device)
    recorder = recorder or make_recorder(Recorder, device, workspaces=workspaces)
    weights = weights_of(recipe)
    with traced(recipe, device, recorder, rank):
        repeated = shown_micro_batches(recipe, TRACED_MICRO_BATCHES)
        later = [shapes] * (steps - 1) + [(shape,) * repeated for shape in also]
        _run(recipe, kind, [shapes, *later], recorder, weights, evaluation or shapes[:1], rank)
    bounds = step_bounds(recipe, batches, shapes, kind, workspaces)
    if recipe.offload == "parameters":
        own = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
        nbytes = host_bytes(local_model(own, recipe.parallel, rank), recipe)
        bounds += (f"the host holds {show_bytes(nbytes)} of this rank's shards: not counted",)
    return recorder.trace((*bounds, *bounds_of_weights(recipe, kind, weights)))


def trace_generation(
    recipe: Recipe, device: Device, *, workspaces: bool = True, recorder: Recorder | None = None
) -> Trace:
    """`memfit generate` after the run, which is a process of its own: load and say a full row.

    A prompt of all but one token of a row and the token after it: no prompt and continuation of
    `sequence_length` tokens together holds more, as longer ones never hold less.
    """
    kind = device_type(device)
    recorder = recorder or make_recorder(Recorder, device, workspaces=workspaces)
    weights = weights_of(recipe)
    with traced(recipe, device, recorder):
        recorder.restart_in(Phase.GENERATE)
        _generate(recipe, kind, recorder, weights)
    length = f"a prompt and its continuation of {recipe.sequence_length} tokens together"
    return recorder.trace((length, *bounds_of_weights(recipe, kind, weights)))


@contextmanager
def traced(
    recipe: Recipe, device: Device, recorder: Recorder, rank: int = 0
) -> Iterator[FastFakeMode]:
    """The trainer's code runs on fake tensors meanwhile, and the recorder sees it.

    First once on meta: what building imports must not be imported under FakeTensorMode, where a
    module's constants would be fake for ever, and would be counted.
    """
    import_for(recipe)
    heads = heads_of(read_model(recipe.model).architecture, recipe.sequence_length)
    check_attention(recipe, heads, device.platform, device.capability)
    with ExitStack() as stack:
        stack.enter_context(_one_thread())
        stack.enter_context(_no_collection())
        stack.enter_context(_world(recipe, rank, device_type(device), recorder))
        mode = stack.enter_context(fake_device(device))
        if rules := outlier_rules(recipe):
            mode.rules.update(rules)
        mode.allow_non_fake_inputs = recipe.parallel.world > 1  # shards are cut on meta
        recorder.run = getattr(mode, "run", None)  # torch's own mode has none
        stack.enter_context(recorder)
        try:
            yield mode
        except (Error, Unlike):
            raise
        except Exception as error:
            raise NotCertified(
                f"the step failed on fake tensors: {type(error).__name__}: {error}",
                hint="the step may fail on the device too; try `memfit train` with one step",
            ) from error


def import_for(recipe: Recipe) -> None:
    """Build the recipe once, so that all is imported that building imports: in a process once, and
    of alike blocks one of each kind."""
    moves = recipe.offload in ("optimizer", "parameters")  # needs a GPU's streams, or ranks
    resting = "none" if moves else recipe.offload
    recipe = replace(recipe, parallel=Parallel(), offload=resting)
    if recipe.digest in _BUILT:
        return
    try:
        built = with_runs(recipe, [1] * len(find_runs(recipe)))
        build_optimizer(built, build_model(built, "meta"))
    except (NotCertified, InvalidRequest):  # blocks that are not alike, or are named one by one
        build_optimizer(recipe, build_model(recipe, "meta"))
    _BUILT.add(recipe.digest)


@contextmanager
def _world(recipe: Recipe, rank: int, kind: str, recorder: Recorder) -> Iterator[None]:
    """The other ranks, where there are any, and the streams that a step runs copies on."""
    alone = recipe.parallel.world == 1
    if alone and (recipe.offload == "none" or kind != "cuda"):
        yield
        return
    from memfit.certify.tracing.world import fake_streams, fake_world  # imports what few steps need

    if alone:
        with fake_streams(recorder.be_on), _host_states(recipe):
            yield
        return
    with fake_world(recipe.parallel, rank, kind, recorder.be_on, recorder.use):
        yield


@contextmanager
def _host_states(recipe: Recipe) -> Iterator[None]:
    """torchao asks which devices there are before it offloads an optimizer."""
    if recipe.offload != "optimizer":
        yield
        return
    from torchao.optim import cpu_offload  # before anything is fake

    with set_while(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"]):
        yield


def _run(
    recipe: Recipe,
    kind: str,
    steps: Sequence[Sequence[BatchShape]],
    recorder: Recorder,
    weights: EmptyWeights | None,
    evaluation: Sequence[BatchShape],
    rank: int,
) -> None:
    built = load(recipe, kind, recorder, weights)
    recorder.enter(Phase.FIRST_STEP)
    with recorder.shallow(built.model):
        with watch_activations(recipe, recorder):
            _step(built, kind, steps, recorder)
        _evaluate(built, kind, evaluation, recorder)
    save(built, kind, recorder, rank)


def watch_activations(recipe: Recipe, recorder: Recorder) -> AbstractContextManager[None]:
    """Count what of a step waits in host memory, where activations do."""
    waits = recipe.offload == "activations"
    return recorder.watch_host(Phase.LOSS) if waits else nullcontext()


def load(recipe: Recipe, kind: str, recorder: Recorder, weights: EmptyWeights | None) -> Built:
    """Build and fill the model as training does."""
    model = build_model(recipe, kind)
    recorder.register_model(model)
    with recorder.watch_host(Phase.LOAD):
        fill_weights(model, recipe, weights, EmptyWeights("", "", {}))
    optimizer = build_optimizer(recipe, model)
    recorder.register_optimizer(optimizer)
    return Built(recipe, model, optimizer)


def save(built: Built, kind: str, recorder: Recorder, rank: int = 0) -> None:
    """Make a checkpoint's tensors ready to write, and those of the model folder."""
    recipe = built.recipe
    recorder.enter(Phase.SAVE)
    parameters, states, _ = checkpoint_tensors(built)
    with recorder.watch_host(Phase.SAVE):
        if recipe.parallel.world == 1:
            for tensors in (parameters, states):
                on_host(tensors)
        else:
            copied = on_host({**parameters, **states}, copy=kind == "cuda")
            del copied
    if recipe.parallel.world > 1:
        for _, tensors in gather_files(built, keep=rank == 0):  # the model folder
            del tensors


def _step(
    built: Built, kind: str, steps: Sequence[Sequence[BatchShape]], recorder: Recorder
) -> None:
    for index, shapes in enumerate(steps):
        targets = sum(shape.rows * shape.tokens for shape in shapes)
        enter = recorder.enter if index else recorder.stay
        step(built, _make_batches(built.recipe, shapes, kind, recorder), targets, enter)


def _evaluate(
    built: Built, kind: str, evaluation: Sequence[BatchShape], recorder: Recorder
) -> None:
    recorder.enter(Phase.EVALUATE)
    for shape in evaluation:
        for _ in range(EVALUATED):
            loss, count = evaluate(built, _make_batch(built.recipe, shape, kind, recorder))
    del loss, count


def _generate(recipe: Recipe, kind: str, recorder: Recorder, weights: EmptyWeights | None) -> None:
    model = build_generator(recipe, kind)
    recorder.register_model(model)
    trained = EmptyWeights.like(model, family_of(recipe.model).name)
    fill_generator(model, recipe, weights if recipe.adapted else None, trained)
    cache = None
    with recorder.shallow(model), quick_products(model):
        recorder.begin()
        for tokens in (max(1, recipe.sequence_length - 1), 1):
            new = torch.zeros(1, tokens, dtype=torch.int64)
            recorder.register_batch(new)
            logits, cache = advance(model, new, cache)
            numbers = torch.zeros(1, dtype=torch.float64)
            sample(logits[None], numbers, Settings(max_new_tokens=1, top_k=50))
            del logits, new, numbers


def weights_of(recipe: Recipe) -> EmptyWeights | None:
    """What `fill_weights` reads, without values; made before anything is fake: it opens files."""
    if recipe.weights == "random":
        return None
    model = read_model(recipe.model)
    prefix = model.weights[0].name.partition(".")[0]
    return EmptyWeights.of(recipe.model.source, prefix, model.architecture.family)


def _make_batches(
    recipe: Recipe, shapes: Sequence[BatchShape], kind: str, recorder: LiveBytes
) -> Iterator[Batch]:
    """Yield batches of these shapes, each made when needed, as the training loop makes them."""
    for shape in shapes:
        yield _make_batch(recipe, shape, kind, recorder)


def _make_batch(recipe: Recipe, shape: BatchShape, kind: str, recorder: LiveBytes) -> Batch:
    def integers(rows: int = shape.rows) -> torch.Tensor:
        return torch.zeros(rows, shape.tokens, dtype=torch.int64, device=kind)

    positions = None if shape.documents is None else integers()
    if recipe.parallel.cp > 1:
        positions = integers(1)
    reference = None
    if recipe.preference.reference == "precomputed":
        reference = torch.zeros(shape.rows, device=kind)
    batch = Batch(
        integers(), integers(), positions, shape.documents, reference,
        rated=_make_rated(recipe, shape, kind),
        context=integers() if recipe.learns == "conversations" else None,
    )  # fmt: skip
    recorder.register_batch(*batch.tensors)
    return batch


def _make_rated(recipe: Recipe, shape: BatchShape, kind: str) -> RatedBatch | None:
    if not recipe.rates:
        return None
    desirable = torch.zeros(shape.rows, dtype=torch.bool, device=kind)
    if not recipe.mismatches:
        return RatedBatch(desirable)
    ids, labels = (
        torch.zeros(shape.rows, shape.tokens, dtype=torch.int64, device=kind) for _ in range(2)
    )
    precomputed = recipe.preference.reference == "precomputed"
    reference = torch.zeros(shape.rows, device=kind) if precomputed else None
    return RatedBatch(desirable, ids, labels, reference)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Frees come from reference counts alone, so that two traces are equal event by event.

    What outlives a collection is of no trace (libraries, results), and no later one looks at it:
    a process that has imported torch and transformers spends 0.2 s on every look.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Nothing is computed, so more threads would only cost their start."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compiled(recipe: Recipe) -> tuple[str, ...]:
    """The implementations of the recipe's optimizer that run through torch.compile."""
    return find_optimizer(recipe.optimizer).cuda_only


def bounds_of_weights(recipe: Recipe, kind: str, weights: EmptyWeights | None) -> tuple[str, ...]:
    """Of loading: on a CPU a tensor of the file is alive beside the parameter that it fills."""
    if weights is None or weights.known or kind != "cpu":
        return ()
    source = recipe.model.source or recipe.model.name
    return (f"the files of `{source}` are not here: their tensors are taken as fp32",)


def step_bounds(
    recipe: Recipe,
    batches: Sequence[BatchShape] | None,
    shapes: Sequence[BatchShape],
    kind: str,
    workspaces: bool,
) -> tuple[str, ...]:
    """What a reader must know of the data and the device for the certificate to hold."""
    bounds = [] if batches else [str(bounds_of(recipe))]
    if recipe.accumulation > len(shapes):
        bounds.append(
            f"{len(shapes)} of {recipe.accumulation} micro-batches traced: later ones are alike"
        )
    if recipe.parallel.world > 1 and kind == "cpu":
        bounds.append("gloo's own copies of what it reduces are not counted")
    if recipe.parallel.ep > 1:
        bounds.append(
            f"each rank receives {recipe.parallel.received:g}x the tokens of an even routing"
            " for its experts; training counts them"
        )
    for who, several in (("ranks that share products", "tp"), ("stages", "pp")):
        if getattr(recipe.parallel, several) > 1 and kind == "cuda":
            bounds.append(
                f"what {who} exchange is given back as on one stream: not measured on NCCL"
            )
    if kind == "cuda" and recipe.optimizer.implementation in _compiled(recipe):
        bounds.append(
            f"the compiled update of `{recipe.optimizer.name}` is assumed to keep what it computes"
            " in between in registers: not measured"
        )
    bounds += (*outlier_bounds(recipe), *compiled_bounds(recipe))
    bounds += find_optimizer(recipe.optimizer).bounds
    if recipe.offload == "optimizer":
        bounds.append(f"the host holds {COPIES} pinned copies of the trained weights: not counted")
    if kind == "cpu" and recipe.optimizer.implementation in _compiled(recipe):
        bounds.append(f"what `{recipe.optimizer.name}` allocates inside its update is not counted")
    if recipe.attention == "cudnn":
        bounds.append("cuDNN decides its attention's workspace: taken to be as large as flash's")
    if kind == "cuda" and workspaces:
        bounds.append("memory inside CUDA kernels is read from their source, not yet measured")
    return tuple(bounds)
