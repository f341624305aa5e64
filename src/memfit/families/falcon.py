"""Falcon (Almazrouei et al. 2311.16867; Hugging Face's `falcon`), with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.families.shared.attention_class import AttentionClass
from memfit.families.shared.config import (
    activation,
    flag,
    head_size,
    refuse,
    rope,
    size,
    size_or,
    whole_head_rotates,
)
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    apply_layer_norm,
    attend,
    keep,
    module,
    plain_mlp,
    project,
    rotate,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import Rows, decoder, layer_norm, linear
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class Falcon(Decoder):
    """LayerNorm, rotary positions; one key for all heads (7B), or one for each group (40B).

    The architecture with groups is Hugging Face's "new decoder architecture", with two norms by
    default. Keys and values are not repeated for all heads, as Hugging Face's class would.
    """

    name = "falcon"
    lean = True
    hands_on_documents = False
    plain_linears = False
    attention_class = AttentionClass(always_masked=True, one_key=True, narrow_softmax=True)
    lora_targets = ("query_key_value",)
    dropouts = ("attention_dropout", "hidden_dropout")
    norm = staticmethod(apply_layer_norm)
    last_norm = "ln_f"
    table = "word_embeddings"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `FalconConfig`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        refuse(config, "alibi", (False, None))
        refuse(config, "n_embed", (None, hidden))
        refuse(config, "head_dim", (None,))
        whole_head_rotates(config)
        rope(config)
        head_dim, bias = head_size(config, hidden, heads), flag(config, "bias", False)
        kv_heads = _key_value_heads(config, heads)
        grouped = 1 < kv_heads < heads
        parallel = flag(config, "parallel_attn", True)
        if grouped and not parallel:
            raise InvalidRequest(
                "`parallel_attn: False` in config.json does not go with `new_decoder_architecture`"
            )
        norms = size_or(config, "num_ln_in_parallel_attn", 2 if grouped else 1)
        if norms > (2 if grouped else 1):
            raise InvalidRequest(
                f"`num_ln_in_parallel_attn: {norms}` in config.json is not described by memfit's"
                " family `falcon` here"
            )
        return Architecture(
            family=self.name,
            layers=size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=size_or(config, "ffn_hidden_size", 4 * hidden),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "max_position_embeddings", 2048),
            tied_embeddings=flag(config, "tie_word_embeddings", True),
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            parallel_residual=parallel,
            rotary_dim=head_dim,
            activation=activation(config, "activation", "gelu"),
            shared_norm=parallel and norms == 1,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        grouped = 1 < a.kv_heads < a.heads
        return {
            "model_type": self.name,
            "vocab_size": a.vocab,
            "hidden_size": a.hidden,
            "num_hidden_layers": a.layers,
            "num_attention_heads": a.heads,
            "num_kv_heads": a.kv_heads,
            "new_decoder_architecture": grouped,
            "multi_query": a.kv_heads == 1,
            "parallel_attn": a.parallel_residual,
            "num_ln_in_parallel_attn": 1 if a.shared_norm or not grouped else 2,
            "ffn_hidden_size": a.ffn,
            "activation": a.activation,
            "bias": a.attention_bias,
            "alibi": False,
            "max_position_embeddings": a.max_sequence,
            "tie_word_embeddings": a.tied_embeddings,
            **dict.fromkeys(self.dropouts, 0.0),
            "use_cache": False,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        width = a.hidden
        fused = (a.heads + 2 * a.kv_heads) * a.head_dim
        rows: Rows = linear("self_attention.query_key_value", fused, width, a.attention_bias)
        rows += linear("self_attention.dense", width, width, a.output_bias)
        rows += linear("mlp.dense_h_to_4h", a.ffn, width, a.mlp_bias)
        rows += linear("mlp.dense_4h_to_h", width, a.ffn, a.mlp_bias)
        for name in _norms(a):
            rows += layer_norm(name, width)
        return decoder(
            a, rows, root="transformer", entry=[("word_embeddings.weight", (a.vocab, width))],
            blocks="h", end=layer_norm("ln_f", width),
        )  # fmt: skip

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        names, residual, fed_from = _norms(forward.architecture), x, None
        if "ln_attn" in names:
            normed = apply_layer_norm(forward, weights, "ln_attn", x)
            fed_from = apply_layer_norm(forward, weights, "ln_mlp", x)
        else:
            normed = apply_layer_norm(forward, weights, "input_layernorm", x)
        attended = _attention(forward, weights, normed, (shared[0], shared[1]))
        if "post_attention_layernorm" in names:
            residual = meta.add(residual, attended)
            fed_from = apply_layer_norm(forward, weights, "post_attention_layernorm", residual)
        elif fed_from is None:
            fed_from = normed
        fed = plain_mlp(forward, weights, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", fed_from)
        if forward.architecture.parallel_residual:
            fed = meta.add_into(fed, attended)
        return meta.add(residual, fed)


def _key_value_heads(config: Mapping[str, Any], heads: int) -> int:
    """One, as many as `heads`, or of the new decoder architecture a number between."""
    kv_heads = size_or(config, "num_kv_heads", heads)
    if flag(config, "new_decoder_architecture", False):
        if not 1 < kv_heads < heads or heads % kv_heads:
            raise InvalidRequest(
                f"`num_kv_heads: {kv_heads}` in config.json is no part of {heads} heads, as the"
                " `new_decoder_architecture` that memfit describes has it"
            )
        return kv_heads
    if flag(config, "multi_query", True):
        return 1
    if kv_heads != heads:
        raise InvalidRequest(
            f"`num_kv_heads: {kv_heads}` in config.json needs `new_decoder_architecture`"
        )
    return heads


def _norms(a: Architecture) -> tuple[str, ...]:
    """The norms of a block, in the order of Hugging Face's class."""
    if not a.parallel_residual:
        return ("post_attention_layernorm", "input_layernorm")
    if a.shared_norm:
        return ("input_layernorm",)
    return ("ln_attn", "ln_mlp")


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    fused = project(forward, weights, "self_attention.query_key_value", x)
    query, key, value = _split(forward.architecture, fused)
    del fused
    query, key = meta.transpose(query, 1, 2), meta.transpose(key, 1, 2)
    value = meta.transpose(value, 1, 2)
    query, key = rotate(query, key, turn)
    key, value = keep(forward, key, value)
    out = meta.reshape(attend(forward, query, key, value), *x.shape)
    out = project(forward, weights, "self_attention.dense", out)  # what went in is let go first
    return out  # noqa: RET504


def _split(a: Architecture, fused: Tensor) -> list[Tensor]:
    """(batch, tokens, all heads) -> query, key and value as (batch, tokens, heads, size)."""
    rows, each = fused.shape[:2], a.heads // a.kv_heads
    whole = meta.view(fused, *rows, a.kv_heads, each + 2, a.head_dim)
    parts = meta.split(whole, (each, 1, 1), 3)
    return [meta.reshape(part, *rows, -1, a.head_dim) for part in parts]


families.register("falcon")(Falcon())
