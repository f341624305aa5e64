"""Whole runs that sample answers: the log, what is refused, stopping, and learning."""

import io
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from rollout_kills import parts_of, start_runs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_rollouts import LORA, REWARDS, ROLLOUT, recipe_of, run, write_data
from tiny_runs import CONFIG, tiny_recipe
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from gated_families import of_family
from memfit import api
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.families import read_model
from memfit.records import from_data
from memfit.records.ledger import Phase
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora, Preference
from memfit.records.reinforcement import REWARDS as SHIPPED
from memfit.records.reinforcement import Policy, RewardAdapter, RewardSettings
from memfit.records.request import Request, Task
from memfit.report.page import render_page
from memfit.screens.report import show_report
from memfit.screens.widgets.terminal import Console
from memfit.train.checkpoint.export import check_model
from memfit.train.data.prepare import find_lengths
from memfit.train.data.readers import find_sources
from memfit.train.data.tokenizer import read_tokenizer, train_tokenizer
from memfit.train.rl import learn
from memfit.train.rl.prompts import PromptRows, read_prompts
from memfit.train.rl.rewards.functions import BUILT_IN
from memfit.train.run.generate import generate
from memfit.train.run.logs import read_log
from memfit.train.run.loop import Cadence, train, untouched
from memfit.train.run.progress import Moment, Silent, describe

PAIRS = {
    **LORA, "policy": Policy(loss_type="sigmoid", beta=0.1),
    "rollout": replace(ROLLOUT, num_generations=2, temperature=0.9),
}  # fmt: skip
VALUED = {
    **LORA, "policy": Policy(beta=0.05, num_iterations=2),
    "rollout": replace(ROLLOUT, num_generations=1),
}  # fmt: skip
WHOLE = {k: v for k, v in VALUED.items() if k not in LORA}  # a value model, and a reference
KILLS = Path(__file__).parents[2] / "bench" / "results" / "rollout_kills.json"
KILLED = (("grpo", 3), ("online_dpo", 1), ("ppo", 1), ("ppo_full", 1))
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


STATES = {  # layers of linear attention and of attention; two updates with a rollout
    "model": ModelReference(
        name="tiny qwen3.5", source="",
        config={**of_family("qwen3_5_text", CONFIG), "model_type": "qwen3_5_text"},
    ),
    "policy": Policy(num_iterations=2),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("online")
    return root, write_data(root / "data"), root / "cache"


@pytest.fixture(scope="module")
def whole(place):
    """A run that nobody disturbs, by its objective."""
    root, file, cache = place
    found = {}

    def make(objective="grpo", **changes):
        key = objective, str(changes)
        if key not in found:
            folder = root / f"whole{len(found)}"
            recipe = recipe_of(root / "data", objective, **changes)
            found[key] = recipe, folder, run(recipe, file, folder, cache)
        return found[key]

    return make


def without_times(rows):
    """Lines of a log without what a clock, or who looked, says."""
    timed = re.compile(r"seconds|per_second|watched|memory_peak")
    return [{k: v for k, v in row.items() if not timed.search(k)} for row in rows]


def weights_of(folder):
    (file,) = (folder / "model").glob("*model.safetensors")
    return file.read_bytes()


def test_the_log_has_what_a_policy_is_watched_by(whole):
    recipe, folder, made = whole(**LORA, policy=Policy(beta=0.1, num_iterations=2))
    rows = read_log(folder)
    assert [row["step"] for row in rows] == list(range(1, recipe.steps + 1))
    figures = {
        "reward", "reward_std", "kl", "length", "truncated", "clipped_low", "clipped_high",
        "entropy", "grad_norm", "rollout_tokens_per_second", "update_tokens_per_second",
        "rollout_seconds", "reward_seconds", "score_seconds", "update_seconds",
    }  # fmt: skip
    assert all(figures <= set(row) for row in rows)
    assert all(row["seconds"] > row["rollout_seconds"] + row["update_seconds"] for row in rows)
    assert all(0 < row["entropy"] <= math.log(CONFIG["vocab_size"]) for row in rows)
    first = rows[0]
    by_function = first["rewards"]
    assert first["reward"] == pytest.approx(by_function[0] + 0.5 * by_function[1], abs=1e-5)
    assert {s["prompt"] for row in rows for s in row["samples"]} <= {f"Say {n}:" for n in range(24)}
    assert made.rewards == tuple((row["step"], row["reward"]) for row in rows)
    assert {a.step for a in made.answers} == {1, recipe.steps}
    assert made.measurements["seconds.rollout"].value > 0
    assert made.measurements["reward.first"].value == pytest.approx(first["reward"])
    assert {"prefill", "decode", "score", "reference", "backward"} <= set(made.phases)


def test_the_log_of_sampled_pairs_has_what_pairs_are_watched_by(whole):
    recipe, folder, made = whole("online_dpo", **PAIRS)
    rows = read_log(folder)
    assert [row["step"] for row in rows] == list(range(1, recipe.steps + 1))
    for row in rows:
        assert row["reward_margin"] == pytest.approx(row["reward_chosen"] - row["reward_rejected"])
        assert 0 <= row["reward_accuracy"] <= 1
        assert "clipped_low" not in row
    assert rows[0]["reward_margin"] == 0.0  # an adapter starts as its base
    assert any(row["reward_margin"] != 0 for row in rows[1:])
    assert made.measurements["reward.accuracy.final"].value == rows[-1]["reward_accuracy"]
    assert {"prefill", "decode", "reference", "backward"} <= set(made.phases)
    assert "score" not in made.phases


def test_a_run_with_values_logs_them_and_leaves_their_adapter(whole):
    """The folder of the value is one of a reward model: peft's own class reads it."""
    _, folder, made = whole("ppo", **VALUED)
    rows = read_log(folder)
    figures = {"reward", "kl", "value_loss", "clipped_values", "clipped_low", "entropy"}
    assert all(figures <= set(row) for row in rows)
    assert not any("even_groups" in row for row in rows)
    assert made.measurements["rollout.value_loss"].value > 0
    for curve, name in ((made.divergences, "kl"), (made.value_losses, "value_loss")):
        assert curve == tuple((row["step"], row[name]) for row in rows)
    assert {"prefill", "decode", "score", "reference", "values", "accumulate"} <= set(made.phases)
    config = LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"}, num_labels=1)
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = PeftModel.from_pretrained(
            LlamaForSequenceClassification(config), str(folder / "value")
        )
    loaded = wrapped.state_dict()
    with safe_open(folder / "value" / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
        head = file.get_tensor("base_model.model.score.weight")
    assert torch.equal(loaded["base_model.model.score.modules_to_save.default.weight"], head)
    with safe_open(folder / "model" / "adapter_model.safetensors", framework="pt") as file:
        assert {*file.keys(), "base_model.model.score.weight"} == names
        for name in file.keys():  # noqa: SIM118 (not a dict)
            assert "value" not in name
    _spoil(folder, "model", "value")


def _spoil(folder, *parts):
    """Files that are no longer as they were written are found."""
    for part in parts:
        check_model(folder)
        (weights,) = (folder / part).glob("*.safetensors")
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InvalidRequest, match="not as it was written"):
            check_model(folder)
        weights.write_bytes(content)


def test_the_model_of_a_run_with_a_value_model_is_the_policy_alone(whole):
    """transformers' class reads it and misses nothing; generation does, too."""
    recipe, folder, made = whole("ppo", **WHOLE)
    figures = {"reward", "kl", "value_loss", "clipped_values"}
    assert all(figures <= set(row) for row in read_log(folder))
    assert {"score", "reference", "values", "accumulate"} <= set(made.phases)
    _, said = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with safe_open(folder / "model" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {w.name for w in read_model(recipe.model).weights}
    assert not (folder / "value").exists()
    _spoil(folder, "model")
    assert isinstance(generate(folder, "Say 3:", max_new_tokens=2), str)


@pytest.mark.parametrize("changes", [{}, STATES], ids=["llama", "states of rows"])
def test_a_finished_run_speaks_and_transformers_reads_it(whole, changes):
    _, folder, _ = whole(**changes)
    assert isinstance(generate(folder, "Say 3:", max_new_tokens=3), str)
    assert AutoTokenizer.from_pretrained(folder / "model").eos_token


def test_the_reports_show_rewards_seconds_and_answers(place, tmp_path, certified_here):
    root, file, _ = place
    request = from_data(asked(root, file, steps=4), Request, source="here")
    folder = tmp_path / "run"
    api.train(request, folder, override=True)
    report = api.write_report(folder)
    page = (folder / "report.html").read_text()
    for text in ("Reward", "Seconds of an iteration", "Sampled answers", "Say "):
        assert text in page
    planned = {row.phase: row for row in report.plan.time.phases}
    found = {c.name: c for c in report.comparisons}
    for part, phases in (("rollout", ("switch", "prefill", "decode")), ("update", ("update",))):
        rate = found[f"time.{part}_tokens_per_second"]
        seconds = sum(planned[phase].seconds for phase in phases)
        assert rate.predicted == pytest.approx(planned[phases[-1]].tokens / seconds)
        assert rate.measured == report.run.measurements[f"rate.{part}"].value
    assert "<h2>Loss" not in page
    assert report.run.rewards
    shown = io.StringIO()
    show_report(Console(shown, width=80), report, commands=())
    shown = shown.getvalue()
    for text in ("Reward: ", "Seconds of an iteration", "Sampled answers", "'Say "):
        assert text in shown
    assert "Training loss" not in shown
    curves = ("KL divergence from the reference", "Loss of the values")
    assert not any(title in text for title in curves for text in (page, shown))
    points = ((1, 0.5), (2, 0.25))
    run = replace(report.run, divergences=points, value_losses=points)
    other, shown = replace(report, run=run), io.StringIO()
    show_report(Console(shown, width=80), other, commands=())
    for text in (shown.getvalue(), render_page(other, folder="run")):
        assert all(title in text for title in curves)


def asked(root, file, **task):
    """A request's data."""
    return {
        "model": CONFIG, "method": "full", "precision": "fp32", "hardware": {"device": "cpu"},
        "task": {"objective": "grpo", "data": str(file), "global_batch": 16, **task},
        "rollout": {"num_generations": 4, "max_prompt_length": 12, "max_completion_length": 6},
        "reward": {"funcs": [f"{root / 'data' / 'rewards.py'}:digits"]},
    }  # fmt: skip


def held_out_of(recipe, file, share=0.25):
    """Which prompts are held out, as `datasets` draws them."""
    count = len(file.read_text().splitlines())
    order = np.random.default_rng(Request(model=CONFIG).seed).permutation(count)
    return {f"Say {n}:" for n in order[: math.ceil(share * count)]}


def test_held_out_prompts_are_answered_greedily_and_drawn_by_no_rollout(place, tmp_path):
    """The answers are Hugging Face's own of the weights that the run ends with."""
    root, file, cache = place
    (tmp_path / "seen.py").write_text(
        "import json\n"
        "def seen(prompts, completions, **_):\n"
        f"    with open({str(tmp_path / 'seen.jsonl')!r}, 'a') as file:\n"
        "        file.write(json.dumps([prompts, completions]) + '\\n')\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    reward = RewardSettings(funcs=(f"{tmp_path / 'seen.py'}:seen",))
    recipe = recipe_of(root / "data", reward=reward, steps=4)
    task = Task(objective="grpo", data=str(file), evaluation_share=0.25)
    folder, cadence = tmp_path / "run", Cadence(save_every=2, evaluate_every=2)
    made = train(recipe, Request(model=CONFIG, task=task), folder, cadence=cadence, cache=cache)
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    held = held_out_of(recipe, file)
    kinds = [{*prompts} <= held for prompts, _ in calls]
    assert kinds == [False, False, True, False, False, True]
    assert all(not {*prompts} & held for prompts, _ in calls[:2])
    prompts, answers = calls[-1]
    assert {*prompts} == held
    assert len(prompts) == len(held) == 6
    rows = read_log(folder)
    assert [("evaluation_reward" in row) for row in rows] == [False, True, False, True]
    lengths = [float(len(text)) for text in answers]
    assert rows[-1]["evaluation_reward"] == pytest.approx(statistics.mean(lengths))
    error = statistics.stdev(lengths) / math.sqrt(6)
    assert rows[-1]["evaluation_reward_error"] == pytest.approx(error)
    found = made.measurements["reward.evaluation"]
    assert (found.value, found.n) == (rows[-1]["evaluation_reward"], 6)
    assert "greedy answers to 6 held-out prompts, step 4" in found.counter
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        told = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(told, skip_special_tokens=True) == answer


def test_evaluations_change_nothing_of_what_is_learned(place, tmp_path):
    """A file of held-out prompts; longer ones are left out and said."""
    root, file, cache = place
    other = tmp_path / "held.jsonl"
    lines = [{"prompt": f"Tell {n}:", "wanted": n} for n in range(3)]
    other.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "x" * 99, "wanted": 1}])))
    recipe, weights = recipe_of(root / "data", steps=3), []
    for evaluation in ("", str(other)):
        folder = tmp_path / f"run{len(weights)}"
        task = Task(objective="grpo", data=str(file), evaluation=evaluation)
        cadence = Cadence(evaluate_every=1)
        train(recipe, Request(model=CONFIG, task=task), folder, cadence=cadence, cache=cache)
        weights.append(weights_of(folder))
    assert weights[0] == weights[1]
    assert [row["evaluation_prompts"] for row in read_log(folder)] == [3, 3, 3]


def test_the_model_is_that_of_the_best_held_out_reward(place, tmp_path):
    """The reward falls with every update here: the run stops, and ends with its first weights."""
    root, file, cache = place
    (tmp_path / "worse.py").write_text(
        "LEFT = [9]\n"
        "def worse(completions, **_):\n"
        "    if len(completions) == 6:\n"
        "        LEFT[0] -= 1\n"
        "    return [float(LEFT[0] + n % 2) for n, _ in enumerate(completions)]\n"
    )
    reward = RewardSettings(funcs=(f"{tmp_path / 'worse.py'}:worse",))
    recipe = recipe_of(root / "data", reward=reward, steps=6)
    task = Task(objective="grpo", data=str(file), evaluation_share=0.25)
    request = Request(model=CONFIG, task=task)
    cadence = Cadence(save_every=9, evaluate_every=1, best_by="reward", patience=2)
    made = train(recipe, request, tmp_path / "run", cadence=cadence, cache=cache)
    assert [row["evaluation_reward"] for row in read_log(tmp_path / "run")] == [8.5, 7.5, 6.5]
    assert made.steps_done == 3
    best = made.measurements["best.reward"]
    assert best.value == 8.5
    assert best.counter == "step 1; greedy answers to all held-out prompts"
    short = replace(recipe, steps=1)
    train(short, request, tmp_path / "short", cadence=Cadence(save_every=9), cache=cache)
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "short")


@pytest.mark.parametrize(
    ("best_by", "share", "said"),
    [
        ("loss", 0.25, "held-out prompts are judged by the mean reward"),
        ("reward", 0.0, "names no held-out data"),
    ],
)
def test_a_best_run_without_a_held_out_reward_is_refused(place, tmp_path, best_by, share, said):
    root, file, cache = place
    task = Task(objective="grpo", data=str(file), evaluation_share=share)
    request, cadence = Request(model=CONFIG, task=task), Cadence(best_by=best_by)
    with pytest.raises(InvalidRequest, match=said):
        train(recipe_of(root / "data"), request, tmp_path / "run", cadence=cadence, cache=cache)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_share_that_leaves_nothing_to_train_on_is_refused(place, tmp_path):
    root, file, cache = place
    task = Task(objective="grpo", data=str(file), evaluation_share=0.99)
    with pytest.raises(InvalidRequest, match="leaves 0 to train on"):
        train(recipe_of(root / "data"), Request(model=CONFIG, task=task), tmp_path, cache=cache)


class _Stop(Silent):
    """Asks the run to stop, as a batch system would, after a step."""

    def __init__(self, step):
        self._step = step

    def show(self, moment):
        if moment.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        ("grpo", {}),
        ("grpo", {**LORA, "policy": Policy(beta=0.1, num_iterations=2)}),
        pytest.param("rloo", {**LORA, "policy": Policy(beta=0.05)}, marks=pytest.mark.wide),
        ("online_dpo", PAIRS),
        ("ppo", VALUED),
        ("ppo", WHOLE),
        ("grpo", STATES),
    ],
)
def test_a_run_that_was_stopped_twice_is_the_same_to_the_bit(
    whole, place, tmp_path, objective, changes
):
    _, file, cache = place
    recipe, folder, made = whole(objective, **changes)
    cut = tmp_path / "cut"
    for step in (1, 4):  # between the updates of a rollout, and between two rollouts
        with pytest.raises(RunFailed, match=f"interrupted after step {step}"):
            run(recipe, file, cut, cache, progress=_Stop(step))
    again = run(recipe, file, cut, cache)
    assert weights_of(cut) == weights_of(folder)
    assert without_times(read_log(cut)) == without_times(read_log(folder))
    assert again.rewards == made.rewards


def test_other_reward_functions_half_way_are_said(place, tmp_path):
    _, _, cache = place
    file = write_data(tmp_path / "data")
    recipe = recipe_of(tmp_path / "data", steps=3)
    with pytest.raises(RunFailed, match="interrupted"):
        run(recipe, file, tmp_path / "run", cache, progress=_Stop(1))
    (tmp_path / "data" / "rewards.py").write_text(REWARDS + "\n# changed\n")
    made = run(recipe, file, tmp_path / "run", cache)
    assert any("changed since this run began" in w for w in made.warnings)


def test_another_set_of_prompts_is_refused(place, tmp_path):
    root, file, cache = place
    recipe = recipe_of(root / "data", steps=3)
    with pytest.raises(RunFailed, match="interrupted"):
        run(recipe, file, tmp_path, cache, progress=_Stop(1))
    with pytest.raises(InvalidRequest, match="data"):
        run(recipe, write_data(tmp_path / "other", 20), tmp_path, cache)


REFUSED = {
    "nobody judges": ({"reward": RewardSettings()}, "nobody judges the answers"),
    "no such file": ({"reward": RewardSettings(funcs=("no.py:f",))}, "there is no file `no.py`"),
    "too few prompts": (
        {"rollout": replace(ROLLOUT, max_prompt_length=1), "sequence_length": 7},
        "has 0 prompts of at most 1 tokens, and a rollout takes 4",
    ),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_before_a_byte_is_written(place, tmp_path, changes, said):
    root, file, cache = place
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        run(recipe_of(root / "data", **changes), file, tmp_path / "run", cache)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_reward_that_cannot_be_loaded_is_refused_before_the_first_rollout(place, tmp_path):
    root, file, cache = place
    reward = RewardSettings(funcs=(f"{root / 'data' / 'rewards.py'}:nobody",))
    with pytest.raises(InvalidRequest, match="has no function `nobody`"):
        run(recipe_of(root / "data", reward=reward), file, tmp_path / "run", cache)
    assert not (tmp_path / "run" / "run.json").exists()


def test_epochs_are_rollouts_of_all_prompts(place):
    root, file, _ = place
    data = asked(root, file, epochs=2)
    request = from_data(data, Request, source="here")
    reference = api.plan(request, levers=False).recipe.model
    # 24 prompts, twice, 4 a rollout
    assert find_lengths(request, reference, 18).task.steps == 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["<user>Say 3\n<assistant>3 done"], 300, folder)
    return folder


def read(tmp_path, tokenizer, *records):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return read_prompts(find_sources(str(file)), tokenizer)


def test_messages_are_rendered_by_the_chat_template_with_the_answer_s_header(tmp_path, tokenizer):
    """transformers' own rendering is the oracle."""
    mine = read_tokenizer(str(tokenizer))
    mine.wrapped.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "Say 3"}]
    found = read(tmp_path, mine, {"prompt": messages, "answer": 3}, {"prompt": "Say 3"})
    expected = mine.wrapped.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert found.prompts[0].ids == list(expected)
    assert found.prompts[0].columns == {"prompt": messages, "answer": 3}
    assert mine.decode(found.prompts[1].ids) == "Say 3"


def test_to_messages_an_answer_is_a_message(place, tmp_path, tokenizer):
    """As TRL calls reward functions."""
    mine = read_tokenizer(str(tokenizer))
    mine.wrapped.chat_template = TEMPLATE
    mine.save(tmp_path / "tokenizer")
    record = {"prompt": [{"role": "user", "content": "Say 3"}]}
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(record)] * 4))
    (tmp_path / "roles.py").write_text(
        "def roles(prompts, completions, **_):\n"
        "    return [float(p[-1]['role'] == 'user' and c[0]['role'] == 'assistant')"
        " for p, c in zip(prompts, completions)]\n"
    )
    recipe = recipe_of(
        place[0] / "data", steps=1, rollout=replace(ROLLOUT, max_prompt_length=40),
        sequence_length=46, reward=RewardSettings(funcs=(f"{tmp_path / 'roles.py'}:roles",)),
    )  # fmt: skip
    request = Request(
        model=CONFIG, tokenizer=str(tmp_path / "tokenizer"),
        task=Task(objective="grpo", data=str(tmp_path / "chats.jsonl")),
    )  # fmt: skip
    made = train(recipe, request, tmp_path / "run", cache=place[2])
    assert made.rewards == ((1, 1.0),)
    assert made.answers[0].prompt == "Say 3"


def test_a_failure_in_a_rollout_s_second_update_is_not_saved_as_if_nothing_had_changed(place):
    one, two = (
        recipe_of(place[0] / "data", policy=Policy(num_iterations=n)) for n in (1, 2)
    )  # fmt: skip
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.DECODE} < set(untouched(one))
    assert Phase.FORWARD not in untouched(two)
    assert Phase.DECODE in untouched(two)
    assert Phase.OPTIMIZER_STEP not in untouched(one)


BAD = {
    "no prompt": ({"question": "Hi"}, "line 1 has no `prompt`: it holds question"),
    "an argument's name": ({"prompt": "Hi", "completions": "x"}, "an argument of every reward"),
    "an answer's turn": (
        {"prompt": [{"role": "assistant", "content": "Hi"}]}, "is an assistant's"
    ),
    "no template": ({"prompt": [{"role": "user", "content": "Hi"}]}, "has no chat template"),
    "no message": ({"prompt": []}, "`prompt` is empty"),
    "no token": ({"prompt": ""}, "has no tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "said"), BAD.values(), ids=BAD)
def test_a_record_that_is_no_prompt_is_named_with_its_line(tmp_path, tokenizer, record, said):
    mine = read_tokenizer(str(tokenizer))
    mine.wrapped.chat_template = None if "no chat template" in said else TEMPLATE
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        read(tmp_path, mine, record)


def test_a_table_gives_all_its_columns(tmp_path, tokenizer):
    import pyarrow
    import pyarrow.parquet

    mine = read_tokenizer(str(tokenizer))
    rows = [{"prompt": "Say 3", "truth": 3}, {"prompt": "Say 4", "truth": 4}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "p.csv").write_text("prompt,truth\nSay 3,3\nSay 4,4\n")
    tables = [read_prompts(find_sources(str(tmp_path / n)), mine) for n in ("p.parquet", "p.csv")]
    assert [p.columns for p in tables[0].prompts] == rows
    assert [p.columns["truth"] for p in tables[1].prompts] == ["3", "4"]
    (tmp_path / "p.txt").write_text("Say 3")
    with pytest.raises(InvalidRequest, match="does not say where a prompt ends"):
        read_prompts(find_sources(str(tmp_path / "p.txt")), mine)


def test_long_prompts_are_left_out_and_counted(tmp_path, tokenizer, place):
    mine = read_tokenizer(str(tokenizer))
    found = read(tmp_path, mine, *[{"prompt": "x" * n} for n in (3, 4, 5, 6, 200)])
    rows = PromptRows(found, recipe_of(place[0] / "data"), "mine.jsonl")
    assert len(rows.prompts) == 4
    assert rows.notes == ("1 prompts of `mine.jsonl` longer than 12 tokens are left out",)


def test_the_rewards_that_ship_are_those_that_a_request_may_name():
    assert set(BUILT_IN) == set(SHIPPED)


def test_a_line_of_the_screen_has_reward_and_length():
    moment = Moment(3, -1e-9, 1e-5, 1.0, 100.0, 0, None, reward=0.25, length=7.5)
    assert describe(moment).startswith("reward 0.250  length 7.5  loss 0.0000")
    assert "reward unknown" in describe(moment._replace(reward=None))
    assert "reward 0.250 (50% without)  length" in describe(moment._replace(unjudged=0.5))


@pytest.mark.slow
def test_digits_are_learned_through_the_ordinary_workflow(place, tmp_path, certified_here):
    """From the reward of random weights to most of what there is, through plan, train and report.

    A random token is a digit one time in thirty.
    """
    root, file, _ = place
    data = asked(root, file, steps=40) | {
        "optimizer": {"learning_rate": 3e-3, "schedule": "constant", "beta2": 0.99},
    }
    data["task"]["global_batch"] = 96
    data["rollout"] = {
        "num_generations": 8, "max_prompt_length": 12, "max_completion_length": 4,
    }  # fmt: skip
    torch.set_num_threads(1)
    made = api.train(from_data(data, Request, source="here"), tmp_path / "run", override=True)
    assert made.measurements["reward.first"].value < 0.2
    assert made.measurements["reward.final"].value > 0.7


@pytest.mark.slow
# ranks that sample or learn are killed in test_rollouts_on_ranks.py, one process that saves in
# test_kill.py; what is stopped half-way through a rollout goes on with the same bits above
@pytest.mark.wide
@pytest.mark.parametrize(("objective", "kills"), KILLED)
def test_killed_in_every_part_of_an_iteration_a_run_ends_with_the_same_bits(
    objective, kills, tmp_path
):
    """bench/rollout_kills.py does it ten times in each part."""
    data, chance = write_data(tmp_path / "data"), random.Random(5)
    with start_runs(data, tmp_path / "cache", objective) as runs:
        runs.whole(tmp_path / "whole")
        for part in parts_of(objective):
            inside = 0
            for _ in range(10 * kills):
                if inside < kills:
                    inside += runs.kill(tmp_path / "cut", part, chance)
            assert inside == kills, f"no kill fell into {part}"
        runs.whole(tmp_path / "cut")
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    logs = [without_times(read_log(tmp_path / name)) for name in ("cut", "whole")]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 24


@pytest.mark.parametrize("objective", ["grpo", "online_dpo", "ppo"])
def test_ten_kills_in_each_part_were_measured(objective):
    """bench/results/rollout_kills.json: every kill within its part, and equal bits at the end."""
    found = json.loads(KILLS.read_text())[objective]["parts"]
    assert tuple(found) == parts_of(objective)
    for part in found.values():
        assert part["kills"] >= 10
        assert len(part["steps_logged"]) == part["kills"]
        assert (part["weights_bit_equal"], part["logs_equal"]) == (True, True)


@pytest.fixture(scope="module")
def judged(place, whole):
    """A base with its tokenizer, and a reward model's adapter of it as memfit's own run leaves it:
    whatever is a digit is preferred."""
    root, _, cache = place
    base = whole()[1] / "model"
    pairs = root / "pairs.jsonl"
    rows = [{"prompt": f"Say {n}:", "chosen": f"{n}{n}", "rejected": "abcd"} for n in range(24)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    config = json.loads((base / "config.json").read_text())
    model = ModelReference(name="base", source=str(base), config=config)
    recipe = tiny_recipe(
        objective="reward", preference=Preference(beta=1.0, loss_type="bradley_terry"), steps=12,
        packing=False, micro_batch=4, sequence_length=24, weights="pretrained", model=model,
        method="lora", lora=Lora(rank=2, alpha=4.0, targets=("o_proj", "k_proj")),
        optimizer={"learning_rate": 3e-2},
    )  # fmt: skip
    asked = Request(model=str(base), task=Task(objective="reward", data=str(pairs)))
    train(recipe, asked, root / "judge", cache=cache)
    return model, root / "judge" / "model"


def judged_recipe(place, judged, objective, **changes):
    model, folder = judged
    adapter = RewardAdapter(rank=2, alpha=4.0, targets=("k_proj", "o_proj"))
    reward = RewardSettings(
        funcs=(f"adapter:{folder}", f"{place[0] / 'data' / 'rewards.py'}:digits"),
        weights=(1.0, 0.0), adapter=adapter,
    )  # fmt: skip
    named = {**(VALUED if objective == "ppo" else LORA), "weights": "pretrained", **changes}
    return recipe_of(place[0] / "data", objective, model=model, reward=reward, **named)


@pytest.mark.parametrize("objective", ["ppo", pytest.param("grpo", marks=pytest.mark.wide)])
def test_a_run_is_judged_by_its_own_reward_model_and_goes_on_to_the_bit(
    place, judged, tmp_path, objective, monkeypatch
):
    """Stopped twice; the score is the log's, and transformers' with peft's own class."""
    _, file, cache = place
    seen, plain_scores = [], learn.scores_of

    def watched(*arguments):
        judge = plain_scores(*arguments)

        def score(prompts, answers):
            seen.append((prompts, answers, judge(prompts, answers)))
            return seen[-1][2]

        return score

    monkeypatch.setattr(learn, "scores_of", watched)
    recipe = judged_recipe(place, judged, objective, steps=4)
    before = weights_of(judged[1].parent)
    made = run(recipe, file, tmp_path / "whole", cache)
    assert weights_of(judged[1].parent) == before
    assert "reward" in made.phases
    rows = read_log(tmp_path / "whole")
    for row in rows:
        score, digits = row["rewards"]
        assert row["reward"] == pytest.approx(score, abs=1e-5)
        assert 0 <= digits <= 1
        assert not row["reward_failures"]
    for step in (1, 3):
        with pytest.raises(RunFailed, match=f"interrupted after step {step}"):
            run(recipe, file, tmp_path / "cut", cache, progress=_Stop(step))
    run(recipe, file, tmp_path / "cut", cache)
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    assert without_times(read_log(tmp_path / "cut")) == without_times(rows)

    plain = LlamaForSequenceClassification.from_pretrained(judged[0].source, num_labels=1)
    plain.config.pad_token_id = None
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        theirs = PeftModel.from_pretrained(plain, str(judged[1])).eval()
    sampled = [(*one, row) for one, row in zip(seen[-len(rows) :], rows, strict=True)]
    for prompts, answers, scores, _ in sampled[:: len(sampled) - 1]:
        ids = [torch.tensor([[*p, *a]]) for p, a in zip(prompts, answers, strict=True)]
        with torch.no_grad():
            expected = [float(theirs(one).logits) for one in ids]
        assert scores == pytest.approx(expected, abs=1e-5)


def test_a_run_goes_on_with_another_reward_model_and_says_so(place, judged, tmp_path):
    _, file, cache = place
    copied = tmp_path / "judge"
    shutil.copytree(judged[1], copied)
    recipe = judged_recipe(place, (judged[0], copied), "grpo", steps=3)
    with pytest.raises(RunFailed, match="interrupted"):
        run(recipe, file, tmp_path / "run", cache, progress=_Stop(1))
    head, name = copied / "adapter_model.safetensors", "base_model.model.score.weight"
    tensors = load_file(head)
    tensors[name] = tensors[name] * 2
    save_file(tensors, head, metadata={"format": "pt"})
    again = run(recipe, file, tmp_path / "run", cache)
    assert any(f"{copied}` changed since this run began" in text for text in again.warnings)


def test_a_reward_model_of_another_base_is_refused_before_a_run(place, judged, tmp_path):
    _, file, cache = place
    copied = tmp_path / "judge"
    shutil.copytree(judged[1], copied)
    config = copied / "adapter_config.json"
    stated = json.loads(config.read_text()) | {"base_model_name_or_path": "another/base"}
    config.write_text(json.dumps(stated))
    with pytest.raises(InvalidRequest, match="is an adapter of `another/base`, and the model is"):
        run(judged_recipe(place, (judged[0], copied), "ppo"), file, tmp_path / "run", cache)
