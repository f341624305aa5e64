"""GPT-NeoX-20B and Pythia (Black et al. 2204.06745; Hugging Face's `gpt_neox`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit import meta
from memfit.families import families
from memfit.families.shared.config import (
    activation,
    flag,
    fraction_of,
    head_size,
    refuse,
    share_of_head,
    size,
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
    rotate_part,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import Rows, decoder, layer_norm, linear
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class GptNeox(Decoder):
    """LayerNorm, rotary positions on part of a head, attention and feed-forward side by side."""

    name = "gpt_neox"
    lean = True
    lora_targets = ("query_key_value",)
    dropouts = ("attention_dropout", "hidden_dropout", "classifier_dropout")
    norm = staticmethod(apply_layer_norm)
    last_norm = "final_layer_norm"
    table = "embed_in"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `GPTNeoXConfig`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        refuse(config, "head_dim", (None,))
        head_dim = head_size(config, hidden, heads)
        bias = flag(config, "attention_bias", True)
        return Architecture(
            family=self.name,
            layers=size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            ffn=size(config, "intermediate_size"),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "max_position_embeddings", 2048),
            tied_embeddings=flag(config, "tie_word_embeddings", False),
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=True,
            parallel_residual=flag(config, "use_parallel_residual", True),
            rotary_dim=share_of_head(config, head_dim, 0.25, "rotary_pct"),
            activation=activation(config, "hidden_act", "gelu"),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return {
            "model_type": self.name,
            "vocab_size": a.vocab,
            "hidden_size": a.hidden,
            "num_hidden_layers": a.layers,
            "num_attention_heads": a.heads,
            "intermediate_size": a.ffn,
            "hidden_act": a.activation,
            "rotary_pct": fraction_of(a.rotary_dim, a.head_dim),
            "max_position_embeddings": a.max_sequence,
            "tie_word_embeddings": a.tied_embeddings,
            "use_parallel_residual": a.parallel_residual,
            "attention_bias": a.attention_bias,
            **dict.fromkeys(self.dropouts, 0.0),
            "use_cache": False,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        width = a.hidden
        rows: Rows = layer_norm("input_layernorm", width)
        rows += layer_norm("post_attention_layernorm", width)
        rows += linear("attention.query_key_value", 3 * width, width, a.attention_bias)
        rows += linear("attention.dense", width, width, a.output_bias)
        rows += linear("mlp.dense_h_to_4h", a.ffn, width, True)
        rows += linear("mlp.dense_4h_to_h", width, a.ffn, True)
        return decoder(
            a, rows, root="gpt_neox", entry=[("embed_in.weight", (a.vocab, width))],
            end=layer_norm("final_layer_norm", width),
        )  # fmt: skip

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        return _block(forward, weights, x, (shared[0], shared[1]))


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    """GPT-NeoX's attention: one projection, heads first, then query, key and value."""
    size = forward.architecture.head_dim
    fused = project(forward, weights, "attention.query_key_value", x)
    fused = meta.transpose(meta.view(fused, *x.shape[:-1], -1, 3 * size), 1, 2)
    query, key, value = meta.split(fused, (size, size, size), 3)
    query, key = rotate_part(query, key, turn)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "attention.dense", out)  # what went in is let go first
    return out  # noqa: RET504


def _block(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    """One block of gpt_neox, attention and feed-forward side by side or one after the other."""
    attended = _attention(
        forward, weights, apply_layer_norm(forward, weights, "input_layernorm", x), turn
    )
    if forward.architecture.parallel_residual:
        fed = _mlp(forward, weights, x)
        return meta.add(meta.add(fed, attended), x)
    attended = meta.add(attended, x)
    fed = _mlp(forward, weights, attended)
    return meta.add(fed, attended)


def _mlp(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    normed = apply_layer_norm(forward, weights, "post_attention_layernorm", x)
    return plain_mlp(forward, weights, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", normed)


families.register("gpt_neox")(GptNeox())
