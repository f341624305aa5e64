"""DeepSeek-V2 and -V2-Lite (2405.04434; Hugging Face's `deepseek_v2`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.families.shared.config import flag, refuse
from memfit.families.shared.forward import Embedded, Forward, Weights, embedding, positions
from memfit.families.shared.grouped_experts import read_groups, route_by_softmax
from memfit.families.shared.latent import latent_architecture, latent_config
from memfit.families.shared.latent_forward import LatentFamily, complex_rotation, rotate_complex
from memfit.records.model import Architecture

_DEFAULTS = {
    "max_position_embeddings": 2048, "n_routed_experts": 64, "moe_intermediate_size": 1407,
    "n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GROUPED = "group_limited_greedy"


@final
class DeepseekV2(LatentFamily):
    """Latent attention; softmax scores choose experts within the best groups; one is shared."""

    name = "deepseek_v2"
    lora_targets = ("q_b_proj", "kv_b_proj")
    dropouts = ("attention_dropout",)
    rotate = staticmethod(rotate_complex)
    route = staticmethod(route_by_softmax)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `DeepseekV2Config`."""
        refuse(config, "scoring_func", ("softmax",))
        refuse(config, "norm_topk_prob", (False, None))
        refuse(config, "topk_method", ("greedy", _GROUPED))
        grouped = config.get("topk_method") == _GROUPED
        if not grouped:  # under `greedy`, Hugging Face's class ignores groups
            config = {**config, "n_group": None, "topk_group": None}
        experts = replace(read_groups(config, _DEFAULTS), normalised=False)
        a = latent_architecture(config, self.name, experts, _DEFAULTS)
        if grouped and a.experts.groups == 1:
            raise InvalidRequest(
                f"config.json: `topk_method: {_GROUPED}` with a single group (`n_group`)",
                hint="that is `topk_method: greedy`",
            )
        if a.hidden % a.heads:
            raise InvalidRequest(
                f"config.json: {a.heads} attention heads do not divide hidden size {a.hidden}"
            )
        return replace(a, mlp_bias=flag(config, "mlp_bias", False))

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        method = _GROUPED if a.experts.groups > 1 else "greedy"
        return latent_config(a) | {"topk_method": method, "mlp_bias": a.mlp_bias}

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`."""
        x = embedding(forward, weights["embed_tokens.weight"], forward.input_ids)
        position_ids = positions(forward)
        return Embedded(x, (complex_rotation(forward, position_ids), position_ids), (x,))


families.register("deepseek_v2")(DeepseekV2())
