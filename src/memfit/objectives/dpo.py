"""Direct preference optimisation (Rafailov et al. 2305.18290) and its variants, by TRL's names."""

from __future__ import annotations

from memfit.objectives import LossType, Objective, objectives
from memfit.objectives.shared import pair_losses as of

LOSSES = {
    "sigmoid": LossType(of.sigmoid, "2305.18290, equation 7", smooths=True),
    "sigmoid_norm": LossType(
        of.sigmoid, "2305.18290, equation 7, of means (2411.15124, section 5.1)",
        averages=True, smooths=True,
    ),
    "hinge": LossType(of.hinge, "2309.06657, equation 10"),
    "ipo": LossType(of.ipo, "2310.12036, equation 17, of means", averages=True),
    "robust": LossType(of.robust, "2403.00409, equation 12", smooths=True),
    "exo_pair": LossType(of.exo_pair, "2402.00856, equation 16", smooths=True,
                         needs_smoothing=True),
    "nca_pair": LossType(of.nca_pair, "2402.05369, equation 11"),
    "bco_pair": LossType(of.bco_pair, "2404.04656, equation 14, without its shift"),
    "sppo_hard": LossType(of.sppo_hard, "2405.00675, equation 4.7, with P of 1 and 0"),
    "apo_zero": LossType(of.apo_zero, "2408.06266, equation 7"),
    "apo_down": LossType(of.apo_down, "2408.06266, equation 8"),
    "discopop": LossType(of.discopop, "2406.08414, equation 5"),
}  # fmt: skip
SORTED = "it sorts the ratios of a micro-batch: what is learned would depend on how it is cut"
REFUSED = {
    "aot": SORTED,
    "aot_unpaired": SORTED,
    "sft": "it is a loss of the chosen answers' tokens, which `objective: sft` learns",
}

objectives.register("dpo")(
    Objective("dpo", about="pairs of answers", refers=True, loss_types=LOSSES, refused=REFUSED)
)
