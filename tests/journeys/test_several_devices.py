"""A plan of several devices says what the certificate of the command that it prints says."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from memfit.plan.memory.verdict import REPLAY
from tiny_models import CONFIGS
from typed_commands import quick

WIDE = {
    "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 32000, "head_dim": 64,
    "num_hidden_layers": 3, "num_attention_heads": 16, "max_position_embeddings": 2048,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
LINEAR = {
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama, full": ("llama", {}, "--device '2x rtx-4090' --method full"),
    "linear attention with experts over nf4": (
        "qwen3_next", EXPERTS | LINEAR,
        "--device '4x l40s' --method qlora --set parallel.dp_shard=4",
    ),
    "experts in 16 bits": (
        "mixtral", {"intermediate_size": 512},
        "--device '8x h100' --method lora --set parallel.dp_shard=8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_printed_certify_command_proves_the_plan(
    name: str, certified_here: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 512 B, one block of a scalar, and with the range but for what is allowed a replay."""
    family, changes, words = CASES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGS[family] | WIDE | changes))
    asked = ["./model", *shlex.split(words), "--seq-len", "2048"]
    code, out, err = quick("plan", *asked)
    assert code == 0, err
    lines = out.replace("\\\n", " ").splitlines()
    (command,) = (line for line in lines if "memfit certify" in line)
    certify = shlex.split(command)
    planned = json.loads(quick("plan", *asked, "--json", "--quiet")[1])
    code, out, err = quick(*certify[1:], "--json", "--quiet")
    assert code == 0, err
    proved = json.loads(out)
    assert proved["recipe"] == planned["recipe"]
    assert (
        proved["recipe"]["parallel"]["dp_replicate"] * proved["recipe"]["parallel"]["dp_shard"] > 1
    )
    predicted, certified = planned["memory"], proved["memory"]
    assert certified["verdict"] == predicted["verdict"] == "fits"
    assert abs(certified["peak_allocated"] - predicted["peak_allocated"]) <= 512
    assert certified["peak_reserved"] == predicted["peak_reserved"]
    allowed = (REPLAY.high - 1) * certified["total_high"]
    assert 0 <= predicted["total_high"] - certified["total_high"] <= allowed
    assert 0 <= certified["total_low"] - predicted["total_low"] <= allowed
