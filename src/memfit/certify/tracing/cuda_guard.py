"""A device guard and hooks for CUDA in a torch that was built without it.

PyTorch aborts the process (`std::terminate`) when autograd meets a fake `cuda` tensor and no CUDA
guard is registered. A CUDA build without a GPU has what is needed: `c10` installs its own no-op
guard over the registered one when that counts no devices. Here a CPU build does the same by two
small writes through ctypes, both checked: in the process that certifies, a changed layout
is an error, or at worst the end of that process, which its parent reports. Linux and macOS
(Itanium C++ ABI).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memfit.core.errors import NotCertified

CUDA_DEVICE_TYPE = 1  # c10::DeviceType::CUDA
_alive: list[Any] = []  # what C++ points to must never be collected


def _library(name: str) -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    path = Path(torch.__file__).parent / "lib" / f"lib{name}.{suffix}"
    if not path.exists():
        raise NotCertified(
            f"cannot trace a CUDA step here: this torch has no `{path.name}`",
            hint="certify on Linux or macOS, or for a CPU device",
        )
    return ctypes.CDLL(str(path))


def install_guard() -> None:
    """Make sure that a CUDA device guard is registered; it stays, and does nothing."""
    c10 = _library("c10")
    try:
        registry = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
        register = c10[
            "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
        ]
    except (ValueError, AttributeError) as error:
        raise NotCertified(
            f"cannot trace a CUDA step with torch {torch.__version__}: {error}"
        ) from None
    if registry[CUDA_DEVICE_TYPE]:
        return
    # For a moment, an object whose every virtual function returns 0: it counts no devices, so
    # that c10 replaces it with its own NoOpDeviceGuardImpl.
    zero = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
    table = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 64)
    stand_in = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    _alive.extend([zero, table, stand_in])
    register(ctypes.c_int8(CUDA_DEVICE_TYPE), ctypes.byref(stand_in))
    torch._C._ensureCUDADeviceGuardSet()
    if registry[CUDA_DEVICE_TYPE] in (None, ctypes.addressof(stand_in)):
        registry[CUDA_DEVICE_TYPE] = None
        raise NotCertified(f"torch {torch.__version__} did not install its no-op CUDA guard")


@contextmanager
def cuda_hooks() -> Iterator[None]:
    """Let autograd's engine find that the accelerator is CUDA, and that no context is open on it.

    The engine asks `at::getAccelerator(checked=true)`, which asks `CUDAHooksInterface::isBuilt`,
    and `hasPrimaryContext`, which raises in a CUDA build that sees no GPU. For a while the hooks
    object gets a copy of its table in which native functions answer 1 and 0.
    """
    get_hooks = _library("torch_cpu")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype, get_hooks.argtypes = ctypes.c_void_p, []
    pointer = ctypes.c_void_p.from_address(get_hooks())
    before = pointer.value
    table = _hooks_table(before)
    pointer.value = ctypes.addressof(table) + _HEAD
    try:
        found = torch.accelerator.current_accelerator()
        if found is None or found.type != "cuda":
            raise NotCertified(f"the CUDA hooks of torch {torch.__version__} have another layout")
        yield
    finally:
        pointer.value = before


_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEAD = 2 * _WORD  # offset to top and type info come before the first virtual function
_ENTRIES = 80
_IS_BUILT, _HAS_PRIMARY_CONTEXT = 4, 6  # the head and two destructors come first


def _hooks_table(address: int | None) -> Any:
    """A copy of the virtual table, in memory that is never freed: C++ statics outlive Python."""
    if address is None:
        raise NotCertified(f"torch {torch.__version__} has no CUDA hooks object")
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    table = (ctypes.c_void_p * _ENTRIES).from_address(malloc(_WORD * _ENTRIES))
    source = (ctypes.c_void_p * _ENTRIES).from_address(address - _HEAD)
    for i in range(_ENTRIES):
        table[i] = source[i]
    # Native functions without arguments, which need no lock of Python's: they answer 1 and 0.
    table[_IS_BUILT] = _address("Py_IsInitialized")
    table[_HAS_PRIMARY_CONTEXT] = _address("Py_IsFinalizing", "_Py_IsFinalizing")
    _alive.append(table)
    return table


def _address(*names: str) -> int | None:
    """Of the first function of these names that this Python has (3.13 made one public)."""
    for name in names:
        if hasattr(ctypes.pythonapi, name):
            return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    raise NotCertified(f"this Python has none of {', '.join(names)}")
