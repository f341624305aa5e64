"""AdamW with moments of 8 or 4 bits (Dettmers et al. 2110.02861, Li et al. 2309.01507).

The optimizers are torchao's: its quantised states and its update of one parameter. `fused` compiles
that update with torch.compile, as torchao does; `loop` runs the same function operator by operator,
which holds up to 53 bytes an element of the parameter that is being updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, final

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import install_extra, quiet_import
from memfit.meta.meter import Meter
from memfit.optimizers import Counted, OptimizerFamily, optimizers
from memfit.optimizers.adamw import STEP
from memfit.optimizers.shared.low_bit_update import PLAIN, Code, rise, run_update
from memfit.records.model import TensorSpec
from memfit.records.recipe import Optimizer

if TYPE_CHECKING:
    import torch


@final
class LowBitAdamW(OptimizerFamily):
    """Two quantised moments; small or ragged tensors have moments of their own dtype."""

    updates_parts = True
    updates_stages = True
    implementations = ("fused", "loop")
    state_while_updating = ("fused", "loop")
    cuda_only = ("fused",)
    rounds_by_chance = True
    second_moments = True

    def __init__(self, class_name: str, code: Code) -> None:
        self.class_name = class_name
        self.code = code
        self.state_bits = 0 if code.bits == PLAIN else code.bits

    def state(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.state`."""
        if not self.code.covers(local.numel):
            return (STEP, local, local)
        return (STEP, *self._moment(local), *self._moment(local))

    def _moment(self, local: TensorSpec) -> tuple[TensorSpec, ...]:
        code = self.code
        shape = (local.numel // 2,) if code.bits == 4 else local.shape
        codes = TensorSpec(shape=shape, dtype=code.dtype)
        scale = TensorSpec(shape=(local.numel // code.block,))
        table = (TensorSpec(shape=(code.entries,)),) if code.entries else ()
        return (codes, scale, *table)

    def host_state(self, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.host_state`."""
        return (STEP,)

    def step_temporaries(
        self, parameters: Sequence[TensorSpec], settings: Optimizer, counted: Counted = "live"
    ) -> int:
        """See `OptimizerFamily.step_temporaries`.

        One parameter at a time. `fused`: nothing, as far as the compiler keeps everything between
        the update's inputs and outputs in registers; certificates state this as assumed.
        """
        if settings.implementation == "fused":
            return 0
        cuda, blocks = counted != "live", counted == "blocks"
        rounded = settings.stochastic_rounding
        rises = (
            rise(p.numel, p.dtype, self.code, cuda=cuda, blocks=blocks, rounded=rounded)
            for p in parameters
        )
        return max(rises, default=0)

    def update_alone(self, parameter: TensorSpec, settings: Optimizer, meter: Meter) -> None:
        """See `OptimizerFamily.update_alone`."""
        if settings.implementation != "fused":
            run_update(
                meter, parameter.numel, parameter.dtype, self.code, scalars=not meter.cuda,
                rounded=settings.stochastic_rounding,
            )  # fmt: skip

    def moved(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """See `OptimizerFamily.moved`: in a loop each temporary is written and read once."""
        held = 2 * sum(s.nbytes for s in self.state(parameter, settings))
        if settings.implementation == "fused":
            return 3 * parameter.nbytes + held
        meter = Meter(cuda=True)
        self.update_alone(parameter, settings, meter)
        return 3 * parameter.nbytes + held + 2 * sum(meter.requested)

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Optimizer,
        ends: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> torch.optim.Optimizer:
        """See `OptimizerFamily.build`. Raises InvalidRequest without torchao or a compiler."""
        trainable = list(parameters)
        compiled = settings.implementation == "fused"
        if compiled:
            _check_compiler(trainable[0])
        optimizer: torch.optim.Optimizer = _torch_class(self.class_name)(
            trainable,
            compiled=compiled,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            bf16_stochastic_round=settings.stochastic_rounding,
        )
        return optimizer


def can_round(name: str) -> bool:
    """Whether an optimizer can round updated bf16 weights by chance; `auto` is torch's AdamW."""
    return optimizers.find(name if name != "auto" else "adamw").rounds_by_chance


def implementations(name: str) -> tuple[str, ...]:
    """The implementations of an optimizer."""
    return optimizers.find(name).implementations


def check_rounding(name: str, precision: str) -> None:
    """Raise InvalidRequest where `optimizer.stochastic_rounding` cannot be, or rounds nothing."""
    if precision != "bf16":
        raise InvalidRequest(
            f"`optimizer.stochastic_rounding` rounds bf16 weights, and `precision: {precision}`"
            " keeps trained weights in another format",
            hint="use `precision: bf16`, or leave it out",
        )
    if not can_round(name):
        raise InvalidRequest(
            f"`optimizer.name: {name}` cannot round stochastically: torch's optimizers do not",
            hint="use `optimizer.name: adamwbf16` (torchao's AdamW)",
        )


def _check_compiler(parameter: torch.nn.Parameter) -> None:
    """Raise InvalidRequest where the compiled update cannot run; fake tensors compile nothing."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._triton import has_triton

    if parameter.device.type == "cpu":
        raise InvalidRequest(
            "`optimizer.implementation: fused` of a low-bit optimizer is compiled for GPUs only",
            hint="use `implementation: loop`",
        )
    local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
    real = parameter.device.type == "cuda" and not isinstance(local, FakeTensor)
    if real and not has_triton():
        raise InvalidRequest(
            "`optimizer.implementation: fused` of a low-bit optimizer needs Triton to compile",
            hint="install triton, or use `implementation: loop`",
        )


@cache
def _torchao() -> Any:
    """torchao.optim.adam. Raises InvalidRequest when torchao is not installed."""
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        # its tables are constants, also when a trace comes first
        with quiet_import(), _disable_current_modes():
            from torchao.optim import adam, subclass_4bit, subclass_8bit

            for tables in (subclass_4bit, subclass_8bit):
                tables.get_qmap_signed()
                tables.get_qmap_unsigned()
    except ImportError:
        raise InvalidRequest(
            "low-bit optimizers are torchao's, and `torchao` is not installed",
            hint=f"{install_extra('train')}, or use `optimizer.name: adamw`",
        ) from None
    return adam


@cache
def _torch_class(name: str) -> Callable[..., Any]:
    """Return torchao's class of that name with its step rewritten without `torch.compile`."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    adam = _torchao()

    def compiled_update(*arguments: Any) -> None:
        with _disable_current_modes():  # torch.compile refuses to run while tensors are counted
            update: Any = torch.compile(adam.single_param_adam, fullgraph=True, dynamic=False)
            update(*arguments)

    def is_bf16(parameter: torch.Tensor) -> bool:
        return parameter.dtype is torch.bfloat16

    class LowBit(getattr(adam, name)):  # type: ignore[misc]
        """The update is torchao's; the learning rate stays a number, as in torch's optimizers."""

        def __init__(self, parameters: Any, *, compiled: bool, **settings: Any) -> None:
            super().__init__(parameters, **settings)
            self.update = compiled_update if compiled else adam.single_param_adam

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            """Without torchao's turning the learning rate into a tensor."""
            torch.optim.Optimizer.add_param_group(self, param_group)

        def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            """What a parameter's state is before its first update."""
            return {
                "step": torch.tensor(0.0),
                "exp_avg": self._new_buffer(parameter, True),
                "exp_avg_sq": self._new_buffer(parameter, False),
            }

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            """One update of every parameter that has a gradient."""
            del closure
            for group in self.param_groups:
                rate = torch.tensor(group["lr"], dtype=torch.float32)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update_one(parameter, group, rate)

        def _update_one(
            self, parameter: torch.nn.Parameter, group: dict[str, Any], rate: torch.Tensor
        ) -> None:
            state = self.state[parameter]
            if not state:
                state.update(self.new_state(parameter))
            state["step"] += 1
            self.update(
                parameter.detach(), parameter.grad, state["step"], state["exp_avg"],
                state["exp_avg_sq"], None, rate, *group["betas"], group["weight_decay"],
                group["eps"], True, self.bf16_stochastic_round and is_bf16(parameter),
            )  # fmt: skip

    return LowBit


optimizers.register("adamwbf16")(
    LowBitAdamW("_AdamW", Code(bits=PLAIN, block=1, dtype="", entries=0))
)
optimizers.register("adamw8bit")(
    LowBitAdamW("AdamW8bit", Code(bits=8, block=256, dtype="uint8", entries=256))
)
optimizers.register("adamw4bit")(
    LowBitAdamW("AdamW4bit", Code(bits=4, block=128, dtype="uint8", entries=16))
)
optimizers.register("adamwfp8")(
    LowBitAdamW("AdamWFp8", Code(bits=8, block=256, dtype="float8_e4m3fn", entries=0))
)
