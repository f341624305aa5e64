"""RLOO (Ahmadian et al. 2402.14740): REINFORCE with the mean of a group's others as baseline."""

from __future__ import annotations

from memfit.objectives import Objective, Sampled, objectives

objectives.register("rloo")(
    Objective(
        "rloo", about="rewards of sampled answers, less the mean of the others",
        sampled=Sampled(num_generations=2, beta=0.05),
    )
)  # fmt: skip
