"""TRL 1.12's own PPOTrainer beside memfit's iteration; run by TRL's Python with that version first.

Writes to the named file a JSON object by case. The answers are given, not sampled: what is compared
begins with them. Policy and value are adapters of equal weights in two copies of a base, and the
reference is the base without them; or policy, value and reference are three models. Each update has
its losses and gradients, the first one's are of the same weights to the bit, those after it are of
weights that each side moved itself.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from other_trainers.given_ppo import (
    CASES,
    LENGTHS,
    PROMPTS,
    SCORES,
    USUAL,
    Descent,
    fingerprint,
    is_whole,
    make,
    make_answers,
    ours,
)
from other_trainers.shared import LONGEST, PAD, largest, make_tokenizer
from tiny_models import make_recipe


class Reward(torch.nn.Module):
    """A reward model that gives stated scores: its logits are the same at all tokens of a row."""

    base_model_prefix = "backbone"

    def __init__(self):
        super().__init__()
        self.backbone = self._run
        self.scores = torch.tensor(SCORES)

    def _run(self, input_ids, **_):
        rows = self.scores[[self.rows[tuple(r)] for r in input_ids.tolist()]]
        hidden = rows.view(-1, 1, 1).expand(*input_ids.shape, 1)
        return type("Output", (), {"hidden_states": (hidden,)})

    def score(self, hidden):
        return hidden


def find_config():
    config = AutoConfig.for_model(**make_recipe("llama").model.config, num_labels=1)
    config.pad_token_id = PAD
    return config


def whole_models(state):
    """Policy, value and reference, and the descent of the first two."""
    kinds = (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForCausalLM)
    policy, value, reference = (
        kind.from_config(find_config(), attn_implementation="eager") for kind in kinds
    )
    own = {n: w for n, w in state.items() if "value." not in n and n != "score.weight"}
    policy.load_state_dict(own)
    valued = {n.removeprefix("value."): w for n, w in state.items() if n not in own}
    value.load_state_dict(valued)
    start = make(whole=True, moved=False).model.state_dict()
    reference.load_state_dict({n: start[n] for n in own})
    named = [*policy.named_parameters()]
    named += [(n if n == "score.weight" else f"value.{n}", p) for n, p in value.named_parameters()]
    return policy, value, reference, Descent(named)


def models(state):
    """Policy and value, each with an adapter of its own over a base of its own; no reference, and
    the descent of both."""
    config = find_config()
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    policy = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    policy = get_peft_model(policy, lora)
    value = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    value = inject_adapter_in_model(lora, value)
    policy.load_state_dict(
        {n: w for n, w in state.items() if ".value." not in n and "score" not in n}
    )
    value.load_state_dict({
        n.removeprefix("base_model.model.").replace(".value.", ".default."): w
        for n, w in state.items() if ".default." not in n and "lm_head" not in n
    })  # fmt: skip
    value.score.requires_grad_(True)
    named = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
    named += [
        ("base_model.model." + n.replace(".default.", ".value."), p)
        for n, p in value.named_parameters() if p.requires_grad
    ]  # fmt: skip
    return policy, value, None, Descent(named)


class Watched:
    """What TRL's functions are called with, and the answers that it is given."""

    def __init__(self, trainer, reward, answers, temperature):
        self.reward, self.answers, self.heat = reward, answers, temperature + 1e-7
        self.losses, self.figures, self.order, self.white = [], {}, [], None
        self._backward, self._whiten = trainer.accelerator.backward, ppo_trainer.masked_whiten
        trainer.accelerator.backward, trainer.log = self.backward, self.figures.update
        ppo_trainer.batch_generation, ppo_trainer.masked_whiten = self.generate, self.whiten

    def backward(self, loss):
        self.losses.append(float(loss.detach()))
        self._backward(loss)

    def whiten(self, x, mask, shift_mean=True):
        found = self._whiten(x, mask, shift_mean)
        self.white = found * mask
        return found

    def generate(self, model, queries, *_):
        """The answers, and logits of the policy that would have sampled them."""
        rows = [[int(i) for i in row if i != PAD] for row in queries]
        self.order = [PROMPTS.index(row) for row in rows]
        own = [self.answers[n] for n in self.order]
        both = torch.cat(
            (queries, torch.tensor([[*a, *[PAD] * (LONGEST - len(a))] for a in own])), 1
        )
        rows = [
            [0 if i == PAD else i for i in row] for row in both.tolist()
        ]  # as TRL asks for them
        self.reward.rows = {tuple(row): n for row, n in zip(rows, self.order, strict=True)}
        out = ppo_trainer.forward(model, both, PAD)
        return both, out.logits[:, queries.shape[1] - 1 : -1] / self.heat

    def leave(self):
        ppo_trainer.masked_whiten = self._whiten


def theirs(case, folder, answers):
    """Losses, gradients, figures and advantages of TRL's trainer."""
    whole, settings = is_whole(case), USUAL | CASES[case]
    state = {n: w.clone() for n, w in make(whole=whole).model.state_dict().items()}
    policy, value, reference, descent = (whole_models if whole else models)(state)
    reward, tokenizer = Reward(), make_tokenizer()
    tokenizer.padding_side = "left"
    arguments = PPOConfig(
        output_dir=str(Path(folder) / "out"), per_device_train_batch_size=len(PROMPTS),
        gradient_accumulation_steps=1, total_episodes=len(PROMPTS), response_length=LONGEST,
        stop_token="eos", num_sample_generations=0, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    still = torch.optim.lr_scheduler.LambdaLR(descent, lambda _: 1.0)
    trainer = PPOTrainer(
        args=arguments, processing_class=tokenizer, model=policy, ref_model=reference,
        reward_model=reward, value_model=value, optimizers=(descent, still),
        train_dataset=Dataset.from_dict({"input_ids": list(PROMPTS)}),
        data_collator=DataCollatorWithPadding(tokenizer),
    )  # fmt: skip
    watched = Watched(trainer, reward, answers, arguments.temperature)
    trainer.train()
    watched.leave()
    back = torch.tensor(np.argsort(watched.order))
    return watched.losses, descent.seen, watched.figures, watched.white[back]


def told(other):
    """Of TRL's, by the names of memfit's log, what is recorded and compared."""
    losses, gradients, figures, advantages = other
    return {
        "losses": losses,
        "gradients": fingerprint(gradients[-1]),
        "advantages": advantages.tolist(),
        "value_loss": figures["loss/value_avg"],
        "clipped_values": figures["val/clipfrac_avg"],
        "clipped": figures["policy/clipfrac_avg"],
        # a mean over tokens; TRL's is a sum over those of an answer
        "kl": figures["objective/kl"] * len(LENGTHS) / sum(LENGTHS),
    }


def main():
    answers = make_answers()
    found = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            other = theirs(name, folder, answers)
        found[name] = told(other)
        for key, cut in (("apart", len(PROMPTS)), ("apart, cut", 2)):
            mine = ours(name, answers, cut)
            pairs = zip(mine[1], other[1], strict=True)
            found[name][key] = [largest(first, second) for first, second in pairs]
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
