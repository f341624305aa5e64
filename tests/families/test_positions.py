"""How long a row may be: what Hugging Face's class does with one token more than its positions."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memfit.families import find_family
from memfit.plan.simulate.sampled import rollout
from memfit.train.generation import loop
from tiny_models import CONFIGS


@pytest.mark.parametrize("family", CONFIGS)
def test_rows_end_where_the_class_has_no_position_left(family):
    """And the planner's rollout ends them where the trainer's does."""
    config = {k: v for k, v in CONFIGS[family].items() if k != "model_type"}
    kind = CONFIGS[family]["model_type"]
    read = AutoConfig.for_model(kind, **config)
    model = AutoModelForCausalLM.from_config(read, attn_implementation="eager")
    architecture = find_family(kind).architecture(CONFIGS[family])
    most = architecture.max_sequence
    ends = False
    with torch.no_grad():
        model(torch.zeros(1, most, dtype=torch.int64))
        try:
            model(torch.zeros(1, most + 1, dtype=torch.int64))
        except (IndexError, RuntimeError):
            ends = True
    assert find_family(kind).ends == ends
    endless = architecture.alibi and not ends  # rotary positions go on, and were not trained
    for limit in (loop.find_limit, rollout.find_limit):
        assert limit(architecture) == (0 if endless else most)
