"""`compile: blocks`: what the compiler's blocks compute and keep, and what its certificate says."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._inductor import config as inductor

from memfit import api
from memfit.adapters import find_adapter
from memfit.catalog import find_device
from memfit.certify.tracing.fake_device import fake_device
from memfit.certify.tracing.trace_step import trace_step
from memfit.core.errors import InvalidRequest, NotCertified
from memfit.families import families_that, read_model
from memfit.families.capabilities.compiled import compiled_bounds
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import LEAN, Lora
from memfit.records.request import Request
from memfit.train.measure.counters import Meter
from memfit.train.model.hugging_face import parts
from memfit.train.step import build
from memfit.train.step.build import build_model
from memfit.train.step.step import step
from tiny_models import CONFIGS, gradients_in, make_batch, make_built, make_recipe, targets_of

# dynamo asks tensors for gradients, inductor imports what is deprecated; warnings are errors here
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
NO_CLIP = {"clip_norm": 0.0}
ROWS, HIDDEN = 2, 32
TOKENS = 16  # as many as in training: another number would be compiled anew
LORA = Lora(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Compilations of other tests would count, and reach torch's limit for one function."""
    torch._dynamo.reset()
    counters.clear()
    # no vector code, and no trial of each set of vector instructions by g++
    with inductor.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": True}):
        yield
    torch._dynamo.reset()


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo and AOTAutograd as ever, without generated code: no compiler is needed."""
    plain = torch.compile

    def compile(function, *, options, **told):  # options are inductor's
        return plain(function, backend="aot_eager", **told)

    monkeypatch.setattr(torch, "compile", compile)


def kept_by(model: nn.Module, *, mixed: bool = False) -> int:
    """Bytes that the second block's forward saves, beside its weights and its inputs."""
    where = parts(model)
    device = next(model.parameters()).device
    x = torch.zeros(ROWS, TOKENS, where.base.config.hidden_size, device=device, requires_grad=True)
    turn = where.backbone.rotary_emb(x, torch.arange(TOKENS, device=device).unsqueeze(0))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False)
    with autocast:
        where.blocks[1](x, position_embeddings=turn)  # compiled; what that saves is no matter
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = where.blocks[1](x, position_embeddings=turn)
    for known in (*model.parameters(), x, *turn):
        saved.pop(known.untyped_storage()._cdata, None)
    del out
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def certified_to_keep(recipe) -> int:
    build_model(recipe, "meta")
    with fake_device(find_device("cpu-x86")):
        return kept_by(build_model(recipe, "cpu"), mixed=recipe.autocast)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.wide)])
def test_compiled_blocks_compute_what_blocks_do_and_keep_what_is_certified(method):
    plain = make_recipe(optimizer=NO_CLIP, method=method)
    recipe, batch = replace(plain, compile="blocks"), make_batch(ignored=5)
    built = make_built(plain)
    weights = {k: v.clone() for k, v in built.model.state_dict().items()}
    expected = gradients_in(built)
    loss = step(built, [batch], targets_of(batch)).loss
    built = make_built(recipe)
    built.model.load_state_dict(weights)
    gradients = gradients_in(built)
    assert float(step(built, [batch], targets_of(batch)).loss) == pytest.approx(float(loss), 1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    # blocks share a compilation; under an adapter, the first one's input has no gradient
    assert counters["stats"]["unique_graphs"] == (1 if method == "full" else 2)
    kept = kept_by(built.model)
    assert kept == certified_to_keep(recipe) == kept_by(make_built(replace(plain, lean=LEAN)).model)


@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with g++")
def test_compiled_blocks_keep_no_copy_of_a_weight_in_16_bits():
    plain = make_recipe(precision="bf16-mixed")
    recipe = replace(plain, compile="blocks")
    kept = kept_by(make_built(recipe).model, mixed=True)
    assert kept == certified_to_keep(recipe)
    # behind attention lean blocks keep the residual stream in fp32, compiled ones what it adds
    lean = kept_by(make_built(replace(plain, lean=LEAN)).model, mixed=True)
    assert lean - kept == ROWS * TOKENS * HIDDEN * 2


def test_the_compiler_cuts_all_other_code_by_its_own_rules():
    before = config.save_config()
    build_model(make_recipe(compile="blocks"), "meta")
    certified_to_keep(make_recipe(compile="blocks"))
    assert config.save_config() == before


@pytest.mark.usefixtures("eager_backend")
@pytest.mark.parametrize("family", families_that("compiles"))
def test_every_family_compiles_as_a_whole_and_keeps_what_a_plan_predicts(family):
    recipe = make_recipe(family, compile="blocks")
    batch = make_batch()
    step(make_built(recipe), [batch], targets_of(batch))  # fullgraph: a break would raise
    predicted, traced = predict_and_trace(recipe)
    for phase in (Phase.LOSS, Phase.OPTIMIZER_STEP):
        assert held(predicted, phase) == held(traced.ledger, phase)


@pytest.mark.parametrize(
    ("device", "changes"),
    [
        ("cpu-x86", {"method": "lora", "precision": "bf16", "base_format": "bf16"}),
        ("h100-sxm5-80gb", {"precision": "bf16"}),
        ("h100-sxm5-80gb", {"precision": "bf16-mixed"}),
    ],
)
def test_a_plan_predicts_what_compiled_blocks_keep(device, changes):
    """When the loss is made, no block holds anything else."""
    recipe = make_recipe(compile="blocks", device=device, **changes)
    predicted, trace = predict_and_trace(recipe)
    traced = trace.ledger
    assert compiled_bounds(recipe)[0] in trace.bounds
    layers = read_model(recipe.model).architecture.layers
    wider = 2 * ROWS * TOKENS * HIDDEN * layers if recipe.autocast else 0
    assert held(predicted, Phase.LOSS) - held(traced, Phase.LOSS) == wider
    # beside that, the compiler's operators one by one, each with a result of its own
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert 0.85 * held(traced, phase) < held(predicted, phase) - wider <= held(traced, phase)


def predict_and_trace(recipe):
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    device = find_device(recipe.device)
    return predict_memory(model, recipe, device), trace_step(recipe, device)


def held(ledger, phase: Phase) -> int:
    """Bytes of tensors at a phase's peak; what the allocator adds is of none."""
    return ledger.total(phase) - ledger.by_kind(phase).get(Kind.FRAGMENTATION, 0)


@pytest.mark.usefixtures("eager_backend")
def test_rows_of_other_lengths_are_compiled_once_for_all():
    built = make_built(make_recipe(compile="blocks"))
    for tokens in (16, 12, 9, 14, 7, 11, 13, 8, 10, 15):  # more than torch compiles one by one
        batch = make_batch(tokens=tokens)
        step(built, [batch], targets_of(batch))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.usefixtures("eager_backend")
def test_a_compiled_step_is_compiled_when_it_is_measured_too():
    """Where operators are watched, torch runs blocks as they are written."""
    recipe = make_recipe(compile="blocks")
    built, batch = make_built(recipe), make_batch()
    meter = Meter(torch.device("cpu"), compiled=True)
    meter.watch_step(built, lambda watch: step(built, [batch], targets_of(batch), watch.enter))
    assert counters["stats"]["unique_graphs"] == 1
    assert "memory.peak_allocated" not in meter.measurements()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recompute_blocks": 1}, "1 recomputed blocks"),
        ({"selective_blocks": 2}, "2 recomputed blocks"),
        ({"lean": ("norm",)}, "`lean: norm`"),
        ({"packing": True}, "`task.packing: true`"),
        ({"method": "lora", "lora": replace(LORA, dropout=0.1)}, "dropout"),
        ({"method": "lora", "base_format": "nf4", "precision": "bf16-mixed"}, "cannot cut"),
        ({"optimizer": NO_CLIP | {"in_backward": True}}, "in_backward"),
        ({"family": "gpt2"}, "the blocks of"),
    ],
)
def test_what_does_not_go_with_compiled_blocks_is_refused(changes, named):
    recipe = make_recipe(**changes, compile="blocks")
    with pytest.raises(InvalidRequest, match=named):
        build_model(recipe, "meta")


# -- the facts behind refusals: where one fails, its refusal can go ---------------------------


@pytest.fixture
def unrefused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "check_compiled", lambda *_: None)


@pytest.mark.usefixtures("eager_backend", "unrefused")
def test_documents_of_other_lengths_are_still_compiled_anew():
    built = make_built(make_recipe(compile="blocks", packing=True))
    for lengths in ([10, 6], [5, 4, 7]):
        batch = dataclasses.replace(make_batch(), documents=[lengths, lengths])
        step(built, [batch], targets_of(batch))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.usefixtures("eager_backend")
def test_a_compiled_backward_still_gives_all_gradients_of_a_block_at_once():
    where = parts(make_built(make_recipe(compile="blocks")).model)
    x = torch.zeros(ROWS, TOKENS, HIDDEN, requires_grad=True)
    turn = where.backbone.rotary_emb(x, torch.arange(TOKENS).unsqueeze(0))
    out = where.blocks[0](x, position_embeddings=turn)
    edges = [edge for edge, _ in out.grad_fn.next_functions if hasattr(edge, "variable")]
    at_once = {id(edge.variable) for edge in edges}
    assert at_once >= {id(weight) for weight in where.blocks[0].parameters()}


@pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with g++")
def test_the_compiler_still_draws_random_numbers_of_its_own():
    def drawn(drop):
        torch.manual_seed(0)
        return drop(torch.ones(64))

    def drop(x):
        return nn.functional.dropout(x, 0.5)

    assert torch.equal(drawn(drop), drawn(drop))
    assert not torch.equal(drawn(torch.compile(drop)), drawn(drop))


@pytest.mark.usefixtures("unrefused")
def test_blocks_of_4_bit_weights_still_cannot_be_cut():
    recipe = make_recipe(compile="blocks", method="lora", base_format="nf4", precision="bf16-mixed")
    with pytest.raises(NotCertified, match="fake modes"):
        trace_step(recipe, find_device("cpu-x86"))


def plan(**changes):
    told = {
        "model": CONFIGS["llama"], "hardware": {"device": "cpu"}, "method": "full",
        "precision": "fp32", "compile": "blocks",
        "task": {"sequence_length": 16, "packing": False, "global_batch": 2, "steps": 2},
    }  # fmt: skip
    return api.plan(from_data(told | changes, Request, source="the test"), levers=False)


def test_a_plan_leaves_to_the_compiler_what_it_decides():
    made = plan()
    recipe = made.recipe
    assert (recipe.compile, recipe.lean, recipe.recompute_blocks) == ("blocks", (), 0)
    assert "compiled blocks are predicted as lean blocks" in made.memory.because
    for changes in ({"recompute": "full"}, {"lean": "all"}, {"task": {"packing": True}}):
        with pytest.raises(InvalidRequest, match="compile: blocks"):
            plan(**changes)
