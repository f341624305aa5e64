"""What the user asks for. Any knob may be `auto`; unknown keys and wrong types are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from memfit.base_formats import check_base_format, find_base_format, own_formats
from memfit.core import units
from memfit.core.devices_as_written import MOST
from memfit.core.errors import InvalidRequest
from memfit.core.kinds_of_numbers import (
    AtLeastOne,
    Auto,
    Fraction,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    Truth,
)
from memfit.core.system.reading import (
    check_data,
    is_file,
    is_folder,
    name_kind,
    parse_yaml,
    read_text,
    shorten,
)
from memfit.objectives import find_objective
from memfit.records import Record, from_data, to_data
from memfit.records.habits import RunRequest
from memfit.records.looser import read_looser
from memfit.records.model import ModelReference
from memfit.records.objectives import check_lora_plus, check_regularisation
from memfit.records.other_words import describe_value, describe_word
from memfit.records.recipe import (
    OWN_AXES,
    OWN_STEP,
    OWN_VALUES,
    Attention,
    Compile,
    Decays,
    Freeze,
    Lean,
    Loss,
    Objective,
    Offload,
    Option,
    Parallel,
    Precision,
    Regularisation,
    Scaling,
    Schedule,
)
from memfit.records.reinforcement.requested import (
    PolicyRequest,
    PpoRequest,
    RewardRequest,
    RolloutRequest,
)

FALLING = ("linear", "cosine", "polynomial", "wsd")  # schedules that end at their floor
USUAL_BATCH = 16  # sequences per optimizer step where the request does not say
LIGER = "use_liger_kernel"  # as Hugging Face's Trainer names it
Rows = Annotated[int, msgspec.Meta(ge=1, le=2**40, description="a whole number, 1 to 2^40")]
Devices = Annotated[int, msgspec.Meta(ge=1, le=MOST, description="a whole number, 1 to 2^20")]
Size = Annotated[str, msgspec.Meta(description="a size with its unit, for example `72 GiB`")]
Duration = Annotated[str, msgspec.Meta(description="a time with its unit, for example `48 h`")]
Money = Annotated[str, msgspec.Meta(description="an amount with its unit, for example `500 USD`")]
Share = Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, up to 1")]
Smoothing = Annotated[float, msgspec.Meta(ge=0, lt=0.5, description="a number from 0 to below 0.5")]


Learns = Literal["answers", "last-answer", "all"]


class Task(Record, frozen=True, kw_only=True):
    """What to train on, and for how long."""

    objective: Objective = "pretrain"
    data: str = ""  # text, JSON, JSONL, CSV or parquet file, or a folder; "" while only planning
    evaluation: str = ""  # held-out data of the same kinds
    evaluation_share: Fraction = 0.0  # of the data's documents, held out of training
    chat_template: str = ""  # in Jinja, or a file of it; "": the tokenizer's own
    learns: Learns = "answers"  # of conversations under `sft`
    sequence_length: Positive | Auto = "auto"
    packing: Truth | Auto = "auto"  # auto: except of pairs, which are compared row by row
    global_batch: Rows | Auto = "auto"  # auto: 16, or the next number that all ranks can share
    steps: Positive | None = None
    epochs: PositiveFloat | None = None
    tokens: Positive | None = None

    def __post_init__(self) -> None:
        """Raise UnknownName for an objective that nothing declares."""
        find_objective(self.objective)


class PreferenceRequest(Record, frozen=True, kw_only=True):
    """How pairs are compared; used by the objectives that compare answers."""

    beta: PositiveFloat | Auto = "auto"  # auto: 0.1; of reward 1, and no other
    label_smoothing: Smoothing = 0.0
    reference: Literal["auto", "adapter-off", "precomputed", "second-model"] = "auto"
    loss_type: str = "auto"  # auto: sigmoid of dpo; or another name of `memfit.objectives`
    gamma: NotNegativeFloat | Auto = "auto"  # of `loss_type: simpo`; auto: 0.5
    tau: PositiveFloat | Auto = "auto"  # of `loss_type: discopop`; auto: 0.05
    cross_entropy: NotNegativeFloat | Auto = "auto"  # of cpo; auto: 1, as of orpo
    desirable: PositiveFloat | Auto = "auto"  # of kto; auto: 1
    undesirable: PositiveFloat | Auto = "auto"  # of kto; auto: 1
    center: NotNegativeFloat = 0.0  # of reward: weight of the square of both scores' sum


class LoraRequest(Record, frozen=True, kw_only=True):
    """Adapter settings; used when the method is `lora` or `dora`."""

    rank: Positive = 16
    alpha: PositiveFloat = 32.0
    dropout: Fraction = 0.0
    # auto: the query and value projections; all-linear: every projection but the head
    targets: tuple[str, ...] | Literal["auto", "all-linear"] = "auto"
    scaling: Scaling = "plain"  # alpha / rank; rank-stabilised: alpha / sqrt(rank)


class QuantisationRequest(Record, frozen=True, kw_only=True):
    """Settings of a quantised base; used where `base_format` stores codes."""

    double: bool = True  # nf4, fp4: quantise the scales too
    outlier_threshold: NotNegativeFloat = 6.0  # int8: LLM.int8's; 0 leaves no column in 16 bits
    outlier_share: Fraction = 0.01  # of a projection's columns, what is certified for outliers


class OptimizerRequest(Record, frozen=True, kw_only=True):
    """The optimizer; `auto` chooses the fastest that fits."""

    name: str = "auto"  # auto, or one of the registry `optimizers`
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    learning_rate: PositiveFloat | Auto = "auto"  # auto: 2e-5 full, 2e-4 lora, 1e-3 from scratch
    weight_decay: NotNegativeFloat = 0.0
    decays: Decays | Auto = "auto"  # auto: matrices of memfit's step; others' have their own ways
    lora_plus: NotNegativeFloat = 0.0  # rate of adapters' B over that of A; 0: one rate
    layer_decay: Fraction = 0.0  # rate of a layer over that of the one above it; 0: one rate
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    momentum: Fraction = 0.9
    schedule: Schedule = "cosine"
    warmup_steps: NotNegative = 0
    warmup_ratio: Fraction = 0.0  # a share of all steps instead
    floor: Fraction = 0.0  # the last rate over the full one; of linear, cosine, polynomial, wsd
    power: PositiveFloat = 1.0  # of polynomial
    decay_ratio: Share = 0.1  # of wsd: share of all steps in which the rate falls
    clip_norm: NotNegativeFloat = 1.0
    in_backward: Truth | Auto = "auto"  # auto: where it can and something fits faster by it
    stochastic_rounding: Truth | Auto = "auto"  # auto: of bf16 weights, where the optimizer can

    def __post_init__(self) -> None:
        """A key without an effect on the schedule is refused."""
        if self.warmup_steps and self.warmup_ratio:
            raise InvalidRequest(
                f"`optimizer.warmup_steps: {self.warmup_steps}` and `optimizer.warmup_ratio:"
                f" {self.warmup_ratio}` both say how long the rate rises",
                hint="keep one of the two",
            )
        if self.floor and self.schedule not in FALLING:
            raise InvalidRequest(
                f"`optimizer.floor: {self.floor}` has no effect on"
                f" `optimizer.schedule: {self.schedule}`",
                hint=f"a floor is of {', '.join(FALLING)}",
            )

    @property
    def stated(self) -> dict[str, Any]:
        """What a recipe's optimizer has in the same words, whoever's step it is."""
        names = (
            "weight_decay", "beta1", "beta2", "eps", "momentum", "schedule", "warmup_steps",
            "warmup_ratio", "floor", "clip_norm",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "power": self.power if self.schedule == "polynomial" else 0.0,
            "decay_ratio": self.decay_ratio if self.schedule == "wsd" else 0.0,
        }


class RecomputeBlocks(Record, frozen=True, kw_only=True):
    """Recompute the first n blocks in backward, and of the next ones all but their products."""

    blocks: NotNegative = 0
    selective: NotNegative = 0  # of memfit's own step


class Hardware(Record, frozen=True, kw_only=True):
    """On what to train, what an hour of it costs, and the electricity behind it."""

    device: str = "auto"  # this machine
    count: Devices = 1
    nodes: Devices = 1
    network: str = ""  # between nodes: "ndr-8x400", "100GbE", …; "" takes the device's usual one
    price: str = ""  # of a device-hour: "2.50 USD", or a kind of price: on-demand, spot, …
    grid: str = ""  # "france", or "0.4 kg/kWh"; "" leaves CO2 unknown
    load: Share | None = None  # drawn of the rated power; None: memfit's assumption
    pue: AtLeastOne = 1.0  # power of the whole site over that of the devices


class Limits(Record, frozen=True, kw_only=True):
    """What may be spent; an empty text sets no limit of its own."""

    memory: Size = ""  # of the whole device on CUDA; of the process on a CPU. "72 GiB"
    time: Duration = ""
    cost: Money = ""
    host_memory: Size = ""  # of each machine, for what `offload` keeps there
    tight: bool = False  # take what fits by its typical figures, though not by its whole band

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes; None when none is set."""
        return units.parse_bytes(self.memory) if self.memory else None

    @property
    def host_bytes(self) -> int | None:
        """What may be offloaded to each machine's memory, in bytes; None when no limit is set."""
        return units.parse_bytes(self.host_memory) if self.host_memory else None

    @property
    def seconds(self) -> float | None:
        """The time limit in seconds; None when none is set."""
        return units.parse_seconds(self.time) if self.time else None

    @property
    def usd(self) -> float | None:
        """The money limit in US dollars; None when none is set."""
        return units.parse_usd(self.cost) if self.cost else None


class Request(Record, frozen=True, kw_only=True):
    """The whole of request.yaml."""

    schema: Literal[1] = 1
    model: str | dict[str, Any]  # catalogue name, hub id, folder; or the content of a config.json
    weights: Literal["auto", "pretrained", "random"] = "auto"
    task: Task = Task()
    preference: PreferenceRequest = PreferenceRequest()
    rollout: RolloutRequest = RolloutRequest()
    policy: PolicyRequest = PolicyRequest()
    ppo: PpoRequest = PpoRequest()
    reward: RewardRequest = RewardRequest()
    method: Literal["auto", "full", "freeze", "lora", "dora"] = "auto"
    lora: LoraRequest = LoraRequest()
    freeze: Freeze = Freeze()
    base_format: str = "auto"  # or a name of `memfit.base_formats`
    quantisation: QuantisationRequest = QuantisationRequest()
    precision: Auto | Precision = "auto"
    regularisation: Regularisation = Regularisation()
    optimizer: OptimizerRequest = OptimizerRequest()
    recompute: Literal["auto", "none", "full", "selective"] | RecomputeBlocks = "auto"
    attention: Auto | Attention = "auto"
    loss: Auto | Loss = "auto"
    loss_chunk: NotNegative = 0  # tokens per chunk; 0 chooses
    micro_batch: Positive | Auto = "auto"
    qat: Literal["none", "int8", "int4"] = "none"
    lean: Literal["auto", "none", "all"] | tuple[Lean, ...] = "auto"
    compile: Auto | Compile = "auto"
    offload: Auto | Offload = "none"
    framework: str = OWN_STEP
    options: dict[str, Option] = {}  # noqa: RUF012 (knobs that only this framework has)
    parallel: Literal["auto"] | Parallel = "auto"
    allocator: str = ""  # as in PYTORCH_ALLOC_CONF ("expandable_segments:True"); "keep_freed:True"
    hardware: Hardware = Hardware()
    limits: Limits = Limits()
    run: RunRequest = RunRequest()
    tokenizer: str = ""  # a folder or hub id; "" uses the model's own
    seed: NotNegative = 0

    @classmethod
    def prepare(cls, data: Any) -> Any:
        """The data with counts such as `8k` as numbers and `method: qlora` as what it stands for.

        Raises InvalidRequest where qlora's format and the one stated differ.
        """
        if not isinstance(data, Mapping):
            return data
        check_data(data, source="the request")
        _check_keys(data)
        for key, value in data.items():
            if key != "model":  # a published config.json may hold Infinity
                _check_finite(value, str(key))
        task = data.get("task")
        name = task.get("objective") if isinstance(task, Mapping) else None
        if isinstance(name, str) and (hint := describe_value("task.objective", name)):
            raise InvalidRequest(f"unknown objective: `{name}`", hint=hint)
        return read_looser(data)

    @classmethod
    def describe_unknown(cls, key: str, value: object) -> str:
        """How a word of another trainer is written here; "" for a word of no known trainer."""
        return describe_word(key, value)

    @classmethod
    def describe_value(cls, key: str, value: object) -> str:
        """Where a value of another key, or of another trainer, is written; "" for others."""
        return describe_value(key, value)

    @property
    def is_own(self) -> bool:
        """Whether the request is of memfit's own step."""
        return self.framework == OWN_STEP

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.hardware.count * self.hardware.nodes

    @property
    def ranks(self) -> int:
        """Processes that the mesh or the hardware asks for, whichever are more."""
        return max(self.devices, 1 if self.parallel == "auto" else self.parallel.world)

    @property
    def shares(self) -> int:
        """Of these, ranks with rows of their own: those that share products, or rows, have the
        same, and so have all stages."""
        p = self.parallel
        return self.ranks if p == "auto" else self.ranks // (p.tp * p.cp * p.pp)

    @property
    def least_rows(self) -> int:
        """Rows of the smallest micro-batch: the stated one; else one row, or one pair."""
        if self.micro_batch != "auto":
            return self.micro_batch
        return find_objective(self.task.objective).least_rows

    @property
    def generations(self) -> int:
        """Answers to each prompt; 1 where none are sampled."""
        sampled = find_objective(self.task.objective).sampled
        if sampled is None:
            return 1
        stated = self.rollout.num_generations
        return sampled.num_generations if stated == "auto" else stated

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step: the stated number, else about `USUAL_BATCH`."""
        stated = self.task.global_batch
        if stated != "auto":
            return stated
        each = math.lcm(self.shares * self.least_rows, self.generations)
        if self.is_own:  # whose ranks each sample all answers to prompts of their own
            each = math.lcm(each, self.shares * self.generations)
        return -(-USUAL_BATCH // each) * each

    @property
    def planned(self) -> Request:
        """The same without what no plan depends on: how a run goes on around its steps."""
        return msgspec.structs.replace(self, run=RunRequest())

    @property
    def with_batch(self) -> Request:
        """The same with its global batch stated, so that it stays when the devices change."""
        task = msgspec.structs.replace(self.task, global_batch=self.global_batch)
        return msgspec.structs.replace(self, task=task)

    def __post_init__(self) -> None:
        """Quantities are checked when the request is read, not when they are first needed."""
        limits = self.limits
        for value in (limits.memory_bytes, limits.host_bytes, limits.seconds, limits.usd):
            del value
        lengths = [k for k in ("steps", "epochs", "tokens") if getattr(self.task, k) is not None]
        if len(lengths) > 1:
            raise InvalidRequest(
                f"`task.{lengths[0]}` and `task.{lengths[1]}` both say how long to train",
                hint="keep one of steps, epochs, tokens",
            )
        if self.task.evaluation and self.task.evaluation_share:
            raise InvalidRequest(
                f"`task.evaluation: {self.task.evaluation}` and `task.evaluation_share:"
                f" {self.task.evaluation_share:g}` both say what is held out",
                hint="keep one of the two",
            )
        if self.task.learns != "answers" and self.task.objective != "sft":
            raise InvalidRequest(
                f"`task.learns: {self.task.learns}` is of `objective: sft`, and the objective is"
                f" `{self.task.objective}`",
                hint="leave `task.learns` out",
            )
        if self.base_format != "auto":
            check_base_format(self.base_format)
        check_regularisation(self.task.objective, self.regularisation)
        check_lora_plus(self.method, self.optimizer.lora_plus)
        if self.is_own:
            self._check_own()
            return
        self._check_others()

    def _check_others(self) -> None:
        """Refuse what only memfit's own step has."""
        for name in ("lora_plus", "layer_decay"):
            if value := getattr(self.optimizer, name):
                raise InvalidRequest(
                    f"`optimizer.{name}: {value:g}` is of memfit's own step, and"
                    f" `framework: {self.framework}` is asked for",
                    hint=f"use `framework: memfit`, or leave `optimizer.{name}` out",
                )
        if self.regularisation != Regularisation():
            raise InvalidRequest(
                "`regularisation` is of memfit's own step, and"
                f" `framework: {self.framework}` is asked for",
                hint="use `framework: memfit`, or leave `regularisation` out",
            )
        if self.qat != "none":
            raise InvalidRequest(
                f"`qat` is of memfit's own step, and `framework: {self.framework}` is asked for",
                hint="use `framework: memfit`, or leave `qat` out",
            )
        if self.lean not in ("none", "auto"):
            raise InvalidRequest(
                f"`lean` is of memfit's own step, and `framework: {self.framework}` is asked for",
                hint="use `framework: memfit`, or leave `lean` out",
            )

    def _check_own(self) -> None:
        """Refuse what only other frameworks' steps have; memfit's does not do it silently."""
        hint = "`framework: megatron`, `hf-trainer`, … predict the steps of others"
        if self.loss == "fused":
            raise InvalidRequest(
                "`loss: fused`: torch's `linear_cross_entropy` is one operator, so that a"
                " certificate does not see the logits inside it, and its loss of 16-bit products"
                " is rounded to 16 bits",
                hint="use `loss: chunked`, which holds as few logits, with an exact loss in fp32",
            )
        for name, own in OWN_VALUES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in ("auto", *own):
                raise InvalidRequest(
                    f"`{name}: {value}` is not in memfit's own step, which has"
                    f" {', '.join(map(str, own))}",
                    hint=hint,
                )
        if self.base_format != "auto" and not find_base_format(self.base_format).own:
            raise InvalidRequest(
                f"`base_format: {self.base_format}` is not in memfit's own step, which has"
                f" {', '.join(own_formats())}",
                hint=hint,
            )
        if LIGER in self.options:
            raise InvalidRequest(
                f"`options.{LIGER}`: Liger's kernels are launched with the address of each tensor,"
                " and a fake tensor has none, so that no certificate could trace the step",
                hint="use `lean: [norm, mlp]` and `loss: chunked`, which are the same mathematics",
            )
        if self.options:
            raise InvalidRequest(
                f"`options.{next(iter(self.options))}` is set, and memfit's own step has no"
                " `options`",
                hint=hint,
            )
        if self.parallel != "auto":
            plain = Parallel()
            for name in self.parallel.__struct_fields__:
                value = getattr(self.parallel, name)
                if name not in OWN_AXES and value != getattr(plain, name):
                    raise InvalidRequest(
                        f"`parallel.{name}: {value}` is not in memfit's own step, which has"
                        f" {', '.join(OWN_AXES)}",
                        hint=hint,
                    )


def _check_keys(value: Any) -> None:
    """Raise InvalidRequest for a key that is no text, as YAML's `1: a` has one, at any depth."""
    inner: Any = value if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str)), "")
        if not isinstance(odd, str):
            raise InvalidRequest(
                f"the key `{shorten(odd)}` in the request is no text", hint="write it in quotes"
            )
        inner = value.values()
    for part in inner:
        _check_keys(part)


def _check_finite(value: Any, key: str) -> None:
    """Raise InvalidRequest for a number that is infinite or none, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"`{key}: {value}` is not a finite number", hint="write one")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_finite(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_finite(inner, key)


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a request's data; raises InvalidRequest where a parent is no mapping."""
    *parents, last = key.split(".")
    for parent in parents:
        if data.get(parent, "auto") == "auto":  # what is left open is stated from here on
            data[parent] = {}
        data = data[parent]
        if not isinstance(data, dict):
            raise InvalidRequest(f"`{key}` cannot be set: `{parent}` holds a value, not keys")
    data[last] = value


def change(request: Request, changes: Mapping[str, Any]) -> Request:
    """The request with dotted keys set, as `--set` does."""
    data = to_data(request)
    for key, value in changes.items():
        put(data, key, value)
    return from_data(data, Request, source="the changed request")


def read_request(path: Path) -> Request:
    """Read request.yaml (YAML 1.2, so `2e-4` is a number and `no` is a text) or request.json.

    Raises InvalidRequest: no such file, not YAML (line and column named), unknown key, wrong type.
    """
    return from_data(read_yaml(path), Request, source=str(path))


def read_yaml(path: Path, *, hint: str = "", version: str = "1.2") -> dict[str, Any]:
    """Safely read one YAML mapping; hint: what to write, where a file holds none.

    version: of YAML, where the file says none; in 1.1 `yes` and `off` are booleans.
    """
    missing = "" if is_file(path) or hint else "`memfit init` writes a commented one"
    text = read_text(path, hint=missing or "YAML or JSON of keys with values, in UTF-8")
    data = parse_yaml(text, source=f"`{shorten(path, 300)}`", version=version)
    if not isinstance(data, dict):
        held = "is empty" if data is None else f"holds {name_kind(data)}"
        own = "start with `model: llama-3.1-8b`; `memfit init` writes a commented file"
        raise InvalidRequest(f"`{path}` {held}, not keys with values", hint=hint or own)
    return data


def find_weights(request: Request, reference: ModelReference) -> Literal["pretrained", "random"]:
    """`pretrained` where there is something to load, unless the request says otherwise."""
    if request.weights != "auto":
        if request.weights == "pretrained" and not reference.source:
            raise InvalidRequest(
                f"`weights: pretrained`, but `{reference.name}` is only a configuration",
                hint="name a folder with safetensors or a hub id, or use `weights: random`",
            )
        return request.weights
    if not reference.source:
        return "random"
    folder = Path(reference.source)
    if is_folder(folder):
        return "pretrained" if any(folder.glob("*.safetensors")) else "random"
    return "pretrained"
