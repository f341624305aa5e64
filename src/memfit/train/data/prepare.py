"""From a request to what its training reads: tokenizer, tokens, length, worst batch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from memfit.adapters.shared.stored import check_stored
from memfit.catalog import find_device
from memfit.core.cache_folder import cache_folder
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.families import read_model
from memfit.families.capabilities.limits import choose_packing
from memfit.objectives import find_objective
from memfit.records.habits.mixture import Part, read_mixture
from memfit.records.model import ModelReference
from memfit.records.recipe import Recipe
from memfit.records.request import Request, Task, find_weights
from memfit.records.shapes import RowBounds
from memfit.train.data.mixture import join
from memfit.train.data.readers import Sources, find_sources, join_sources
from memfit.train.data.sampler import Sampler, build_rows, build_sampler
from memfit.train.data.shards.split import read_texts
from memfit.train.data.tokenizer import (
    Chat,
    Tokenizer,
    is_without_tokenizer,
    read_template,
    read_tokenizer,
    train_tokenizer,
)
from memfit.train.data.tokens import Corpus, Say, Share, divide, read_corpus
from memfit.train.rl.judging import check_rewards
from memfit.train.rl.prompts import (
    PromptRows,
    Prompts,
    bound_prompts,
    count_steps,
    hold_out,
    join_prompts,
    read_prompts,
)


class Data(NamedTuple):
    """What a run reads."""

    tokenizer: Tokenizer
    training: Corpus | Prompts
    held_out: Corpus | Prompts | None


def read_data(
    request: Request,
    reference: ModelReference,
    cache: Path | None = None,
    *,
    memory: int | None = None,
    say: Say = lambda _: None,
) -> Data:
    """Tokenizer and tokens of a request's data, from the cache when they are there.

    memory: bytes that all processes of this command may hold; None: what the machine has. say:
    called with how far it is, where that takes a while.
    Raises InvalidRequest: no data or data that cannot be read, no tokenizer, a tokenizer with more
    tokens than the model; RunFailed when the cache cannot be written.
    """
    task = request.task
    if not task.data:
        raise InvalidRequest("no training data is named", hint="name it: `--data PATH`")
    mixture = read_mixture(task.data)
    found = [find_sources(part.path, cache) for part in mixture]
    if not mixture:
        found = [find_sources(task.data, cache)]
    sources = join_sources(found)
    tokenizer = find_tokenizer(request, reference, sources, cache)
    tokenizer.check_vocabulary(read_model(reference).architecture.vocab, reference.name)
    if find_objective(task.objective).samples:
        return _read_prompts(request, mixture, found, tokenizer, cache)
    read = partial(
        read_corpus, tokenizer=tokenizer, objective=task.objective, cache=cache, memory=memory,
        say=say,
    )  # fmt: skip
    parts, held_out = [read(one) for one in found], None
    if task.evaluation_share:
        together = 2 if find_objective(task.objective).pairs else 1
        divided = [divide(part, task.evaluation_share, request.seed, together) for part in parts]
        parts = [training for training, _ in divided]
        held_out = _join(mixture, [held for _, held in divided])
    training = _join(mixture, parts)
    if task.evaluation:
        evaluation = find_sources(task.evaluation, cache)
        held_out = read(evaluation)
    return Data(tokenizer, training, held_out)


def _join(mixture: Sequence[Part], parts: Sequence[Corpus]) -> Corpus:
    """One data set as it is, or several with their shares."""
    if not mixture:
        return parts[0]
    return join(
        [Share(p.path, p.share, corpus) for p, corpus in zip(mixture, parts, strict=True)]
    )  # fmt: skip


def _read_prompts(
    request: Request, mixture: Sequence[Part], found: Sequence[Sources], tokenizer: Tokenizer,
    cache: Path | None,
) -> Data:  # fmt: skip
    task, parts = request.task, [read_prompts(sources, tokenizer) for sources in found]
    held_out: Prompts | None = None

    def join(parts: Sequence[Prompts]) -> Prompts:
        return join_prompts(list(zip(mixture, parts, strict=True))) if mixture else parts[0]

    if task.evaluation_share:
        divided = [hold_out(part, task.evaluation_share, request.seed) for part in parts]
        parts = [training for training, _ in divided]
        held_out = join([held for _, held in divided])
    elif task.evaluation:
        held_out = read_prompts(find_sources(task.evaluation, cache), tokenizer)
    return Data(tokenizer, join(parts), held_out)


def find_tokenizer(
    request: Request, reference: ModelReference, sources: Sources, cache: Path | None = None
) -> Tokenizer:
    """Return the request's tokenizer, else the model's own, else one trained on the data.

    A model from scratch may have none of its own, as a config or a folder without one. The one
    trained for it has the config's vocabulary and is cached.
    """
    source = request.tokenizer or reference.source
    chat = Chat(read_template(request.task.chat_template), request.task.learns)
    scratch = not request.tokenizer and find_weights(request, reference) == "random"
    if source and not (scratch and is_without_tokenizer(source)):
        return read_tokenizer(source, chat)
    vocab = read_model(reference).architecture.vocab
    facts = json.dumps([vocab, [s.sha256 for s in sources.files]])
    root = (cache or cache_folder()) / "tokenizers"
    folder = root / hashlib.sha256(facts.encode()).hexdigest()[:32]
    if not (folder / "tokenizer.json").exists():
        try:
            _train_into(folder, read_texts(sources), vocab)
        except OSError as error:
            raise RunFailed(
                f"cannot write the tokenizer `{folder}`: {error.strerror}",
                hint="free space there, or set MEMFIT_CACHE to a folder with room",
            ) from None
    return read_tokenizer(str(folder), chat)


def _train_into(folder: Path, texts: Iterable[str], vocab: int) -> None:
    """Train beside the folder and rename: it is there complete, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        train_tokenizer(texts, vocab, temporary)
        with suppress(OSError):  # another process was first; its result is equal
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def find_lengths(
    request: Request,
    reference: ModelReference,
    sequence_length: int,
    cache: Path | None = None,
    *,
    memory: int | None = None,
    say: Say = lambda _: None,
) -> Request:
    """The request with `task.steps` in place of `task.epochs`, counted on the tokenised data.

    A request with data and no length at all means one epoch. One that states steps or tokens, or
    names no data, comes back as it is. memory, say: as in `read_data`.
    """
    task = request.task
    if not task.data or task.steps is not None or task.tokens is not None:
        return request
    training = read_data(request, reference, cache, memory=memory, say=say).training
    if isinstance(training, Prompts):
        bounds = bound_prompts(
            sequence_length, request.rollout.max_completion_length, request.generations
        )
        return _with_steps(
            request, count_steps(training, bounds, request.global_batch, task.epochs or 1.0)
        )
    packing = choose_packing(request, read_model(reference).architecture)
    rows, _ = build_rows(
        training, objective=task.objective, packing=packing, width=sequence_length,
        seed=request.seed, name=task.data,
    )  # fmt: skip
    return _with_steps(request, rows.per_epoch * (task.epochs or 1.0) / request.global_batch)


def _with_steps(request: Request, steps: float) -> Request:
    whole = max(1, math.ceil(steps - 1e-9))  # a rounding error is no step
    return replace(request, task=replace(request.task, steps=whole, epochs=None))


def find_bounds(
    request: Request, recipe: Recipe, cache: Path | None = None, *, say: Say = lambda _: None
) -> tuple[RowBounds, RowBounds | None]:
    """What no micro-batch of the run, and none of its evaluations, exceeds; say: as in
    `read_data`."""
    on_cpu = find_device(recipe.device).is_cpu  # there the limit is that of processes
    memory = request.limits.memory_bytes if on_cpu else None
    data = read_data(request, recipe.model, cache, memory=memory, say=say)
    training, held_out = build_samplers(request, recipe, data)
    return training.bounds(), None if held_out is None else held_out.bounds_once()


def build_samplers(
    request: Request, recipe: Recipe, data: Data, rank: int = 0
) -> tuple[Sampler | PromptRows, Sampler | None]:
    """Training and evaluation batches of a recipe, as one rank reads them; or its prompts."""
    if isinstance(data.training, Prompts):
        check_rewards(recipe.reward)
        check_stored(recipe)
        prompts = data.held_out if isinstance(data.held_out, Prompts) else None
        return PromptRows(data.training, recipe, request.task.data, prompts), None
    training = build_sampler(data.training, recipe, request.task.data, rank)
    training.padding = data.tokenizer.padding
    if not isinstance(data.held_out, Corpus):
        return training, None
    # the order of what is held out, and so the rows of a sample, are the same for every seed
    same = replace(recipe, seed=0)
    held_out = build_sampler(data.held_out, same, _name_held_out(request.task), rank)
    held_out.padding = data.tokenizer.padding
    return training, held_out


def _name_held_out(task: Task) -> str:
    """How messages call the held-out data."""
    if task.evaluation:
        return task.evaluation
    return f"{task.evaluation_share:.0%} of {task.data}"
