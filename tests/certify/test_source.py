"""Where each tensor comes from: source line, shape, dtype; and those alike in one row."""

from __future__ import annotations

import importlib
import linecache

import pytest
from tiny_steps import CPU, H100, make_recipe

from memfit.certify import trace
from memfit.records.ledger import Phase
from memfit.records.results import Tensor, group_tensors, without_index


def text_of(source: str) -> str:
    """The line itself, read from the module that the file's name stands for."""
    file, _, number = source.rpartition(":")
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    return linecache.getline(module.__file__, int(number))


def rows_of(traced, kind: str, module: str) -> list[Tensor]:
    """All gradients exist when the optimizer steps, whatever the backward's own peak holds."""
    phase = Phase.OPTIMIZER_STEP if kind == "gradients" else Phase.BACKWARD
    return [t for t in traced.alive(phase) if (t.kind, t.module) == (kind, module)]


@pytest.mark.parametrize("device", [CPU, H100], ids=lambda d: d.id)
def test_a_source_is_the_line_that_asked_and_of_a_backward_its_forwards(device) -> None:
    traced = trace(make_recipe(clip_norm=0.0, attention="math"), device)
    for name in ("q_proj", "k_proj", "o_proj"):
        (gradient,) = rows_of(traced, "gradients", f"model.layers.*.self_attn.{name}.weight")
        assert gradient.op.startswith("mm"), gradient  # made by a product of the backward
        assert f"self.{name}(" in text_of(gradient.source)
    for tensor in traced.alive(Phase.FORWARD):
        if tensor.module.startswith("model.layers") and tensor.kind == "activations":
            assert tensor.source.startswith(("transformers/", "memfit/train/model/attention.py:"))
            assert text_of(tensor.source).strip(), tensor
    (state,) = {t.source for t in traced.alive(Phase.LOSS) if t.module == "exp_avg"}
    assert "optimizer.step()" in text_of(state)


def test_the_loss_of_further_micro_batches_has_its_lines_too() -> None:
    traced = trace(make_recipe(accumulation=2, clip_norm=0.0), CPU)
    (logits,) = {
        text_of(t.source).strip()
        for t in traced.alive(Phase.ACCUMULATE)
        if t.op.startswith("_log_softmax_backward")
    }
    assert "cross_entropy" in logits or logits.startswith("logits")


def test_a_recomputed_forward_is_named_by_its_own_lines() -> None:
    traced = trace(make_recipe(recompute_blocks=3), CPU)
    gates = rows_of(traced, "activations", "model.layers.0.mlp.gate_proj")
    gates = gates or rows_of(traced, "activations", "model.layers.2.mlp.gate_proj")
    assert gates
    assert all("self.gate_proj(" in text_of(t.source) for t in gates)


def test_no_path_of_this_machine_is_shown() -> None:
    traced = trace(make_recipe(method="lora", loss="chunked", loss_chunk=16), CPU)
    sources = {t.source for phase in traced.phases for t in traced.alive(phase)}
    assert any(s.startswith("peft/") for s in sources)
    assert any(s.startswith("memfit/train/step/loss.py:") for s in sources)
    assert not any(s.startswith(("/", "~")) or ".." in s or "torch/" in s for s in sources)


def test_all_tensors_of_a_peak_are_listed_with_shape_and_dtype() -> None:
    traced = trace(make_recipe(precision="bf16-mixed", accumulation=2), CPU)
    for phase, peak in traced.phases.items():
        rows = traced.alive(phase)
        assert sum(row.total for row in rows) == peak
        assert [r.total for r in rows] == sorted((r.total for r in rows), reverse=True)
    sizes = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}
    for row in traced.at_peak:
        elements = 1
        for n in row.shape:
            elements *= n
        assert elements * sizes[row.dtype] <= row.nbytes, row  # a view may show less of a storage


def test_tensors_alike_but_for_their_block_are_one_row() -> None:
    def tensor(module: str, nbytes: int = 4, kind: str = "activations") -> Tensor:
        return Tensor(nbytes=nbytes, kind=kind, module=module, op="mm")

    block = [tensor(f"model.layers.{n}.mlp") for n in range(11)]
    lone = tensor("model.layers.3.mlp", nbytes=8)
    twice = [tensor("model.norm"), tensor("model.norm")]
    other = tensor("model.layers.3.mlp", kind="temporary")
    rows = group_tensors([*block, lone, *twice, other])
    assert [(r.module, r.count, r.total, r.kind) for r in rows] == [
        ("model.layers.*.mlp", 11, 44, "activations"),
        ("model.layers.3.mlp", 1, 8, "activations"),
        ("model.norm", 2, 8, "activations"),
        ("model.layers.3.mlp", 1, 4, "temporary"),
    ]
    assert group_tensors(rows) == rows
    assert without_index("transformer.h.12.attn.2") == "transformer.h.*.attn.*"
    assert without_index("conv1d.weight") == "conv1d.weight"
