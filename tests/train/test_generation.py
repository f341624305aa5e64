"""The batched loop: Hugging Face's `generate` token for token, whatever the slots."""

from collections import Counter
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gated_families import SLIDING
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.families.capabilities.kv_cache import cache_bytes, layer_caches
from memfit.families.capabilities.turned import LEAST_TOKENS
from memfit.records.recipe import Lora
from memfit.train.generation import loop
from memfit.train.generation import slots as slots_module
from memfit.train.generation.calls import cache_name
from memfit.train.generation.loop import Settings, generate_batch
from memfit.train.generation.products import quick_products
from memfit.train.generation.slots import Slots
from tiny_models import CONFIGS, FAMILIES, RECURRENT, VOCAB, hugging_face, make_built, make_recipe

NEW = 20
LENGTHS = (5, 12, 3, 9, 1, 7)  # more prompts than slots, so that slots are refilled
GREEDY = Settings(max_new_tokens=NEW, rows=3, temperature=0)
CASES = [*((family, {}) for family in FAMILIES), *SLIDING.items()]
NAMES = [f"{family}-sliding" if changes else family for family, changes in CASES]


def loud(family, changes=None, scale=None, **recipe):
    """A model whose weights are large enough that it does not repeat one token.

    Chunks of the delta rule and its single tokens differ by rounding, in Hugging Face's own
    `generate` too: by 2e-6 with weights as large as other families'.
    """
    scale = scale or (0.1 if family in RECURRENT else 0.15)
    config = CONFIGS[family] | (changes or {})
    made = make_recipe(family, config=config, **recipe)
    built = make_built(made)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in built.model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=random) * scale)
    return made, built.model


def make_prompts(lengths=LENGTHS):
    random = torch.Generator().manual_seed(2)
    return [torch.randint(1, VOCAB, (n,), generator=random).tolist() for n in lengths]


def theirs(model, prompt, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0,
               "eos_token_id": None, **options}  # fmt: skip
    out = model.generate(torch.tensor([prompt]), **options)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize(("family", "changes"), CASES, ids=NAMES)
def test_greedy_is_transformers_generate_and_log_probs_are_a_forwards(family, changes):
    recipe, model = loud(family, changes)
    prompts = make_prompts()
    made = generate_batch(model, prompts, GREEDY)
    reference = hugging_face(recipe, model.state_dict()).eval()
    assert [m.ids for m in made] == [theirs(reference, prompt) for prompt in prompts]
    assert {m.ended for m in made} == {"length"}
    for prompt, one in zip(prompts, made, strict=True):
        assert max_gap(model, prompt, one, 1.0) <= 1e-6


def max_gap(model, prompt, made, temperature):
    """How far log-probabilities are from those of a forward over the whole row.

    Of the larger of 1 and the log-probability: fp32 itself has steps of 5e-7 from 4 to 8.
    """
    row = torch.tensor([[*prompt, *made.ids]])
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
    again = torch.log_softmax(logits.double() / temperature, dim=-1)
    chosen = again.gather(1, torch.tensor(made.ids)[:, None])[:, 0]
    gaps = (chosen - torch.tensor(made.log_probs, dtype=torch.float64)).abs()
    return (gaps / chosen.abs().clamp(min=1)).max().item()


@pytest.mark.parametrize(("family", "changes"), CASES, ids=NAMES)
def test_slots_hold_the_bytes_that_a_family_declares(family, changes):
    recipe = make_recipe(family, config=CONFIGS[family] | changes)
    a = read_model(recipe.model).architecture
    slots = Slots(layer_caches(a), 4, 30, 9, torch.bfloat16, torch.device("cpu"))
    assert slots.nbytes == cache_bytes(a, rows=4, tokens=30, dtype="bfloat16", spare=9)
    out = make_built(recipe).model(input_ids=torch.ones(1, 12, dtype=torch.int64), use_cache=True)
    held = out.cache if hasattr(out, "cache") else out.past_key_values
    full = [x for x in held.layers if not getattr(x, "is_sliding", False)]
    for mine, its in zip(slots.layers, held.layers, strict=True):
        if hasattr(its, "recurrent_states"):
            for name, want in (("conv", its.conv_states), ("recurrent", its.recurrent_states)):
                assert mine.states[name].shape[1:] == want[0].shape[1:]
            assert mine.states["recurrent"].dtype == its.recurrent_states[0].dtype
            continue
        assert mine.keys.shape[1::2] == its.keys.shape[1::2]
        assert mine.values.shape[1::2] == its.values.shape[1::2]
    assert len(full) == sum(not layer.window for layer in layer_caches(a))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bloom", *RECURRENT])
def test_a_sampled_row_is_the_same_in_any_slot_and_batch(family):
    _, model = loud(family, SLIDING.get(family))
    prompts = make_prompts()
    asked = Settings(max_new_tokens=NEW, rows=1, temperature=0.9, top_p=0.95, seed=3)
    alone = generate_batch(model, prompts, asked)
    for rows, fixed, reach in ((2, False, 1), (4, True, 1), (8, False, 7)):
        other = generate_batch(
            model, prompts, replace(asked, rows=rows, fixed_shapes=fixed, reach=reach)
        )
        assert [o.ids for o in other] == [a.ids for a in alone]
    assert generate_batch(model, prompts, replace(asked, seed=4)) != alone
    for prompt, one in zip(prompts, alone, strict=True):
        assert max_gap(model, prompt, one, 0.9) <= 1e-6


@pytest.mark.parametrize("family", ["llama", "mistral", *RECURRENT])
@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_answers_of_a_group_share_one_prefill(family, rows, monkeypatch):
    """Rows end at different times, so that most of a group begins from the spare row."""
    _, model = loud(family, SLIDING.get(family))
    prompts = make_prompts((5, 9, 3))
    asked = Settings(
        max_new_tokens=NEW, rows=rows, answers=4, stop_tokens=tuple(range(0, 97, 16)),
    )  # fmt: skip
    read = []
    prefill = loop.Caller.prefill
    monkeypatch.setattr(
        loop.Caller, "prefill",
        lambda self, slots, given, now: (read.extend(given), prefill(self, slots, given, now))[1],
    )  # fmt: skip
    made = generate_batch(model, prompts, asked)
    assert read == prompts
    assert len({m.ids for m in made}) > 9, "answers differ"
    assert {m.ended for m in made} == {"length", "stop_token"}
    for i, one in enumerate(made):
        assert max_gap(model, prompts[i // 4], one, 1.0) <= 1e-6
        assert (one.ended == "stop_token") == (one.ids[-1] % 16 == 0)
        assert all(token % 16 for token in one.ids[:-1])
    assert [m.ids for m in made] == [
        m.ids for m in generate_batch(model, prompts, replace(asked, rows=12))
    ]


def test_the_spare_row_goes_to_a_slot_whatever_that_slot_held():
    recipe = make_recipe("mistral", config=CONFIGS["mistral"] | SLIDING["mistral"])
    layers = layer_caches(read_model(recipe.model).architecture)
    slots = Slots(layers, 3, 12, 4, torch.float32, torch.device("cpu"))
    for x in slots.tensors:
        x.normal_()
    before = [x.clone() for x in slots.tensors]
    slots.begin_spared(1, 3)
    for layer, olds in zip(slots.layers, zip(*[iter(before)] * 4, strict=True), strict=True):
        for held, spare, old in zip((layer.keys, layer.values), layer.spares, olds, strict=False):
            assert torch.equal(held[1, :, :3], spare[0, :, :3])
            assert torch.equal(held[1, :, 3:], old[1, :, 3:])
            assert torch.equal(held[[0, 2]], old[[0, 2]])


@pytest.mark.parametrize("family", RECURRENT)
def test_states_go_with_their_row_and_a_prompt_writes_all_of_them(family):
    """Slots full of other numbers; prompts shorter than the convolution, of one chunk, of two."""
    recipe, model = loud(family, {"max_position_embeddings": 256})
    a, (long, short) = read_model(recipe.model).architecture, make_prompts((70, 2))
    slots = Slots(layer_caches(a), 3, 90, 70, torch.float32, torch.device("cpu"))
    for x in slots.tensors:
        x.normal_()
    caller = loop.Caller(model, a)
    now = loop.Prefill([2, 70], [0, 1, 1], [2, 0, 1], True, torch.device("cpu"), gated=True)
    with torch.no_grad():
        caller.prefill(slots, [short, long], now)
        reference = hugging_face(recipe, model.state_dict()).eval()
        wanted = [reference(input_ids=torch.tensor([p]), use_cache=True) for p in (short, long)]
    few, many = [getattr(out, cache_name()) for out in wanted]
    stateful = [i for i, layer in enumerate(slots.layers) if hasattr(layer, "states")]
    assert len(stateful) == 2

    def check(slot, cache):
        for i in stateful:
            held = slots.layers[i].states
            theirs = cache.layers[i]
            for name in ("conv", "recurrent"):
                want = getattr(theirs, f"{name}_states")[0][0]
                torch.testing.assert_close(held[name][slot], want, rtol=1e-5, atol=1e-6)

    for slot, cache in ((0, many), (1, many), (2, few)):
        check(slot, cache)
    slots.move(2, 0, 2)
    check(0, few)
    slots.begin_spared(2, 70)
    check(2, many)


def delta_projections(family):
    """All of linear attention, those of the gates too, and the queries of attention."""
    names = [w.name for w in read_model(make_recipe(family).model).weights if len(w.shape) == 2]
    made = {name.split(".")[-2] for name in names if ".linear_attn." in name}
    return (*sorted(made), "q_proj")


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize(
    "recipe",
    [
        {"method": "lora"},
        {"method": "lora", "lora": "all"},
        {"method": "lora", "lora": Lora(rank=4, alpha=8.0, targets=("q_proj",))},
        {"attention": "math"},
        {"recompute_blocks": 3},
    ],
    ids=["lora", "lora on gates", "lora beside states", "math", "recomputed"],
)  # fmt: skip
def test_log_probs_with_states_are_a_forwards_under_adapters_and_every_kernel(family, recipe):
    if recipe.get("lora") == "all":
        recipe = {**recipe, "lora": Lora(rank=4, alpha=8.0, targets=delta_projections(family))}
    _, model = loud(family, **recipe)
    prompts = make_prompts()
    made = generate_batch(model, prompts, GREEDY)
    alone = generate_batch(model, prompts, replace(GREEDY, rows=1))
    assert [m.ids for m in made] == [a.ids for a in alone]
    for prompt, one in zip(prompts, made, strict=True):
        assert max_gap(model, prompt, one, 1.0) <= 1e-6
    assert not any(m._forward_hooks for m in model.modules())


def test_states_are_not_kept_by_a_cache_that_does_not_hand_them_out(monkeypatch):
    """transformers 5.14 keeps what stands last in a padded row, whoever's cache it is given."""
    _, model = loud(RECURRENT[0])
    monkeypatch.setattr(slots_module, "Cache", object)
    with pytest.raises(InvalidRequest, match="does not hand out states"):
        generate_batch(model, make_prompts(), GREEDY)


@pytest.mark.parametrize("family", ["llama", *RECURRENT])
def test_a_refilled_slot_knows_nothing_of_the_row_before(family):
    """A long row, then a short one in its slot: as if the short one were alone."""
    _, model = loud(family)
    long, short = make_prompts((30, 2))
    asked = replace(GREEDY, rows=1)
    assert (
        generate_batch(model, [long, short], asked)[1] == generate_batch(model, [short], asked)[0]
    )


def test_the_penalty_is_transformers():
    recipe, model = loud("llama")
    reference = hugging_face(recipe, model.state_dict()).eval()
    prompts = make_prompts()
    made = generate_batch(model, prompts, replace(GREEDY, repetition_penalty=1.7))
    want = [theirs(reference, prompt, repetition_penalty=1.7) for prompt in prompts]
    assert [m.ids for m in made] == want
    plain = generate_batch(model, prompts, GREEDY)
    assert [m.ids for m in plain] != want


@pytest.mark.parametrize(
    "asked",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}],
)
def test_filters_keep_what_transformers_keep(asked):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    from memfit.train.generation.sampling import keep_likely

    scores = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 2
    kinds = (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper))
    chain = LogitsProcessorList([kind(asked[key]) for key, kind in kinds if key in asked])
    want = chain(None, scores)
    got = keep_likely(scores, Settings(max_new_tokens=1, **asked))
    assert torch.equal(torch.isinf(got), torch.isinf(want))
    assert 6 < int(torch.isfinite(got).sum()) < 300


def test_tokens_are_drawn_as_often_as_they_are_likely():
    from memfit.train.generation.sampling import draw_numbers, pick

    scores = torch.tensor([0.0, -torch.inf, 1.0, -1.0, 2.0])
    numbers = torch.from_numpy(draw_numbers(0, 0, 0, 40_000))
    drawn = pick(scores.expand(40_000, 5), numbers)
    shares = torch.bincount(drawn, minlength=5) / 40_000
    torch.testing.assert_close(shares, torch.softmax(scores, 0), rtol=0, atol=0.01)
    assert shares[1] == 0
    assert (pick(scores[None], torch.tensor([1 - 2**-53])) == 4).all()


def test_picking_a_token_takes_no_memory_inside_an_operator():
    """`cumsum` into another dtype makes a copy that no trace sees; torch's profiler sees it."""
    from memfit.train.generation.sampling import pick

    scores, numbers = torch.randn(4, 3000), torch.rand(4, dtype=torch.float64)
    with torch.profiler.profile(profile_memory=True) as watched:
        pick(scores, numbers)
    sums = [e for e in watched.events() if e.name.startswith("aten::cumsum")]
    assert [e.cpu_memory_usage for e in sums] == [0]


def test_rows_end_at_stop_words_and_at_the_models_positions():
    _, model = loud("llama")
    (prompt,) = make_prompts((6,))
    asked = replace(GREEDY, max_new_tokens=100)
    whole = generate_batch(model, [prompt], asked)[0]
    assert (len(prompt) + len(whole.ids), whole.ended) == (64, "positions")
    letters = "".join(chr(200 + i) for i in whole.ids)
    word = letters[9:12]
    stopped = generate_batch(
        model, [prompt], replace(asked, stop_words=(word,)),
        decode=lambda ids: "".join(chr(200 + i) for i in ids),
    )[0]  # fmt: skip
    assert stopped.ended == "stop_word"
    assert stopped.ids == whole.ids[: letters.index(word) + 3]


@pytest.mark.parametrize(
    ("changes", "prompts", "said"),
    [
        ({"top_p": 0.0}, [[1]], "`top_p: 0.0`"), ({"rows": 0}, [[1]], "`rows: 0`"),
        ({"temperature": float("nan")}, [[1]], "`temperature: nan`"),
        ({"repetition_penalty": 0.0}, [[1]], "`repetition_penalty: 0.0`"),
        ({"max_prompt": 2}, [[1], [1, 2, 3]], "prompt 1 has 3 tokens, and `max_prompt` is 2"),
        ({}, [[1], []], "prompt 1 is empty"),
        ({}, [[1] * 64], "64 tokens and the model 64 positions"),
        ({"stop_words": ("a",)}, [[1]], "no `decode`"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(changes, prompts, said):
    _, model = loud("llama")
    with pytest.raises(InvalidRequest, match=said):
        generate_batch(model, prompts, replace(GREEDY, **changes))


def test_each_answer_may_have_a_limit_of_its_own():
    _, model = loud("llama")
    prompts, limits = make_prompts(), (4, NEW, 1, 7, 2, 9)
    whole = generate_batch(model, prompts, GREEDY)
    cut = generate_batch(model, prompts, replace(GREEDY, limits=limits))
    assert [c.ids for c in cut] == [c.ids[:n] for c, n in zip(whole, limits, strict=True)]
    for wrong, said in (((1, 2), "of 2 answers, and 6"), ((NEW + 1,) * 6, "is limited to")):
        with pytest.raises(InvalidRequest, match=said):
            generate_batch(model, prompts, replace(GREEDY, limits=wrong))


def test_adapters_are_on_and_the_model_is_left_as_it_was():
    _, model = loud("llama", method="lora")
    prompts = make_prompts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    name = model.get_base_model().config._attn_implementation
    with_adapter = generate_batch(model, prompts, GREEDY)
    with model.disable_adapter():
        assert generate_batch(model, prompts, GREEDY) != with_adapter
    assert model.training
    assert model.get_base_model().config._attn_implementation == name
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    for prompt, one in zip(prompts, with_adapter, strict=True):
        assert max_gap(model, prompt, one, 1.0) <= 1e-6


def test_the_spare_row_is_as_long_as_prompts():
    a = read_model(make_recipe("mistral", config=CONFIGS["mistral"] | SLIDING["mistral"]).model)
    sizes = [cache_bytes(a.architecture, rows=1, tokens=n, dtype="float32") for n in (4, 5, 6)]
    assert [b - a for a, b in pairwise(sizes)] == [3 * 2 * 2 * 8 * 4, 0]
    more = [cache_bytes(a.architecture, rows=8, tokens=n, dtype="float32", spare=4) for n in (4, 5)]
    assert more == [9 * sizes[0], 8 * sizes[1] + sizes[0]]


ONE_DNN = torch.ops.mkldnn._linear_pointwise.default


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch asks oneDNN anyway")
@pytest.mark.parametrize(
    ("recipe", "low"),
    [({}, False), ({"lean": ("norm", "mlp")}, False), ({"method": "lora"}, False),
     ({"precision": "bf16-mixed"}, True), ({"precision": "bf16"}, True)],
)  # fmt: skip
def test_fp32_products_of_a_rollout_are_onednns_and_the_modules_stay_as_they_were(recipe, low):
    """Every product of prompts and of steps; those of 16 bits are oneDNN's in torch already."""
    made, model = loud("llama", **recipe)
    linears = {m: vars(m).get("forward") for m in model.modules() if isinstance(m, nn.Linear)}
    low_here = torch.autocast("cpu", torch.bfloat16) if made.autocast else nullcontext()
    asked = replace(GREEDY, max_new_tokens=2)
    with Called() as called, low_here:
        generate_batch(model, make_prompts((4, 4)), asked)
    assert called.times[ONE_DNN] == (0 if low else 2 * len(linears))
    assert {m: vars(m).get("forward") for m in linears} == linears
    with pytest.raises(KeyError), quick_products(model):
        raise KeyError
    assert {m: vars(m).get("forward") for m in linears} == linears


WIDE = {"hidden_size": 256, "intermediate_size": 512}
MANY = replace(GREEDY, max_new_tokens=LEAST_TOKENS)
SKIPPED = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available(),
    reason="products stay torch's",
)


class Multiplied(TorchDispatchMode):
    """How the weights of oneDNN's products lie: (shape, strides) of each."""

    def __init__(self):
        super().__init__()
        self.lie = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ONE_DNN:
            self.lie.add((tuple(args[1].shape), args[1].stride()))
        return func(*args, **(kwargs or {}))


@SKIPPED
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "qwen3_moe"])
def test_weights_lie_by_columns_in_long_rollouts_and_by_rows_again_after_them(family):
    """Biases (qwen2, gpt_neox), a head that is the embedding (qwen2), and experts, which stay."""
    recipe, model = loud(family, WIDE | {"vocab_size": 512}, scale=0.03)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    prompts = make_prompts((5, 9, 1))
    with Multiplied() as seen:
        made = generate_batch(model, prompts, MANY)
    reference = hugging_face(recipe, model.state_dict()).eval()
    asked = {"max_new_tokens": MANY.max_new_tokens}
    assert [m.ids for m in made] == [theirs(reference, prompt, **asked) for prompt in prompts]
    for prompt, one in zip(prompts, made, strict=True):
        assert max_gap(model, prompt, one, 1.0) <= 1e-6
    assert ((528, 256), (1, 528)) in seen.lie  # the head, and what is as large
    assert ((272, 256), (1, 272)) not in seen.lie, "256 rows need no more"
    assert all(strides[0] == 1 for shape, strides in seen.lie if min(shape) >= 256)
    for name, weight in model.named_parameters():
        same, values = before[name]
        assert weight is same
        assert weight.is_contiguous()
        assert weight.untyped_storage().nbytes() == weight.nbytes
        assert torch.equal(weight, values)


@SKIPPED
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_weights_lie_by_rows_again_where_a_rollout_fails(error):
    _, model = loud("llama", WIDE)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    turned = []

    def fail():
        turned.extend(weight for weight in weights if not weight.is_contiguous())
        raise error

    with pytest.raises(error), quick_products(model, LEAST_TOKENS):
        fail()
    assert len(turned) == 3 * 5, "those of keys and values are small"
    assert all(w.is_contiguous() for w in weights)
    assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, nn.Linear))


@SKIPPED
@pytest.mark.parametrize(
    ("tokens", "recipe", "low"),
    [(LEAST_TOKENS - 1, {}, False), (LEAST_TOKENS, {"precision": "bf16"}, False),
     (LEAST_TOKENS, {"precision": "bf16-mixed"}, True)],
)  # fmt: skip
def test_weights_stay_where_nothing_is_gained(tokens, recipe, low):
    """Short answers, and numbers of 16 bits."""
    _, model = loud("llama", WIDE, **recipe)
    low_here = torch.autocast("cpu", torch.bfloat16) if low else nullcontext()
    with low_here, quick_products(model, tokens):
        assert all(w.is_contiguous() for w in model.parameters())


@SKIPPED
def test_a_weight_that_shares_a_storage_stays():
    """Turned, it would be there twice: its storage lives on."""
    _, model = loud("llama", WIDE)
    shared = model.model.layers[0].mlp.up_proj
    shared.weight.data = torch.cat([shared.weight.data] * 2)[: shared.weight.shape[0]]
    with quick_products(model, LEAST_TOKENS):
        assert shared.weight.is_contiguous()
        assert not model.model.layers[0].mlp.gate_proj.weight.is_contiguous()
