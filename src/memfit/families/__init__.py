"""Model families, one file each, named by Hugging Face's model_type.

A family is declared once and used three times: the planner sizes its weights, the tracer checks
them, the trainer builds its class. Built from shared functions (`_config`, `_weights`), never by
subclassing another family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest, UnknownName, did_you_mean
from memfit.core.registry import Registry
from memfit.families.shared.attention_class import AttentionClass
from memfit.families.shared.weights import rotary_buffers
from memfit.records.model import (
    SCORE,
    Architecture,
    Model,
    ModelReference,
    RowState,
    TensorSpec,
    Weight,
)

if TYPE_CHECKING:
    from memfit.families.shared.forward import Embedded, Forward, Weights
    from memfit.meta import Tensor


class Described(ABC):
    """What memfit knows of the weights of one `model_type`."""

    name: ClassVar[str]  # = `model_type` of config.json

    @abstractmethod
    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Translate config.json; absent keys take the defaults of Hugging Face's class.

        Raises InvalidRequest naming the key: a size is missing or is not a number, or the file
        asks for something that this family's file does not describe.
        """

    @abstractmethod
    def config(self, a: Architecture) -> dict[str, Any]:
        """The config.json of an architecture: what `AutoConfig.for_model(**config)` takes.

        Dropout and the key-value cache are off, as in every step of memfit's.
        """

    @abstractmethod
    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """Every parameter: names, shapes and order of Hugging Face's class; no tied head."""


class Family(Described):
    """A decoder that memfit plans and trains; instances are registered in `families`."""

    lora_targets: ClassVar[tuple[str, ...]]  # query and value projections, last parts of names
    dropouts: ClassVar[tuple[str, ...]]  # keys of config.json that hold a dropout probability
    # `model_type` of configs that hold one of this family as `text_config`, beside a vision tower's
    text_of: ClassVar[str] = ""
    # how names of weights begin that published files hold and the class has no module for
    unread: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[bool] = False  # whether nothing stands at positions past `max_sequence`

    # What a class can do, or does otherwise than most. The tests prove each of every family that
    # declares it; a family that declares nothing is refused the technique by name.
    lean: ClassVar[bool] = False  # one feed-forward behind a norm, as `memfit.train.lean` has it
    compiles: ClassVar[bool] = False  # a block can be compiled as a whole
    shares_products: ClassVar[bool] = False  # ranks can share products, rows and stages
    liger: ClassVar[bool] = False  # Liger-Kernel's operations take the place of the block's own
    windows: ClassVar[bool] = False  # the class tells attention its sliding window
    hands_on_documents: ClassVar[bool] = True  # the backbone hands blocks what it is given
    plain_linears: ClassVar[bool] = True  # projections are `nn.Linear`
    norm_after_blocks: ClassVar[bool] = False  # a norm reads what the last product makes
    attention_class: ClassVar[AttentionClass] = AttentionClass()
    packed_as: ClassVar[tuple[str, ...]] = ()  # `quant_method` of published files that are read
    scored: ClassVar[bool] = True  # transformers has a class of sequence classification
    # modules of a block that make the gates of its states, by their names in the block: where one
    # makes minus infinity, a token writes nothing to the states and lets nothing of them fade
    state_gates: ClassVar[tuple[str, ...]] = ()

    def default_targets(self, a: Architecture) -> tuple[str, ...]:
        """Return LoRA's default targets: `lora_targets`, as this architecture names them."""
        del a
        return self.lora_targets

    def states(self, a: Architecture, kind: str) -> tuple[RowState, ...]:
        """What a block of this kind carries along a row, in place of keys and values; () those."""
        del a, kind
        return ()

    def drawn(self, a: Architecture) -> int:
        """Bytes of the largest tensor, beside the weight itself, in which Hugging Face's class
        draws random numbers; 0 where it draws in place."""
        del a
        return 0

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """Tensors that the module holds beside its parameters: rotary frequencies, mostly."""
        return rotary_buffers(a) if a.rotary_dim else ()

    @abstractmethod
    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """What enters the first block, and what the module holds beside it.

        With `block` and `finish`, the backbone's forward over `memfit.meta`: it holds what
        Hugging Face's class holds. `weights` are named as in the block, or in the backbone.
        """

    @abstractmethod
    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """One block: (batch, tokens, hidden) -> the same; shared: `Embedded.shared` of `embed`."""

    @abstractmethod
    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """The final norm: what the head, or the loss, receives."""


families: Registry[Family] = Registry("model family", "memfit.families")
references: Registry[Described] = Registry("model family", "memfit.families")  # counted alone

# Published under a name of its own, built by another type's class (so says the model's own guide).
SAME_CLASS = {"kimi_k2": "deepseek_v3"}


def find_family(model_type: str, *, of: str = "") -> Family:
    """The family of a `model_type`; UnknownName lists the supported ones and names model `of`."""
    try:
        return families.find(model_type)
    except UnknownName as error:
        known = families.names()
        if model_type in references.names():
            raise InvalidRequest(
                f"memfit counts the parameters of `{of or model_type}`, but plans and trains"
                f" decoders, and a `{model_type}` has an encoder too",
                hint=f"supported: {', '.join(known)}",
            ) from None
        near = did_you_mean(model_type, known)
        error.message = f"memfit does not describe the model family `{model_type}`"
        error.message += f" of `{of}`" if of else ""
        error.hint = (f"did you mean {near}? " if near else "") + f"supported: {', '.join(known)}"
        raise


def families_that(ability: str) -> tuple[str, ...]:
    """The names of all families that declare an ability of `Family`, such as `lean`."""
    return tuple(name for name in families.names() if getattr(families.find(name), ability))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model alone, where a config describes a vision tower, too, and a
    family says that it is such a model's text part; else the config itself."""
    text, outer = config.get("text_config"), config.get("model_type")
    if not isinstance(text, Mapping):
        return config
    for name in families.names():
        if families.find(name).text_of == outer:
            tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
            return {**tied, **text, "model_type": name}
    return config


def find_described(model_type: str, *, of: str = "") -> Described:
    """The family of a `model_type`, or what memfit knows of the weights of one that it only counts.

    Raises UnknownName as `find_family` does.
    """
    try:
        return families.find(model_type)
    except UnknownName:
        if model_type in references.names():
            return references.find(model_type)
    return find_family(model_type, of=of)


def family_of(reference: ModelReference) -> Family:
    """The family that a reference's config.json names.

    Raises InvalidRequest: no `model_type`; UnknownName: a family without a file.
    """
    model_type = reference.config.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidRequest(
            f"config.json of `{reference.name}` has no `model_type`",
            hint=f"memfit reads these: {', '.join(families.names())}",
        )
    return find_family(SAME_CLASS.get(model_type, model_type), of=reference.name)


@lru_cache(maxsize=256)
def read_model(reference: ModelReference) -> Model:
    """The model that a config.json describes, all weights trainable fp32.

    Raises InvalidRequest or UnknownName, naming the key or the family that is not described.
    """
    family = family_of(reference)
    stored = reference.config.get("quantization_config")
    if stored and not (isinstance(stored, dict) and stored.get("quant_method") in family.packed_as):
        raise InvalidRequest(
            f"the weights of `{reference.name}` are stored quantised (`quantization_config`)",
            hint="name the model that they were quantised from",
        )
    architecture = family.architecture(reference.config)
    weights = family.weights(architecture)
    model = Model(name=reference.name, architecture=architecture, weights=weights)
    return _scored(model, family) if reference.head == "score" else model


def _scored(model: Model, family: Family) -> Model:
    """The model with a score of a row in place of its head, as Hugging Face's class has it."""
    if not family.scored:
        raise InvalidRequest(
            f"transformers has no class of sequence classification for `{model.name}`"
            f" (`{family.name}`), which a reward model would be loaded as",
            hint=f"families that have one: {', '.join(families_that('scored'))}",
        )
    a = model.architecture
    score = Weight(name=SCORE, shape=(1, a.head_input), part="head")
    architecture = replace(
        a, tied_embeddings=False, head_bias=False, logits_scaled=False, logit_cap=0.0, scores=True
    )
    rows = tuple(w for w in model.weights if w.part != "head")
    return replace(model, architecture=architecture, weights=(*rows, score))


def without_dropout(reference: ModelReference) -> dict[str, Any]:
    """The config.json of memfit's step: every dropout 0 and no key-value cache.

    A dropout saves one mask a call, which no ledger here holds; the trainer builds from this.
    """
    family = family_of(reference)
    off = dict.fromkeys(family.dropouts, 0.0)
    return {**reference.config, **off, "model_type": family.name, "use_cache": False}
