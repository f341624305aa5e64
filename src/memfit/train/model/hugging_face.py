"""Where memfit touches Hugging Face's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from memfit.core.libraries import quiet_import
from memfit.families import family_of, without_dropout
from memfit.records.model import REWARD_SCORE, SCORE
from memfit.records.recipe import Recipe
from memfit.train.model.attention import BACKENDS, register_attention
from memfit.train.model.attention_classes import hand_on_documents, register_class
from memfit.train.model.classes.linear_attention import use_torchs_code
from memfit.train.model.experts import register_experts

with quiet_import():
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedModel,
    )
    from transformers.initialization import no_init_weights


# Modules with weights that run before the first block: OPT's, BLOOM's.
ENTRY = ("project_in", "word_embeddings_layernorm")


@dataclass(frozen=True, slots=True)
class Parts:
    """The places of a causal language model that memfit needs to reach."""

    base: nn.Module  # the whole model, without what an adapter wrapped around it
    backbone: nn.Module  # (batch, tokens) -> (batch, tokens, hidden), final norm included
    embedding: nn.Module
    blocks: nn.ModuleList
    entry: tuple[nn.Module, ...]  # between the embeddings and the first block
    norms: tuple[nn.Module, ...]  # after the last block
    head: nn.Module  # hidden -> vocab, or a score


def bare_model(recipe: Recipe) -> PreTrainedModel:
    """Hugging Face's class on the meta device, in fp32, with memfit's attention and experts.

    A class with a bias by distance (alibi) keeps its own: no kernel of memfit's knows the bias.
    """
    config = AutoConfig.for_model(**without_dropout(recipe.model))
    if (config.pad_token_id or 0) >= config.vocab_size:
        config.pad_token_id = None  # a class's default may name a row that a small table lacks
    name = register_attention(recipe.attention)
    if recipe.attention in BACKENDS:
        register_class(config.model_type, name, BACKENDS[recipe.attention])
    a = family_of(recipe.model).architecture(recipe.model.config)
    if a.alibi:
        name = "eager"
    scores = recipe.model.head == "score"
    if scores:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():  # random numbers on meta take half of its time
        model = kind.from_config(
            config,
            attn_implementation=name,
            experts_implementation=register_experts(),
            dtype=torch.float32,
        )
    if a.recurrent:
        use_torchs_code(model)
    model.tie_weights()  # which belongs to what is left out
    # With it set, GPT-2 compares the batch with the padding token at every forward: a read-back
    # from the device that changes nothing.
    model.config.pad_token_id = None
    hand_on_documents(getattr(model, model.base_model_prefix), config.model_type)
    return cast(PreTrainedModel, model)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Hugging Face's own module, inside whatever the adapter wrapped around it."""
    inner = getattr(model, "get_base_model", None)
    return cast(PreTrainedModel, inner() if inner else model)


def parts(model: nn.Module) -> Parts:
    """Backbone, blocks and head of the module, with or without an adapter around it."""
    base = base_model(model)
    backbone = cast(nn.Module, getattr(base, base.base_model_prefix))
    backbone = cast(nn.Module, getattr(backbone, "decoder", backbone))  # OPT wraps its own
    blocks = next(child for child in backbone.children() if isinstance(child, nn.ModuleList))
    others = {
        name: child
        for name, child in backbone.named_children()
        if not isinstance(child, nn.Embedding)
        and any(True for _ in child.parameters(recurse=False))
    }
    entry = tuple(others.pop(name) for name in ENTRY if name in others)
    embedding = cast(nn.Module, base.get_input_embeddings())
    head = cast(nn.Module, base.get_output_embeddings() or getattr(base, "score", None))
    return Parts(base, backbone, embedding, blocks, entry, tuple(others.values()), head)


def score_head(model: nn.Module) -> nn.Module:
    """The head of one number, which a reward model has in place of the language model's own and a
    value has beside it."""
    return cast(nn.Module, getattr(base_model(model), SCORE.partition(".")[0]))


def reward_head(model: nn.Module) -> nn.Module:
    """The head of one number of a reward model's adapter."""
    return cast(nn.Module, getattr(base_model(model), REWARD_SCORE.partition(".")[0]))


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds beside the parameters, such as corrections of a router."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in base_model(model).named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
