"""memfit's own step (`memfit.train`): the one that memfit searches, certifies and trains.

Its bytes are not a closed form read from other people's source: the step is simulated with sizes
alone (`plan.simulate`), and the certificate traces the very code that trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, final, get_args

from memfit.adapters import find_adapter
from memfit.base_formats import own_formats
from memfit.optimizers import optimizers
from memfit.parallelism.limits import check_ranks
from memfit.plan.frameworks import Framework, Job, TimeTraits, frameworks
from memfit.plan.memory.host_memory import shards_on_host
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.memory.verdict import SLACK
from memfit.records.ledger import Ledger
from memfit.records.model import Model
from memfit.records.recipe import OWN_AXES, OWN_STEP, OWN_VALUES, Method


class Values(Mapping[str, tuple[str, ...]]):
    """The values of each shared knob; extensions are listed when they are read."""

    _plain: ClassVar = {**OWN_VALUES, "method": get_args(Method)}
    _listed = ("base_format", "optimizer", "implementation")

    def __getitem__(self, key: str) -> tuple[str, ...]:
        if key == "base_format":
            return own_formats()
        if key == "optimizer":
            return tuple(optimizers.names())
        if key == "implementation":
            known = (optimizers.find(name).implementations for name in optimizers.names())
            return tuple(dict.fromkeys(one for own in known for one in own))
        return tuple(map(str, self._plain[key]))

    def __iter__(self) -> Iterator[str]:
        return iter((*self._plain, *self._listed))

    def __len__(self) -> int:
        return len(self._plain) + len(self._listed)


@final
class Memfit(Framework):
    """FSDP2, tensor and context parallelism and stages of torch, around lean blocks."""

    name = OWN_STEP
    title = "memfit's own step"
    source = "memfit.train, which is simulated and not described"
    runs = True
    simulated = True
    values = Values()
    axes = OWN_AXES
    knobs: ClassVar = {}
    pairs = True
    recurrent = True
    slack = SLACK
    time = TimeTraits(
        fsdp2=True, counts_weights=True, measured_launches=True, casts_alone=True,
        allows_tf32=False, offloads_activations=True, selective_repeats=1.0, torch_schedules=True,
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        super().check(job)
        check_ranks(job.recipe)

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`; on CUDA, of the caching allocator's blocks."""
        return predict_memory(_adapt(job), job.recipe, job.device)

    def on_host(self, job: Job) -> int:
        """See `Framework.on_host`."""
        return shards_on_host(job.recipe, _adapt(job))


def _adapt(job: Job) -> Model:
    return find_adapter(job.recipe).adapt(job.model, job.recipe)


frameworks.register(OWN_STEP)(Memfit())
