"""ORPO (Hong et al. 2403.07691): the preferred conversation is learned, and the odds of its answer.

TRL has it as `ORPOTrainer`, whose cross-entropy is of the preferred prompt and answer, and whose
`beta` is the weight of the odds ratio.
"""

from __future__ import annotations

from memfit.objectives import LossType, Objective, objectives
from memfit.objectives.shared.pair_losses import odds_ratio

LOSSES = {"orpo": LossType(odds_ratio, "2403.07691, equation 7", averages=True)}

objectives.register("orpo")(
    Objective(
        "orpo", about="the preferred conversations, and the odds of their answers",
        learns="conversations", weight=1.0, loss_types=LOSSES,
    )
)  # fmt: skip
