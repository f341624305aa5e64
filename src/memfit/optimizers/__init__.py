"""Optimizers, one file each: the state they declare and the torch object they build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from memfit.core.errors import InvalidRequest
from memfit.core.registry import Registry
from memfit.meta.meter import Meter, block_size
from memfit.records.model import TensorSpec
from memfit.records.other_words import describe_value
from memfit.records.recipe import Implementation, Optimizer

if TYPE_CHECKING:
    import torch

# What a sum of tensors counts: every live tensor of a CPU (scalars on the host are among them),
# the tensors on a CUDA device, or the blocks of its allocator that hold them.
Counted = Literal["live", "device", "blocks"]


def counted_size(nbytes: int, counted: Counted) -> int:
    """Bytes that one tensor adds to such a sum."""
    return block_size(nbytes) if counted == "blocks" else nbytes


class OptimizerFamily(ABC):
    """One optimizer and its implementations, which are different ledgers of the same update."""

    implementations: ClassVar[tuple[Implementation, ...]]
    # those that make a parameter's state during its first update, not all states before it
    state_while_updating: ClassVar[tuple[str, ...]] = ()
    cuda_only: ClassVar[tuple[str, ...]] = ()
    bounds: tuple[str, ...] = ()  # what a certificate takes for granted of its memory
    # those that cannot update sharded parameters, and why
    unsharded_only: ClassVar[tuple[str, ...]] = ()
    updates_parts: ClassVar[bool] = False  # proven on shards of what ranks share (`parallel.tp`)
    updates_stages: ClassVar[bool] = False  # proven on the stages of a pipeline (`parallel.pp`)
    gathers: ClassVar[bool] = False  # puts matrices together that ranks cut: see `TensorSpec`
    updates_on_host: ClassVar[bool] = False  # proven on shards that wait there (`offload`)
    # implementations of which torchao has a form whose states are on the host (`offload`)
    offloaded: ClassVar[tuple[str, ...]] = ()
    rounds_by_chance: ClassVar[bool] = False  # can round updated bf16 weights stochastically
    second_moments: ClassVar[bool] = False  # keeps an average of squared gradients an element
    state_bits: int = 0  # of an element of a large state; 0: those of its parameter
    low_bit_form: ClassVar[str] = ""  # the optimizer of the same updates with coded states
    rate_of_adamws: ClassVar[float] = 1.0  # the usual learning rate, of AdamW's
    unsharded_reason: ClassVar[str] = "torch's DTensor (2.13) cannot run its operators"

    @abstractmethod
    def state(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """What one parameter's state holds from the first step on, host tensors included."""

    def host_state(self, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """The part of `state` that torch keeps in host memory whatever the device is."""
        return ()

    def on_device(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """The part of `state` that the device's allocator holds, on CUDA."""
        held = list(self.state(local, settings))
        for elsewhere in self.host_state(settings):
            held.remove(elsewhere)
        return tuple(held)

    def shared_state(self, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """What all parameters' states refer to, there once: tables of codes; mostly nothing."""
        return ()

    def shares(self, local: TensorSpec, settings: Optimizer) -> bool:
        """Whether a parameter's state refers to `shared_state`."""
        return bool(self.shared_state(settings))

    @abstractmethod
    def step_temporaries(
        self, parameters: Sequence[TensorSpec], settings: Optimizer, counted: Counted = "live"
    ) -> int:
        """Bytes at the worst moment of a later step, above parameters, gradients and state."""

    @abstractmethod
    def update_alone(self, parameter: TensorSpec, settings: Optimizer, meter: Meter) -> None:
        """One parameter's update alone, as in a backward: its temporaries come and go on a meter.

        They rise as high as `step_temporaries` of that parameter says.
        """

    @abstractmethod
    def moved(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """Bytes that one update of a parameter reads and writes, gradient and state included."""

    def flop(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """FLOP of the matrix products of one update; most optimizers have none."""
        return 0.0

    @abstractmethod
    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Optimizer,
        ends: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> torch.optim.Optimizer:
        """The torch object, of exactly the implementation that the settings name.

        ends: those of the parameters that are of the embedding or the head (`TensorSpec.end`).
        """


optimizers: Registry[OptimizerFamily] = Registry(
    "optimizer", "memfit.optimizers", hint=partial(describe_value, "optimizer.name")
)


def find_optimizer(settings: Optimizer) -> OptimizerFamily:
    """The family that the settings name; refuses an implementation it does not have."""
    family = optimizers.find(settings.name)
    if settings.implementation not in family.implementations:
        raise InvalidRequest(
            f"`{settings.name}` has no implementation `{settings.implementation}`",
            hint=f"one of: {', '.join(family.implementations)}",
        )
    return family


def optimizers_that(ability: str) -> tuple[str, ...]:
    """The names of all optimizers that declare an ability, such as `updates_parts`."""
    return tuple(name for name in optimizers.names() if getattr(optimizers.find(name), ability))


def default_implementation(name: str, *, cuda: bool) -> Implementation:
    """The first implementation, which is the fastest, that the kind of device can run."""
    family = optimizers.find(name)
    return next(i for i in family.implementations if cuda or i not in family.cuda_only)
