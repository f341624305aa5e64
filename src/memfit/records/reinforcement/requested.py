"""`rollout`, `policy`, `ppo` and `reward` of a request; open keys take TRL's defaults."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.core.kinds_of_numbers import (
    Auto,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    Truth,
)
from memfit.records import Record
from memfit.records.reinforcement import (
    Level,
    ScaleRewards,
    check_one_adapter,
    check_spec,
    find_adapter_folder,
)

Share = Annotated[float, msgspec.Meta(ge=0, le=1, description="a number from 0 to 1")]
Size = Annotated[str, msgspec.Meta(description="a size with its unit, for example `4 GiB`")]


class RolloutRequest(Record, frozen=True, kw_only=True):
    """How answers are sampled; used by the objectives that sample answers."""

    num_generations: Positive | Auto = "auto"  # auto: 8 of grpo, 2 of rloo, online_dpo; 1 of ppo
    max_prompt_length: Positive | Auto = "auto"  # auto: what a stated row leaves, else 512
    max_completion_length: Positive = 512
    temperature: PositiveFloat | Auto = "auto"  # auto: 1.0; 0.9 of online_dpo
    rows: Positive | Auto = "auto"  # auto: all of a rollout at once
    dynamic_sampling: NotNegative = 0
    top_k: NotNegative = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: PositiveFloat = 1.0
    stop_words: tuple[str, ...] = ()


class PolicyRequest(Record, frozen=True, kw_only=True):
    """The policy's loss; used by the objectives that sample answers."""

    loss_type: str = "auto"  # of grpo, auto: dapo; of online_dpo, auto: sigmoid
    # auto: 0 of grpo; 0.05 of rloo with an adapter; 0.1 of online_dpo
    beta: NotNegativeFloat | Auto = "auto"
    epsilon: PositiveFloat = 0.2
    epsilon_high: PositiveFloat | Auto = "auto"  # auto: epsilon
    delta: NotNegativeFloat = 0.0  # of grpo
    importance_sampling_level: Level | Auto = "auto"  # of grpo; auto: token
    use_bias_correction_kl: Truth | Auto = "auto"  # of grpo; auto: true
    scale_rewards: ScaleRewards | Auto = "auto"  # of grpo; auto: group
    normalize_advantages: bool = False  # of rloo
    mask_truncated_completions: bool = False
    num_iterations: Positive = 1


class PpoRequest(Record, frozen=True, kw_only=True):
    """All of PPO's losses, by the names of TRL's `PPOConfig`; used when the objective is `ppo`."""

    num_ppo_epochs: Positive = 4  # updates with each rollout
    kl_coef: NotNegativeFloat = 0.05  # weight of the KL divergence, a part of the rewards
    cliprange: PositiveFloat = 0.2  # ratios beyond 1 - it and 1 + it are clipped
    cliprange_value: PositiveFloat = 0.2
    vf_coef: PositiveFloat = 0.1  # weight of the value's loss
    gamma: Share = 1.0
    lam: Share = 0.95
    whiten_rewards: bool = False


class RewardAdapterRequest(Record, frozen=True, kw_only=True):
    """A reward model's adapter that is not there yet; used when `reward.funcs` names a folder."""

    rank: Positive | Auto = "auto"  # auto: all four are read from the folder
    alpha: PositiveFloat | Auto = "auto"
    targets: tuple[str, ...] | Auto = "auto"
    scaling: Literal["auto", "plain", "rank-stabilised"] = "auto"

    @property
    def stated(self) -> bool:
        """Whether anything is."""
        return self != RewardAdapterRequest()


class RewardRequest(Record, frozen=True, kw_only=True):
    """Who judges the answers; used by the objectives that sample answers."""

    # number, regex:PATTERN, format, length, FILE.py:NAME, or once adapter:FOLDER
    funcs: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    timeout: PositiveFloat = 10.0  # seconds of one call
    memory: Size = "4 GiB"
    missing_eos_penalty: NotNegativeFloat = 0.0
    adapter: RewardAdapterRequest = RewardAdapterRequest()

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a size without a unit, or a function that can be none."""
        units.parse_bytes(self.memory)
        for spec in self.funcs:
            check_spec(spec)
        check_one_adapter(self.funcs)
        if self.adapter.stated and not find_adapter_folder(self.funcs):
            raise InvalidRequest(
                "`reward.adapter` is stated, and `reward.funcs` names no adapter's folder",
                hint="write `reward.funcs: [adapter:FOLDER]`",
            )
        if self.weights and len(self.weights) != len(self.funcs):
            raise InvalidRequest(
                f"`reward.weights` has {len(self.weights)} numbers, and `reward.funcs`"
                f" {len(self.funcs)} functions",
                hint="give one weight a function, or none",
            )
