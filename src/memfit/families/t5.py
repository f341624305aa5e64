"""T5 1.1 and FLAN-T5 (Raffel et al. 1910.10683; Hugging Face's `t5`): parameters alone.

memfit plans and trains decoders; of this encoder with a decoder it knows only the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit.families import Described, references
from memfit.families.shared.config import flag, refuse, size, size_or
from memfit.families.shared.weights import Rows, head, linear
from memfit.records.model import Architecture, Weight

BUCKETS = 32  # of distances, each with a bias a head, in the first block of either stack


@final
class T5(Described):
    """RMSNorm, a bias by distance, gated GELU, no other bias, attention to the encoder."""

    name = "t5"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Described.architecture`; `layers` are the decoder's."""
        refuse(config, "feed_forward_proj", ("gated-gelu",))
        refuse(config, "relative_attention_num_buckets", (BUCKETS,))
        heads, encoder = size(config, "num_heads"), size(config, "num_layers")
        return Architecture(
            family=self.name,
            layers=size_or(config, "num_decoder_layers", encoder),
            hidden=size(config, "d_model"),
            heads=heads,
            kv_heads=heads,
            head_dim=size(config, "d_kv"),
            ffn=size(config, "d_ff"),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "n_positions", 512),
            tied_embeddings=flag(config, "tie_word_embeddings", True),
            activation="gelu_new",
            encoder_layers=encoder,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Described.config`; Hugging Face's class ties the head whatever the config states."""
        return {
            "model_type": self.name,
            "vocab_size": a.vocab,
            "d_model": a.hidden,
            "d_kv": a.head_dim,
            "d_ff": a.ffn,
            "num_layers": a.encoder_layers,
            "num_decoder_layers": a.layers,
            "num_heads": a.heads,
            "n_positions": a.max_sequence,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": a.tied_embeddings,
            "dropout_rate": 0.0,
            "classifier_dropout": 0.0,
            "use_cache": False,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Described.weights`; blocks of the decoder are counted on from the encoder's."""
        return (
            Weight(name="shared.weight", shape=(a.vocab, a.hidden), part="embedding"),
            *_stack(a, "encoder", a.encoder_layers, 0),
            *_stack(a, "decoder", a.layers, a.encoder_layers),
            *head(a),
        )


def _stack(a: Architecture, stack: str, layers: int, before: int) -> list[Weight]:
    """The blocks of one stack and its norm; blocks of the decoder attend twice."""
    made: list[Weight] = []
    for layer in range(layers):
        names = ["SelfAttention"] + (["EncDecAttention"] if stack == "decoder" else [])
        parts = [_attention(a, name, first=not layer and not i) for i, name in enumerate(names)]
        parts.append(_feed_forward(a))
        made += [
            Weight(
                name=f"{stack}.block.{layer}.layer.{i}.{name}",
                shape=shape, part="block", layer=before + layer,
            )
            for i, rows in enumerate(parts)
            for name, shape in [*rows, ("layer_norm.weight", (a.hidden,))]
        ]  # fmt: skip
    made.append(Weight(name=f"{stack}.final_layer_norm.weight", shape=(a.hidden,), part="norm"))
    return made


def _attention(a: Architecture, name: str, *, first: bool) -> Rows:
    width = a.heads * a.head_dim
    rows: Rows = []
    for part in "qkv":
        rows += linear(f"{name}.{part}", width, a.hidden, False)
    rows += linear(f"{name}.o", a.hidden, width, False)
    return (
        [*rows, (f"{name}.relative_attention_bias.weight", (BUCKETS, a.heads))] if first else rows
    )


def _feed_forward(a: Architecture) -> Rows:
    rows = linear("DenseReluDense.wi_0", a.ffn, a.hidden, False)
    rows += linear("DenseReluDense.wi_1", a.ffn, a.hidden, False)
    return rows + linear("DenseReluDense.wo", a.hidden, a.ffn, False)


references.register("t5")(T5())
