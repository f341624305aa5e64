"""CPO (Xu et al. 2401.08417, equation 3): pairs without a reference, and the preferred answers.

TRL has it as `CPOTrainer`, whose `cpo_alpha` is `preference.cross_entropy`.
"""

from __future__ import annotations

from memfit.objectives import LossType, Objective, objectives
from memfit.objectives.shared import pair_losses as of

LOSSES = {
    "sigmoid": LossType(of.sigmoid, "2401.08417, equation 3", smooths=True),
    "hinge": LossType(of.hinge, "2309.06657, equation 10"),
    "ipo": LossType(of.ipo, "2310.12036, equation 17, of means", averages=True),
    "simpo": LossType(of.beyond_a_margin, "2405.14734, equation 6", averages=True, smooths=True),
}
REFUSED = {"alphapo": "its rewards are powers of probabilities, which no step here computes"}

objectives.register("cpo")(
    Objective(
        "cpo", about="pairs of answers without a reference, and the preferred ones",
        learns="answers", loss_types=LOSSES, refused=REFUSED,
    )
)  # fmt: skip
