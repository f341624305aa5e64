"""Requests of Megatron-LM's step that its tests share."""

from memfit.plan.frameworks import Job, find_framework
from memfit.plan.frameworks.megatron.settings import read_settings
from memfit.plan.frameworks.megatron.shape import read_shape
from memfit.plan.frameworks.megatron.split import deal_stages
from memfit.plan.frameworks.megatron.stage import count_stage, find_flights, read_blocks
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.request import Request

GPT = {
    "name": "GPT", "model_type": "gpt2", "vocab_size": 51200, "n_embd": 1024, "n_layer": 24,
    "n_head": 16, "n_positions": 2048,
}  # fmt: skip


LLAMA_70B_CUT = {
    "name": "12 blocks of Llama-3-70B", "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 12,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def job(model=GPT, device="a100-sxm-80", length=1024, batch=4, micro=4, **more):
    parallel = {"zero": 1} | more.pop("parallel", {})
    count = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
        count *= parallel.get(axis, 1)
    request = {
        "model": model, "framework": "megatron", "parallel": parallel, "micro_batch": micro,
        "task": {"sequence_length": length, "global_batch": batch},
        "hardware": {"device": device, "count": count}, **more,
    }  # fmt: skip
    recipe, read, _ = read_defaults(from_data(request, Request, source="test"))
    asked = Job(model=read, recipe=recipe, device=find_device(recipe.device))
    find_framework("megatron").check(asked)
    return asked


def predict(**asked):
    made = job(**asked)
    return predict_ledger(made.recipe, made.model, made.device)


def one_stage(made):
    """Shape, blocks and numbers of the only stage of a step without a pipeline."""
    shape, settings = read_shape(made), read_settings(made)
    (stage,) = deal_stages(made, shape)
    count = count_stage(shape, settings, stage, find_flights(shape, settings, stage))
    return shape, read_blocks(shape, settings), count
