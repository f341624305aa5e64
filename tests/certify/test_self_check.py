"""The self-check: its bytes are those of real tensors, and each broken imitation is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_steps import A100, CPU, H100, make_device, make_recipe
from torch.nn.attention import SDPBackend

from memfit.certify import certify
from memfit.certify.evidence import self_check
from memfit.certify.evidence.prove import prove
from memfit.certify.evidence.self_check import _FLASH, _PROOFS, Proof, check_imitation
from memfit.certify.tracing import cuda_kernels, fake_device
from memfit.core.errors import NotCertified
from memfit.train.measure.live import LiveBytes

T4 = make_device("NVIDIA", "t4", "7.5")
MI300X = make_device("AMD", "mi300x", None)


@pytest.fixture(autouse=True)
def _proved_anew(monkeypatch):
    monkeypatch.setattr(fake_device, "_PROVED", {})


@pytest.mark.parametrize("device", [CPU, H100, A100, T4, MI300X], ids=lambda d: d.id)
def test_this_torch_imitates(device) -> None:
    with fake_device.fake_device(device) as mode:
        assert len(mode.proofs) > 15
        assert all(proof.holds and proof.expected == proof.found for proof in mode.proofs)


def test_a_process_makes_its_proofs_once_for_devices_that_are_alike(monkeypatch) -> None:
    made = []
    monkeypatch.setattr(fake_device, "check_imitation", lambda kind, flash: (kind, flash))
    for device in (H100, H100, A100, CPU, T4, CPU, MI300X):
        with fake_device.fake_device(device) as mode:
            made.append(mode.proofs)
    cuda, cpu = ("cuda", True), ("cpu", True)
    assert made == [cuda, cuda, cuda, cpu, ("cuda", False), cpu, cuda]
    assert made[0] is made[1] is not made[2]
    assert made[3] is made[5]


def test_real_tensors_on_this_cpu_hold_the_expected_bytes() -> None:
    made = [proof for prove_one in _PROOFS + _FLASH for proof in prove_one("cpu")]
    assert [proof.what for proof in made if not proof.holds] == ["a tensor"]  # which is not fake
    assert len(made) > 15


def without(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """One imitation left out."""
    return lambda patch: patch.setattr(owner, name, lambda *_: nullcontext())


def no_own_backward_of_silu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_kernels, "COMPOSITE_WITH_CUDA_KERNEL", ())


def math_kernel_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_kernels, "attention_backend", lambda *_, **__: SDPBackend.MATH)


def kept_instead_of_recomputed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(self_check, "checkpoint", lambda run, x, **_: run(x))


def frees_that_come_late(patch: pytest.MonkeyPatch) -> None:
    release = LiveBytes._release

    def released(self: LiveBytes, index: int) -> None:
        late = self.__dict__.setdefault("late", [])
        late.append(index)
        if len(late) % 2 == 0:
            for one in (late.pop(), late.pop()):
                release(self, one)

    patch.setattr(LiveBytes, "_release", released)


def loop_for_foreach(patch: pytest.MonkeyPatch) -> None:
    adamw = torch.optim.AdamW

    def one_by_one(weights: Any, **options: Any) -> Any:
        return adamw(weights, fused=options.get("fused"), foreach=False)

    patch.setattr(torch.optim, "AdamW", one_by_one)


def has_cuda_kernel(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


BROKEN = {
    "attention's kernels": (without(fake_device, "cuda_kernels"), "flash.attention"),
    "attention's choice": (math_kernel_alone, "efficient attention"),
    "foreach on fakes": (without(fake_device, "_foreach_on_fake_tensors"), "clipping"),
    "foreach optimizers": (loop_for_foreach, "temporaries of foreach AdamW: 0, 8520 B expected"),
    "autocast": (without(fake_device, "_cuda_autocast"), "autocast"),
    "silu's backward": (no_own_backward_of_silu, "silu_backward"),
    "recomputation": (kept_instead_of_recomputed, "recomputed blocks keep their input alone"),
    "frees": (frees_that_come_late, "storages are freed in order"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_imitation_is_refused_with_what_differs(monkeypatch, name: str) -> None:
    break_it, words = BROKEN[name]
    if name == "silu's backward" and has_cuda_kernel("silu_backward"):
        pytest.skip("a build with CUDA has the kernel itself, and nothing is imitated")
    break_it(monkeypatch)
    with (
        pytest.raises(NotCertified, match=words) as refusal,
        fake_device.fake_device(H100),
    ):
        pass
    assert f"torch {torch.__version__} does not imitate a cuda device" in refusal.value.message
    assert refusal.value.hint


def test_both_figures_are_named() -> None:
    proof = Proof("what it keeps", (8472,), (12345,))
    assert str(proof) == "what it keeps: 8472 B expected, 12345 B found"
    assert "ran without mm" in str(Proof("a product", (), (), ("mm",)))


def test_tensors_that_are_not_fake_are_refused() -> None:
    with pytest.raises(NotCertified, match="a tensor: ran without fake tensors"):
        check_imitation("cpu")


def test_the_check_runs_in_a_process_of_its_own() -> None:
    assert re.fullmatch(r"2\d checks of known bytes passed", prove("h100-sxm"))


CRASHES = {
    "abort": ("os.abort()", -6, lambda: certify(make_recipe(), H100, None)),
    "segfault": ("ctypes.string_at(0)", -11, lambda: prove("h100-sxm")),
}


@pytest.mark.parametrize("name", ["abort", pytest.param("segfault", marks=pytest.mark.wide)])
def test_a_child_that_dies_is_not_certified(monkeypatch, tmp_path: Path, name: str) -> None:
    """What the child imports kills it, as torch's own std::terminate does."""
    line, code, run = CRASHES[name]
    (tmp_path / "memfit_killer.py").write_text(f"import ctypes, os\n{line}\n")
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(NotCertified, match=f"ended with code {code}") as died:
        run()
    assert died.value.exit_code == 4


# In the child alone: the first import of the module that imitates the device imports the killer.
KILLER = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "memfit.certify.tracing.cuda_guard":
            import memfit_killer

sys.meta_path.insert(0, Finder())
"""
