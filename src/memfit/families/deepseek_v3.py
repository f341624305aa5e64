"""DeepSeek-V3 and -R1 (2412.19437), Kimi-K2 (2507.20534; Hugging Face's `deepseek_v3`).

Multi-token prediction layers lie in published checkpoints (`num_nextn_predict_layers`), but
Hugging Face's class neither builds nor trains them: no count here includes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit.families import families
from memfit.families.shared.config import refuse
from memfit.families.shared.grouped_experts import (
    check_pairs,
    read_groups,
    route_by_sigmoid,
    router_biases,
)
from memfit.families.shared.latent import latent_architecture, latent_config
from memfit.families.shared.latent_forward import LatentFamily, rotate_pairs
from memfit.families.shared.weights import rotary_buffers
from memfit.records.model import Architecture, TensorSpec

_DEFAULTS = {
    "max_position_embeddings": 4096, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "n_group": 8, "topk_group": 4,
}  # fmt: skip


@final
class DeepseekV3(LatentFamily):
    """Latent attention; experts chosen by sigmoid scores with a correction, and a shared one."""

    name = "deepseek_v3"
    lora_targets = ("q_b_proj", "kv_b_proj")
    dropouts = ("attention_dropout",)
    rotate = staticmethod(rotate_pairs)
    route = staticmethod(route_by_sigmoid)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `DeepseekV3Config`."""
        refuse(config, "scoring_func", ("sigmoid",))
        refuse(config, "topk_method", ("noaux_tc",))
        refuse(config, "norm_topk_prob", (True,))
        refuse(config, "rope_interleave", (True,))
        experts = read_groups(config, _DEFAULTS)
        check_pairs(experts)
        return latent_architecture(config, self.name, experts, _DEFAULTS)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return latent_config(a) | {"norm_topk_prob": True, "num_nextn_predict_layers": 0}

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`."""
        return rotary_buffers(a) + router_biases(a)


families.register("deepseek_v3")(DeepseekV3())
