"""Sizing a model by what has to be served: weights and key-value cache in a stated memory."""

from __future__ import annotations

from memfit.catalog import CatalogModel, models
from memfit.core import units
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.records import Record


class InferenceRequest(Record, frozen=True, kw_only=True):
    """Where the trained model has to run."""

    memory: int  # bytes for weights and cache together
    context: int  # tokens of each sequence
    sequences: int = 1  # served at once
    weight_bytes: float = 2.0  # bytes a parameter
    cache_bytes: float = 2.0  # bytes an element of the cache


def read_inference(
    memory: str, context: int, sequences: int, weight_bytes: float, cache_bytes: float
) -> InferenceRequest | None:
    """A request from texts with units; None where no memory is named."""
    if memory:
        return InferenceRequest(
            memory=units.parse_bytes(memory),
            context=context,
            sequences=sequences,
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
        )
    if context:
        raise InvalidRequest(
            "`context` sizes a model by inference, but no inference memory is given",
            hint="add `inference_memory: 24 GiB`",
        )
    return None


class InferenceSize(Record, frozen=True, kw_only=True):
    """The largest dense model that fits; activations and the runtime's own memory are extra."""

    model: str  # the largest of the catalogue
    parameters: int  # its own
    weight_nbytes: float
    cache_nbytes: float
    largest: float  # parameters that would fit beside a cache of this model's shape
    because: str


def size_by_inference(
    request: InferenceRequest, *, parameters: float | None = None
) -> InferenceSize:
    """The largest dense catalogue model whose weights and cache fit, and the room beside its cache.

    The cache's shape is that model's, exactly (2 x layers x kv_heads x head_dim elements a token);
    nothing is interpolated between shapes. `parameters` are checked against the room. Raises
    InvalidRequest: a figure that is not above 0; DoesNotFit: no model fits, or not `parameters`.
    """
    for name in ("memory", "context", "sequences", "weight_bytes", "cache_bytes"):
        if not getattr(request, name) > 0:
            raise InvalidRequest(f"`{name}: {getattr(request, name)}` of inference is not above 0")
    served = [m for m in models() if is_dense_decoder(m) and m.max_sequence >= request.context]
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
    if parameters is not None and parameters > largest:
        raise DoesNotFit(
            f"{units.show_count(parameters)} parameters need"
            f" {units.show_bytes(parameters * request.weight_bytes)} beside a cache of"
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


def is_dense_decoder(model: CatalogModel) -> bool:
    """Whether every token visits all weights of a model that only decodes."""
    return model.active_parameters is None and model.model_type != "t5"


# Exponents of the loss E + A / parameters^ALPHA + B / tokens^BETA (Hoffmann et al. 2203.15556,
# equation 2) as Besiroglu et al. 2404.10102 fitted them again.
ALPHA, BETA = 0.3478, 0.3658
CHINCHILLA = 20.0  # tokens a parameter where training alone is paid for


def weigh_loss(compute: float, ratio: float) -> float:
    """A / B of the loss for which `ratio` tokens a parameter are compute-optimal here."""
    best = (compute / (6 * ratio)) ** 0.5
    weight: float = BETA * best**ALPHA / (ALPHA * (ratio * best) ** BETA)
    return weight


def split_by_demand(compute: float, demand: float, ratio: float) -> tuple[float, float]:
    """Parameters and tokens of this training compute when `demand` tokens will be served after.

    Of all models of one quality the one whose training and serving together take the fewest FLOP,
    6 x parameters x tokens + 2 x parameters x demand (Sardana et al. 2401.00448, equation 2):
    smaller than the compute-optimal one, and trained longer. ratio: tokens a parameter where
    nothing is served, which stands for A / B and keeps one rule for both answers.
    """
    best = (compute / (6 * ratio)) ** 0.5  # parameters where nothing is served
    weight = weigh_loss(compute, ratio)

    def excess(parameters: float) -> float:
        """What a FLOP of more parameters improves over what one of more tokens does, less one."""
        tokens = compute / (6 * parameters)
        gain: float = ALPHA * weight * parameters**-ALPHA * tokens**BETA
        return gain / BETA - (1 + demand / (3 * tokens))

    low, high = best * 1e-6, best
    for _ in range(200):  # the excess falls with parameters: halve the interval in the logarithm
        middle = (low * high) ** 0.5
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    parameters = (low * high) ** 0.5
    return parameters, compute / (6 * parameters)
