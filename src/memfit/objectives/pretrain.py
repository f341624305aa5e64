"""Every token of a text is learned."""

from __future__ import annotations

from memfit.objectives import Objective, objectives

objectives.register("pretrain")(Objective("pretrain", about="every token"))
