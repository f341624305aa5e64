"""`memfit merge` against peft's own merge, and what it says of its losses."""

import json
import warnings

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from memfit import api
from memfit.cli.app import app
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora
from memfit.train.checkpoint import merge as merging
from memfit.train.checkpoint.export import _save_adapter
from memfit.train.step.step import step
from tiny_models import CONFIGS, make_batch, make_built, make_recipe, targets_of

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
TARGETS = {
    "llama": ("q_proj", "down_proj", "lm_head"), "qwen2": ("q_proj", "up_proj"),
    "gpt2": ("c_attn", "c_proj"),
}  # fmt: skip


def make_base(folder, family="llama", dtype=torch.float32):
    config = AutoConfig.for_model(**{**CONFIGS[family], "tie_word_embeddings": False})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def make_adapter(folder, base, config, *, method="lora", scaling="plain", **changes):
    """Trained for three steps by memfit, saved in peft's format."""
    family = config["model_type"]
    recipe = make_recipe(
        family, method=method, weights="pretrained",
        lora=Lora(rank=4, alpha=16.0, targets=TARGETS[family], scaling=scaling), **changes,
    )  # fmt: skip
    recipe = replace(recipe, model=ModelReference(name="base", source=str(base), config=config))
    built = make_built(recipe)
    for seed in range(3):
        batch = make_batch(seed=seed)
        step(built, [batch], targets_of(batch))
    folder.mkdir(parents=True)
    _save_adapter(folder, built)
    return built


def merge_by_peft(base, adapter, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers renamed
        model = AutoModelForCausalLM.from_pretrained(base, **how)
        return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(5, 21)[None]).logits


@pytest.fixture
def pair(tmp_path):
    config = make_base(tmp_path / "base")
    make_adapter(tmp_path / "adapter", tmp_path / "base", config)
    return tmp_path


def away_from_pefts(root, family="llama", **how):
    """Entries of all weights that differ from peft's merge, in fp32."""
    config = make_base(root / "base", family)
    make_adapter(root / "adapter", root / "base", config, **how)
    api.merge(root / "adapter", root / "merged")
    ours = AutoModelForCausalLM.from_pretrained(root / "merged")
    theirs = merge_by_peft(root / "base", root / "adapter")
    want = theirs.state_dict()
    assert ours.state_dict().keys() == want.keys()
    assert not torch.equal(
        logits(ours), logits(AutoModelForCausalLM.from_pretrained(root / "base"))
    )
    return sum(int((t != want[n]).sum()) for n, t in ours.state_dict().items())


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize(
    ("method", "scaling"),
    [
        ("lora", "plain"),
        ("lora", "rank-stabilised"),
        ("dora", "plain"),
        ("dora", "rank-stabilised"),
    ],
)
def test_the_merged_weights_are_pefts_to_the_bit_in_fp32(family, method, scaling, tmp_path):
    assert away_from_pefts(tmp_path, family, method=method, scaling=scaling) == 0


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_in_bf16_the_merge_is_no_farther_from_exact_than_pefts_and_its_loss_is_measured(
    method, tmp_path
):
    config = make_base(tmp_path / "base", dtype=torch.bfloat16)
    make_adapter(
        tmp_path / "adapter", tmp_path / "base", config, method=method,
        precision="bf16-mixed", base_format="bf16",
    )  # fmt: skip
    made = api.merge(tmp_path / "adapter", tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    theirs = merge_by_peft(tmp_path / "base", tmp_path / "adapter").state_dict()
    exact = merge_by_peft(tmp_path / "base", tmp_path / "adapter", dtype=torch.float32).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    changed = [n for n in exact if not torch.equal(exact[n], plain[n].float())]
    assert made.weights == len(changed)
    assert made.dtypes == ("BF16",)
    lost = change = of_peft = 0.0
    for name in changed:
        assert ours[name].dtype == torch.bfloat16
        lost += float((ours[name].double() - exact[name].double()).square().sum())
        of_peft += float((theirs[name].double() - exact[name].double()).square().sum())
        change += float((exact[name].double() - plain[name].double()).square().sum())
    assert lost <= of_peft
    assert made.lost == pytest.approx((lost / change) ** 0.5, rel=1e-3)
    assert made.lost > 1e-3
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")).isfinite().all()


def test_merging_in_fp32_loses_nothing(pair):
    made = api.merge(pair / "adapter", pair / "merged")
    assert (made.lost, made.base_differs, made.dtypes) == (0.0, None, ("F32",))


def test_many_files_have_an_index_and_no_more_than_one_is_in_memory(pair, monkeypatch):
    monkeypatch.setattr(merging, "FILE_BYTES", 20_000)
    api.merge(pair / "adapter", pair / "one")
    index = json.loads((pair / "one" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert max((pair / "one" / f).stat().st_size for f in files) < 22_000
    for name, file in index["weight_map"].items():
        with safe_open(pair / "one" / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 (no dict)
    whole = AutoModelForCausalLM.from_pretrained(pair / "one")
    want = merge_by_peft(pair / "base", pair / "adapter")
    assert torch.equal(logits(whole), logits(want))


def test_a_run_says_how_far_the_files_are_from_what_it_trained_on(pair, monkeypatch):
    """An fp32 base that training stored in bf16: the norms of its rounding over its own."""
    recipe = make_recipe(method="lora", precision="bf16-mixed", base_format="bf16")
    monkeypatch.setattr(merging, "find_recipe", lambda place: recipe)
    made = api.merge(pair / "adapter", pair / "merged")
    base = load_file(pair / "base" / "model.safetensors")
    own = [t for n, t in base.items() if any(f"{x}.weight" in n for x in TARGETS["llama"])]
    error = sum(float((t.bfloat16().double() - t.double()).square().sum()) for t in own)
    norm = sum(float(t.double().square().sum()) for t in own)
    assert made.base_differs == pytest.approx((error / norm) ** 0.5, rel=1e-6)


@pytest.mark.parametrize(("form", "least", "most"), [("int8", 2e-3, 1e-2), ("nf4", 0.05, 0.12)])
def test_an_adapter_of_a_quantised_base_says_how_far_the_merge_is_from_it(
    form, least, most, tmp_path, monkeypatch
):
    """Within the theory of each format (Gaussian weights), and logits differ as well."""
    config = make_base(tmp_path / "base", dtype=torch.bfloat16)
    how = {"precision": "bf16-mixed", "base_format": form}
    built = make_adapter(tmp_path / "adapter", tmp_path / "base", config, **how)
    monkeypatch.setattr(merging, "find_recipe", lambda place: built.recipe)
    made = api.merge(tmp_path / "adapter", tmp_path / "merged")
    assert least < made.base_differs < most
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        on, off = logits(built.model).float(), logits(merged).float()
    apart = float((on - off).norm() / on.norm())
    assert 0 < apart < 4 * most


def test_the_verb_writes_a_folder_and_says_what_it_lost(pair):
    out = pair / "merged"
    done = CliRunner().invoke(app, ["merge", str(pair / "adapter"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "weights merged" in done.output
    assert (out / "config.json").exists()
    assert not (out / "adapter_config.json").exists()


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def strip(path, word):
    save_file({n: t for n, t in load_file(path).items() if word not in n}, path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda r: (r / "merged").mkdir(), "exists already"),
        (lambda r: edit(r / "adapter" / "adapter_config.json", peft_type="IA3"), "IA3"),
        (lambda r: edit(r / "adapter" / "adapter_config.json", rank_pattern={"q": 2}), "rank_pat"),
        (lambda r: edit(r / "adapter" / "adapter_config.json", base_model_name_or_path=None),
         "random weights"),
        (lambda r: strip(r / "adapter" / "adapter_model.safetensors", "q_proj.lora_B"), "lacks"),
        (lambda r: strip(r / "base" / "model.safetensors", "layers.1.self_attn.q_proj"),
         "no such tensor"),
        (lambda r: (r / "adapter" / "adapter_config.json").write_text("{"), "is not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_and_leaves_nothing(spoil, said, pair):
    spoil(pair)
    before = {p.name for p in pair.iterdir()}
    with pytest.raises(InvalidRequest, match=said) as caught:
        api.merge(pair / "adapter", pair / "merged")
    assert caught.value.hint
    assert {p.name for p in pair.iterdir()} == before


def test_turned_weights_are_the_familys_whatever_the_adapter_says(pair):
    """peft takes `fan_in_fan_out` back, with a warning, where a weight is a Linear's."""
    want = merge_by_peft(pair / "base", pair / "adapter")
    edit(pair / "adapter" / "adapter_config.json", fan_in_fan_out=True)
    api.merge(pair / "adapter", pair / "merged")
    ours = AutoModelForCausalLM.from_pretrained(pair / "merged")
    assert torch.equal(logits(ours), logits(want))


def test_a_full_disk_leaves_nothing(pair, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "save_file", fail)
    with pytest.raises(RunFailed, match="No space left"):
        api.merge(pair / "adapter", pair / "merged")
    assert {p.name for p in pair.iterdir()} == {"base", "adapter"}


def forget_the_root(patch):
    patch.setattr(merging.Change, "apply", lambda self, w: w.float() + self.up @ self.down * 4.0)


def forget_the_magnitudes(patch):
    made = merging.Change.apply
    patch.setattr(merging.Change, "apply", lambda s, w: made(s._replace(magnitude=None), w))


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"scaling": "rank-stabilised"}, forget_the_root),
        ({"method": "dora"}, forget_the_magnitudes),
    ],
)  # fmt: skip
def test_a_fault_of_the_merge_is_found(how, fault, tmp_path, monkeypatch):
    assert away_from_pefts(tmp_path / "right", **how) == 0
    fault(monkeypatch)
    assert away_from_pefts(tmp_path / "wrong", **how) > 1000
