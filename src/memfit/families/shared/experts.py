"""What mixtures of experts share: their keys of config.json, their weights, their forward.

Every expert of a layer is one slice of two 3-D parameters, and a layer's tokens are multiplied in
the order of their experts (train/model/experts.py). What that holds does not depend on the
routing: one row a token and chosen expert, whoever was chosen. So an imbalance of experts costs no
memory where all experts are on one device or sharded as FSDP2 shards them. Where they are dealt to
ranks it does: each receives the tokens of its own experts, as many as the recipe allows for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.families.shared.config import refuse, size
from memfit.families.shared.forward import (
    Forward,
    Weights,
    activate,
    gated_mlp,
    module,
    project,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import Rows, decoder, gated_block, gated_rows, linear
from memfit.meta import Tensor
from memfit.meta.distributed.sharding import Dealt, inner_unit
from memfit.meta.elementwise import sigmoid
from memfit.meta.layers import routing
from memfit.meta.layers.dequantised import QUANTISED_DTYPE
from memfit.meta.layers.quantised import Quantised
from memfit.records.model import Architecture, Experts, Weight

ALIGNMENT = 8  # elements: torch's grouped product reads 16 bytes at once, of any dtype


def read_experts(
    config: Mapping[str, Any],
    *,
    count: tuple[str, int],
    per_token: tuple[str, int],
    ffn: tuple[str, int],
    shared_ffn: int = 0,
    dense_layers: int = 0,
    normalised: bool = True,
) -> Experts:
    """The experts of config.json; of each key its name and the default of Hugging Face's class.

    Raises InvalidRequest: more experts a token than there are, a layer that has none at all, the
    router's own loss (which memfit's step does not add), or widths that no grouped product takes.
    """
    refuse(config, "output_router_logits", (False, None))
    experts = Experts(
        count=size(config, *count), per_token=size(config, *per_token), ffn=size(config, *ffn),
        shared_ffn=shared_ffn, dense_layers=dense_layers, normalised=normalised,
    )  # fmt: skip
    if experts.per_token > experts.count:
        raise InvalidRequest(
            f"`{per_token[0]}: {experts.per_token}` in config.json, and there are"
            f" {experts.count} experts (`{count[0]}`)"
        )
    for key, width in ((ffn[0], experts.ffn), ("hidden_size", size(config, "hidden_size"))):
        if width % ALIGNMENT:
            raise InvalidRequest(
                f"`{key}: {width}` in config.json: experts are multiplied together in rows of a"
                f" multiple of {ALIGNMENT} elements"
            )
    return experts


def read_gated_experts(
    config: Mapping[str, Any], *, count: int, per_token: int, ffn: int, shared_ffn: int,
    normalised: bool = True,
) -> Experts:  # fmt: skip
    """The experts of Qwen's mixtures that have a shared one; the keywords: the class's defaults."""
    return read_experts(
        config,
        count=("num_experts", count),
        per_token=("num_experts_per_tok", per_token),
        ffn=("moe_intermediate_size", ffn),
        shared_ffn=size(config, "shared_expert_intermediate_size", shared_ffn),
        normalised=normalised,
    )


def gated_expert_config(a: Architecture) -> dict[str, Any]:
    """The keys that `read_gated_experts` reads."""
    return {
        "num_experts": a.experts.count,
        "num_experts_per_tok": a.experts.per_token,
        "moe_intermediate_size": a.experts.ffn,
        "shared_expert_intermediate_size": a.experts.shared_ffn,
    }


def every_layer_has_experts(config: Mapping[str, Any]) -> None:
    """Refuse Qwen's keys that give some layers a plain feed-forward: no published model does."""
    refuse(config, "mlp_only_layers", (None, []))
    refuse(config, "decoder_sparse_step", (1,))


def expert_rows(a: Architecture) -> Rows:
    """All routed experts of a layer: gate and up joined, and down."""
    e = a.experts
    return [
        ("mlp.experts.gate_up_proj", (e.count, 2 * e.ffn, a.hidden)),
        ("mlp.experts.down_proj", (e.count, a.hidden, e.ffn)),
    ]


def router_rows(a: Architecture) -> Rows:
    """One score a token and expert."""
    return [("mlp.gate.weight", (a.experts.count, a.hidden))]


def gated_expert_rows(a: Architecture) -> Rows:
    """A layer's experts, and a shared one that a gate of its own weighs."""
    rows = router_rows(a) + expert_rows(a)
    rows += gated_rows("mlp.shared_expert", a, a.experts.shared_ffn)
    return rows + linear("mlp.shared_expert_gate", 1, a.hidden, False)


class ExpertFamily(Decoder):
    """Llama's decoder with experts; a family adds its config, its rows and its feed-forward.

    Abstract, as `Family` is: a family implements it once and is final.
    """

    @abstractmethod
    def rows(self, a: Architecture) -> Rows:
        """The weights of one block that has experts, in the order of Hugging Face's class."""

    @abstractmethod
    def run(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """The experts of one block: (batch, tokens, hidden) -> the same."""

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`; the first layers may have a plain feed-forward."""
        return decoder(a, self.rows(a), first=gated_block(a))

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Decoder.feed_forward`."""
        if "mlp.experts.gate_up_proj" in weights:
            return self.run(forward, weights, x)
        return gated_mlp(forward, weights, x)


Routed = tuple[Tensor, Tensor, Tensor]  # the router's logits, shares, chosen experts
Router = Callable[[Forward, Weights, Tensor], Routed]


@module
def route(forward: Forward, weights: Weights, x: Tensor) -> Routed:
    """Qwen's router: softmax over all experts in fp32, the best of them, in the logits' dtype.

    x: (tokens, hidden). Returns (tokens, experts), (tokens, per_token), (tokens, per_token).
    """
    experts = forward.architecture.experts
    x = meta.reshape(x, -1, forward.architecture.hidden)
    logits = meta.linear(x, weights["mlp.gate.weight"])
    odds = routing.softmax_in_float(logits)
    shares, chosen = routing.top_k(odds, experts.per_token)
    if experts.normalised:
        shares = routing.divide_in_place(shares, routing.total(shares, -1, keep=True))
    shares = meta.cast(shares, logits.dtype)
    return logits, shares, chosen


@module
def sparse(forward: Forward, weights: Weights, x: Tensor, router: Router) -> Tensor:
    """A block's experts and nothing else (`MixtralSparseMoeBlock`, `Qwen3MoeSparseMoeBlock`)."""
    shape = x.shape
    flat = meta.view(x, -1, shape[-1])
    logits, shares, chosen = router(forward, weights, flat)
    out = run_experts(forward, weights, flat, chosen, shares)
    out = meta.reshape(out, *shape)
    del logits  # alive until here
    return out


Gate = Callable[[Forward, Tensor], Tensor]  # (rows, 2 * ffn) -> (rows, ffn)


@module
def sparse_and_shared(forward: Forward, weights: Weights, x: Tensor, router: Router) -> Tensor:
    """Routed experts and the one that every token visits (`Glm4MoeMoE`); x as the block has it."""
    residuals, shape = x, x.shape
    logits, shares, chosen = router(forward, weights, x)
    x = meta.view(x, -1, shape[-1])
    x = meta.view(run_experts(forward, weights, x, chosen, shares), *shape)
    x = meta.add(x, gated_mlp(forward, weights, residuals, "mlp.shared_experts"))
    del logits  # alive until here
    return x


@module
def sparse_and_gated(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    """`Qwen2MoeSparseMoeBlock`: what every token visits runs first."""
    shape = x.shape
    flat = meta.view(x, -1, shape[-1])
    shared = gated_mlp(forward, weights, flat, "mlp.shared_expert")
    logits, shares, chosen = route(forward, weights, flat)
    out = run_experts(forward, weights, flat, chosen, shares)
    shared = meta.mul(_weigh_shared(forward, weights, flat), shared)
    out = meta.add(out, shared)
    out = meta.reshape(out, *shape)
    del logits  # alive until here
    return out


def _weigh_shared(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    """What the shared expert counts for: (tokens, 1)."""
    return sigmoid(project(forward, weights, "mlp.shared_expert_gate", x))


def run_experts(
    forward: Forward,
    weights: Weights,
    hidden: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate: Gate | None = None,
) -> Tensor:
    """`run_experts` of train/model/experts.py: (tokens, hidden) -> the same; gate: None is `_gate`.

    Where the forward has masks: as Hugging Face's own function. Experts that are dealt to ranks are
    a unit of FSDP2 within their block.
    """
    unit = inner_unit(weights["mlp.experts.gate_up_proj"])
    if unit is None:
        return _run(forward, weights, hidden, chosen, shares, gate)
    hidden, shares = unit.enter_with(hidden, shares)
    out = _run(forward, weights, hidden, chosen, shares, gate, unit.sharding.dealt)
    unit.leave(out)
    return out


@module
def _run(
    forward: Forward,
    weights: Weights,
    hidden: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate: Gate | None,
    dealt: Dealt | None = None,
) -> Tensor:
    """dealt: to which ranks the experts are."""
    if forward.masks is not None:
        return _run_theirs(forward, weights, hidden, chosen, shares, gate or _gate)
    per_token = chosen.shape[1]
    ordered, order = routing.sort(meta.view(chosen, -1))
    back = _inverse(order)
    numbers = routing.integers(hidden, forward.architecture.experts.count)
    ends = routing.integers(hidden, forward.architecture.experts.count, "int32")
    x = routing.spread(hidden, order, back)
    deal: Deal | None = None
    if dealt is not None:
        deal = _deal(ends, routing.count_received(order.shape[0], dealt.imbalance), dealt.ranks)
        ends, ordered = deal.ends, deal.numbers
        x = routing.exchange(x, deal.order.shape[0])
        x = routing.restore(x, deal.back, deal.order)
    x = _product(forward, weights, "mlp.experts.gate_up_proj", x, ends, ordered)
    x = (gate or _gate)(forward, x)
    x = _product(forward, weights, "mlp.experts.down_proj", x, ends, ordered)
    if deal is not None:
        x = routing.restore(x, deal.order, deal.back)
        x = routing.exchange(x, order.shape[0])
    x = routing.restore(x, order, back)
    x = meta.mul(meta.view(x, -1, per_token, hidden.shape[1]), routing.add_dimension(shares))
    x = meta.cast(routing.total(x, 1), hidden.dtype)
    del ordered, numbers, deal  # alive until here
    return x


class Deal(NamedTuple):
    """As train/distributed/dealt.py has it."""

    order: Tensor
    back: Tensor
    ends: Tensor
    numbers: Tensor


def _deal(ends: Tensor, rows: int, ranks: int) -> Deal:
    """`deal_rows` of train/distributed/dealt.py, of a rank that receives `rows`."""
    count = ends.shape[0]
    counts, arrived = routing.integers(ends, count, "int32"), routing.integers(ends, count, "int32")
    own = routing.integers(ends, count // ranks)
    experts = routing.integers(ends, count)
    del own
    places = routing.integers(ends, rows)
    each = routing.integers(ends, rows)
    del places
    numbers, order = routing.sort(each)
    back = _inverse(order)
    firsts = routing.integers(ends, count // ranks)
    found = Deal(order, back, routing.integers(ends, count // ranks, "int32"), numbers)
    del counts, arrived, experts, each, firsts  # alive until here
    return found


def _run_theirs(
    forward: Forward, weights: Weights, hidden: Tensor, chosen: Tensor, shares: Tensor, gate: Gate
) -> Tensor:
    """`grouped_mm_experts_forward` of transformers 5.23 (integrations/moe.py), and its locals."""
    count, per_token = forward.architecture.experts.count, chosen.shape[1]
    ordered, order = routing.sort(meta.view(chosen, -1))
    tokens = routing.integers(order, order.shape[0])  # which of them each row is
    spread = routing.pick_rows(hidden, tokens)
    del tokens
    portions = routing.pick_rows(meta.view(shares, -1, 1), order)
    counted = routing.integers(order, order.shape[0], "int32")
    each, ends = routing.integers(hidden, count, "int32"), routing.integers(hidden, count, "int32")
    biases = _biases(weights, "mlp.experts.gate_up_proj", ordered)
    x = _multiplied(weights, "mlp.experts.gate_up_proj", spread, ends, biases)
    x = gate(forward, x)
    biases = _biases(weights, "mlp.experts.down_proj", ordered)
    x = _multiplied(weights, "mlp.experts.down_proj", x, ends, biases)
    weighted = meta.mul(x, portions)
    back = _inverse(order)
    weighted = routing.pick_rows(weighted, back)
    out = routing.total(meta.view(weighted, -1, per_token, hidden.shape[1]), 1)
    out = meta.cast(out, hidden.dtype)
    del (
        spread,
        portions,
        counted,
        each,
        ends,
        biases,
        x,
        weighted,
        back,
        ordered,
    )  # alive until here
    return out


def _biases(weights: Weights, name: str, rows: Tensor) -> Tensor | None:
    bias = weights.get(f"{name}_bias")
    return None if bias is None else routing.pick_rows(bias, rows)


def _multiplied(
    weights: Weights, name: str, x: Tensor, ends: Tensor, biases: Tensor | None
) -> Tensor:
    """In the dtype of the weights, whatever autocast says."""
    low = meta.cast(x, weights[name].dtype)
    with x.meter.with_autocast(False):
        if biases is None:
            return routing.grouped_linear(low, weights[name], ends)
        return meta.add_into(routing.grouped_product(low, weights[name], ends), biases)


def _product(
    forward: Forward, weights: Weights, name: str, x: Tensor, ends: Tensor, ordered: Tensor
) -> Tensor:
    """Each group of rows with its expert's matrix; with a bias, as gpt-oss has them, stored
    (columns, rows)."""
    bias, weight = weights.get(f"{name}_bias"), weights[name]
    if weight.dtype == QUANTISED_DTYPE:
        columns = weight.shape[1 if bias is None else 2]
        assert isinstance(forward.quantised, Quantised)  # other steps code no experts
        product = forward.quantised.multiply_grouped(x, weight, columns, ends)
    elif bias is None:
        product = routing.grouped_linear(x, weight, ends)
    else:
        product = routing.grouped_product(x, weight, ends)
    return product if bias is None else meta.add_into(product, routing.pick_rows(bias, ordered))


def _inverse(order: Tensor) -> Tensor:
    """Where each row went; the numbers that are written into it are gone afterwards."""
    back = routing.integers(order, order.shape[0])
    routing.integers(order, order.shape[0])
    return back


def _gate(forward: Forward, x: Tensor) -> Tensor:
    """act(first half) * second half."""
    gate, up = meta.split(x, (x.shape[1] // 2,) * 2, 1)
    return meta.mul(activate(forward, gate), up)
