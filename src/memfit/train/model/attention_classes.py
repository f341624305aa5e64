"""Families whose class picks its attention from a table of classes: memfit's stand there too.

Falcon does not ask Hugging Face's `AttentionInterface`; `classes.falcon` keeps its weights and
its rotation, and hands query, key and value to `attend`. StableLM's does ask. These backbones give
a block nothing but what they know, so a hook hands on where documents end.

A family's class is imported for a model of that family alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import


def register_class(family: str, name: str, kernel: SDPBackend) -> None:
    """Put a kernel under its name into a family's table, where the family has one.

    Raises InvalidRequest for GPT-J's class before transformers 5.24: it keeps a table of positions
    in each block, which `families/gptj.py` does not describe.
    """
    if family == "gptj":
        _check_gptj()
    if family == "falcon":
        from memfit.train.model.classes.falcon import TABLE, FalconAttention

        TABLE[name] = type(FalconAttention.__name__, (FalconAttention,), {"kernel": kernel})


def _check_gptj() -> None:
    with quiet_import():
        import transformers
        from transformers.models.gptj import modeling_gptj as gptj
    if hasattr(gptj, "GPTJ_ATTENTION_CLASSES"):
        raise InvalidRequest(
            f"transformers {transformers.__version__} has an older class of `gptj` than the one"
            " that memfit describes, which is that of 5.24",
            hint="pip install --upgrade 'transformers>=5.24'",
        )


def hand_on_documents(backbone: nn.Module, family: str) -> None:
    """Before each forward, pass the documents of its input to such attention classes."""
    kind: type[nn.Module]
    if family == "falcon":
        from memfit.train.model.classes.falcon import FalconAttention

        kind = FalconAttention
    elif family == "stablelm":
        from transformers.models.stablelm.modeling_stablelm import StableLmAttention

        kind = StableLmAttention
    else:
        return
    ours = [m for m in backbone.modules() if isinstance(m, kind)]
    if ours:
        backbone.register_forward_pre_hook(partial(_hand_on, ours), with_kwargs=True)


def _hand_on(classes: list[Any], module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
    del module, inputs
    for attention in classes:  # kept until the next forward: a recomputation needs them too
        attention.documents = named.get("documents")
