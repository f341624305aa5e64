"""KTO (Ethayarajh et al. 2402.01306): answers that are desirable or not, each by itself.

An answer's reward is compared with z0, the KL divergence of the policy from the reference, which is
estimated from answers to other prompts: one a row of the micro-batch, so that the micro-batch is a
part of what is learned. TRL has both losses as `KTOTrainer`.
"""

from __future__ import annotations

from memfit.objectives import LossType, Objective, objectives
from memfit.objectives.shared.rated_losses import beyond_a_baseline

LOSSES = {
    "kto": LossType(beyond_a_baseline, "2402.01306, equation 8", mismatches=True),
    "apo_zero_unpaired": LossType(beyond_a_baseline, "2408.06266, equation 7, of single answers"),
}

objectives.register("kto")(
    Objective(
        "kto", about="answers that are desirable or not", refers=True, rated=True, loss_types=LOSSES
    )
)
