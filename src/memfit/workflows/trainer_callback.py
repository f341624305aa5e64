"""A callback for Hugging Face's Trainer and TRL's: does it fit, and how right was that?

    trainer = Trainer(model, args, …, callbacks=[memfit.MemoryCallback()])

Before the first step the arguments, the model and the data are read as `memfit check` reads files,
and the step is predicted. After the first step CUDA's own counters stand beside the prediction.
The Trainer calls a callback's methods by their names, so that nothing is imported from it here.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from memfit import api
from memfit.check.answers import Answer
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.core.libraries import installed_versions
from memfit.core.units import show_bytes
from memfit.plan.frameworks.hugging_face.pairs import TILED
from memfit.records import Record
from memfit.records.results import Plan
from memfit.records.tables import Rows, Tabled
from memfit.workflows.live_model import read_live
from memfit.workflows.python_verbs import read_words

WHOLE = "0.29"  # the version that stands for all whose loss is of whole logits
MOST_ROWS = 20_000  # of the training data, whose lengths are looked at
SECRETS = ("hub_token", "push_to_hub_token")
OFTEN = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing",
         "bf16", "fp16", "optim")  # fmt: skip
# keys whose values follow from others, or are said of the device instead
ELSEWHERE = ("activation_checkpointing", "use_cpu", "accelerator_config", "output_dir",
             "dataloader_pin_memory", "local_rank", "world_size")  # fmt: skip


class Counted(Record, frozen=True, kw_only=True):
    """One quantity, predicted and measured, in bytes; None is unknown."""

    name: str
    predicted: int | None
    measured: int | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        if not self.predicted or not self.measured:
            return None
        return self.predicted / self.measured - 1


class StepReport(Tabled, frozen=True, kw_only=True):
    """What the first step was predicted to hold, and what CUDA counted."""

    subject: str
    rows: tuple[Counted, ...]
    why_unknown: str = ""  # why nothing was measured

    def tables(self) -> Mapping[str, Rows]:
        """See `Tabled`."""
        return {"memory": self.rows}

    def __str__(self) -> str:
        """One line a quantity."""
        lines = [f"memfit: memory of a step of {self.subject}"]
        for row in self.rows:
            error = "" if row.error is None else f" ({row.error:+.1%})"
            lines.append(
                f"  {row.name}: predicted {_show(row.predicted)},"
                f" measured {_show(row.measured)}{error}"
            )
        return "\n".join([*lines, *([f"  {self.why_unknown}"] if self.why_unknown else [])])


def _show(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else show_bytes(nbytes)


class MemoryCallback:
    """Predicts a Trainer's step before it runs, and holds the prediction against the counters.

    sequence_length: tokens of the longest row; None takes the longest of the training data, and at
    most the arguments' `max_length`. on_miss: what is done where the prediction does not fit,
    `raise` (DoesNotFit), or `warn`. say: where its lines go; stderr. words: as those of
    `memfit.check`, such as `device="a100-sxm-80"`; without one it is the machine's own.

    After training starts `.plan` is the prediction and `.answer` its verdict; after the first step
    `.report` holds both sides.
    """

    def __init__(
        self,
        *,
        sequence_length: int | None = None,
        on_miss: Literal["raise", "warn"] = "raise",
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),  # noqa: T201
        **words: Any,
    ) -> None:
        if on_miss not in ("raise", "warn"):
            raise InvalidRequest(f"`on_miss={on_miss}` is not known", hint="`raise` or `warn`")
        self._length, self._on_miss, self._say = sequence_length, on_miss, say
        self._words = read_words(words)
        self.plan: Plan | None = None
        self.answer: Answer | None = None
        self.report: StepReport | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The Trainer's other events, of which nothing is to be done."""
        if name.startswith("on_"):
            return lambda *arguments, **words: None
        raise AttributeError(f"`MemoryCallback` has no attribute `{name}`")

    def on_train_begin(self, args: Any, state: Any, control: Any, **around: Any) -> None:
        """Predict the step and say the verdict; raises DoesNotFit unless `on_miss` is `warn`."""
        self.plan, self.answer = self._predict(args, around)
        memory = self.plan.memory
        self._say(
            f"memfit: {self.plan!r}{f'; {self.answer.headline}' * bool(self.answer.headline)}"
        )
        if self.answer.verdict == "does_not_fit" and self._on_miss == "raise":
            raise DoesNotFit(
                f"this Trainer's step needs {_show(memory.needed)} of {_show(memory.usable)}",
                hint="`memfit check` names the smallest change with which it fits;"
                " `MemoryCallback(on_miss='warn')` trains all the same",
            )
        if cuda := _counters():
            cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **around: Any) -> None:
        """After the first step: predicted beside measured."""
        if self.report is not None or self.plan is None:
            return
        memory, cuda = self.plan.memory, _counters()
        peaks = (cuda.max_memory_allocated(), cuda.max_memory_reserved()) if cuda else (None, None)
        recipe = self.plan.recipe
        self.report = StepReport(
            subject=f"{recipe.model.name} on {recipe.placed_on}",
            rows=(
                Counted(name="allocated", predicted=memory.peak_allocated, measured=peaks[0]),
                Counted(name="reserved", predicted=memory.peak_reserved, measured=peaks[1]),
            ),
            why_unknown="" if cuda else "nothing was measured: this process has no CUDA device",
        )
        self._say(str(self.report))

    def _predict(self, args: Any, around: Mapping[str, Any]) -> tuple[Plan, Answer]:
        model = around.get("model")
        live = read_live(model)
        data: dict[str, Any] = {"model": live["model"]}
        written = _changed(args)
        written["model_name_or_path"] = live["model"]["name"]
        if "max_length" not in {f.name for f in dataclasses.fields(args)}:
            data["framework"] = "hf-trainer"
        elif version := _version_of_trl():
            data["options"] = {"version": version}
        written["max_length"] = self._find_length(args, around.get("train_dataloader"))
        written |= _of_model(model, live)
        api.put_all(data, {"hardware.device": "auto", "hardware.count": args.world_size})
        api.put_all(data, self._words)
        with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
            file = Path(folder) / "trainer.json"
            file.write_text(json.dumps(written, default=str))
            checked, plan = api.check([file], data)
        return plan, api.judge(checked, plan)

    def _find_length(self, args: Any, loader: Any) -> int:
        most: int | None = getattr(args, "max_length", None)
        longest = self._length or _longest_row(loader)
        if found := min((n for n in (most, longest) if n), default=0):
            return found
        raise InvalidRequest(
            "how long the training data's rows are cannot be seen",
            hint="name the longest row's tokens: `MemoryCallback(sequence_length=2048)`",
        )


def _changed(args: Any) -> dict[str, Any]:
    """The arguments that differ from their defaults, and those that a step's memory rests on."""
    found = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        made = field.default_factory
        default = made() if made is not dataclasses.MISSING else field.default
        if field.name in SECRETS or field.name in ELSEWHERE:
            continue
        if field.name in OFTEN or value != default:
            found[field.name] = getattr(value, "value", value)
    return {key: value for key, value in found.items() if value not in (None, [], {}, "")}


def _version_of_trl() -> str:
    """The option that stands for the installed TRL's loss; "" where it is the newest described."""
    found = installed_versions(["trl"])["trl"]
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    newer = not numbers or numbers >= tuple(map(int, TILED.split(".")))
    return "" if newer else WHOLE


def _of_model(model: Any, live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's keys of TRL's files, read from the model."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    frozen = [p.dtype for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    written: dict[str, Any] = {
        "dtype": str((frozen or dtypes)[0]).removeprefix("torch."),
        "attn_implementation": getattr(model.config, "_attn_implementation", None) or "sdpa",
    }
    if live.get("method") in ("freeze", "dora"):
        raise InvalidRequest(
            f"`method: {live['method']}` is not described of this Trainer's step",
            hint="described: all weights trained, and peft's LoRA",
        )
    if live.get("method") == "lora":
        lora = live["lora"]
        written |= {
            "use_peft": True, "lora_r": lora["rank"], "lora_alpha": lora["alpha"],
            "lora_dropout": lora["dropout"], "lora_target_modules": lora["targets"],
            "use_rslora": lora["scaling"] != "plain",
        }  # fmt: skip
    if (base_format := live.get("base_format")) in ("int8", "nf4", "fp4"):
        bits = {"load_in_8bit": True} if base_format == "int8" else {"load_in_4bit": True}
        written |= bits | ({} if base_format == "int8" else {"bnb_4bit_quant_type": base_format})
    return written


def _longest_row(loader: Any) -> int:
    """Tokens of the longest row of the data; 0 where rows have no `input_ids` to be counted."""
    data = getattr(loader, "dataset", None)
    try:
        number = min(len(data), MOST_ROWS)  # type: ignore[arg-type]
        return max((len(data[at]["input_ids"]) for at in range(number)), default=0)  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        return 0


def _counters() -> Any:
    """torch.cuda, where this process has a device; None elsewhere."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None
