"""The held-out loss that a run of the demo reports, against Hugging Face's class over all files."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import demo

from typed_commands import ROOT, quick

SMALL = ("hidden_size=64", "intermediate_size=160", "num_hidden_layers=2")  # of the demo's model
STEPS = 12
EVERY = 12  # of the library's modules, one in so many


def score(folder, files, length):
    """Mean loss over all tokens of the files, in pieces of `length`, and how many tokens it is of.

    Nothing of it is memfit's: the exported weights and tokenizer, read by their own classes.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    with torch.no_grad():
        for file in files:
            ids = tokenizer(file.read_text())["input_ids"] + [tokenizer.eos_token_id]
            for start in range(0, len(ids) - 1, length):
                piece = torch.tensor(ids[start : start + length + 1])
                logits = model(piece[None, :-1]).logits[0]
                total += float(cross_entropy(logits, piece[1:], reduction="sum"))
                count += len(piece) - 1
    return total / count, count


@pytest.mark.slow
def test_the_demos_held_out_loss_is_that_of_all_its_held_out_files(
    tmp_path, monkeypatch, certified_here
):
    monkeypatch.chdir(tmp_path)
    sources = demo.read_sources()[::EVERY]
    monkeypatch.setattr(demo, "read_sources", lambda: sources)
    monkeypatch.setattr(demo, "read_pairs", lambda _: [])  # which another run trains on
    demo.write_data()
    changes = (*(f"model.{key}" for key in SMALL), f"task.steps={STEPS}", "run.evaluate_every=0.5")
    typed = [word for key in changes for word in ("--set", key)]
    recipe = ROOT / "recipes" / "demo-llama_full_cpu.yaml"
    code, _, told = quick("train", recipe, "--folder", "run", "--quiet", *typed)
    assert code == 0, told
    files = sorted((demo.FOLDER / "held_out").iterdir())
    loss, count = score("run/model", files, 256)
    run = json.loads(Path("run/run.json").read_text())
    reported = run["measurements"]["loss.evaluation"]
    assert reported["value"] == pytest.approx(loss, rel=0.02)
    assert f"all {count:,} held-out tokens" in reported["counter"]
    # what an evaluation in the middle of the run read is less, and is named so
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    middle, last = (row for row in rows if "evaluation_loss" in row)
    assert not middle["evaluation_whole"]
    assert middle["evaluation_targets"] < count / 4
    assert last["evaluation_targets"] == count
