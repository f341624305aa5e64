"""Narayanan et al. 2021 (2104.04473) and Smith et al. 2022 (2201.11990): GPT on Selene's A100.

The first paper's Table 1 leaves out micro-batches and interleaving; the scripts of its artifact
have them (examples/academic_paper_scripts/sc21/run_table_1.sh). Its Table 2 has micro-batches of
one for PTD-P. A micro-batch of one is assumed of MT-NLG's 530B, too. Fused softmax, dropout of
0.1, 16-bit gradients that are reduced after the backward, no ZeRO: Megatron-LM of April 2021.
"""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of
from published.llm_foundry import gpt2_config

# hidden size -> sequences of a micro-batch, blocks of a virtual stage (0: not interleaved)
TABLE_1 = {
    2304: (16, 0), 3072: (16, 0), 4096: (16, 0), 6144: (8, 0), 8192: (4, 0), 10240: (2, 5),
    12288: (2, 5), 16384: (1, 3), 20480: (1, 1), 25600: (1, 0),
}  # fmt: skip


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c, m = row["config"], row["model"]
    if c.get("zero_stage"):
        raise NotExpressible("ZeRO-3 by DeepSpeed of 2021, its buckets not stated")
    deepspeed = c["framework"] == "Megatron-DeepSpeed"
    micro, each = c.get("micro_batch") or 1, 0
    if "Table 1" in row["source"]:
        if m["hidden"] not in TABLE_1:
            raise NotExpressible("its micro-batch is not in the artifact's script")
        micro, each = TABLE_1[m["hidden"]]
    request: dict[str, Any] = {
        "framework": "megatron-deepspeed" if deepspeed else "megatron",
        "model": gpt2_config(row),
        "task": {
            "sequence_length": m["seq_len"], "global_batch": c["global_batch"], "packing": False,
        },
        "precision": c["precision"],
        "micro_batch": micro,
        "attention": "eager",
        "recompute": c["recompute"],
        "parallel": {
            "dp_replicate": c["dp"], "zero": 1, "tp": c["tp"], "pp": c["pp"],
            "virtual_pp": m["n_layers"] // c["pp"] // each if each else 1,
        },
        "hardware": hardware_of(row),
        "options": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    }  # fmt: skip
    if not deepspeed:
        request["options"] |= {
            "transformer_impl": "legacy", "use_distributed_optimizer": False, "version": 202104,
            "accumulate_allreduce_grads_in_fp32": False, "gradient_accumulation_fusion": False,
            "in_place_loss": False,
        }  # fmt: skip
    stated = "Table 1" in row["source"] or c.get("micro_batch")
    assumed = "" if stated else "Assumed: micro-batches of one sequence, no interleaving."
    return Translated(request, kind_of(row), assumed=assumed)
