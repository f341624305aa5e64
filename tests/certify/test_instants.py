"""Every instant of a run, real on this CPU and traced: 0 bytes apart."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from tiny_steps import CONFIGS, CPU, FAMILIES, H100, make_batch, make_recipe

from memfit.certify.evidence.certificate import make_certificate
from memfit.certify.tracing.trace_step import trace_generation, trace_step, worst_shapes
from memfit.families import read_model
from memfit.records import write_json
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.model import ModelReference
from memfit.records.recipe import Freeze
from memfit.records.results import Run
from memfit.train.checkpoint.export import file_tensors
from memfit.train.checkpoint.files import on_host
from memfit.train.checkpoint.whole import load_checkpoint, save_checkpoint
from memfit.train.generation.sampling import draw_numbers, sample
from memfit.train.generation.settings import Settings
from memfit.train.measure.live import LiveBytes
from memfit.train.model.weights import EmptyWeights, FileWeights, fill_weights
from memfit.train.run.generate import advance, load_model
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.step import evaluate, step

BF16 = {"precision": "bf16", "base_format": "bf16"}
MIXED_LORA = {"method": "lora", "precision": "bf16-mixed", "base_format": "bf16"}
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def watched(phase: Phase):
    """LiveBytes as the trace has it: what is freed is freed by reference counts."""
    live = LiveBytes("cpu")
    gc.collect()
    gc.disable()
    try:
        with live:
            live.enter(phase)
            yield live
    finally:
        gc.enable()


def run_all(recipe, folder) -> LiveBytes:
    """The instants of a run in their order, on real tensors."""
    shapes = worst_shapes(recipe)
    with watched(Phase.LOAD) as live:
        model = build_model(recipe, "cpu")
        live.register_model(model)
        fill_weights(model, recipe)
        optimizer = build_optimizer(recipe, model)
        live.register_optimizer(optimizer)
        built = Built(recipe, model, optimizer)
        vocab = model.get_input_embeddings().num_embeddings

        def batches():
            for shape in shapes:
                yield make_batch(recipe, shape, vocab, live)

        live.enter(Phase.FIRST_STEP)
        step(built, batches(), 50, lambda _: live.enter(Phase.FIRST_STEP))
        step(built, batches(), 50, live.enter)
        live.enter(Phase.EVALUATE)
        for _ in range(3):
            loss, count = evaluate(built, next(batches()))
        del loss, count
        live.enter(Phase.SAVE)
        save_checkpoint(folder, 2, built, "data")
    return live


def assert_equal(live: LiveBytes, traced) -> None:
    assert live.peaks == traced.phases
    for phase in live.peaks:
        assert live.ledger().by_kind(phase) == traced.ledger.by_kind(phase), phase


def grid():
    """The other families run the same code in these instants; they are slow."""
    for family in FAMILIES:
        for name, changes in (("fp32", {}), ("bf16", BF16), ("lora", MIXED_LORA)):
            quick = family == "llama" or (family == "gpt2" and name == "lora")
            marks = () if quick else (pytest.mark.slow,)
            yield pytest.param(family, changes, id=f"{family}-{name}", marks=marks)


@pytest.mark.parametrize(("family", "changes"), list(grid()))
def test_every_instant_of_a_run_from_random_weights(family, changes, tmp_path) -> None:
    recipe = make_recipe(family, **changes)
    assert_equal(run_all(recipe, tmp_path), trace_step(recipe, CPU))


def pretrained(folder, stored: str, family: str = "llama", shards: int = 1, **changes: Any):
    """A recipe that starts from safetensors made here, stored in a dtype of their own."""
    folder.mkdir()
    plain = make_recipe(family)
    model = build_model(plain, "cpu")
    fill_weights(model, plain)
    tensors = file_tensors(model, family).items()
    save_file(
        {n: t.detach().to(STORED[stored]).contiguous() for n, t in tensors},
        folder / "model.safetensors",
    )
    reference = ModelReference(name="made", source=str(folder), config=CONFIGS[family])
    return replace(make_recipe(family, **changes), weights="pretrained", model=reference)


LOADED = {  # dtype of the file, knobs
    "fp32 file, fp32": ("fp32", {}),
    "bf16 file, fp32": ("bf16", {}),
    "fp32 file, bf16": ("fp32", BF16),
    "fp16 file, bf16": ("fp16", BF16),
    "fp32 file, lora": ("fp32", MIXED_LORA),
    "bf16 file, frozen": ("bf16", {"method": "freeze", "freeze": Freeze(last_blocks=1)}),
}


@pytest.mark.parametrize("name", LOADED)
def test_loading_holds_one_tensor_of_the_file_beside_the_parameters(name, tmp_path) -> None:
    stored, changes = LOADED[name]
    recipe = pretrained(tmp_path / "base", stored, **changes)
    traced = trace_step(recipe, CPU)
    assert_equal(run_all(recipe, tmp_path / "run"), traced)
    held = traced.ledger.by_kind(Phase.LOAD)
    largest = 250 * 64 * STORED[stored].itemsize  # the embedding
    assert held[Kind.TEMPORARY] == largest
    assert traced.phases[Phase.LOAD] == held[Kind.PARAMETERS] + largest


def test_a_shard_is_read_as_a_view_of_the_whole_tensor_of_the_file(tmp_path) -> None:
    """safetensors maps the file: real and traced, the storage is the tensor's."""
    recipe = pretrained(tmp_path / "base", "bf16")
    source, name = recipe.model.source, "model.embed_tokens.weight"
    box = slice(0, 125), slice(0, 64)
    for weights in (FileWeights(source, "model"), EmptyWeights.of(source, "model", "llama")):
        (part,) = weights.parts(name, (250, 64))
        shard = weights.read(part, box)
        assert shard.shape == (125, 64)
        assert shard.untyped_storage().nbytes() == 250 * 64 * 2


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_loading_experts_holds_one_of_them_and_not_all_of_a_layer(family, tmp_path) -> None:
    recipe = pretrained(tmp_path / "base", "fp32", family, **BF16)
    traced = trace_step(recipe, CPU)
    assert_equal(run_all(recipe, tmp_path / "run"), traced)
    largest = max(w.numel for w in read_model(recipe.model).weights if not w.routed)
    assert traced.ledger.by_kind(Phase.LOAD)[Kind.TEMPORARY] == 4 * largest


def test_files_that_are_not_here_are_taken_as_fp32_and_said_so(tmp_path) -> None:
    here = pretrained(tmp_path / "base", "bf16", **BF16)
    gone = replace(here, model=replace(here.model, source="someone/a-model-nobody-has"))
    near, far = trace_step(here, CPU), trace_step(gone, CPU)
    assert far.phases[Phase.LOAD] - near.phases[Phase.LOAD] == 250 * 64 * 2
    assert not any("are not here" in bound for bound in near.bounds)
    assert any("`someone/a-model-nobody-has` are not here" in bound for bound in far.bounds)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_files_of_experts_that_are_not_here(family: str) -> None:
    """Their matrices are stored one by one; what else there is of experts is no matrix."""
    recipe = make_recipe(family, **BF16)
    reference = replace(recipe.model, source="someone/a-model-nobody-has")
    gone = replace(recipe, weights="pretrained", model=reference)
    held = trace_step(gone, CPU).ledger.by_kind(Phase.LOAD)
    assert held[Kind.TEMPORARY] >= 250 * 64 * 4  # the embedding, or what is larger, as fp32


def test_a_gpu_holds_nothing_but_its_parameters_while_they_are_loaded(tmp_path) -> None:
    recipe = pretrained(tmp_path / "base", "fp32", **BF16)
    held = trace_step(recipe, H100).ledger.by_kind(Phase.LOAD)
    assert set(held) == {Kind.PARAMETERS}


def test_the_host_holds_a_tensor_of_the_file_and_the_larger_file_of_a_checkpoint(tmp_path) -> None:
    recipe = pretrained(tmp_path / "base", "fp32", **BF16)
    made = make_certificate(recipe, H100, None, None)
    parameters = sum(e.nbytes for e in made.ledger.at(Phase.LOAD) if e.owner != "rotary")
    steps = 4 * sum(1 for _ in build_model(recipe, "meta").parameters())  # one fp32 count each
    assert made.host == {"load": 250 * 64 * 4, "save": 2 * parameters + steps}
    assert make_certificate(recipe, CPU, None, None).host == {}


def test_loading_can_need_more_than_training() -> None:
    # one wide embedding, frozen, in a file of a wider dtype: the cast is the peak
    config = {**CONFIGS["llama"], "vocab_size": 60_000, "tie_word_embeddings": True}
    recipe = make_recipe(config=config, **MIXED_LORA, sequence_length=2, micro_batch=1)
    reference = replace(recipe.model, source="someone/a-model-nobody-has")
    recipe = replace(recipe, weights="pretrained", model=reference)
    made = make_certificate(recipe, CPU, 20_000_000, None)
    assert made.memory.peak_phase == "load"
    assert made.memory.peak_allocated == made.phases["load"]
    assert made.memory.verdict == "does_not_fit"


def test_resuming_never_holds_more_than_the_first_step(tmp_path) -> None:
    recipe = make_recipe()
    run_all(recipe, tmp_path)
    with watched(Phase.LOAD) as live:
        model = build_model(recipe, "cpu")
        live.register_model(model)
        built = Built(recipe, model, build_optimizer(recipe, model))
        load_checkpoint(tmp_path / "checkpoints" / "step-000002", built, "data")
    assert live.peak <= trace_step(recipe, CPU).phases[Phase.FIRST_STEP]


# -- generating ------------------------------------------------------------------------------


def finished_run(recipe, folder):
    """What a run leaves for `memfit generate`, without its tokenizer."""
    built = run_built(recipe)
    (folder / "model").mkdir(parents=True)
    if recipe.method == "lora":
        built.model.save_pretrained(str(folder / "model"), save_embedding_layers=False)
    else:
        tensors = on_host(dict(built.model.named_parameters()))
        save_file(tensors, folder / "model" / "model.safetensors")
    run = Run(
        recipe_digest=recipe.digest, recipe=recipe, measurements={}, phases={},
        ledger=Ledger(entries=()), losses=(), evaluations=(), steps_done=1, finished=True,
        environment={},
    )  # fmt: skip
    write_json(folder / "run.json", run)
    return folder / "model"


def run_built(recipe) -> Built:
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    return Built(recipe, model, build_optimizer(recipe, model))


def say(folder, prompt: int, new: int) -> LiveBytes:
    """The loop of `generate`, with ids in place of a tokenizer."""
    with watched(Phase.GENERATE) as live:
        model = load_model(folder)
        live.register_model(model)
        asked = Settings(max_new_tokens=new, temperature=0.8, top_k=50)
        numbers = draw_numbers(0, 0, 0, new)
        cache, ids = None, torch.arange(prompt)[None] % 200
        live.register_batch(ids)
        for at in range(new):
            logits, cache = advance(model, ids, cache)
            number = torch.tensor([float(numbers[at])], dtype=torch.float64)
            token = int(sample(logits[None], number, asked)[0])
            del number
            ids = torch.tensor([[token]])
    return live


GENERATED = {
    "llama": ("llama", {}),
    "bf16": ("llama", BF16),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", BF16),
    "mixed": ("qwen3", {"precision": "bf16-mixed"}),
}


SLOW = {"gpt_neox", "mixed", "bf16"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in GENERATED]
)
def test_generating_holds_what_was_certified(name, tmp_path) -> None:
    family, changes = GENERATED[name]
    recipe = make_recipe(family, **changes)
    folder = finished_run(recipe, tmp_path)
    certified = trace_generation(recipe, CPU).phases[Phase.GENERATE]
    assert say(folder, recipe.sequence_length - 1, 2).peak == certified
    for prompt, new in ((1, 9), (40, 8)):
        assert say(folder, prompt, new).peak <= certified


def test_generating_with_an_adapter_holds_what_was_certified(tmp_path) -> None:
    recipe = pretrained(tmp_path / "base", "fp32", **MIXED_LORA)
    folder = finished_run(recipe, tmp_path / "run")
    traced = trace_generation(recipe, CPU)
    assert say(folder, recipe.sequence_length - 1, 2).peak == traced.phases[Phase.GENERATE]


def test_generating_has_a_verdict_of_its_own_and_stays_out_of_the_runs_peak() -> None:
    recipe = make_recipe(**BF16)
    for device in (H100, CPU):
        made = make_certificate(recipe, device, None, None)
        assert made.generation is not None
        assert made.generation.peak_phase == "generate"
        assert made.phases["generate"] == made.generation.peak_allocated
        assert Kind.OPTIMIZER_STATE not in {e.kind for e in made.generation.entries}
        assert "48 tokens together" in made.generation.because
        assert "generate" not in {str(p) for p in made.ledger.phases}
    small = make_certificate(recipe, CPU, made.generation.peak_allocated // 2, None)
    assert small.generation is not None
    assert small.generation.verdict == "does_not_fit"
