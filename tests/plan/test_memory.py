"""The predicted ledger against the trace of the trainer's own step, to the byte."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.certify.tracing.runs import DEPTH_KEYS
from memfit.certify.tracing.workspace import RULES
from memfit.core.units import MIB
from memfit.families import families_that, read_model
from memfit.meta import workspace
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.step_time.predicted_time import count_work, sum_up
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Freeze, Lora, Preference, Quantisation, Regularisation
from tiny_models import CONFIGS, FAMILIES, RECURRENT, make_recipe

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
EXACT = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE)
ALSO_EXACT = (Phase.EVALUATE, Phase.SAVE)
SCALARS = 16  # bytes of 0-dim results that a step's caller may still hold
NORMS = 12  # bytes a trainable tensor: what clipping holds of each, at most

DPO = {"objective": "dpo", "method": "lora",
       "preference": Preference(beta=0.1, reference="adapter-off")}  # fmt: skip
DPO_BEFORE = {"objective": "dpo", "preference": Preference(beta=0.1, reference="precomputed")}
ORPO = {"objective": "orpo", "method": "lora",
        "preference": Preference(beta=0.1, loss_type="orpo", cross_entropy=1.0)}  # fmt: skip
CPO = {"objective": "cpo", "method": "lora",
       "preference": Preference(beta=0.1, cross_entropy=1.0)}  # fmt: skip
KTO = {
    "objective": "kto",
    "method": "lora",
    "preference": Preference(
        beta=0.1, loss_type="kto", desirable=1.0, undesirable=1.5, reference="adapter-off"
    ),
}
KTO_BEFORE = {**KTO, "method": "full",
              "preference": replace(KTO["preference"], reference="precomputed")}  # fmt: skip
UNPAIRED = {**KTO, "preference": replace(KTO["preference"], loss_type="apo_zero_unpaired")}
SIMPO = {"objective": "simpo", "method": "lora",
         "preference": Preference(beta=2.0, loss_type="simpo", gamma=0.5)}  # fmt: skip
REWARD = {"objective": "reward", "method": "lora",
          "preference": Preference(beta=1.0, loss_type="bradley_terry", center=0.1)}  # fmt: skip
INT8 = Quantisation(outlier_threshold=6.0, outlier_share=0.01)
CHUNKED = {"loss": "chunked", "loss_chunk": 12}
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
ALL = replace(
    LORA, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)
BENT = Regularisation(label_smoothing=0.1, z_loss=1e-2)
NOISY = Regularisation(neftune_alpha=5.0)
SETTINGS = {
    "llama, full": ("llama", {}),
    "llama, 5 blocks, 2 recomputed, mixed": (
        "llama", {"precision": "bf16-mixed", "recompute_blocks": 2, "layers": 5}
    ),
    "llama, 7 blocks, 4 recomputed, accumulated": (
        "llama", {"recompute_blocks": 4, "layers": 7, "accumulation": 3}
    ),
    "llama, lora on two projections, mixed over bf16": (
        "llama", {"method": "lora", "lora": LORA, "precision": "bf16-mixed", "base_format": "bf16"}
    ),
    "llama, lora, bf16, recomputed": (
        "llama", {"method": "lora", "precision": "bf16", "base_format": "bf16",
                  "recompute_blocks": 3}
    ),
    "llama, lora with dropout": (
        "llama", {"method": "lora", "lora": replace(LORA, dropout=0.1)}
    ),
    "llama, rank-stabilised lora on all projections": (
        "llama", {"method": "lora", "lora": replace(ALL, scaling="rank-stabilised"),
                  "precision": "bf16-mixed", "base_format": "bf16"}
    ),
    "llama, dora": ("llama", {"method": "dora", "lora": LORA, "layers": 5}),
    "llama, dora on all projections, mixed over bf16, recomputed": (
        "llama", {"method": "dora", "lora": ALL, "precision": "bf16-mixed", "base_format": "bf16",
                  "recompute_blocks": 2}
    ),
    "llama, dora, bf16, chunked, accumulated": (
        "llama", {"method": "dora", "lora": LORA, "precision": "bf16", "base_format": "bf16",
                  "accumulation": 2, "loss": "chunked", "loss_chunk": 12}
    ),
    "llama, dora in lean blocks": (
        "llama", {"method": "dora", "lora": LORA, "precision": "bf16-mixed", "base_format": "bf16",
                  "lean": ("norm", "mlp"), "recompute_blocks": 1}
    ),
    "llama, dora with dropout": ("llama", {"method": "dora", "lora": replace(LORA, dropout=0.1)}),
    "llama, dora on the head": (
        "llama", {"method": "dora", "lora": replace(LORA, targets=("q_proj", "lm_head"))}
    ),
    "qwen2, dora with biases, mixed": (
        "qwen2", {"method": "dora", "lora": LORA, "precision": "bf16-mixed", "packing": True}
    ),
    "gpt2, dora, turned weights": (
        "gpt2", {"method": "dora", "lora": replace(LORA, targets=("c_attn", "c_fc"))}
    ),
    "opt, lora where it enters": (
        "opt", {"method": "lora",
                "lora": replace(LORA, targets=("project_in", "project_out", "q_proj"))}
    ),
    "llama, last of 6 blocks trained": (
        "llama", {"method": "freeze", "freeze": Freeze(last_blocks=1), "layers": 6,
                  "recompute_blocks": 6}
    ),
    "llama, one weight in the middle trained": (
        "llama", {"method": "freeze", "layers": 6,
                  "freeze": Freeze(patterns=("*.layers.2.mlp.up_proj.weight",))}
    ),
    "llama, selective, 2 of 8 recomputed whole, mixed, accumulated": (
        "llama", {"precision": "bf16-mixed", "recompute_blocks": 2, "selective_blocks": 4,
                  "layers": 8, "accumulation": 2}
    ),
    "gpt2, selective, lora": ("gpt2", {"selective_blocks": 3, "method": "lora"}),
    "qwen2_moe, selective, bf16": (
        "qwen2_moe", {"selective_blocks": 2, "precision": "bf16", "base_format": "bf16"}
    ),
    "deepseek_v3, selective": ("deepseek_v3", {"selective_blocks": 3}),
    "granite, selective, packed": ("granite", {"selective_blocks": 3, "packing": True}),
    "glm4, selective, math": ("glm4", {"selective_blocks": 3, "attention": "math"}),
    "llama, dpo": ("llama", DPO),
    "llama, dpo, chunked, mixed over bf16, recomputed, accumulated": (
        "llama", {**DPO, **CHUNKED, "precision": "bf16-mixed", "base_format": "bf16",
                  "recompute_blocks": 4, "layers": 6, "accumulation": 2, "micro_batch": 4}
    ),
    "llama, dpo, dora": ("llama", {**DPO, "method": "dora"}),
    "llama, dpo, in backward, chunked": (
        "llama", {**DPO, **CHUNKED, "optimizer": {"in_backward": True, "clip_norm": 0.0}}
    ),
    "llama, dpo, activations offloaded": ("llama", {**DPO, "offload": "activations"}),
    "llama, dpo, selective, bf16": (
        "llama", {**DPO, "selective_blocks": 2, "precision": "bf16", "base_format": "bf16"}
    ),
    "llama, dpo, lean, bf16": (
        "llama", {**DPO, "lean": ("norm", "mlp"), "precision": "bf16", "base_format": "bf16"}
    ),
    "llama, dpo, nf4, chunked, mixed": (
        "llama", {**DPO, **CHUNKED, "precision": "bf16-mixed", "base_format": "nf4"}
    ),
    "gpt_neox, dpo, int8, chunked, recomputed": (
        "gpt_neox", {**DPO, **CHUNKED, "precision": "bf16-mixed", "base_format": "int8",
                     "recompute_blocks": 3, "quantisation": INT8}
    ),
    "llama, dpo, full, reference before": ("llama", DPO_BEFORE),
    "llama, dpo, full, reference before, chunked, mixed, accumulated": (
        "llama", {**DPO_BEFORE, **CHUNKED, "precision": "bf16-mixed", "accumulation": 2}
    ),
    "llama, dpo, freeze, reference before, bf16": (
        "llama", {**DPO_BEFORE, "method": "freeze", "precision": "bf16", "base_format": "bf16"}
    ),
    "llama, dpo, dropout": ("llama", {**DPO, "lora": replace(LORA, dropout=0.1)}),
    "llama, dpo, fp16, chunked": (
        "llama", {**DPO, **CHUNKED, "precision": "fp16-mixed", "base_format": "fp16"}
    ),
    "gpt_neox, dpo, bf16, chunked": (
        "gpt_neox", {**DPO, **CHUNKED, "precision": "bf16", "base_format": "bf16"}
    ),
    "gpt2, dpo, tied, recomputed": ("gpt2", {**DPO, "recompute_blocks": 3}),
    "gemma2, dpo, capped, chunked": (
        "gemma2", {**DPO, **CHUNKED, "precision": "bf16-mixed", "base_format": "bf16"}
    ),
    "granite, dpo, scaled": ("granite", {**DPO, **CHUNKED}),
    "mistral, dpo, within a window": ("mistral", {**DPO, "sliding_window": 8, "layers": 5}),
    "mixtral, dpo": ("mixtral", {**DPO, "precision": "bf16", "base_format": "bf16"}),
    "llama, simpo": ("llama", SIMPO),
    "qwen3, simpo, full, chunked, mixed, accumulated": (
        "qwen3", {**SIMPO, **CHUNKED, "method": "full", "precision": "bf16-mixed",
                  "accumulation": 2}
    ),
    "gpt2, simpo, chunked, bf16": (
        "gpt2", {**SIMPO, **CHUNKED, "precision": "bf16", "base_format": "bf16"}
    ),
    "gemma2, simpo, full": ("gemma2", {**SIMPO, "method": "full"}),
    "gpt_neox, simpo, nf4, recomputed": (
        "gpt_neox", {**SIMPO, "precision": "bf16-mixed", "base_format": "nf4",
                     "recompute_blocks": 3}
    ),
    "llama, orpo": ("llama", ORPO),
    "qwen3, orpo, full, chunked, mixed, accumulated": (
        "qwen3", {**ORPO, **CHUNKED, "method": "full", "precision": "bf16-mixed",
                  "accumulation": 2}
    ),
    "gpt2, orpo, full": ("gpt2", {**ORPO, "method": "full"}),
    "gemma2, orpo, chunked, bf16": (
        "gemma2", {**ORPO, **CHUNKED, "precision": "bf16", "base_format": "bf16"}
    ),
    "gpt_neox, orpo, chunked, nf4, recomputed": (
        "gpt_neox", {**ORPO, **CHUNKED, "precision": "bf16-mixed", "base_format": "nf4",
                     "recompute_blocks": 3}
    ),
    "llama, reward": ("llama", REWARD),
    "qwen2, reward, full, mixed, accumulated": (
        "qwen2", {**REWARD, "method": "full", "precision": "bf16-mixed", "accumulation": 2}
    ),
    "gpt2, reward, bf16": ("gpt2", {**REWARD, "precision": "bf16", "base_format": "bf16"}),
    "gemma2, reward, full, recomputed": (
        "gemma2", {**REWARD, "method": "full", "recompute_blocks": 3}
    ),
    "gpt_neox, reward, nf4, recomputed": (
        "gpt_neox", {**REWARD, "precision": "bf16-mixed", "base_format": "nf4",
                     "recompute_blocks": 3}
    ),
    "mixtral, reward": ("mixtral", REWARD),
    "llama, cpo": ("llama", CPO),
    "qwen3, cpo, full, chunked, accumulated": (
        "qwen3", {**CPO, **CHUNKED, "method": "full", "accumulation": 2}
    ),
    "gpt2, cpo, chunked, bf16": (
        "gpt2", {**CPO, **CHUNKED, "precision": "bf16", "base_format": "bf16"}
    ),
    "gpt_neox, cpo, full, mixed": (
        "gpt_neox", {**CPO, "method": "full", "precision": "bf16-mixed"}
    ),
    "llama, kto": ("llama", KTO),
    "llama, kto, three rows, dropout, chunked, recomputed, accumulated": (
        "llama", {**KTO, **CHUNKED, "micro_batch": 3, "recompute_blocks": 2, "accumulation": 2,
                  "lora": replace(LORA, dropout=0.1)}
    ),
    "qwen3, kto, full, reference before, mixed, accumulated": (
        "qwen3", {**KTO_BEFORE, "precision": "bf16-mixed", "accumulation": 2}
    ),
    "gpt2, kto, full, reference before, chunked": ("gpt2", {**KTO_BEFORE, **CHUNKED}),
    "gpt_neox, kto, nf4, chunked, mixed, recomputed": (
        "gpt_neox", {**KTO, **CHUNKED, "precision": "bf16-mixed", "base_format": "nf4",
                     "recompute_blocks": 3}
    ),
    "qwen2, kto, selective, bf16": (
        "qwen2", {**KTO, "selective_blocks": 2, "precision": "bf16", "base_format": "bf16"}
    ),
    "mistral, kto, freeze, reference before, bf16, within a window": (
        "mistral", {**KTO_BEFORE, "method": "freeze", "precision": "bf16", "base_format": "bf16",
                    "sliding_window": 8, "layers": 5}
    ),
    "llama, kto, lean, bf16": (
        "llama", {**KTO, "lean": ("norm", "mlp"), "precision": "bf16", "base_format": "bf16"}
    ),
    "llama, kto, activations offloaded": ("llama", {**KTO, "offload": "activations"}),
    "gemma2, kto, unpaired, one row": ("gemma2", {**UNPAIRED, "micro_batch": 1}),
    "mistral, dpo, ipo": ("mistral", {**DPO, "preference": Preference(
        beta=0.1, reference="adapter-off", loss_type="ipo")}),
    "qwen2, dpo, apo_zero, full, reference before": (
        "qwen2", {**DPO_BEFORE, "preference": Preference(
            beta=0.1, reference="precomputed", loss_type="apo_zero")}
    ),
    "llama, packed": ("llama", {"packing": True, "precision": "bf16-mixed"}),
    "llama, chunked loss": ("llama", {"loss": "chunked", "loss_chunk": 12}),
    "llama, chunked loss, bf16, accumulated": (
        "llama", {"loss": "chunked", "loss_chunk": 12, "precision": "bf16", "base_format": "bf16",
                  "accumulation": 2}
    ),
    "llama, one chunk, bf16": (
        "llama", {"loss": "chunked", "loss_chunk": 4, "precision": "bf16", "base_format": "bf16",
                  "sequence_length": 4, "micro_batch": 1}
    ),
    "llama, smoothed, z-loss": ("llama", {"regularisation": BENT}),
    "llama, smoothed, z-loss, chunked, bf16, accumulated": (
        "llama", {"regularisation": BENT, **CHUNKED, "precision": "bf16", "base_format": "bf16",
                  "accumulation": 2}
    ),
    "gemma2, capped, smoothed, z-loss, mixed": (
        "gemma2", {"regularisation": BENT, "precision": "bf16-mixed"}
    ),
    "gemma2, capped, z-loss, chunked": (
        "gemma2", {"regularisation": replace(BENT, label_smoothing=0.0), **CHUNKED}
    ),
    "gpt2, tied, smoothed, fp16, recomputed": (
        "gpt2", {"regularisation": replace(BENT, z_loss=0.0), "precision": "fp16-mixed",
                 "recompute_blocks": 3}
    ),
    "llama, neftune, packed, mixed": (
        "llama", {"regularisation": NOISY, "packing": True, "precision": "bf16-mixed"}
    ),
    "gpt2, neftune, lora": ("gpt2", {"regularisation": NOISY, "method": "lora"}),
    "gemma3_text, neftune, chunked, bf16": (
        "gemma3_text", {"regularisation": NOISY, **CHUNKED, "precision": "bf16",
                        "base_format": "bf16"}
    ),
    "llama, foreach, norms that do not decay": (
        "llama", {"optimizer": {"implementation": "foreach", "weight_decay": 0.1,
                                "decays": "matrices"}}
    ),
    "gpt2, loop, norms and biases that do not decay, accumulated": (
        "gpt2", {"optimizer": {"implementation": "loop", "weight_decay": 0.1,
                               "decays": "matrices"}, "accumulation": 2}
    ),
    "llama, sgd, foreach, norms that do not decay": (
        "llama", {"optimizer": {"name": "sgd", "implementation": "foreach", "weight_decay": 0.1,
                                "decays": "matrices"}}
    ),
    "qwen2, adafactor, norms and biases that do not decay": (
        "qwen2", {"optimizer": {"name": "adafactor", "implementation": "loop",
                                "weight_decay": 0.1, "decays": "matrices"}}
    ),
    "qwen3, muon, norms that do not decay": (
        "qwen3", {"optimizer": {"name": "muon", "implementation": "loop", "weight_decay": 0.1,
                                "decays": "matrices"}}
    ),
    "llama, lora+, foreach": (
        "llama", {"method": "lora", "lora": LORA,
                  "optimizer": {"implementation": "foreach", "lora_plus": 16.0}}
    ),
    "llama, foreach": ("llama", {"optimizer": {"implementation": "foreach"}}),
    "llama, loop, no clipping": (
        "llama", {"optimizer": {"implementation": "loop", "clip_norm": 0.0}}
    ),
    "llama, sgd": ("llama", {"optimizer": {"name": "sgd", "implementation": "foreach"}}),
    "llama, fp16 base, lora": (
        "llama", {"method": "lora", "precision": "fp16-mixed", "base_format": "fp16"}
    ),
    "gpt2, fp16, chunked loss, accumulated": (
        "gpt2", {"precision": "fp16-mixed", "loss": "chunked", "loss_chunk": 12, "accumulation": 2}
    ),
    "llama, adamw8bit": (
        "llama", {"optimizer": {"name": "adamw8bit", "implementation": "loop"}}
    ),
    "qwen3, adamw4bit, bf16": (
        "qwen3", {"precision": "bf16", "base_format": "bf16",
                  "optimizer": {"name": "adamw4bit", "implementation": "loop"}}
    ),
    "gpt2, adamwfp8, mixed": (
        "gpt2", {"precision": "bf16-mixed",
                 "optimizer": {"name": "adamwfp8", "implementation": "loop"}}
    ),
    "mistral, bf16": ("mistral", {"precision": "bf16", "base_format": "bf16"}),
    "qwen2, tied, mixed": ("qwen2", {"precision": "bf16-mixed", "accumulation": 2}),
    "qwen3, math, recomputed": ("qwen3", {"attention": "math", "recompute_blocks": 3}),
    "qwen3, one row": ("qwen3", {"micro_batch": 1, "precision": "bf16-mixed"}),
    "gpt2, tied, recomputed, mixed": ("gpt2", {"recompute_blocks": 2, "precision": "bf16-mixed"}),
    "gpt2, math, packed": ("gpt2", {"attention": "math", "packing": True}),
    "gpt2, lora": ("gpt2", {"method": "lora"}),
    "gpt_neox, mixed": ("gpt_neox", {"precision": "bf16-mixed"}),
    "gpt_neox, freeze, mixed over bf16": (
        "gpt_neox", {"method": "freeze", "precision": "bf16-mixed", "base_format": "bf16"}
    ),
    "gptj, mixed, recomputed": ("gptj", {"precision": "bf16-mixed", "recompute_blocks": 2}),
    "gptj, packed, lora, bf16": (
        "gptj", {"packing": True, "method": "lora", "precision": "bf16", "base_format": "bf16"}
    ),
    "falcon, mixed, recomputed": ("falcon", {"precision": "bf16-mixed", "recompute_blocks": 2}),
    "falcon, packed, lora, bf16": (
        "falcon", {"packing": True, "method": "lora", "precision": "bf16", "base_format": "bf16"}
    ),
    "falcon, chunked, accumulated, frozen": (
        "falcon", {"loss": "chunked", "loss_chunk": 12, "accumulation": 2, "method": "freeze"}
    ),
    "bloom, mixed, recomputed": ("bloom", {"precision": "bf16-mixed", "recompute_blocks": 2}),
    "bloom, lora, bf16": ("bloom", {"method": "lora", "precision": "bf16", "base_format": "bf16"}),
    "bloom, chunked, accumulated, frozen": (
        "bloom", {"loss": "chunked", "loss_chunk": 12, "accumulation": 2, "method": "freeze",
                  "layers": 5}
    ),
    "mpt, mixed, recomputed": ("mpt", {"precision": "bf16-mixed", "recompute_blocks": 2}),
    "mpt, lora, bf16": ("mpt", {"method": "lora", "precision": "bf16", "base_format": "bf16"}),
    "mpt, chunked, accumulated, frozen": (
        "mpt", {"loss": "chunked", "loss_chunk": 12, "accumulation": 2, "method": "freeze",
                "layers": 5}
    ),
    "opt, mixed, recomputed": ("opt", {"precision": "bf16-mixed", "recompute_blocks": 2}),
    "opt, packed, lora, bf16": (
        "opt", {"packing": True, "method": "lora", "precision": "bf16", "base_format": "bf16"}
    ),
    "opt, chunked, accumulated": (
        "opt", {"loss": "chunked", "loss_chunk": 12, "accumulation": 2, "layers": 6}
    ),
    "mixtral, full": ("mixtral", {}),
    "mixtral, bf16, recomputed, chunked loss": (
        "mixtral", {"precision": "bf16", "base_format": "bf16", "layers": 5, "recompute_blocks": 2,
                    "loss": "chunked", "loss_chunk": 12}
    ),
    "mixtral, mixed, all recomputed, accumulated": (
        "mixtral", {"precision": "bf16-mixed", "recompute_blocks": 6, "layers": 6,
                    "accumulation": 2}
    ),
    "mixtral, lora, mixed over bf16": (
        "mixtral", {"method": "lora", "precision": "bf16-mixed", "base_format": "bf16"}
    ),
    "qwen2_moe, mixed, recomputed": (
        "qwen2_moe", {"precision": "bf16-mixed", "recompute_blocks": 2, "accumulation": 2}
    ),
    "qwen2_moe, one block trained, bf16": (
        "qwen2_moe", {"method": "freeze", "precision": "bf16", "base_format": "bf16"}
    ),
    "qwen3_moe, bf16, recomputed, packed": (
        "qwen3_moe", {"precision": "bf16", "base_format": "bf16", "recompute_blocks": 3,
                      "packing": True}
    ),
    "qwen3_moe, lora": ("qwen3_moe", {"method": "lora"}),
    "glm4_moe, mixed, 2 of 6 recomputed, accumulated": (
        "glm4_moe", {"precision": "bf16-mixed", "recompute_blocks": 2, "layers": 6,
                     "accumulation": 2}
    ),
    "glm4_moe, bf16, recomputed": (
        "glm4_moe", {"precision": "bf16", "base_format": "bf16", "recompute_blocks": 3}
    ),
    "glm4_moe, lora, mixed over bf16": (
        "glm4_moe", {"method": "lora", "precision": "bf16-mixed", "base_format": "bf16"}
    ),
    "mixtral, adamw4bit": (
        "mixtral", {"optimizer": {"name": "adamw4bit", "implementation": "loop"}}
    ),
    "phi3, mixed, recomputed": ("phi3", {"precision": "bf16-mixed", "recompute_blocks": 2}),
    "phi3, freeze, bf16": (
        "phi3", {"method": "freeze", "precision": "bf16", "base_format": "bf16"}
    ),
    "gemma, bf16, accumulated": (
        "gemma", {"precision": "bf16", "base_format": "bf16", "accumulation": 2}
    ),
    "gemma, lora, mixed over bf16, recomputed": (
        "gemma", {"method": "lora", "precision": "bf16-mixed", "base_format": "bf16",
                  "recompute_blocks": 3}
    ),
    "gemma2, capped, mixed, recomputed, deep": (
        "gemma2", {"precision": "bf16-mixed", "recompute_blocks": 5, "layers": 11}
    ),
    "gemma2, capped, chunked, packed": (
        "gemma2", {"loss": "chunked", "loss_chunk": 12, "packing": True, "precision": "bf16",
                   "base_format": "bf16"}
    ),
    "gemma3_text, two rotations, freeze, recomputed, deep": (
        "gemma3_text", {"method": "freeze", "precision": "bf16", "base_format": "bf16",
                        "recompute_blocks": 9, "layers": 9}
    ),
    "gemma3_text, within windows, mixed": (
        "gemma3_text", {"sliding_window": 8, "precision": "bf16-mixed", "layers": 9}
    ),
    "mistral, within a window, lora, recomputed": (
        "mistral", {"sliding_window": 8, "method": "lora", "recompute_blocks": 2, "layers": 5}
    ),
    "mistral, within a window, packed": (
        "mistral", {"sliding_window": 8, "packing": True, "precision": "bf16-mixed"}
    ),
    "phi3, within a window, math": ("phi3", {"sliding_window": 5, "attention": "math"}),
    "qwen2, some blocks within windows": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
                  "layers": 6, "recompute_blocks": 3}
    ),
    "olmo2, mixed, packed": ("olmo2", {"precision": "bf16-mixed", "packing": True}),
    "granite, chunked, mixed": (
        "granite", {"loss": "chunked", "loss_chunk": 12, "precision": "bf16-mixed"}
    ),
    "granite, recomputed": ("granite", {"recompute_blocks": 3, "layers": 5}),
    "smollm3, two kinds of blocks, deep": ("smollm3", {"layers": 11, "recompute_blocks": 5}),
    "smollm3, lora, mixed, deep": (
        "smollm3", {"method": "lora", "precision": "bf16-mixed", "layers": 12}
    ),
    "glm4, mixed": ("glm4", {"precision": "bf16-mixed", "recompute_blocks": 1}),
    "stablelm, packed, bf16": (
        "stablelm", {"packing": True, "precision": "bf16", "base_format": "bf16"}
    ),
    "gpt_oss, full": ("gpt_oss", {}),
    "gpt_oss, mixed, recomputed, accumulated": (
        "gpt_oss", {"precision": "bf16-mixed", "recompute_blocks": 2, "layers": 5,
                    "accumulation": 2}
    ),
    "gpt_oss, lora, bf16, packed": (
        "gpt_oss", {"method": "lora", "precision": "bf16", "base_format": "bf16", "packing": True}
    ),
    "gpt_oss, freeze, chunked": (
        "gpt_oss", {"method": "freeze", "loss": "chunked", "loss_chunk": 12}
    ),
    "deepseek_v2, lora, mixed, recomputed": (
        "deepseek_v2", {"method": "lora", "precision": "bf16-mixed", "recompute_blocks": 2}
    ),
    "deepseek_v2, bf16, packed": (
        "deepseek_v2", {"precision": "bf16", "base_format": "bf16", "packing": True}
    ),
    "deepseek_v2, math, chunked": (
        "deepseek_v2", {"attention": "math", "loss": "chunked", "loss_chunk": 12}
    ),
    "deepseek_v3, mixed, accumulated": (
        "deepseek_v3", {"precision": "bf16-mixed", "accumulation": 2, "layers": 5}
    ),
    "deepseek_v3, freeze, bf16, recomputed": (
        "deepseek_v3", {"method": "freeze", "precision": "bf16", "base_format": "bf16",
                        "recompute_blocks": 3}
    ),
    "deepseek_v3, math, packed": ("deepseek_v3", {"attention": "math", "packing": True}),
}  # fmt: skip
ON_CUDA = {
    "llama, orpo, chunked, bf16": (
        "llama", {**ORPO, **CHUNKED, "precision": "bf16", "base_format": "bf16"}
    ),
    "gpt_neox, orpo, mixed": ("gpt_neox", {**ORPO, "precision": "bf16-mixed"}),
    "llama, reward, mixed": ("llama", {**REWARD, "precision": "bf16-mixed"}),
    "llama, dpo, activations offloaded, bf16": (
        "llama", {**DPO, "offload": "activations", "precision": "bf16", "base_format": "bf16"}
    ),
    "gpt_neox, dpo, int8, chunked, mixed, recomputed": (
        "gpt_neox", {**DPO, **CHUNKED, "precision": "bf16-mixed", "base_format": "int8",
                     "recompute_blocks": 3, "quantisation": INT8}
    ),
    "llama, dpo, mixed over bf16, chunked": (
        "llama", {**DPO, **CHUNKED, "precision": "bf16-mixed", "base_format": "bf16",
                  "recompute_blocks": 1, "accumulation": 2}
    ),
    "gpt_neox, dpo, bf16": ("gpt_neox", {**DPO, "precision": "bf16", "base_format": "bf16"}),
    "llama, dpo, fp16, chunked": (
        "llama", {**DPO, **CHUNKED, "precision": "fp16-mixed", "base_format": "fp16"}
    ),
    "llama, dpo, full, reference before, chunked": (
        "llama", {**DPO_BEFORE, **CHUNKED, "precision": "bf16-mixed"}
    ),
    "gpt_oss, mixed": ("gpt_oss", {"precision": "bf16-mixed"}),
    "gpt_oss, bf16, recomputed": (
        "gpt_oss", {"precision": "bf16", "base_format": "bf16", "recompute_blocks": 2}
    ),
    "deepseek_v2, flash, bf16, packed": (
        "deepseek_v2", {"precision": "bf16", "base_format": "bf16", "packing": True}
    ),
    "deepseek_v3, efficient": ("deepseek_v3", {"attention": "efficient", "recompute_blocks": 1}),
    "deepseek_v3, flash, mixed": ("deepseek_v3", {"precision": "bf16-mixed"}),
    "deepseek_v3, math, mixed": ("deepseek_v3", {"precision": "bf16-mixed", "attention": "math"}),

    "llama, flash, mixed": ("llama", {"precision": "bf16-mixed", "recompute_blocks": 1}),
    "llama, efficient, grouped": ("llama", {"attention": "efficient", "accumulation": 2}),
    "qwen3, math": ("qwen3", {"attention": "math"}),
    "gpt2, flash, bf16": ("gpt2", {"precision": "bf16", "base_format": "bf16", "packing": True}),
    "gpt_neox, flash, mixed": ("gpt_neox", {"precision": "bf16-mixed"}),
    "llama, cudnn, packed, fp16": (
        "llama", {"attention": "cudnn", "precision": "fp16-mixed", "packing": True}
    ),
    "qwen3, cudnn, bf16": (
        "qwen3", {"attention": "cudnn", "precision": "bf16", "base_format": "bf16"}
    ),
    "llama, lora with dropout, mixed": (
        "llama", {"method": "lora", "lora": replace(LORA, dropout=0.1), "precision": "bf16-mixed"}
    ),
    "llama, lora with dropout, recomputed, efficient": (
        "llama", {"method": "lora", "lora": replace(LORA, dropout=0.1), "recompute_blocks": 2,
                  "attention": "efficient"}
    ),
    "llama, dora on all projections, mixed": (
        "llama", {"method": "dora", "lora": ALL, "precision": "bf16-mixed", "base_format": "bf16",
                  "recompute_blocks": 1}
    ),
    "qwen2, dora with biases, efficient": (
        "qwen2", {"method": "dora", "lora": LORA, "attention": "efficient", "accumulation": 2}
    ),
    "gpt2, dora, turned weights, bf16": (
        "gpt2", {"method": "dora", "lora": replace(LORA, targets=("c_attn", "c_fc")),
                 "precision": "bf16", "base_format": "bf16"}
    ),
    "gpt2, lora with dropout, bf16": (
        "gpt2", {"method": "lora", "precision": "bf16", "base_format": "bf16",
                 "lora": Lora(rank=4, alpha=8.0, dropout=0.1, targets=("c_attn",))}
    ),
    "llama, fp16, chunked": (
        "llama", {"precision": "fp16-mixed", "loss": "chunked", "loss_chunk": 12}
    ),
    "llama, adamw8bit in a loop": (
        "llama", {"attention": "efficient",
                  "optimizer": {"name": "adamw8bit", "implementation": "loop"}}
    ),
    "phi3, flash, mixed": ("phi3", {"precision": "bf16-mixed", "recompute_blocks": 1}),
    "gemma, efficient": ("gemma", {"attention": "efficient", "accumulation": 2}),
    "gemma2, mixed, deep": ("gemma2", {"precision": "bf16-mixed", "layers": 9}),
    "gemma3_text, flash, mixed": ("gemma3_text", {"precision": "bf16-mixed", "layers": 9}),
    "mistral, within a window, efficient": (
        "mistral", {"sliding_window": 7, "attention": "efficient", "sequence_length": 19}
    ),
    "olmo2, flash, bf16": ("olmo2", {"precision": "bf16", "base_format": "bf16"}),
    "smollm3, flash, mixed, deep": ("smollm3", {"precision": "bf16-mixed", "layers": 9}),
    "stablelm, flash, mixed": ("stablelm", {"precision": "bf16-mixed", "packing": True}),
    "gpt2, many rows": ("gpt2", {"micro_batch": 1366, "attention": "efficient"}),
    "gptj, flash, mixed": ("gptj", {"precision": "bf16-mixed", "recompute_blocks": 1}),
    "falcon, efficient, lora": ("falcon", {"method": "lora", "attention": "efficient"}),
    "bloom, lora over fp16": (
        "bloom", {"method": "lora", "precision": "fp16-mixed", "base_format": "fp16"}
    ),
    "bloom, mixed": ("bloom", {"precision": "bf16-mixed", "recompute_blocks": 1}),
    "mpt, bf16": ("mpt", {"precision": "bf16", "base_format": "bf16", "recompute_blocks": 1}),
    "opt, flash, mixed": ("opt", {"precision": "bf16-mixed", "recompute_blocks": 1}),
    "llama, selective, flash, lora on two projections": (
        "llama", {"method": "lora", "lora": LORA, "precision": "bf16", "base_format": "bf16",
                  "selective_blocks": 3}
    ),
    "gpt_neox, selective, efficient, mixed": (
        "gpt_neox", {"precision": "bf16-mixed", "attention": "efficient", "selective_blocks": 2,
                     "recompute_blocks": 1}
    ),
    "qwen3_moe, selective, flash": (
        "qwen3_moe", {"precision": "bf16", "base_format": "bf16", "selective_blocks": 3}
    ),
    "mixtral, flash, mixed, recomputed": (
        "mixtral", {"precision": "bf16-mixed", "recompute_blocks": 2}
    ),
    "qwen2_moe, efficient": ("qwen2_moe", {"attention": "efficient"}),
    "qwen3_moe, bf16, chunked": (
        "qwen3_moe", {"precision": "bf16", "base_format": "bf16", "loss": "chunked",
                      "loss_chunk": 12}
    ),
    "qwen3_moe, fp16": ("qwen3_moe", {"precision": "fp16-mixed"}),
    "glm4_moe, mixed": ("glm4_moe", {"precision": "bf16-mixed"}),
    "glm4_moe, fp16, lora": ("glm4_moe", {"method": "lora", "precision": "fp16-mixed"}),
    "glm4_moe, bf16, chunked": (
        "glm4_moe", {"precision": "bf16", "base_format": "bf16", "loss": "chunked",
                     "loss_chunk": 12}
    ),
    "mixtral, fp16": ("mixtral", {"precision": "fp16-mixed"}),
    "llama, chunked, lora": (
        "llama", {"method": "lora", "precision": "bf16", "base_format": "bf16", "loss": "chunked",
                  "loss_chunk": 12}
    ),
}  # fmt: skip


def add_others():
    """Give each family without settings some, on a CPU and on a GPU."""
    bf16 = {"precision": "bf16", "base_format": "bf16"}
    within = {name: {"sliding_window": 8} for name in families_that("windows")}
    for name in sorted({*FAMILIES} - {family for family, _ in SETTINGS.values()}):
        deep = {"precision": "bf16-mixed", "layers": 9, "recompute_blocks": 4}
        SETTINGS[f"{name}, mixed, recomputed, deep"] = name, deep
        SETTINGS[f"{name}, lora, chunked"] = name, {"method": "lora", **bf16, **CHUNKED}
        if name in RECURRENT:  # rows of one chunk, of a few, and of more than are simulated
            SETTINGS[f"{name}, two chunks"] = name, {"sequence_length": 100}
            SETTINGS[f"{name}, many chunks"] = name, {"sequence_length": 450, "layers": 5}
            wide = {"sequence_length": 450, "method": "lora", "recompute_blocks": 2}
            SETTINGS[f"{name}, many chunks, lora"] = name, {**bf16, **wide}
        else:
            SETTINGS[f"{name}, packed"] = name, {"packing": True, **within.get(name, {})}
        ON_CUDA[f"{name}, bf16"] = name, {**bf16, "layers": 5}


add_others()


def recipe_of(family, changes):
    changes = dict(changes)
    layers = changes.pop("layers", 3)
    key = next(key for key in DEPTH_KEYS if key in CONFIGS[family])
    windows = {k: changes.pop(k) for k in list(changes) if k.endswith(("window", "window_layers"))}
    return make_recipe(family, config=CONFIGS[family] | {key: layers} | windows, **changes)


def adapted(recipe):
    return find_adapter(recipe).adapt(read_model(recipe.model), recipe)


def predict(recipe, device=CPU):
    return predict_memory(adapted(recipe), recipe, device)


def tensors(ledger, phase):
    """Bytes by kind; what the allocator adds is of no tensor."""
    return {k: n for k, n in ledger.by_kind(phase).items() if k is not Kind.FRAGMENTATION}


def cases(table):
    """Every setting of llama, and of each other family the first, the third and so on; of those
    between, whose settings llama has too, `make test-wide` runs all."""
    seen = Counter()
    for name, (family, _) in table.items():
        between = family != "llama" and seen[family] % 2
        seen[family] += 1
        yield pytest.param(name, marks=[pytest.mark.wide] if between else [])


@pytest.mark.covering(SETTINGS)
@pytest.mark.parametrize("name", list(cases(SETTINGS)))
def test_the_prediction_equals_the_trace_on_a_cpu(name):
    recipe = recipe_of(*SETTINGS[name])
    ledger, traced = predict(recipe), trace(recipe, CPU)
    assert {*traced.ledger.phases} == {*ledger.phases}
    for phase in ledger.phases:
        slack = SCALARS
        if phase not in (*EXACT, *ALSO_EXACT):
            slack += NORMS * sum(w.trainable for w in adapted(recipe).weights) + 256
        want, have = tensors(traced.ledger, phase), tensors(ledger, phase)
        assert ledger.total(phase) == pytest.approx(traced.phases[phase], abs=slack), phase
        for kind in want.keys() | have.keys():
            assert have.get(kind, 0) == pytest.approx(want.get(kind, 0), abs=slack), (phase, kind)


@pytest.mark.parametrize("loss", [{}, CHUNKED], ids=["plain", "chunked"])
@pytest.mark.parametrize("preference", [KTO, KTO_BEFORE], ids=["adapter-off", "before"])
def test_what_answers_to_other_prompts_hold_is_the_peak_of_a_forward_of_many_words(
    preference, loss
):
    config = CONFIGS["llama"] | {"vocab_size": 3000}
    recipe = make_recipe("llama", config=config, recompute_blocks=3, **preference, **loss)
    ledger, traced = predict(recipe), trace(recipe, CPU)
    for phase in EXACT:
        if phase in traced.phases:
            assert ledger.total(phase) == pytest.approx(traced.phases[phase], abs=SCALARS), phase
    logits = recipe.micro_batch * recipe.sequence_length * 3000 * 4
    if not loss:
        assert traced.phases["forward"] > traced.phases["load"] + 2 * logits


@pytest.mark.covering(ON_CUDA)
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_prediction_equals_the_trace_on_cuda(name):
    recipe = replace(recipe_of(*ON_CUDA[name]), device=H100.id)
    ledger, traced = predict(recipe, H100), trace(recipe, H100)
    for phase in (*EXACT[: 3 if recipe.accumulation == 1 else 4], Phase.EVALUATE):
        want, have = tensors(traced.ledger, phase), tensors(ledger, phase)
        for kind in want.keys() | have.keys():
            # blocks of 512 B may move a peak of these small tensors to a neighbouring instant
            assert have.get(kind, 0) == pytest.approx(want.get(kind, 0), rel=0.02, abs=4096), kind


def test_a_first_backward_brings_its_threads_workspace_to_the_products_of_pairs():
    """They are the first; where logits make the peak, before any block's products."""
    wide = CONFIGS["llama"] | {"vocab_size": 300_000}
    recipe = make_recipe(
        "llama", config=wide, precision="bf16", base_format="bf16", device=H100.id,
        micro_batch=4, loss="chunked", loss_chunk=64, **DPO,
    )  # fmt: skip
    ledger, traced = predict(recipe, H100), trace(recipe, H100).ledger
    want, have = (x.by_kind(Phase.FIRST_STEP) for x in (traced, ledger))
    assert have[Kind.WORKSPACE] == want[Kind.WORKSPACE] >= 64 * MIB
    assert have[Kind.LOGITS] == want[Kind.LOGITS]


@pytest.mark.parametrize(("more", "each"), [((), 0), ((0.0,), 0), ((6.0,), 3), ((0.5,), 3)])
def test_outliers_are_looked_for_where_a_threshold_is_above_zero(more, each):
    """Of each number its fp16 magnitude, and a byte that says whether it is one."""
    rule = RULES["bitsandbytes.int8_vectorwise_quant.default"]
    x = torch.empty(7, 96, dtype=torch.float16, device="meta")
    assert rule.nbytes([x, *more], None) == each * x.numel()


@pytest.mark.parametrize("rows", [3, 49, 128])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plan_and_certificate_read_one_table_of_kernel_workspaces(rows, heads, dtype):
    query = torch.empty(rows, 4, 64, 80, dtype=dtype, device="meta")
    key = torch.empty(rows, heads, 64, 80, dtype=dtype, device="meta")
    grad, indices = query.transpose(1, 2).flatten(2), torch.empty(rows, 64, device="meta")
    value = torch.empty(rows, heads, 64, 144, dtype=dtype, device="meta")
    many, width = [query, key], dtype.itemsize
    grid = workspace.find_grid(H100)
    rules = {name: lambda args, of=rule.nbytes: of(args, grid) for name, rule in RULES.items()}
    attention = "aten._scaled_dot_product_{}_attention_backward.default"
    flash = rules[attention.format("flash")]([query, query, key, key, query.transpose(1, 2)])
    lying = (query, query.transpose(1, 2))
    assert flash == sum(workspace.flash_backward(query.shape, key.shape, width)) + sum(
        workspace.copied_by_token(tuple(x.shape), x.stride(), width) for x in lying
    )
    fused = rules["aten._scaled_dot_product_efficient_attention.default"]([query, key, value])
    assert fused == sum(workspace.efficient_forward(query.shape, 144, width))
    efficient = rules[attention.format("efficient")]([grad, query, key, value])
    assert efficient == sum(workspace.efficient_backward(query.shape, 144, query.numel(), width))
    contiguous = torch.empty(grad.shape, dtype=dtype, device="meta")
    assert rules["aten.embedding_dense_backward.default"]([contiguous, indices, 5000]) == (
        sum(workspace.embedding_backward(indices.numel(), 5000, grad.shape[-1]))
    )
    assert rules["aten._foreach_norm.Scalar"]([many]) == workspace.foreach_norm(
        [t.numel() for t in many]
    )
    assert rules[attention.format("cudnn")]([query, query, key]) == sum(
        workspace.cudnn_backward(query.shape, key.shape)
    )
    assert rules["aten.sum.dim_IntList"]([grad, [0, 1]]) == (
        sum(workspace.row_sum(grad.shape[-1], rows * 64, grid))
    )
    flat, few = query.flatten(0, 1), key.flatten(0, 1)
    starts = torch.empty(rows + 1, dtype=torch.int32, device="meta")
    assert rules["torch_attn._varlen_attn_backward.default"](
        [flat, flat, few, few, flat, flat, starts]
    ) == sum(workspace.varlen_backward(flat.shape, few.shape, rows, width))
    assert set(rules) == {
        "torch_attn._varlen_attn_backward.default",
        attention.format("flash"), attention.format("efficient"), attention.format("cudnn"),
        "aten._scaled_dot_product_efficient_attention.default",
        "aten.embedding_dense_backward.default", "aten._foreach_norm.Scalar",
        "aten.native_layer_norm_backward.default", "aten.sum.dim_IntList",
        # held to the trace, byte by byte, in test_quantised_memory.py
        "bitsandbytes.gemm_4bit.default", "bitsandbytes.int8_vectorwise_quant.default",
        "bitsandbytes.int8_mixed_scaled_mm.default", "bitsandbytes.int8_scaled_mm.default",
    }  # fmt: skip


def test_a_deep_model_costs_no_more_than_a_shallow_one():
    shallow = predict(recipe_of("llama", {"layers": 3}))
    deep = recipe_of("llama", {"layers": 14})
    ledger, traced = predict(deep), trace(deep, CPU)
    assert ledger.peak > 3 * shallow.peak
    assert ledger.total(Phase.BACKWARD) == pytest.approx(traced.phases[Phase.BACKWARD], abs=SCALARS)


def test_every_entry_says_why():
    ledger = predict(recipe_of("llama", {"precision": "bf16-mixed", "recompute_blocks": 1}), H100)
    for entry in ledger.entries:
        assert entry.because
        assert any(c.isdigit() for c in entry.because) or entry.owner == "cublas"
    (activations,) = [
        e for e in ledger.at(Phase.BACKWARD) if e.kind is Kind.ACTIVATIONS and e.owner == "blocks"
    ]
    assert "3 blocks, 1 of them recomputed" in activations.because


def grown(recipe, knob):
    if knob == "rank":
        return replace(recipe, lora=replace(recipe.lora, rank=recipe.lora.rank + 3))
    if knob == "layers":
        reference = recipe.model
        config = reference.config | {"num_hidden_layers": reference.config["num_hidden_layers"] + 1}
        return replace(recipe, model=replace(reference, config=config))
    return replace(recipe, **{knob: getattr(recipe, knob) + 1})


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    knob=st.sampled_from(["micro_batch", "sequence_length", "rank", "layers"]),
    precision=st.sampled_from(["fp32", "bf16-mixed"]),
    loss=st.sampled_from(["plain", "chunked"]),
    blocks=st.integers(0, 4),
    packing=st.booleans(),
    device=st.sampled_from([CPU, H100]),
)
def test_more_of_anything_takes_no_less_memory(knob, precision, loss, blocks, packing, device):
    changes = {
        "method": "lora", "layers": 4, "precision": precision, "loss": loss, "packing": packing,
        "loss_chunk": 8 if loss == "chunked" else 0, "recompute_blocks": blocks,
        "attention": "math",
    }  # fmt: skip
    small = recipe_of("llama", changes)
    assert predict(grown(small, knob), device).peak >= predict(small, device).peak


@pytest.mark.parametrize("family", CONFIGS)
def test_recomputing_a_deeper_share_takes_no_more(family):
    peaks = [
        predict(recipe_of(family, {"layers": 8, "recompute_blocks": n})).total(Phase.FORWARD)
        for n in range(9)
    ]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("changes", [DPO, {**DPO, **CHUNKED}, {**DPO_BEFORE, **CHUNKED}])
def test_flop_of_pairs_count_the_references_forward(changes):
    recipe = recipe_of("llama", {**changes, "layers": 4, "micro_batch": 4})
    counted = count_work(sum_up(adapted(recipe)), recipe)
    again = replace(recipe, objective="sft", preference=Preference())
    assert counted.model > count_work(sum_up(adapted(again)), again).model * (
        1.3 if recipe.references else 0.99
    )


def test_predicting_imports_no_torch():
    code = (
        "import sys; from memfit import catalog; from memfit.families import read_model\n"
        "from memfit.plan.memory.predicted_memory import predict_memory\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
