"""Weight rows that several families share, as functions of an architecture."""

from __future__ import annotations

from typing import Any

from memfit.records.model import Architecture, TensorSpec, Weight

Rows = list[tuple[str, tuple[int, ...]]]  # name inside a block, shape


def linear(name: str, rows: int, columns: int, bias: bool) -> Rows:
    """A projection, (columns) -> (rows), as torch's Linear stores it."""
    found: Rows = [(f"{name}.weight", (rows, columns))]
    return [*found, (f"{name}.bias", (rows,))] if bias else found


def layer_norm(name: str, hidden: int) -> Rows:
    """Scale and shift of a LayerNorm."""
    return [(f"{name}.weight", (hidden,)), (f"{name}.bias", (hidden,))]


def repeat(prefix: str, rows: Rows, a: Architecture, first: Rows | None = None) -> list[Weight]:
    """The rows of one block, once a layer; first: of those layers that have no experts."""
    return [
        Weight(name=f"{prefix}.{layer}.{name}", shape=shape, part="block", layer=layer)
        for layer in range(a.layers)
        for name, shape in (rows if first is None or layer >= a.experts.dense_layers else first)
    ]


def head(a: Architecture) -> tuple[Weight, ...]:
    """The output projection, (head_input) -> (vocab); no weight when it is the embedding itself."""
    found: Rows = [] if a.tied_embeddings else [("lm_head.weight", (a.vocab, a.head_input))]
    if a.head_bias:
        found.append(("lm_head.bias", (a.vocab,)))
    return tuple(Weight(name=name, shape=shape, part="head") for name, shape in found)


def projection_rows(a: Architecture) -> Rows:
    """Queries, keys and values of grouped heads, and the output's projection."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    rows = linear("self_attn.q_proj", q, a.hidden, a.attention_bias)
    rows += linear("self_attn.k_proj", kv, a.hidden, a.attention_bias)
    rows += linear("self_attn.v_proj", kv, a.hidden, a.attention_bias)
    return rows + linear("self_attn.o_proj", a.hidden, q, a.output_bias)


def attention_rows(a: Architecture) -> Rows:
    """Llama's attention, and Qwen3's norms over one head after the projections."""
    rows = projection_rows(a)
    if a.qk_norm:
        rows += [("self_attn.q_norm.weight", (a.head_dim,))]
        rows += [("self_attn.k_norm.weight", (a.head_dim,))]
    return rows


def gated_rows(name: str, a: Architecture, ffn: int) -> Rows:
    """A gated feed-forward of that width."""
    rows = linear(f"{name}.gate_proj", ffn, a.hidden, a.mlp_bias)
    rows += linear(f"{name}.up_proj", ffn, a.hidden, a.mlp_bias)
    rows += linear(f"{name}.down_proj", a.hidden, ffn, a.mlp_bias)
    return rows


def norm_rows(a: Architecture) -> Rows:
    """The two RMSNorms of Llama's block."""
    names = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return [(name, (a.hidden,)) for name in names]


def gated_block(a: Architecture) -> Rows:
    """Llama's block: grouped attention, a gated feed-forward and two RMSNorms."""
    return attention_rows(a) + gated_rows("mlp", a, a.ffn) + norm_rows(a)


def whole_norm_rows(a: Architecture) -> Rows:
    """Llama's projections, and norms over all heads of query and of key together."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    norms: Rows = [("self_attn.q_norm.weight", (q,)), ("self_attn.k_norm.weight", (kv,))]
    return projection_rows(a) + norms


def post_norm_weights(a: Architecture, attention: Rows) -> tuple[Weight, ...]:
    """All weights of a decoder whose two norms a block follow what they norm: olmo2, olmo3."""
    names = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    rows = attention + gated_rows("mlp", a, a.ffn)
    return decoder(a, rows + [(name, (a.hidden,)) for name in names])


def gated_weights(a: Architecture) -> tuple[Weight, ...]:
    """All weights of a decoder made of `gated_block`s: llama, mistral, qwen2, qwen3."""
    return decoder(a, gated_block(a))


def decoder(
    a: Architecture, rows: Rows, *,
    root: str = "model", entry: Rows | None = None, blocks: str = "layers", end: Rows | None = None,
    first: Rows | None = None,
) -> tuple[Weight, ...]:  # fmt: skip
    """All weights of a decoder of such blocks.

    entry, end: what stands before and behind the blocks; token embeddings, and a norm without a
    bias, where not named. first: see `repeat`.
    """
    entry = [("embed_tokens.weight", (a.vocab, a.hidden))] if entry is None else entry
    end = [("norm.weight", (a.hidden,))] if end is None else end
    return (
        *(Weight(name=f"{root}.{name}", shape=shape, part="embedding") for name, shape in entry),
        *repeat(f"{root}.{blocks}", rows, a, first),
        *(Weight(name=f"{root}.{name}", shape=shape, part="norm") for name, shape in end),
        *head(a),
    )


def rotary_buffers(a: Architecture) -> tuple[TensorSpec, ...]:
    """Inverse frequencies, and the copy of them that Hugging Face keeps; one pair a model."""
    frequencies = TensorSpec(shape=((a.rotary_dim + 1) // 2,))
    return (frequencies, frequencies)


def gated_config(a: Architecture) -> dict[str, Any]:
    """The keys of config.json that llama, mistral, qwen2 and qwen3 have in common."""
    return {
        "model_type": a.family,
        "vocab_size": a.vocab,
        "hidden_size": a.hidden,
        "intermediate_size": a.ffn,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": a.activation,
        "max_position_embeddings": a.max_sequence,
        "tie_word_embeddings": a.tied_embeddings,
        "attention_dropout": 0.0,
        "use_cache": False,
    }
