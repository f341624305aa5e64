"""TRL's own GRPO and RLOO trainers beside memfit's losses; run by TRL's Python.

Writes to the named file a JSON object by case: both losses, and the largest difference of
advantages and of any gradient over the largest gradient. The answers are given, not sampled: what
is compared begins with them.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from memfit.records.reinforcement import Policy
from memfit.train.rl.advantages import (
    group_advantages,
    leave_one_out_advantages,
    penalise,
    sum_rewards,
)
from memfit.train.rl.policy_loss import Answers, Counts
from memfit.train.rl.rows import answer_mask, lay_out
from memfit.train.step.step import answer_log_probs, step
from other_trainers.shared import END, LONGEST, PAD, largest, make_tokenizer
from tiny_models import VOCAB, gradients_in, make_built, make_recipe

GROUP, GROUPS = 4, 2
NAN = float("nan")
# by function; the second group's second answer is judged by none
REWARDS = [
    [1.0, 0.0, 0.5, 2.0, 0.0, NAN, 3.0, 1.0],
    [0.2, NAN, 0.0, -1.0, 0.3, NAN, 0.1, 0.0],
]
WEIGHTS = [1.0, 0.5]
LENGTHS = [3, 6, 1, 4, 6, 2, 5, 6]  # of answers; 6 is the limit
GRPO_CASES = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "batch": {"scale_rewards": "batch"},
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "gspo, kl": {"importance_sampling_level": "sequence", "beta": 0.3},
    "kl": {"beta": 0.3},
    "kl without the ratio": {"beta": 0.3, "use_bias_correction_kl": False},
    "clip higher": {"epsilon": 0.1, "epsilon_high": 0.28, "temperature": 0.7},
    "delta": {"delta": 1.3, "epsilon_high": 0.1},
    "masked": {"mask_truncated_completions": True, "loss_type": "grpo", "beta": 0.1},
    "masked, dapo": {"mask_truncated_completions": True},
    "on policy": {"num_iterations": 1, "beta": 0.3},
    "chunked": {"beta": 0.3, "loss": "chunked"},
}
RLOO_CASES = {
    "rloo": {"beta": 0.0},
    "rloo, kl": {"beta": 0.05, "temperature": 0.7},
    "rloo, normalised": {
        "beta": 0.2,
        "normalize_advantages": True,
        "epsilon": 0.1,
        "epsilon_high": 0.1,
    },
    "rloo, masked": {"mask_truncated_completions": True, "beta": 0.0},
}


def make_answers():
    random = torch.Generator().manual_seed(3)
    prompts = [[5, 6, 7], [8, 9, 3, 4, 6]]  # words of one digit
    answers = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCAB, (length,), generator=random).tolist()
        answers.append(ids if length == LONGEST else [*ids[:-1], END])
    return prompts, answers


def make_weights():
    """Policy that sampled, reference, policy that is trained: near enough for ratios near 1."""
    built = make_built(make_recipe("llama"))
    old = {n: p.detach().clone() for n, p in built.model.state_dict().items()}
    random = torch.Generator().manual_seed(7)

    def moved(scale):
        return {n: w + scale * torch.randn(w.shape, generator=random) for n, w in old.items()}

    return old, moved(0.02), moved(0.02)


def theirs(settings, folder, prompts, answers, weights):
    """Loss, gradients and advantages of TRL's trainer."""
    old, reference, new = weights
    online = settings.get("objective", "grpo")
    trainer_class, arguments_class = GRPOTrainer, GRPOConfig
    if online == "rloo":
        trainer_class, arguments_class = RLOOTrainer, RLOOConfig
    given = {k: v for k, v in settings.items() if k not in ("loss", "objective")}
    if online == "grpo":
        given.setdefault(
            "num_iterations", 2
        )  # so that TRL computes the sampler's log-probabilities
    config = AutoConfig.for_model(**make_recipe("llama").model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(reference)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    arguments = arguments_class(
        output_dir=str(Path(folder) / "out"), per_device_train_batch_size=GROUP * GROUPS,
        num_generations=GROUP, max_completion_length=LONGEST, reward_weights=WEIGHTS,
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"}, **given,
    )  # fmt: skip
    names = [" ".join(map(str, p)) for p in prompts]
    functions = []
    for number, values in enumerate(REWARDS):

        def judge(completions, values=values, **_):
            return [None if v != v else v for v in values]

        judge.__name__ = f"judge{number}"
        functions.append(judge)
    trainer = trainer_class(
        model=folder, reward_funcs=functions, args=arguments, processing_class=make_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": names}),
    )  # fmt: skip
    many = (answers, None) if online == "grpo" else answers
    trainer._generate_single_turn = lambda *_, **__: many
    trainer.model.load_state_dict(old)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [{"prompt": name} for name in names for _ in range(GROUP)]
    inputs = trainer._generate_and_score_completions(rows)
    trainer.model.load_state_dict(new)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in trainer.model.named_parameters()}
    return float(loss.detach()), gradients, inputs["advantages"]


def ours(settings, prompts, answers, weights, cut):
    """The same of memfit's own step, in micro-batches of `cut` rows."""
    old, reference, new = weights
    online = settings.get("objective", "grpo")
    chunked = {"loss": "chunked", "loss_chunk": 5} if "loss" in settings else {}
    recipe = make_recipe("llama", micro_batch=cut, **chunked)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, clip_norm=0.0))
    built = make_built(recipe)
    kept = {k: v for k, v in settings.items() if k not in ("loss", "temperature", "objective")}
    policy = Policy(**kept)
    heat = settings.get("temperature", 1.0)
    asked = [p for p in prompts for _ in range(GROUP)]
    batch = lay_out(asked, answers, 16)
    counted = torch.ones(len(answers), dtype=torch.bool)
    if policy.mask_truncated_completions:
        counted = torch.tensor([ids[-1] in (END, PAD) for ids in answers])
    mask = answer_mask(batch.labels, counted)

    def scored(state):
        built.model.load_state_dict(state)
        return answer_log_probs(built, batch, heat).log_probs

    was = scored(old)
    ref = scored(reference) if policy.beta else None
    rewards = sum_rewards(torch.tensor(REWARDS).T, torch.tensor(WEIGHTS))
    if online == "grpo":
        advantages = group_advantages(rewards, GROUP, policy)
    else:
        if policy.beta:
            rewards = penalise(rewards, was, ref, mask, policy.beta)
        advantages = leave_one_out_advantages(rewards, GROUP, policy)
    counts = Counts(rows=len(answers), tokens=float(mask.sum()), longest=LONGEST)
    built.model.load_state_dict(new)
    found = gradients_in(built)
    on_policy = settings.get("num_iterations") == 1
    batches = []
    for start in range(0, len(answers), cut):
        at = slice(start, start + cut)
        told = Answers(
            online, policy, counts, heat, mask[at], advantages[at],
            None if on_policy else was[at], None if ref is None else ref[at],
        )  # fmt: skip
        batches.append(type(batch)(batch.input_ids[at], batch.labels[at], answers=told))
    result = step(built, batches, 1)
    return float(result.loss), found, advantages


def main():
    prompts, answers = make_answers()
    weights = make_weights()
    rloo = {name: {"objective": "rloo", **rest} for name, rest in RLOO_CASES.items()}
    found = {}
    for name, settings in (GRPO_CASES | rloo).items():
        with tempfile.TemporaryDirectory() as folder:
            loss, gradients, advantages = theirs(settings, folder, prompts, answers, weights)
        mine, mine_gradients, mine_advantages = ours(settings, prompts, answers, weights, 8)
        cut, cut_gradients, _ = ours(settings, prompts, answers, weights, 2)
        found[name] = {
            "loss": loss,
            "ours": mine,
            "cut": cut,
            "advantages": float((advantages - mine_advantages).abs().max()),
            "gradients": largest(mine_gradients, gradients),
            "cut gradients": largest(cut_gradients, gradients),
        }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
