"""Sizing a model by what has to be served: weights and key-value cache in a stated memory."""

from __future__ import annotations

from memfit import units
from memfit.catalog import CatalogModel, models
from memfit.errors import DoesNotFit, InvalidRequest
from memfit.nouns import Noun


class InferenceRequest(Noun, frozen=True, kw_only=True):
    """Where the trained model has to run."""

    memory: int  # bytes for weights and cache together
    context: int  # tokens of each sequence
    sequences: int = 1  # served at once
    weight_bytes: float = 2.0  # bytes a parameter
    cache_bytes: float = 2.0  # bytes an element of the cache


class InferenceSize(Noun, frozen=True, kw_only=True):
    """The largest dense model that fits; activations and the runtime's own memory are extra."""

    model: str  # the largest of the catalogue
    parameters: int  # its own
    weight_nbytes: float
    cache_nbytes: float
    largest: float  # parameters that would fit beside a cache of this model's shape
    because: str


def size_by_inference(request: InferenceRequest, *, asked: float | None = None) -> InferenceSize:
    """The largest dense catalogue model whose weights and cache fit, and the room beside its cache.

    The cache's shape is that model's, exactly (2 x layers x kv_heads x head_dim elements a token);
    nothing is interpolated between shapes. `asked` parameters are checked against the room.
    Raises InvalidRequest: a figure that is not above 0; DoesNotFit: no model fits, or not `asked`.
    """
    for name in ("memory", "context", "sequences", "weight_bytes", "cache_bytes"):
        if not getattr(request, name) > 0:
            raise InvalidRequest(f"`{name}: {getattr(request, name)}` of inference is not above 0")
    served = [m for m in models() if _is_dense_decoder(m) and m.max_sequence >= request.context]
    if not served:
        raise InvalidRequest(f"no dense catalogue model reads {request.context:,} tokens")
    fitting = [m for m in served if needs(m, request) <= request.memory]
    if not fitting:
        least = min(served, key=lambda m: needs(m, request))
        raise DoesNotFit(
            f"no model of the catalogue fits: `{least.id}` needs"
            f" {units.show_bytes(needs(least, request))} of {units.show_bytes(request.memory)}",
            hint="give more memory, a shorter context, fewer sequences or fewer bytes a weight",
        )
    best = max(fitting, key=lambda m: m.parameters)
    cache = cache_nbytes(best, request)
    largest = (request.memory - cache) / request.weight_bytes
    if asked is not None and asked > largest:
        raise DoesNotFit(
            f"{units.show_count(asked)} parameters need"
            f" {units.show_bytes(asked * request.weight_bytes)} beside a cache of"
            f" {units.show_bytes(cache)}, but {units.show_bytes(request.memory)} are given",
            hint=f"up to {units.show_count(largest)} parameters fit",
        )
    return InferenceSize(
        model=best.id,
        parameters=best.parameters,
        weight_nbytes=best.parameters * request.weight_bytes,
        cache_nbytes=cache,
        largest=largest,
        because=f"{units.show_bytes(request.memory)} less {units.show_bytes(cache)} of cache"
        f" ({request.sequences} x {request.context:,} tokens in the shape of `{best.id}`), at"
        f" {request.weight_bytes:g} bytes a parameter",
    )


def needs(model: CatalogModel, request: InferenceRequest) -> float:
    """Bytes of weights and cache."""
    return model.parameters * request.weight_bytes + cache_nbytes(model, request)


def cache_nbytes(model: CatalogModel, request: InferenceRequest) -> float:
    """Bytes of the key-value cache with every sequence at full context."""
    tokens = request.sequences * request.context
    return model.kv_elements_per_token * tokens * request.cache_bytes


def _is_dense_decoder(model: CatalogModel) -> bool:
    return model.active_parameters is None and model.model_type != "t5"
