"""What a rank of accelerate's FSDP2 holds in a step of TRL's loss from tiles, beside memfit's word.

    PYTHON bench/trl_units.py      # the Python of an environment that has TRL 1.16

TRL's loss reads the head's weight and never runs the head, whose unit torch then ends with the
model's forward; beside adapters the unit is the head alone, and its weight is gathered where it is
read. A tiny Llama on a CPU, TRL's own forward and accelerate's own units in a world that is not
here; Triton's kernels, which allocate nothing, left out, and small tiles. Writes
bench/results/trl_units.json: bytes at the highest instant of a step, above what is held, and the
tokens and columns of TRL's own tiles.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "trl_units.json"
CASES: list[dict[str, Any]] = [
    {"vocab": vocab, "lora": lora, "tied": tied}
    for lora in (False, True)
    for vocab, tied in ((96, False), (768, False), (768, True))
]
LIBRARIES = "torch", "transformers", "peft", "accelerate", "trl"


def predict(case: dict[str, Any]) -> int:
    """Bytes of the highest instant, of the tiles that were run."""
    import pairs
    from fsdp_ranks import LORA, ledger, rise

    method = LORA | {"base_format": "bf16"} if case["lora"] else {"method": "full"}
    with pairs.small_tiles():
        return rise(
            ledger(
                case["vocab"], version=2, tied=case["tied"], framework="trl", recompute="none",
                options={"fsdp_version": 2, "version": pairs.TILED}, **method,
            )
        )  # fmt: skip


def measure(case: dict[str, Any]) -> int:
    """The same of a second step of TRL's forward over accelerate's units."""
    import torch
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from fsdp_ranks import RANKS, ROWS, TOKENS, Level, accelerator, adapt, make_model, make_plugin
    from trl.trainer.utils import add_fused_lm_head

    from memfit.certify.tracing.world import fake_world
    from memfit.records.recipe import Parallel

    def step() -> None:
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        ((-out.log_probs).sum() / 2.0).backward()  # as SFTTrainer.compute_loss
        del out
        model.zero_grad()

    with fake_world(Parallel(dp_shard=RANKS), 0, "cpu", lambda _: None, lambda *_: None):
        whole = make_model(case["vocab"], tied=case["tied"])
        add_fused_lm_head(whole, outputs=("log_probs", "entropy", "is_top1"))
        told = accelerator(make_plugin(2, reshard_after_forward=True), "bf16")
        model = fsdp2_prepare_model(told, adapt(whole) if case["lora"] else whole)
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
        labels = ids.clone()
        step()
        held = [p.to_local() for p in model.parameters()]
        with Level(*held, *model.buffers(), ids, labels) as level:
            step()
    return int(level.highest)


def main() -> None:
    """See the module's docstring."""
    from importlib.metadata import version

    import pairs
    import trl.trainer.utils as utils
    from trl.kernels import chunked_logprob

    tile = chunked_logprob.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE  # as TRL has it
    pairs.count_on_tiles()
    rows = [case | {"measured": measure(case), "predicted": predict(case)} for case in CASES]
    for row in rows:
        print(*row.items())
    found = {"versions": {each: version(each) for each in LIBRARIES}, "tile": tile, "rows": rows}
    OUT.write_text(json.dumps(found, indent=1) + "\n")


sys.path[:0] = [str(HERE), *(str(HERE.parent / "tests" / at) for at in ("", "plan/frameworks"))]
if __name__ == "__main__":
    main()
