"""Catalogue rows: complete, unambiguous, and exact against Hugging Face's classes."""

import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from memfit.catalog import devices, find_device, find_model, models
from memfit.catalog.overheads import find_overhead
from memfit.core import units
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.families import families, find_described, find_family, read_model, references
from memfit.records.model import ModelReference

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from on_gpu.rows import LANDED, read_rows

DESCRIBED = [m for m in models() if m.model_type in families.names()]
COUNTED = [m for m in models() if m.model_type in references.names()]
OTHERS = [m for m in models() if m not in (*DESCRIBED, *COUNTED)]
DATE = re.compile(r"20\d\d-\d\d-\d\d")


def test_every_model_and_accelerator_has_a_row():
    assert len({m.id for m in models()}) == len(models()) > 100
    assert len({d.id for d in devices()}) == len(devices()) > 50
    assert COUNTED
    assert len(DESCRIBED) > 100


def wrong_rows(held, rows):
    """What does not hold of which rows."""
    wrong = {}
    for row in rows:
        try:
            held(row)
        except AssertionError as error:
            wrong[row.id] = error
    return wrong


def the_device(device):
    assert device.name
    assert device.sources
    assert all(len(s) > 10 for s in device.sources)  # spelled out, not a key
    assert DATE.fullmatch(device.checked)
    assert device.memory_datasheet
    for price in device.prices:
        assert 0.1 < price.usd_per_hour < 20
        assert len(price.source) > 10  # spelled out, not a key
        assert price.seller
        assert re.match(r"20\d\d", price.date)
        assert not price.own


def its_quantities(device):
    if device.memory is not None:
        assert 7 * units.GIB < device.memory < 300 * units.GIB
    if device.memory is not None and device.memory_driver is not None:
        assert 0 < device.memory_driver - device.memory < 2 * units.GIB
    assert device.bandwidth is None or 1e10 < device.bandwidth < 1e15
    assert set(device.flops) <= {"fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4"}
    assert all(1e12 <= rate <= 2e16 for rate in device.flops.values())
    assert all(rate < device.flops[k] for k, rate in device.flops_measured.items())
    assert device.link.unidirectional is None or 1e10 < device.link.unidirectional < 1e12
    assert device.watts is None or 20 <= device.watts <= 2000


def its_unverified_fields(device):
    for field in device.unverified:
        base, _, dtype = field.partition(".")
        assert hasattr(device, base), field
        assert not dtype or base == "flops"


@pytest.mark.parametrize("held", [the_device, its_quantities, its_unverified_fields])
def test_device_rows_are_complete_in_base_units_and_name_fields_that_exist(held):
    assert not wrong_rows(held, devices())


def test_only_what_shares_its_memory_or_was_never_printed_has_no_memory():
    unknown = {d.id for d in devices() if d.memory is None}
    assert {d.id for d in devices() if d.vendor in ("Apple", "CPU")} <= unknown
    assert "h20" in unknown
    assert {"h100-sxm", "rtx-4090", "mi300x", "b200-sxm"}.isdisjoint(unknown)


def test_torch_never_sees_more_than_the_low_end_of_what_was_printed():
    assert find_device("h100-sxm").memory == round(79.10 * units.GIB)
    assert find_device("rtx-5090").memory == round(31.36 * units.GIB)
    a = find_device("rtx-5080")  # nobody printed it: the driver's less 0.7 GiB, marked
    assert a.memory_driver - a.memory == 717 * units.MIB
    assert "memory" in a.unverified
    assert "memory" not in find_device("h100-sxm").unverified


def test_every_name_of_a_device_finds_this_row_only():
    seen = {}
    for device in devices():
        for name in (device.id, device.name, *device.match):
            assert seen.setdefault(name.lower(), device.id) == device.id
            assert find_device(name.upper()) == device


@pytest.mark.parametrize("name", ["apple", "rtx"])
def test_a_name_of_several_devices_lists_them(name):
    with pytest.raises(InvalidRequest, match="names several devices") as caught:
        find_device(name)
    beginning = [d.id for d in devices() if d.id.startswith(f"{name.lower()}-")]
    assert len(beginning) > 1
    assert all(f"`{key}`" in caught.value.hint for key in beginning)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a100-80gb", "a100-sxm-80"),
        ("A100-40GB", "a100-sxm-40"),
        ("H100-80GB", "h100-sxm"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("b200", "b200-sxm"),
    ],
)
def test_names_that_people_type_find_their_device(typed, name):
    assert find_device(typed).id == name


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(UnknownName, match="`h100-smx`") as caught:
        find_device("h100-smx")
    assert "`h100-sxm`" in caught.value.hint
    with pytest.raises(UnknownName) as caught:
        find_model("lama-3.1-8b")
    assert "`llama-3.1-8b`" in caught.value.hint
    with pytest.raises(UnknownName):
        find_device("")


def the_model(model):
    assert model.source
    assert model.published_source
    assert DATE.fullmatch(model.checked)
    assert re.fullmatch(r"[a-z0-9.-]+", model.id.replace("_", "-"))
    published = units.parse_count(model.published)
    assert model.parameters == pytest.approx(published, rel=0.055)
    assert bool(model.active_parameters) == bool(model.published_active)
    if model.active_parameters:
        active = units.parse_count(model.published_active)
        if "published_active" not in model.unverified:
            assert model.active_parameters == pytest.approx(active, rel=0.17)
        assert model.active_parameters < model.parameters / 3
    assert model.heads % model.kv_heads == 0


def its_config(model):
    reference = model.reference()
    assert reference.source == model.hub
    assert find_family(model.model_type).architecture(reference.config) == model.architecture()


@pytest.mark.parametrize(("held", "rows"), [(the_model, models()), (its_config, DESCRIBED)])
def test_model_rows_are_complete_and_described_ones_read_back_as_they_are(held, rows):
    assert not wrong_rows(held, rows)


def test_every_name_of_a_model_finds_this_row_only():
    for model in models():
        for name in (model.id, model.name, model.hub, *model.aliases):
            assert find_model(name) == model
            assert find_model(name.upper()) == model


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("llama-3.1-8b", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("llama-2-7b", "Llama-2-7b-hf"),
        ("gpt2-xl", "gpt2-xl"),
        ("pythia-1b", "pythia-1b"),
        ("gpt-neox-20b", "gpt-neox-20b"),
        ("tinyllama-1.1b", "tiny-llama-1.1b"),
        ("qwen2.5-7b", "Qwen2.5-7B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("smollm2-135m", "SmolLM2-135M"),
        ("mixtral-8x7b", "Mixtral-8x7B-v0.1"),
        ("llama-3.3-70b", "Llama-3.3-70B-Instruct"),
        ("olmo-2-7b", "OLMo-2-1124-7B"),
    ],
)
def test_names_that_people_type_find_their_model(typed, name):
    assert find_model(typed).name == name


def test_a_name_of_several_models_lists_them():
    with pytest.raises(InvalidRequest, match="several models") as caught:
        find_model("mixtral")
    assert "`mixtral-8x7b-v0.1`, `mixtral-8x22b-v0.1`" in caught.value.hint


@pytest.mark.parametrize("model", DESCRIBED, ids=lambda m: m.id)
def test_a_described_model_is_hugging_faces_to_the_name_shape_and_count(model):
    reference = model.reference()
    ours = read_model(reference)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**reference.config))
    assert [(w.name, w.shape) for w in ours.weights] == [
        (name, tuple(p.shape)) for name, p in theirs.named_parameters()
    ]
    counted = sum(p.numel() for p in theirs.parameters())
    assert ours.parameters == model.parameters == model.transformers_parameters == counted
    assert ours.architecture == model.architecture()
    assert ours.active_parameters == (model.active_parameters or model.parameters)


@pytest.mark.parametrize("model", COUNTED, ids=lambda m: m.id)
def test_an_encoder_decoders_parameters_are_hugging_faces_and_no_verb_plans_it(model):
    """transformers 5 ties the head that FLAN-T5 keeps apart: its class lacks that one tensor."""
    family = find_described(model.model_type)
    ours = family.weights(model.architecture())
    config = family.config(model.architecture())
    with torch.device("meta"):
        theirs = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config))
    apart = [("lm_head.weight", (model.vocab, model.hidden))]
    assert [(w.name, w.shape) for w in ours] == [
        *((name, tuple(p.shape)) for name, p in theirs.named_parameters()), *apart
    ]  # fmt: skip
    assert sum(w.numel for w in ours) == model.parameters
    assert model.parameters - model.transformers_parameters == model.vocab * model.hidden
    assert family.architecture(config) == model.architecture()
    with pytest.raises(InvalidRequest, match=f"`{model.id}`.* encoder too"):
        model.reference()
    with pytest.raises(InvalidRequest, match="encoder too"):
        read_model(ModelReference(name="folder", source="", config=config))


def test_a_row_that_no_family_describes_keeps_its_recorded_count():
    for model in OTHERS:
        assert model.parameters == model.transformers_parameters
        with pytest.raises(UnknownName, match=f"`{model.model_type}` of `{model.id}`"):
            model.reference()


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128),  # 128 KiB a token in 16 bit, as often quoted
        ("deepseek-v3", 61 * (512 + 64)),  # 70 KB a token in 16 bit (DeepSeek-V3, 2505.09343)
    ],
)
def test_the_cache_of_one_token_is_what_the_papers_say(name, elements):
    assert find_model(name).kv_elements_per_token == elements


def test_model_types_are_hugging_faces():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert {m.model_type for m in models()} <= set(CONFIG_MAPPING_NAMES)


def test_finding_a_row_parses_that_row_only():
    code = (
        "import tomllib\n"
        "from memfit import catalog\n"
        "real, sizes = tomllib.loads, []\n"
        "tomllib.loads = lambda text: (sizes.append(len(text)), real(text))[1]\n"
        "catalog.find_device('h100-sxm'), catalog.find_model('llama-3.1-8b').reference()\n"
        "print(len(sizes), sum(sizes))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reads, characters = map(int, done.stdout.split())
    assert reads == 5  # the device, its prices, the sources of both, the model
    assert characters < 10_000


@pytest.mark.parametrize(("name", "near"), [
    ("someone/Meta-Llama-3-8B-Instruct", "`llama-3-8b`"),  # its own name, and more
    ("someone/Qwen2.5-7B-Instruct", "`qwen2.5-7b`"),
    ("someone/llama-3.2-3b_tuned", "`llama-3.2-3b`"),
    ("someone/llama-8x22b", ""),  # no row of that size
])  # fmt: skip
def test_a_model_that_is_not_there_is_told_one_of_its_size(name, near, monkeypatch):
    import huggingface_hub

    from memfit.plan.request.model_reference import find_reference

    def unreachable(*_):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(InvalidRequest, match="no network") as caught:
        find_reference(name)
    assert (near in caught.value.hint) if near else ("same shape" not in caught.value.hint)


def test_a_context_of_another_hopper_is_assumed_and_says_so():
    measured, assumed = (find_overhead(find_device(d)) for d in ("h100-sxm", "h200-sxm"))
    rows = [r["measured"] for r in read_rows(LANDED).values() if r["slice"] == "recipes"]
    held = [row["outside_allocator"] for row in rows]
    assert measured.low <= min(held) <= max(held) <= measured.high
    assert median(held) == pytest.approx(measured.typical, rel=1e-3)
    assert measured.verified
    assert "measured" in measured.because
    assert not assumed.verified
    assert "assumed to be as on `h100-sxm`" in assumed.because
    assert assumed.typical == measured.typical
    assert assumed.low < measured.low
    ada = find_overhead(find_device("rtx-4090"))
    assert not ada.like
    assert "published" in ada.because
