"""PPO (Schulman et al. 1707.06347): answers sampled, and each token's advantage by learned values.

The value of a token is what a second adapter of the same base makes with a head of one number.
"""

from __future__ import annotations

from memfit.objectives import Objective, Sampled, objectives

objectives.register("ppo")(
    Objective(
        "ppo", about="rewards of sampled answers, less values that are learned beside them",
        sampled=Sampled(num_generations=1, beta=0.05, temperature=0.7), values=True,
    )
)  # fmt: skip
