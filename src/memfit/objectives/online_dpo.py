"""Online DPO (Guo et al. 2402.04792): pairs are sampled while training, and rewards order them.

The losses are DPO's, of sums over an answer's tokens: TRL's `OnlineDPOTrainer` takes no means for
ipo, as its `DPOTrainer` does.
"""

from __future__ import annotations

from memfit.objectives import LossType, Objective, Sampled, objectives
from memfit.objectives.shared import pair_losses as of

LOSSES = {
    "sigmoid": LossType(of.sigmoid, "2305.18290, equation 7"),
    "ipo": LossType(of.ipo, "2310.12036, equation 17, of sums"),
}

objectives.register("online_dpo")(
    Objective(
        "online_dpo", about="pairs of sampled answers, ordered by their rewards",
        sampled=Sampled(num_generations=2, beta=0.1, temperature=0.9, pair_losses=LOSSES),
    )
)  # fmt: skip
