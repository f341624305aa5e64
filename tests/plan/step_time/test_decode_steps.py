"""One decoding step in seconds: operations as torch counts them, bytes as tensors hold them."""

import pytest
import torch
from counted import count_decode
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_update,
    torch_recurrent_gated_delta_rule,
)

from memfit.adapters import find_adapter
from memfit.catalog import find_device
from memfit.families import read_model
from memfit.families.capabilities.kv_cache import layer_caches
from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.predicted_time import find_setting, sum_up
from memfit.plan.step_time.rollouts import decoding
from memfit.plan.step_time.rollouts.decoding import Decoding, count_operations, time_step
from memfit.records.recipe import Lora
from memfit.train.generation import products
from memfit.train.generation.slots import Slots
from memfit.train.step.build import build_model
from tiny_models import CONFIGS, make_recipe

FEW = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
H100 = find_device("h100-sxm")


def make(recipe, device=H100, rows=1, fused=0):
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    totals = sum_up(model)
    setting = find_setting(totals, recipe, device)
    layout = change(setting.layout, micro_batch=float(rows), sequence=1.0)
    a = totals.architecture
    return Decoding(
        setting._replace(layout=layout), recipe, a, len(totals.matrices) / a.layers, device, fused
    )


def tiny(family="llama", **changes):
    return replace(make_recipe(family), **changes)


def adapted(targets, precision="bf16-mixed", base_format="bf16"):
    return tiny(
        method="lora", precision=precision, base_format=base_format,
        lora=Lora(rank=4, alpha=8.0, targets=targets),
    )  # fmt: skip


def test_operations_of_a_step_are_torchs_count_of_memfits_own_loop(monkeypatch):
    monkeypatch.setattr(products, "_is_available", lambda: False)  # a CPU's; a GPU launches linear
    for recipe in (
        tiny(precision="fp32"), tiny(precision="bf16"), tiny(precision="bf16-mixed"),
        adapted(FEW), adapted(ALL), adapted(ALL, precision="bf16"),
    ):  # fmt: skip
        block, outside = count_decode(recipe)
        assert count_operations(make(recipe)) == pytest.approx(block, rel=0.05)
        assert pytest.approx(outside, rel=0.15) == decoding.OUTSIDE


def test_codes_cost_launches_and_where_no_kernel_multiplies_by_them_bytes():
    nf4 = adapted(FEW, base_format="nf4")
    dense, fused = make(nf4, rows=8, fused=4), make(nf4, rows=8, fused=8)
    plain = make(adapted(FEW), rows=8)
    assert count_operations(plain) < count_operations(fused) < count_operations(dense)
    assert decoding.weight_bytes(fused) == pytest.approx(0.5 + 4 / 64)
    assert decoding.weight_bytes(dense) == pytest.approx(0.5 + 4 / 64 + 2 + 2)
    assert decoding.weight_bytes(plain) == 2
    double = replace(nf4, quantisation=replace(nf4.quantisation, double=True))
    assert count_operations(make(double, rows=8, fused=8)) > count_operations(fused)
    eight = replace(nf4, base_format="int8")
    tame = replace(eight, quantisation=replace(eight.quantisation, outlier_threshold=0.0))
    found = replace(eight, quantisation=replace(eight.quantisation, outlier_threshold=6.0))
    assert count_operations(make(tame)) < count_operations(make(found))
    assert decoding.weight_bytes(make(found)) == pytest.approx(1, rel=0.01)


def test_a_step_reads_every_weight_of_blocks_and_head_once():
    recipe = tiny(precision="bf16")
    model = build_model(recipe, "meta")
    matrices = {
        id(p): p.numel() for name, p in model.named_parameters()
        if p.dim() == 2 and "embed" not in name
    }  # fmt: skip
    made = make(recipe)
    seconds = 2 * sum(matrices.values()) / (made.setting.machine.memory * decoding.READING)
    assert time_step(made, 8).weights == pytest.approx(seconds, rel=1e-6)
    copied = make(tiny(precision="bf16-mixed"))  # fp32 read, 16 bits written and read
    assert time_step(copied, 8).weights == pytest.approx(4 * seconds, rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_a_step_reads_what_the_slots_hold_of_rows_in_flight(family):
    recipe = tiny(family, precision="bf16")
    made = make(recipe, rows=3)
    shape, tokens = made.setting.shape, 24
    layers = layer_caches(made.architecture)
    slots = Slots(layers, 3, tokens, 0, torch.bfloat16, torch.device("cpu"))
    read = time_step(made, tokens).cache * made.setting.machine.memory * decoding.READING
    reached = sum(layer.columns(tokens) for layer in layers)
    scores = decoding.SCORE * 3 * shape.heads * reached
    expanded = 0.0
    if shape.kv_rank:
        width = shape.heads * (shape.key - shape.rotated + shape.value)
        expanded = decoding.EXPANDED * 2 * 3 * reached * width
    assert read == pytest.approx(slots.nbytes + scores + expanded, rel=1e-6)


class Moved(TorchDispatchMode):
    """Elements of what operations read and write, where it is as large as a state or larger."""

    def __init__(self, least):
        super().__init__()
        self.least, self.elements = least, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if not any(r.alias_info and not r.alias_info.is_write for r in operator._schema.returns):
            if operator is torch.ops.aten.copy_.default:
                args = args[1:]  # what is written over is not read
            flat = [x for one in (*args, made) for x in (one if isinstance(one, list) else [one])]
            sizes = [x.numel() for x in flat if isinstance(x, torch.Tensor)]
            self.elements += sum(n for n in sizes if n >= self.least)
        return made


def test_a_step_renews_states_as_torch_moves_them():
    """By the operations of Hugging Face's own functions, for one row of a large layer."""
    heads, key, value, kernel = 4, 64, 96, 16
    channels = heads * (2 * key + value)
    config = {
        "linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_key_head_dim": key,
        "linear_value_head_dim": value, "linear_conv_kernel_dim": kernel,
    }  # fmt: skip
    recipe = make_recipe("qwen3_5_text", config=CONFIGS["qwen3_5_text"] | config)
    a = read_model(recipe.model).architecture
    stateful = [layer for layer in layer_caches(a) if layer.states]
    plain = make(tiny(precision="fp32"), rows=3)
    counted = (plain._replace(architecture=x) for x in (a, replace(a, layers=1, layer_kinds=("",))))
    whole, alone = (time_step(made, 8).cache for made in counted)
    attending = len(layer_caches(a)) - len(stateful)
    bytes_ = (whole - attending * alone) * plain.setting.machine.memory * decoding.READING
    recurrent = heads * key * value
    state, conv = torch.zeros(1, heads, key, value), torch.zeros(1, channels, kernel)
    query, new, gate = (torch.zeros(1, 1, heads, n) for n in (key, value, 1))
    token, weight = torch.zeros(1, channels, 1), torch.zeros(channels, kernel)
    with Moved(recurrent) as moved:
        _, made = torch_recurrent_gated_delta_rule(
            query, query, new, g=gate[..., 0], beta=gate[..., 0], initial_state=state,
            output_final_state=True,
        )  # fmt: skip
        state.copy_(made)
    with Moved(channels * (kernel - 1)) as before:
        causal_conv1d_update(token, conv, weight)
    assert moved.elements == 14 * recurrent
    # the weight, which is no state, is as large as one
    assert before.elements == pytest.approx((5 + 1) * conv.numel(), rel=0.1)
    assert bytes_ == pytest.approx(
        3 * len(stateful) * 4 * (14 * recurrent + 5 * conv.numel()), rel=1e-6
    )


def test_a_step_of_a_mixture_reads_the_experts_that_its_rows_visit():
    recipe = tiny("mixtral", precision="bf16")
    made = make(recipe)
    shape = made.setting.shape
    share = shape.per_token / shape.experts
    one, all_ = (time_step(make(recipe, rows=n), 8).weights for n in (1, 1000))
    experts = shape.layers * decoding.work.expert_weights(shape)
    moved = 2 * (1 - share) * experts / (made.setting.machine.memory * decoding.READING)
    assert all_ - one == pytest.approx(moved, rel=1e-3)


def test_the_longer_of_host_and_device_counts_and_on_a_processor_their_sum():
    step = time_step(make(adapted(ALL), rows=8), 64)
    both = decoding.step_seconds(step, H100) - step.waiting
    assert max(step.host, step.on_device) <= both < step.host + step.on_device
    one = decoding.step_seconds(step, find_device("cpu-x86")) - step.waiting
    assert one == pytest.approx(step.host + step.on_device - step.kernels)
    assert step.waiting == 8 * decoding.EACH_ROW


def test_rows_and_reach_take_longer_and_more_rows_say_more_a_second():
    recipe, rates = tiny(precision="bf16"), []
    for rows in (1, 8, 64, 512):
        seconds = [
            decoding.step_seconds(time_step(make(recipe, rows=rows), reach), H100)
            for reach in (8, 512, 4096)
        ]
        assert seconds == sorted(seconds)
        rates.append(rows / seconds[0])
    assert rates == sorted(rates)
