"""Quantised bases against bitsandbytes' own modules, theory, and the same model in 16 bits."""

import copy

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.adapters.shared.quantised_base import is_projection
from memfit.certify import trace
from memfit.certify.tracing.trace_step import worst_shapes
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import
from memfit.families import read_model
from memfit.records.ledger import Phase
from memfit.records.recipe import Lora, Quantisation
from memfit.train.measure.live import LiveBytes
from memfit.train.model.hugging_face import parts
from memfit.train.model.quantised import QuantisedLinear, count_outliers, quantised_modules
from memfit.train.step.build import Built, build_model, build_optimizer, check_census, fill_weights
from memfit.train.step.step import evaluate, step
from tiny_models import gradients_in, make_batch, make_built, make_recipe, targets_of

with quiet_import():
    import bitsandbytes as bnb
    from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState

CPU = catalog.find_device("cpu-x86")
FORMATS = {
    "nf4, double": ("nf4", Quantisation(double=True)),
    "nf4": ("nf4", Quantisation()),
    "fp4, double": ("fp4", Quantisation(double=True)),
    "int8": ("int8", Quantisation(outlier_threshold=6.0, outlier_share=0.1)),
    "int8, no outliers": ("int8", Quantisation()),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def recipe_of(form="nf4, double", precision="bf16", family="llama", **changes):
    base_format, own = FORMATS[form]
    return make_recipe(
        family, method="lora", base_format=base_format, precision=precision, quantisation=own,
        **changes,
    )  # fmt: skip


def linear_of(form, precision="bf16", rows=96, columns=192, bias=True, scale=1.0):
    """A dense projection of random weights, and the same quantised."""
    torch.manual_seed(0)
    old = nn.Linear(columns, rows, bias=bias, dtype=DTYPES[precision])
    old.weight.data.normal_(0, scale).clamp_(-4 * scale, 4 * scale)
    made = QuantisedLinear(old, recipe_of(form, precision))
    for name, parameter in made.stored().items():
        made._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"), False)
    made.store(old.weight.data)
    return old, made


def error(a, b):
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm())


# -- what is stored ------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_stored_as_bitsandbytes_stores_them(kind, double):
    old, made = linear_of({("nf4", True): "nf4, double", ("nf4", False): "nf4",
                           ("fp4", True): "fp4, double"}.get((kind, double), "nf4"))  # fmt: skip
    kind = made.coding.removesuffix("-double")
    double = made.coding.endswith("-double")
    codes, state = bnb.functional.quantize_4bit(
        old.weight.data, blocksize=64, compress_statistics=double, quant_type=kind
    )
    assert torch.equal(made.weight, codes)
    assert torch.equal(made.factors(), state.absmax)
    if double:
        assert torch.equal(made.numbers("nested_absmax"), state.state2.absmax)
        assert torch.equal(made.numbers("nested_table"), state.state2.code)
        assert made.numbers("offset").item() == state.offset.item()
    theirs = [codes, state.absmax]
    theirs += [state.state2.absmax, state.state2.code, state.offset] if double else []
    held = sum(p.numel() * p.element_size() for p in made.stored().values())
    assert held == sum(t.numel() * t.element_size() for t in theirs)
    assert torch.equal(made.dense(), bnb.functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("shape", [(64, 96), (32, 32), (7, 80)])
@pytest.mark.parametrize("form", ["nf4, double", "nf4", "fp4, double"])
def test_rows_that_end_within_a_block_come_back_as_they_were(form, shape):
    old, made = linear_of(form, "fp32", *shape)
    assert error(made.dense(), old.weight) < 0.16


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="a fault of the AVX-512 kernel"
)
def test_bitsandbytes_own_still_returns_wrong_weights_for_such_rows():
    """Why `dense` asks for one long row; when this fails, it may ask for the matrix itself."""
    old, _ = linear_of("nf4", "fp32", 64, 96)
    found = bnb.functional.dequantize_4bit(
        *bnb.functional.quantize_4bit(old.weight.data, blocksize=64, quant_type="nf4")
    )
    assert error(found, old.weight) > 0.16


def test_eight_bits_are_stored_as_bitsandbytes_stores_them():
    old, made = linear_of("int8")
    theirs = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
    theirs = theirs.to("cpu")
    theirs = theirs if theirs.dtype == torch.int8 else theirs._quantize("cpu")
    assert torch.equal(made.weight, theirs.CB)
    assert torch.equal(made.factors(), theirs.SCB)


# -- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("form", ["nf4, double", "nf4", "fp4, double"])
def test_a_four_bit_product_and_its_gradient_are_bitsandbytes_own(form, precision):
    old, made = linear_of(form, precision)
    theirs = bnb.nn.Linear4bit(
        192, 96, compute_dtype=DTYPES[precision], quant_type=form[:3],
        compress_statistics="double" in form,
    )  # fmt: skip
    theirs.load_state_dict(old.state_dict())
    theirs = theirs.to("cpu")
    theirs.bias.data = old.bias.data
    x = torch.randn(2, 7, 192, dtype=DTYPES[precision])
    ours, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = made(ours), theirs(other)
    assert torch.equal(a, b)
    slope = torch.randn_like(a)
    a.backward(slope)
    b.backward(slope)
    assert torch.equal(ours.grad, other.grad)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("form", ["int8", "int8, no outliers"])
def test_an_eight_bit_product_and_its_gradient_are_those_of_matmul8bitlt(form, precision):
    """Which is what a GPU runs; on a CPU, bitsandbytes' module would take another function."""
    _, made = linear_of(form, precision)
    x = torch.randn(2, 7, 192, dtype=DTYPES[precision])
    x[..., 5] *= 30
    state = MatmulLtState(CB=made.weight, SCB=made.factors())
    state.has_fp16_weights = False
    state.threshold = made.threshold
    ours, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    a = made(ours)
    b = MatMul8bitLt.apply(other, made.weight, None, made.bias, state)
    assert torch.equal(a, b)
    slope = torch.randn_like(a)
    a.backward(slope)
    b.backward(slope)
    assert torch.equal(ours.grad, other.grad)


def test_an_eight_bit_product_keeps_nothing_of_its_input():
    """bitsandbytes' own keeps it in an attribute of the node, which recomputation cannot free."""
    _, made = linear_of("int8")
    x = torch.randn(4, 192, dtype=torch.bfloat16, requires_grad=True)
    inner = x * 1
    kept = torch.utils.weak.WeakTensorKeyDictionary()
    kept[inner] = True
    product = made(inner)
    assert product.requires_grad
    del inner
    assert not len(kept)


# -- trainers' test 10: errors within theory -----------------------------------------------------

LIMITS = {"int8, no outliers": 1e-2, "nf4, double": 1.2e-1, "nf4": 1.2e-1, "fp4, double": 1.6e-1}


@pytest.mark.parametrize("form", LIMITS)
def test_the_error_of_a_projection_on_gaussian_weights_is_within_theory(form):
    old, made = linear_of(form, "fp32", rows=512, columns=1024, bias=False)
    x = torch.randn(64, 1024)
    assert error(made.dense(), old.weight) <= LIMITS[form]
    if form.startswith("int8"):  # rows of the input are rounded too
        assert error(made(x), x @ old.weight.T) <= 2 * LIMITS[form]
    else:
        assert error(made(x), x @ old.weight.T) <= LIMITS[form]


def outlier_error(form):
    old, made = linear_of(form, "fp32", rows=512, columns=1024, bias=False)
    torch.manual_seed(1)
    x = torch.randn(64, 1024).clamp_(-4, 4)
    x[:, 5] *= 30
    return error(made(x), x @ old.weight.T), made


def test_a_column_of_outliers_stays_bounded_under_the_threshold():
    with_threshold, made = outlier_error("int8")
    without, _ = outlier_error("int8, no outliers")
    assert with_threshold <= 1e-2
    assert without > 2 * with_threshold
    assert made.most_outliers == 1


@pytest.mark.parametrize("form", FORMATS)
def test_the_gradient_of_the_input_goes_through_the_dense_weight(form):
    _, made = linear_of(form, "fp32", bias=False)
    x = torch.randn(9, 192, requires_grad=True)
    slope = torch.randn(9, 96)
    made(x).backward(slope)
    assert error(x.grad, slope @ made.dense()) <= 1e-2


# -- trainers' test 11: the census ---------------------------------------------------------------


def plain_projections(model):
    """Linear modules of the blocks that nothing has quantised, adapters aside."""
    return [
        name
        for name, module in parts(model).blocks.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, QuantisedLinear)
        and ".lora_" not in name
    ]


@pytest.mark.parametrize("form", ["nf4, double", "int8"])
@pytest.mark.parametrize(
    "family", ["llama", "gpt_neox", "falcon", "bloom", "mpt", "opt", "phi3", "gemma2", "gptj"]
)
def test_every_projection_of_the_blocks_is_quantised_and_nothing_else_is(family, form):
    recipe = recipe_of(form, family=family)
    model = build_model(recipe, "meta")
    rows = [w.name for w in read_model(recipe.model).weights if is_projection(w)]
    assert sorted(quantised_modules(model)) == sorted(rows)
    assert plain_projections(model) == []
    inside = set(parts(model).blocks.modules())
    found = [m for m in model.modules() if isinstance(m, QuantisedLinear)]
    assert found
    assert all(m in inside for m in found)
    assert {str(m.weight.dtype) for m in found} == {
        "torch.int8" if form == "int8" else "torch.uint8"
    }


def test_a_projection_that_was_forgotten_is_found_by_the_census():
    recipe = recipe_of()
    model = build_model(recipe, "meta")
    block = parts(model).blocks[1]
    block.mlp.down_proj = nn.Linear(80, 32, bias=False, dtype=torch.bfloat16, device="meta")
    assert len(plain_projections(model)) == 1
    with pytest.raises(ValueError, match=r"down_proj"):
        check_census(model, recipe)


# -- the model and the step ----------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_seed_gives_the_weights_that_it_gives_in_sixteen_bits(form):
    recipe = recipe_of(form)
    coded = quantised_modules(make_built(recipe).model)
    plain = make_recipe(method="lora", base_format="bf16", precision="bf16")
    model = make_built(plain).model
    base = find_adapter(plain).base_parameters(model)
    for name, module in coded.items():
        assert error(module.dense(), base[name]) < 0.2, name
        twin = copy.deepcopy(module)
        twin.store(base[name].data)
        assert torch.equal(twin.weight, module.weight), name
    rest = find_adapter(recipe).base_parameters(make_built(recipe).model)
    for name in base.keys() & rest.keys() - coded.keys():
        assert torch.equal(base[name], rest[name]), name


def gradients(built, batch):
    """The loss of a step, and the gradients that its update was given."""
    found = gradients_in(built)
    result = step(built, [batch], targets_of(batch))
    return result.loss, found


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("form", ["nf4, double", "int8"])
def test_recomputing_changes_nothing(form, precision):
    batch = make_batch()
    plain = gradients(make_built(recipe_of(form, precision)), batch)
    again = gradients(make_built(recipe_of(form, precision, recompute_blocks=3)), batch)
    assert torch.equal(plain[0], again[0])
    assert plain[1].keys() == again[1].keys()
    assert all(torch.equal(plain[1][n], again[1][n]) for n in plain[1])


@pytest.mark.parametrize("form", ["nf4, double", "fp4, double", "int8"])
def test_evaluating_before_a_step_changes_nothing(form):
    """bitsandbytes' Linear4bit repacks its weight in an evaluation on CPUs with AVX512-BF16."""
    recipe = recipe_of(form)
    batch = make_batch()
    fresh, used = make_built(recipe), make_built(recipe)
    before = {n: p.clone() for n, p in used.model.named_parameters()}
    evaluate(used, batch)
    assert all(torch.equal(p, before[n]) for n, p in used.model.named_parameters())
    a, b = gradients(fresh, batch), gradients(used, batch)
    assert torch.equal(a[0], b[0])
    assert all(torch.equal(a[1][n], b[1][n]) for n in a[1])


@pytest.mark.parametrize("form", ["nf4, double", "int8"])
def test_training_lowers_the_loss_and_leaves_the_base_alone(form):
    recipe = recipe_of(form, "bf16-mixed")
    built = make_built(recipe)
    batch = make_batch()
    frozen = {n: p.clone() for n, p in built.model.named_parameters() if not p.requires_grad}
    losses = [float(step(built, [batch], targets_of(batch)).loss) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.05
    after = dict(built.model.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in frozen.items())


def learned(base_format, own):
    """The first and the last loss of adapters that learn a batch by heart."""
    targets = ("q_proj", "v_proj", "up_proj", "down_proj")
    recipe = make_recipe(
        method="lora", base_format=base_format, precision="bf16-mixed", quantisation=own,
        lora=Lora(rank=8, alpha=32.0, targets=targets), optimizer={"learning_rate": 3e-2},
    )  # fmt: skip
    built, batch = make_built(recipe), make_batch()
    losses = [float(step(built, [batch], targets_of(batch)).loss) for _ in range(80)]
    return losses[0], min(losses)


def test_adapters_over_a_quantised_base_learn_as_over_one_in_sixteen_bits():
    """Trainers' test 18, the short convergence: within a band of the same run in bf16."""
    start, end = learned("bf16", Quantisation())
    assert end < 0.9 * start
    for base_format, own in (FORMATS["nf4, double"], FORMATS["int8"]):
        first, last = learned(base_format, own)
        assert first - last == pytest.approx(start - end, rel=0.25)


# -- memory --------------------------------------------------------------------------------------


def live_peaks(recipe):
    """Peaks of a real run on this CPU: loading, and two steps."""
    with LiveBytes("cpu") as live:
        model = build_model(recipe, "cpu")
        live.register_model(model)
        fill_weights(model, recipe)
        built = Built(recipe, model, build_optimizer(recipe, model))
        live.register_optimizer(built.optimizer)
        live.enter(Phase.FIRST_STEP)
        for index in range(2):
            batches = []
            for _ in worst_shapes(recipe):
                batch = make_batch()
                live.register_batch(batch.input_ids, batch.labels, batch.position_ids)
                batches.append(batch)
            enter = live.enter if index else lambda phase: None
            step(built, batches, targets_of(*batches), enter)
            del batches, batch
    return live.peaks, model


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("form", ["nf4, double", "fp4, double", "int8, no outliers"])
def test_the_certificate_is_what_a_cpu_holds(form, precision):
    recipe = recipe_of(form, precision, recompute_blocks=1)
    real, _ = live_peaks(recipe)
    certified = trace(recipe, CPU).phases
    for phase in (Phase.LOAD, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
        assert real[phase] == certified[phase], phase


def test_the_certificate_bounds_what_outliers_take():
    recipe = recipe_of("int8", "bf16")
    low = replace(recipe.quantisation, outlier_threshold=2.8, outlier_share=0.999)
    recipe = replace(recipe, quantisation=low)
    real, model = live_peaks(recipe)
    mean, most = count_outliers(model)
    assert 0 < mean < most <= low.outlier_share
    certified = trace(recipe, CPU)
    assert any("hold outliers" in bound for bound in certified.bounds)
    none = trace(replace(recipe, quantisation=replace(low, outlier_share=0.0)), CPU).phases
    phase = Phase.FORWARD
    assert none[phase] <= real[phase] <= certified.phases[phase]
    assert certified.phases[phase] > none[phase]


def test_one_dense_weight_is_alive_at_a_time_while_a_model_is_loaded(tmp_path):
    from safetensors.torch import save_file

    recipe = recipe_of("nf4, double")
    source = make_built(make_recipe(method="full", base_format="bf16", precision="bf16"))
    save_file(dict(source.model.named_parameters()), tmp_path / "model.safetensors")
    recipe = replace(
        recipe, weights="pretrained", model=replace(recipe.model, source=str(tmp_path))
    )
    with LiveBytes("cpu") as live:
        model = build_model(recipe, "cpu")
        live.register_model(model)
        live.enter(Phase.LOAD)
        live.restart()
        before = live.live
        fill_weights(model, recipe)
    dense = 80 * 32 * 2  # the largest projection in 16 bits
    assert live.peaks[Phase.LOAD] - before < 3 * dense + 4096  # the file's, ours, the codes
    base = find_adapter(recipe).base_parameters(model)
    assert torch.equal(base["lm_head.weight"], source.model.lm_head.weight)
    for name, module in quantised_modules(model).items():
        assert error(module.dense(), source.model.get_parameter(name)) < 0.2


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "full"}, "no gradient can change"),
        ({"method": "freeze"}, "no gradient can change"),
        ({"method": "dora"}, "measures the rows"),
        ({"family": "gpt2"}, "Conv1D"),
    ],
)
@pytest.mark.parametrize("base_format", ["int8", "nf4", "fp4"])
def test_what_cannot_be_quantised_is_refused_with_what_to_use_instead(base_format, changes, said):
    changes = {"method": "lora", "family": "llama"} | changes
    family = changes.pop("family")
    recipe = make_recipe(family, base_format=base_format, **changes)
    with pytest.raises(InvalidRequest, match=said) as caught:
        find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    assert caught.value.hint


class _Reads(nn.Module):
    """Notes the dtypes that its codes and scales have in a forward."""

    def __init__(self, *shape):
        super().__init__()
        self.codes = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.ones(shape), requires_grad=False)
        self.seen = []

    def forward(self, x):
        self.seen = [self.codes.dtype, self.scales.dtype]
        return x * self.scales


def test_fsdp2_still_gathers_fp32_as_it_computes_and_integers_as_they_are():
    """Why fp32 numbers are stored as bytes: when this fails, they need not be."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        module, policy = _Reads(4), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module(torch.zeros(4))
    finally:
        distributed.destroy_process_group()
    assert module.seen == [torch.uint8, torch.bfloat16]


def test_bytes_that_were_gathered_as_other_numbers_are_refused():
    _, made = linear_of("nf4")
    made.absmax = nn.Parameter(made.absmax.to(torch.bfloat16), requires_grad=False)
    with pytest.raises(InvalidRequest, match=r"gathers bytes as torch\.bfloat16") as caught:
        made.dense()
    assert "one device" in caught.value.hint
