"""What a simulated micro-batch depends on, and what its recording holds."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec.structs import replace

from memfit.families.shared.forward import (
    Documents,
)
from memfit.families.shared.masks import Masking
from memfit.meta import Meter, Tensor
from memfit.meta.distributed.ring import Ring
from memfit.meta.distributed.sharding import Sharding
from memfit.meta.layers.quantised import Quantised
from memfit.meta.workspace import Grid
from memfit.plan.simulate.program import Comparing, Program
from memfit.plan.step_time.pipeline.orders import Piece
from memfit.records import Record
from memfit.records.model import Architecture
from memfit.records.recipe import Optimizer, Regularisation


class Stages(Record, frozen=True, kw_only=True):
    """What a rank of a pipeline runs, one piece after the other."""

    order: tuple[Piece, ...]
    ranks: int
    count: int  # stages of all ranks
    micro_batches: int  # of a step; `order` may leave out some that repeat
    blocks: tuple[int, ...]  # of each of its stages, as simulated
    dtype: str  # of what stages send each other

    @property
    def simulated(self) -> int:
        """Micro-batches of `order`."""
        return 1 + max(piece.micro_batch for piece in self.order)

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is one of this rank's."""
        return any(piece.stage == self.count - 1 for piece in self.order)

    def evaluating(self) -> Stages:
        """The forward alone of one micro-batch."""
        once = tuple(p for p in self.order if p.pass_ == "F" and p.micro_batch == 0)
        return replace(self, order=once, micro_batches=1)


class Row(Record, frozen=True, kw_only=True):
    """A weight of one block, or of none, under its name inside it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    part: str


class Block(Record, frozen=True, kw_only=True):
    """What a block's segments depend on."""

    rows: tuple[Row, ...]
    recomputed: bool
    reentrant: bool = False  # by torch's reentrant checkpoint
    selective: bool = False  # recomputed but for products with weights and fused attention
    offloads: bool = False  # what it saves waits in host memory
    first_offloaded: bool = False  # the first of those: its input is not another block's to give up
    kind: str = ""  # of `Architecture.layer_kinds`


class Answering(Record, frozen=True, kw_only=True):
    """Of sampled answers: what comes with a micro-batch, and what their logits are divided by."""

    old: bool  # log-probabilities under the policy that sampled
    reference: bool  # and under the reference
    heated: bool  # whether a temperature divides logits
    values: bool = False  # whether values are learned, too, after the policy's micro-batches


class Run(Record, frozen=True, kw_only=True):
    """Consecutive cycles of blocks that are alike; mostly of one block."""

    cycle: tuple[Block, ...]
    count: int


class Repeat(NamedTuple):
    """How often a simulated block stands in the model."""

    cycle: int  # blocks of one cycle follow each other before it begins again
    times: int


class Batch(Record, frozen=True, kw_only=True):
    """The shape of a micro-batch."""

    rows: int
    tokens: int
    documents: Documents | None


class Precision(Record, frozen=True, kw_only=True):
    """In which formats a step computes."""

    autocast: bool
    compute: str  # dtype of matrix products
    caches: bool = False  # whether autocast keeps the casts of weights until a forward has ended
    scaled: bool  # whether the loss is multiplied by a scale before its backward
    narrow: bool = False  # products of blocks in FP8
    qat: str = ""
    quantised: Quantised = Quantised()  # products with quantised weights, of memfit's own step


class Attention(Record, frozen=True, kw_only=True):
    """By which kernel tokens attend, to those of which ranks, and under which masks."""

    kernel: str
    ring: Ring | None = None  # with which ranks attention is to whole rows
    masking: Masking | None = None  # of Hugging Face's own attention; None is memfit's


class Loss(Record, frozen=True, kw_only=True):
    """What a micro-batch's loss is made of, and what comes with its rows."""

    chunk: int  # tokens per chunk of the loss; 0 = plain
    # pairs: their log-probabilities are compared; rated: answers are desirable or not, each alone
    rows: Literal["", "pairs", "rated"] = ""
    mismatches: bool = False  # answers to other prompts are scored beside rated ones
    learns: str = ""  # of which tokens of preferred rows a cross-entropy is added, see `Objective`
    precomputed: bool = False  # the reference's log-probabilities come with the batch
    answers: Answering | None = None  # rows are sampled answers, which rewards judge
    # numbers of tokens alone: of the `policy`, the `reference` or the `value`; of rows: `reward`
    scores: str = ""
    references: int = 0  # forwards of the base model alone before each micro-batch's own
    compares: Comparing | None = None  # another framework's loss of pairs; its policy comes first
    second: str = ""  # the dtype of a second model's weights, where that is the reference


# which are simulated: one without its backward, of which nothing is saved; the first of a step
# alone, or with a later one; or those of two steps, with no gradient left between them
MicroBatches = Literal["evaluated", "one", "of_one_step", "of_two_steps"]


class Setting(Record, frozen=True, kw_only=True):
    """All that a micro-batch's segments depend on beside its shape."""

    architecture: Architecture
    outside: tuple[Row, ...]
    runs: tuple[Run, ...]  # counts as simulated
    attention: Attention
    precision: Precision
    loss: Loss
    cuda: bool
    grid: Grid | None  # see `Meter.grid`
    adapter_dropout: bool
    regularisation: Regularisation = Regularisation()
    lean: tuple[str, ...] = ()
    micro_batches: MicroBatches
    in_backward: Optimizer | None = None  # updates each weight as soon as its gradient is there
    program: Program | None = None  # of another framework's step; None is memfit's own
    sharding: Sharding | None = None  # of one rank of many
    stages: Stages | None = None  # of a rank that holds a part of the blocks

    @property
    def evaluates(self) -> bool:
        """Whether a forward and its loss run alone, of which nothing is saved."""
        return self.micro_batches == "evaluated"

    @property
    def repeats(self) -> bool:
        """Whether a second micro-batch is simulated."""
        return self.micro_batches in ("of_one_step", "of_two_steps")

    def scoring(self, of: str) -> Setting:
        """The same step, whose loss makes one number of each token; `of`: see `Loss.scores`."""
        return replace(self, loss=replace(self.loss, scores=of))

    @property
    def noise_parts(self) -> int:
        """See `Forward`: 0 where a rank draws the noise of its own rows alone."""
        if self.sharding is None:
            return 0
        across = 1 if self.attention.ring is None else self.attention.ring.ranks
        parts = self.sharding.tp * across
        rows = self.sharding.shards * self.sharding.copies // across  # shares of the batch
        return parts if parts * rows > 1 else 0


class Rated(NamedTuple):
    """What rated answers are, and answers to other prompts."""

    desirable: Tensor
    input_ids: Tensor | None = None
    labels: Tensor | None = None
    reference: Tensor | None = None


class Inputs(NamedTuple):
    """The tensors of a micro-batch."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    reference: Tensor | None  # the reference's log-probabilities
    context: Tensor | None = None  # labels of what preferred rows say beside their answers
    rated: Rated | None = None
    answers: tuple[Tensor, ...] = ()  # what of sampled ones their loss is computed with


class Mark(NamedTuple):
    """Where a segment of a recording begins."""

    name: str
    event: int  # events of the meter before it


class Recording(NamedTuple):
    """What a simulation logged: of a first micro-batch, and of a later one where there is any; of
    stages, of each piece. The last mark of each is its end."""

    meter: Meter
    passes: list[list[Mark]]
    stop: int  # events of the meter when the step had ended: later ones are of what it leaves
    gradients: list[int]  # what is left of them, in the order of the model's parameters
    product: int  # events before the first product, where loops are unrolled
