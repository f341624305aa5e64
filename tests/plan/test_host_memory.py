"""Host memory of rollouts: what a plan counts, against the tensors and objects of memfit's loop."""

import sys

import msgspec
import pytest
import torch

from memfit import api
from memfit.core.units import GIB
from memfit.plan.memory.host_memory import ANSWER, LOG_PROB, ROW, rollouts_on_host
from memfit.records import from_data, to_json
from memfit.records.request import Request
from memfit.train.generation.settings import Completion
from memfit.train.rl.rows import answer_mask, lay_out
from tiny_models import CONFIGS


def plan(objective="grpo", **changes):
    data = {
        "model": CONFIGS["llama"], "hardware": {"device": "h100-sxm"}, "method": "lora",
        "rollout": {"max_prompt_length": 24, "max_completion_length": 40, "num_generations": 4},
        "reward": {"funcs": ["number"], "memory": "3 GiB"}, **changes,
    }  # fmt: skip
    data["task"] = {"objective": objective, "steps": 3, "global_batch": 16}
    return api.plan(from_data(data, Request, source="here"), levers=False)


def test_rows_of_an_update_are_the_tensors_that_the_loop_lays_out():
    batch = lay_out([[1] * 24] * 16, [[2] * 40] * 16, 64)
    mask = answer_mask(batch.labels, torch.ones(16, dtype=torch.bool))
    held = batch.input_ids.nbytes + batch.labels.nbytes + mask.nbytes
    scored = torch.zeros(batch.labels.shape).nbytes
    assert held == ROW * 16 * 64
    assert scored == LOG_PROB * 16 * 64
    assert plan().host["rows"] == held
    assert plan(policy={"beta": 0.1}).host["rows"] == held + scored
    assert plan(policy={"beta": 0.1, "num_iterations": 2}).host["rows"] == held + 2 * scored
    assert plan("rloo").host["rows"] == held + 2 * scored
    # both log-probabilities; values, returns, places and advantages
    assert plan("ppo").host["rows"] == held + 6 * scored
    assert plan("rloo", policy={"beta": 0.0}).host["rows"] == held


def test_an_answers_tokens_are_python_s_objects():
    tokens = 4096
    ids = tuple(range(1000, 1000 + tokens))  # small ints are shared, and a vocabulary's are not
    answer = Completion(ids, tuple(float(-n) for n in range(tokens)), "length")
    held = sys.getsizeof(answer.ids) + sys.getsizeof(answer.log_probs)
    held += sum(map(sys.getsizeof, answer.ids)) + sum(map(sys.getsizeof, answer.log_probs))
    text = 4 * tokens  # of English, some four characters a token
    assert ANSWER * tokens == pytest.approx(held + text, rel=0.12)
    assert ANSWER * tokens >= held + text


def test_more_rounds_and_longer_answers_hold_more():
    found = [
        plan(rollout={"max_completion_length": length, "dynamic_sampling": rounds})
        for length, rounds in ((40, 0), (80, 0), (80, 2))
    ]
    held = [made.host["answers"] for made in found]
    assert held == sorted(set(held))


def test_a_reward_process_counts_with_its_limit_and_the_plan_says_so():
    one, two = plan(), plan(reward={"funcs": ["number", "format"], "memory": "3 GiB"})
    assert (one.host["reward_processes"], two.host["reward_processes"]) == (3 * GIB, 6 * GIB)
    (said,) = (line for line in one.assumptions if "host memory for a rollout" in line)
    assert "at most 3 GiB for each reward process" in said
    assert msgspec.json.decode(to_json(one))["host"] == one.host
    assert one.memory == plan(reward={"funcs": ["number"], "memory": "9 GiB"}).memory


def test_what_samples_nothing_holds_nothing_but_what_it_offloads():
    data = {"model": "gpt2", "hardware": {"device": "h100-sxm"}, "method": "full"}
    plain = api.plan(from_data(data, Request, source="here"), levers=False)
    assert rollouts_on_host(plain.recipe) == plain.host == {}
    data |= {"offload": "optimizer", "optimizer": {"clip_norm": 0.0}}
    states = api.plan(from_data(data, Request, source="here"), levers=False)
    assert states.host["offloaded"] > 2 * 4 * 124e6  # two fp32 moments a parameter
