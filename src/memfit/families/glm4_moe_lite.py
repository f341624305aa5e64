"""GLM-4.7-Flash (Z.ai, 2026; Hugging Face's `glm4_moe_lite`).

Layers that predict further tokens (`num_nextn_predict_layers`) are not part of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import show
from memfit.families import families
from memfit.families.shared.config import refuse, size
from memfit.families.shared.grouped_experts import (
    check_pairs,
    read_groups,
    route_by_sigmoid,
    router_biases,
)
from memfit.families.shared.latent import (
    latent_architecture,
    latent_config,
)
from memfit.families.shared.latent_forward import LatentFamily, rotate_pairs
from memfit.families.shared.weights import rotary_buffers
from memfit.records.model import Architecture, TensorSpec

_DEFAULTS = {
    "max_position_embeddings": 202752, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
# `Glm4MoeLiteConfig`'s own, where DeepSeek-V3's class has others
_HEADS = {"q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192}


@final
class Glm4MoeLite(LatentFamily):
    """DeepSeek-V3's latent attention with GLM's experts in all blocks but the first."""

    name = "glm4_moe_lite"
    scored = False
    lora_targets = ("q_b_proj", "kv_b_proj")
    dropouts = ("attention_dropout",)
    rotate = staticmethod(rotate_pairs)
    route = staticmethod(route_by_sigmoid)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Glm4MoeLiteConfig`."""
        refuse(config, "norm_topk_prob", (True,))
        refuse(config, "rope_interleave", (True,))
        refuse(config, "topk_method", (None, "noaux_tc"))
        dense = _dense_layers(config)
        refuse(config, "first_k_dense_replace", (None, dense))
        stated = {**_DEFAULTS, **_HEADS, **config, "first_k_dense_replace": dense}
        experts = read_groups(stated, _DEFAULTS)
        check_pairs(experts)
        return latent_architecture(stated, self.name, experts, _DEFAULTS)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        stated = latent_config(a)
        dense = stated.pop("first_k_dense_replace")
        kinds = ["dense"] * dense + ["sparse"] * (a.layers - dense)
        return stated | {"norm_topk_prob": True, "mlp_layer_types": kinds}

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`."""
        return rotary_buffers(a) + router_biases(a)


def _dense_layers(config: Mapping[str, Any]) -> int:
    """The first layers, which have no experts: by `mlp_layer_types`, or one."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return 1
    layers = size(config, "num_hidden_layers")
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise InvalidRequest(
            f"`mlp_layer_types: {show(kinds)}` in config.json is not `dense` for the first of"
            f" {layers} layers and `sparse` for the others"
        )
    return dense


families.register("glm4_moe_lite")(Glm4MoeLite())
