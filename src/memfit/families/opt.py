"""OPT (Zhang et al. 2205.01068; Hugging Face's `opt`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit import meta
from memfit.families import Family, families
from memfit.families.shared.config import activation, flag, head_size, refuse, size, size_or
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Weights,
    activate,
    apply_layer_norm,
    attend,
    embedding,
    keep,
    module,
    project,
)
from memfit.families.shared.weights import Rows, head, layer_norm, linear, repeat
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight

OFFSET = 2  # rows of the learned positions that no position uses


@final
class Opt(Family):
    """LayerNorm, learned positions, projections with biases; small embeddings are projected."""

    name = "opt"
    lean = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("dropout", "attention_dropout", "layerdrop")
    ends = True  # positions are learned

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `OPTConfig`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        refuse(config, "head_dim", (None,))
        refuse(config, "_remove_final_layer_norm", (False,))
        refuse(config, "layer_norm_elementwise_affine", (True,))
        bias = flag(config, "enable_bias", True)
        narrow = size_or(config, "word_embed_proj_dim", hidden)
        return Architecture(
            family=self.name,
            layers=size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=head_size(config, hidden, heads),
            ffn=size(config, "ffn_dim"),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "max_position_embeddings", 2048),
            tied_embeddings=flag(config, "tie_word_embeddings", True),
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            activation=activation(config, "activation_function", "relu"),
            embedding_size=0 if narrow == hidden else narrow,
            norm_after=not flag(config, "do_layer_norm_before", True),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return {
            "model_type": self.name,
            "vocab_size": a.vocab,
            "hidden_size": a.hidden,
            "word_embed_proj_dim": a.head_input,
            "num_hidden_layers": a.layers,
            "num_attention_heads": a.heads,
            "ffn_dim": a.ffn,
            "activation_function": a.activation,
            "max_position_embeddings": a.max_sequence,
            "tie_word_embeddings": a.tied_embeddings,
            "enable_bias": a.attention_bias,
            "do_layer_norm_before": not a.norm_after,
            **dict.fromkeys(self.dropouts, 0.0),
            "use_cache": False,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        width, narrow = a.hidden, a.head_input
        rows: Rows = []
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            rows += linear(f"self_attn.{name}", width, width, a.attention_bias)
        rows += layer_norm("self_attn_layer_norm", width)
        rows += linear("fc1", a.ffn, width, a.mlp_bias)
        rows += linear("fc2", width, a.ffn, a.mlp_bias)
        rows += layer_norm("final_layer_norm", width)
        outside: list[tuple[str, tuple[int, ...], str]] = [
            ("embed_tokens.weight", (a.vocab, narrow), "embedding"),
            ("embed_positions.weight", (a.max_sequence + OFFSET, width), "embedding"),
        ]
        if narrow != width:
            outside.append(("project_out.weight", (narrow, width), "norm"))
            outside.append(("project_in.weight", (width, narrow), "embedding"))
        if not a.norm_after:
            outside += [(n, s, "norm") for n, s in layer_norm("final_layer_norm", width)]
        return (
            *(Weight(name=f"model.decoder.{n}", shape=s, part=part) for n, s, part in outside),
            *repeat("model.decoder.layers", rows, a),
            *head(a),
        )

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`."""
        tokens = embedding(forward, weights["decoder.embed_tokens.weight"], forward.input_ids)
        ones = meta.empty(forward.meter, (forward.batch, forward.reach), "float32")
        position_ids = forward.position_ids
        if position_ids is None:
            position_ids = _count(ones)
        learned = _positions(forward, weights["decoder.embed_positions.weight"], position_ids)
        if _has(weights, "decoder.project_in"):
            tokens = project(forward, weights, "decoder.project_in", tokens)
        x = meta.add(tokens, learned)
        return Embedded(x, (position_ids,), (tokens, learned, ones))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        after, shape, residual = forward.architecture.norm_after, x.shape, x
        if not after:
            x = apply_layer_norm(forward, weights, "self_attn_layer_norm", x)
        x = _attention(forward, weights, x)
        x = meta.add(residual, x)
        if after:
            x = apply_layer_norm(forward, weights, "self_attn_layer_norm", x)
        x = meta.reshape(x, -1, x.shape[-1])
        residual = x
        if not after:
            x = apply_layer_norm(forward, weights, "final_layer_norm", x)
        x = project(forward, weights, "fc1", x)
        x = activate(forward, x)
        x = project(forward, weights, "fc2", x)
        x = meta.view(meta.add(residual, x), *shape)
        if after:
            x = apply_layer_norm(forward, weights, "final_layer_norm", x)
        return x

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Family.finish`."""
        if not forward.architecture.norm_after:
            x = apply_layer_norm(forward, weights, "decoder.final_layer_norm", x, feeds=False)
        if _has(weights, "decoder.project_out"):
            x = project(forward, weights, "decoder.project_out", x)
        return x


def _has(weights: Weights, name: str) -> bool:
    """Whether there is such a projection, alone or inside an adapter."""
    return f"{name}.weight" in weights or f"{name}.base_layer.weight" in weights


def _count(ones: Tensor) -> Tensor:
    """Positions as sums over a mask of ones, in floating point first: (batch, tokens) int64."""
    meter, shape = ones.meter, ones.shape
    summed = meta.empty(meter, shape, "float32")
    masked = meta.empty(meter, shape, "float32")
    shifted = meta.empty(meter, shape, "float32")
    del masked
    whole = meta.empty(meter, shape, "int64")
    del shifted, summed
    return whole


@module
def _positions(forward: Forward, weight: Tensor, position_ids: Tensor) -> Tensor:
    moved = meta.empty(forward.meter, position_ids.shape, "int64")
    return meta.gather_rows(weight, moved)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = meta.scale(project(forward, weights, "self_attn.q_proj", x))
    query = meta.transpose(meta.view(query, *shape), 1, 2)
    key = project(forward, weights, "self_attn.k_proj", x)
    value = project(forward, weights, "self_attn.v_proj", x)
    key = meta.transpose(meta.view(key, *shape), 1, 2)
    value = meta.transpose(meta.view(value, *shape), 1, 2)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.out_proj", out)  # what went in is let go first
    return out  # noqa: RET504


families.register("opt")(Opt())
