"""Reading config.json strictly: one value at a time, every refusal names its key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import show
from memfit.records.model import SLIDING, Architecture

# Activations whose saved tensors memfit can size, by Hugging Face's names.
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2")
_SAME_ACTIVATION = {"swish": "silu"}

# Rotary embeddings that keep one vector of frequencies. `dynamic` and `longrope` choose theirs
# while running, by the longest sequence seen.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


MOST = 2**40  # of any size; far beyond what anybody trains
# of what memfit goes through one by one
MOST_PIECES = 10_000
PIECES = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "num_experts",
    "num_local_experts", "n_routed_experts", "n_shared_experts",
)  # fmt: skip


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0; `default` when the key is absent, required without a default."""
    value = config.get(key, default)
    if value is None:
        raise InvalidRequest(
            f"config.json of a `{config.get('model_type')}` model lacks `{key}`",
            hint="is the file complete? Sizes are never guessed",
        )
    if type(value) is not int or value < 1:
        raise InvalidRequest(f"`{key}: {show(value)}` in config.json is not a whole number above 0")
    most = MOST_PIECES if key in PIECES else MOST
    if value > most:
        raise InvalidRequest(
            f"`{key}: {show(value)}` in config.json is above {most}, memfit's most"
        )
    return value


def size_or(config: Mapping[str, Any], key: str, default: int) -> int:
    """The same, where Hugging Face's class reads `null` as its default too."""
    return default if config.get(key) is None else size(config, key)


def whole(config: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number of 0 or more."""
    value = config.get(key, default)
    if type(value) is not int or value < 0:
        raise InvalidRequest(
            f"`{key}: {show(value)}` in config.json is not a whole number from 0 on"
        )
    return value


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"`{key}: {show(value)}` in config.json is not true or false")
    return value


def refuse(config: Mapping[str, Any], key: str, allowed: Iterable[object]) -> None:
    """Refuse a key that is set to something the family's file does not describe."""
    if key in config and config[key] not in allowed:
        raise InvalidRequest(
            f"`{key}: {show(config[key])}` in config.json is not described by memfit's family"
            f" `{config.get('model_type')}`",
            hint="memfit refuses what it would have to guess",
        )


def refuse_other_names(config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse a second name of a key that says something else: Hugging Face's class would obey it.

    names: the second name -> the key.
    """
    for other, key in names.items():
        refuse(config, other, (None, config.get(key)))


def activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """The feed-forward activation, by the name of Hugging Face's `ACT2FN`."""
    name = config.get(key, default)
    name = _SAME_ACTIVATION.get(name, name) if isinstance(name, str) else show(name)
    if name not in ACTIVATIONS:
        raise InvalidRequest(
            f"`{key}: {show(name)}` in config.json is an activation that memfit does not describe",
            hint=f"known: {', '.join(ACTIVATIONS)}",
        )
    return str(name)


def rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary parameters, from `rope_scaling` (old files) or `rope_parameters` (new ones).

    Raises InvalidRequest: a type whose memory depends on data, or one set for each layer type.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or any(
        isinstance(v, Mapping) for v in parameters.values()
    ):
        raise InvalidRequest(
            f"cannot read the rotary parameters in config.json: {show(parameters)}"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise InvalidRequest(
            f"rotary embedding `{kind}` in config.json is one that memfit does not describe",
            hint=f"known: {', '.join(ROPE_TYPES)}",
        )
    return parameters


def rope_by_kind(config: Mapping[str, Any]) -> None:
    """Refuse a kind of block that rotates in a way that memfit does not describe.

    `rope_parameters` holds the parameters of each kind under its name, or one for all.
    """
    parameters = config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"`rope_parameters: {show(parameters)}` in config.json is no mapping")
    nested = {"full_attention", "sliding_attention"} & set(parameters)
    for part in [parameters[key] for key in nested if parameters[key]] if nested else [parameters]:
        rope({**config, "rope_parameters": part})


def whole_head_rotates(config: Mapping[str, Any]) -> None:
    """Refuse partial rotation where Hugging Face's class rotates the whole head."""
    refuse(config, "partial_rotary_factor", (None, 1, 1.0))
    refuse(rope(config), "partial_rotary_factor", (None, 1, 1.0))


def head_size(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Elements of one head: `head_dim`, or the hidden size over the heads."""
    if config.get("head_dim") is not None:
        return size(config, "head_dim")
    if hidden % heads:
        raise InvalidRequest(
            f"config.json: {heads} attention heads do not divide hidden size {hidden}"
        )
    return hidden // heads


def key_value_heads(config: Mapping[str, Any], heads: int, absent: int) -> int:
    """Key-value heads; `absent` without the key, as many as `heads` when it is null."""
    default = heads if "num_key_value_heads" in config else absent
    kv_heads = size_or(config, "num_key_value_heads", default)
    if heads % kv_heads:
        raise InvalidRequest(
            f"config.json: {kv_heads} key-value heads do not divide {heads} attention heads"
        )
    return kv_heads


def read_decoder(
    config: Mapping[str, Any], family: str, *, positions: int, kv_heads: int | None = None,
    head_dim: int | None = None, ffn: int | None = None, tied: bool = False,
    act: tuple[str, str] = ("hidden_act", "silu"),
    rotation: float | Literal["whole", "read"] = "whole",
) -> Architecture:  # fmt: skip
    """What most decoders' config.json names alike; the keywords are the class's own defaults.

    kv_heads: None: as many as heads. head_dim: None: the hidden size over the heads. act: key and
    default. rotation: the share of a head that rotates where the file names none; `whole`: a file
    that names another is refused; `read`: the same, and the caller has read what the file says.

    Raises InvalidRequest: a key that is missing, or that says what memfit does not describe.
    """
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    groups = key_value_heads(config, heads, absent=heads if kv_heads is None else kv_heads)
    if rotation == "whole":
        whole_head_rotates(config)
    if head_dim is None:
        each = head_size(config, hidden, heads)
    else:
        each = size(config, "head_dim", head_dim)
    return Architecture(
        family=family,
        layers=size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=groups,
        head_dim=each,
        ffn=size(config, "intermediate_size", ffn),
        vocab=size(config, "vocab_size"),
        max_sequence=size(config, "max_position_embeddings", positions),
        tied_embeddings=flag(config, "tie_word_embeddings", tied),
        rotary_dim=each if isinstance(rotation, str) else share_of_head(config, each, rotation),
        activation=activation(config, *act),
    )


def share_of_head(config: Mapping[str, Any], head_dim: int, default: float, key: str = "") -> int:
    """Elements of a head that are rotated; the file says a fraction, under an old or new name.

    key: the fraction's name in old files, `partial_rotary_factor` without one.
    """
    old = config.get(key or "partial_rotary_factor", default)
    fraction = rope(config).get("partial_rotary_factor", old)
    number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not number or not 0 < fraction <= 1 or int(head_dim * fraction) < 2:
        raise InvalidRequest(
            f"`{key or 'partial_rotary_factor'}: {show(fraction)}` in config.json rotates no part"
            f" of a head of {head_dim}"
        )
    return int(head_dim * fraction)


def fraction_of(part: int, whole: int) -> float:
    """Return a fraction whose product with `whole` truncates to `part`; 24 / 47 would give 23."""
    exact = part / whole
    return exact if int(whole * exact) == part else (part + 0.5) / whole


def cap(config: Mapping[str, Any], key: str, default: float | None) -> float:
    """What a tanh keeps scores or logits below; 0.0 for `null`, which leaves them alone."""
    value = config.get(key, default)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InvalidRequest(f"`{key}: {show(value)}` in config.json is not a number above 0")
    return float(value)


def cycle(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest cycle that gives all blocks' kinds; empty where none has a name."""
    for length in range(1, len(kinds) + 1):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return tuple(kinds[:length]) if any(kinds) else ()
    return ()


def window(config: Mapping[str, Any], default: int | None) -> int:
    """The sliding window of all layers in tokens; 0 for `null`."""
    absent = config.get("sliding_window", default) is None
    return 0 if absent else size(config, "sliding_window", default)


def windows(config: Mapping[str, Any], layers: int) -> tuple[int, tuple[str, ...]]:
    """The sliding window of Qwen's configs in tokens, 0 where no layer has it; blocks' kinds."""
    kinds = layer_types(config, layers)
    if not flag(config, "use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        return 0, ()
    if kinds is None:
        first = whole(config, "max_window_layers", 28)
        kinds = [SLIDING if layer >= first else "" for layer in range(layers)]
    slides = SLIDING in kinds
    return (size(config, "sliding_window", 4096), cycle(kinds)) if slides else (0, ())


def layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """Blocks' kinds by `layer_types`, `sliding` or none; None where the file does not say."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
        raise InvalidRequest(
            f"`layer_types: {show(kinds)}` in config.json is not a list of the layers' kinds"
        )
    odd = set(kinds) - {"full_attention", "sliding_attention"}
    if odd or len(kinds) != layers:
        raise InvalidRequest(
            f"`layer_types` in config.json holds {sorted(set(kinds))} for {len(kinds)} of"
            f" {layers} layers"
        )
    return [SLIDING if kind == "sliding_attention" else "" for kind in kinds]


def pattern_of_windows(
    config: Mapping[str, Any], layers: int, every: int, key: str = "sliding_window_pattern"
) -> list[str]:
    """Blocks' kinds by `layer_types`, or else all within a window but each `every`th one.

    key: what config.json calls another number than `every`, "" where the class reads none.
    """
    kinds = layer_types(config, layers)
    if kinds is not None:
        return kinds
    every = size(config, key, every) if key else every
    return [SLIDING if (layer + 1) % every else "" for layer in range(layers)]


def layer_types_config(a: Architecture) -> list[str]:
    """The list that `layer_types` reads."""
    window = [a.window(a.kind(layer)) for layer in range(a.layers)]
    return ["sliding_attention" if tokens else "full_attention" for tokens in window]


def window_config(a: Architecture) -> dict[str, Any]:
    """The keys that say what `windows` reads."""
    if not a.sliding_window:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": a.sliding_window,
        "layer_types": layer_types_config(a),
    }
