"""One record of the data as what it says: a text, a prompt with its answer, messages, or a pair.

Formats differ by their keys, of which a record needs one of these sets:

    messages                       a conversation: list of role and content (OpenAI)
    conversations                  the same as list of from and value (ShareGPT)
    instruction, output (, input)  one turn (Alpaca)
    prompt, completion             texts, or both lists of messages
    chosen, rejected (, prompt)    two answers, the preferred one first; texts, or lists of messages
    text                           a text

Beside messages stand `tools` (a list, or its JSON) and `chat_template_kwargs`, which the chat
template receives, as it does of TRL; beside `messages`, `conversations` and `instruction` a
`system` text, and beside `instruction` a `history` of pairs, as of LLaMA-Factory. An answer of
`weight: 0` is not learned.

Under an objective that rates answers a record needs `prompt`, `completion` and `label` (true or
false), or is a pair, of which the preferred answer is desirable and the other one is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from memfit.core.errors import InvalidRequest
from memfit.objectives import find_objective
from memfit.train.data.tokenizer import Talk, Tokenizer

COLUMNS = (
    "`text`, `messages`, `conversations`, `instruction` with `output`, `prompt` with `completion`;"
    " for dpo `chosen` with `rejected`;"
    " for kto `prompt`, `completion` and `label`"
)
KEYS = (
    "text", "messages", "conversations", "instruction", "input", "output", "prompt", "completion",
    "chosen", "rejected", "label", "system", "history", "tools", "chat_template_kwargs",
)  # fmt: skip
ROLES = {  # of ShareGPT's files
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
Message = dict[str, Any]


class Example(NamedTuple):
    """One document: its text, the characters that are learned, and its place in the data."""

    text: str
    learned: tuple[tuple[int, int], ...] | None  # None: all of it
    closed: bool  # a start and an end of text are put around it; a chat template does its own
    place: str


class Dialogue(NamedTuple):
    """A conversation; what assistants say from message `first` on is learned."""

    messages: list[Message]
    first: int = 0
    desirable: bool = False  # of a rated answer
    extras: Mapping[str, Any] = {}  # what the chat template has besides, such as tools


class Written(NamedTuple):
    """A prompt and its answer; no answer: all of it is learned."""

    prompt: str
    answer: str | None = None
    desirable: bool = False  # of a rated answer


Content = Dialogue | Written


def read_record(
    record: Mapping[str, Any], place: str, tokenizer: Tokenizer | None, objective: str
) -> tuple[Content, ...]:
    """What a record says: two contents of a pair, the preferred answer first, else one.

    Raises InvalidRequest, naming the line and the field: no format that is known, a wrong type,
    an empty text, a pair of equal answers.
    """
    if find_objective(objective).rated:
        return _rated(record, place, objective)
    if find_objective(objective).pairs:
        if not _has(record, "chosen", "rejected"):
            _refuse(
                f"{place} is no pair of answers: it holds {_held(record)}",
                f"`objective: {objective}` needs `chosen` and `rejected`, and `prompt` where they"
                " are texts",
            )
        if find_objective(objective).scores and record.get("margin") is not None:
            _refuse(
                f"{place} has a `margin`, and `objective: {objective}` learns none",
                "leave the column out: TRL's RewardTrainer would learn it",
            )
        return _pair(record, place)
    return (_content(record, place, tokenizer),)


def _rated(record: Mapping[str, Any], place: str, objective: str) -> tuple[Content, ...]:
    """One answer and what it is, or both answers of a pair."""
    if _has(record, "chosen", "rejected"):
        good, bad = _pair(record, place)
        return good._replace(desirable=True), bad
    if not _has(record, "prompt", "completion", "label"):
        _refuse(
            f"{place} is no rated answer: it holds {_held(record)}",
            f"`objective: {objective}` needs `prompt`, `completion` and `label` (true or false), or"
            " pairs: `chosen` and `rejected`",
        )
    label = record["label"]
    if not isinstance(label, bool):
        _refuse(
            f"{place}: `label` is {label!r}, which is neither true nor false",
            "true says that the answer is desirable",
        )
    return (_answered(record, "completion", place)._replace(desirable=label),)


def render(contents: Sequence[tuple[Content, str]], tokenizer: Tokenizer) -> list[Example]:
    """The example of each content, which stands at the place beside it.

    Raises InvalidRequest, naming the place, for messages without a chat template and messages that
    it refuses.
    """
    talks = [content for content, _ in contents if isinstance(content, Dialogue)]
    try:
        rendered = iter(tokenizer.chat_many([Talk(t.messages, t.first, t.extras) for t in talks]))
    except Exception:  # templates raise anything; the one whose conversation it is has a name
        rendered = (_chat(content, place, tokenizer) for content, place in contents
                    if isinstance(content, Dialogue))  # fmt: skip
    examples = []
    for content, place in contents:
        if isinstance(content, Dialogue):
            text, spans = next(rendered)
            examples.append(Example(text, tuple(spans), False, place))
        elif content.answer is None or tokenizer.chat_settings.learns == "all":
            text = content.prompt + (content.answer or "")
            examples.append(Example(text, None, True, place))
        else:
            text = content.prompt + content.answer
            examples.append(Example(text, ((len(content.prompt), len(text)),), True, place))
    return examples


def _chat(talk: Dialogue, place: str, tokenizer: Tokenizer) -> tuple[str, list[tuple[int, int]]]:
    try:
        return tokenizer.chat(talk.messages, talk.first, talk.extras)
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error.message}", hint=error.hint) from None


def texts_of(record: Mapping[str, Any], place: str) -> Iterator[str]:
    """The texts alone, of any format, to train a tokenizer on."""
    others = ("completion", "chosen", "text", "messages", "conversations", "instruction")
    if _has(record, "prompt") and not any(_has(record, name) for name in others):
        yield from _texts_beside_prompt(record)
        return
    pair = _has(record, "chosen", "rejected")
    for content in _pair(record, place) if pair else (_content(record, place, None),):
        if isinstance(content, Dialogue):
            yield from (m["content"] for m in content.messages)
        else:
            yield content.prompt + (content.answer or "")


def _texts_beside_prompt(record: Mapping[str, Any]) -> Iterator[str]:
    """A prompt's text or messages, and what else is text: answers are to be written in it."""
    for value in record.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (str(m["content"]) for m in value if isinstance(m, dict) and "content" in m)


def _has(record: Mapping[str, Any], *names: str) -> bool:
    return all(record.get(name) is not None for name in names)


def _held(record: Mapping[str, Any]) -> str:
    return ", ".join(record) or "nothing"


def _refuse(message: str, hint: str = "") -> NoReturn:
    raise InvalidRequest(message, hint=hint)


def refuse_columns(place: str, names: Sequence[str]) -> NoReturn:
    """Nothing in a record or a table is of a format that is known."""
    held = ", ".join(names) or "nothing"
    _refuse(f"{place} has no column to train on: {held}", f"use {COLUMNS}")


def _content(record: Mapping[str, Any], place: str, tokenizer: Tokenizer | None) -> Content:
    """What one record says."""
    if _has(record, "messages"):
        return _talk(record, read_messages(record["messages"], place, "messages"), place)
    if _has(record, "conversations"):
        return _talk(record, _sharegpt(record["conversations"], place), place)
    if _has(record, "instruction", "output"):
        return _alpaca(record, place, tokenizer)
    if _has(record, "prompt", "completion"):
        return _answered(record, "completion", place)
    if _has(record, "text"):
        return Written(_text(record, "text", place))
    if _has(record, "chosen", "rejected"):
        _refuse(f"{place} is a pair of answers", "pairs are for `task.objective: dpo`")
    refuse_columns(place, list(record))


def _pair(record: Mapping[str, Any], place: str) -> tuple[Content, Content]:
    """The preferred answer and the other one, to the same prompt."""
    if not _has(record, "prompt"):
        if isinstance(record["chosen"], str):
            _refuse(
                f"{place}: `chosen` is a text, and there is no `prompt` that it answers",
                "write prompt, chosen and rejected; only lists of messages can hold the prompt",
            )
        chosen, rejected = (
            read_messages(record[name], place, name) for name in ("chosen", "rejected")
        )  # fmt: skip
        alike, extras = _count_alike(chosen, rejected), read_extras(record, place)
        pair: tuple[Content, Content] = (
            Dialogue(chosen, alike, extras=extras), Dialogue(rejected, alike, extras=extras),
        )  # fmt: skip
    else:
        pair = _answered(record, "chosen", place), _answered(record, "rejected", place)
    if pair[0] == pair[1]:
        _refuse(f"{place}: `chosen` and `rejected` are equal", "leave such pairs out")
    return pair


def _count_alike(a: list[Message], b: list[Message]) -> int:
    """How many messages two conversations begin with in common."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))


def _answered(record: Mapping[str, Any], key: str, place: str) -> Content:
    """A prompt and the answer under `key`: two texts, or two lists of messages."""
    if isinstance(record["prompt"], str):
        return Written(_text(record, "prompt", place), _text(record, key, place))
    prompt = read_messages(record["prompt"], place, "prompt")
    answer = read_messages(record[key], place, key)
    if answer[: len(prompt)] == prompt:  # some files repeat the prompt in each answer
        answer = answer[len(prompt) :]
    return Dialogue([*prompt, *answer], len(prompt), extras=read_extras(record, place))


def _talk(record: Mapping[str, Any], messages: list[Message], place: str) -> Dialogue:
    """A conversation with what stands beside it in its record."""
    if record.get("system") and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _text(record, "system", place)}, *messages]
    return Dialogue(messages, extras=read_extras(record, place))


def read_extras(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    """What the chat template receives beside a record's messages: `tools`, a list or its JSON, and
    what `chat_template_kwargs` holds. Raises InvalidRequest, naming the field, for another type."""
    tools, more = record.get("tools"), record.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError:
            _refuse(f"{place}: `tools` is a text, and no JSON", "write a list of descriptions")
    for name, value, kind in (
        ("tools", [] if tools is None else tools, list),
        ("chat_template_kwargs", more, dict),
    ):
        if not isinstance(value, kind):
            _refuse(f"{place}: `{name}` is a {type(value).__name__}, not a {kind.__name__}")
    return {**more, "tools": tools} if tools else dict(more)


def _alpaca(record: Mapping[str, Any], place: str, tokenizer: Tokenizer | None) -> Content:
    """One turn by the tokenizer's own template, or as plain paragraphs where it has none."""
    task, answer = _text(record, "instruction", place), _text(record, "output", place)
    more = _text(record, "input", place) if record.get("input") else ""
    question = f"{task}\n\n{more}" if more else task
    turns = [*_history(record, place), (question, answer)]
    if tokenizer is None or not tokenizer.wrapped.chat_template:
        if len(turns) > 1 and tokenizer is not None:
            _refuse(
                f"{place} has a `history`, and the tokenizer has no chat template to write it by",
                "name one, `--set task.chat_template=FILE.jinja`",
            )
        opening = [_text(record, "system", place)] if record.get("system") else []
        return Written("".join(f"{text}\n\n" for text in (*opening, question)), answer)
    roles = ("user", "assistant")
    messages = [
        {"role": r, "content": c} for turn in turns for r, c in zip(roles, turn, strict=True)
    ]
    return _talk(record, messages, place)


def _history(record: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    """The turns before an instruction, pairs of a question and its answer."""
    turns = record.get("history") or []
    for index, turn in enumerate(turns if isinstance(turns, list) else [turns]):
        if not (isinstance(turn, list) and len(turn) == 2):
            _refuse(f"{place}: `history` is no list of pairs", 'for example [["Hi", "Hello"]]')
        question, answer = (_string(text, place, f"history[{index}]") for text in turn)
        yield question, answer


def _sharegpt(value: object, place: str) -> list[Message]:
    turns = _list(value, place, "conversations", '[{"from": "human", "value": "Hi"}, …]')
    found = []
    for index, turn in enumerate(turns):
        name = f"conversations[{index}]"
        if not isinstance(turn, dict):
            _refuse(f"{place}: `{name}` is a {type(turn).__name__}, not an object")
        if "role" in turn and "content" in turn:  # OpenAI's keys under ShareGPT's name
            return read_messages(value, place, "conversations")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker.lower() not in ROLES:
            _refuse(
                f"{place}: `{name}.from` is `{speaker}`, which is nobody that is known",
                f"known: {', '.join(ROLES)}",
            )
        content = _string(turn.get("value"), place, f"{name}.value")
        weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
        found.append({"role": ROLES[speaker.lower()], "content": content, **weight})
        _check_weight(turn, place, name)
    return found


def read_messages(value: object, place: str, key: str) -> list[Message]:
    """A list of messages as OpenAI writes them; raises InvalidRequest, naming the field."""
    turns = _list(value, place, key, '[{"role": "user", "content": "Hi"}, …]')
    for index, turn in enumerate(turns):
        name = f"{key}[{index}]"
        if not isinstance(turn, dict):
            _refuse(f"{place}: `{name}` is a {type(turn).__name__}, not an object")
        _check_weight(turn, place, name)
        for field in ("role", "content"):
            if field not in turn and not (field == "content" and _only_calls(turn)):
                _refuse(f"{place}: `{name}` has no `{field}`: it holds {_held(turn)}")
            if not (field == "content" and _only_calls(turn)):
                _string(turn[field], place, f"{name}.{field}")
    # a table fills up what only some messages have
    found = [{k: v for k, v in turn.items() if v is not None} for turn in turns]
    return [{"content": ""} | turn for turn in found]


def _check_weight(turn: Mapping[str, Any], place: str, name: str) -> None:
    """OpenAI's files say with it whether an answer is learned."""
    if (weight := turn.get("weight")) is not None and weight not in (0, 1):
        _refuse(f"{place}: `{name}.weight` is {weight!r}", "0 does not learn an answer, 1 does")


def _only_calls(turn: Mapping[str, Any]) -> bool:
    """Whether a message says nothing and calls tools: OpenAI's format has null for its content,
    or none."""
    return turn.get("content") is None and bool(turn.get("tool_calls"))


def _list(value: object, place: str, key: str, example: str) -> list[Any]:
    if not isinstance(value, list):
        _refuse(
            f"{place}: `{key}` is a {type(value).__name__}, not a list of messages",
            f"for example {example}",
        )
    if not value:
        _refuse(f"{place}: `{key}` is empty", "leave such examples out")
    return value


def _text(record: Mapping[str, Any], key: str, place: str) -> str:
    value = _string(record[key], place, key)
    if not value and key != "prompt":
        _refuse(f"{place}: `{key}` is empty", "leave such examples out")
    return value


def _string(value: object, place: str, key: str) -> str:
    if not isinstance(value, str):
        _refuse(f"{place}: `{key}` is a {type(value).__name__}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(f"{place}: `{key}` holds half a surrogate pair")
    return value
