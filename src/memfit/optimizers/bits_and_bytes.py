"""AdamW with 8-bit states of bitsandbytes (Dettmers et al. 2110.02861), and its paged variants.

One kernel updates a parameter in place: codes are read, updated and written without a temporary.
`paged` keeps large states in CUDA's managed memory, which the driver moves between host and device
(bitsandbytes/optim/optimizer.py, `get_state_buffer`): none of it is the caching allocator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, final

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import install_extra, quiet_import
from memfit.meta.meter import Meter
from memfit.optimizers import Counted, OptimizerFamily, optimizers
from memfit.records.model import TensorSpec
from memfit.records.recipe import Optimizer

if TYPE_CHECKING:
    import torch

SMALLEST = 4096  # elements; smaller parameters keep fp32 moments
BLOCK = 256  # elements that share a scale
PAGED = 100_000  # elements from which a state is paged
TABLE = TensorSpec(shape=(256,))  # the values of a code


@final
class BitsAndBytesAdamW(OptimizerFamily):
    """Two moments of a byte an element, a scale a block; two tables that all parameters share."""

    implementations = ("fused",)
    state_while_updating = ("fused",)
    cuda_only = ("fused",)
    unsharded_only = ("fused",)
    second_moments = True
    unsharded_reason = "bitsandbytes' kernels know no shards (bitsandbytes issue 1633)"

    def __init__(self, *, paged: bool, bits: int = 8) -> None:
        self.paged, self.bits = paged, bits
        self.state_bits = bits if bits == 8 else 0
        if paged:
            self.bounds = (
                "paged states are in CUDA's managed memory, outside the allocator: on the device"
                " while there is room, on the host when there is none",
            )

    def state(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.state`; the counter is a plain number."""
        if not self.shares(local, settings):
            wide = TensorSpec(shape=local.shape)
            return (wide, wide)
        codes = TensorSpec(shape=local.shape, dtype="uint8")
        scales = TensorSpec(shape=(-(-local.numel // BLOCK),))
        return (codes, codes, scales, scales)

    def shared_state(self, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.shared_state`."""
        return (TABLE, TABLE)

    def shares(self, local: TensorSpec, settings: Optimizer) -> bool:
        """See `OptimizerFamily.shares`: quantised moments need the tables."""
        return self.bits == 8 and local.numel >= SMALLEST

    def host_state(self, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.host_state`; of what is paged see `on_device`."""
        return ()

    def on_device(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.on_device`: managed memory is not the allocator's."""
        held = self.state(local, settings)
        return held[2:] if self.paged and local.numel >= PAGED else held

    def step_temporaries(
        self, parameters: Sequence[TensorSpec], settings: Optimizer, counted: Counted = "live"
    ) -> int:
        """See `OptimizerFamily.step_temporaries`."""
        return 0

    def update_alone(self, parameter: TensorSpec, settings: Optimizer, meter: Meter) -> None:
        """See `OptimizerFamily.update_alone`."""

    def moved(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """See `OptimizerFamily.moved`; as if paged states were all on the device."""
        held = sum(s.nbytes for s in self.state(parameter, settings))
        return 3 * parameter.nbytes + 2 * held

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Optimizer,
        ends: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> torch.optim.Optimizer:
        """See `OptimizerFamily.build`. Raises InvalidRequest without bitsandbytes, or paged on
        a CPU.
        """
        trainable = list(parameters)
        if self.paged and any(p.device.type == "cpu" for p in trainable):
            raise InvalidRequest(
                "a paged optimizer lives in CUDA's managed memory, and the device is a CPU",
                hint="use `optimizer.name: adamw8bit`",
            )
        made: torch.optim.Optimizer = _torch_class()(
            trainable,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            is_paged=self.paged,
        )
        return made


@cache
def _tables() -> tuple[list[float], list[float]]:
    """The values of signed and of unsigned codes, as bitsandbytes computes them, on the host.

    Raises InvalidRequest when bitsandbytes is not installed.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        with quiet_import(), _disable_current_modes():
            from bitsandbytes import functional
    except ImportError:
        raise InvalidRequest(
            "this optimizer is bitsandbytes', and `bitsandbytes` is not installed",
            hint=f"{install_extra('train')}, or use `optimizer.name: adamw8bit`",
        ) from None
    with _disable_current_modes():  # it reads numbers, which fake tensors do not have
        signed, unsigned = (functional.create_dynamic_map(signed=s) for s in (True, False))
        return signed.tolist(), unsigned.tolist()


@cache
def _torch_class() -> Callable[..., Any]:
    """bitsandbytes' class, whose tables and pages a trace on fake tensors can have too."""
    tables = _tables()
    import torch
    from bitsandbytes.optim import AdamW8bit
    from torch._subclasses.fake_tensor import FakeTensor

    class Traceable(AdamW8bit):  # type: ignore[misc]
        """The same states and updates; a page of fake memory is a fake tensor on the host."""

        def fill_qmap(self) -> None:
            """The tables, in whatever tensors the mode makes."""
            for name, values in zip(("dynamic", "udynamic"), tables, strict=True):
                self.name2qmap[name] = torch.tensor(values)

        def get_state_buffer(self, p: Any, dtype: Any = torch.float32) -> Any:
            """A page, or plain zeros for what is small."""
            if self.is_paged and isinstance(p, FakeTensor) and p.numel() >= PAGED:
                page: Any = torch.zeros(p.shape, dtype=dtype, device="cpu")
                page.is_paged = True
                return page
            return super().get_state_buffer(p, dtype)

        def prefetch_state(self, p: Any) -> None:
            """Prefetch the state's pages to the device, unless they are a fake tensor's."""
            if not isinstance(p, FakeTensor):
                super().prefetch_state(p)

    return Traceable


optimizers.register("adamw8bit-bnb")(BitsAndBytesAdamW(paged=False))
optimizers.register("adamw8bit-paged")(BitsAndBytesAdamW(paged=True))
