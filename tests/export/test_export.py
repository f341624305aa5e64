"""Plans as other tools' files: nothing is dropped, figures are of the tool's own step."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from ruamel.yaml import YAML

import neighbour_plans
from changed_keys import change, is_described, keys
from memfit import api
from memfit.cli.app import app, run
from memfit.core.errors import DoesNotFit, InvalidRequest, UnknownName
from memfit.export import list_keys
from memfit.export.target import exports, find_target
from memfit.export.targets.megatron import LOSS
from memfit.plan.request.wording import restate
from memfit.records import from_data
from memfit.records.request import Request

ROOT = Path(__file__).resolve().parents[2]
TARGETS = exports.names()
PLANS = list(neighbour_plans.REQUESTS)
FOREIGN = [name for name in PLANS if not name.startswith("own")]
SCHEDULERS = ("slurm", "skypilot", "dstack", "k8s", "ray")
TRAINERS = [name for name in TARGETS if name not in SCHEDULERS]

# knobs without an effect in this plan: of experts that a model has not, of another recomputing
INERT = {
    ("megatron-3d", "megatron"): {
        "options.moe_router_topk", "options.moe_ffn_hidden_size", "options.moe_grouped_gemm",
        "options.moe_shared_expert_intermediate_size", "options.moe_token_dispatcher_type",
        "options.recompute_modules", "options.fp8_recipe", "options.cp_comm_type",
        "options.untie_embeddings_and_output_weights", "options.disable_bias_linear",
    }
}  # fmt: skip


def body(made):
    """What the files say without their heads, and what is said to be left out."""
    lines = {}
    for name, text in made.files.items():
        if name.endswith(".json"):
            lines[name] = {k: v for k, v in json.loads(text).items() if k != "memfit"}
        else:
            lines[name] = [line for line in text.splitlines() if not line.startswith("# ")]
    return lines, made.left_out, made.changed, made.notes


def export_or_none(plan, target):
    try:
        return api.export(plan, target)
    except (InvalidRequest, DoesNotFit):
        return None


OF_TARGET = [
    (name, target) for target in TRAINERS
    for name in ("hf-qlora", "trl-full-fsdp", "deepspeed-zero3", "torchtitan-fsdp", "megatron-3d")
    if neighbour_plans.REQUESTS[name]["framework"] in find_target(target).frameworks
]  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize(("name", "target"), OF_TARGET)
def test_every_key_is_said_or_listed(name, target):
    wide = api.change(neighbour_plans.find_request(name), {"hardware.device": "h100-sxm"})
    plan = api.predict(wide)  # which fits: of what does not, open knobs are decided again
    before = api.export(plan, target)
    dropped = []
    for key, value in keys(plan.recipe):
        if not is_described(plan.recipe, key, value):
            continue
        after = export_or_none(change(plan, key, value), target)
        if after is not None and body(after) == body(before):
            dropped.append(key)
    assert set(dropped) <= INERT.get((name, target), set())


@pytest.mark.parametrize("name", FOREIGN)
def test_a_plan_restated_is_the_same_recipe(name):
    plan = neighbour_plans.find_plan(name)
    again = api.predict(restate(plan))
    assert again.recipe_digest == plan.recipe_digest
    assert again.memory.peak_allocated == plan.memory.peak_allocated


@pytest.mark.parametrize(("name", "target"), [
    ("deepspeed-zero2", "deepspeed"), ("torchtitan-3d", "torchtitan"),
    ("megatron-experts", "megatron"), ("megatron-3d", "slurm"), ("own-full", "k8s"),
])  # fmt: skip
def test_the_peak_of_a_plans_own_framework_is_the_plans(name, target):
    plan = neighbour_plans.find_plan(name)
    made = api.export(plan, target)
    assert made.peak.peak_allocated == plan.memory.peak_allocated
    assert made.peak.device_total == plan.memory.device_total


def test_the_peak_is_of_what_the_tool_does():
    """axolotl loads weights in bf16: of full training in bf16-mixed, its peak is bf16's."""
    plan = neighbour_plans.find_plan("hf-full-recompute")
    low = replace(neighbour_plans.find_request("hf-full-recompute"), precision="bf16")
    made = api.export(plan, "axolotl")
    assert made.changed["precision"].startswith("bf16-mixed -> bf16: weights are loaded in 16 bits")
    assert made.peak.peak_allocated == api.predict(low).memory.peak_allocated
    assert made.peak.peak_allocated < plan.memory.peak_allocated


def test_a_method_that_the_tools_step_is_not_described_with_is_refused():
    with pytest.raises(InvalidRequest, match=r"`method: freeze` cannot be written for `axolotl`"):
        api.export(neighbour_plans.find_plan("own-freeze"), "axolotl")


@pytest.mark.parametrize(("name", "target", "key"), [
    ("megatron-3d", "trl", "parallel.tp"), ("torchtitan-3d", "accelerate", "parallel.pp"),
    ("megatron-experts", "torchtitan", "parallel.ep"),
])  # fmt: skip
def test_axes_that_a_target_lacks_are_refused(name, target, key):
    with pytest.raises(InvalidRequest, match=key):
        api.export(neighbour_plans.find_plan(name), target)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "torchtitan-main"])
def test_pairs_are_not_written_as_training_on_tokens(target):
    pairs = neighbour_plans.find_plan("own-dpo")
    with pytest.raises(InvalidRequest, match="objective: dpo"):
        api.export(pairs, target)
    assert api.export(pairs, "slurm").peak.peak_allocated == pairs.memory.peak_allocated


@pytest.mark.parametrize(("target", "start", "keys"), [
    ("trl", "trl dpo", {"per_device_train_batch_size": 1, "beta": 0.2, "label_smoothing": 0.1}),
    ("axolotl", "axolotl train", {"micro_batch_size": 1, "rl": "dpo", "rl_beta": 0.2}),
    ("llamafactory", "llamafactory-cli train", {
        "per_device_train_batch_size": 1, "stage": "dpo", "pref_beta": 0.2,
    }),
])  # fmt: skip
def test_pairs_are_written_as_trls_own_trainer_counts_them(target, start, keys):
    """Two rows of ours are a pair; the peak is of the tool's own step."""
    changes = {"precision": "bf16-mixed", "lora.dropout": 0.0}
    made = api.export(api.change(neighbour_plans.find_request("own-dpo"), changes), target)
    written = YAML(typ="safe").load(made.files[f"{target}.yaml"])
    assert {key: written.get(key) for key in keys} == keys
    assert made.start.startswith(start)
    assert made.peak.peak_allocated, made.peak.words


@pytest.mark.parametrize("target", ["axolotl", "llamafactory", "trl"])
def test_eight_bits_that_ranks_would_share_are_refused(target):
    coded = api.change(neighbour_plans.find_request("hf-lora-fsdp"), {"base_format": "int8"})
    with pytest.raises(InvalidRequest, match=r"`base_format: int8` with `parallel.dp_shard: 8`"):
        api.export(coded, target)


@pytest.mark.parametrize(("name", "optim"), [
    ("adamw8bit-bnb", "adamw_8bit"), ("adamw8bit-paged", "paged_adamw_8bit"),
])  # fmt: skip
def test_bitsandbytes_optimizers_are_the_trainers_own(name, optim):
    """axolotl, LLaMA-Factory and TRL say them, and the peak is of the Trainer's step with them."""
    own = neighbour_plans.find_request("own-lora")
    own = api.change(own, {"precision": "bf16-mixed"})  # axolotl's adapters are fp32, autocast
    plan, said = api.plan(api.change(own, {"optimizer.name": name}), levers=False), {}
    for target in ("axolotl", "llamafactory", "trl"):
        made = api.export(plan, target)
        assert "optimizer.name" not in made.left_out
        assert re.search(rf"optim(izer)?: {optim}$", "\n".join(made.files.values()), re.M)
        said[target] = made.peak.peak_allocated
    plain = api.export(api.plan(own, levers=False), "axolotl").peak.peak_allocated
    assert said["axolotl"] < plain


def test_a_model_without_a_configuration_in_torchtitan_is_refused():
    asked = api.change(
        neighbour_plans.find_request("torchtitan-fsdp"), {"model": "mistral-7b-v0.3"}
    )
    with pytest.raises(UnknownName, match="mistral"):
        api.export(asked, "torchtitan")


def test_every_target_has_its_page_in_the_docs():
    pages = ROOT / "docs" / "targets"
    index = (pages / "README.md").read_text()
    assert not [name for name in TARGETS if f"[`{name}`]({name}.md)" not in index]
    assert {path.stem for path in pages.iterdir()} == {"README", *TARGETS}


def test_every_target_read_the_exports_of_at_least_twelve_plans_or_memfit_refused_them():
    results = json.loads((ROOT / "bench" / "results" / "neighbours.json").read_text())
    for target in TARGETS:
        said = results[target]["plans"].values()
        assert len(said) >= 16, target
        assert all(word == "ok" or word.startswith("refused by memfit") for word in said), target


# of recipes that Megatron-LM does not train, whoever writes them
IMPOSSIBLE = {
    "options.account_for_embedding_in_pipeline_split=True": "should be divisible",
    "options.account_for_loss_in_pipeline_split=True": "should be divisible",
    "options.pipeline_model_parallel_layout=x": "layout",
    "options.num_experts=1": "multiple of expert model parallel_size",
    "options.overlap_param_gather=True": "Must use",
}


def test_every_trainer_read_the_exports_with_one_key_changed():
    results = json.loads((ROOT / "bench" / "results" / "neighbours.json").read_text())
    for target in TRAINERS:
        found = results[target]["changed_keys"]
        assert found["files"] >= (20 if target == "accelerate" else 100), target
        for name, said in found["bad"].items():
            assert target == "megatron", name
            assert IMPOSSIBLE[name.split()[1]] in said


def test_axolotls_own_kernels_are_off_where_they_were_not_predicted(tmp_path):
    made = api.export(neighbour_plans.find_plan("hf-lora-ddp"), "axolotl")
    file = tmp_path / "axolotl.yaml"
    file.write_text(made.files["axolotl.yaml"])
    assert "lora_mlp_kernel: false" in file.read_text()
    hardware = {"hardware": {"device": "h100-sxm", "count": 8}}
    assert not any("LoRA kernels" in said for said in api.check([file], hardware)[0].assumed)
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if "_kernel: " not in line))
    assert any("LoRA kernels" in said for said in api.check([file], hardware)[0].assumed)


@pytest.mark.parametrize(("devices", "storage"), [(1, None), (2, "bfloat16")])
def test_trl_stores_four_bits_as_what_fsdp_can_cut_with_the_rest(devices, storage):
    told = {
        **neighbour_plans.LLAMA, "method": "lora", "base_format": "nf4",
        "hardware": {"device": "rtx-4090", "count": devices}, "parallel": {"dp_shard": devices},
    }  # fmt: skip
    plan = api.plan(from_data(told, Request, source="the test"), levers=False)
    written = YAML(typ="safe").load(api.export(plan, "trl").files["trl.yaml"])
    assert written.get("bnb_4bit_quant_storage") == storage


@pytest.mark.parametrize(("steps", "written"), [(0, 2), (1, 2), (5, 5)])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_deepspeeds_schedule_has_the_warmup_that_it_takes(schedule, steps, written):
    """None is refused since 0.19.6, and one step is made two; what is read of it is said."""
    plan = change(neighbour_plans.find_plan("deepspeed-zero2"), "optimizer.schedule", schedule)
    made = api.export(change(plan, "optimizer.warmup_steps", steps), "deepspeed")
    found = json.loads(made.files["deepspeed.json"])["scheduler"]["params"]
    assert found["warmup_num_steps"] == written
    assert found["warmup_type"] == "linear"
    assert ("optimizer.warmup_steps" in made.left_out) == (steps != written)


def test_llama_factorys_launcher_is_told_of_every_machine():
    def start(name):
        return api.export(neighbour_plans.find_plan(name), "llamafactory").start

    assert "NPROC_PER_NODE=8 NNODES=2 NODE_RANK=" in start("deepspeed-zero3")
    assert "NPROC_PER_NODE=8" in start("deepspeed-zero2")
    assert "NNODES" not in start("deepspeed-zero2")


def test_megatron_is_started_as_it_asks_to_be():
    """Its own arguments' checks refuse each of these said otherwise: bench/neighbours.py --keys."""

    def write(name, *changes):
        plan = neighbour_plans.find_plan(name)
        for key, value in changes:
            plan = change(plan, f"options.{key}", value)
        made = api.export(plan, "megatron")
        return made.files["megatron.sh"], {**made.left_out, **made.changed}

    ordered = "\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    assert ordered in write("megatron-3d")[0]
    assert ordered not in write("deepspeed-zero3")[0]
    cut = write("megatron-3d", ("use_megatron_fsdp", True))[0]
    assert ordered not in cut
    assert "--ckpt-format fsdp_dtensor" in cut
    for backend in ("deepep", "hybridep"):
        text = write("megatron-experts", ("moe_token_dispatcher_type", backend))[0]
        assert f"-type flex --moe-flex-dispatcher-backend {backend}" in text
    text, left = write("megatron-3d", ("cross_entropy_loss_fusion", "te"))
    assert "--cross-entropy-fusion-impl native" in text
    assert "options.cross_entropy_loss_fusion" in left
    text, left = write("megatron-3d", ("main_params_dtype", "fp8"))
    assert "--main-params-dtype" not in text
    assert "options.main_params_dtype" in left


def test_the_loss_that_megatron_is_given_is_the_one_of_its_peak():
    asked = neighbour_plans.find_request("megatron-3d")
    peaks = {
        loss: api.export(
            api.predict(api.change(asked, {f"options.{LOSS}": loss})), "megatron"
        ).peak.peak_allocated
        for loss in ("te", "native", "none")
    }
    assert peaks["te"] == peaks["native"] != peaks["none"]


def test_a_wrong_target_offers_the_nearest():
    with pytest.raises(UnknownName) as caught:
        find_target("torchtitn")
    assert "`torchtitan`" in caught.value.hint


# in `make test` every plan for a quarter of the targets, every target with a quarter of the plans
QUARTERS = [pytest.param(n, TARGETS[at % 4 :: 4], id=n) for at, n in enumerate(PLANS)]
ALL = [
    pytest.param(n, TARGETS, id=f"{n}, every target", marks=pytest.mark.wide) for n in PLANS
]  # fmt: skip


@pytest.mark.parametrize(("name", "targets"), [*QUARTERS, *ALL])
def test_every_file_says_what_it_is_of_and_yaml_of_both_versions_is_read_alike(name, targets):
    plan, written = neighbour_plans.find_plan(name), 0
    for target in targets:
        if (made := neighbour_plans.find_export(name, target)) is None:
            continue  # refused
        written += 1
        for file, text in made.files.items():
            assert plan.recipe_digest in text, (target, file)
            assert find_target(target).version in text, (target, file)
            for key in made.left_out:
                assert key in text, (target, file)
            if file.endswith(("yaml", "yml")):
                old, new = YAML(typ="safe", pure=True), YAML(typ="safe", pure=True)
                old.version = (1, 1)
                assert old.load(text) == new.load(text), (target, file)
    assert written


@pytest.mark.parametrize("target", [*SCHEDULERS, "megatron"])
def test_scripts_are_bash(target, tmp_path):
    for name in ("own-full", "trl-full-fsdp", "deepspeed-zero3", "megatron-3d", "torchtitan-3d"):
        made = neighbour_plans.find_export(name, target)
        for path in api.write_export(made, tmp_path / name) if made else ():
            if path.suffix in (".sh", ".sbatch"):
                subprocess.run(["bash", "-n", str(path)], check=True)


def test_megatron_starts_every_rank():
    text = api.export(neighbour_plans.find_plan("megatron-3d"), "megatron").files["megatron.sh"]
    words = shlex.split(text.partition("ARGUMENTS=(")[2].partition("\n)")[0])
    found = {word: after for word, after in zip(words, [*words[1:], ""], strict=True)}
    ranks = int(found["--tensor-model-parallel-size"]) * int(
        found["--pipeline-model-parallel-size"]
    )
    assert "--nproc-per-node=8 --nnodes=2" in text
    assert 16 % ranks == 0
    assert found["--global-batch-size"] == "64"
    assert found["--recompute-method"] == "uniform"


def test_a_file_of_another_author_stays(tmp_path):
    made = api.export(neighbour_plans.find_plan("own-full"), "slurm")
    (tmp_path / "train.sh").write_text("echo mine\n")
    with pytest.raises(InvalidRequest, match=r"train\.sh"):
        api.write_export(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"]
    assert (tmp_path / "train.sh").read_text() == "echo mine\n"


def command(*words):
    return run(lambda: app.main(list(words), prog_name="memfit", standalone_mode=False))


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(neighbour_plans.find_plan("torchtitan-fsdp")))
    return path


def test_the_command_writes_and_says(plan_file, tmp_path, capsys):
    assert command("export", str(plan_file), "--to", "trl", "--out", str(tmp_path / "o")) == 0
    said = capsys.readouterr().out
    assert "compile: blocks: of no use there" in said
    assert "memfit check" in said
    assert "allocated (the step of TRL's SFTTrainer" in " ".join(said.split())
    assert (tmp_path / "o" / "accelerate.yaml").exists()


def test_one_file_is_printed_as_it_is(plan_file, capsys):
    assert command("export", str(plan_file), "--to", "torchtitan") == 0
    plan = neighbour_plans.find_plan("torchtitan-fsdp")
    assert capsys.readouterr().out == next(iter(api.export(plan, "torchtitan").files.values()))


def test_several_files_need_a_folder(plan_file, capsys):
    assert command("export", str(plan_file), "--to", "trl") == 2
    assert "--out" in capsys.readouterr().err


def test_a_request_is_planned_and_written(capsys):
    words = ("qwen3-0.6b", "--device", "h100-sxm", "--set", "framework=torchtitan",
             "--set", "hardware.count=8")  # fmt: skip
    assert command("export", *words, "--to", "torchtitan", "--json") == 0
    assert json.loads(capsys.readouterr().out)["peak"]["framework"] == "torchtitan"


@pytest.fixture(scope="module")
def over_nodes():
    """A plan of memfit's own step on two machines of eight devices."""
    asked = {
        "model": "llama-3.1-8b", "weights": "random", "method": "full", "precision": "bf16-mixed",
        "recompute": "full", "loss": "plain", "micro_batch": 1, "task": {"global_batch": 16},
        "hardware": {"device": "h100-sxm", "count": 8, "nodes": 2},
    }  # fmt: skip
    return api.predict(from_data(asked, Request, source="a test"))


@pytest.mark.parametrize("target", ["slurm", "skypilot", "k8s", "ray"])
def test_every_machine_starts_its_ranks_of_memfits_own_step(target, over_nodes, tmp_path):
    made = api.export(over_nodes, target)
    start = made.files["train.sh"]
    words = shlex.split(start.splitlines()[-1])
    assert words[:3] == ["torchrun", "--nproc-per-node=8", "--nnodes=2"]
    assert words[-6:] == ["-m", "memfit", "train", "plan.json", "--folder", "run"]
    plan = json.loads(made.files["plan.json"])
    assert plan["recipe"]["parallel"]["dp_shard"] == 16
    script = tmp_path / "train.sh"
    script.write_text(start)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_launch_writes_the_job_and_says_how_to_submit_it(over_nodes, tmp_path, capsys):
    api.write_plan(over_nodes, tmp_path)
    words = "launch", str(tmp_path / "plan.json"), "--on"
    assert command(*words, "slurm", "--out", str(tmp_path / "job")) == 0
    assert "sbatch job.sbatch" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "job").iterdir())
    assert names == ["job.sbatch", "plan.json", "train.sh"]
    assert "--nodes=2" in (tmp_path / "job" / "job.sbatch").read_text()
    assert command(*words, "cron") == 2


def test_a_key_that_is_as_it_is_by_default_is_not_said_to_be_left_out():
    plan = api.plan(api.read("qwen3-0.6b", device="l4", changes={"task.objective": "sft"}))
    keys = dict(list_keys(plan.recipe))
    assert "reward.adapter" not in keys
    assert keys["objective"] == "sft"
