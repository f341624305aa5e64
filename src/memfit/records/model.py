"""The model before parallelism: what it is made of, in numbers."""

from __future__ import annotations

import re
from functools import cache
from math import prod
from typing import Any, Literal

from memfit.base_formats import stored_tensors
from memfit.records import Record

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1,
    "complex64": 8,
}  # fmt: skip


SLIDING = "sliding"  # a kind of block
LINEAR = "linear"  # a kind of block: linear attention, of which `Linear` says the sizes
SCORE = "score.weight"  # the head of Hugging Face's classes of sequence classification
VALUE_MODEL = "value."  # before the names of a value's own weights, beside those of the policy
REWARD_SCORE = "reward_score.weight"  # the same of a reward model's adapter, beside a value's


# biases and norms, by the names that families give them (transformers' Trainer finds the same by
# names and by the class LayerNorm)
UNDECAYED = re.compile(r"bias|norm|(?:^|\.)ln_")


@cache
def is_decayed(name: str) -> bool:
    """Whether trainers decay a parameter of this name: not biases, and not weights of norms."""
    return UNDECAYED.search(name.lower()) is None


def is_faster(name: str, dims: int) -> bool:
    """Whether LoRA+ gives it the higher rate: B of an adapter, and vectors, as in peft."""
    return "lora_B" in name or dims == 1


class TensorSpec(Record, frozen=True, kw_only=True):
    """Shape and dtype, no data."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    end: bool = False  # of the embedding or the head, which some optimizers treat otherwise
    decays: bool = True  # no bias and no norm; see `is_decayed`
    faster: bool = False  # of what LoRA+ gives a higher rate
    # of a rank's part of a matrix that an update puts together: its shape then, and the buffers
    # that come and go until it is whole (`optimizers.shared.gathered`)
    whole: tuple[int, ...] = ()
    gathers: tuple[tuple[int, ...], ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, before any allocator rounds them."""
        return self.numel * DTYPE_BYTES[self.dtype]


class ModelReference(Record, frozen=True, kw_only=True):
    """Which model: how the user named it, where its weights are, and its config.json."""

    name: str
    source: str  # a hub id or a folder; "" when the weights can only be random
    config: dict[str, Any]  # the content of config.json: `model_type` and what the family reads
    # what reads the last hidden states: "" the language model's own head; "score" one number of a
    # row in its place (`objective: reward`)
    head: Literal["", "score"] = ""

    def __hash__(self) -> int:
        return hash((self.name, self.source))  # dicts have no hash; equal references have this one


class Experts(Record, frozen=True, kw_only=True):
    """A mixture-of-experts feed-forward; `count` 0 where all tokens share a plain one."""

    count: int = 0  # routed experts of a layer
    per_token: int = 0  # of them, those that one token visits
    ffn: int = 0  # width of a routed expert
    shared_ffn: int = 0  # width of the expert that every token visits; 0 = none
    dense_layers: int = 0  # the first layers, which have a plain feed-forward instead
    normalised: bool = False  # whether a token's shares are divided by their sum
    groups: int = 1  # that the experts are divided into
    groups_per_token: int = 1  # of them, those whose experts one token may visit


class Latent(Record, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, 2405.04434); `kv_rank` 0 where there is none."""

    kv_rank: int = 0  # of the compressed keys and values
    query_rank: int = 0  # of the compressed queries; 0 = queries are not compressed
    rotated: int = 0  # elements of a query's head that are rotated
    unrotated: int = 0  # and those that are not
    value: int = 0  # elements of a value's head


CHUNK = 64  # tokens of a chunk of linear attention, the default of Hugging Face's classes


class Linear(Record, frozen=True, kw_only=True):
    """Linear attention by the gated delta rule (2412.06464); `key_heads` 0 where there is none."""

    key_heads: int = 0  # of queries and of keys
    value_heads: int = 0  # and of values, gates and states
    key: int = 0  # elements of a head's query and key
    value: int = 0  # and of its value
    kernel: int = 0  # tokens that the causal convolution before it sees

    @property
    def channels(self) -> int:
        """What the convolution reads of a token: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value


class RowState(Record, frozen=True, kw_only=True):
    """What a layer carries along a row, of a size that does not grow with it.

    `conv`: the last inputs of a causal convolution, (channels, tokens), zeros before the first
    token. `recurrent`: what a recurrence sums up of all tokens.
    """

    name: Literal["conv", "recurrent"]  # as Hugging Face's cache calls it
    shape: tuple[int, ...]  # of a row
    dtype: str = ""  # empty: that of keys and values
    passes: int  # over its bytes that a decoding step makes, reads and writes together

    def nbytes(self, dtype: str) -> int:
        """Bytes of a row's; dtype: of keys and values."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype or dtype]


class Architecture(Record, frozen=True, kw_only=True):
    """A decoder in memfit's words; `families/` translates Hugging Face's names to these."""

    family: str  # = `model_type` of config.json
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_sequence: int
    tied_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    rotary_dim: int = 0  # elements of a head that are rotated; 0 = learned positions, or alibi
    activation: str = "silu"
    # tokens that attention looks back over, in blocks of kind `sliding` where there are such and
    # in all where there are none; 0 = all tokens
    sliding_window: int = 0
    experts: Experts = Experts()
    latent: Latent = Latent()
    linear: Linear = Linear()  # of blocks of kind `linear`
    output_gate: bool = False  # what attention returns is multiplied by a gate, of q's product
    sinks: bool = False  # a learned logit a head that takes attention and gives no value
    # what blocks are, in turn, where their weights do not tell; empty where all are alike
    layer_kinds: tuple[str, ...] = ()
    embedding_size: int = 0  # of the token embeddings and of what the head reads; 0 = hidden
    norm_after: bool = False  # blocks norm what each part has added, not what it reads
    shared_norm: bool = False  # attention and feed-forward, side by side, read one norm
    head_bias: bool = False
    alibi: bool = False  # a bias by distance on the scores, instead of positions (2108.12409)
    logits_scaled: bool = False  # whether logits are divided by a number
    encoder_layers: int = 0  # of an encoder beside the decoder
    attention_cap: float = 0.0  # scores are bent by a tanh to stay below; 0 = they are not
    logit_cap: float = 0.0  # the same of logits
    scores: bool = False  # the head makes one number of a row, and no logits

    def kind(self, layer: int) -> str:
        """The kind of a block, of a cycle that repeats to the last one; empty without kinds."""
        return self.layer_kinds[layer % len(self.layer_kinds)] if self.layer_kinds else ""

    def windowed(self, tokens: int) -> bool:
        """Return whether rows of `tokens` tokens are longer than the sliding window."""
        return 0 < self.sliding_window < tokens

    def banded(self, tokens: int) -> bool:
        """Whether such rows take one mask for all sliding blocks; attention that is written out
        makes its own in each call."""
        return self.windowed(tokens) and not self.attention_cap and not self.sinks

    def window(self, kind: str) -> int:
        """The window of a block of this kind; 0 where it sees all tokens."""
        slides = SLIDING not in self.layer_kinds or kind == SLIDING
        return self.sliding_window if slides else 0

    @property
    def recurrent(self) -> bool:
        """Whether blocks carry a state along a row, which no boundary of a document resets."""
        return self.linear.key_heads > 0

    @property
    def head_input(self) -> int:
        """Elements of what the head reads."""
        return self.embedding_size or self.hidden


class Weight(Record, frozen=True, kw_only=True):
    """One parameter tensor, under the name that Hugging Face's class gives it."""

    name: str
    shape: tuple[int, ...]
    part: str  # embedding | block | norm | head
    layer: int = -1  # index of the block; -1 outside the blocks
    dtype: str = "float32"
    trainable: bool = True
    coding: str = ""  # how it is quantised (`memfit.base_formats`); the shape stays the matrix's

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype, and whether it stands outside the blocks."""
        end = self.part in ("embedding", "head")
        return TensorSpec(
            shape=self.shape, dtype=self.dtype, end=end, decays=is_decayed(self.name),
            faster=is_faster(self.name, len(self.shape)),
        )  # fmt: skip

    @property
    def stored(self) -> dict[str, TensorSpec]:
        """The tensors that hold it, by the names of a torch module's parameters."""
        if not self.coding:
            return {self.name: self.spec}
        module = self.name if self.routed else self.name.rpartition(".")[0]
        return {
            f"{module}.{leaf}": TensorSpec(shape=shape, dtype=dtype)
            for leaf, shape, dtype in stored_tensors(self.coding, self.shape)
        }

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        if self.coding:
            return sum(spec.nbytes for spec in self.stored.values())
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def of_value(self) -> bool:
        """Whether it is a value's own, and no adapter's; see adapters/shared/value_model.py."""
        return self.name.startswith(VALUE_MODEL)

    @property
    def routed(self) -> bool:
        """Whether it holds all routed experts of a layer, of which a token visits a few."""
        return ".experts." in self.name

    @property
    def chooses(self) -> bool:
        """Whether it is a router's matrix, which Hugging Face's classes multiply by themselves."""
        return self.name.endswith((".mlp.gate.weight", ".mlp.router.weight"))


class Model(Record, frozen=True, kw_only=True):
    """An architecture and its parameters; a tied head appears once, as the embedding."""

    name: str
    architecture: Architecture
    weights: tuple[Weight, ...]

    def __hash__(self) -> int:
        """Of what tells models apart quickly: hashing every weight takes a millisecond."""
        return hash((self.name, len(self.weights), self.architecture.layers))

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(w.numel for w in self.weights)

    @property
    def trainable_parameters(self) -> int:
        """Number of parameters that receive a gradient."""
        return sum(w.numel for w in self.weights if w.trainable)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token meets; all of them without experts."""
        return sum(self.active(w) for w in self.weights)

    def active(self, weight: Weight) -> int:
        """Elements of one weight that a token meets."""
        experts = self.architecture.experts
        if not weight.routed:
            return weight.numel
        return weight.numel * experts.per_token // experts.count
