"""The verbs as one calls them from Python: `memfit.plan("qwen3-8b", device="4090")`.

The target is a model's name, a request.yaml, a plan.json, a dict like a request.yaml, or a
`Request`. Words beside it are the flags of the command line (`device`, `gpus`, `method`, `seq_len`,
…), keys of the request (`recompute="full"`, `parallel={"dp_shard": 8}`) or the last part of a key
that is the only one of its name (`learning_rate=2e-4`). Each verb raises `memfit.Error` of
`memfit.core.errors`, whose `hint` says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

from memfit import api
from memfit.check import Checked
from memfit.check.answers import Answer
from memfit.check.smaller_changes import Change
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.core.system.reading import is_file
from memfit.export.target import Export
from memfit.files.flags import BY_WORD, DEVICE, MEMORY, find_field, gather
from memfit.files.request_file import KEYS
from memfit.plan.questions.solve import Solved
from memfit.records import Record, to_data
from memfit.records.other_words import describe_word
from memfit.records.request import Request
from memfit.records.results import Certificate, Plan, Report, Run
from memfit.workflows.live_model import check_parameters, read_live

Target = str | Path | Mapping[str, Any] | Request | Plan


class CheckedFiles(Record, frozen=True, kw_only=True):
    """What `memfit.check` answers about another tool's files."""

    answer: Answer
    plan: Plan
    checked: Checked
    changes: tuple[Change, ...]  # the smallest with which it fits; () where it does

    def __repr__(self) -> str:
        """The verdict in one line."""
        return f"<Checked {self.answer.verdict}: {self.plan!r}>"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()


def read_request(target: Target, words: Mapping[str, Any]) -> Request:
    """The request that a name, a dict, a file or a `Request` is, with words put in.

    Raises InvalidRequest for a word that is none, for two that contradict each other, and for what
    cannot be read.
    """
    keys = read_words(words)
    if isinstance(target, Plan):
        target = api.state(target)
    elif isinstance(target, str | Path) and (path := api.find_plan(Path(target))):
        if keys:
            raise InvalidRequest(
                f"`{next(iter(keys))}` would change `{path}`, and a plan is fixed",
                hint="name its request, or the model, with these words",
            )
        target = api.state(api.read_plan(path))
    if isinstance(target, str | Path):
        return api.read(target, changes=keys)
    if isinstance(target, Request):
        data: dict[str, Any] = to_data(target)
    elif isinstance(target, Mapping):
        data = deepcopy(dict(target))
    else:
        raise InvalidRequest(
            f"a `{type(target).__name__}` is not a request",
            hint="give a model's name, a file, a dict like a request.yaml, or a `memfit.Request`",
        )
    api.put_all(data, keys)
    return api.read_data(data, source="the request")


def read_words(words: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted keys of a request that words of Python's set; raises InvalidRequest."""
    flags: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for word, value in words.items():
        if value is None:
            continue
        flag = BY_WORD.get(word)
        if flag is not None and not isinstance(value, Mapping):
            if flag.parameter in flags and flags[flag.parameter] != value:
                raise InvalidRequest(
                    f"`{word}={value}` and `{flag.parameter}={flags[flag.parameter]}` both set"
                    f" `{flag.key}`",
                    hint="keep one of the two",
                )
            flags[flag.parameter] = str(value) if flag.key in (DEVICE, MEMORY) else value
        elif isinstance(value, Mapping) and word != "changes":
            key = _find_key(word, value)
            changes |= {key: dict(value)} if key == "model" else _flatten(key, value)
        elif word == "changes":
            changes |= value
        else:
            changes[_find_key(word, value)] = value
    return gather(flags, changes)


def _flatten(key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if key in ("recompute", "options"):  # a value, of which a part would not be read alone
        return {key: dict(value)}
    return {f"{key}.{inner}": each for inner, each in value.items()}


def _find_key(word: str, value: object) -> str:
    """The key of the request that a word of Python's is."""
    if word in KEYS:
        return word
    found = [key for key in KEYS if key.endswith(f".{word}")]
    fewest = min((key.count(".") for key in found), default=0)
    found = [key for key in found if key.count(".") == fewest]  # `alpha` is `lora.alpha`
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidRequest(
            f"`{word}` may be {' or '.join(f'`{key}`' for key in found)}",
            hint=f"write one of them: `changes={{'{found[0]}': …}}`",
        )
    unknown = UnknownName("word", word, [*BY_WORD, *KEYS], see="docs/api.md lists them")
    unknown.hint = describe_word(word, value) or unknown.hint
    raise unknown


def plan(target: Target, **words: Any) -> Plan:
    """Decide what is left open; `.memory.verdict` is `does_not_fit` where nothing does."""
    return api.plan(read_request(target, words))


def plan_model(model: Any, **words: Any) -> Plan:
    """Plan a model that is in memory already, or a config: of Hugging Face's, or peft's around one.

    Of a module its method is read, too: all weights trained, some of them, or peft's adapter; a
    word `method` takes the place of what is read. Raises InvalidRequest where the module is none,
    or trains other parameters than the method does.
    """
    keys, changes = read_live(model), read_words(words)
    if "method" in changes:
        keys = {"model": keys["model"]}
    api.put_all(keys, changes)
    made = api.plan(api.read_data(keys, source="the model"))
    if "method" not in changes and "method" in keys:
        check_parameters(model, made.recipe)
    return made


def predict(target: Target, **words: Any) -> Plan:
    """Memory and time of one configuration, without a search."""
    return api.predict(read_request(target, words))


def certify(
    target: Target, *, folder: str | Path | None = None, cache: bool = True, **words: Any
) -> Certificate:
    """Run the planned step on fake tensors, and replay it through the allocator; needs torch.

    folder: where plan.json and certificate.json are written. cache: whether a certificate that was
    made before, of all the same, may be the answer. What several devices can run and no plan
    describes is certified as it is stated, with plain defaults. Raises NotCertified.
    """
    with nullcontext() if cache else api.without_cache():
        return _certify(target, None if folder is None else Path(folder), words)


def _certify(target: Target, home: Path | None, words: Mapping[str, Any]) -> Certificate:
    if isinstance(target, Plan) and words:
        raise InvalidRequest(
            f"`{next(iter(words))}` would change a plan, and a plan is fixed",
            hint="plan again with that word, and certify the plan",
        )
    if isinstance(target, str | Path) and not words and (path := api.find_plan(Path(target))):
        target = api.read_plan(path)
    if not isinstance(target, Plan):
        request = read_request(target, words)
        if stated := api.read_unplanned(request):
            certificate = api.certify(stated.recipe, usable=stated.usable)
            if home is not None:
                api.write_certificate(certificate, home)
            return certificate
        # levers take most of a plan's time: they are of a whole one, which is written
        target = api.plan_alone(request) if home is None else api.plan(request)
    certificate = api.certify(target.recipe, usable=target.memory.usable)
    if home is not None:
        api.write_plan(target, home)
        api.write_certificate(certificate, home)
    return certificate


def check(
    files: str | Path | Sequence[str | Path], *, config: str = "", **words: Any
) -> CheckedFiles:
    """Whether another tool's configuration fits; words are those that the files leave out.

    config: which of the configurations that a Python file makes.
    """
    paths = [Path(f) for f in ([files] if isinstance(files, str | Path) else files)]
    for path in paths:
        if not is_file(path):
            raise InvalidRequest(f"cannot read `{path}`: there is no such file")
    data: dict[str, Any] = {}
    api.put_all(data, read_words(words))
    checked, made = api.check(paths, data, config)
    smaller: tuple[Change, ...] = ()
    if made.memory.verdict != "fits":
        smaller = api.find_changes(paths, data, made, config, checked.left_out)
    answer = api.judge(checked, made)
    return CheckedFiles(answer=answer, plan=made, checked=checked, changes=smaller)


def solve(field: str, target: Target, **words: Any) -> Solved:
    """The most of `field` that fits: sequence_length, micro_batch, model, or the fewest devices."""
    return api.solve(find_field(field), read_request(target, words))


def export(target: Target, to: str, *, out: str | Path | None = None, **words: Any) -> Export:
    """A plan as the files of another tool: `.files` is name -> content; out: written there, too."""
    if isinstance(target, str | Path) and not words and (path := api.find_plan(Path(target))):
        target = api.read_plan(path)
    made = api.export(target if isinstance(target, Plan) else read_request(target, words), to)
    if out is not None:
        api.write_export(made, Path(out))
    return made


def train(
    target: Target,
    folder: str | Path,
    *,
    say: Callable[[str], None] = lambda _: None,
    anyway: bool = False,
    **words: Any,
) -> Run:
    """Plan, certify and train into a folder; the same call resumes. say: called with each line.

    Raises DoesNotFit (anyway: trains it all the same), NotCertified, RunFailed and InvalidRequest.
    """
    run = api.train(read_request(target, words), Path(folder), say=say, override=anyway)
    if api.is_first_rank():
        api.write_report(Path(folder))
    return run


def report(folder: str | Path) -> Report:
    """Predicted, certified and measured of a run's folder, side by side."""
    return api.report(Path(folder))
