"""What a request whose answers are sampled while it trains decides and excludes."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.adapters.shared.stored import is_stored, read_stored
from memfit.core.errors import InvalidRequest
from memfit.objectives import Objective, find_objective
from memfit.records.hardware import Device
from memfit.records.objectives import (
    check_answered_once,
    check_copied,
    check_no_preference,
    check_reward_adapter,
    check_sampled_pairs,
    check_two_answers,
    check_values,
    refuse_sampled,
)
from memfit.records.recipe import ADAPTED, OWN_STEP, Method, Parallel, Recipe
from memfit.records.reinforcement import (
    Policy,
    RewardAdapter,
    RewardSettings,
    Rollout,
    ValueSettings,
    find_adapter_folder,
    pair_losses,
)
from memfit.records.reinforcement.requested import PolicyRequest, PpoRequest
from memfit.records.request import PreferenceRequest, Request

OWNERS = {  # keys of `policy` that not every objective has
    "loss_type": ("grpo", "online_dpo"), "normalize_advantages": ("rloo",),
    **dict.fromkeys(
        ("delta", "importance_sampling_level", "use_bias_correction_kl", "scale_rewards"),
        ("grpo",),
    ),
    **dict.fromkeys(
        ("epsilon", "epsilon_high", "mask_truncated_completions", "num_iterations"),
        ("grpo", "rloo"),
    ),
}  # fmt: skip
# what PPO calls the keys of `policy` that it has
OF_PPO = {
    "beta": "kl_coef", "epsilon": "cliprange", "epsilon_high": "cliprange",
    "num_iterations": "num_ppo_epochs",
}  # fmt: skip
EXPANDABLE = "expandable_segments:True"


def samples(request: Request) -> bool:
    """Whether the request's answers are sampled while it trains."""
    return find_objective(request.task.objective).samples


def check_sampled(request: Request) -> None:
    """Raise InvalidRequest for what `records.objectives` refuses of a recipe, and for what a
    request alone says."""
    if not samples(request):
        return
    objective, task = request.task.objective, request.task
    width, found = choose_rollout(request).width, task.sequence_length
    if found not in ("auto", width):
        rollout = request.rollout
        raise InvalidRequest(
            f"`task.sequence_length: {found}` is not `rollout.max_prompt_length:"
            f" {rollout.max_prompt_length}` and `rollout.max_completion_length:"
            f" {rollout.max_completion_length}` together, which are {width} tokens",
            hint="leave `task.sequence_length` on `auto`",
        )
    refuse_sampled(
        objective, packing=task.packing is True, parallel=_find_ranks(request),
        dropout=request.lora.dropout if request.method in ADAPTED else 0.0,
        precision=request.precision, compile_=request.compile,
        offload="none" if request.offload == "auto" else request.offload,
        qat=request.qat if request.qat != "none" else "",
        global_batch=request.global_batch, generations=request.generations,
    )  # fmt: skip
    method: Method = "lora" if request.method == "auto" else request.method
    if find_objective(objective).values:
        check_values(objective, method)
        check_answered_once(request.rollout.dynamic_sampling)
    choose_policy(request, method)
    if pair_losses(objective):
        micro = request.micro_batch
        check_no_preference(objective, stated=request.preference != PreferenceRequest())
        check_two_answers(objective, request.generations, 2 if micro == "auto" else micro)


def _find_ranks(request: Request) -> Parallel:
    """The stated mesh; what is left open is shards."""
    stated = request.parallel
    return Parallel(dp_shard=request.devices) if stated == "auto" else stated


def settle_allocator(request: Request, device: Device) -> Request:
    """The request with segments that expand, where answers are sampled and nothing is stated.

    Answers of other lengths leave gaps between whole segments, which grow as a run goes on.
    """
    if request.allocator or device.is_cpu or not samples(request):
        return request
    return replace(request, allocator=EXPANDABLE)


def choose_rollout(request: Request) -> Rollout:
    """Of a recipe; raises InvalidRequest where a stated row has no room for a prompt."""
    if not samples(request):
        return Rollout()
    stated, row = request.rollout, request.task.sequence_length
    prompt = stated.max_prompt_length
    if prompt == "auto":
        prompt = Rollout().max_prompt_length
        if row != "auto":
            prompt = row - stated.max_completion_length
            if prompt < 1:
                raise InvalidRequest(
                    f"`task.sequence_length: {row}` leaves no token for a prompt beside"
                    f" `rollout.max_completion_length: {stated.max_completion_length}`",
                    hint="lower `rollout.max_completion_length`",
                )
    sampled = find_objective(request.task.objective).sampled
    assert sampled is not None
    heat = sampled.temperature if stated.temperature == "auto" else stated.temperature
    return Rollout(
        num_generations=request.generations, max_prompt_length=prompt,
        max_completion_length=stated.max_completion_length, temperature=heat,
        rows=0 if stated.rows == "auto" else stated.rows, dynamic_sampling=stated.dynamic_sampling,
        top_k=stated.top_k, top_p=stated.top_p, min_p=stated.min_p,
        repetition_penalty=stated.repetition_penalty, stop_words=stated.stop_words,
    )  # fmt: skip


def choose_policy(request: Request, method: Method, *, second: bool = False) -> Policy:
    """Of a recipe of this method; raises InvalidRequest for a key that the objective has not.

    second: whether the step may hold a second model, the reference of what is trained whole.
    """
    objective = find_objective(request.task.objective)
    check_ppo(request)
    if objective.sampled is None:
        return Policy()
    stated = request.policy
    if objective.values:
        ppo = request.ppo
        return Policy(
            beta=ppo.kl_coef, epsilon=ppo.cliprange, epsilon_high=ppo.cliprange,
            num_iterations=ppo.num_ppo_epochs,
        )  # fmt: skip
    _check_owners(stated, objective.name)
    beta = stated.beta
    if objective.pairs_samples:
        return _choose_of_pairs(stated, objective)
    if beta == "auto":  # what is trained whole has no reference in one model
        beta = objective.sampled.beta if second or method in ADAPTED else 0.0
    if not second:
        check_copied(beta, method, request.ranks)
    plain = Policy()
    if objective.name == "grpo":
        level, scale = stated.importance_sampling_level, stated.scale_rewards
        corrected = stated.use_bias_correction_kl
        plain = Policy(
            loss_type=plain.loss_type if stated.loss_type == "auto" else stated.loss_type,
            importance_sampling_level=plain.importance_sampling_level if level == "auto" else level,
            scale_rewards=plain.scale_rewards if scale == "auto" else scale,
            use_bias_correction_kl=True if corrected == "auto" else corrected,
        )  # fmt: skip
    return replace(
        plain, beta=beta, epsilon=stated.epsilon,
        epsilon_high=stated.epsilon if stated.epsilon_high == "auto" else stated.epsilon_high,
        delta=stated.delta, normalize_advantages=stated.normalize_advantages,
        mask_truncated_completions=stated.mask_truncated_completions,
        num_iterations=stated.num_iterations,
    )  # fmt: skip


def _check_owners(stated: PolicyRequest, objective: str) -> None:
    """Raise InvalidRequest for a key that is stated and that only other objectives have."""
    for name, owners in OWNERS.items():
        value = getattr(stated, name)
        if objective not in owners and value != getattr(PolicyRequest(), name):
            raise InvalidRequest(
                f"`policy.{name}: {value}` under `objective: {objective}`, which has none",
                hint=f"it is of `objective: {'` and `'.join(owners)}`",
            )


def _choose_of_pairs(stated: PolicyRequest, objective: Objective) -> Policy:
    assert objective.sampled is not None
    loss, beta = stated.loss_type, stated.beta
    made = Policy(
        loss_type=next(iter(objective.sampled.pair_losses)) if loss == "auto" else loss,
        beta=objective.sampled.beta if beta == "auto" else beta,
    )
    check_sampled_pairs(objective.name, made)
    return made


def check_ppo(request: Request) -> None:
    """Raise InvalidRequest for keys of `ppo` under another objective, and of `policy` under it."""
    objective = find_objective(request.task.objective)
    if not objective.values and (stated := _find_stated(request.ppo, PpoRequest())):
        near = {new: old for old, new in OF_PPO.items()}.get(stated)
        raise InvalidRequest(
            f"`ppo.{stated}: {getattr(request.ppo, stated)}` under `objective: {objective.name}`",
            hint=f"write `policy.{near}`" if near and objective.samples
            else "it is of `objective: ppo`",
        )  # fmt: skip
    if objective.values and (stated := _find_stated(request.policy, PolicyRequest())):
        raise InvalidRequest(
            f"`policy.{stated}: {getattr(request.policy, stated)}` under `objective: ppo`, whose"
            " keys are those of TRL's PPOConfig",
            hint=f"write `ppo.{OF_PPO[stated]}`" if stated in OF_PPO
            else f"it has no `{stated}`; its keys are under `ppo`",
        )  # fmt: skip


def _find_stated(stated: PolicyRequest | PpoRequest, usual: PolicyRequest | PpoRequest) -> str:
    """The first key that differs from its default; "" where none does."""
    names = stated.__struct_fields__
    return next((n for n in names if getattr(stated, n) != getattr(usual, n)), "")


def choose_value(request: Request) -> ValueSettings:
    """Of a recipe."""
    if not find_objective(request.task.objective).values:
        return ValueSettings()
    ppo = request.ppo
    return ValueSettings(
        gamma=ppo.gamma, lam=ppo.lam, cliprange_value=ppo.cliprange_value, vf_coef=ppo.vf_coef,
        whiten_rewards=ppo.whiten_rewards,
    )  # fmt: skip


def choose_reward(request: Request, method: Method) -> RewardSettings:
    """Of a recipe; raises InvalidRequest for a reward's adapter that is not there, or nowhere to
    stand."""
    if not samples(request):
        return RewardSettings()
    stated = request.reward
    return RewardSettings(
        funcs=stated.funcs,
        weights=stated.weights,
        timeout=stated.timeout,
        memory=stated.memory,
        missing_eos_penalty=stated.missing_eos_penalty,
        adapter=_choose_reward_adapter(request, method),
    )


def _choose_reward_adapter(request: Request, method: Method) -> RewardAdapter:
    """That of the folder; or what is stated of one that is not there yet."""
    folder, stated = find_adapter_folder(request.reward.funcs), request.reward.adapter
    if not folder:
        return RewardAdapter()
    check_reward_adapter(folder, method, request.ranks)
    if request.framework != OWN_STEP:
        raise InvalidRequest(
            f"`reward.funcs: adapter:{folder}` with `framework: {request.framework}`: only memfit's"
            " own step has reward and policy on one base",
            hint="use `framework: memfit`, or a reward function of your own",
        )
    keys = {k: v for k in stated.__struct_fields__ if (v := getattr(stated, k)) != "auto"}
    if is_stored(folder):
        return replace(read_stored(folder), **keys)
    if missing := [k for k in ("rank", "targets") if k not in keys]:
        raise InvalidRequest(
            f"`reward.funcs: adapter:{folder}`: there is no adapter in `{folder}`, and"
            f" `reward.adapter.{missing[0]}` is not stated",
            hint="train it (`objective: reward`, `method: lora`), or plan ahead with"
            " `reward.adapter: {rank: 16, alpha: 32, targets: [q_proj, v_proj]}`",
        )
    return RewardAdapter(**{"alpha": 2.0 * keys["rank"], **keys})


def describe_sampled(request: Request, recipe: Recipe) -> str:
    """What the plan takes for granted of rollouts and of the policy's loss."""
    if not recipe.samples:
        return ""
    rollout, policy = recipe.rollout, recipe.policy
    answers = "answer" if rollout.num_generations == 1 else "answers"
    parts = [
        f"{recipe.global_batch // rollout.num_generations} prompts with {rollout.num_generations}"
        f" {answers} each, of {rollout.max_prompt_length} and"
        f" {rollout.max_completion_length} tokens at most"
    ]
    if rollout.filters:
        parts.append("the loss computes with the chances before top-k, top-p, min-p and penalty")
    if request.rollout.rows == "auto" and rollout.rows:
        parts.append(f"{rollout.rows} of them in flight (`rollout.rows`)")
    usual = find_objective(recipe.objective).sampled
    if recipe.values:
        parts.append(
            "the value is a second adapter with a head of one number" if recipe.adapted
            else "the value is a second copy of the trained weights with a head of one number,"
            " trained beside the policy"
        )  # fmt: skip
    elif request.policy.beta == "auto":
        whole = usual is not None and usual.beta and not policy.beta
        why = " (what is trained whole has no reference unless one is stated)" if whole else ""
        parts.append(f"beta {policy.beta:g}{why}")
    if recipe.copies_reference:
        parts.append("the reference is a frozen copy of the trained weights, of their dtype")
    return ", ".join(parts)
