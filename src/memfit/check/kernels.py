"""Liger's kernels and losses without logits, in the keys of those who put them into a class.

Sources: transformers 5.23 (integrations/liger.py), TRL 1.16 (SFTTrainer.__init__), LLaMA-Factory
(model_utils/liger_kernel.py), axolotl 0.19 (integrations/liger, integrations/cut_cross_entropy).
"""

from __future__ import annotations

from memfit.check import ConfigReading
from memfit.check.keys import NOT_DESCRIBED, ConfigKeys
from memfit.core.errors import InvalidRequest

BLOCKS = "rope,rms_norm,swiglu"  # what Liger puts into a class by default, beside its loss
PLUGINS = "axolotl.integrations."
LIGER = PLUGINS + "liger.LigerPlugin"
CUT = PLUGINS + "cut_cross_entropy.CutCrossEntropyPlugin"
WITHOUT_BYTES = (PLUGINS + "swanlab.SwanLabPlugin",)  # what is shown of a run
OPERATIONS = {
    "liger_rope": "rope", "liger_rms_norm": "rms_norm", "liger_glu_activation": "swiglu",
    "liger_swiglu": "swiglu",
}  # fmt: skip
FUSED = "liger_fused_linear_cross_entropy"


def read_liger(taken: ConfigKeys, reading: ConfigReading, key: str, *, loss: bool) -> None:
    """All of Liger's kernels by one key; loss: whether its loss is among them."""
    if not taken(key, False):
        return
    if reading.get("task.objective") == "dpo":
        taken.leave(key, value=True, why="Liger's loss of pairs is not described", least="states")
        return
    _put(reading, f"`{key}: true` in `{taken.file}`", BLOCKS, "chunked" if loss else "")


def read_plugins(taken: ConfigKeys, reading: ConfigReading) -> None:
    """axolotl's: Liger's operations one by one, and cut cross-entropy."""
    plugins = taken("plugins", [], list[str])
    for name in plugins:
        if name not in (LIGER, CUT, *WITHOUT_BYTES):
            taken.leave("plugins", name, NOT_DESCRIBED, "nothing")
    operations = [ours for theirs, ours in OPERATIONS.items() if taken(theirs, False)]
    fused, cut = bool(taken(FUSED, False)), taken("cut_cross_entropy", CUT in plugins)
    if (operations or fused) and LIGER not in plugins:
        reading.assume("Liger's keys do nothing without its plugin")
        operations, fused = [], False
    if cut and CUT not in plugins:
        reading.assume("`cut_cross_entropy` does nothing without its plugin")
        cut = False
    if fused and cut:
        raise InvalidRequest(f"`{FUSED}` and `cut_cross_entropy` in `{taken.file}`: one loss")
    loss = "chunked" if fused else "fused" if cut else ""
    _put(reading, f"`plugins` in `{taken.file}`", ",".join(operations), loss)


def _put(reading: ConfigReading, keys: str, operations: str, loss: str) -> None:
    if reading.own and (operations or loss):
        raise InvalidRequest(
            f"{keys}: memfit's own step has none of these kernels",
            hint="`lean` and `loss: chunked` are the same mathematics, without the file's key",
        )
    if operations:
        reading.put("options.liger", operations)
    if loss and reading.get("loss") is None:
        reading.put("loss", loss)
