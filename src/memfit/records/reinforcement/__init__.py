"""What a recipe says of reinforcement learning: rollouts, the policy's loss, rewards.

Names and defaults are those of TRL 1.16's configurations, which is what people bring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from memfit.core import units
from memfit.core.errors import InvalidRequest, did_you_mean
from memfit.objectives import LossType, find_objective
from memfit.records import Record

WAVES = 2  # of answers that stand for all: at the second, slots are filled anew
WIDTHS = 8  # that rows of an update may have
REACHES = 16  # that a decoding step may attend to
INFINITE = float("inf")
PREFILL_TOKENS = 4096  # that one call reads of prompts at most; one prompt at least

# objectives whose answers are sampled while training
Online = Literal["grpo", "rloo", "ppo", "online_dpo"]
ScaleRewards = Literal["group", "batch", "none"]
Level = Literal["token", "sequence"]
OF_TOKENS = ("dapo", "dr_grpo", "grpo")  # values of `policy.loss_type` of objective grpo


REWARDS = ("number", "regex", "format", "length")  # reward functions that ship
ADAPTER = "adapter:"  # before the folder of a reward model's adapter, on the base that is trained


def check_spec(spec: str) -> None:
    """Raise InvalidRequest where a text names neither a reward that ships nor a file's function."""
    name, _, rest = spec.partition(":")
    path, _, function = spec.rpartition(":")
    if spec.startswith(ADAPTER) or spec == ADAPTER.rstrip(":"):
        if not rest:
            raise InvalidRequest(
                f"`reward.funcs: {spec}` has no folder",
                hint="write `adapter:FOLDER`, such as the `model` folder of an `objective: reward`"
                " run with `method: lora`",
            )
        return
    if name in REWARDS:
        if name == "regex" and not rest:
            raise InvalidRequest(
                "`reward.funcs: regex` has no pattern",
                hint="write `regex:PATTERN`, such as 'regex:[0-9]+'",
            )
        return
    if not path.endswith(".py") or not function.isidentifier():
        near = did_you_mean(name, REWARDS)
        raise InvalidRequest(
            f"`reward.funcs: {spec}` is no reward that ships ({', '.join(REWARDS)}) and no"
            " function of a file",
            hint=f"did you mean {near}?"
            if near
            else "write `FILE.py:NAME` for one of your own, or `adapter:FOLDER`",
        )


def find_adapter_folder(funcs: tuple[str, ...]) -> str:
    """The folder of the reward model's adapter among reward functions; "" where there is none."""
    return next((f.removeprefix(ADAPTER) for f in funcs if f.startswith(ADAPTER)), "")


def check_one_adapter(funcs: tuple[str, ...]) -> None:
    """Raise InvalidRequest where two adapters are to judge."""
    found = [f for f in funcs if f.startswith(ADAPTER)]
    if len(found) > 1:
        raise InvalidRequest(
            f"`reward.funcs` has {len(found)} adapters, `{found[0]}` and `{found[1]}`: one can"
            " stand on the base",
            hint="leave one out, or train one reward model of both",
        )


class Policy(Record, frozen=True, kw_only=True):
    """The policy's loss: GRPO (Shao et al. 2402.03300) and its variants, RLOO (2402.14740), or that
    of pairs (online DPO, 2402.04792)."""

    # of GRPO, what the sum over tokens is divided by; of online DPO, the loss of a pair
    loss_type: str = "dapo"
    beta: float = 0.0  # weight of the KL divergence from the reference; 0: no reference is run
    epsilon: float = 0.2  # a ratio below 1 - epsilon is clipped
    epsilon_high: float = 0.2  # and one above 1 + epsilon_high (DAPO, 2503.14476: 0.28)
    delta: float = 0.0  # the unclipped ratio is capped here (two-sided clipping); 0: it is not
    importance_sampling_level: Level = "token"  # `sequence`: GSPO (Zheng et al. 2507.18071)
    use_bias_correction_kl: bool = True  # the KL estimate is multiplied by the ratio
    scale_rewards: ScaleRewards = "group"  # what divides an advantage: a standard deviation
    normalize_advantages: bool = False  # of RLOO: whitened over the rollout
    mask_truncated_completions: bool = False  # answers that reached their limit do not count
    num_iterations: int = 1  # updates with each rollout

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a loss that depends on how a batch is cut, or is none."""
        if self.loss_type == "bnpo":
            raise InvalidRequest(
                "`policy.loss_type: bnpo` divides by the tokens of a micro-batch, so that what is"
                " learned depends on how a global batch is cut",
                hint="use `policy.loss_type: dapo`, which divides by the tokens of the whole batch",
            )
        if self.loss_type not in OF_TOKENS:
            of_pairs = pair_losses("online_dpo")
            if self.loss_type not in of_pairs:
                raise InvalidRequest(
                    f"`policy.loss_type: {self.loss_type}` is not one of {', '.join(OF_TOKENS)} (of"
                    f" grpo) or {', '.join(of_pairs)} (of online_dpo)"
                )
        for name, value, least in (
            ("beta", self.beta, 0.0),
            ("epsilon", self.epsilon, 0.0),
            ("epsilon_high", self.epsilon_high, 0.0),
            ("delta", self.delta, 0.0),
            ("num_iterations", self.num_iterations, 1),
        ):
            if not value >= least:  # a number that is none is refused, too
                raise InvalidRequest(
                    f"`policy.{name}: {value}` is below {least}", hint=f"use {least} or more"
                )
        if 0 < self.delta <= 1 + self.epsilon_high:
            raise InvalidRequest(
                f"`policy.delta: {self.delta}` is not above 1 + epsilon_high ="
                f" {1 + self.epsilon_high:g}, where ratios are clipped already",
                hint="use a larger `policy.delta`, or 0 for none",
            )


def pair_losses(objective: str) -> Mapping[str, LossType]:
    """The losses of an objective that compares the two sampled answers to a prompt; else none."""
    sampled = find_objective(objective).sampled
    return {} if sampled is None else sampled.pair_losses


def find_online(objective: str) -> Online:
    """The objective of a recipe that samples."""
    found: Online = next(name for name in get_args(Online) if name == objective)
    return found


def scores_old(objective: str, policy: Policy) -> bool:
    """Whether log-probabilities under the policy that sampled are computed before the update.

    Of updates that are on-policy they are the new ones, but rewards of RLOO and PPO are less by a
    KL estimate of theirs.
    """
    return policy.num_iterations > 1 or (objective in ("rloo", "ppo") and policy.beta > 0)


class Rollout(Record, frozen=True, kw_only=True):
    """How answers are sampled: one rollout holds one global batch of them."""

    num_generations: int = 8  # answers to each prompt, which are compared with each other
    max_prompt_length: int = 512  # tokens; longer prompts are left out and counted
    max_completion_length: int = 512  # tokens
    temperature: float = 1.0
    rows: int = 0  # answers in flight at once, a slot of the cache each; 0: a whole rollout's
    # rounds of further prompts in place of groups whose answers have all the same reward (DAPO,
    # 2503.14476, section 3.2); 0: such groups stay, and teach nothing
    dynamic_sampling: int = 0
    # which tokens may be drawn, in this order after the penalty and the temperature; the loss
    # computes with the chances before them, as TRL does
    top_k: int = 0  # the likeliest tokens, so many; 0: all
    top_p: float = 1.0  # the likeliest that have this share together
    min_p: float = 0.0  # those at least so likely as this share of the likeliest one's chance
    repetition_penalty: float = 1.0  # of tokens that the row has, prompt included
    stop_words: tuple[str, ...] = ()  # texts that end an answer, and stay in it

    def __post_init__(self) -> None:
        """Raise InvalidRequest for bounds within which nothing can be compared or sampled."""
        self._check_filters()
        for name, least in (
            ("num_generations", 1), ("max_prompt_length", 1), ("max_completion_length", 1),
            ("dynamic_sampling", 0), ("rows", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value < least:
                raise InvalidRequest(
                    f"`rollout.{name}: {value}` is below {least}", hint=f"use {least} or more"
                )
        if not self.temperature > 0:
            raise InvalidRequest(
                f"`rollout.temperature: {self.temperature}`: all answers to a prompt would be"
                " alike",
                hint="use a number above 0, such as 1.0",
            )

    def _check_filters(self) -> None:
        for name, fine, wanted in (
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("stop_words", "" not in self.stop_words, "of texts that are not empty"),
        ):
            if not fine:
                raise InvalidRequest(
                    f"`rollout.{name}: {getattr(self, name)}` is not {wanted}",
                    hint="leave it out, and every token may be drawn",
                )

    def in_flight(self, answers: int) -> int:
        """How many of a rollout's answers are sampled at once."""
        return min(self.rows or answers, answers)

    def count_shown(self, answers: int) -> int:
        """Answers, in whole groups, whose waves stand for those of all."""
        group = self.num_generations
        return min(-(-WAVES * self.in_flight(answers) // group) * group, answers)

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from other chances than those that the loss computes with."""
        plain = (0, 1.0, 0.0, 1.0)
        return (self.top_k, self.top_p, self.min_p, self.repetition_penalty) != plain

    @property
    def width(self) -> int:
        """Tokens of the longest row: a prompt and its answer."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def reach(self) -> int:
        """A decoding step attends to a multiple of this many tokens, so that few shapes occur."""
        return -(-self.width // REACHES)

    def pad(self, longest: int) -> int:
        """The width of an update's rows, one of `WIDTHS`, from the tokens of the longest row."""
        step = -(-self.width // WIDTHS)
        return min(-(-longest // step) * step, self.width)


def loss_temperature(objective: str, rollout: Rollout) -> float:
    """What logits are divided by where sampled answers are scored and learned from.

    Pairs are compared by the model's own chances, as TRL's `OnlineDPOTrainer` does.
    """
    return 1.0 if pair_losses(objective) else rollout.temperature


class ValueSettings(Record, frozen=True, kw_only=True):
    """What PPO learns of a value beside its policy, and how advantages are made of it."""

    gamma: float = 1.0  # by which later rewards count less, a token
    lam: float = 0.95  # generalised advantage estimation's lambda (1506.02438, equation 16)
    cliprange_value: float = 0.2  # a value moves no further from the rollout's for free
    vf_coef: float = 0.1  # weight of the value's loss
    whiten_rewards: bool = False  # divided by their standard deviation over the rollout

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a number out of its range."""
        for name, most in (
            ("gamma", 1.0), ("lam", 1.0), ("cliprange_value", INFINITE), ("vf_coef", INFINITE),
        ):  # fmt: skip
            value = getattr(self, name)
            if not 0 <= value <= most:
                above = f" or above {most:g}" if most < INFINITE else ""
                raise InvalidRequest(f"`value.{name}: {value:g}` is below 0{above}")


class RewardAdapter(Record, frozen=True, kw_only=True):
    """A reward model's adapter, which stands frozen beside the policy's on the same base."""

    rank: int = 0  # 0: no reward is made by an adapter
    alpha: float = 0.0
    targets: tuple[str, ...] = ()  # last parts of module names, such as `q_proj`
    scaling: Literal["plain", "rank-stabilised"] = "plain"  # see `Lora`

    def __post_init__(self) -> None:
        """Raise InvalidRequest for an adapter without matrices."""
        if self.rank < 0 or bool(self.rank) != bool(self.targets):
            raise InvalidRequest(
                f"`reward.adapter` has rank {self.rank} and {len(self.targets)} targets: both are"
                " needed",
                hint="write `reward.adapter: {rank: 16, alpha: 32, targets: [q_proj, v_proj]}`",
            )


class RewardSettings(Record, frozen=True, kw_only=True):
    """Who judges answers, and what each may take."""

    # `number`, `regex:PATTERN`, `format`, `length`, `FILE.py:NAME`, or once `adapter:FOLDER`
    funcs: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()  # of each function; empty: 1 each
    timeout: float = 10.0  # seconds of one call
    memory: str = "4 GiB"  # of a function's process, address space counted
    missing_eos_penalty: float = 0.0  # is taken off the reward of an answer that reached its limit
    adapter: RewardAdapter = RewardAdapter()  # of the folder that `funcs` names

    def __post_init__(self) -> None:
        """Raise InvalidRequest where weights and functions differ in number, or a limit is none."""
        check_one_adapter(self.funcs)
        if bool(self.adapter_folder) != bool(self.adapter.rank):
            raise InvalidRequest(
                f"`reward.adapter.rank: {self.adapter.rank}` beside `reward.funcs:"
                f" {', '.join(self.funcs) or 'none'}`",
                hint="an adapter's folder and its rank go together: plan the request",
            )
        if self.weights and len(self.weights) != len(self.funcs):
            raise InvalidRequest(
                f"`reward.weights` has {len(self.weights)} numbers, and `reward.funcs`"
                f" {len(self.funcs)} functions",
                hint="give one weight a function, or none",
            )
        if not self.missing_eos_penalty >= 0:
            raise InvalidRequest(
                f"`reward.missing_eos_penalty: {self.missing_eos_penalty}` is below 0",
                hint="it is taken off the rewards of answers that reached their limit",
            )
        if not self.timeout > 0:
            raise InvalidRequest(
                f"`reward.timeout: {self.timeout}` lets no function answer",
                hint="use seconds above 0, such as 10",
            )
        units.parse_bytes(self.memory)

    @property
    def functions(self) -> tuple[str, ...]:
        """Those of `funcs` that run in a process of their own."""
        return tuple(f for f in self.funcs if not f.startswith(ADAPTER))

    @property
    def adapter_folder(self) -> str:
        """Where the reward model's adapter lies; "" where none judges."""
        return find_adapter_folder(self.funcs)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the user's own functions."""
        named = (f for f in self.functions if f.partition(":")[0] not in REWARDS)
        return tuple(f.rpartition(":")[0] for f in named)

    @property
    def shares(self) -> tuple[float, ...]:
        """The weight of each function."""
        return self.weights or (1.0,) * len(self.funcs)
