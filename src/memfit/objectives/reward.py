"""A reward model: a score of each answer, the preferred one's above the other's.

TRL has it as `RewardTrainer`, whose `center_rewards_coefficient` is `preference.center`.
"""

from __future__ import annotations

from memfit.objectives import LossType, Objective, objectives
from memfit.objectives.shared.pair_losses import bradley_terry

LOSSES = {"bradley_terry": LossType(bradley_terry, "2203.02155, equation 1")}

objectives.register("reward")(
    Objective(
        "reward", about="pairs of answers, by a score of each", scores=True, loss_types=LOSSES
    )
)
