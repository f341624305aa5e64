"""What a trainer's file and a launcher's say together, whichever is named first; and the same
training said to several tools."""

import itertools
import json

import pytest

from memfit import api
from memfit.check import read_files
from memfit.records.ledger import Kind, Phase
from undescribed import assert_named, list_undescribed

MODEL, ENDS = "llama-3.2-1b", ("none", "parameters")
LAUNCH = "compute_environment: LOCAL_MACHINE\nnum_processes: 8\nnum_machines: 1\n"
UNITS = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
LAUNCHERS = {
    "ddp": LAUNCH + "distributed_type: MULTI_GPU\nmixed_precision: bf16\n",
    **{
        f"fsdp{version}": LAUNCH + "distributed_type: FSDP\nmixed_precision: bf16\n"
        f"fsdp_config: {{fsdp_version: {version}, {UNITS}, fsdp_activation_checkpointing: true}}\n"
        for version in (1, 2)
    },
    **{
        f"zero{stage}": LAUNCH + "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
        f"deepspeed_config: {{zero_stage: {stage}}}\n"
        for stage in (1, 2, 3)
    },
}  # fmt: skip
METHODS = ("full", "lora", "qlora")
STEPS = "gradient_accumulation_steps: 1\nlearning_rate: 1.0e-4\n"


def write_trainer(tool: str, method: str, *, again: bool) -> str:
    """The same training in the tool's own keys; again: whether it recomputes by itself."""
    adapted, low = method != "full", method == "qlora"
    if tool == "axolotl":
        text = (
            f"base_model: {MODEL}\nsequence_len: 1024\nmicro_batch_size: 2\nbf16: true\n"
            "optimizer: adamw_torch\nattn_implementation: flash_attention_2\n"
            "gradient_checkpointing_kwargs: {use_reentrant: false}\n"
            f"gradient_checkpointing: {str(again).lower()}\nlora_mlp_kernel: false\n"
        )
        if adapted:
            text += f"adapter: {method}\nlora_r: 8\nlora_target_linear: true\n"
        return text + STEPS + ("load_in_4bit: true\n" if low else "")
    text = (
        f"model_name_or_path: {MODEL}\nper_device_train_batch_size: 2\noptim: adamw_torch\n"
        "bf16: true\n"
    )
    if tool == "llamafactory":
        text += (
            f"finetuning_type: {'lora' if adapted else 'full'}\ncutoff_len: 1024\nlora_rank: 8\n"
            "flash_attn: fa2\n"
            f"use_reentrant_gc: false\ndisable_gradient_checkpointing: {str(not again).lower()}\n"
        )
        return text + STEPS + ("quantization_bit: 4\n" if low else "")
    text += f"max_length: 1024\ndtype: bfloat16\ngradient_checkpointing: {str(again).lower()}\n"
    if adapted:
        text += "use_peft: true\nlora_r: 8\nlora_dropout: 0.0\nlora_target_modules: all-linear\n"
    low_keys = "load_in_4bit: true\nbnb_4bit_quant_storage: bfloat16\n"  # as FSDP flattens it
    return text + STEPS + (low_keys if low else "")


def find_plan(folder, *texts, **more):
    return check_texts(folder, *texts, **more)[1]


def check_texts(folder, *texts, first=0, count=8):
    files = []
    for number, text in enumerate(texts):
        files.append(folder / (f"{number}.json" if text.startswith("{") else f"{number}.yaml"))
        files[-1].write_text(text)
    files = files[first:] + files[:first]
    return api.check(files, {"hardware": {"device": "h100-sxm", "count": count}})


@pytest.mark.parametrize("launch", LAUNCHERS)
@pytest.mark.parametrize("tool", ["axolotl", "llamafactory", "trl"])
def test_files_say_the_same_whichever_is_named_first(tool, launch, tmp_path):
    """FSDP's plugin recomputes, whatever the trainer's own key says."""
    again = not launch.startswith("fsdp")
    for method in METHODS:
        if (method, launch) == ("qlora", "fsdp2"):
            continue  # refused: 4-bit weights that FSDP2 cuts
        texts = write_trainer(tool, method, again=again), LAUNCHERS[launch]
        one, other = (find_plan(tmp_path, *texts, first=first) for first in (0, 1))
        assert one.recipe == other.recipe
        assert one.recipe.recompute_blocks == 16


@pytest.mark.parametrize("launch", LAUNCHERS)
@pytest.mark.parametrize("method", METHODS)
def test_axolotl_and_llama_factory_are_one_step(method, launch, tmp_path):
    """Both build on transformers' Trainer; where weights are shared what is trained is alike."""
    if (method, launch) == ("qlora", "fsdp2"):
        return
    if (method, launch) == ("full", "ddp"):
        return  # axolotl's weights of 16 bits stay so, LLaMA-Factory's are fp32
    again = not launch.startswith("fsdp")
    peaks = {
        find_plan(
            tmp_path, write_trainer(tool, method, again=again), LAUNCHERS[launch]
        ).memory.peak_allocated
        for tool in ("axolotl", "llamafactory")
    }
    assert len(peaks) == 1


def test_less_is_never_more(tmp_path):
    """Later stages, more ranks, adapters and coded bases take no more than what they replace."""

    def peak(tool, method, launch, count=8):
        text = LAUNCHERS[launch].replace("num_processes: 8", f"num_processes: {count}")
        again = not launch.startswith("fsdp")
        trainer = write_trainer(tool, method, again=again)
        return find_plan(tmp_path, text, trainer, count=count).memory.peak_allocated

    for tool in ("axolotl", "llamafactory", "trl"):
        for launch in ("fsdp1", "zero1", "zero2", "zero3"):
            falling = [peak(tool, method, launch) for method in METHODS]
            assert falling == sorted(falling, reverse=True), (tool, launch, falling)
            for method in ("full", "lora"):
                ranks = [peak(tool, method, launch, count) for count in (2, 4, 8)]
                assert ranks == sorted(ranks, reverse=True), (tool, launch, method, ranks)
        for method in METHODS:
            stages = [peak(tool, method, f"zero{stage}") for stage in (1, 2)]
            assert stages == sorted(stages, reverse=True), (tool, method, stages)


BF16 = '"bf16": {"enabled": true}'


@pytest.mark.parametrize("tool", ["axolotl", "trl"])
def test_weights_loaded_in_16_bits_are_deepspeeds_all_the_same(tool, tmp_path):
    """Its engine keeps fp32 shares beside 16 bits, whatever was loaded."""
    text = write_trainer(tool, "full", again=True)
    for launch in (LAUNCHERS["zero2"], f'{{"zero_optimization": {{"stage": 2}}, {BF16}}}'):
        recipe = find_plan(tmp_path, text, launch).recipe
        assert (recipe.framework, recipe.precision) == ("deepspeed", "bf16-mixed")


@pytest.mark.parametrize(("launch", "precision"), [
    ("mixed_precision: bf16\n", "bf16-mixed"), ("mixed_precision: 'no'\n", "fp32"), ("", "fp32"),
    ("mixed_precision: no\n", "fp32"),
])  # fmt: skip
def test_a_trainer_that_names_no_precision_takes_the_launchers(launch, precision, tmp_path):
    """transformers' training_args: ACCELERATE_MIXED_PRECISION."""
    text = write_trainer("llamafactory", "full", again=True).replace("bf16: true\n", "")
    for first in (0, 1):
        texts = text, LAUNCH + "distributed_type: MULTI_GPU\n" + launch
        assert find_plan(tmp_path, *texts, first=first).recipe.precision == precision
    said = text + "fp16: true\n"
    assert find_plan(tmp_path, said, texts[1]).recipe.precision == "fp16-mixed"


SFT = f"model_name_or_path: {MODEL}\nmax_length: 512\n"


@pytest.mark.parametrize(("text", "stored", "precision"), [
    (SFT + "dtype: auto\n", "bfloat16", "bf16"), (SFT + "dtype: auto\n", "float32", "bf16-mixed"),
    (SFT + "torch_dtype: null\n", "bfloat16", "bf16"), (SFT + "dtype: auto\n", None, "bf16"),
    (SFT, "bfloat16", "bf16-mixed"),  # TRL's own default is float32
    (SFT + "finetuning_type: lora\n", "bfloat16", "bf16"),
    (SFT + "finetuning_type: lora\n", "float16", "fp16"),
    (SFT + "finetuning_type: full\n", "bfloat16", "fp32"),
])  # fmt: skip
def test_what_a_file_leaves_to_the_checkpoint_is_read_from_it(text, stored, precision, tmp_path):
    """from_pretrained's `auto`; LLaMA-Factory's infer_optim_dtype."""
    from memfit.plan.request.model_reference import find_reference

    folder, file = tmp_path / "model", tmp_path / "sft.yaml"
    folder.mkdir()
    config = {**find_reference(MODEL).config, "dtype": stored}
    (folder / "config.json").write_text(json.dumps(config))
    file.write_text(text.replace(MODEL, str(folder)))
    found = read_files([file], {"hardware": {"device": "h100-sxm"}})
    assert found.request.precision == precision
    assumed = any("taken to be stored in bfloat16" in one for one in found.assumed)
    assert assumed == (stored is None)


@pytest.mark.parametrize(("config", "key"), [
    ("{fsdp_auto_wrap_policy: NO_WRAP}", "auto_wrap_policy: NO_WRAP"),
    ("{fsdp_version: 2}", "auto_wrap_policy: NO_WRAP"),
    ("{fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 1000}", "SIZE_BASED_WRAP"),
    (f"{{{UNITS}, fsdp_ignored_modules: [head]}}", "ignored_modules"),
])  # fmt: skip
def test_units_that_are_no_blocks_are_refused(config, key, tmp_path):
    """accelerate's own default wraps nothing, and gathers a whole model at once."""
    text = LAUNCH + f"distributed_type: FSDP\nfsdp_config: {config}\n"
    assert_named(
        key, lambda: check_texts(tmp_path, text, write_trainer("trl", "full", again=False))
    )


def test_axolotls_older_words_move_shards_to_the_host(tmp_path):
    text = write_trainer("axolotl", "full", again=False)
    for words, offload in (
        ("full_shard, auto_wrap", "none"),
        ("full_shard, offload", "parameters"),
    ):
        assert find_plan(tmp_path, f"{text}fsdp: [{words}]\n").recipe.offload == offload


def deepspeed(folder, zero, method="lora"):
    return check_deepspeed(folder, zero, method)[1]


def check_deepspeed(folder, zero, method="lora"):
    launch = f'{{"zero_optimization": {json.dumps(zero)}, {BF16}}}'
    return check_texts(folder, write_trainer("axolotl", method, again=True), launch)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_are_as_large_as_they_are_said_to_be(stage, tmp_path):
    """stage_1_and_2.setup_buckets and stage3._setup_for_real_optimizer: torch.empty of
    `reduce_bucket_size` elements, two of them in turns with `overlap_comm`; `auto` is
    transformers' hidden size squared."""
    hidden = 2048
    said = {
        500_000_000: {}, 10**6: {"reduce_bucket_size": 1e6},
        hidden**2: {"reduce_bucket_size": "auto"},
        (2 if stage < 3 else 1) * 10**6: {"reduce_bucket_size": 1e6, "overlap_comm": True},
    }  # fmt: skip
    for (elements, zero), method in itertools.product(said.items(), ("full", "lora")):
        plan = deepspeed(tmp_path, {"stage": stage, **zero}, method)
        buckets = [e.nbytes for e in plan.ledger.at(Phase.BACKWARD) if e.owner == "bucket"]
        assert buckets == [2 * elements]


def test_sizes_are_read_without_their_stage_too(tmp_path):
    """axolotl's own zero3.json; zero/config.py names its fields so, beside their aliases."""
    for prefix in ("", "stage3_"):
        asked = {"stage": 3, f"{prefix}max_live_parameters": 0, f"{prefix}max_reuse_distance": 0}
        plan = deepspeed(tmp_path, asked)
        assert plan.recipe.options["max_live_parameters"] == 0
        gathered = plan.ledger.by_kind(Phase.FORWARD)[Kind.ALL_GATHER]
        assert gathered == 2 * 128_256 * 2048  # the embedding, which is the head


def test_auto_fetches_less_ahead_in_stage_3(tmp_path):
    asked = {"stage": 3, "stage3_max_live_parameters": 5e8, "stage3_prefetch_bucket_size": "auto"}
    gathered = deepspeed(tmp_path, asked).ledger.by_kind(Phase.FORWARD)[Kind.ALL_GATHER]
    assert gathered == 2 * (5 * 10**8 + int(0.9 * 2048**2))


@pytest.mark.parametrize(("zero", "key"), [
    ({"zero_quantized_weights": True}, "zero_quantized_weights"),
    ({"contiguous_gradients": False}, "contiguous_gradients"),
    ({"reduce_bucket_size": -5}, "reduce_bucket_size"),
    ({"reduce_bucket_size": 0}, "reduce_bucket_size"), ({"sub_group_size": -1}, "sub_group_size"),
    ({"reduce_bucket_size": float("inf")}, "reduce_bucket_size"),
    ({"cpu_offload_params": True}, "cpu_offload_params"),
])  # fmt: skip
def test_what_zero_has_no_description_of_is_refused_by_its_key(zero, key, tmp_path):
    assert_named(key, lambda: check_deepspeed(tmp_path, {"stage": 3, **zero}))


def test_groups_of_no_elements_are_of_one_weight_each(tmp_path):
    """stage3._create_fp16_sub_groups: a group ends with the weight that makes it large enough."""
    asked = deepspeed(tmp_path, {"stage": 3, "sub_group_size": 0}, "full")
    update = asked.ledger.by_kind(Phase.OPTIMIZER_STEP)[Kind.TEMPORARY]
    assert update == pytest.approx(6 * 128_256 * 2048 / 8, abs=64)  # the embedding's share


def test_zeros_word_of_2020_for_the_host(tmp_path):
    assert deepspeed(tmp_path, {"stage": 2, "cpu_offload": True}).recipe.offload == "optimizer"


def test_keys_within_keys_that_are_not_looked_at_are_listed(tmp_path):
    trainer, launch = tmp_path / "a.yaml", tmp_path / "ds.json"
    trainer.write_text(write_trainer("axolotl", "lora", again=True))
    launch.write_text('{"zero_optimization": {"stage": 2, "unheard_of": 1}}')
    data = {"hardware": {"device": "h100-sxm", "count": 2}}
    found = list_undescribed(read_files([trainer, launch], data))
    assert found == ["ds.json: zero_optimization.unheard_of"]


def check(folder, *texts):
    """Files of these texts, read for eight GPUs or, one alone, for one."""
    files = [folder / f"{number}.yaml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    data = {"hardware": {"device": "h100-sxm", "count": 8 if len(texts) > 1 else 1}}
    return api.check(files, data)[1]


def test_a_version_of_fsdp_that_is_not_said_is_accelerates_own(tmp_path):
    """1, as its plugin has it; transformers' own arguments have 2 (test_check.py)."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    launch = LAUNCHERS["fsdp1"].replace("fsdp_version: 1, ", "")
    plan = check(tmp_path, f"model_name_or_path: {MODEL}\n", launch)
    assert plan.recipe.options["fsdp_version"] == FullyShardedDataParallelPlugin().fsdp_version == 1


def test_logits_of_pairs_come_back_in_fp32_where_autocast_is_over_16_bits(tmp_path):
    """accelerate's `ConvertOutputsToFp32` (prepare_model), which pure bf16 has not."""
    text = "base_model: llama-3.2-1b\nrl: dpo\nbf16: {}\n"
    under, pure = (check(tmp_path, text.format(asked)) for asked in ("true", "full"))
    assert [plan.recipe.options["fp32_outputs"] for plan in (under, pure)] == [True, False]
    assert under.memory.peak_allocated > pure.memory.peak_allocated
