"""Text to token ids and back: a Hugging Face tokenizer, read or trained on the data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from memfit.core.errors import Error, InvalidRequest
from memfit.train.data import words

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
GENERATION_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # of transformers alone
END_OF_TEXT = "<|endoftext|>"
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
SMALLEST_VOCABULARY = 257  # every byte, and the end of text


class Talk(NamedTuple):
    """A conversation that is to be written by the chat template."""

    messages: Sequence[Mapping[str, Any]]
    first: int = 0  # the first message whose answers count
    extras: Mapping[str, Any] = {}  # what the template has besides, such as tools

    @property
    def answers(self) -> list[int]:
        """Which messages are an assistant's."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]

    def counts(self, at: int) -> bool:
        """Whether that answer is learned; a `weight` of 0 says that it is not."""
        return at >= self.first and bool(self.messages[at].get("weight", 1))

    def cut(self, stop: int) -> Talk:
        """The messages before that one."""
        return self._replace(messages=self.messages[:stop])


class Chat(NamedTuple):
    """How conversations are written and learned where a request says so."""

    template: str = ""  # in Jinja; "": the tokenizer's own
    learns: str = "answers"  # or last-answer, or all


PLAIN = Chat()


class Tokenizer:
    """A Hugging Face tokenizer with what training needs of it.

    `vocab` is one more than the largest id it can produce; `end` is the id that closes a document
    (None when the tokenizer has none); `fingerprint` changes when any id could change.
    """

    def __init__(self, wrapped: Any, source: str, chat: Chat = PLAIN) -> None:
        if chat.template:
            wrapped.chat_template = chat.template
        self.wrapped = wrapped
        self.chat_settings = chat
        self.source = source
        self.vocab: int = 1 + max(wrapped.get_vocab().values(), default=-1)
        self.end: int | None = wrapped.eos_token_id
        opening = list(wrapped("")["input_ids"])
        self.start: tuple[int, ...] = tuple(i for i in opening if i != self.end)
        self.fingerprint = _fingerprint(wrapped)
        if chat.learns != "answers":
            self.fingerprint += f" {chat.learns}"
        self._direct = _is_plain(wrapped)
        self._cuts: bool | None = None  # whether long texts may be cut; None: not looked up yet

    @property
    def padding(self) -> int | None:
        """The id that fills rows, which transformers' classes take to be no part of a text."""
        own: int | None = self.wrapped.pad_token_id
        return self.end if own is None else own

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, with nothing put before or after it."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, as `encode` gives them; in threads unless that is switched off."""
        if not texts:
            return []
        backend = self._backend()
        if backend is not None:
            return self._encode_in_pieces(backend, texts)
        many: list[list[int]] = self.wrapped(list(texts), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return many

    def _encode_in_pieces(self, backend: Any, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; of long ones, put together from pieces that are encoded alone."""
        long = any(len(text) > 2 * words.PIECE for text in texts)
        if long and self._cuts is None:
            self._cuts = words.may_be_cut(backend.to_str())
        if not (long and self._cuts):
            return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        pieces = [list(words.cut(text)) for text in texts]
        found = backend.encode_batch_fast(list(chain(*pieces)), add_special_tokens=False)
        encoded = iter(found)
        return [[i for e in islice(encoded, len(own)) for i in e.ids] for own in pieces]

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Of each text its ids and, for each id, the characters of the text that it stands for.

        Raises InvalidRequest when the tokenizer has no `tokenizer.json` and so knows no offsets.
        """
        if not self.wrapped.is_fast:
            raise InvalidRequest(
                f"the tokenizer of `{self.source}` cannot tell answers from prompts",
                hint="use one with a tokenizer.json, or objective: pretrain",
            )
        if not texts:
            return
        backend = self._backend()
        if backend is not None:
            for one in backend.encode_batch(list(texts), add_special_tokens=False):
                yield one.ids, one.offsets
            return
        encoded = self.wrapped(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        yield from zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)

    def _backend(self) -> Any:
        """The Rust tokenizer, set as the wrapper sets it for each call; None where its class does
        more than that.

        The wrapper asks for offsets, masks and the tokens' texts, which takes twice the time.
        """
        if not self._direct:
            return None
        backend = self.wrapped.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        if backend.encode_special_tokens != self.wrapped.split_special_tokens:
            backend.encode_special_tokens = self.wrapped.split_special_tokens
        return backend

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""
        return str(self.wrapped.decode(list(ids), skip_special_tokens=True))

    def ask(
        self, messages: Sequence[Mapping[str, Any]], extras: Mapping[str, Any] | None = None
    ) -> str:
        """The messages by the chat template, with the header of an answer to come.

        extras: what the template has besides, such as `tools`.

        Raises InvalidRequest: no chat template, messages that the template refuses.
        """
        self._check_template("prompts that are text")
        return self._render([Talk(messages, 0, extras or {})], prompt=True)[0]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        first: int = 0,
        extras: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text by the chat template, and the characters assistants wrote.

        Only answers from message `first` on count, and none of `weight: 0`. Where the template
        marks what is generated (`{% generation %}`), it says itself what that is. Else an answer
        is what the template adds to the conversation before it and its generation prompt, so its
        end-of-turn mark is learned and its header is not.

        Raises InvalidRequest: no chat template; messages that the template refuses; a template
        that rewrites earlier turns, so that answers cannot be located.
        """
        return self.chat_many([Talk(messages, first, extras or {})])[0]

    def chat_many(self, talks: Sequence[Talk]) -> list[tuple[str, list[tuple[int, int]]]]:
        """Of each conversation what `chat` says of it; the template is called for all at once."""
        if not talks:
            return []
        self._check_template("`prompt` and `completion`")
        wholes = self._render(talks, prompt=False)
        if self.chat_settings.learns == "all":
            return [(whole, [(0, len(whole))]) for whole in wholes]
        if self.chat_settings.learns == "last-answer":
            talks = [t._replace(first=max(t.first, *t.answers[-1:], 0)) for t in talks]
        if GENERATION.search(self.wrapped.get_chat_template()):
            return list(zip(wholes, self._marked(talks, wholes), strict=True))
        answers = [(n, i) for n, talk in enumerate(talks) for i in talk.answers if talk.counts(i)]
        befores = self._render([talks[n].cut(i) for n, i in answers], prompt=True)
        # the last message's answer ends where the conversation does
        ends = {(n, i): len(talks[n].messages) == i + 1 for n, i in answers}
        inner = [talks[n].cut(i + 1) for n, i in answers if not ends[n, i]]
        afters = iter(self._render(inner, prompt=False))
        spans: list[list[tuple[int, int]]] = [[] for _ in talks]
        for at, before in zip(answers, befores, strict=True):
            whole = wholes[at[0]]
            after = whole if ends[at] else next(afters)
            if not (whole.startswith(before) and whole.startswith(after)):
                raise InvalidRequest(
                    f"the chat template of `{self.source}` rewrites earlier turns, and does not"
                    " mark what is generated",
                    hint="keep one answer, the last message, in each conversation",
                )
            spans[at[0]].append((len(before), len(after)))
        return list(zip(wholes, spans, strict=True))

    def _check_template(self, otherwise: str) -> None:
        if not self.wrapped.chat_template:
            raise InvalidRequest(
                f"the tokenizer of `{self.source}` has no chat template for `messages`",
                hint="name one, `--set task.chat_template=FILE.jinja`, or use an instruction-tuned"
                f" model's tokenizer, or {otherwise}",
            )

    def _marked(self, talks: Sequence[Talk], wholes: list[str]) -> list[list[tuple[int, int]]]:
        """What the template's own marks say is generated, from each talk's first message on."""
        from transformers.utils.chat_template_utils import render_jinja_template

        spans = []
        for talk, whole in zip(talks, wholes, strict=True):
            (text,), (found,) = render_jinja_template(
                [[dict(m) for m in talk.messages]],
                chat_template=self.wrapped.get_chat_template(),
                return_assistant_tokens_mask=True,
                **{**self.wrapped.special_tokens_map, **talk.extras},
            )
            answers = talk.answers
            if text != whole or len(found) != len(answers):
                raise InvalidRequest(
                    f"the chat template of `{self.source}` marks {len(found)} answers as generated,"
                    f" and the conversation has {len(answers)}",
                    hint="keep one answer, the last message, in each conversation",
                )
            counted = zip(answers, found, strict=True)
            spans.append([tuple(span) for i, span in counted if talk.counts(i)])
        return spans

    def _render(self, talks: Sequence[Talk], *, prompt: bool) -> list[str]:
        from jinja2 import TemplateError

        if not talks:
            return []
        try:
            plain = all(_is_plain_message(m) for talk in talks for m in talk.messages)
            template = self._compile() if plain else None
            if template is not None:
                return [template(talk, prompt) for talk in talks]
            found = [
                self.wrapped.apply_chat_template(
                    [dict(m) for m in talk.messages],
                    **{**talk.extras, "tokenize": False, "add_generation_prompt": prompt},
                )
                for talk in talks
            ]
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from None
        return [str(text) for text in found]

    def _compile(self) -> Callable[[Talk, bool], str] | None:
        """The chat template as transformers compiles it; None where it does so in another way.

        Of messages that are a role and a content it is what `apply_chat_template` calls, without
        the walks through each message for what it cannot hold.
        """
        from transformers.utils import chat_template_utils

        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        known = self.wrapped.special_tokens_map
        if compile_template is None or not all(type(v) is str for v in known.values()):
            return None
        template = compile_template(self.wrapped.get_chat_template())

        def render(talk: Talk, prompt: bool) -> str:
            own = {"messages": talk.messages, "add_generation_prompt": prompt}
            return str(
                template.render({"tools": None, "documents": None, **known, **talk.extras, **own})
            )

        return render

    def check_vocabulary(self, model_vocab: int, model: str) -> None:
        """Raises InvalidRequest when the model has no embedding for an id of this tokenizer."""
        if self.vocab > model_vocab:
            raise InvalidRequest(
                f"the tokenizer of `{self.source}` has {self.vocab} tokens "
                f"but `{model}` has a vocabulary of {model_vocab}",
                hint=f"use the model's own tokenizer, or vocab_size: {self.vocab} from scratch",
            )

    def save(self, folder: Path) -> None:
        """Write a folder that `AutoTokenizer.from_pretrained` loads."""
        self.wrapped.save_pretrained(str(folder))


def read_template(stated: str) -> str:
    """A chat template in Jinja, or the text of the file that a request names.

    Raises InvalidRequest for a text that is neither, and for one that Jinja cannot read.
    """
    if not stated:
        return ""
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text, source = stated, "`task.chat_template`"
    if "{{" not in stated and "{%" not in stated:
        path = Path(stated).expanduser()
        if not path.is_file():
            raise InvalidRequest(
                f"`task.chat_template: {stated}` is no file and no Jinja template",
                hint="name a .jinja file: a tokenizer's own is its `chat_template.jinja`",
            )
        text, source = path.read_text(encoding="utf-8"), f"`{path}`"
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(
            GENERATION_MARKS.sub("", text)
        )
    except TemplateSyntaxError as error:
        raise InvalidRequest(
            f"{source} is no template that Jinja reads: line {error.lineno}: {error.message}",
            hint="a tokenizer's own is its `chat_template.jinja`",
        ) from None
    return text


def is_without_tokenizer(source: str) -> bool:
    """Whether this is a folder that holds no file of a tokenizer."""
    folder = Path(source).expanduser()
    return folder.is_dir() and not any((folder / name).exists() for name in FILES)


def read_tokenizer(source: str, chat: Chat = PLAIN) -> Tokenizer:
    """The tokenizer of a folder or a hub id.

    Raises InvalidRequest when there is none or its files cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(source).expanduser()
    if is_without_tokenizer(source):
        raise InvalidRequest(
            f"no tokenizer in `{source}`",
            hint="name a folder or a hub id with `tokenizer:`; `weights: random` trains one on the"
            " data",
        )
    try:
        if folder.is_dir() and not (folder / "tokenizer_config.json").exists():
            file = folder / "tokenizer.json"
            if file.exists():
                wrapped = PreTrainedTokenizerFast(tokenizer_file=str(file))
                return Tokenizer(wrapped, source, chat)
        path = str(folder) if folder.is_dir() else source
        return Tokenizer(AutoTokenizer.from_pretrained(path), source, chat)
    except Error:
        raise
    except Exception as error:  # the libraries below raise bare Exception, too
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequest(
            f"cannot read the tokenizer of `{source}`: {first}",
            hint="give a folder with tokenizer.json, or a hub id",
        ) from None


def train_tokenizer(texts: Iterable[str | Path], vocab: int, folder: Path) -> Tokenizer:
    """A byte-level BPE tokenizer with at most `vocab` tokens, learned and saved to `folder`.

    It learns from texts, or from the UTF-8 files at paths. Byte-level: any text can be encoded
    and nothing is lost. The one special token closes a document. Raises InvalidRequest when
    `vocab` cannot hold every byte and the end of text.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab < SMALLEST_VOCABULARY:
        raise InvalidRequest(
            f"a vocabulary of {vocab} cannot hold the 256 bytes and the end of text",
            hint=f"use vocab_size: {SMALLEST_VOCABULARY} or more",
        )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    read = (t.read_text(encoding="utf-8") if isinstance(t, Path) else t for t in texts)
    bpe.train_from_iterator(read, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    wrapped.save_pretrained(str(folder))
    return Tokenizer(wrapped, str(folder))


def _fingerprint(wrapped: Any) -> str:
    rules = wrapped.backend_tokenizer.to_str() if wrapped.is_fast else wrapped.get_vocab()
    facts = [rules, wrapped.eos_token_id, wrapped.chat_template, type(wrapped).__name__]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _is_plain(wrapped: Any) -> bool:
    """Whether a call of the wrapper is its Rust tokenizer's, and no subclass adds to it."""
    from transformers import PreTrainedTokenizerFast

    kind = type(wrapped)
    names = ("__call__", "_encode_plus", "set_truncation_and_padding")
    return bool(wrapped.is_fast) and all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, kind) for name in names
    )


def _is_plain_message(message: Mapping[str, Any]) -> bool:
    return len(message) == 2 and type(message.get("role")) is type(message.get("content")) is str
