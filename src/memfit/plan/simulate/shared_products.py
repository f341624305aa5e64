"""memfit's step on ranks that share each product, with sizes only: `parallelism.tensor`'s styles.

Between products a rank has its share of every row's tokens, (batch, tokens / tp, hidden); within
them its heads, its part of the feed-forward, its part of the vocabulary.
"""

from __future__ import annotations

from functools import partial

from memfit import meta
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Turn,
    Weights,
    find_bends,
    gated_attention,
    gated_mlp,
    module,
    positions,
    project,
    rms_norm,
    rotation,
    with_noise,
    within,
)
from memfit.meta import Tensor
from memfit.meta.distributed import tensor_parallel
from memfit.records import Record


class SharedProducts(Record, frozen=True, kw_only=True):
    """The `Program` of `tp` ranks: the blocks of llama, mistral, qwen2 and qwen3."""

    tp: int

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """Token embeddings of the rank's tokens; positions are those of all."""
        places = positions(forward)
        x = with_noise(forward, _embedding(forward, weights["embed_tokens.weight"], self.tp))
        cosines, sines = rotation(forward, x.dtype, places)
        return Embedded(x, (cosines, sines, places), (x,))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """As `gated_block`: (batch, tokens / tp, hidden) -> the same."""
        residual = x
        x = rms_norm(forward, weights["input_layernorm.weight"], x)
        x = _attention(forward, weights, x, (shared[0], shared[1]), self.tp)
        x = meta.add(residual, x)
        residual = x
        x = rms_norm(forward, weights["post_attention_layernorm.weight"], x)
        x = _mlp(forward, weights, x, self.tp)
        return meta.add(residual, x)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """The final norm: (batch, tokens / tp, hidden) -> (batch, tokens, hidden)."""
        return _last_norm(forward, weights["norm.weight"], x, self.tp)

    def loss(self, forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
        """The plain loss over logits (tokens, vocab / tp), or a regularised one."""
        if forward.regularisation.bends:
            logits = _logits(forward, weights, hidden)
            return tensor_parallel.bent_mean_cut(logits, find_bends(forward))
        return meta.scale(_sum(forward, weights, hidden, labels))


@module
def _embedding(forward: Forward, weight: Tensor, tp: int) -> Tensor:
    def run() -> Tensor:
        return tensor_parallel.gather_rows_cut(weight, forward.input_ids, tp)

    return within(forward.embeds, run)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Turn, tp: int) -> Tensor:
    """Of this rank's heads."""
    x = tensor_parallel.gather_tokens(x, tp)
    return gated_attention(forward, weights, x, turn, partial(_summed, tp=tp))


@module
def _mlp(forward: Forward, weights: Weights, x: Tensor, tp: int) -> Tensor:
    """Of this rank's part of its width."""
    x = tensor_parallel.gather_tokens(x, tp)
    return gated_mlp(forward, weights, x, last=partial(_summed, tp=tp))


@module
def _summed(forward: Forward, weights: Weights, name: str, x: Tensor, *, tp: int) -> Tensor:
    return project(forward, weights, name, x, lambda part: tensor_parallel.sum_tokens(part, tp))


@module
def _last_norm(forward: Forward, weight: Tensor, x: Tensor, tp: int) -> Tensor:
    x = rms_norm(forward, weight, x, feeds=False)
    return tensor_parallel.gather_tokens(x, tp, alike=forward.architecture.scores)


def _sum(forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = meta.cast(_logits(forward, weights, hidden), "float32")
    return tensor_parallel.cross_entropy_sum_cut(logits, labels)


def _logits(forward: Forward, weights: Weights, hidden: Tensor) -> Tensor:
    flat = meta.view(hidden, forward.batch * forward.tokens, hidden.shape[-1])
    logits = project(forward, weights, "lm_head", flat)
    del flat
    if forward.tail is not None:
        forward.tail.leave(logits)
    return logits
