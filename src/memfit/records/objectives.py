"""What an objective asks of the rest of a recipe: one table for planner and trainer."""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.objectives import find_objective
from memfit.records.recipe import ADAPTED, Method, Parallel, Recipe, Regularisation
from memfit.records.reinforcement import OF_TOKENS, Policy, pair_losses

VALUED = ("lora", "full", "freeze")  # methods that learn a value beside the policy
ON_RANKS = ("grpo", "rloo")  # whose answers ranks sample, each to prompts of its own


def check_objective(recipe: Recipe) -> None:
    """Raise InvalidRequest where a recipe of answers cannot be what memfit's step computes.

    Pairs lie in neighbouring rows, the preferred answer first, so that a micro-batch holds whole
    pairs and a row one answer. Sampled answers to one prompt are neighbours, too.
    """
    check_regularisation(recipe.objective, recipe.regularisation)
    if recipe.samples:
        _check_sampled(recipe)
    if not recipe.compares:
        return
    if recipe.scores != (recipe.model.head == "score"):
        raise InvalidRequest(
            f"`objective: {recipe.objective}` of a model whose head is"
            f" `{recipe.model.head or 'of the vocabulary'}`",
            hint="plan it: a reward model has a score head, and nothing else has",
        )
    if recipe.packing:
        raise InvalidRequest(
            f"`packing: true` under `objective: {recipe.objective}`, which compares answers row by"
            " row: a row of many answers has one log-probability",
            hint="use `packing: false`, which a request calls `task.packing`",
        )
    if recipe.mismatches:
        check_baseline(recipe.objective, recipe.micro_batch)
    if recipe.prefers and recipe.micro_batch % 2:
        raise InvalidRequest(
            f"`micro_batch: {recipe.micro_batch}` is odd, and `objective: {recipe.objective}` takes"
            " pairs of rows",
            hint=f"use `micro_batch: {recipe.micro_batch + 1}`",
        )
    if recipe.preference.beta <= 0:
        raise InvalidRequest(
            f"`preference.beta: {recipe.preference.beta}` teaches nothing",
            hint="use a number above 0, such as 0.1",
        )
    find_objective(recipe.objective).check(recipe.preference)
    _check_reference(recipe)


def check_baseline(objective: str, micro_batch: int) -> None:
    """Raise InvalidRequest for a baseline that is the mean of a single row."""
    if micro_batch < 2:
        raise InvalidRequest(
            f"`micro_batch: {micro_batch}` under `objective: {objective}`, whose baseline z0 is a"
            " mean over a micro-batch",
            hint="use `micro_batch: 2` or more",
        )


def _check_reference(recipe: Recipe) -> None:
    reference = recipe.preference.reference
    if not find_objective(recipe.objective).refers:
        check_no_reference(recipe.objective, reference)
        return
    if reference == "none":
        raise InvalidRequest(
            f"`objective: {recipe.objective}` without a reference",
            hint="use `preference.reference: adapter-off` or `precomputed`",
        )
    check_second(reference)
    if reference == "adapter-off":
        check_adapter(recipe.method)


def check_no_reference(objective: str, reference: str) -> None:
    """Raise InvalidRequest for a reference that the objective compares nothing with."""
    if reference != "none":
        raise InvalidRequest(
            f"`preference.reference: {reference}` under `objective: {objective}`, which compares"
            " both answers without a reference",
            hint="leave `preference.reference` on `auto`",
        )


def check_second(reference: str) -> None:
    """Raise InvalidRequest for a second model, which only other trainers' steps hold."""
    if reference == "second-model":
        raise InvalidRequest(
            "`preference.reference: second-model`: memfit's step holds one model",
            hint="use `preference.reference: precomputed`, or `method: lora`, whose base is the"
            " reference",
        )


def check_adapter(method: Method) -> None:
    """Raise InvalidRequest where a method trains the weights that a reference would be."""
    if method not in ADAPTED:
        raise InvalidRequest(
            f"`preference.reference: adapter-off`, but `method: {method}` has no adapter: what is"
            " trained is not the reference any more",
            hint="use `preference.reference: precomputed`, or `method: lora`",
        )


def check_regularisation(objective: str, regularisation: Regularisation) -> None:
    """Raise InvalidRequest for an objective whose loss is no cross-entropy of its tokens alone."""
    for name in regularisation.__struct_fields__:
        if (value := getattr(regularisation, name)) and objective not in ("pretrain", "sft"):
            beside = (
                "; what is taken for the wrong way round is `preference.label_smoothing`"
                if name == "label_smoothing" else ""
            )  # fmt: skip
            raise InvalidRequest(
                f"`regularisation.{name}: {value:g}` under `objective: {objective}`: it is of the"
                f" cross-entropy of `pretrain` and `sft`{beside}",
                hint=f"leave `regularisation.{name}` out",
            )


def check_lora_plus(method: str, ratio: float) -> None:
    """Raise InvalidRequest for a rate of matrices that the method has not."""
    if ratio and method not in ADAPTED:
        raise InvalidRequest(
            f"`optimizer.lora_plus: {ratio:g}` is the rate of adapters' B over A's, and"
            f" `method: {method}` has no adapters",
            hint="use `method: lora`, or leave `optimizer.lora_plus` out",
        )


def refuse_sampled(
    objective: str,
    *,
    packing: bool,
    parallel: Parallel,
    dropout: float,
    precision: str,
    compile_: str,
    offload: str,
    qat: str,
    global_batch: int,
    generations: int,
) -> None:
    """Raise InvalidRequest for what excludes sampling answers with the weights that are trained."""
    under = f"under `objective: {objective}`"
    for wrong, what, why, hint in (
        (packing, "packing: true", "a row holds one answer", "leave `task.packing` on `auto`"),
        (dropout, f"lora.dropout: {dropout:g}", "ratios of probabilities would compare two masks of"
         " dropout", "use `lora.dropout: 0`"),
        (precision in ("fp16-mixed", "fp8-mixed"), f"precision: {precision}", "answers were not"
         " sampled so yet", "use `precision: bf16-mixed`"),
        (compile_ == "blocks", "compile: blocks", "a compiled block has no cache to sample with",
         "use `compile: none`"),
        (offload not in ("none", "activations"), f"offload: {offload}", "answers were not sampled"
         " so yet", "use `offload: none`, or `offload: activations`"),
        (qat, f"qat: {qat}", "answers were not sampled of rounded weights yet", "use `qat: none`"),
    ):  # fmt: skip
        if wrong:
            raise InvalidRequest(f"`{what}` {under}: {why}", hint=hint)
    least = 1 if find_objective(objective).values else 2
    if generations < least:
        raise InvalidRequest(
            f"`rollout.num_generations: {generations}` {under}: an answer is compared with others"
            " to its prompt",
            hint=f"use {least} or more",
        )
    if global_batch % generations:
        more = -(-global_batch // generations) * generations
        raise InvalidRequest(
            f"`rollout.num_generations: {generations}` does not divide `task.global_batch:"
            f" {global_batch}`, which counts answers",
            hint=f"use `global_batch: {more}`",
        )
    _refuse_ranks(objective, parallel, global_batch // generations)


def _refuse_ranks(objective: str, parallel: Parallel, prompts: int) -> None:
    """Raise InvalidRequest for ranks that do not each sample answers to prompts of their own."""
    if parallel.world == 1:
        return
    under = f"under `objective: {objective}`"
    if objective not in ON_RANKS:
        known = " and ".join(f"`{name}`" for name in ON_RANKS)
        raise InvalidRequest(
            f"`{parallel.world} ranks` {under}: of objectives that sample answers, {known} are"
            " learned by many",
            hint="use one device, or one of these objectives",
        )
    for axis, why in (
        ("tp", "answers are sampled with whole products"),
        ("cp", "answers are sampled with whole rows"),
        ("pp", "answers are sampled with all blocks"),
    ):
        if (ranks := getattr(parallel, axis)) > 1:
            raise InvalidRequest(
                f"`parallel.{axis}: {ranks}` {under}: {why}",
                hint="use `parallel.dp_shard` or `dp_replicate`, whose ranks each sample their own",
            )
    if prompts % parallel.dp:
        raise InvalidRequest(
            f"a rollout of {prompts} prompts {under} is not shared evenly by {parallel.dp} ranks",
            hint="make `task.global_batch` a multiple of `rollout.num_generations` times the ranks",
        )


def check_sampled_pairs(objective: str, policy: Policy) -> None:
    """Raise InvalidRequest where two sampled answers cannot be compared with the reference."""
    losses = pair_losses(objective)
    if policy.loss_type not in losses:
        raise InvalidRequest(
            f"`policy.loss_type: {policy.loss_type}` is not a loss of `objective: {objective}`,"
            f" which has {', '.join(losses)}",
            hint=f"use `policy.loss_type: {next(iter(losses))}`",
        )
    if not policy.beta > 0:
        raise InvalidRequest(
            f"`policy.beta: {policy.beta:g}` under `objective: {objective}` teaches nothing",
            hint="use a number above 0, such as 0.1",
        )


def check_copied(beta: float, method: Method, ranks: int) -> None:
    """Raise InvalidRequest where ranks would share a copy of the weights, the reference."""
    if beta and method not in ADAPTED and ranks > 1:
        raise InvalidRequest(
            f"`policy.beta: {beta:g}` under `method: {method}` on {ranks} ranks: the reference is a"
            " frozen copy of the weights, which ranks do not share",
            hint="use one device, `method: lora`, whose base is the reference, or `policy.beta: 0`",
        )


def check_no_preference(objective: str, *, stated: bool) -> None:
    """Raise InvalidRequest for keys of pairs that data has, where pairs are sampled."""
    if stated:
        raise InvalidRequest(
            f"`preference` under `objective: {objective}`, whose pairs are sampled",
            hint="write `policy.loss_type` and `policy.beta`",
        )


def check_two_answers(objective: str, generations: int, micro_batch: int) -> None:
    """Raise InvalidRequest where a micro-batch does not hold whole pairs of answers."""
    if generations != 2:
        raise InvalidRequest(
            f"`rollout.num_generations: {generations}` under `objective: {objective}`, which"
            " compares two answers to a prompt",
            hint="use `rollout.num_generations: 2`, or `objective: grpo` for larger groups",
        )
    if micro_batch % 2:
        raise InvalidRequest(
            f"`micro_batch: {micro_batch}` is odd, and `objective: {objective}` takes pairs of"
            " answers",
            hint=f"use `micro_batch: {micro_batch + 1}`",
        )


def check_values(objective: str, method: str) -> None:
    """Raise InvalidRequest where a method has nothing that learns a value beside the policy."""
    if method not in VALUED:
        raise InvalidRequest(
            f"`objective: {objective}` under `method: {method}`, whose adapters stand once on a"
            " base: a value is learned by a second adapter, or by a second copy of the weights",
            hint="use `method: lora`, or `full`",
        )


def check_answered_once(rounds: int) -> None:
    """Raise InvalidRequest where groups would be compared that a value takes the place of."""
    if rounds:
        raise InvalidRequest(
            f"`rollout.dynamic_sampling: {rounds}` under `objective: ppo`, which compares no"
            " answers of a group",
            hint="leave `rollout.dynamic_sampling` out",
        )


def check_reward_adapter(folder: str, method: Method, ranks: int) -> None:
    """Raise InvalidRequest where the base that a reward's adapter stands on is trained itself, or
    cut among ranks."""
    if folder and ranks > 1:
        raise InvalidRequest(
            f"`reward.funcs: adapter:{folder}` on {ranks} ranks: a reward model's adapter is not"
            " loaded into shards of its base",
            hint="use one device, or a reward function of your own",
        )
    if folder and method != "lora":
        raise InvalidRequest(
            f"`reward.funcs: adapter:{folder}` under `method: {method}`: the reward model's adapter"
            " stands on the base as it was, frozen, beside a policy that is an adapter, too",
            hint="use `method: lora`, or a reward function of your own",
        )


def _check_sampled(recipe: Recipe) -> None:
    refuse_sampled(
        recipe.objective, packing=recipe.packing, parallel=recipe.parallel,
        dropout=recipe.lora.dropout, precision=recipe.precision, compile_=recipe.compile,
        offload=recipe.offload, qat=recipe.qat, global_batch=recipe.global_batch,
        generations=recipe.rollout.num_generations,
    )  # fmt: skip
    check_reward_adapter(recipe.reward.adapter_folder, recipe.method, recipe.parallel.world)
    if recipe.values:
        check_values(recipe.objective, recipe.method)
        check_answered_once(recipe.rollout.dynamic_sampling)
    if pair_losses(recipe.objective):
        check_sampled_pairs(recipe.objective, recipe.policy)
        check_two_answers(recipe.objective, recipe.rollout.num_generations, recipe.micro_batch)
    elif recipe.policy.loss_type not in OF_TOKENS:
        raise InvalidRequest(
            f"`policy.loss_type: {recipe.policy.loss_type}` under `objective: {recipe.objective}`:"
            " it is the loss of a pair of answers",
            hint=f"use one of {', '.join(OF_TOKENS)}, or `objective: online_dpo`",
        )
    check_copied(recipe.policy.beta, recipe.method, recipe.parallel.world)
    if recipe.sequence_length != recipe.rollout.width:
        raise InvalidRequest(
            f"a row of {recipe.sequence_length} tokens is not a prompt of"
            f" {recipe.rollout.max_prompt_length} with an answer of"
            f" {recipe.rollout.max_completion_length}",
            hint="make `task.sequence_length` their sum",
        )
