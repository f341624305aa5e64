"""What the planner's replay reserves, against the replay of the trainer's own traced step."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.allocator.caching import replay
from memfit.allocator.orders import OTHERS, RISING
from memfit.allocator.segments import MIN_BLOCK, SMALL_SIZE
from memfit.allocator.settings import read_settings
from memfit.allocator.tape import FREED, Line
from memfit.catalog.overheads import find_outside
from memfit.certify import trace
from memfit.certify.tracing.runs import DEPTH_KEYS
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import find_fullest, worst_batch
from memfit.plan.memory.tape import has_tape, replay_run, write_tape
from memfit.plan.memory.verdict import REPLAY, SLACK, Needed, find_needed, judge
from memfit.plan.search import candidate
from memfit.records.ledger import Phase
from memfit.records.recipe import Parallel, Recipe

H100 = catalog.find_device("h100-sxm")
LAYERS = 4
PHASES = (
    Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE, Phase.OPTIMIZER_STEP,
    Phase.EVALUATE, Phase.SAVE,
)  # fmt: skip
# one of each family: the smallest of the catalogue
MODELS = (
    "pythia-70m", "gpt2", "opt-125m", "bloom-560m", "qwen2-0.5b", "qwen3-0.6b", "llama-3.2-1b",
    "gemma-2b", "gemma-2-2b", "gemma-3-1b-it", "phi-2", "phi-3-mini-4k-instruct", "olmo-2-1b",
    "smollm3-3b", "falcon-7b", "mpt-7b", "stablelm-2-1_6b", "granite-3.1-2b-base",
    "mistral-7b-v0.1", "qwen1.5-moe-a2.7b", "mixtral-8x7b-v0.1", "deepseek-v2-lite",
)  # fmt: skip
ALWAYS = ("qwen3-0.6b", "gemma-3-1b-it", "gpt2")
CASES = [
    pytest.param(model, method, marks=() if model in ALWAYS else pytest.mark.wide)
    for model in MODELS for method in ("full", "lora")
]  # fmt: skip
KNOBS: dict[str, dict[str, Any]] = {
    "recomputed, in chunks": {"recompute": "full", "loss": "chunked", "loss_chunk": 256},
    "selective, mixed": {"recompute": "selective", "precision": "bf16-mixed"},
    "copies of all gradients": {"optimizer.implementation": "foreach"},
    "one weight at a time": {"optimizer.implementation": "loop"},
    "states in 8 bits": {"optimizer.name": "adamw8bit"},
    "updated within backward": {"optimizer.in_backward": True, "micro_batch": 4,
                                "optimizer.clip_norm": 0},
    "over nf4": {"method": "lora", "base_format": "nf4", "precision": "bf16-mixed"},
    "over int8": {"method": "lora", "base_format": "int8", "precision": "bf16-mixed"},
    "activations on the host": {"offload": "activations"},
    "expandable segments": {"allocator": "expandable_segments:True"},
    "pairs": {"task.objective": "dpo", "method": "lora", "preference.reference": "adapter-off"},
    "packed": {"task.packing": True},
}  # fmt: skip


# What these differ by: torch's loop keeps the last divisor until it has the next one's, and what a
# block saved comes back in the order in which its operators, not its modules, saved it.
ANOTHER_ORDER = ("one weight at a time", "activations on the host")


def ask(model: str, layers: int = LAYERS, **changes: Any) -> Recipe:
    """A stated recipe of a model with few blocks."""
    stated = {
        "method": "full", "precision": "bf16", "micro_batch": 2, "recompute": "none",
        "loss": "plain", "task.sequence_length": 1024, "task.global_batch": 4,
        "task.packing": False,
    }  # fmt: skip
    request = api.read(model, device="h100-sxm", changes=stated | changes)
    recipe = api.predict(request).recipe
    config = dict(recipe.model.config)
    deep = next(config[key] for key in DEPTH_KEYS if key in config)
    for key, value in config.items():
        if key in DEPTH_KEYS:
            config[key] = layers
        elif isinstance(value, list) and len(value) == deep:
            config[key] = value[:layers]
    return replace(
        recipe,
        model=replace(recipe.model, config=config),
        recompute_blocks=min(recipe.recompute_blocks, layers),
        selective_blocks=min(recipe.selective_blocks, layers),
    )


def list_large(events: Sequence[Line]) -> list[tuple[int, int, tuple[int, ...]]]:
    """The blocks above 1 MiB in the order of their births: size in 512 B, stream, and which of
    those before are freed until the next one is born."""
    numbers: dict[int, int] = {}
    born: list[tuple[int, int, list[int]]] = []
    for tensor, nbytes, stream in events:
        if nbytes > SMALL_SIZE:
            numbers[tensor] = len(born)
            born.append((-(-nbytes // MIN_BLOCK), stream, []))
        elif nbytes == FREED and tensor in numbers:
            born[-1][2].append(numbers.pop(tensor))
    return [(size, stream, tuple(sorted(freed))) for size, stream, freed in born]


def compare(recipe: Recipe, *, alike: bool = True) -> tuple[dict[str, int], dict[str, int]]:
    """Allocated in each phase and reserved at most: of the planner's replay, of the trace's.

    alike: every block above 1 MiB is born and freed in the same order, too, so that both reserve as
    much whatever the order of addresses.
    """
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    made = replay_run(model, recipe, H100)
    settings = read_settings(recipe.allocator, device_memory=H100.memory_driver)
    traced = trace(recipe, H100, rank=find_fullest(model, recipe, H100)[0])
    if alike:
        assert list_large(write_tape(model, recipe, H100).events) == list_large(traced.tape)
    replayed = replay(traced.tape, settings, traced.marks)
    phases: dict[str, int] = {}
    for phase, stretch in zip(traced.stretches, replayed.stretches, strict=True):
        phases[phase] = max(phases.get(phase, 0), stretch.allocated)
    mine = {str(p): n for p, n in made.phases.items()} | {"reserved": made.reserved}
    return mine, {str(p): n for p, n in phases.items()} | {"reserved": replayed.peaks.reserved}


def assert_alike(mine: dict[str, int], traced: dict[str, int], reserved: float) -> None:
    assert mine["reserved"] == pytest.approx(traced["reserved"], rel=reserved)
    for phase in PHASES:
        if phase in mine and phase in traced:
            assert mine[phase] == pytest.approx(traced[phase], rel=reserved), phase


@pytest.mark.covering
@pytest.mark.parametrize(("model", "method"), CASES)
def test_reserved_bytes_are_those_of_the_certificate(model: str, method: str) -> None:
    assert_alike(*compare(ask(model, method=method)), reserved=REPLAY.high - 1)


@pytest.mark.parametrize("name", KNOBS)
def test_reserved_bytes_are_those_of_the_certificate_under_each_technique(name: str) -> None:
    found = compare(ask("qwen3-0.6b", **KNOBS[name]), alike=name not in ANOTHER_ORDER)
    assert_alike(*found, reserved=REPLAY.high - 1)


MESHES = {
    "shards": Parallel(dp_shard=4),
    "shards that differ": Parallel(dp_shard=3),
    "copies of shards": Parallel(dp_replicate=2, dp_shard=2),
    "shared products": Parallel(dp_shard=2, tp=2, sequence_parallel=True),
    "shared rows": Parallel(dp_shard=2, cp=2),
    "stages": Parallel(pp=2),
    "stages of shards": Parallel(dp_shard=2, pp=2),
}
ALWAYS_MESHED = ("copies of shards", "shared products", "stages of shards")


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=() if m in ALWAYS_MESHED else pytest.mark.wide) for m in MESHES]
)
def test_each_phase_of_a_mesh_holds_what_the_certificate_traces(mesh: str) -> None:
    """Of a model with a head of its own, whose gradient is the largest; save gathers it whole."""
    stated = {"precision": "bf16-mixed", "lean": "none", "task.global_batch": 16}
    kernel = "flash" if MESHES[mesh].cp > 1 else "auto"  # torch's ring has no other
    recipe = replace(ask("llama-3.1-8b", **stated, attention=kernel), parallel=MESHES[mesh])
    staged = recipe.parallel.pp > 1  # of its micro-batches fewer are simulated than are traced
    mine, traced = compare(recipe, alike=not staged)
    assert_alike(mine, traced, reserved=5e-3 if staged else 1e-3)


SHARDED = {
    "over nf4": ("qwen3-0.6b", Parallel(dp_shard=4), KNOBS["over nf4"]),
    "over int8": ("qwen3-0.6b", Parallel(dp_shard=4), KNOBS["over int8"]),
    "experts dealt to ranks": (
        "mixtral-8x7b-v0.1", Parallel(dp_shard=4, ep=4),
        {"method": "lora", "precision": "bf16-mixed", "loss": "chunked", "loss_chunk": 512},
    ),
    "experts over nf4": (
        "qwen1.5-moe-a2.7b", Parallel(dp_shard=4), KNOBS["over nf4"] | {"recompute": "full"},
    ),
    "random weights": ("qwen3-0.6b", Parallel(dp_shard=4), {"weights": "random"}),
    "random weights over nf4": (
        "qwen1.5-moe-a2.7b", Parallel(dp_shard=2), KNOBS["over nf4"] | {"weights": "random"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.wide if name.endswith(" over nf4") else ())
        for name in SHARDED
    ],
)
def test_what_ranks_load_and_deal_is_born_in_the_certificates_order(name: str) -> None:
    """Matrices that are coded whole, blocks that are drawn whole, and autograd's first product
    behind products of experts."""
    model, parallel, changes = SHARDED[name]
    recipe = replace(ask(model, **changes | {"task.global_batch": 16}), parallel=parallel)
    assert_alike(*compare(recipe), reserved=REPLAY.high - 1)


def test_two_micro_batches_are_evaluated_and_each_gathers_the_head() -> None:
    """However many a step accumulates; the head does not stay from the first to the second."""
    stated = {"precision": "bf16-mixed", "lean": "none", "task.global_batch": 16, "method": "lora"}
    recipe = replace(ask("llama-3.1-8b", **stated), parallel=Parallel(dp_shard=4))
    tape = write_tape(find_adapter(recipe).adapt(read_model(recipe.model), recipe), recipe, H100)
    traced = trace(recipe, H100)

    def gathers(events: list[Any], marks: list[int], phases: list[Phase]) -> list[int]:
        first = phases.index(Phase.EVALUATE)
        evaluating = events[marks[first - 1] : marks[first]]
        return [nbytes for _, nbytes, stream in evaluating if stream and nbytes > 0]

    found = gathers(tape.events, tape.marks, tape.phases)
    assert found == gathers(traced.tape, traced.marks, traced.stretches)
    assert found.count(max(found)) == 2  # the unit of norm and head


@pytest.mark.parametrize(
    "parallel",
    [Parallel(dp_shard=4), Parallel(dp_shard=2, tp=2, sequence_parallel=True)],
    ids=lambda p: f"{p.dp_replicate}x{p.dp_shard}x{p.tp}",
)
def test_buffers_of_collectives_come_from_pools_of_their_streams(parallel: Parallel) -> None:
    recipe = replace(ask("qwen3-0.6b", precision="bf16-mixed", lean="none"), parallel=parallel)
    model = read_model(recipe.model)
    streams = {stream for _, nbytes, stream in write_tape(model, recipe, H100).events if nbytes}
    assert streams == {e.stream for e in trace(recipe, H100).tape if e.nbytes > 0}


def test_a_cpu_has_no_caching_allocator() -> None:
    recipe = ask("qwen3-0.6b")
    assert has_tape(recipe, H100)
    assert not has_tape(recipe, catalog.find_device("cpu-x86"))
    assert not has_tape(replace(recipe, offload="parameters"), H100)


def test_loops_of_too_many_turns_are_not_replayed() -> None:
    """A request may ask for rows of 10^9 tokens, whose tape would fill the machine's memory."""
    chunked = ask("qwen3-0.6b", loss="chunked", loss_chunk=256)
    assert has_tape(replace(chunked, sequence_length=2**19, packing=False), H100)
    assert not has_tape(replace(chunked, sequence_length=2**20, packing=False), H100)
    packed = replace(ask("qwen3-0.6b"), packing=True)
    own = len(worst_batch(packed).documents or ())
    assert has_tape(replace(packed, micro_batch=256 // own), H100)
    assert not has_tape(replace(packed, micro_batch=256 // own + 1), H100)
    assert has_tape(replace(packed, micro_batch=2**12, attention="varlen"), H100)


def test_a_rough_plan_is_replayed_only_where_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits by far has the verdict and recipe of the exact plan, in a wider range."""
    request = api.read("qwen3-0.6b", device="h100-sxm", changes={"method": "lora"})
    exact = api.plan_alone(request)
    monkeypatch.setattr(candidate, "replay_run", None)  # a call would fail
    rough = api.plan_roughly(request)
    assert (rough.memory.verdict, rough.recipe) == (exact.memory.verdict, exact.recipe)
    assert rough.memory.total_low <= exact.memory.device_total <= rough.memory.total_high
    with pytest.raises(TypeError):
        api.plan_alone(request)


def test_a_verdict_holds_the_whole_band_against_the_line() -> None:
    needed = Needed(reserved=90, low=95, total=100, high=110, because="")
    assert [judge(needed, line) for line in (None, 94, 95, 109, 110)] == [
        "unproven", "does_not_fit", "at_risk", "at_risk", "fits",
    ]  # fmt: skip
    unknown = needed._replace(total=None, high=None)
    assert [judge(unknown, line) for line in (94, 200)] == ["does_not_fit", "unproven"]


def test_without_a_replay_the_band_is_wider() -> None:
    replayed, assumed = (
        find_needed(slack, 10**10, H100, Parallel(), beside=10**9) for slack in (REPLAY, SLACK)
    )
    assert assumed.high is not None
    assert replayed.high is not None
    assert assumed.high > replayed.high
    assert assumed.low > replayed.low - 10**9


def test_a_plan_keeps_its_margin_unless_asked_not_to() -> None:
    changes = {"method": "lora", "task.sequence_length": 1024}
    careful = api.plan(api.read("gpt2", device="rtx-4060", changes=changes), levers=False)
    tight = api.plan(
        api.read("gpt2", device="rtx-4060", changes=changes | {"limits.tight": True}), levers=False
    )
    for plan in (careful, tight):
        assert plan.memory.total_low < plan.memory.device_total < plan.memory.total_high
    assert careful.memory.verdict == "fits"
    assert careful.memory.total_high <= careful.memory.usable
    assert tight.memory.device_total <= tight.memory.usable
    assert tight.time.step_seconds <= careful.time.step_seconds


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_a_plans_range_holds_what_other_orders_of_addresses_reserve(allocator: str) -> None:
    """By the certifier's allocator; what is typical is of one order, and pages know no other."""
    changes = {"method": "lora", "allocator": allocator}
    plan = api.plan(api.read("llama-68m", device="rtx-4060", changes=changes), levers=False)
    card, memory = catalog.find_device("rtx-4060"), plan.memory
    model = find_adapter(plan.recipe).adapt(read_model(plan.recipe.model), plan.recipe)
    settings = read_settings(allocator, device_memory=card.memory_driver)
    events = write_tape(model, plan.recipe, card).events
    made = [replay(events, settings, order=o).peaks.reserved for o in (RISING, *OTHERS)]
    outside = find_outside(card, plan.recipe.parallel)
    assert memory.peak_reserved == made[0]
    assert memory.total_low == round(min(made) * REPLAY.low) + outside.low
    assert memory.total_high == round(max(made) * REPLAY.high) + outside.high
    assert (min(made) < max(made)) == (not allocator)


def test_what_is_chosen_fits_with_other_orders_of_addresses_too() -> None:
    request = api.read("llama-68m", device="rtx-4060", changes={"method": "lora"})
    first = api.plan(request, levers=False)
    high = first.memory.total_high
    assert high is not None
    again = api.plan(request_with(request, f"{high} B"), levers=False)
    less = api.plan(request_with(request, f"{high - 1} B"), levers=False)
    assert again.recipe == first.recipe != less.recipe
    assert less.memory.verdict == "fits"
    assert less.memory.total_high < high


def test_what_keeps_no_margin_is_tight_and_says_so() -> None:
    changes = {"method": "lora", "task.sequence_length": 1024}
    request = api.read("gpt2", device="rtx-4060", changes=changes)
    least = api.plan(request_with(request, "1 KiB"), levers=False)
    assert least.memory.verdict == "does_not_fit"
    between = (least.memory.device_total + least.memory.total_high) // 2
    plan = api.plan(request_with(request, f"{between} B"), levers=False)
    assert plan.memory.verdict == "at_risk"
    assert any("no recipe keeps a margin" in line for line in plan.assumptions)


def request_with(request: Any, memory: str) -> Any:
    return replace(request, limits=replace(request.limits, memory=memory))


def test_the_replay_is_of_the_problems_own_settings() -> None:
    """A fraction below what is needed does not stop the prediction."""
    recipe = ask("qwen3-0.6b", allocator="per_process_memory_fraction:0.01")
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    plain = replace(recipe, allocator="")
    assert replay_run(model, recipe, H100).reserved == replay_run(model, plain, H100).reserved
