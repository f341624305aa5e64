"""GPT-J (Wang and Komatsuzaki 2021; Hugging Face's `gptj`, as transformers 5.24 has it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.families.shared.attention_class import AttentionClass
from memfit.families.shared.blocks import swap_neighbours
from memfit.families.shared.config import (
    activation,
    flag,
    head_size,
    refuse,
    refuse_other_names,
    size,
    size_or,
)
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    apply_layer_norm,
    attend,
    cut_head,
    keep,
    module,
    plain_mlp,
    project,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import Rows, decoder, layer_norm, linear
from memfit.meta import Tensor
from memfit.records.model import Architecture, TensorSpec, Weight

OTHER_NAMES = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


@module
def table_rotation(forward: Forward, dtype: str, position_ids: Tensor) -> Rotation:
    """Sines and cosines (batch or 1, tokens, rotary_dim / 2): halves of the table's rows."""
    size = forward.architecture.rotary_dim
    rows = meta.empty(forward.meter, (*position_ids.shape, size), "float32")
    sines, cosines = meta.split(meta.cast(rows, dtype), (size // 2, size // 2), 2)
    return sines, cosines


@final
class GptJ(Decoder):
    """LayerNorm, neighbours rotated in part of a head, attention beside the feed-forward."""

    name = "gptj"
    lean = True
    attention_class = AttentionClass(wide_scores=True)
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    norm = staticmethod(apply_layer_norm)
    last_norm = "ln_f"
    table = "wte"
    rotation = staticmethod(table_rotation)
    ends = True  # the backbone holds a table of all positions

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `GPTJConfig`."""
        refuse_other_names(config, OTHER_NAMES)
        hidden, heads = size(config, "n_embd"), size(config, "n_head")
        refuse(config, "head_dim", (None,))
        head_dim, rotary = head_size(config, hidden, heads), size(config, "rotary_dim", 64)
        if rotary > head_dim or rotary % 2:
            raise InvalidRequest(
                f"`rotary_dim: {rotary}` in config.json is no even part of a head of {head_dim}"
            )
        return Architecture(
            family=self.name,
            layers=size(config, "n_layer"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            ffn=size_or(config, "n_inner", 4 * hidden),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "n_positions", 2048),
            tied_embeddings=flag(config, "tie_word_embeddings", False),
            mlp_bias=True,
            parallel_residual=True,
            rotary_dim=rotary,
            activation=activation(config, "activation_function", "gelu_new"),
            shared_norm=True,
            head_bias=True,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return {
            "model_type": self.name,
            "vocab_size": a.vocab,
            "n_positions": a.max_sequence,
            "n_embd": a.hidden,
            "n_layer": a.layers,
            "n_head": a.heads,
            "n_inner": a.ffn,
            "rotary_dim": a.rotary_dim,
            "activation_function": a.activation,
            "tie_word_embeddings": a.tied_embeddings,
            **dict.fromkeys(self.dropouts, 0.0),
            "use_cache": False,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        width = a.hidden
        rows: Rows = layer_norm("ln_1", width)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            rows += linear(f"attn.{name}", width, width, False)
        rows += linear("mlp.fc_in", a.ffn, width, True)
        rows += linear("mlp.fc_out", width, a.ffn, True)
        return decoder(
            a, rows, root="transformer", entry=[("wte.weight", (a.vocab, width))], blocks="h",
            end=layer_norm("ln_f", width),
        )  # fmt: skip

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`: sines and cosines of every position, once for all blocks."""
        return (TensorSpec(shape=(a.max_sequence, a.rotary_dim)),)

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = apply_layer_norm(forward, weights, "ln_1", x)
        attended = _attention(forward, weights, x, (shared[0], shared[1]))
        fed = plain_mlp(forward, weights, "mlp.fc_in", "mlp.fc_out", x)
        return meta.add(meta.add(attended, fed), residual)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    a = forward.architecture
    shape = (*x.shape[:-1], a.heads, a.head_dim)
    query = meta.view(project(forward, weights, "attn.q_proj", x), *shape)
    key = meta.view(project(forward, weights, "attn.k_proj", x), *shape)
    value = meta.view(project(forward, weights, "attn.v_proj", x), *shape)
    value = meta.transpose(value, 1, 2)
    key_part, key_rest = cut_head(key, a.rotary_dim)
    query_part, query_rest = cut_head(query, a.rotary_dim)
    key_part = _turn(key_part, turn)
    query_part = _turn(query_part, turn)
    key = meta.concatenate((key_part, key_rest), 3)
    query = meta.concatenate((query_part, query_rest), 3)
    query, key = meta.transpose(query, 1, 2), meta.transpose(key, 1, 2)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape))
    out = project(forward, weights, "attn.out_proj", out)  # the product's input is let go first
    return out  # noqa: RET504


def _turn(x: Tensor, turn: Rotation) -> Tensor:
    """Rotary embedding of neighbours: (batch, tokens, heads, size) -> the same."""
    rows, tokens, half = turn[0].shape
    shape = (rows, tokens, 1, 2 * half)
    sines = meta.empty(x.meter, shape, turn[0].dtype)
    cosines = meta.empty(x.meter, shape, turn[0].dtype)
    return meta.add(meta.mul(x, cosines), meta.mul(swap_neighbours(x), sines))


families.register("gptj")(GptJ())
