"""A recipe in the clock's words: sizes, layout, machine, and whose constants hold.

What a framework's step does otherwise than others is read off its recipe's options here, in one
place; bytes are described beside it, in `plan/frameworks/`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from memfit.base_formats import find_base_format, stored_bytes
from memfit.core.errors import InvalidRequest, TimeUnknown
from memfit.plan.frameworks import find_framework
from memfit.plan.frameworks.shared.columns import find_distinct, pick, take, with_columns
from memfit.plan.frameworks.shared.pipeline import deal_by_cost
from memfit.plan.step_time.adapters import list_matrices, with_adapters
from memfit.plan.step_time.arrays import Number, ceil_div, smaller, where
from memfit.plan.step_time.communication.collectives import Links
from memfit.plan.step_time.communication.network import lay_out
from memfit.plan.step_time.counts.own_counts import with_counts
from memfit.plan.step_time.own import read_own, scale_links
from memfit.plan.step_time.pipeline.exact import ORDINARY, bubble_share
from memfit.plan.step_time.pipeline.orders import find_schedule, kind_of
from memfit.plan.step_time.rates import Machine, Setting, find_rates
from memfit.plan.step_time.step import predict_step
from memfit.plan.step_time.work import (
    Layout,
    Loss,
    Mesh,
    Numbers,
    Offloading,
    Recompute,
    Rows,
    Sent,
    Shape,
    Stages,
    Update,
)  # fmt: skip
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.model import DTYPE_BYTES, LINEAR, SLIDING, Architecture, Model
from memfit.records.recipe import Recipe

Kernel = Literal["math", "triton", "flash1", "flash2", "fused"]
# Best product anyone reached over the dense peak, where nobody measured this device: the ten
# devices of the catalogue with a measurement reach 0.51 to 0.97, and NVIDIA's 0.73 to 0.87.
USUAL_CEILING = 0.8
ON_THE_WIRE = 0.96  # of a stated speed: what NCCL reckons with (links.toml)
HOST_BANDWIDTH = {3: 12e9, 4: 25e9, 5: 50e9}  # B/s of 16 PCIe lanes by generation, one direction
SQUARE = 4096  # a matrix of so many rows and columns stands for a block's
BUILDS = {  # what a published row calls its framework -> build, where it has constants of its own
    "Megatron-Bridge": "bridge", "Megatron-core MoE": "bridge", "NeMo/Megatron": "nemo",
}  # fmt: skip
STATE_BYTES = {"bf16": 14, "fp16": 14}  # read and written to update a parameter; 30 with fp32
# weight, gradient and two moments read, weight and moments written, a 16-bit copy written


class Basis(Record, frozen=True, kw_only=True):
    """Whose constants a recipe's time takes."""

    stack: str  # the framework, and after a dot whose build or era of it
    narrow: str  # precision of the blocks' products
    kernel: Kernel

    @property
    def dtype(self) -> str:
        """Under which a device's row states the speed of those products."""
        return {"mxfp8": "fp8", "nvfp4": "fp4"}.get(self.narrow, self.narrow.partition("-")[0])


class Network(Record, frozen=True, kw_only=True):
    """What is known of a run's network beside its device's usual one."""

    name: str = ""  # a row of links.toml; "" takes the device's usual network
    per_device: float | None = None  # bytes per second of one device, where somebody said so


USUAL = Network()


def read_network(text: str, devices_per_node: int) -> float | None:
    """Bytes per second of one device, from a network in words; None where it says no number.

    `8x400 Gb/s` and `800 Gb/s per node` are a node's; `400 Gb/s per GPU` and `400 Gb/s` a device's.
    """
    number = r"(?:(\d+)\s*x\s*)?(?:Omni-Path )?(\d+(?:\.\d+)?)\s*(?:Gb?(?:/s|\b)|(?=per node))"
    found = re.search(number + r"(?:[^;,]{0,20}?(per (?:GPU|device|node)))?", text)
    if not found or "none typical" in text:
        return None
    each = float(found[2]) * 1e9 / 8
    if found[1] or found[3] == "per node":
        each *= float(found[1] or 1) / max(devices_per_node, 1)
    return each


def check_timed(a: Architecture, framework: str, device: Device) -> None:
    """Raise TimeUnknown for blocks whose speed nobody has stated: linear attention's but in
    memfit's own step on a GPU, which runs torch's code of it, operation by operation."""
    if not a.recurrent:
        return
    if not find_framework(framework).recurrent:
        raise TimeUnknown(
            f"which kernels of linear attention, which `{a.family}` has, `{framework}` runs depends"
            " on the packages that are installed",
            hint="`memfit predict` with the same words says what memory it takes; without"
            " `framework` memfit's own step is planned, which has seconds",
        )
    if device.is_cpu:
        raise TimeUnknown(
            f"how fast a processor runs torch's code of linear attention, which `{a.family}` has,"
            " is in no measurement",
            hint="`memfit plan` with the same words says what memory it takes; a GPU's seconds"
            " are counted",
        )


@lru_cache(maxsize=256)
def read_shape(model: Model) -> Shape:
    """The sizes of a model before adapters."""
    a, e, latent = model.architecture, model.architecture.experts, model.architecture.latent
    plain = min(e.dense_layers, a.layers) / a.layers if e.count else 1.0
    slides = a.layer_kinds.count(SLIDING) / len(a.layer_kinds) if SLIDING in a.layer_kinds else 1.0
    feed = a.ffn if plain else 0
    return Shape(
        layers=float(a.layers), hidden=float(a.hidden), heads=float(a.heads),
        kv_heads=float(a.heads if latent.kv_rank else a.kv_heads),
        key=float(latent.rotated + latent.unrotated if latent.kv_rank else a.head_dim),
        value=float(latent.value or a.head_dim),
        query_rank=float(latent.query_rank), kv_rank=float(latent.kv_rank),
        rotated=float(latent.rotated), ffn=float(feed), gated=_gated(model),
        experts=float(e.count), per_token=float(e.per_token), expert_ffn=float(e.ffn),
        shared_ffn=float(e.shared_ffn), plain=plain, window=float(a.sliding_window),
        sliding=slides if a.sliding_window else 0.0, clamped=float(a.sinks and e.count > 0),
        vocab=float(a.vocab), own_head=float(not a.tied_embeddings and not a.scores),
        scores=float(a.scores), **_read_linear(a),
    )  # fmt: skip


def _read_linear(a: Architecture) -> dict[str, float]:
    """How many blocks have linear attention, and the widths of its products."""
    if not a.recurrent:
        return {"gates": float(a.output_gate)}
    sizes, values = a.linear, a.linear.value_heads * a.linear.value
    share = sum(a.kind(layer) == LINEAR for layer in range(a.layers)) / a.layers
    return {
        "linear": share, "entering": float(sizes.channels + values + 2 * sizes.value_heads),
        "leaving": float(values), "gates": float(a.output_gate),
    }  # fmt: skip


def _gated(model: Model) -> float:
    """1 where two products enter the plain feed-forward: its weights' elements tell."""
    a = model.architecture
    sizes = {a.ffn, 2 * a.ffn}
    total = sum(
        w.numel
        for w in model.weights
        if w.layer == 0 and len(w.shape) == 2 and sizes.intersection(w.shape) and not w.of_value
    )
    return 1.0 if a.experts.count or total >= 3 * a.hidden * a.ffn else 0.0


def read_layout(recipe: Recipe, shape: Shape, basis: Basis) -> Layout:
    """How the recipe's step lies over its ranks; the recipe's numbers may be arrays."""
    p, option = recipe.parallel, recipe.options.get
    traits = find_framework(recipe.framework).time
    # recomputed blocks are the first ones of each chunk of a pipeline
    share = smaller(recipe.recompute_blocks * p.pp * p.virtual_pp / shape.layers, 1.0)
    whole = recipe.recompute == "full"
    part = recipe.selective_blocks / shape.layers  # of memfit's own step
    cuts_tokens = 1.0 * p.sequence_parallel
    most, last = _deal(recipe, shape)
    base = find_base_format(recipe.base_format)
    return Layout(
        rows=Rows(
            sequence=1.0 * recipe.sequence_length, micro_batch=1.0 * recipe.micro_batch,
            accumulation=1.0 * recipe.accumulation,
        ),
        mesh=Mesh(
            dp=1.0 * p.dp, shard=1.0 * p.dp_shard, zero=_zero(recipe), tp=1.0 * p.tp,
            sequence_parallel=1.0 if traits.always_cuts_tokens else cuts_tokens, cp=1.0 * p.cp,
            pp=1.0 * p.pp, ep=1.0 * p.ep,
        ),
        stages=Stages(
            chunks=1.0 * p.virtual_pp, most=most, last=last, balanced=_balanced(recipe),
            bubble=_bubble(recipe),
        ),
        recompute=Recompute(
            repeated=share if whole else 0.0, selective=part if whole else share,
            products_repeated=traits.products_repeated, recomputed=traits.selective_repeats,
            remade=float("mlp" in recipe.lean), entered=1.0,
        ),
        numbers=Numbers(
            element=4.0 if recipe.compute_dtype == "float32" else 2.0,
            narrow=float(basis.narrow not in ("bf16", "fp16", "fp32", "tf32")),
            eight=float(base.product == "int8" and recipe.adapted),
            packed=base.unpacking_passes if recipe.adapted else 0.0,
            compiled=float(recipe.compile != "none"), written_out=float(basis.kernel == "math"),
        ),
        loss=Loss(
            references=float(recipe.references + recipe.mismatches),
            heads=float(extra_heads(recipe)), chunk_bytes=_chunk_bytes(recipe, shape),
        ),
        sent=Sent(
            gradient_bytes=_gradient_bytes(recipe), gathered=_gathered(recipe),
            gathered_once=_stays_gathered(recipe),
            asynchronous=float(bool(option("tp_comm_overlap") or option("async_tp"))),
            deduplicated=float(_deduplicated(recipe)),
            overlapped=float(bool(option("overlap_moe_expert_parallel_comm"))),
        ),
        update=Update(
            trains=0.0 if recipe.adapted else 1.0,
            state_bytes=float(STATE_BYTES.get(recipe.precision, 30)),
            offloaded={"optimizer": 8.0, "parameters": 12.0}.get(recipe.offload, 0.0),
        ),
        offloading=_offloading(recipe, shape),
    )  # fmt: skip


def _zero(recipe: Recipe) -> Number:
    """What is cut among ranks; FSDP2 reduces each block's gradients as ZeRO 3 does."""
    p = recipe.parallel
    if find_framework(recipe.framework).time.fsdp2:
        return 3.0 if p.world > 1 else 0.0
    return where(p.dp_shard * p.cp > 1, 1.0 * p.zero, 0.0)


def _stays_gathered(recipe: Recipe) -> float:
    """Return whether weights stay gathered until the backward, where the step can do so."""
    fsdp2 = find_framework(recipe.framework).time.fsdp2
    return float(fsdp2 and not recipe.parallel.reshard_after_forward)


def _gathered(recipe: Recipe) -> float:
    """Bytes of a weight of a block as it is gathered: 2, or what a quantised one is stored in."""
    if not find_framework(recipe.framework).time.fsdp2:
        return 2.0
    if not recipe.coding:
        return 4.0 if recipe.precision == "fp32" else 2.0
    return stored_bytes(recipe.coding, (SQUARE, SQUARE)) / SQUARE**2


def extra_heads(recipe: Recipe) -> int:
    """Products with the head beyond one forward's: the reference's, and recomputed ones.

    Log-probabilities by chunks cannot be differentiated before all rows' are known.
    """
    twice = (recipe.compares or recipe.samples) and recipe.loss == "chunked"
    return recipe.references + recipe.mismatches + int(twice)


def _bubble(recipe: Recipe) -> Number:
    """Seconds that ranks wait, over those of 1F1B's."""
    p = recipe.parallel
    columns = p.pp, p.virtual_pp, recipe.accumulation
    if not any(getattr(column, "ndim", 0) for column in columns):
        return bubble_share(find_schedule(recipe)) if p.pp > 1 else 1.0
    if kind_of(recipe.options) in ORDINARY:
        return 1.0
    import numpy

    size = max(numpy.size(column) for column in columns)
    first, which = find_distinct(columns, size)
    return numpy.array([_bubble(pick(recipe, int(row))) for row in first])[which]


def _offloading(recipe: Recipe, shape: Shape) -> Offloading:
    """All blocks but the last: of the recomputed ones, which are the first, their inputs."""
    offloads = find_framework(recipe.framework).time.offloads_activations
    if not offloads or recipe.offload != "activations":
        return Offloading()
    away = shape.layers - 1
    recomputed = smaller(recipe.recompute_blocks + recipe.selective_blocks, away)
    # of the residual stream, which is stored as the embedding is
    element = DTYPE_BYTES[recipe.frozen_dtype if recipe.adapted else recipe.trainable_dtype]
    return Offloading(
        offloads=(away - recomputed) / shape.layers, stowed=_stowed(recipe, shape),
        input_share=recomputed / shape.layers, input_bytes=element * recipe.tokens * shape.hidden,
    )  # fmt: skip


def _stowed(recipe: Recipe, shape: Shape) -> Number:
    """Bytes of one block, about: what Llama's class saves in 16 bits, scaled; half where lean."""
    element = 4.0 if recipe.compute_dtype == "float32" else 2.0
    widths = 10 * shape.hidden + 2 * shape.kv_heads * shape.key + 4 * shape.ffn
    return element * recipe.tokens * widths * (0.5 if recipe.lean else 1.0)


def _gradient_bytes(recipe: Recipe) -> float:
    """Bytes of a gradient's element on the wire; FSDP2 reduces in fp32 unless all its weights are
    bf16."""
    traits = find_framework(recipe.framework).time
    if traits.fsdp2:
        return 2.0 if recipe.precision == "bf16" else 4.0
    option = recipe.options.get
    narrow = (
        option("accumulate_allreduce_grads_in_fp32") is False
        or option("mixed_precision") == "PURE"
        or option("fp32_gradients") is False
        or traits.narrow_gradients
    )
    return 2.0 if narrow else 4.0


def _chunk_bytes(recipe: Recipe, shape: Shape) -> Number:
    """Each chunk of the loss reads the head's gradient and adds to it."""
    if recipe.loss != "chunked" or recipe.adapted:
        return 0.0
    chunks: Number = recipe.options.get("loss_chunks", 0)
    if recipe.loss_chunk:
        chunks = ceil_div(recipe.tokens, recipe.loss_chunk)
    return 8.0 * chunks * shape.vocab * shape.hidden


def _deal(recipe: Recipe, shape: Shape) -> tuple[Number, Number]:
    """Blocks of the fullest pipeline rank but the last, and of the last."""
    p, layers = recipe.parallel, shape.layers
    if find_framework(recipe.framework).time.deals_by_cost:
        return _deal_by_cost(p.pp, shape)
    # pieces are equal but for the first ones, which hold one block more: see `deal_blocks`
    pieces = p.pp * p.virtual_pp
    each, more = layers // pieces, layers % pieces
    return p.virtual_pp * each + ceil_div(more, p.pp), p.virtual_pp * each + more // p.pp


def _deal_by_cost(pp: Number, shape: Shape) -> tuple[Number, Number]:
    """The same where a stage with the head, or the embedding, has fewer blocks."""
    if getattr(pp, "ndim", 0):
        import numpy

        ranks, which = numpy.unique(pp, return_inverse=True)
        dealt = numpy.array([_deal_by_cost(int(n), shape) for n in ranks])
        return dealt[which, 0], dealt[which, 1]
    if pp == 1:
        return shape.layers, shape.layers
    width = int(shape.heads * shape.key)
    block = int(shape.hidden) * (4 * width + 3 * int(shape.ffn))
    sizes = deal_by_cost(int(shape.layers), block, int(shape.vocab * shape.hidden), pp)
    return float(max(sizes[:-1])), float(sizes[-1])


def _deduplicated(recipe: Recipe) -> bool:
    """Whether tokens cross the network once for several experts (DeepEP, HybridEP)."""
    name = recipe.options.get("moe_token_dispatcher_type") or recipe.options.get("dispatcher")
    return name in ("deepep", "hybridep")


def _balanced(recipe: Recipe) -> Number:
    """Return whether the head counts as a block of its stage, as Megatron-LM's options state."""
    option = recipe.options.get
    if option("pipeline_model_parallel_layout"):
        return 1.0
    counts: Number = option("account_for_loss_in_pipeline_split", False)
    last: Number = option("decoder_last_pipeline_num_layers", 0)
    return where(counts + last > 0, 1.0, 0.0)


def read_basis(recipe: Recipe, software: str = "") -> Basis:
    """Whose constants hold; `software` is what the builders call their build, where it is known."""
    return Basis(stack=_stack(recipe, software), narrow=_narrow(recipe), kernel=_kernel(recipe))


def find_links(device: Device, recipe: Recipe, network: Network) -> Links:
    """Return what the recipe's ranks communicate over; raises TimeUnknown where it is unknown."""
    world = _world(recipe)
    each = min(recipe.devices_per_node or world, world)
    name = network.name or recipe.network
    try:
        found = lay_out(device, each, -(-world // each), name).links
    except InvalidRequest as reason:
        if network.per_device is None:
            raise TimeUnknown(reason.message, hint=reason.hint) from reason
        found = lay_out(device, each).links
    if network.per_device is not None:
        found = found._replace(outside=network.per_device * ON_THE_WIRE)
    return found


def _world(recipe: Recipe) -> int:
    """Ranks in all: of many recipes, which share their devices, those of any."""
    world: Number = recipe.parallel.world
    return int(world.flat[0]) if getattr(world, "ndim", 0) else int(world)


def read_machine(device: Device, recipe: Recipe, basis: Basis, network: Network) -> Machine:
    """The device's speeds and links; raises TimeUnknown for one that nobody has stated."""
    dtype = basis.dtype
    if dtype == "tf32" and dtype not in device.flops:
        dtype = "fp32"
    wide = dtype if dtype in ("fp32", "tf32") else "bf16" if "bf16" in device.flops else "fp16"
    peak = device.flops.get(wide)
    if not device.flops.get(dtype) or not peak or not device.bandwidth:
        raise TimeUnknown(
            f"no {dtype} FLOP/s or no bandwidth is known for `{device.id}`",
            hint="`memfit calibrate` measures them on your own device; `memfit devices` lists those"
            " with figures",
        )
    # varlen is flash's kernel, told where documents begin
    curve = "flash" if recipe.attention == "varlen" else recipe.attention
    own_step = find_framework(recipe.framework).time.measured_launches
    own = read_own(device, dtype, wide, curve, own_step=own_step)
    if not own_step:  # as was fitted
        own = own._replace(launch=0.0)
    return Machine(
        products=_ceiling(device, dtype), wide_products=_ceiling(device, wide), wide_peak=peak,
        memory=own.memory or device.bandwidth,
        host=own.host or HOST_BANDWIDTH.get(device.pcie_generation or 4, HOST_BANDWIDTH[4]),
        links=scale_links(find_links(device, recipe, network), own), own=own,
        eight=_ceiling(device, "int8") if device.flops.get("int8") else 0.0,
    )  # fmt: skip


def _ceiling(device: Device, dtype: str) -> float:
    """The best product anyone measured; of another precision than that, the same share."""
    measured, peak = device.flops_measured, device.flops
    share = measured["bf16"] / peak["bf16"] if "bf16" in measured else USUAL_CEILING
    return measured.get(dtype) or share * peak[dtype]


def read_setting(
    recipe: Recipe, model: Model, device: Device, *, network: Network = USUAL,
    software: str = "",
) -> Setting:  # fmt: skip
    """Everything that the recipe's time depends on; model: before any adapter.

    Raises TimeUnknown where the device, what joins devices, or a block's speed is not described
    well enough.
    """
    check_timed(model.architecture, recipe.framework, device)
    basis = read_basis(recipe, software)
    shape = read_shape(model)
    a, matrices = model.architecture, list_matrices(model)
    layout = with_counts(read_layout(recipe, shape, basis), recipe, a, shape, len(matrices))
    return Setting(
        shape=shape,
        layout=with_adapters(layout, recipe, matrices, a.layers),
        machine=read_machine(device, recipe, basis, network),
        rates=find_rates(device, basis.stack, basis.narrow, basis.kernel),
    )


def time_recipes(recipes: Recipe, model: Model, device: Device) -> Number:
    """Seconds of a step of many recipes: those of one whose numbers are arrays.

    The recipes share their devices. Raises TimeUnknown, see `read_setting`.
    """
    zero: Number = recipes.parallel.zero
    if not getattr(zero, "ndim", 0):
        return predict_step(read_setting(recipes, model, device)).total
    import numpy

    found = numpy.empty(len(zero))  # other constants may hold under another ZeRO
    for value in numpy.unique(zero):
        rows = (zero == value).nonzero()[0]
        alike = with_columns(take(recipes, rows), {"zero": int(value)})
        found[rows] = time_recipes(alike, model, device)
    return found


def _narrow(recipe: Recipe) -> str:
    option = recipe.options.get
    if recipe.precision == "fp4-mixed":
        return "nvfp4"
    if recipe.precision == "fp8-mixed":
        name = str(option("fp8_recipe") or option("float8_recipe") or "delayed")
        if name.startswith(("rowwise", "blockwise")):
            return f"fp8-{name.partition('_')[0]}"
        return "mxfp8" if name == "mxfp8" else "fp8"
    if recipe.compute_dtype == "float32":
        return "tf32" if find_framework(recipe.framework).time.allows_tf32 else "fp32"
    return "fp16" if recipe.compute_dtype == "float16" else "bf16"


def _kernel(recipe: Recipe) -> Kernel:
    option = recipe.options.get
    if recipe.attention in ("math", "eager"):
        return "math"
    if recipe.framework == "composer":
        return "triton" if option("attn_impl") == "triton" else "flash1"
    return "fused" if recipe.attention == "cudnn" else "flash2"


def _stack(recipe: Recipe, software: str) -> str:
    """The framework's name, and after a dot the build or era whose kernels differ from others'."""
    option, name = recipe.options.get, recipe.framework
    if name == "megatron" and option("transformer_impl") == "legacy":
        return "megatron.legacy"
    if name == "deepspeed" and recipe.parallel.zero >= 3:
        return "deepspeed.zero3"
    if name == "megatron" and option("cuda_graph_scope"):
        # from 26.06 on an iteration with experts is one graph, and fused throughout
        version, whole = option("version"), option("cuda_graph_scope") == "full_iteration"
        newest = version == 0 or (isinstance(version, int) and version >= 202606)
        return "megatron.iteration" if newest and whole else "megatron.graphs"
    return f"{name}.{BUILDS[software]}" if software in BUILDS else name
