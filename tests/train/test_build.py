"""Building and filling: against Hugging Face's own classes and files."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.gptj.modeling_gptj import GPTJAttention

from memfit.adapters import find_adapter
from memfit.certify.tracing.runs import DEPTH_KEYS
from memfit.core.errors import InvalidRequest
from memfit.families import families_that, find_family, read_model, text_part
from memfit.families.weight_files.names import APART, Part
from memfit.meta.attending.kernels import Heads
from memfit.records.recipe import Freeze, Lora
from memfit.train.checkpoint.export import file_tensors
from memfit.train.model.attention import check_attention
from memfit.train.step.build import build_model, build_optimizer, fill_weights
from tiny_models import CONFIGS, FAMILIES, PRECISIONS, make_recipe

METHODS = ("full", "freeze", "lora")


def hugging_face(family, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[family]))


def census(model):
    return {
        n: (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
        for n, p in model.named_parameters()
    }


def test_a_module_with_weights_is_made_once_and_its_buffers_are_hugging_faces(monkeypatch):
    """A second one, for its buffers alone, would hold its weights beside the model's."""
    made, plain = [], GPTJAttention.__init__

    def count(self, *args, **kwargs):
        made.append(self)
        plain(self, *args, **kwargs)

    monkeypatch.setattr(GPTJAttention, "__init__", count)
    model = build_model(make_recipe("gptj"), "cpu")
    assert len(made) == CONFIGS["gptj"]["n_layer"]
    wanted = dict(hugging_face("gptj").named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0)


@pytest.mark.parametrize(("precision", "base_format"), PRECISIONS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_built_is_what_is_declared(family, method, precision, base_format):
    recipe = make_recipe(family, method=method, precision=precision, base_format=base_format)
    declared = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    built = census(build_model(recipe, "meta"))
    assert built == {w.name: (w.shape, w.dtype, w.trainable) for w in declared.weights}
    assert list(built) == [w.name for w in declared.weights]
    dtypes = {trainable: dtype for _, dtype, trainable in built.values()}
    assert dtypes[True] == ("bfloat16" if precision == "bf16" else "float32")
    if method != "full":
        assert dtypes[False] == ("bfloat16" if base_format == "bf16" else "float32")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_hugging_faces_in_fp32_whatever_the_precision(family, method, precision):
    recipe = make_recipe(family, method=method, precision=precision, base_format=precision)
    ours = dict(build_model(recipe, "cpu").named_buffers())
    theirs = dict(hugging_face(family).named_buffers())
    prefix = "base_model.model." if method == "lora" else ""
    assert {n.removeprefix(prefix) for n in ours} == set(theirs)
    assert all(torch.equal(b, theirs[n.removeprefix(prefix)]) for n, b in ours.items())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fake_and_real_models_hold_the_same_tensors(family, method):
    recipe = make_recipe(family, method=method)
    real = build_model(recipe, "cpu")
    with FakeTensorMode():
        fake = build_model(recipe, "cpu")
    tensors = [*fake.parameters(), *fake.buffers()]
    assert all(isinstance(t, FakeTensor) for t in tensors)
    assert census(fake) == census(real)
    storages = [t.untyped_storage().nbytes() for t in tensors]
    assert storages == [t.untyped_storage().nbytes() for t in (*real.parameters(), *real.buffers())]


def test_tied_embeddings_stay_one_tensor_on_the_device():
    for family in ("qwen2", "gpt2"):
        model = build_model(make_recipe(family), "cpu")
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model = build_model(make_recipe("llama"), "cpu")
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def test_the_optimizer_updates_what_is_trainable_and_nothing_else():
    recipe = make_recipe(method="lora")
    model = build_model(recipe, "cpu")
    held = [p for g in build_optimizer(recipe, model).param_groups for p in g["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}


# -- random --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_hugging_faces_distribution(family):
    """GPT-2's scaled output projections included."""
    wider = {"n_embd": 128, "hidden_size": 128, "intermediate_size": 256, "ffn_dim": 256}
    deeper = dict.fromkeys(DEPTH_KEYS, 8)
    config = {k: (wider | deeper).get(k, v) for k, v in CONFIGS[family].items()}
    recipe = make_recipe(family, config=config)
    ours = build_model(recipe, "cpu")
    fill_weights(ours, recipe)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    for name, weight in ours.state_dict().items():
        if weight.numel() < 2000 and theirs[name].std() > 0:
            continue  # of a router, or attention sinks: too few numbers to tell
        if theirs[name].std() == 0 or weight.dim() < 2:
            assert torch.equal(weight, theirs[name]), name
        else:
            torch.testing.assert_close(weight.std(), theirs[name].std(), rtol=0.1, atol=0)
            assert abs(weight.mean()) < 0.1 * weight.std()


def test_equal_seeds_give_equal_weights_and_others_do_not():
    def weights(seed):
        recipe = make_recipe(seed=seed)
        model = build_model(recipe, "cpu")
        fill_weights(model, recipe)
        return model.state_dict()["model.layers.0.mlp.up_proj.weight"]

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_filling_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    recipe = make_recipe(method="lora")
    fill_weights(build_model(recipe, "cpu"), recipe)
    assert torch.equal(torch.random.get_rng_state(), before)


# -- pretrained ----------------------------------------------------------------------------------


def from_folder(folder, family="llama", **changes):
    recipe = make_recipe(family, weights="pretrained", **changes)
    return replace(recipe, model=replace(recipe.model, source=str(folder)))


def filled(recipe):
    model = build_model(recipe, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # so that a tensor left out is seen
    fill_weights(model, recipe)
    return model


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_pretrained_weights_are_read_exactly(tmp_path, family, method, shard):
    theirs = hugging_face(family)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    recipe = from_folder(tmp_path, family, method=method)
    base = find_adapter(recipe).base_parameters(filled(recipe))
    expected = dict(theirs.named_parameters())
    assert base.keys() == expected.keys()
    assert all(torch.equal(base[n], expected[n]) for n in base)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_checkpoint_holds_beside_parameters_is_read_too(method):
    """DeepSeek-V3 corrects its experts' scores by a buffer that is trained, but by no gradient."""

    class Ones:
        def __init__(self):
            self.asked = []

        def parts(self, name, shape):
            self.asked.append(name)
            return [Part(name, shape)]

        def read(self, part):
            return torch.ones(part.shape)

    config = CONFIGS["deepseek_v3"] | {"first_k_dense_replace": 1}
    recipe = make_recipe("deepseek_v3", config=config, method=method, weights="pretrained")
    model, ones = build_model(recipe, "cpu"), Ones()
    fill_weights(model, recipe, ones)
    assert sorted(ones.asked) == sorted(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    )
    corrections = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert len(corrections) == 2
    assert all(torch.equal(b, torch.ones(8)) for b in corrections)


def test_pretrained_weights_are_cast_to_the_stored_dtype(tmp_path):
    theirs = hugging_face("llama")
    theirs.save_pretrained(tmp_path)
    recipe = from_folder(tmp_path, method="lora", precision="bf16-mixed", base_format="bf16")
    base = find_adapter(recipe).base_parameters(filled(recipe))
    for name, weight in theirs.named_parameters():
        assert torch.equal(base[name], weight.bfloat16())


def test_a_gpt2_checkpoint_without_the_prefix_is_read(tmp_path):
    theirs = hugging_face("gpt2")
    theirs.transformer.save_pretrained(tmp_path)
    ours = filled(from_folder(tmp_path, "gpt2")).state_dict()
    assert all(torch.equal(v, ours[k]) for k, v in theirs.state_dict().items())


@pytest.mark.parametrize("family", [f for f in FAMILIES if f in APART])
def test_experts_are_read_and_exported_each_on_its_own(tmp_path, family):
    """As published files store them, and to the name what Hugging Face's own export writes."""
    theirs = hugging_face(family)
    theirs.save_pretrained(tmp_path)
    ours = file_tensors(filled(from_folder(tmp_path, family)), family)
    save_file(ours, tmp_path / "again.safetensors")
    published, again = (
        load_file(tmp_path / name) for name in ("model.safetensors", "again.safetensors")
    )
    assert again.keys() == published.keys()
    assert all(torch.equal(again[name], published[name]) for name in again)
    assert any(".experts.0." in name for name in again)


@pytest.mark.parametrize("family", families_that("text_of"))
def test_a_text_model_is_read_from_the_files_of_what_reads_images_too(tmp_path, family):
    """As Hugging Face's class of both writes them, beside weights that no class has a part for."""
    tower = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    tower |= {"out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 2}
    both = AutoConfig.for_model(
        find_family(family).text_of, text_config=CONFIGS[family], vision_config=tower
    )
    theirs = AutoModelForImageTextToText.from_config(both)
    theirs.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", dict(text_part(both.to_dict()))
    own = {n.replace(".language_model.", "."): t for n, t in theirs.state_dict().items()}
    for tensors in (load_file(file), theirs.state_dict()):  # published experts are joined
        assert any(name.startswith("model.visual.") for name in tensors)
        save_file(tensors | {"mtp.fc.weight": torch.ones(2)}, file)
        ours = filled(from_folder(tmp_path, family, config=config)).state_dict()
        assert ours.keys() == hugging_face(family).state_dict().keys()
        assert all(torch.equal(tensor, own[name]) for name, tensor in ours.items())


def test_experts_of_a_file_that_holds_a_whole_layer_are_read(tmp_path):
    theirs = hugging_face("mixtral")
    save_file(dict(theirs.named_parameters()), tmp_path / "model.safetensors")
    ours = filled(from_folder(tmp_path, "mixtral")).state_dict()
    assert all(torch.equal(p, ours[name]) for name, p in theirs.named_parameters())


@pytest.fixture
def saved(tmp_path):
    hugging_face("llama").save_pretrained(tmp_path)
    return tmp_path


def refusal(recipe):
    with pytest.raises(InvalidRequest) as caught:
        fill_weights(build_model(recipe, "cpu"), recipe)
    return str(caught.value)


def test_a_missing_weights_file_is_named(saved):
    (saved / "model.safetensors").unlink()
    said = refusal(from_folder(saved))
    assert "no weights in" in said
    assert "model.safetensors" in said


def test_a_truncated_file_is_named(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    said = refusal(from_folder(saved))
    assert str(file) in said
    assert "truncated" in said


def test_a_file_cut_inside_its_header_is_named(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert str(file) in refusal(from_folder(saved))


def test_a_missing_tensor_is_named(saved):
    deeper = CONFIGS["llama"] | {"num_hidden_layers": 4}
    said = refusal(from_folder(saved, config=deeper))
    assert "no tensor `model.layers.3." in said


def test_a_tensor_of_another_shape_is_named_with_both_shapes(saved):
    wider = CONFIGS["llama"] | {"intermediate_size": 96}
    said = refusal(from_folder(saved, config=wider))
    assert "(80, 32)" in said
    assert "(96, 32)" in said
    assert "model.layers.0.mlp.gate_proj.weight" in said


def test_a_missing_shard_is_named(tmp_path):
    hugging_face("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(from_folder(tmp_path))


def test_a_broken_index_is_named(tmp_path):
    hugging_face("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", json.dumps({"weights": {}}), json.dumps([])):
        index.write_text(text)
        assert index.name in refusal(from_folder(tmp_path))


def test_a_config_alone_has_no_weights():
    assert "weights: random" in refusal(make_recipe(weights="pretrained"))


def test_a_hub_id_that_cannot_be_reached_is_named():
    assert "nobody/nothing-at-all" in refusal(from_folder("nobody/nothing-at-all"))


# -- what no device can run ----------------------------------------------------------------------

WINDOWED = CONFIGS["qwen2_moe"] | {"use_sliding_window": True, "sliding_window": 8}
LORA_HEAD = Lora(rank=2, alpha=4.0, targets=("q_proj", "lm_head"))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (make_recipe(attention="efficient"), "exists on CUDA only"),
        (make_recipe(attention="cudnn", precision="bf16"), "exists on CUDA only"),
        (make_recipe(method="lora", base_format="bf16"), "casts nothing"),
        (make_recipe(method="lora", precision="bf16"), "casts nothing"),
        (make_recipe("gpt2", sequence_length=65), "64 positions"),
        (make_recipe("opt", sequence_length=65), "64 positions"),
        (make_recipe("gptj", sequence_length=65), "64 positions"),
        (make_recipe("bloom", attention="flash"), "no bias by distance"),
        (make_recipe("mpt", packing=True), "keep documents apart"),
        (make_recipe("mpt", sequence_length=65), "64 positions"),
        (make_recipe("gptj", loss="chunked", loss_chunk=8), "lm_head.bias"),
        (make_recipe("gemma2", attention="flash"), "attn_logit_softcapping: 50"),
        (make_recipe("qwen2_moe", config=WINDOWED), "sliding window of 8"),
        (make_recipe(recompute_blocks=4), "has 3"),
        (make_recipe(loss="chunked"), "loss_chunk"),
        (make_recipe(method="lora", lora=LORA_HEAD, loss="chunked", loss_chunk=8), "lm_head"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_built(recipe, said):
    with pytest.raises(InvalidRequest, match=said):
        build_model(recipe, "cpu")


def test_a_base_format_is_no_matter_when_nothing_is_frozen():
    build_model(make_recipe(base_format="bf16"), "meta")


def test_flash_in_fp32_is_refused_on_cuda_alone():
    recipe = make_recipe()
    check_attention(recipe, Heads(64), "cpu")
    check_attention(replace(recipe, precision="bf16-mixed"), Heads(64), "cuda")
    with pytest.raises(InvalidRequest, match="computes in 16 bits, not in float32"):
        check_attention(recipe, Heads(64), "cuda")


def test_dropouts_of_the_config_are_off():
    config = CONFIGS["gpt2"] | {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    model = build_model(make_recipe("gpt2", config=config), "meta")
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}


class Operators(TorchDispatchMode):
    """The operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_padding_token_beyond_the_vocabulary_is_left_out():
    config = {k: v for k, v in CONFIGS["glm4"].items() if k != "pad_token_id"}
    model = build_model(make_recipe("glm4", config=config), "meta")
    assert model.get_input_embeddings().padding_idx is None


def test_a_padding_token_costs_no_look_at_the_batch():
    """Hugging Face's GPT-2 compares the batch with it, a read-back from the device."""
    recipe = make_recipe("gpt2", config=CONFIGS["gpt2"] | {"pad_token_id": 3})
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    with Operators() as ran:
        model(input_ids=torch.zeros(2, 16, dtype=torch.int64), use_cache=False)
    assert "addmm.default" in ran.names
    assert "_local_scalar_dense.default" not in ran.names


def test_freeze_by_pattern_reaches_the_module():
    recipe = make_recipe(method="freeze", freeze=Freeze(patterns=("*norm*",)))
    model = build_model(recipe, "meta")
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("norm" in n for n in trained)
