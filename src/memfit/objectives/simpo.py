"""SimPO (Meng et al. 2405.14734, equation 6): mean log-probabilities, a margin, no reference.

TRL has it as `CPOTrainer` with `loss_type="simpo"` and `cpo_alpha=0`.
"""

from __future__ import annotations

from memfit.objectives import LossType, Objective, objectives
from memfit.objectives.shared.pair_losses import beyond_a_margin

LOSSES = {
    "simpo": LossType(beyond_a_margin, "2405.14734, equation 6", averages=True, smooths=True),
}

objectives.register("simpo")(
    Objective("simpo", about="pairs of answers, by their mean log-probabilities", loss_types=LOSSES)
)
