"""Other tools' configurations, read as requests: does this file's training fit, and where not?

A reader takes the keys that a step's memory depends on, and lists its assumptions. A key that
it does not describe is declared to move no memory, or it changes the answer: `_keys`, `_answer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from memfit import families
from memfit.check.keys import ConfigKeys, Effect, Evaluated, Undescribed, leaves
from memfit.check.refused_files import refuse_json, refuse_missing, refuse_program
from memfit.check.smaller_changes import Change, Edit, Edits, Group, find_smallest, of_cut, zero
from memfit.core.callable_package import make_callable
from memfit.core.errors import InvalidRequest
from memfit.core.registry import Registry
from memfit.core.system.reading import is_file
from memfit.plan.frameworks.hugging_face.pairs import TILED
from memfit.plan.request.model_reference import find_reference
from memfit.records import Record, from_data
from memfit.records.recipe import OWN_STEP
from memfit.records.request import Request, read_yaml
from memfit.records.results import Plan
from memfit.workflows.load_inputs import PROGRAMS, put


class ConfigReading:
    """What the files say, gathered: keys of a request, assumptions, keys that are not described.

    edits: other values of the files' keys, None of a key that is left out.
    """

    def __init__(self, data: dict[str, Any], edits: Edits | None = None, config: str = "") -> None:
        self.data = data
        self.overrides = dict(leaves(data))  # on the command line, in place of what files say
        self.config = config  # which of a Python file's configurations; "" is its only one
        self.model = data.get("model")  # of the command line, in place of the files'
        self.edits = edits or {}
        self.sources: dict[Path, tuple[Reader, Mapping[str, Any]]] = {}  # what each file says
        self.assumed: list[str] = []
        self.undescribed: list[Undescribed] = []
        self.evaluated: Evaluated | None = None
        self.open_files: list[Path] = []  # files, each named by the one before
        self.accumulation = 1
        self.mixed = ""  # the precision computed in, where weights are stored in 16 bits
        self.launched = ""  # that of the launcher's file, where the trainer's says none
        self.bare = ""  # full | lora, where the trainer's file asks for no autocast
        self.sharded = ""  # fsdp | deepspeed | ""
        self.zero = 3
        self.world = 0  # ranks that a file names; 0: those of the command line
        self.started = ""  # the title of the tool whose arguments a script's command has
        self.later: list[Callable[[ConfigReading], None]] = []  # what the other files decide, too

    def put(self, key: str, value: Any) -> None:
        """Set a dotted key of the request, unless the command line sets it."""
        inside = {k: v for k, v in self.overrides.items() if k == key or k.startswith(f"{key}.")}
        if not inside or (isinstance(value, dict) and key not in inside):
            put(self.data, key, value)
            for name, own in inside.items():
                put(self.data, name, own)

    def count(self, key: str) -> int:
        """A dotted key that counts, 1 where it is not set; raises InvalidRequest for no number."""
        value = self.get(key)
        try:
            return max(1, msgspec.convert(1 if value in (None, "auto") else value, int))
        except msgspec.ValidationError:
            raise InvalidRequest(
                f"`{key}: {value}`: not a number", hint="a whole number, 1 or more"
            ) from None

    @property
    def own(self) -> bool:
        """Return whether the request is of memfit's own step instead of the tool's."""
        return bool(self.get("framework") == OWN_STEP)

    def put_model(self, name: Any) -> None:
        """Set the file's model, unless the command line names one."""
        self.put("model", self.model or name)

    def get(self, key: str) -> Any:
        """A dotted key of the request; None where it is not set."""
        found: Any = self.data
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def assume(self, text: str) -> None:
        """In words, for the screen."""
        self.assumed.append(text)


class Reader(ABC):
    """One tool's files; registered in `readers`."""

    name: ClassVar[str]
    title: ClassVar[str]
    launches: ClassVar[bool] = False  # how processes start and share a model, not what they train
    shares: ClassVar[bool] = False  # whether its file may hold or name DeepSpeed's configuration
    still: ClassVar[Mapping[str, str]] = {}  # keys that move no memory, dotted -> why
    moved: ClassVar[
        Mapping[str, Effect]
    ] = {}  # keys that are not described, dotted -> their effect

    def load(
        self, file: Path, config: str, arguments: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What the file says; YAML reads JSON, too.

        config: which of several that it makes; arguments: with which a program is started.
        """
        self.refuse_config(file, config)
        return read_written(file)

    def refuse_config(self, file: Path, config: str) -> None:
        """Raise InvalidRequest where `config` names one of several configurations."""
        if config:
            raise InvalidRequest(
                f"`--config {config}`: `{file}` says one configuration",
                hint="only a Python file makes several",
            )

    @abstractmethod
    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """Whether these are the tool's keys."""

    @abstractmethod
    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """Put the file's settings into `reading`; raises InvalidRequest with the key's name."""

    def change(self, data: dict[str, Any], key: str, value: Any) -> None:
        """Set a dotted key of what the file says."""
        put(data, key, value)

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """What of the file may be changed to save memory: of each, the mildest edit first."""
        return ()

    def share(self, data: Mapping[str, Any], reading: ConfigReading) -> Iterable[Sequence[Edit]]:
        """DeepSpeed's stages in the trainer's file, where ranks hold whole copies each."""
        ranks = reading.get("parallel.dp_replicate") or 1
        if (
            self.launches
            or not self.shares
            or ranks == 1
            or reading.sharded
            or data.get("deepspeed")
        ):
            return ()
        return ([Edit({"deepspeed": zero(stage)}) for stage in (1, 2, 3)],)


readers: Registry[Reader] = Registry("reader", "memfit.check.tools")
WRITTEN = (".yaml", ".yml", ".json")
# the most telling first: a file of a later one may hold an earlier one's keys, too
TRL = "TRL"  # the title of its reader
PLAIN = "hf-trainer"  # transformers' own Trainer, whose loss is not TRL's
ACCELERATED = (PLAIN, "trl")  # frameworks whose shards are accelerate's FSDP
SAMPLED = ("grpo", "rloo")  # objectives whose answers are sampled while it trains
ORDER = (
    "commands",
    "programs",
    "torchtitan",
    "deepspeed",
    "accelerate",
    "axolotl",
    "llamafactory",
    "trl",
)


class Checked(Record, frozen=True, kw_only=True):
    """What files of other tools say, as a request."""

    tools: tuple[str, ...]
    request: Request
    assumed: tuple[str, ...]
    undescribed: tuple[Undescribed, ...]  # keys whose bytes are not in the prediction
    left_out: Mapping[str, str] = msgspec.field(default_factory=dict)  # the one key
    # of a file that the answer is without
    evaluated: Evaluated | None  # what is evaluated between steps; None: nothing is


def read_files(files: Sequence[Path], data: dict[str, Any], config: str = "") -> Checked:
    """One training described by one file or several, such as a launcher's beside a trainer's.

    data: keys of a request that the files do not say, such as `hardware`; config: which of the
    configurations that a Python file makes. Raises InvalidRequest.
    """
    return gather_files(files, ConfigReading(deepcopy(data), config=config))


def find_changes(
    files: Sequence[Path],
    data: dict[str, Any],
    plan: Plan,
    predict: Callable[[Request], Plan],
    config: str = "",
    left_out: Mapping[str, str] | None = None,
) -> tuple[Change, ...]:
    """The smallest changes to the files that make them fit, in their own keys; () is none found.

    plan: the prediction of the files as they are; left_out: see `Checked`.
    """
    without = {Path(file): {key: None} for file, key in (left_out or {}).items()}
    reading = ConfigReading(deepcopy(data), without, config)
    gather_files(files, reading)

    def reread(edits: Edits) -> Plan:
        merged = {file: {**edits.get(file, {}), **without.get(file, {})}
                  for file in {*edits, *without}}  # fmt: skip
        return predict(gather_files(files, ConfigReading(deepcopy(data), merged, config)).request)

    cut = reading.get("options.fsdp_version") == 2
    groups = [
        Group(file, source, of_cut(edits) if cut else tuple(edits))
        for file, (reader, source) in reading.sources.items()
        for edits in (*reader.share(source, reading), *reader.edits(source))
        if edits
    ]
    return find_smallest(groups, plan, reread)


def gather_files(files: Sequence[Path], reading: ConfigReading) -> Checked:
    """Return the files as a request, gathered in `reading`; raises InvalidRequest."""
    tools = [read_file(file, reading) for file in files]
    _refuse_second(files, reading)
    if not reading.get("hardware.device"):
        raise InvalidRequest(
            "which device are the files for?",
            hint="name it, and how many: `--device h100-sxm --count 8`; `memfit devices` lists"
            " them, and `--device auto` is this machine's own",
        )
    if not reading.get("model"):
        raise InvalidRequest(
            f"{', '.join(map(str, files))} names no model",
            hint="add the trainer's own file, or `--set model=llama-3.1-8b`",
        )
    if reading.get("framework") is None:
        reading.put("framework", "deepspeed" if reading.sharded == "deepspeed" else "hf-trainer")
        reading.assume("the loop is transformers' Trainer, as no file names one")
    if reading.own and reading.get("loss") is None:
        reading.put("loss", "plain")
        reading.assume("the step is memfit's own, of the same training, with whole logits")
    if TRL in tools and not reading.own and reading.get("framework") != PLAIN:
        _settle_loss(reading)
    for settle in () if reading.own else reading.later:
        settle(reading)
    _put_mesh(reading)
    _settle_precision(reading)
    request = from_data(reading.data, Request, source=", ".join(map(str, files)))
    _measure_rows(request, reading)
    return Checked(
        tools=tuple(tools),
        request=request,
        assumed=tuple(reading.assumed),
        undescribed=tuple({(one.file, one.key): one for one in reading.undescribed}.values()),
        evaluated=reading.evaluated,
    )


def _measure_rows(request: Request, reading: ConfigReading) -> None:
    """Say it where rows are longer than the model's positions: learned ones end there."""
    length, model = request.task.sequence_length, families.read_model(find_reference(request.model))
    most = model.architecture.max_sequence
    if isinstance(length, int) and length > most:
        reading.assume(f"rows of {length:,} tokens, though `{model.name}` has {most:,} positions")


def _refuse_second(files: Sequence[Path], reading: ConfigReading) -> None:
    """Raise InvalidRequest for a file named twice, and for two that say what is trained."""
    twice = [file for file in files if files.count(file) > 1]
    if twice:
        raise InvalidRequest(f"`{twice[0]}` is named twice")
    trainers = [(file, reading.sources[file][0]) for file in files]
    both = [f"`{file}` ({one.title})" for file, one in trainers if not one.launches]
    if len(both) > 1:
        raise InvalidRequest(
            f"{' and '.join(both)} each say what is trained",
            hint="one trainer's file, and beside it a launcher's: accelerate's or DeepSpeed's",
        )


def _settle_precision(reading: ConfigReading) -> None:
    """Autocast over weights of 16 bits, of which accelerate's FSDP makes fp32 what is trained.

    DeepSpeed's engine stores what it trains in 16 bits, beside fp32 shares, whatever was loaded.
    """
    stored = reading.get("precision")
    if reading.bare and reading.launched and stored and not stored.endswith("-mixed"):
        reading.assume(
            f"autocast as the launcher's file says: `mixed_precision` ({reading.launched})"
        )
        if reading.bare == "lora" or stored == "fp32":
            reading.put("precision", reading.launched)
        else:
            reading.mixed = reading.launched
    if not reading.mixed:
        return
    if reading.get("framework") == "deepspeed":
        reading.put("precision", reading.mixed)
        return
    ranks = (reading.get("parallel") or {}).get("dp_shard", 1)
    if ranks > 1 and reading.get("framework") in ACCELERATED:
        reading.put("precision", reading.mixed)
        reading.assume("what is trained is stored in fp32, as accelerate's FSDP makes it")
        return
    reading.assume(f"autocast over {stored} weights is predicted as `precision: {stored}`")
    if reading.get("task.objective") in ("dpo", *SAMPLED) and not reading.own:
        reading.put("options.fp32_outputs", True)


def _settle_loss(reading: ConfigReading) -> None:
    """Whose loss it is beside TRL's file: its own step's, or TRL's under DeepSpeed's."""
    shared = reading.sharded == "deepspeed"
    reading.put("framework", "deepspeed" if shared else "trl")
    key, before = ("options.trl", "''") if shared else ("options.version", "0.29")
    if reading.get(key) is None:
        reading.put(key, TILED)
        if reading.get("task.objective") in SAMPLED:
            return
        reading.assume(
            f"the loss is TRL {TILED}'s, from tiles of the logits (`--set {key}={before}`: of all)"
        )


def find_named(name: str, beside: Path) -> Path:
    """A file that another names: from where one starts the tool, beside it, or up from there.

    Raises InvalidRequest where there is none.
    """
    if (found := find_place(name, beside)) is None:
        raise refuse_missing(name, beside)
    return found


def find_place(name: str, beside: Path) -> Path | None:
    """Where `find_named` finds a file; None where there is none."""
    places = (Path(), *beside.resolve().parents)
    return next((place / name for place in places if is_file(place / name)), None)


def read_named(named: Any, taken: ConfigKeys, reading: ConfigReading) -> None:
    """DeepSpeed's configuration as a trainer's file has it: another file's name, or its keys."""
    if not isinstance(named, dict):
        read_file(find_named(str(named), taken.file), reading)
        return
    reader, inner = readers.find("deepspeed"), ConfigKeys(named, taken.file, "deepspeed.")
    reader.read(inner, reading)
    inner.settle(
        {f"deepspeed.{key}": why for key, why in reader.still.items()},
        {f"deepspeed.{key}": effect for key, effect in reader.moved.items()},
    )
    taken.undescribed += inner.undescribed


def read_written(file: Path, *, hint: str = "") -> dict[str, Any]:
    """YAML as PyYAML reads it, which all the tools do; and JSON."""
    version = "1.2" if file.suffix == ".json" else "1.1"
    try:
        read = read_yaml(file, hint=hint, version=version)
    except InvalidRequest:
        if file.suffix == ".json":
            refuse_json(file)  # in JSON's words
        raise
    return {str(k): v for k, v in read.items()}


def read_file(
    file: Path, reading: ConfigReading, arguments: Mapping[str, Any] | None = None
) -> str:
    """Read one file into `reading`; returns the tool's name. arguments: a program's, if any."""
    tools = f"read: {', '.join(readers.find(name).title for name in ORDER)}"
    if file.resolve() in reading.open_files:
        raise InvalidRequest(f"`{file}` names itself, or a file that names it")
    reading.open_files.append(file.resolve())
    written = read_written(file, hint=tools) if file.suffix in WRITTEN else {}
    for name in ORDER:
        reader = readers.find(name)
        if reader.recognises(written, file):
            data = reader.load(file, reading.config, arguments)
            reading.sources[file] = reader, deepcopy(data)
            for key, value in reading.edits.get(file, {}).items():
                reader.change(data, key, value)
            taken = ConfigKeys(data, file)
            reader.read(taken, reading)
            reading.open_files.pop()
            taken.settle(reader.still, reader.moved)
            reading.undescribed += taken.undescribed
            title, reading.started = reading.started or reader.title, ""
            return title
    if "recipe_digest" in written or (written and written.keys() <= {*Request.__struct_fields__}):
        tools = f"memfit's own files are for `memfit predict {file}`"
    elif file.suffix in PROGRAMS:
        raise refuse_program(file)
    elif file.suffix not in (*WRITTEN, ".toml"):
        tools = "files are told apart by their ends: .yaml, .yml, .json, .toml, .py"
    raise InvalidRequest(f"`{file}` is of no tool that memfit reads", hint=tools)


def _put_mesh(reading: ConfigReading) -> None:
    """Set the mesh from the ranks of a file or of the command line, and the global batch."""
    count, nodes = reading.count("hardware.count"), reading.count("hardware.nodes")
    if reading.world and reading.world != count * nodes:
        if reading.get("hardware.count"):
            raise InvalidRequest(
                f"the files start {reading.world} processes, and there are {count * nodes} devices",
                hint="make `--count` (x `hardware.nodes`) and the processes equal",
            )
        if reading.world % nodes:
            raise InvalidRequest(
                f"the files start {reading.world} processes on {nodes} machines: not equally many"
                " each"
            )
        count = reading.world // nodes
        reading.put("hardware.count", count)
    world = count * nodes
    ranks = world
    if reading.get("parallel") is None and world > 1:
        key = "dp_shard" if reading.sharded else "dp_replicate"
        reading.put("parallel", {key: world})
        if reading.sharded:
            reading.put("parallel.zero", reading.zero)
    elif reading.get("parallel") is None and reading.sharded == "deepspeed":
        reading.put("parallel.zero", reading.zero)  # of one rank, too: other buffers
    elif reading.get("parallel") is not None:
        mesh = reading.get("parallel")
        if not isinstance(mesh, dict):
            raise InvalidRequest(
                f"`parallel: {mesh}` names no axis", hint="`--set parallel.dp_shard=8`"
            )
        ranks = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    if reading.get("task.global_batch") is None:
        reading.put(
            "task.global_batch", reading.count("micro_batch") * reading.accumulation * ranks
        )


make_callable(__name__)
