"""What CUDA kernels take from the allocator inside themselves, and what lies outside it.

A dispatch mode sees every operator of a case: what the allocator held at its worst moment beyond
the operator's results is what its kernel took. Each occurrence of an operator of docs/workspaces.md
is held against its rule; operators that took something and have no rule are named, too.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from gpu_grid import TINY

from on_gpu.recipes import BNB, LORA, SMALL, make_plan
from on_gpu.rows import Place, Row, Unit

MIB = 2**20
STEP: dict[str, Any] = {
    "micro_batch": 2, "task.global_batch": 2, "task.sequence_length": 2048, "recompute": "none",
    "loss": "plain",
}  # fmt: skip
STEPS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "step: 0.6B full": ("qwen3-0.6b", (), {**STEP, "method": "full", "precision": "bf16-mixed"}),
    "step: 0.6B LoRA over nf4": ("qwen3-0.6b", BNB, {**STEP, **LORA, "base_format": "nf4"}),
    "step: 0.6B LoRA over int8": ("qwen3-0.6b", BNB, {**STEP, **LORA, "base_format": "int8"}),
    "step: GPT-2 large, bf16": ("gpt2-large", (), {
        **STEP, "method": "full", "precision": "bf16", "task.sequence_length": 1024,
        "lean": "none", "optimizer.implementation": "foreach",
    }),
    "step: 1.4B, fp32": ("pythia-1.4b", (), {**STEP, "method": "full", "precision": "fp32"}),
}  # fmt: skip
TWINS = {"step: tiny": (TINY, (), {**SMALL, "method": "full"})}


def list_units(place: Place) -> list[Unit]:
    steps = TWINS if place.rehearsal else STEPS
    names = ["context", *(f"kernel: {name}" for name in cases(place))]
    return [
        *(Unit(name, 60.0) for name in names),
        *(Unit(name, 150.0, needs) for name, (_, needs, _) in steps.items()),
    ]


def measure(name: str, place: Place) -> Row:
    """The context's bytes, or each operator's of one case."""
    if name == "context":
        return weigh_context(place)
    kind, _, what = name.partition(": ")
    probe = make_probe(place)
    if kind == "kernel":
        cases(place)[what](probe)
    else:
        run_step(probe, name, place)
    return {"operators": list(probe.seen.values())}


def say(what: str, device: str) -> dict[str, int]:
    """Bytes that today's rules say of each operator of a program, on tensors without data.

    what: the program's name in `cases`; the keys are those of `Probe.seen`.
    """
    from pathlib import Path

    from memfit.catalog import find_device
    from memfit.certify.tracing.cuda_kernels import cuda_kernels
    from memfit.certify.tracing.fake_device import fake_device
    from on_gpu.probe import Probe

    place, row = Place("cuda", device, Path()), find_device(device)
    probe = Probe(place, weigh=False)
    with fake_device(row), cuda_kernels(row):
        cases(place)[what](probe)
    return {key: found["stated"] for key, found in probe.seen.items()}


def run_step(probe: Any, name: str, place: Place) -> None:
    """Two optimizer steps of a recipe under the probe; the first one makes states."""
    import torch

    from memfit.families import read_model
    from memfit.train.measure.counters import run_step as step
    from memfit.train.measure.counters import synthetic_micro
    from memfit.train.model.weights import fill_weights
    from memfit.train.step.build import Built, build_model, build_optimizer

    model, _, changes = (TWINS if place.rehearsal else STEPS)[name]
    recipe = make_plan(model, changes, "cpu" if place.rehearsal else place.row).recipe
    module = build_model(recipe, torch.device(place.device))
    fill_weights(module, recipe)
    built = Built(recipe, module, build_optimizer(recipe, module))
    micro = synthetic_micro(recipe, read_model(recipe.model).architecture.vocab)
    with probe:
        for _ in range(2):
            step(built, [micro])


def cases(place: Place) -> dict[str, Callable[[Any], None]]:
    """Programs that call one kernel each; a rehearsal runs two of them in small."""
    rows = 2 if place.rehearsal else 4
    tokens = 64 if place.rehearsal else 2048

    def attention(backend: str, dtype: str, heads: tuple[int, int, int]) -> Callable[[Any], None]:
        return lambda probe: attend(probe, place.device, backend, dtype, rows, tokens, heads)

    found = {
        "flash, bf16": attention("flash", "bfloat16", (16, 16, 64)),
        "flash, bf16, grouped heads": attention("flash", "bfloat16", (32, 8, 128)),
        "efficient, fp32": attention("efficient", "float32", (16, 16, 64)),
        "efficient, bf16": attention("efficient", "bfloat16", (16, 16, 128)),
        "efficient, bf16, wide heads": attention("efficient", "bfloat16", (8, 8, 256)),
        "cudnn, bf16": attention("cudnn", "bfloat16", (16, 16, 128)),
        "varlen, bf16": lambda probe: attend_documents(probe, place.device, tokens),
        "embedding": lambda probe: embed(probe, place.device, rows * tokens),
        "layer norm": lambda probe: normalise(probe, place.device, 3 * rows * tokens * 8),
        "sums over rows": lambda probe: add_rows(probe, place.device, rows * tokens),
        "norm of many tensors": lambda probe: norm_of_many(probe, place.device, tokens),
        "products": lambda probe: multiply(probe, place.device, tokens),
    }
    twins = ("embedding", "sums over rows")
    return {name: found[name] for name in twins} if place.rehearsal else found


def attend(
    probe: Any, device: str, backend: str, dtype: str, rows: int, tokens: int,
    heads: tuple[int, int, int],
) -> None:  # fmt: skip
    import torch
    from torch.nn.attention import sdpa_kernel

    from memfit.train.model.attention import BACKENDS

    of_queries, of_keys, size = heads
    shapes = [(rows, n, tokens, size) for n in (of_queries, of_keys, of_keys)]
    kind = getattr(torch, dtype)
    given = [torch.randn(s, device=device, dtype=kind).requires_grad_() for s in shapes]
    with sdpa_kernel(BACKENDS[backend]), probe:
        grouped = of_keys != of_queries
        made = torch.nn.functional.scaled_dot_product_attention(
            *given, is_causal=True, enable_gqa=grouped
        )
        made.backward(torch.ones_like(made))


def attend_documents(probe: Any, device: str, tokens: int) -> None:
    import torch

    from memfit.train.model.varlen import attend_end_to_end

    documents = ((tokens - 300, 1, 299), (tokens,))
    given = [
        torch.randn(2, n, tokens, 64, device=device, dtype=torch.bfloat16).requires_grad_()
        for n in (16, 4, 4)
    ]
    with probe:
        made, _ = attend_end_to_end(torch.nn.Module(), *given, None, documents=documents)
        made.sum().backward()


def embed(probe: Any, device: str, indices: int) -> None:
    import torch

    table = torch.nn.Embedding(32000, 1024, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, 32000, (indices,), device=device)
    with probe:
        table(ids).sum().backward()


def normalise(probe: Any, device: str, rows: int) -> None:
    import torch

    norm = torch.nn.LayerNorm(256, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    with probe:
        made = norm(x)
        made.backward(torch.ones_like(made))


def add_rows(probe: Any, device: str, rows: int) -> None:
    import torch

    for columns in (64, 1024, 4096):
        x = torch.randn(rows, columns, device=device)
        with probe:
            x.sum(0)


def norm_of_many(probe: Any, device: str, side: int) -> None:
    import torch

    tensors = [torch.randn(side, side, device=device) for _ in range(32)]
    with probe:
        torch._foreach_norm(tensors)


def multiply(probe: Any, device: str, side: int) -> None:
    import torch

    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(side, side, device=device).to(dtype)
        with probe:
            a @ a
            torch.addmm(a[0], a, a)


def weigh_context(place: Place) -> Row:
    """Bytes outside the allocator as libraries load, by the driver's count."""
    if place.rehearsal:
        return {"outside": {}, "driver_before": None}
    import torch

    before = ask_driver()
    found: dict[str, int] = {}

    def note(what: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found[what] = total - free - torch.cuda.memory_reserved()

    torch.cuda.init()
    torch.empty(1, device="cuda")
    note("a bare context")
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    a.add(1).sum().backward()
    note("elementwise kernels")
    (a @ a).sum().backward()
    note("cuBLAS")
    q = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    note("fused attention")
    torch.optim.AdamW([a], fused=True).step()
    note("a fused optimizer")
    return {"outside": found, "driver_before": before, "driver_after": ask_driver()}


def ask_driver() -> int | None:
    """Bytes of the device in use as nvidia-smi says; None without it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(said.stdout.split()[0]) * MIB


def make_probe(place: Place) -> Any:
    """A dispatch mode that weighs each operator; without CUDA it counts the rules' bytes alone."""
    from on_gpu.probe import Probe

    return Probe(place)
