"""GPT-2 (Radford et al. 2019; Hugging Face's `gpt2`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit import meta
from memfit.families import families
from memfit.families.shared.attention_class import AttentionClass
from memfit.families.shared.config import activation, flag, head_size, refuse, size, size_or
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Weights,
    apply_layer_norm,
    attend,
    embedding,
    keep,
    module,
    plain_mlp,
    positions,
    project,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import Rows, decoder, layer_norm
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class Gpt2(Decoder):
    """LayerNorm, learned positions, one fused projection for query, key and value."""

    name = "gpt2"
    lean = True
    plain_linears = False
    attention_class = AttentionClass(narrow_softmax=True)
    lora_targets = ("c_attn",)
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    norm = staticmethod(apply_layer_norm)
    last_norm = "ln_f"
    ends = True  # positions are learned

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `GPT2Config`."""
        hidden, heads = size(config, "n_embd"), size(config, "n_head")
        refuse(config, "head_dim", (None,))
        refuse(config, "add_cross_attention", (False,))
        refuse(config, "reorder_and_upcast_attn", (False,))
        refuse(config, "scale_attn_by_inverse_layer_idx", (False,))
        refuse(config, "scale_attn_weights", (True,))
        return Architecture(
            family=self.name,
            layers=size(config, "n_layer"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=head_size(config, hidden, heads),
            ffn=size_or(config, "n_inner", 4 * hidden),
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "n_positions", 1024),
            tied_embeddings=flag(config, "tie_word_embeddings", True),
            attention_bias=True,
            output_bias=True,
            mlp_bias=True,
            activation=activation(config, "activation_function", "gelu_new"),
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
            "activation_function": a.activation,
            "tie_word_embeddings": a.tied_embeddings,
            **dict.fromkeys(self.dropouts, 0.0),
            "use_cache": False,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`; Conv1D stores (in, out), the transpose of a Linear."""
        width = a.hidden
        rows: Rows = layer_norm("ln_1", width)
        rows += _conv1d("attn.c_attn", width, 3 * width)
        rows += _conv1d("attn.c_proj", width, width)
        rows += layer_norm("ln_2", width)
        rows += _conv1d("mlp.c_fc", width, a.ffn)
        rows += _conv1d("mlp.c_proj", a.ffn, width)
        entry: Rows = [("wte.weight", (a.vocab, width)), ("wpe.weight", (a.max_sequence, width))]
        return decoder(
            a, rows, root="transformer", entry=entry, blocks="h", end=layer_norm("ln_f", width)
        )

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`."""
        tokens = embedding(forward, weights["wte.weight"], forward.input_ids)
        position_ids = positions(forward)
        learned = embedding(forward, weights["wpe.weight"], position_ids)
        return Embedded(meta.add(tokens, learned), (position_ids,), (tokens, learned))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        return _block(forward, weights, x)


def _conv1d(name: str, columns: int, rows: int) -> Rows:
    """(columns) -> (rows), stored the other way round than a Linear."""
    return [(f"{name}.weight", (columns, rows)), (f"{name}.bias", (rows,))]


@module
def _attention(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    """GPT-2's attention: one projection for query, key and value."""
    width, size = forward.architecture.hidden, forward.architecture.head_dim
    shape = (*x.shape[:-1], -1, size)
    fused = project(forward, weights, "attn.c_attn", x)
    query, key, value = meta.split(fused, (width, width, width), 2)
    del fused
    key = meta.transpose(meta.view(key, *shape), 1, 2)
    value = meta.transpose(meta.view(value, *shape), 1, 2)
    query = meta.transpose(meta.view(query, *shape), 1, 2)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "attn.c_proj", out)  # what went in is let go first
    return out  # noqa: RET504


def _block(forward: Forward, weights: Weights, x: Tensor) -> Tensor:
    """One block of gpt2."""
    residual = x
    x = apply_layer_norm(forward, weights, "ln_1", x)
    attended = _attention(forward, weights, x)
    x = meta.add(attended, residual)
    residual = x
    x = apply_layer_norm(forward, weights, "ln_2", x)
    fed = plain_mlp(forward, weights, "mlp.c_fc", "mlp.c_proj", x)
    return meta.add(residual, fed)


families.register("gpt2")(Gpt2())
