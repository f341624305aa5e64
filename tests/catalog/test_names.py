"""Names that people bring: hub ids and mirrors of models, sizes in words, devices in short."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from memfit import api, catalog
from memfit.catalog import machines, published_names
from memfit.core.devices_as_written import read_devices
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.families import read_model
from memfit.files.flags import gather
from memfit.plan.budget.offers import read_offers
from memfit.plan.request import model_reference
from memfit.workflows.look_up import find_devices

# id -> row, layers, hidden, feed-forward (of an expert), heads of keys and values, vocabulary: as
# each id's own config.json has them
LLAMA8 = (32, 4096, 14336, 8, 128256)
LLAMA70 = (80, 8192, 28672, 8, 128256)
LLAMA1 = (16, 2048, 8192, 8, 128256)
LLAMA3 = (28, 3072, 8192, 8, 128256)
QWEN25_05, QWEN25_15 = (24, 896, 4864, 2, 151936), (28, 1536, 8960, 2, 151936)
QWEN25_3, QWEN25_7 = (36, 2048, 11008, 2, 151936), (28, 3584, 18944, 4, 152064)
QWEN25_14, QWEN25_32 = (48, 5120, 13824, 8, 152064), (64, 5120, 27648, 8, 152064)
QWEN25_72 = (80, 8192, 29568, 8, 152064)
QWEN3_4, QWEN3_8 = (36, 2560, 9728, 8, 151936), (36, 4096, 12288, 8, 151936)
QWEN3_14, QWEN3_30 = (40, 5120, 17408, 8, 151936), (48, 2048, 768, 4, 151936)
PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": ("llama-3-8b", LLAMA8),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama-3-8b", LLAMA8),
    "meta-llama/Meta-Llama-3-70B-Instruct": ("llama-3-70b", LLAMA70),
    "meta-llama/Llama-3.1-8B": ("llama-3.1-8b", LLAMA8),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", LLAMA8),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", LLAMA8),
    "meta-llama/Llama-3.1-70B-Instruct": ("llama-3.1-70b", LLAMA70),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama-3.3-70b-instruct", LLAMA70),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama-3.2-1b", LLAMA1),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama-3.2-3b", LLAMA3),
    "meta-llama/Llama-2-7b-chat-hf": ("llama-2-7b", (32, 4096, 11008, 32, 32000)),
    "meta-llama/Llama-2-13b-chat-hf": ("llama-2-13b", (40, 5120, 13824, 40, 32000)),
    "meta-llama/Llama-2-70b-chat-hf": ("llama-2-70b", (80, 8192, 28672, 8, 32000)),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("llama-3.1-8b", LLAMA8),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": ("llama-3.3-70b-instruct", LLAMA70),
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF": ("llama-3.1-70b", LLAMA70),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("tinyllama-1.1b", (22, 2048, 5632, 4, 32000)),
    "mistralai/Mistral-7B-Instruct-v0.1": ("mistral-7b-v0.1", (32, 4096, 14336, 8, 32000)),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral-7b-v0.3", (32, 4096, 14336, 8, 32768)),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b-v0.1", (32, 4096, 14336, 8, 32000)),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2.5-0.5b", QWEN25_05),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2.5-1.5b", QWEN25_15),
    "Qwen/Qwen2.5-3B-Instruct": ("qwen2.5-3b", QWEN25_3),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2.5-7b", QWEN25_7),
    "Qwen/Qwen2.5-14B-Instruct": ("qwen2.5-14b", QWEN25_14),
    "Qwen/Qwen2.5-32B-Instruct": ("qwen2.5-32b", QWEN25_32),
    "Qwen/Qwen2.5-72B-Instruct": ("qwen2.5-72b", QWEN25_72),
    "Qwen/Qwen2.5-Coder-7B-Instruct": ("qwen2.5-7b", QWEN25_7),
    "Qwen/Qwen2.5-Coder-32B-Instruct": ("qwen2.5-32b", QWEN25_32),
    "Qwen/Qwen2.5-Math-7B": ("qwen2.5-7b", QWEN25_7),
    "Qwen/QwQ-32B": ("qwen2.5-32b", QWEN25_32),
    "Qwen/Qwen3-8B": ("qwen3-8b", QWEN3_8),
    "Qwen/Qwen3-8B-Base": ("qwen3-8b", QWEN3_8),
    "Qwen/Qwen3-0.6B-Base": ("qwen3-0.6b", (28, 1024, 3072, 8, 151936)),
    "Qwen/Qwen3-1.7B-Base": ("qwen3-1.7b", (28, 2048, 6144, 8, 151936)),
    "Qwen/Qwen3-4B-Base": ("qwen3-4b", QWEN3_4),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen3-4b", QWEN3_4),
    "Qwen/Qwen3-14B-Base": ("qwen3-14b", QWEN3_14),
    "Qwen/Qwen3-30B-A3B-Base": ("qwen3-30b-a3b", QWEN3_30),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("qwen3-30b-a3b", QWEN3_30),
    "google/gemma-2b-it": ("gemma-2b", (18, 2048, 16384, 1, 256000)),
    "google/gemma-7b-it": ("gemma-7b", (28, 3072, 24576, 16, 256000)),
    "google/gemma-2-2b-it": ("gemma-2-2b", (26, 2304, 9216, 4, 256000)),
    "google/gemma-2-9b-it": ("gemma-2-9b", (42, 3584, 14336, 8, 256000)),
    "google/gemma-2-27b-it": ("gemma-2-27b", (46, 4608, 36864, 16, 256000)),
    "microsoft/Phi-4-reasoning": ("phi-4", (40, 5120, 17920, 10, 100352)),
    "allenai/OLMo-2-1124-7B-Instruct": ("olmo-2-7b", (32, 4096, 11008, 32, 100352)),
    "allenai/OLMo-2-1124-13B-SFT": ("olmo-2-13b", (40, 5120, 13824, 40, 100352)),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("smollm2-135m", (30, 576, 1536, 3, 49152)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": ("smollm2-360m", (32, 960, 2560, 5, 49152)),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ("smollm2-1.7b", (24, 2048, 8192, 32, 49152)),
    "tiiuae/falcon-7b-instruct": ("falcon-7b", (32, 4544, 18176, 1, 65024)),
    "tiiuae/falcon-40b-instruct": ("falcon-40b", (60, 8192, 32768, 8, 65024)),
    "EleutherAI/pythia-1.4b-deduped": ("pythia-1.4b", (24, 2048, 8192, 16, 50304)),
    "EleutherAI/pythia-6.9b-deduped": ("pythia-6.9b", (32, 4096, 16384, 32, 50432)),
    "unsloth/Llama-3.2-1B-Instruct": ("llama-3.2-1b", LLAMA1),
    "unsloth/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", LLAMA8),
    "unsloth/llama-3-8b": ("llama-3-8b", LLAMA8),
    "unsloth/Qwen3-8B": ("qwen3-8b", QWEN3_8),
    "unsloth/Qwen3-14B-Base": ("qwen3-14b", QWEN3_14),
    "unsloth/Qwen2.5-7B-Instruct": ("qwen2.5-7b", QWEN25_7),
    "unsloth/gemma-2-9b-it": ("gemma-2-9b", (42, 3584, 14336, 8, 256000)),
    "unsloth/mistral-7b-instruct-v0.3": ("mistral-7b-v0.3", (32, 4096, 14336, 8, 32768)),
    "unsloth/llama-3-8b-bnb-4bit": ("llama-3-8b", LLAMA8),
    "unsloth/Qwen3-8B-unsloth-bnb-4bit": ("qwen3-8b", QWEN3_8),
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": ("llama-3.1-8b", LLAMA8),
    "NousResearch/Meta-Llama-3-8B": ("llama-3-8b", LLAMA8),
    "NousResearch/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", LLAMA8),
    "Qwen/Qwen3.6-35B-A3B": ("qwen3.5-35b-a3b", (40, 2048, 512, 2, 248320)),
    "unsloth/Qwen3.5-122B-A10B": ("qwen3.5-122b-a10b", (48, 3072, 1024, 2, 248320)),
    "unsloth/Qwen3.5-397B-A17B": ("qwen3.5-397b-a17b", (60, 4096, 1024, 2, 248320)),
    "Qwen/Qwen3-Coder-Next": ("qwen3-next-80b-a3b", (48, 2048, 512, 2, 151936)),
    "NousResearch/Llama-2-7b-hf": ("llama-2-7b", (32, 4096, 11008, 32, 32000)),
    "NousResearch/Llama-2-13b-chat-hf": ("llama-2-13b", (40, 5120, 13824, 40, 32000)),
}  # fmt: skip
# id, row and the same sizes, as litgpt/config.py @26857050,
# leliuga/cohere-configurations @84408edf, unslothai/unsloth @015bdef0 (models/mapper.py) and
# modelscope/ms-swift @3602360a5 have them
HUB_IDS = [
    line.split(",")
    for line in Path(__file__).with_name("hub_ids.csv").read_text(encoding="utf-8").splitlines()
]
# ids that look alike and have another shape, other blocks, or weights that nobody trains
TRAPS = [
    "mistralai/Mathstral-7B-v0.1", "mistralai/Codestral-22B-v0.1",  # no row has their sizes
    "NousResearch/Hermes-2-Pro-Llama-3-8B",
    "NousResearch/Hermes-3-Llama-3.1-8B", "NousResearch/Nous-Hermes-llama-2-7b",
    "unsloth/phi-4", "unsloth/Phi-3-mini-4k-instruct",  # rewritten as Llama and Mistral
    "allenai/Llama-3.1-Tulu-3-8B",  # eight rows of vocabulary more
    "someone/Llama-3.1-8B-Instruct", "gradientai/Llama-3-8B-Instruct-262k",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """A name that is in no table would be asked of the hub, which a test does not."""

    def refuse(name):
        raise UnknownName("model", name, ())

    monkeypatch.setattr(model_reference, "_read_hub", refuse)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_hub_id_has_the_sizes_of_its_row(name):
    row, sizes = PUBLISHED[name]
    reference = model_reference.find_reference(name)
    a = read_model(reference).architecture
    assert (a.layers, a.hidden, a.experts.ffn or a.ffn, a.kv_heads, a.vocab) == sizes
    assert catalog.find_model(name).id == row
    own = catalog.find_model(row).architecture()
    assert structs.replace(a, max_sequence=0) == structs.replace(
        read_model(catalog.find_model(row).reference()).architecture, max_sequence=0
    )
    assert own.layers == a.layers


def test_every_hub_id_of_the_sources_has_the_sizes_that_they_have_of_it():
    """Of a mirror, the sizes are those of the model that Unsloth and ms-swift name beside it."""
    wrong = {}
    for line in HUB_IDS:
        name, row, *sizes = line[:7]
        a = read_model(model_reference.find_reference(name)).architecture
        found = (a.layers, a.hidden, a.experts.ffn or a.ffn, a.kv_heads, a.vocab)
        if (catalog.find_model(name).id, *found) != (row, *map(int, sizes)):
            wrong[name] = found
    assert not wrong


def test_enough_names_are_known():
    names = [line[0].lower() for line in HUB_IDS]
    assert len(set(names)) == len(names) > 400
    assert all(name.count("/") == 1 for name in names)
    accounts = {name.partition("/")[0] for name in names}
    assert accounts >= {"unsloth", "llm-research", "ai-modelscope", "meta-llama", "qwen", "lmsys"}


def test_every_listed_id_is_of_a_row_and_of_no_other_rows_own():
    own = {catalog.find_model(m.id).hub.lower() for m in catalog.models()}
    assert own
    for row, ids in published_names.published_ids().items():
        assert catalog.find_model(row).id == row
        for each in ids:
            hub = each.partition("@")[0]
            assert hub.lower() not in own
            assert catalog.find_model(hub).id == row, hub


@pytest.mark.parametrize("name", TRAPS)
def test_a_name_of_another_shape_is_not_resolved(name):
    with pytest.raises(InvalidRequest):
        model_reference.find_reference(name)


@pytest.mark.parametrize(
    ("name", "word", "made_from"),
    [
        ("TheBloke/Llama-2-7B-GPTQ", "GPTQ", "llama-2-7b"),
        ("TheBloke/Mistral-7B-Instruct-v0.1-AWQ", "AWQ", "mistral-7b-v0.1"),
        ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "GGUF", "llama-3.1-8b"),
        ("unsloth/Qwen3-8B-GGUF", "GGUF", "qwen3-8b"), ("Qwen/Qwen3-8B-FP8", "FP8", "qwen3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "GPTQ", "qwen2.5-7b"),
        ("mlx-community/Llama-3.2-1B-4bit", "MLX", "llama-3.2-1b"),
        ("https://huggingface.co/unsloth/gemma-2-9b-it-GGUF", "GGUF", "gemma-2-9b"),
        ("onnx-community/Qwen3-0.6B-ONNX", "ONNX", "qwen3-0.6b"),
        ("unsloth/Phi-3.5-mini-instruct-GGUF", "GGUF", "phi-3.5-mini-instruct"),
        ("mlx-community/Qwen3-8B-bf16", "MLX", "qwen3-8b"),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16", "4 bits", "llama-3.3-70b-instruct"),
        ("someone/else-AWQ", "AWQ", "the model that it was made from"),
    ],
)  # fmt: skip
def test_weights_for_inference_are_refused_with_the_reason(name, word, made_from):
    with pytest.raises(InvalidRequest, match="cannot be trained") as caught:
        model_reference.find_reference(name)
    assert word in caught.value.message
    assert made_from in caught.value.hint


@pytest.mark.parametrize(
    "address",
    ["https://huggingface.co/Qwen/Qwen3-8B-Base", "hf.co/Qwen/Qwen3-8B-Base/tree/main",
     "https://modelscope.cn/models/Qwen/Qwen3-8B-Base"],
)  # fmt: skip
def test_a_pages_address_is_its_hub_id(address):
    assert model_reference.find_reference(address).source == "Qwen/Qwen3-8B-Base"
    assert "the sizes of `qwen3-8b`" in catalog.describe_model(address)


def test_a_mirrors_copy_in_four_bits_of_a_name_of_its_own_is_trained_from_the_original():
    made = model_reference.find_reference("unsloth/mistral-7b-bnb-4bit")
    assert made.source == "mistralai/Mistral-7B-v0.1"
    said = catalog.describe_model("unsloth/mistral-7b-bnb-4bit")
    assert "whose weights memfit quantises itself" in said
    assert model_reference.find_reference("unsloth/yi-6b").source == "01-ai/Yi-6B"


def test_weights_are_those_of_the_name_and_positions_too():
    made = model_reference.find_reference("Qwen/Qwen3-8B-Base")
    assert (made.name, made.source) == ("Qwen/Qwen3-8B-Base",) * 2
    assert made.config["max_position_embeddings"] == 32768
    made = model_reference.find_reference("unsloth/llama-3-8b-bnb-4bit")
    assert made.source == "meta-llama/Meta-Llama-3-8B"
    assert model_reference.find_reference("qwen3-8b-base").source == "Qwen/Qwen3-8B-Base"


@pytest.mark.parametrize(
    ("name", "row"),
    [("llama 8b", "llama-3.1-8b"), ("Llama3.1 8B", "llama-3.1-8b"), ("qwen 7b", "qwen2.5-7b"),
     ("qwen3 8b", "qwen3-8b"), ("qwen3 8b base", "qwen3-8b"), ("gemma 9b", "gemma-2-9b"),
     ("smollm 135m", "smollm2-135m"), ("mixtral 8x7b", "mixtral-8x7b-v0.1"),
     ("qwen3 30b", "qwen3-30b-a3b"), ("llama 3.1 8b instruct", "llama-3.1-8b"),
     ("qwen1.5 7b", "qwen1.5-7b"), ("codellama 7b", "codellama-7b"), ("yi 34b", "yi-34b"),
     ("mixtral 8x22b", "mixtral-8x22b-v0.1"), ("granite 8b", "granite-3.1-8b-base"),
     ("granite 8b code", "granite-8b-code-base"), ("glm 9b", "glm-4-9b-0414"),
     ("deepseek coder 6.7b", "deepseek-coder-6.7b"), ("qwen 1.5b", "qwen2.5-1.5b"),
     ("gemma 3 270m", "gemma-3-270m"), ("falcon3 3b", "falcon3-3b"),
     ("solar 10.7b", "solar-10.7b"), ("mistral 7b", "mistral-7b-v0.3"),
     ("mistral 7b v0.1", "mistral-7b-v0.1"), ("qwen 14b", "qwen3-14b"),
     ("qwen 2.5 14b", "qwen2.5-14b"), ("gemma 27b", "gemma-3-27b-it"),
     ("gemma2 27b", "gemma-2-27b"), ("llama2 70b", "llama-2-70b")],
)  # fmt: skip
def test_a_size_in_words_is_a_row(name, row):
    assert catalog.find_model(name).id == row


@pytest.mark.parametrize(
    ("name", "choices"),
    [("llama", ("llama-2-70b", "llama-3.1-70b")), ("mixtral", ("8x7b", "8x22b")),
     ("8b", ("llama-3-8b", "qwen3-8b")), ("llama3", ("llama-3-8b", "llama-3-70b"))],
)  # fmt: skip
def test_words_of_several_shapes_list_them(name, choices):
    with pytest.raises(InvalidRequest, match="names several models") as caught:
        catalog.find_model(name)
    assert all(choice in caught.value.hint for choice in choices)


def test_of_several_versions_the_latest_is_taken_and_the_others_are_named():
    assert catalog.describe_model("mistral 7b") == (
        "`mistral 7b` is taken as `mistral-7b-v0.3`; earlier, with other sizes:"
        " mistral-7b-v0.1, mistral-7b-v0.2"
    )
    assert "llama-3-70b and llama-3.1-70b have the same sizes" in catalog.describe_model(
        "llama 70b"
    )


@pytest.mark.parametrize("name", ["qwen2.5 vl 7b", "llama 3.2 11b vision", "Qwen/Qwen2-VL-7B"])
def test_what_reads_images_is_refused_and_no_text_model_is_offered_for_it(name):
    with pytest.raises(InvalidRequest, match="reads more than text") as caught:
        catalog.find_model(name)
    assert "did you mean" not in caught.value.hint


def test_a_plan_says_which_rows_were_taken():
    plan = api.plan(api.read("llama 8b", device="H100"), levers=False)
    said = " ".join(plan.assumptions)
    assert "`llama 8b` is taken as `llama-3.1-8b`; llama-3-8b has the same sizes" in said
    assert "device `H100` is taken as `h100-sxm`; it may also be `h100-pcie`" in said
    plan = api.predict(api.read("Qwen/Qwen3-8B-Base", device="rtx-4090", changes={
        "framework": "trl", "method": "lora"}))  # fmt: skip
    assert "the sizes of `qwen3-8b` of the catalogue" in " ".join(plan.assumptions)
    plan = api.plan(api.read("llama-3.1-8b", device="h100-sxm"), levers=False)
    assert "taken as" not in " ".join(plan.assumptions)
    plan = api.plan(api.read("gpt2", device="l4", changes={"hardware.count": 64}), levers=False)
    assert "64 devices in one machine" in " ".join(plan.assumptions)
    sold = "`apple-m3-max` is sold with 36/48/64/96/128 GB: the largest is planned with"
    plan = api.plan(api.read("gpt2", device="m3 max"), levers=False)
    assert sold in " ".join(plan.assumptions)
    plan = api.plan(api.read("gpt2", device="m3 max", memory="48 GiB"), levers=False)
    assert "is sold with" not in " ".join(plan.assumptions)


@pytest.mark.parametrize(
    ("name", "row"),
    [("A100", "a100-sxm-80"), ("4090", "rtx-4090"), ("h100 pcie", "h100-pcie"),
     ("H100", "h100-sxm"), ("H200", "h200-sxm"), ("a100 40gb", "a100-sxm-40"),
     ("A100 80GB PCIe", "a100-pcie-80"), ("3080", "rtx-3080-10"), ("rtx4090", "rtx-4090"),
     ("RTX 4060Ti", "rtx-4060-ti-16"), ("mi300", "mi300x"), ("A6000", "rtx-a6000"),
     ("nvidia h100", "h100-sxm"), ("m3 max", "apple-m3-max"), ("v100 32gb", "v100-sxm2-32"),
     ("GeForce RTX 5090", "rtx-5090"), ("RTX 6000 Ada", "rtx-6000-ada"), ("a100-40", "a100-sxm-40"),
     ("H100 SXM5 80GB", "h100-sxm"), ("b200", "b200-sxm"), ("h100 nvl", "h100-nvl"),
     ("RTX 4090 24GB", "rtx-4090"), ("3060 12 gb", "rtx-3060-12"), ("A6000 48g", "rtx-a6000")],
)  # fmt: skip
def test_a_device_may_be_written_short(name, row):
    assert catalog.find_device(name).id == row


@pytest.mark.parametrize("name", ["80gb", "sxm", "a900", "1080 ti", "h100 40gb", "4090 super"])
def test_a_device_that_no_row_describes_is_not_another(name):
    with pytest.raises(InvalidRequest):
        catalog.find_device(name)


def test_every_own_name_of_a_device_needs_no_word_and_has_no_number():
    for device in catalog.devices():
        for name in (device.id, device.name, *device.match):
            assert read_devices(name) == (name, 0, 0)
        assert catalog.describe_device(device.id) == ""


def test_the_hub_is_not_waited_for(monkeypatch):
    import time

    monkeypatch.setattr(model_reference, "HUB_SECONDS", 0.05)
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"within 0.05 s"):
        model_reference._within(0.05, lambda: time.sleep(5))
    assert time.perf_counter() - start < 2
    assert model_reference._within(5, lambda: 3) == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("24gb", "`memfit devices 24GB` lists those of that memory"),
        ("80 GiB", "`memfit devices 80GB` lists those of that memory"),
        ("cuda", "`auto` is what torch sees on this machine"),
        ("MPS", "`memfit devices apple` lists them"),
    ],
)
def test_words_that_name_no_device_are_answered_with_what_to_type(name, hint):
    with pytest.raises(UnknownName) as caught:
        catalog.find_device(name)
    assert caught.value.hint == hint


@pytest.mark.parametrize("name", ["4090 48gb", "m3 max 64gb"])
def test_a_memory_that_a_device_lacks_finds_none_larger(name):
    with pytest.raises(UnknownName):
        catalog.find_device(name)


def test_no_name_with_a_bracket_is_offered():
    with pytest.raises(UnknownName) as caught:
        catalog.find_device("per-gpu")
    assert "(per" not in caught.value.hint


@pytest.mark.parametrize("search", ["24GB", "24 gb", "24 GiB"])
def test_devices_are_searched_by_the_memory_of_their_data_sheet(search):
    found = find_devices(search)
    assert {"rtx-4090", "rtx-3090", "l4"} <= {row.id for row in found}
    assert {"24" in re.findall(r"\d+", row.memory_datasheet) for row in found} == {True}
    assert [row.id for row in find_devices(f"4090 {search}")] == ["rtx-4090"]


@pytest.mark.parametrize(
    ("typed", "row", "count", "nodes"),
    [("p4d.24xlarge", "a100-sxm-40", 8, 1), ("ml.g5.12xlarge", "a10g", 4, 1),
     ("P5EN.48xlarge", "h200-sxm", 8, 1), ("2x p5.48xlarge", "h100-sxm", 8, 2),
     ("a3-highgpu-8g:4", "h100-sxm", 8, 4), ("a2-megagpu-16g", "a100-sxm-40", 16, 1),
     ("Standard_ND96isr_H100_v5", "h100-sxm", 8, 1), ("g2-standard-24", "l4", 2, 1)],
)  # fmt: skip
def test_a_sellers_machine_is_its_devices(typed, row, count, nodes):
    hardware = api.read("qwen3-8b", device=typed).hardware
    assert catalog.find_device(hardware.device).id == row
    assert (hardware.count, hardware.nodes) == (count, nodes)
    assert catalog.describe_device(hardware.device).endswith(f" x `{row}`")


def test_every_machine_names_a_device_by_its_id():
    ids = {device.id for device in catalog.devices()}
    for name, machine in machines._machines().items():
        assert machines.find_machine(name.upper()) == machine, name  # the guard lets it through
        assert machine.device in ids
        assert 1 <= machine.devices <= 16


def test_a_machine_and_a_number_of_devices():
    changes = gather({"device": "p4d.24xlarge", "gpus": "16"}, {})
    hardware = api.read("qwen3-8b", changes=changes).hardware
    assert (hardware.device, hardware.count, hardware.nodes) == ("a100-sxm-40", 8, 2)
    assert api.read("qwen3-8b", device="p5.48xlarge", changes={"hardware.nodes": 2}).hardware.nodes
    with pytest.raises(InvalidRequest, match="disagree") as caught:
        api.read("qwen3-8b", device="p5.48xlarge", changes={"hardware.count": 4})
    assert "`h100-sxm`" in caught.value.hint


def test_offers_of_machines():
    offers = read_offers("p5.48xlarge, 2x g6e.12xlarge, 4xA100")
    assert [each.name for each in offers] == ["h100-sxm:8", "l40s:2x4", "a100-sxm-80:4"]
