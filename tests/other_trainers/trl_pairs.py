"""Losses and gradients of TRL's own trainers of pairs, on weights and tokens made by a formula.

Reads a JSON list of cases (name, trainer, settings, config) from its input; writes {name: [loss,
{parameter: gradients}]}. The reference's log-probabilities are stated, and no model's.
"""

import json
import logging
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from formula_weights import fill_by_formula, make_formula_pairs, mismatch

REFERENCE = torch.tensor([-33.0, -18.0, -31.0, -19.0])
OF_OTHERS = torch.tensor([-20.0, -30.0, -19.0, -33.0])
TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig), "cpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig), "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
}  # fmt: skip


def make_trainer(kind, settings, config, folder):
    trainer, arguments = TRAINERS[kind]
    if kind == "reward":
        config = AutoConfig.for_model(**config, num_labels=1, pad_token_id=90)
        model = AutoModelForSequenceClassification.from_config(config).float()
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float()
    words = {f"w{n}": n for n in range(90)} | {"[pad]": 90, "[end]": 91, "[unk]": 92}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[unk]")),
        pad_token="[pad]", eos_token="[end]", unk_token="[unk]", bos_token="[end]",
    )  # fmt: skip
    rows = [{"prompt": "w1", "chosen": "w2", "rejected": "w3"}] * 2
    if kind == "kto":
        rows = [{"prompt": "w1", "completion": f"w{n}", "label": n == 2} for n in (2, 3)]
    before = {"precompute_ref_log_probs": True} if kind in ("dpo", "kto") else {}
    args = arguments(
        output_dir=folder, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=2, **before, **settings,
    )  # fmt: skip
    made = trainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    fill_by_formula(model, 0.1)
    return made, model


def rated_batch(pairs):
    found = {"label": torch.tensor([True, False, True, False])}
    for prefix, (ids, labels), reference in (
        ("", pairs, REFERENCE), ("KL_", mismatch(*pairs), OF_OTHERS),
    ):  # fmt: skip
        learned = torch.zeros_like(ids)
        learned[:, 1:] = labels[:, :-1] != -100
        length = learned.cumsum(1).argmax(1) + 1
        present = torch.arange(ids.shape[1]).unsqueeze(0) < length.unsqueeze(1)
        found |= {
            f"{prefix}input_ids": ids, f"{prefix}attention_mask": present.long(),
            f"{prefix}completion_mask": learned, f"ref_{prefix}logps": reference,
        }  # fmt: skip
    return found


def batch_of(kind, pairs):
    if kind == "kto":
        return rated_batch(pairs)
    ids, labels = pairs
    learned = torch.zeros_like(ids, dtype=torch.bool)
    learned[:, 1:] = labels[:, :-1] != -100
    length = learned.long().cumsum(1).argmax(1) + 1
    present = torch.arange(ids.shape[1]).unsqueeze(0) < length.unsqueeze(1)
    if kind == "reward":
        order = torch.tensor([0, 2, 1, 3])
        return {
            "input_ids": ids.masked_fill(~present, 90)[order],
            "attention_mask": present[order].long(),
        }  # fmt: skip
    if kind == "dpo":
        order = torch.tensor([0, 2, 1, 3])  # the chosen ones, then the rejected ones
        return {
            "input_ids": ids[order], "attention_mask": present[order].long(),
            "completion_mask": learned[order].long(),
            "ref_chosen_logps": REFERENCE[::2], "ref_rejected_logps": REFERENCE[1::2],
        }  # fmt: skip
    found = {}
    for start, name in enumerate(("chosen", "rejected")):
        here = slice(start, None, 2)
        found |= {
            f"{name}_input_ids": ids[here], f"{name}_attention_mask": present[here].long(),
            f"{name}_labels": ids[here].masked_fill(~learned[here], -100),
        }  # fmt: skip
    return found


def main():
    logging.disable(logging.WARNING)
    found = {}
    for name, kind, settings, config in json.load(sys.stdin):
        with tempfile.TemporaryDirectory() as folder:
            trainer, model = make_trainer(kind, settings, config, folder)
            model.train()
            loss = trainer.compute_loss(model, batch_of(kind, make_formula_pairs(12)))
            loss.backward()
        gradients = {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None}
        found[name] = [float(loss), gradients]
    sys.stdout.write("\n" + json.dumps(found))


main()
