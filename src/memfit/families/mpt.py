"""MPT (MosaicML 2023; Hugging Face's `mpt`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import show
from memfit.families import families
from memfit.families.shared.alibi import causal_mask, hold_until_next
from memfit.families.shared.attention_class import AttentionClass
from memfit.families.shared.config import flag, head_size, refuse, refuse_other_names, size
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Weights,
    apply_layer_norm,
    embedding,
    keep,
    module,
    project,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import Rows, decoder, linear
from memfit.meta import Tensor
from memfit.meta.layers import lean
from memfit.records.model import Architecture, Weight

# What Hugging Face's class computes whatever `attn_config` says, or not at all.
DESCRIBED: dict[str, tuple[object, ...]] = {
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "clip_qkv": (None, 0),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
}

OTHER_NAMES = {
    "hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
}  # fmt: skip


@final
class Mpt(Decoder):
    """No biases, LayerNorm of a scale alone, a bias by distance, the class's own attention."""

    name = "mpt"
    lean = True
    attention_class = AttentionClass(only_eager=True)
    lora_targets = ("Wqkv",)
    dropouts = ("resid_pdrop", "emb_pdrop")
    norm = staticmethod(apply_layer_norm)
    last_norm = "norm_f"
    ends = True  # the bias is a table of all distances

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `MptConfig`."""
        refuse_other_names(config, OTHER_NAMES)
        hidden, heads = size(config, "d_model"), size(config, "n_heads")
        refuse(config, "head_dim", (None,))
        refuse(config, "no_bias", (True,))
        refuse(config, "expansion_ratio", (4,))
        refuse(config, "logit_scale", (None,))
        attention = config.get("attn_config") or {}
        if not isinstance(attention, Mapping):
            raise InvalidRequest(f"`attn_config: {show(attention)}` in config.json is no mapping")
        for key, values in DESCRIBED.items():
            refuse({"model_type": self.name, **attention}, key, values)
        refuse({"model_type": self.name, **attention}, "attn_pdrop", (0, None))
        return Architecture(
            family=self.name,
            layers=size(config, "n_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=head_size(config, hidden, heads),
            ffn=4 * hidden,
            vocab=size(config, "vocab_size"),
            max_sequence=size(config, "max_seq_len", 2048),
            tied_embeddings=flag(config, "tie_word_embeddings", True),
            activation="gelu",
            alibi=True,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return {
            "model_type": self.name,
            "vocab_size": a.vocab,
            "d_model": a.hidden,
            "n_layers": a.layers,
            "n_heads": a.heads,
            "max_seq_len": a.max_sequence,
            "tie_word_embeddings": a.tied_embeddings,
            **dict.fromkeys(self.dropouts, 0.0),
            "use_cache": False,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        width = a.hidden
        rows: Rows = [("norm_1.weight", (width,))]
        rows += linear("attn.Wqkv", 3 * width, width, False)
        rows += linear("attn.out_proj", width, width, False)
        rows += [("norm_2.weight", (width,))]
        rows += linear("ffn.up_proj", a.ffn, width, False)
        rows += linear("ffn.down_proj", width, a.ffn, False)
        return decoder(
            a, rows, root="transformer", entry=[("wte.weight", (a.vocab, width))], blocks="blocks",
            end=[("norm_f.weight", (width,))],
        )  # fmt: skip

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`; all blocks share the bias, in fp32, and the mask, of booleans."""
        a, meter = forward.architecture, forward.meter
        x = embedding(forward, weights["wte.weight"], forward.input_ids)
        counted = meta.empty(meter, (1, 1, 1, a.max_sequence), "int32")
        bias = meta.empty(meter, (a.heads, 1, a.max_sequence), "float32")
        del counted
        mask = causal_mask(forward, x.dtype)
        mask = meta.empty(meter, mask.shape, "bool")
        return Embedded(x, (bias, mask), (x,))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        normed, residual = apply_layer_norm(forward, weights, "norm_1", x), x
        attended, chances = _attention(forward, weights, normed, shared)
        x = meta.add(attended, residual)
        normed, residual = apply_layer_norm(forward, weights, "norm_2", x), x
        out = _mlp(forward, weights, normed, residual)
        hold_until_next(forward, chances)
        return out


@module
def _attention(
    forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The class's own code: scores for every pair of tokens, and what it returns of them."""
    a, (bias, mask), width = forward.architecture, shared, x.shape[-1]
    fused = project(forward, weights, "attn.Wqkv", x)
    shape = (*x.shape[:-1], a.heads, a.head_dim)
    query, key, value = (
        meta.transpose(meta.view(part, *shape), 1, 2)
        for part in meta.split(fused, (width, width, width), 2)
    )
    key, value = keep(forward, key, value)
    scores = meta.scale(meta.multiply_heads(query, meta.transpose(key, 2, 3)))
    near = bias.viewed((a.heads, 1, forward.reach), bias.strides)
    scores = meta.add(scores, near)
    scores = meta.fill_masked(scores, mask)
    chances = meta.cast(meta.softmax(meta.cast(scores, "float32")), value.dtype)
    context = meta.multiply_heads(chances, value)
    context = meta.contiguous(meta.transpose(context, 1, 2))
    out = project(forward, weights, "attn.out_proj", meta.view(context, *x.shape))
    return out, chances


@module
def _mlp(forward: Forward, weights: Weights, x: Tensor, residual: Tensor) -> Tensor:
    x = _gelu(forward, project(forward, weights, "ffn.up_proj", x))
    fed = project(forward, weights, "ffn.down_proj", x)
    return meta.add(fed, residual)


@module
def _gelu(forward: Forward, x: Tensor) -> Tensor:
    return lean.activation(x) if "mlp" in forward.lean else meta.gelu(x)


families.register("mpt")(Mpt())
