"""TRL's own OnlineDPOTrainer beside memfit's loss of sampled pairs; run by TRL's Python.

Writes to the named file a JSON object by case: both losses, that of memfit's step cut into smaller
micro-batches, the largest difference of any gradient over the largest gradient, and what both log
of rewards. The answers are given, not sampled: what is compared begins with them.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from memfit.records.reinforcement import Policy
from memfit.train.rl.advantages import find_judged_pairs, order_pairs, sum_rewards
from memfit.train.rl.policy_loss import Answers, Counts, name_sums
from memfit.train.rl.rows import answer_mask, lay_out
from memfit.train.step.step import answer_log_probs, step
from other_trainers.shared import END, LONGEST, PAD, largest, make_tokenizer
from other_trainers.trl_policies import make_weights
from tiny_models import draw_answers, gradients_in, make_built, make_recipe

PROMPTS = [[5, 6, 7], [8, 9, 3, 4, 6], [7], [3, 9]]
LENGTHS = [3, 6, 1, 4, 6, 2, 5, 6]  # of the two answers to each prompt; 6 is the limit
NAN = float("nan")
REWARDS = [1.0, 0.0, 0.5, 2.0, 0.25, 0.25, -1.0, 3.0]  # the third prompt's are equal
CASES = {
    "sigmoid": {},
    "ipo": {"loss_type": "ipo"},
    "beta": {"beta": 0.3},
    "missing end": {"missing_eos_penalty": 4.0},
    "two functions": {"second": [0.0, 3.0, NAN, NAN, 1.0, NAN, 0.0, 0.0], "weights": [1.0, 0.5]},
    "all equal": {"rewards": [1.0] * 8},
    "chunked": {"loss": "chunked", "loss_type": "ipo"},
    "as its reference": {"same": True},
}


def make_answers():
    return draw_answers(LENGTHS, LONGEST, END)


def blocks(rows):
    """TRL has the first answers to all prompts, then the second ones."""
    return [*rows[::2], *rows[1::2]]


def padded(rows, width, *, left=False):
    made = []
    for filler, kept in ((PAD, rows), (0, [[1] * len(row) for row in rows])):
        fills = [[filler] * (width - len(row)) for row in rows]
        pairs = zip(fills, kept, strict=True) if left else zip(kept, fills, strict=True)
        made.append(torch.tensor([[*first, *second] for first, second in pairs]))
    return made


def functions_of(settings):
    """Rewards by function, in memfit's order."""
    return [settings.get("rewards", REWARDS), *([s] if (s := settings.get("second")) else [])]


def theirs(settings, folder, answers, weights):
    """Loss, gradients and figures of TRL's trainer."""
    _, reference, new = weights
    config = AutoConfig.for_model(**make_recipe("llama").model.config)
    made = [AutoModelForCausalLM.from_config(config, attn_implementation="eager") for _ in "12"]
    for model, state in zip(made, (new, reference), strict=True):
        model.load_state_dict(state)
    kept = {k: v for k, v in settings.items() if k in ("loss_type", "beta", "missing_eos_penalty")}
    arguments = OnlineDPOConfig(
        output_dir=str(Path(folder) / "out"), per_device_train_batch_size=len(PROMPTS),
        max_new_tokens=LONGEST, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, reward_weights=settings.get("weights"), **kept,
    )  # fmt: skip
    functions = []
    for number, values in enumerate(functions_of(settings)):

        def judge(completions, values=values, **_):
            return [None if v != v else v for v in blocks(values)]

        judge.__name__ = f"judge{number}"
        functions.append(judge)
    names = [" ".join(map(str, p)) for p in PROMPTS]
    trainer = OnlineDPOTrainer(
        model=made[0], ref_model=made[1], reward_funcs=functions, args=arguments,
        processing_class=make_tokenizer(), train_dataset=Dataset.from_dict({"prompt": names}),
    )  # fmt: skip
    ids = padded(PROMPTS * 2, max(map(len, PROMPTS)), left=True)
    sampled = padded(blocks(answers), LONGEST)
    trainer._generate = lambda *_, **__: (*ids, *sampled, None)
    loss = trainer.training_step(trainer.model, {"prompt": names})
    gradients = {n: p.grad for n, p in trainer.model.named_parameters()}
    figures = {
        "reward_chosen": "rewards/chosen", "reward_rejected": "rewards/rejected",
        "reward_margin": "rewards/margins", "reward_accuracy": "rewards/accuracies",
    }  # fmt: skip
    return float(loss), gradients, {k: trainer.stats[v][-1] for k, v in figures.items()}


def ours(settings, answers, weights, cut):
    """The same of memfit's own step, in micro-batches of `cut` rows."""
    _, reference, new = weights
    chunked = {"loss": "chunked", "loss_chunk": 5} if "loss" in settings else {}
    recipe = make_recipe("llama", micro_batch=cut, **chunked)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, clip_norm=0.0))
    built = make_built(recipe)
    policy = Policy(loss_type=settings.get("loss_type", "sigmoid"), beta=settings.get("beta", 0.1))
    batch = lay_out([p for p in PROMPTS for _ in "12"], answers, 16)
    built.model.load_state_dict(reference)
    ref = answer_log_probs(built, batch, 1.0).log_probs
    by_function = torch.tensor(functions_of(settings)).T
    rewards = sum_rewards(by_function, torch.tensor(settings.get("weights", [1.0])))
    cut_short = torch.tensor([ids[-1] != END for ids in answers])
    rewards = rewards - settings.get("missing_eos_penalty", 0.0) * cut_short
    # TRL takes an answer that nobody judged for one of reward 0; memfit leaves its pair out
    rewards = rewards.nan_to_num(0.0)
    counted = find_judged_pairs(rewards)
    mask, ahead = answer_mask(batch.labels, counted), order_pairs(rewards)
    rows = int(counted.sum())
    counts = Counts(rows=rows, tokens=float(mask.sum()), longest=LONGEST)
    built.model.load_state_dict(new)
    found = gradients_in(built)
    batches = []
    for start in range(0, len(answers), cut):
        at = slice(start, start + cut)
        told = Answers("online_dpo", policy, counts, 1.0, mask[at], ahead[at], None, ref[at])
        batches.append(type(batch)(batch.input_ids[at], batch.labels[at], answers=told))
    result = step(built, batches, 1)
    return float(result.loss), found, name_sums("online_dpo", result.rewards, rows)


def main():
    answers = make_answers()
    old, reference, new = make_weights()
    found = {}
    for name, settings in CASES.items():
        weights = old, reference, reference if "same" in settings else new
        with tempfile.TemporaryDirectory() as folder:
            loss, gradients, figures = theirs(settings, folder, answers, weights)
        mine, mine_gradients, mine_figures = ours(settings, answers, weights, 8)
        cut, cut_gradients, _ = ours(settings, answers, weights, 2)
        found[name] = {
            "loss": loss,
            "ours": mine,
            "cut": cut,
            "gradients": largest(mine_gradients, gradients),
            "cut gradients": largest(cut_gradients, gradients),
            "figures": figures,
            "our figures": {k: v for k, v in mine_figures.items() if k in figures},
        }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
