"""Options that several verbs share, and how their values are read."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memfit.core.devices_as_written import read_devices
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import DIGITS, check_data, parse_yaml, shorten
from memfit.core.system.streams import in_lines
from memfit.files.flags import COUNT, DEVICE, FLAGS, MEMORY, NODES, QLORA, Flag, gather, type_key

if TYPE_CHECKING:
    from memfit.records.request import Request

F = TypeVar("F", bound=Callable[..., Any])
Changes = dict[str, Any]
# what YAML 1.2 reads as it stands; its reader takes 30 ms to start
WORD, NUMBER = re.compile(r"[A-Za-z][A-Za-z0-9_-]*"), re.compile(r"0|[1-9][0-9]*")
POWER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?[eE]\+?[0-9]{1,2}")  # `1e9` tokens are a whole number
DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?")
VALUE = "it"
PLACE = re.compile(r"^it line \d+, column \d+: ")
SPECIAL = ("true", "false", "null")
OFFLINE = "HF_HUB_OFFLINE"
SEPARATE = (DEVICE, MEMORY)  # keys that a verb receives as parameters of their own


def read_changes(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> Changes:
    """`key=value` pairs; the value is YAML 1.2, so `2e-4` is a number and `no` a text."""
    changes: Changes = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InvalidRequest(
                f"cannot read `--set {text}`",
                hint="write a key of request.yaml and its value: `--set task.steps=100`",
            )
        changes[key.strip()] = read_value(key.strip(), value)
    return changes


def read_value(key: str, text: str) -> Any:
    """One YAML 1.2 scalar or flow value; plain numbers and words need no YAML reader."""
    if WORD.fullmatch(text) and text.lower() not in SPECIAL:
        return text
    if len(text) <= DIGITS and NUMBER.fullmatch(text):
        return int(text)
    if POWER.fullmatch(text) and (whole := Decimal(text)) == whole.to_integral_value():
        return _checked(key, text, int(whole))
    try:
        return parse_yaml(text, source=VALUE)
    except InvalidRequest as error:
        raise _unreadable(key, text, error.message) from None


def _checked(key: str, text: str, value: Any) -> Any:
    try:
        check_data(value, source=VALUE)
    except InvalidRequest as error:
        raise _unreadable(key, text, error.message) from None
    return value


def _unreadable(key: str, text: str, problem: str) -> InvalidRequest:
    """`problem` is a reader's, of what it calls VALUE."""
    reason = PLACE.sub("", problem)
    return InvalidRequest(
        f"cannot read the value of `--set {shorten(key)}={shorten(text, 200)}`: {reason}",
        hint="lists and keys go in one line: `--set 'lora.targets=[q_proj, v_proj]'`",
    )


def device_options(function: F) -> F:
    """--device, --memory, --set: what overrides the request."""
    for option in (
        click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", callback=read_changes,
                     help="Set any key of request.yaml; repeatable."),
        click.option("--memory", metavar="SIZE", help="Memory limit, such as '72 GiB'."),
        click.option("--device", metavar="NAME", help="Accelerator; see `memfit devices`."),
    ):  # fmt: skip
        function = option(function)
    return function


def request_options(function: F) -> F:
    """The flags of `memfit.files.flags` and --set, which reach the verb as device, memory, changes.

    A verb that has a parameter of a flag's name declares that option itself, and gets its value.
    """
    own = inspect.signature(function).parameters
    flags = [flag for flag in FLAGS if flag.parameter not in own or flag.key in SEPARATE]

    @functools.wraps(function)
    def with_flags(changes: Changes, **values: Any) -> Any:
        stated = {flag.parameter: values.pop(flag.parameter) for flag in flags}
        changes = gather(stated, changes)
        device, memory = (changes.pop(key, None) for key in SEPARATE)
        return function(changes=changes, device=device, memory=memory, **values)

    decorated: Any = click.option(
        "--set", "changes", multiple=True, metavar="KEY=VALUE", callback=read_changes,
        help="Set any key of request.yaml; repeatable.",
    )(with_flags)  # fmt: skip
    for flag in reversed(flags):
        decorated = _make_option(flag)(decorated)
    decorated = click.option(
        "--offline", is_flag=True, expose_value=False, is_eager=True, callback=_go_offline,
        help="Ask no network: hub ids are read from the catalogue and the hub's cache.",
    )(decorated)  # fmt: skip
    made: F = decorated
    return made


def _go_offline(_: click.Context, __: click.Parameter, wanted: bool) -> None:
    """Set what huggingface_hub reads when it is imported, which is later, here and in children."""
    if wanted:
        os.environ[OFFLINE] = "1"


def _make_option(flag: Flag) -> Callable[[F], F]:
    names = [f"--{name}" for name in flag.names]
    says = f"{flag.key}: {flag.help}."
    if not flag.metavar:
        return click.option(*names, flag.parameter, is_flag=True, help=says)
    read = _read_flag if flag.number else None
    return click.option(*names, flag.parameter, metavar=flag.metavar, help=says, callback=read)


def _read_flag(_: click.Context, __: click.Parameter, value: str | None) -> Any:
    """A plain number as one, as `--set` reads it; all other texts as they stand."""
    if value is None:
        return None
    if len(value) <= DIGITS and NUMBER.fullmatch(value.removeprefix("-")):
        return int(value)
    if not DECIMAL.fullmatch(value):
        return value
    number = float(value)  # `1e3` steps are a whole number
    return int(number) if "e" in value.lower() and number.is_integer() else number


def output_options(function: F) -> F:
    """--json and --quiet, which every verb has."""
    for option in (
        click.option("--quiet", "-q", is_flag=True, help="Nothing on stderr but errors."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    ):
        function = option(function)
    return function


folder_option = click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), metavar="RUN",
    help="Folder of the run: its files are read from and written to it.",
)  # fmt: skip
why_option = click.option("--why", is_flag=True, help="Every entry and everything considered.")
anyway_option = click.option(
    "--anyway", is_flag=True, help="Go on although it does not fit, or cannot be certified."
)


def no_cache_option(function: F) -> F:
    """--no-cache: the verb neither reads nor writes cached certificates."""
    return _within(
        function, "without_cache", "--no-cache",
        "Certify anew; no certificate is read from or kept in the cache.",
    )  # fmt: skip


def full_trace_option(function: F) -> F:
    """--full-trace: what the verb certifies is traced with every block of the model."""
    return _within(
        function, "with_full_traces", "--full-trace",
        "Run every block on fake tensors, those too that repeat others.",
    )  # fmt: skip


def _within(function: F, context: str, flag: str, text: str) -> F:
    """A flag with which the verb runs inside a context of `memfit.api`."""
    name = flag.removeprefix("--").replace("-", "_")

    @functools.wraps(function)
    def with_choice(**values: Any) -> Any:
        if not values.pop(name):
            return function(**values)
        from memfit import api

        with getattr(api, context)():
            return function(**values)

    decorated: Any = click.option(flag, is_flag=True, help=text)(with_choice)
    made: F = decorated
    return made


def read_target(target: str, device: str | None, memory: str | None, changes: Changes) -> Request:
    """A request from a model's name, request.yaml or plan.json, with the options put in."""
    from memfit import api

    if path := api.find_plan(Path(target)):
        stated = {"--device": device, "--memory": memory}
        plan = api.read_plan(path)
        used = [name for name, value in stated.items() if value]
        if used := [*used, *dict.fromkeys(type_key(k, v)[0] for k, v in changes.items())]:
            more = {"hardware.device": device, "limits.memory": memory, **changes}
            anew = type_request(plan.request, {k: v for k, v in more.items() if v is not None})
            raise InvalidRequest(
                f"{', '.join(used)} would change `{path}`, and a plan is fixed",
                hint=f"plan again: `memfit plan {anew}`" if anew else "plan its request again",
            )
        return api.state(plan)
    return api.read(target, changes=changes, device=device, memory=memory)


def same_options(device: str | None, memory: str | None, changes: Changes) -> str:
    """Return the options as one would type them, with a space before."""
    words: list[str] = []
    if device:
        words += ["--device", device]
    if memory:
        words += ["--memory", memory]
    for key, value in changes.items():
        words += type_key(key, value)
    return " " + shlex.join(words) if words else ""


def changed_options(
    device: str | None, memory: str | None, changes: Changes, more: Mapping[str, Any]
) -> str:
    """The options as one would type them with more keys set, each of which stands once."""
    keys = {**changes, **more}
    written = read_devices(device) if device else None
    device, memory = keys.pop(DEVICE, device), keys.pop(MEMORY, memory)
    if written and written.number:
        if COUNT in more or NODES in more:
            device = read_devices(device or "").name
        elif DEVICE in more:
            each = f"{written.nodes}x{written.number}" if written.nodes else written.number
            device = f"{device}:{each}"
    elif written and DEVICE in more:
        device = _as_many(written.name, device or "")
    if keys.get("method") == QLORA and more.get("base_format", "nf4") != "nf4":
        keys["method"] = "lora"
    return same_options(device, memory, keys)


def _as_many(machine: str, device: str) -> str:
    """Another device, as many of it as the machine has that was typed."""
    from memfit.catalog.machines import find_machine  # the catalogue, which `--help` does without

    found = find_machine(machine)
    return f"{device}:{found.devices}" if found else device


def type_request(request: Request, changes: Mapping[str, Any]) -> str:
    """MODEL and the options that make this request, with `changes` put in; "" for a model that the
    request holds as a table, which cannot be typed."""
    from memfit.records import to_data
    from memfit.records.request import Request as Kind

    if isinstance(request.model, dict):
        return ""
    plain = _flatten(to_data(Kind(model=request.model)))
    stated = {k: v for k, v in _flatten(to_data(request)).items() if plain.get(k) != v}
    keys = {**stated, **changes}
    device, memory = keys.pop("hardware.device", None), keys.pop("limits.memory", None)
    return shlex.quote(request.model) + same_options(device, memory, keys)


def _flatten(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted keys of a table of tables."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= (
            _flatten(value, f"{before}{key}.")
            if isinstance(value, dict)
            else {f"{before}{key}": value}
        )
    return found


def print_json(record: object) -> None:
    """One JSON document on stdout."""
    from memfit.records import to_json

    click.echo(to_json(record))


def note(quiet: bool) -> Callable[[str], None]:
    """Where a verb says what it is doing: stderr, or nowhere."""

    def say(text: str) -> None:
        if not quiet:
            click.echo(in_lines(text), err=True)

    return say
