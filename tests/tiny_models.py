"""A tiny config of each model type, recipes over them, and a textbook training loop."""

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from gated_families import LORA_TARGETS, add_others, gated
from memfit.families import find_family
from memfit.plan.request.model_reference import with_head
from memfit.records.model import ModelReference
from memfit.records.recipe import ADAPTED, Freeze, Lora, Optimizer, Recipe
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights
from memfit.train.step.step import Batch

torch.set_num_threads(1)  # a second thread costs more than these models are worth
VOCAB = 97
_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_LATENT = {
    **_LLAMA, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_GPT_OSS = {
    **{k: v for k, v in _LLAMA.items() if k != "rms_norm_eps"}, "head_dim": 8,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", **_LLAMA},
    "gpt_oss": {"model_type": "gpt_oss", **_GPT_OSS},
    "deepseek_v2": {"model_type": "deepseek_v2", **_LATENT},
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT, "q_lora_rank": 24},
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": None},
    "mixtral": {
        "model_type": "mixtral", **_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", **_LLAMA, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", **_LLAMA, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", **_LLAMA, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "use_qk_norm": True,
    },
    "qwen2": {"model_type": "qwen2", **_LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4,
        "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "vocab_size": VOCAB, "hidden_size": 32,
        "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 64, "rotary_pct": 0.25, "bos_token_id": 0, "eos_token_id": 0,
    },
    "opt": {
        "model_type": "opt", "vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 16,
        "ffn_dim": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "gptj": {
        "model_type": "gptj", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4,
        "n_positions": 64, "rotary_dim": 4, "bos_token_id": 0, "eos_token_id": 0,
    },
    "falcon": {
        "model_type": "falcon", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True,
        "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
    },
    **gated(_LLAMA),
    "bloom": {
        "model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4,
        "seq_length": 64,
    },
    "mpt": {
        "model_type": "mpt", "vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4,
        "max_seq_len": 64,
    },
}  # fmt: skip
add_others(CONFIGS, _LLAMA)
FAMILIES = tuple(CONFIGS)
OWN_ATTENTION = ("bloom", "mpt")  # of these classes: `math` alone, and no packed rows
# whose linear attention carries a state over a whole row
RECURRENT = tuple(
    family for family in FAMILIES if find_family(family).architecture(CONFIGS[family]).recurrent
)
MATH_ONLY = (*OWN_ATTENTION, "gpt_oss", "gemma2")
ANY_KERNEL = tuple(family for family in FAMILIES if family not in MATH_ONLY)
TARGETS = {
    "deepseek_v2": ("q_proj", "kv_b_proj"), "deepseek_v3": ("q_b_proj", "kv_b_proj"),
    "gpt2": ("c_attn", "c_proj"), "gpt_neox": ("query_key_value",),
    "falcon": ("query_key_value",), "bloom": ("query_key_value",), "mpt": ("Wqkv",),
    **LORA_TARGETS,
}  # fmt: skip
PRECISIONS = (  # precision, base_format
    ("fp32", "fp32"), ("bf16", "bf16"), ("bf16-mixed", "fp32"), ("bf16-mixed", "bf16"),
)  # fmt: skip
_ADAMW = Optimizer(
    name="adamw", implementation="fused", learning_rate=1e-2, weight_decay=0.01, beta1=0.9,
    beta2=0.95, eps=1e-8, momentum=0.9, schedule="constant", warmup_steps=0, clip_norm=1.0,
)  # fmt: skip


def make_recipe(family="llama", *, config=None, optimizer=None, **changes) -> Recipe:
    """A tiny fp32 recipe of full training with some keys changed; LoRA gets fitting targets."""
    if changes.get("method") in ADAPTED:
        lora = Lora(rank=4, alpha=8.0, targets=TARGETS.get(family, ("q_proj", "v_proj")))
        changes.setdefault("lora", lora)
    if changes.get("method") == "freeze":
        changes.setdefault("freeze", Freeze(last_blocks=1))
    if family in MATH_ONLY:
        changes.setdefault("attention", "math")
    recipe = Recipe(
        model=ModelReference(name=family, source="", config=config or CONFIGS[family]),
        weights="random", objective="pretrain", method="full", lora=Lora(), freeze=Freeze(),
        base_format="fp32", precision="fp32", optimizer=replace(_ADAMW, **(optimizer or {})),
        recompute_blocks=0, attention="flash", loss="plain", loss_chunk=0, sequence_length=16,
        packing=False, micro_batch=2, accumulation=1, steps=3, device="cpu-x86", seed=0,
    )  # fmt: skip
    made = replace(recipe, **changes)
    return replace(made, model=with_head(made.model, made.objective))


def make_built(recipe) -> Built:
    """Built and filled on this CPU."""
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    return Built(recipe, model, build_optimizer(recipe, model))


def draw_answers(lengths: Sequence[int], longest: int, end: int) -> list[list[int]]:
    """Random answers of these lengths; those shorter than the longest end."""
    random = torch.Generator().manual_seed(3)
    answers = []
    for length in lengths:
        ids = torch.randint(3, VOCAB, (length,), generator=random).tolist()
        answers.append(ids if length == longest else [*ids[:-1], end])
    return answers


def make_batch(rows=2, tokens=16, *, seed=0, ignored=0) -> Batch:
    """Random tokens; the last position and `ignored` first ones of the first row predict none."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=random)
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    labels[0, :ignored] = -100
    return Batch(ids, labels)


def targets_of(*batches) -> int:
    return sum(int((batch.labels != -100).sum()) for batch in batches)


def gradients_in(built) -> dict[str, torch.Tensor]:
    """Filled by the next step with the gradients that its optimizer was given."""
    seen = {}

    def look(*_):
        for name, parameter in built.model.named_parameters():
            if parameter.grad is not None:
                seen[name] = parameter.grad.clone()

    built.optimizer.register_step_pre_hook(look)
    return seen


def hugging_face(recipe, weights, dtype=torch.float32):
    """Hugging Face's own class with these weights: eager attention, no dropout."""
    config = AutoConfig.for_model(**recipe.model.config)
    for key in find_family(config.model_type).dropouts:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    model.load_state_dict(weights)
    return model.train()


def textbook(
    recipe, weights, batch, dtype=torch.float32
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of Hugging Face's own class and of its own shifted loss."""
    model = hugging_face(recipe, weights, dtype)
    labels = torch.full_like(batch.labels, -100)
    labels[:, 1:] = batch.labels[:, :-1]  # Hugging Face shifts; ours are aligned
    loss = model(input_ids=batch.input_ids, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@torch.no_grad()
def start_adapters(built, make_values):
    """Give LoRA's second factors, which start at zero, `make_values` of each parameter.

    The policy and the reference differ then. Returns `built`.
    """
    for name, parameter in built.model.named_parameters():
        if ".lora_B." in name:
            parameter.copy_(make_values(parameter))
    return built


def start_adapters_at_random(built, seed, scale):
    """See `start_adapters`: normal values of a seed, in the order of the parameters."""
    random = torch.Generator().manual_seed(seed)
    return start_adapters(built, lambda p: scale * torch.randn(p.shape, generator=random))
