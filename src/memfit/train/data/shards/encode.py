"""Shards of the data as token ids, where their documents end, and which tokens are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np

from memfit.core.errors import InvalidRequest
from memfit.core.units import KIB
from memfit.train.data.conversations import Content, Dialogue, Example, render
from memfit.train.data.shards.split import PIECE, Item, Part, read_parts
from memfit.train.data.tokenizer import Tokenizer

GROUP = 256 * KIB  # characters that are encoded at a time
Array = np.ndarray[Any, np.dtype[Any]]


class Tokens(NamedTuple):
    """The tokens of one shard."""

    ids: Array  # (tokens,) uint16 or uint32
    ends: Array  # (documents that end here,) int64: tokens of the shard up to there
    learned: Array | None  # (tokens,) uint8, as of `Corpus`; None: every token is learned
    place: str  # where the shard begins, in words
    # of a text that goes on from the shard before: tokens here, without those around a document;
    # None where none does, or it does not end here
    head: int | None
    tail: int  # the same of one that goes on in the next shard; 0 where none does


def choose_dtype(tokenizer: Tokenizer) -> str:
    """The smallest type that holds every id."""
    return "uint16" if tokenizer.vocab <= np.iinfo("uint16").max + 1 else "uint32"


def encode_shard(shard: tuple[Item, ...], tokenizer: Tokenizer, objective: str) -> Tokens:
    """Tokenise one shard. Raises InvalidRequest as `read_parts` and `render` do, for a document
    without tokens, and for one without an answer to learn."""
    dtype = choose_dtype(tokenizer)
    ids: list[Array] = []
    flags: list[Array | None] = []
    ends, total, inside, opened, head = [], 0, 0, False, None
    for group in _groups(read_parts(shard, tokenizer, objective)):
        for part, found, learned, bare in _encode(group, tokenizer, objective):
            ids.append(np.array(found, dtype=dtype))
            flags.append(learned)
            total += len(found)
            inside, opened = inside + bare, opened or part.opens
            if part.closes:
                ends.append(total)
                if opened and not inside:
                    refuse_empty(part.place)
                head = head if opened else inside
                inside, opened = 0, False
    masked = any(learned is not None and (learned != 1).any() for learned in flags)
    return Tokens(
        np.concatenate([*ids, np.array([], dtype=dtype)]),
        np.array(ends, dtype="int64"),
        np.concatenate([
            np.ones(len(found), dtype="uint8") if learned is None else learned
            for found, learned in zip(ids, flags, strict=True)
        ]) if masked else None,
        f"`{shard[0].path}`",
        head,
        inside,
    )  # fmt: skip


def refuse_empty(place: str) -> NoReturn:
    """A document has no tokens."""
    raise InvalidRequest(f"{place} has no tokens", hint="leave it out")


def _groups(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts in groups of little text: enough for every core, little to hold."""
    group: list[Part] = []
    size = 0
    for part in parts:
        group.append(part)
        size += _length(part.content)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _length(content: Content) -> int:
    if isinstance(content, Dialogue):
        return sum(len(message["content"]) for message in content.messages)
    return len(content.prompt) + len(content.answer or "")


def _encode(
    group: list[Part], tokenizer: Tokenizer, objective: str
) -> Iterator[tuple[Part, list[int], Array | None, int]]:
    """Each part, in order, with its ids, its uint8 flags (None: all are learned), and how many ids
    it has without what stands around a document."""
    examples = render([(part.content, part.place) for part in group], tokenizer)
    whole = [objective == "pretrain" or e.learned is None for e in examples]
    pairs = list(zip(examples, whole, strict=True))
    plain = iter(_encode_texts([e.text for e, all_ in pairs if all_], tokenizer))
    written = iter(_encode_written([e for e, all_ in pairs if not all_ and e.closed], tokenizer))
    chats = iter(_encode_chats([e for e, all_ in pairs if not all_ and not e.closed], tokenizer))
    opening, end = list(tokenizer.start), [] if tokenizer.end is None else [tokenizer.end]
    for part, (example, all_) in zip(group, pairs, strict=True):
        flags: Array | None = None
        if all_:
            ids = next(plain)
        else:
            ids, flags = next(written if example.closed else chats)
            if not flags.any():
                raise InvalidRequest(
                    f"{example.place} has no answer to learn",
                    hint=f"objective: {objective} needs a completion, or a message of the role"
                    " `assistant`",
                )
        bare = len(ids)
        if example.closed:
            before, after = opening if part.opens else [], end if part.closes else []
            ids = [*before, *ids, *after]
            if flags is not None:
                flags = np.pad(flags, (len(before), 0))
                flags = np.pad(flags, (0, len(after)), constant_values=1)
        if flags is not None and part.content.desirable:
            flags = flags * np.uint8(2)
        yield part, ids, flags, bare


def _encode_texts(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each text. One of more than a MiB is cut at line ends, or it would fill memory."""
    if all(len(text) <= PIECE for text in texts):
        return tokenizer.encode_many(texts)
    return [
        list(chain.from_iterable(tokenizer.encode(piece) for piece in _cut(text)))
        for text in texts
    ]  # fmt: skip


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + PIECE
        line = text.rfind("\n", start, stop) + 1
        stop = line if line > 0 and stop < len(text) else stop
        yield text[start:stop]
        start = stop


def _encode_written(
    examples: list[Example], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], Array]]:
    """A prompt and its completion are encoded separately, as in generation."""
    texts = []
    for example in examples:
        edge = (example.learned or ())[0][0]
        texts += [example.text[:edge], example.text[edge:]]
    ids = iter(tokenizer.encode_many(texts))
    for prompt, answer in zip(ids, ids, strict=True):
        yield (
            prompt + answer,
            np.repeat(np.array([0, 1], dtype="uint8"), [len(prompt), len(answer)]),
        )


def _encode_chats(
    examples: list[Example], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], Array]]:
    """A conversation is encoded whole: its template's marks separate the turns."""
    found = tokenizer.encode_with_offsets([example.text for example in examples])
    for example, (ids, offsets) in zip(examples, found, strict=True):
        begins = np.array([begin for begin, _ in offsets], dtype="int64")
        flags = np.zeros(len(ids), dtype="uint8")
        for begin, end in example.learned or ():
            flags[(begins >= begin) & (begins < end)] = 1
        yield ids, flags
