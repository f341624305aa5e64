"""BLOOM (Workshop et al. 2211.05100; Hugging Face's `bloom`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.families.shared.alibi import causal_mask, hold_until_next
from memfit.families.shared.attention_class import AttentionClass
from memfit.families.shared.config import flag, head_size, refuse, size
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Weights,
    apply_layer_norm,
    embedding,
    gelu_fast,
    keep,
    module,
    project,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import Rows, decoder, layer_norm, linear
from memfit.meta import Tensor
from memfit.meta.layers import lean
from memfit.records.model import Architecture, Weight


@final
class Bloom(Decoder):
    """LayerNorm, also on the embeddings; a bias by distance; the class's own attention and GELU."""

    name = "bloom"
    attention_class = AttentionClass(only_eager=True)
    lora_targets = ("query_key_value",)
    dropouts = ("hidden_dropout", "attention_dropout")
    norm = staticmethod(apply_layer_norm)
    last_norm = "ln_f"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `BloomConfig`.

        Published files name the width `n_embed` or `hidden_size`, heads `num_attention_heads` or
        `n_head`.
        """
        hidden = size(config, _one_of(config, "hidden_size", "n_embed"))
        heads = size(config, _one_of(config, "n_head", "num_attention_heads"))
        refuse(config, "head_dim", (None,))
        refuse(config, "apply_residual_connection_post_layernorm", (False,))
        refuse(config, "slow_but_exact", (False,))
        return Architecture(
            family=self.name,
            layers=size(config, _one_of(config, "n_layer", "num_hidden_layers")),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=head_size(config, hidden, heads),
            ffn=4 * hidden,
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "seq_length", 2048),
            tied_embeddings=flag(config, "tie_word_embeddings", True),
            attention_bias=True,
            output_bias=True,
            mlp_bias=True,
            activation="gelu_fast",  # its formula, in a function with a backward of its own
            alibi=True,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return {
            "model_type": self.name,
            "vocab_size": a.vocab,
            "hidden_size": a.hidden,
            "n_layer": a.layers,
            "n_head": a.heads,
            "seq_length": a.max_sequence,
            "tie_word_embeddings": a.tied_embeddings,
            **dict.fromkeys(self.dropouts, 0.0),
            "use_cache": False,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        width = a.hidden
        rows: Rows = layer_norm("input_layernorm", width)
        rows += linear("self_attention.query_key_value", 3 * width, width, True)
        rows += linear("self_attention.dense", width, width, True)
        rows += layer_norm("post_attention_layernorm", width)
        rows += linear("mlp.dense_h_to_4h", a.ffn, width, True)
        rows += linear("mlp.dense_4h_to_h", width, a.ffn, True)
        entry: Rows = [("word_embeddings.weight", (a.vocab, width))]
        entry += layer_norm("word_embeddings_layernorm", width)
        return decoder(
            a, rows, root="transformer", entry=entry, blocks="h", end=layer_norm("ln_f", width)
        )

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`; all blocks share the bias and the mask."""
        meter, heads = forward.meter, forward.architecture.heads
        tokens = embedding(forward, weights["word_embeddings.weight"], forward.input_ids)
        x = apply_layer_norm(forward, weights, "word_embeddings_layernorm", tokens)
        slopes = meta.empty(meter, (heads,), "float32")
        counted = meta.empty(meter, (forward.reach,), "int64")
        bias = meta.empty(meter, (heads, 1, forward.reach), "float32")
        del counted
        bias = meta.empty(meter, (forward.batch * heads, 1, forward.reach), "float32")
        bias = meta.cast(bias, x.dtype)
        return Embedded(x, (bias, causal_mask(forward, tokens.dtype)), (tokens, slopes))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        normed = apply_layer_norm(forward, weights, "input_layernorm", x)
        attended, chances = _attention(forward, weights, normed, x, shared)
        normed = apply_layer_norm(forward, weights, "post_attention_layernorm", attended)
        out = _mlp(forward, weights, normed, attended)
        hold_until_next(forward, chances)
        return out


def _one_of(config: Mapping[str, Any], key: str, other: str) -> str:
    """The name under which the file has a size; both only when they say the same."""
    if config.get(other) is None:
        return key
    if config.get(key) not in (None, config[other]):
        raise InvalidRequest(
            f"`{key}: {config[key]}` and `{other}: {config[other]}` in config.json differ"
        )
    return other


@module
def _attention(
    forward: Forward, weights: Weights, x: Tensor, residual: Tensor, shared: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The class's own code: scores for every pair of tokens, and what it returns of them."""
    a, (batch, tokens, _), (bias, mask) = forward.architecture, x.shape, shared
    fused = project(forward, weights, "self_attention.query_key_value", x)
    whole = meta.view(fused, batch, tokens, a.heads, 3, a.head_dim)
    parts = [meta.transpose(meta.select(whole, 3), 1, 2) for _ in range(3)]
    parts[1:] = keep(forward, parts[1], parts[2])
    flat, reach = (batch * a.heads, -1, a.head_dim), forward.reach
    query = meta.reshape(parts[0], *flat)
    key = meta.transpose(meta.reshape(parts[1], *flat), 1, 2)
    value = meta.reshape(parts[2], *flat)
    scores = meta.add_multiply_batched(bias, query, key)
    masked = meta.add(meta.view(scores, batch, a.heads, tokens, reach), mask)
    chances = meta.cast(meta.softmax_wide(masked), query.dtype)
    rows = meta.view(chances, batch * a.heads, tokens, reach)
    context = meta.multiply_batched(rows, value)
    context = meta.view(context, batch, a.heads, tokens, a.head_dim)
    context = meta.reshape(meta.transpose(context, 1, 2), *x.shape)
    out = project(forward, weights, "self_attention.dense", context)
    out = meta.add(residual, out)
    return out, chances


@module
def _mlp(forward: Forward, weights: Weights, x: Tensor, residual: Tensor) -> Tensor:
    x = _gelu(forward, project(forward, weights, "mlp.dense_h_to_4h", x))
    fed = project(forward, weights, "mlp.dense_4h_to_h", x)
    return meta.add(residual, fed)


@module
def _gelu(forward: Forward, x: Tensor) -> Tensor:
    """Return the GELU of x; its autograd function saves x alone and recomputes tanh in backward."""
    if "mlp" in forward.lean:
        return lean.activation(x)
    return meta.own_function(gelu_fast, _gelu_slope, x)


def _gelu_slope(x: Tensor, grad: Tensor) -> Tensor:
    """grad times the curve's slope at x."""
    outer = meta.scale(x)
    inner = meta.shift(meta.mul(meta.scale(x), x))
    product = meta.mul(outer, inner)
    del outer, inner
    curve = meta.tanh(product)
    del product
    half = meta.scale(x)
    bent = meta.shift(meta.mul(curve, curve))
    straight = meta.shift(meta.mul(meta.scale(x), x))
    product = meta.mul(bent, straight)
    del bent, straight
    left = meta.mul(half, product)
    del half, product
    slope = meta.add(left, meta.scale(meta.shift(curve)))
    del left
    return meta.mul(slope, grad)


families.register("bloom")(Bloom())
