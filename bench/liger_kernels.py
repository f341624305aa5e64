"""Memory of Liger-Kernel's operations, and of what they replace, against its own benchmark.

    python bench/liger_kernels.py

`measurements/kernels/liger.json` holds the published peaks of a forward with its backward on an
A100. Each row's few lines are run on sizes alone, twice over: gradients stay from the first round.
Writes bench/results/liger_kernels.md; exits 1 when a row is off by more than 3 %.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit import meta
from memfit.core.units import KIB, MIB
from memfit.families.shared.forward import rotate
from memfit.meta import Meter, Tensor
from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, attach, cast, like
from memfit.meta.layers import liger
from memfit.meta.layers.liger import next_power_of_two
from memfit.meta.losses.cross_entropy import cross_entropy_sum, made_before
from memfit.meta.meter import block_size
from memfit.meta.tensor import empty
from memfit.meta.workspace import Grid

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "measurements" / "kernels" / "liger.json"
LIMIT = 0.03
A100 = Grid(multiprocessors=108, threads=2048)
CUBLAS = 8 * MIB + 128 * KIB  # of an A100; see memfit.meta.workspace.product_workspace
GIVEN = "bfloat16"  # dtype of the gradients that the scripts hand in
Round = Callable[[], list[Tensor]]  # one forward; what its backward starts from
Set = tuple[Round, list[Tensor]]  # and what else the script holds, such as the other's layer


def rms_norm(meter: Meter, row: dict[str, Any]) -> Set:
    """Weights stay fp32 in this script, so that Hugging Face's result is fp32 too."""
    shape = (row["config"]["M"], row["value"])
    x = leaf(meter, shape, "bfloat16")
    weight = leaf(meter, shape[1:], "float32")
    others = [leaf(meter, shape[1:], "float32")]
    if row["provider"] == "liger":
        return lambda: [liger.rms_norm(x, weight, A100, partial_rows=True)], others

    def forward() -> list[Tensor]:
        wide = meta.cast(x, "float32")
        inverse = meta.rsqrt(meta.shift(meta.mean_last(meta.power(wide))))
        return [meta.mul(weight, meta.cast(meta.mul(wide, inverse), "bfloat16"))]

    return forward, others


def swiglu(meter: Meter, row: dict[str, Any]) -> Set:
    config = row["config"]
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    x = leaf(meter, (config["B"], row["value"], hidden), "bfloat16")
    gate, up = (leaf(meter, (ffn, hidden), "bfloat16") for _ in range(2))
    down = leaf(meter, (hidden, ffn), "bfloat16")

    def forward() -> list[Tensor]:
        if row["provider"] == "liger":
            inner = liger.silu_mul(meta.linear(x, gate), meta.linear(x, up))
        else:
            inner = meta.mul(meta.silu(meta.linear(x, gate)), meta.linear(x, up))
        return [meta.linear(inner, down)]

    return forward, []


def rope(meter: Meter, row: dict[str, Any]) -> Set:
    config = row["config"]
    tokens = config.get("seq_len", row["value"])
    size = config.get("hidden_size", row["value"]) // config["num_q_heads"]
    turn = tuple(parameter(meter, (1, tokens, size), "bfloat16") for _ in range(2))
    places = [parameter(meter, (1, tokens), "int64")]
    heads = [
        leaf(meter, (1, tokens, config[name], size), "bfloat16")
        for name in ("num_q_heads", "num_kv_heads")
    ]

    def forward() -> list[Tensor]:
        if row["provider"] == "liger":
            return list(liger.rotate(heads[0], heads[1], *turn))
        query, key = (meta.transpose(x, 1, 2) for x in heads)
        return list(rotate(query, key, (turn[0], turn[1])))

    return forward, places


def cross_entropy(meter: Meter, row: dict[str, Any]) -> Set:
    tokens = row["config"]["B"] * row["config"]["T"]
    logits = leaf(meter, (tokens, row["value"]), "float32")
    labels = parameter(meter, (tokens,), "int64")
    if row["provider"] == "liger":
        return lambda: [liger_cross_entropy(logits, labels)], []
    return lambda: [cross_entropy_sum(logits, labels)], []


def fused_linear_cross_entropy(meter: Meter, row: dict[str, Any]) -> Set:
    config = row["config"]
    hidden = leaf(meter, (row["value"], config["H"]), "bfloat16")
    weight, spare = (leaf(meter, (config["V"], config["H"]), "bfloat16") for _ in range(2))
    labels = parameter(meter, (row["value"],), "int64")

    def forward() -> list[Tensor]:
        if row["provider"] == "liger":
            return [liger_fused_linear_cross_entropy(hidden, weight, labels, upcast=True)]
        return [cross_entropy_sum(meta.linear(hidden, weight), labels)]

    return forward, [spare]


def liger_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`LigerCrossEntropyFunction`: (tokens, vocab) -> (); the gradient overwrites the logits."""
    losses = empty(logits.meter, (logits.shape[0],), logits.dtype)
    mask = empty(logits.meter, labels.shape, "bool")
    count = empty(logits.meter, (), "int64")
    del mask
    node = record(_cross_entropy_backward, (logits,), (logits,))
    result = attach(node, empty(logits.meter, (), logits.dtype))
    del losses, count
    return result


def _cross_entropy_backward(node: Node, grads: Incoming) -> Gradients:
    return (node.unpack(0).detached(),)


def liger_fused_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, upcast: bool = False
) -> Tensor:
    """`LigerFusedLinearCrossEntropyFunction`: logits of a few tokens at a time, gradients at once.

    hidden: (tokens, hidden); weight: (vocab, hidden) -> (). A chunk's logits are about as large as
    hidden. upcast: a chunk's logits become fp32, as up to version 0.4.
    """
    meter, (tokens, width), vocab = hidden.meter, hidden.shape, weight.shape[0]
    chunk = next_power_of_two(-(-tokens // -(-vocab // width)))
    d_weight = like(weight) if weight.requires_grad else None
    d_hidden = like(hidden)
    losses = empty(meter, (tokens,), "float32")
    slopes: Tensor | None = None
    for start in range(0, tokens, chunk):
        rows = min(chunk, tokens - start)
        logits = _product(meter, (rows, vocab), hidden.dtype, width)
        if upcast:
            wide = cast(logits.detached(), "float32")
            del logits
            logits = cast(wide, hidden.dtype)
            del wide
        slopes = like(logits) if upcast else logits
        part = _product(meter, (rows, width), hidden.dtype, vocab)
        del part
        if d_weight is not None and not upcast:
            outer = _product(meter, (vocab, width), weight.dtype, rows)
            del outer
        elif d_weight is not None:
            meter.begin_product()
    del slopes, losses
    node = record(made_before, (hidden, weight))
    result = attach(node, empty(meter, (), "float32"))
    if node is not None:
        node.saved = [d_hidden, d_weight]
    return result


def _product(meter: Meter, shape: tuple[int, int], dtype: str, inner: int) -> Tensor:
    meter.begin_product()
    return empty(meter, shape, dtype)


def leaf(meter: Meter, shape: tuple[int, ...], dtype: str) -> Tensor:
    return meta.parameter(meter, shape, dtype, trainable=True)


def parameter(meter: Meter, shape: tuple[int, ...], dtype: str) -> Tensor:
    return meta.parameter(meter, shape, dtype, trainable=False)


KERNELS: dict[str, Callable[[Meter, dict[str, Any]], Set]] = {
    "rms_norm": rms_norm, "swiglu": swiglu, "rope": rope, "cross_entropy": cross_entropy,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
}  # fmt: skip


def predict(row: dict[str, Any]) -> int:
    """Peak bytes of the second round: what the allocator's counter shows from then on."""
    meter = Meter(cuda=True, vocab=-1)
    meter.on_product = lambda: None  # until there is one
    forward, others = KERNELS[row["kernel"]](meter, row)
    kept: list[Any] = []
    if not row["kernel"].endswith("cross_entropy"):
        plain = meter.pack  # these scripts keep the graph: the backward frees nothing saved
        meter.pack = lambda t: kept.append(t) or plain(t)  # type: ignore[method-assign]
    start, given = 0, list[Tensor]()
    rounds = 1 if row["kernel"] == "rope" else 2  # its script drops the gradients of each round
    for _ in range(rounds):
        start = len(meter.events)
        results = forward()
        given = given or [parameter(meter, r.shape, GIVEN) for r in results if r.shape]
        root = together(results, given)
        meta.backward(root)
        del results, root
        kept.clear()
    del others  # alive until here
    multiplies = meter.on_product is None
    products = multiplies or row["kernel"] == "rope"  # the rotary table is a product
    return peak(meter, start) + CUBLAS * (1 + multiplies) * products


def together(results: list[Tensor], given: list[Tensor]) -> Tensor:
    """One backward from all results, with the gradients that the script hands in.

    The engine's root holds them to the end, cast to the dtypes of the results.
    """
    if not given:
        return results[0]
    held = [meta.cast(g, r.dtype) for g, r in zip(given, results, strict=True)]
    node = record(lambda node, grads: list(held), results)
    assert node is not None
    return node.attach(meta.empty(results[0].meter, (), "float32"))


def peak(meter: Meter, start: int) -> int:
    level = top = 0
    for at, event in enumerate(meter.events):
        index = event if event >= 0 else ~event
        level += block_size(meter.requested[index]) * (1 if event >= 0 else -1)
        if at >= start:
            top = max(top, level)
    return top


def report() -> tuple[str, float]:
    """The table, and the largest error."""
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    lines = [
        "# Liger-Kernel's operations, predicted", "", f"Measured: {data['source']}.", "",
        "| operation | provider | size | predicted MiB | measured MiB | error |",
        "|---|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    worst = 0.0
    for row in data["rows"]:
        found = predict(row) / MIB
        error = found / row["mib"] - 1
        worst = max(worst, abs(error))
        lines.append(
            f"| {row['kernel']} | {row['provider']} | {row['x']} {row['value']} | {found:.2f}"
            f" | {row['mib']:.2f} | {error:+.2%} |"
        )
    return "\n".join(
        [*lines, "", f"Largest error {worst:.2%} of {len(data['rows'])} rows.", ""]
    ), worst


if __name__ == "__main__":
    text, worst = report()
    (ROOT / "bench" / "results" / "liger_kernels.md").write_text(text, encoding="utf-8")
    print(text)
    sys.exit(worst > LIMIT)
