"""Losses of pairs by the rewards of their answers, each with its slope in closed form.

A reward is beta times a log-probability or what it exceeds the reference's by. All are elementwise
and know no other pair, so that how a global batch is cut changes nothing. m is the margin: the
chosen answer's reward less the rejected one's; e is the label smoothing. Values and slopes are held
against autograd and against TRL's own trainers (tests/objectives).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from memfit.objectives import Knobs, Losses

if TYPE_CHECKING:
    from torch import Tensor


CERTAIN = 1e-7  # a probability so near 1 that its odds are of rounding alone; padding has 1


def sigmoid(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m), whose slope by m is sigmoid(m) - (1 - e)."""
    return _smoothed(chosen - rejected, knobs.label_smoothing)


def beyond_a_margin(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """The same of m - gamma."""
    return _smoothed(chosen - rejected - knobs.gamma, knobs.label_smoothing)


def _smoothed(margin: Tensor, smoothing: float) -> Losses:
    right, wrong = _log_sigmoid(margin), _log_sigmoid(-margin)
    losses = right.mul(smoothing - 1).sub_(wrong, alpha=smoothing)
    return _by_margin(losses, margin.sigmoid().sub_(1 - smoothing))


def odds_ratio(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """-beta log sigmoid(o), o = log odds of exp(c / beta) less those of exp(r / beta).

    c / beta is a mean log-probability, below 0; d log odds(p) / d log p = 1 / (1 - p).
    """
    right, wrong = ((x / knobs.beta).clamp_(max=-CERTAIN) for x in (chosen, rejected))
    odds = right - wrong - (_log_1_less_exp(right) - _log_1_less_exp(wrong))
    by_odds = odds.sigmoid().sub_(1)  # of the loss over beta, as rewards are beta times c
    losses = _log_sigmoid(odds).mul_(-knobs.beta)
    return Losses(losses, by_odds / -right.expm1(), by_odds / wrong.expm1())


def _log_1_less_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x below 0; of two forms the one that cancels less (Maechler 2012)."""
    import torch

    return torch.where(x < -math.log(2), (-x.exp()).log1p(), (-x.expm1()).log())


def bradley_terry(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """-log sigmoid(m) + center (c + r)²: the second term keeps scores around 0."""
    margin, total = chosen - rejected, chosen + rejected
    slope, pull = margin.sigmoid().sub_(1), total * (2 * knobs.center)
    losses = total.square_().mul_(knobs.center).sub_(_log_sigmoid(margin))
    return Losses(losses, pull + slope, pull - slope)


def hinge(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """max(0, 1 - m)."""
    short = 1 - (chosen - rejected)
    return _by_margin(short.relu(), (short > 0).to(short.dtype).neg_())


def ipo(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """(h - 1 / (2 beta))², h = m / beta being of the ratios themselves."""
    off = (chosen - rejected - 0.5) / knobs.beta
    return _by_margin(off.square(), off * (2 / knobs.beta))


def robust(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """(-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e): unbiased where e are wrong."""
    margin, e = chosen - rejected, knobs.label_smoothing
    losses = _log_sigmoid(margin).mul(e - 1).add_(_log_sigmoid(-margin), alpha=e)
    return _by_margin(losses / (1 - 2 * e), margin.sigmoid().sub_((1 - e) / (1 - 2 * e)))


def exo_pair(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """KL of (sigmoid(m), sigmoid(-m)) from (1 - e, e)."""
    margin, e = chosen - rejected, knobs.label_smoothing
    won, lost = margin.sigmoid(), (-margin).sigmoid()
    high, low = math.log1p(-e), math.log(e)
    losses = won * (_log_sigmoid(margin) - high) + lost * (_log_sigmoid(-margin) - low)
    return _by_margin(losses, won * lost * (margin - high + low))


def nca_pair(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """-log sigmoid(c) - log sigmoid(-c) / 2 - log sigmoid(-r) / 2."""
    losses = -_log_sigmoid(chosen) - 0.5 * (_log_sigmoid(-chosen) + _log_sigmoid(-rejected))
    return Losses(losses, 1.5 * chosen.sigmoid() - 1, 0.5 * rejected.sigmoid())


def bco_pair(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """-log sigmoid(c) - log sigmoid(-r)."""
    losses = -_log_sigmoid(chosen) - _log_sigmoid(-rejected)
    return Losses(losses, chosen.sigmoid() - 1, rejected.sigmoid())


def sppo_hard(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """(c / beta - 1 / (2 beta))² + (r / beta + 1 / (2 beta))²."""
    above, below = (chosen - 0.5) / knobs.beta, (rejected + 0.5) / knobs.beta
    by = 2 / knobs.beta
    return Losses(above.square() + below.square(), above * by, below * by)


def apo_zero(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """1 - sigmoid(c) + sigmoid(r): the chosen one more likely, the rejected one less."""
    won, lost = chosen.sigmoid(), rejected.sigmoid()
    return Losses(1 - won + lost, -won * (1 - won), lost * (1 - lost))


def apo_down(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """sigmoid(c) + 1 - sigmoid(m): both less likely, the rejected one by more."""
    won, between = chosen.sigmoid(), (chosen - rejected).sigmoid()
    slope = between * (1 - between)
    return Losses(won + 1 - between, won * (1 - won) - slope, slope)


def discopop(chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
    """(1 - t) (-log sigmoid(m)) + t exp(-m), t = sigmoid(m / tau)."""
    margin = chosen - rejected
    share = (margin / knobs.tau).sigmoid()
    logistic, falling = -_log_sigmoid(margin), (-margin).exp()
    losses = logistic * (1 - share) + falling * share
    slope = (margin.sigmoid() - 1) * (1 - share) - falling * share
    return _by_margin(losses, slope + (falling - logistic) * share * (1 - share) / knobs.tau)


def _by_margin(losses: Tensor, slope: Tensor) -> Losses:
    return Losses(losses, slope, -slope)


def _log_sigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)
