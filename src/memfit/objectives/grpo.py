"""GRPO (Shao et al. 2402.03300): a group's sampled answers are compared by their rewards."""

from __future__ import annotations

from memfit.objectives import Objective, Sampled, objectives

objectives.register("grpo")(
    Objective(
        "grpo", about="rewards of sampled answers, within a group",
        sampled=Sampled(num_generations=8, beta=0.0),
    )
)  # fmt: skip
