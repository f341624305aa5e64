"""The answer's tokens are learned (Ouyang et al. 2203.02155, section 3.5)."""

from __future__ import annotations

from memfit.objectives import Objective, objectives

objectives.register("sft")(Objective("sft", about="the answer's tokens"))
