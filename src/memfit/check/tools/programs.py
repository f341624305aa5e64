"""A Python program or a notebook that makes a trainer of TRL's, or transformers' own.

What its classes are called with are the arguments of TRL's command line; defaults are the classes'.
Source: transformers 5.24, TRL 1.16, peft 0.21 (tuners/lora/config.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

from memfit.check import ConfigReading, Reader, readers
from memfit.check.arguments import LENGTHS, put_objective, read_arguments
from memfit.check.keys import ConfigKeys, Least
from memfit.check.programs import Computed, Made, Program, read_program
from memfit.check.refused_files import is_of_unsloth, is_script
from memfit.check.smaller_changes import Edit
from memfit.core.errors import InvalidRequest
from memfit.workflows.load_inputs import put

# what each trainer trains, "" as transformers' own, and what its second positional argument is
TRAINERS = {
    "SFTTrainer": "sft", "DPOTrainer": "dpo", "GRPOTrainer": "grpo",
    "RLOOTrainer": "rloo", "KTOTrainer": "kto", "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo", "RewardTrainer": "reward", "PPOTrainer": "ppo",
    "OnlineDPOTrainer": "online_dpo", "Trainer": "", "Seq2SeqTrainer": "",
}  # fmt: skip
SECOND = {"dpo": "ref_model", "grpo": "reward_funcs", "rloo": "reward_funcs"}
# of a model's class, of bitsandbytes' and of peft's -> TRL's
LOADED = {"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attn_implementation",
          "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit",
          "device_map": "device_map"}  # fmt: skip
BITS = {"load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit",
        "bnb_4bit_quant_type": "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
        "bnb_4bit_quant_storage": "bnb_4bit_quant_storage"}  # fmt: skip
ADAPTERS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
}
OF_PEFT = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # its own defaults
PREPARED = "prepare_model_for_kbit_training"  # what is not quantised becomes fp32
COMPUTE = "bnb_4bit_compute_dtype"
# what moves no memory: of a model's loading, of adapters, of a trainer
QUIET_LOADS = frozenset((
    "trust_remote_code", "use_cache", "revision", "token", "use_auth_token", "cache_dir",
    "low_cpu_mem_usage", "use_safetensors", "local_files_only", "quantization_config",
    "pretrained_model_name_or_path", "peft_config", "pad_token_id", "eos_token_id",
))  # fmt: skip
QUIET_ADAPTERS = frozenset(("task_type", "inference_mode", "base_model_name_or_path"))
QUIET_TRAINERS = frozenset((
    "model", "args", "peft_config", "train_dataset", "eval_dataset", "tokenizer", "callbacks",
    "processing_class", "data_collator", "formatting_func", "reward_processing_classes",
))  # fmt: skip
FREE = frozenset((  # what may be computed: no byte follows from it
    "learning_rate", "weight_decay", "warmup_steps", "warmup_ratio", "max_grad_norm", "seed",
    "num_train_epochs", "max_steps", "lr_scheduler_type", "lora_alpha", "lora_dropout",
))  # fmt: skip
STATED = {  # on memfit's command line, in place of what is computed
    "model_name_or_path": "model", "max_length": "task.sequence_length",
    "max_seq_length": "task.sequence_length", "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "task.global_batch", "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets", "optim": "optimizer.name", "bf16": "precision",
    "fp16": "precision", "num_generations": "rollout.num_generations",
    "max_completion_length": "rollout.max_completion_length",
    "max_prompt_length": "rollout.max_prompt_length",
}  # fmt: skip
HAPPENED: dict[str, tuple[Least, str]] = {
    "requires_grad": ("weights", "the program decides which weights are trained"),
    PREPARED: ("nothing", "a model that is not quantised becomes fp32"),
    "dtype": ("nothing", "the program stores the model in another precision"),
    "add_adapter": ("weights", "the program adds adapters by itself"),
}


class Arguments(NamedTuple):
    """A program's trainer as its command line would be."""

    objective: str  # "" is what transformers' own Trainer trains
    trainer: str  # the class
    data: dict[str, Any]
    happened: dict[str, str]
    lengths: list[int]


@final
class ProgramsReader(Reader):
    """A Python program's one trainer."""

    name: ClassVar = "programs"
    title: ClassVar = "a program's trainer"

    def recognises(self, data: Mapping[str, Any], file: Path) -> bool:
        """See `Reader.recognises`."""
        program = file.suffix == ".ipynb" or (file.suffix == ".py" and is_script(file))
        return program and not is_of_unsloth(file) and bool(_find_trainers(read_program(file)))

    def load(
        self, file: Path, config: str, arguments: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The parts of the trainer, as `Arguments` names them."""
        self.refuse_config(file, config)
        program = read_program(file, arguments)
        found = _find_trainers(program)
        if len(found) > 1:
            named = ", ".join(f"`{one.name}`" for one in found)
            raise InvalidRequest(
                f"`{file}` makes {len(found)} trainers: {named}",
                hint="keep the one that is asked about in a file of its own",
            )
        return _describe(program, found[0])._asdict()

    def read(self, taken: ConfigKeys, reading: ConfigReading) -> None:
        """See `Reader.read`."""
        own = Arguments(**{key: taken.data[key] for key in Arguments._fields})
        taken.data.clear()  # what it holds is read as the files of other tools are
        quantised = own.data.get("load_in_4bit") or own.data.get("load_in_8bit")
        if quantised and not reading.own and (PREPARED in own.happened or not own.objective):
            reading.put("options.prepare_kbit", own.happened.pop(PREPARED, "") != "")
        for name, text in own.happened.items():
            if name in HAPPENED:
                least, why = HAPPENED[name]
                taken.leave(name, text, why, least)
        if "resize_token_embeddings" in own.happened:
            reading.assume("rows that `resize_token_embeddings` adds are not counted")
        if "stored" in own.happened:
            reading.assume(
                "`from_pretrained` without `dtype` loads what is stored, as transformers 5 does; 4"
                " made it float32"
            )
        data = _settle(own, taken.file, reading)
        if own.objective:
            put_objective(own.objective, own.trainer, taken.file, reading)
        read_arguments(own.trainer, data, taken, reading, plain=not own.objective)

    def edits(self, data: Mapping[str, Any]) -> Iterable[Sequence[Edit]]:
        """See `Reader.edits`."""
        return readers.find("trl").edits(data["data"])

    def change(self, data: dict[str, Any], key: str, value: Any) -> None:
        """See `Reader.change`: a key is an argument."""
        put(data["data"], key, value)


def _find_trainers(program: Program) -> list[Made]:
    """The trainers that a program makes and that are described."""
    return [one for one in program.trainers if program.classes.get(one.name, one.name) in TRAINERS]


def _describe(program: Program, trainer: Made) -> Arguments:
    """A trainer's model, adapters and arguments in the words of TRL's command line."""
    kind = program.classes.get(trainer.name, trainer.name)
    named = TRAINERS[kind]
    second = named in SECOND
    config = trainer.get("args", 2 if second else 1)
    data = _read_config(config, kind)
    data |= {
        key: value if key in STATED else _find_computed(value) or value  # legacy ones are read
        for key, value in trainer.keywords.items()
        if key not in QUIET_TRAINERS and value is not None
    }
    if second and (other := trainer.get(SECOND[named], 1)) is not None:
        data[SECOND[named]] = other
    model = trainer.get("model", 0)
    loaded = data.pop("model_init_kwargs", None) or {}
    if isinstance(model, Made):
        adapters = trainer.get("peft_config") or model.get("peft_config")
        name = model.get("pretrained_model_name_or_path", 0)
        loaded = {_dtype(k): v for k, v in model.keywords.items()}
    else:
        adapters, name = trainer.get("peft_config"), model
    data["model_name_or_path"] = Computed("model") if name is None else name
    data |= _read_loading(loaded) | _read_adapters(adapters)
    happened = dict(program.happened)
    if isinstance(model, Made) and "dtype" not in data:
        data["dtype"] = happened["stored"] = "auto"
    if "gradient_checkpointing_enable" in happened:
        data.setdefault("gradient_checkpointing", True)
    if kind != trainer.name:
        data[f"class {trainer.name}"] = f"{kind} with methods of the program's own"
    _settle_others(data, name)
    lengths = [n for n in program.lengths if isinstance(n, int)]
    lengths += [
        n for key, n in program.names.items()
        if isinstance(n, int) and not lengths and key.lower() in {*LENGTHS, "max_length"}
    ]  # fmt: skip
    return Arguments(named, trainer.name, data, happened, [*dict.fromkeys(lengths)])


def _dtype(key: str) -> str:
    return "dtype" if key == "torch_dtype" else key


def _read_config(config: Any, kind: str) -> dict[str, Any]:
    """The arguments of `SFTConfig` and its like; the first is the folder of what it writes."""
    if config is None:
        return {}
    if not isinstance(config, Made) or not config.name.endswith(("Config", "Arguments")):
        text = config.text if isinstance(config, Computed) else getattr(config, "name", config)
        raise InvalidRequest(
            f"`{kind}` is given `args={text}`, which is known where the program runs",
            hint="name the shell script, or the YAML, that states the program's arguments",
        )
    return {key: value for key, value in config.keywords.items() if value is not None}


def _read_loading(loaded: Any) -> dict[str, Any]:
    """How the model is loaded."""
    if not isinstance(loaded, Mapping):
        return {"model_init_kwargs": loaded}
    found: dict[str, Any] = {LOADED.get(str(key), str(key)): value for key, value in loaded.items()
                             if key not in QUIET_LOADS and value is not None}  # fmt: skip
    bits = loaded.get("quantization_config")
    if bits is None:
        return found
    if not isinstance(bits, Made) or bits.name != "BitsAndBytesConfig":
        return {**found, "quantization_config": getattr(bits, "text", getattr(bits, "name", bits))}
    found["bnb_4bit_quant_type"] = "fp4"  # bitsandbytes' own default
    found |= {BITS.get(key, key): value for key, value in bits.keywords.items() if key != COMPUTE}
    if found.get("load_in_4bit") and bits.get(COMPUTE) in (None, "float32"):
        found[COMPUTE] = "float32"  # its own default: the base's products are in fp32
    return found


def _read_adapters(adapters: Any) -> dict[str, Any]:
    if adapters is None:
        return {}
    if not isinstance(adapters, Made) or adapters.name != "LoraConfig":
        name = getattr(adapters, "text", getattr(adapters, "name", adapters))
        return {"use_peft": True, "peft_config": name}
    stated = {key: value for key, value in adapters.keywords.items()
              if key not in QUIET_ADAPTERS and value not in (None, "none")}  # fmt: skip
    return {"use_peft": True, **OF_PEFT, **{ADAPTERS.get(k, k): v for k, v in stated.items()}}


def _settle_others(data: dict[str, Any], name: Any) -> None:
    """Other models: a reference that TRL would make itself, functions that judge answers."""
    other = data.get("ref_model")
    if isinstance(other, Made) and other.get("pretrained_model_name_or_path", 0) == name:
        data.pop("ref_model")  # TRL's own is a copy, too
    judges = data.get("reward_funcs")
    for judge in judges if isinstance(judges, list) else [judges]:
        if isinstance(judge, Made):
            data["reward_model_path"] = judge.get("pretrained_model_name_or_path", 0) or judge.name
        elif isinstance(judge, str):
            data["reward_model_path"] = judge
    data.pop("reward_funcs", None)


def _settle(own: Arguments, file: Path, reading: ConfigReading) -> dict[str, Any]:
    """The arguments without what is computed, which has to be known where bytes follow from it."""
    reader, data = readers.find("trl"), dict[str, Any]()
    stated = [key for key in own.data if STATED.get(key) in reading.overrides]
    for key, value in own.data.items():
        text = _find_computed(value)
        if key == "device_map" and reading.count("hardware.count") == 1:
            continue
        if key in stated:
            if key == "model_name_or_path":
                data[key] = reading.model
        elif text is None:
            data[key] = value.name if isinstance(value, Made) else value
        elif key not in reader.still and key not in FREE:
            way = STATED.get(key)
            raise InvalidRequest(
                f"`{key}` of `{own.trainer}` in `{file}` is `{text}`, which is known where the"
                " program runs",
                hint=f"`--set {way}=…` states it" if way else "write its value in the program",
            )
    if not own.objective and "task.sequence_length" not in reading.overrides:
        if len(own.lengths) != 1:
            raise InvalidRequest(
                f"`{file}` does not say how long rows are: `{own.trainer}` takes them as they are",
                hint="`--set task.sequence_length=N` states their tokens",
            )
        data["max_length"] = own.lengths[0]
        reading.assume(f"rows are of {own.lengths[0]} tokens, to which the program cuts them")
    return data


def _find_computed(value: Any) -> str | None:
    """The text of a value, or of a part of it, that is known where the program runs."""
    if isinstance(value, Computed):
        return value.text
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((text for part in parts if (text := _find_computed(part)) is not None), None)


readers.register("programs")(ProgramsReader())
