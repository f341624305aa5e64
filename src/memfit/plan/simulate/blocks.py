"""A small model that stands for a deep one, byte for byte.

Blocks that are alike form a run, and so do cycles of blocks that are alike (sliding, full, sliding,
full); of each run only the first, one in the middle and the last cycle are simulated. A step is
then a sequence of segments (the forward or the backward of one block, the embedding, the head and
the loss), each with what it adds and how far it rises above its start; the middle segments of a
run repeat. Nothing is fitted: the sum over segments is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from msgspec.structs import replace

from memfit import meta
from memfit.core.system.collector import without_collecting
from memfit.families.shared.forward import (
    COPY,
    ORIGINAL,
    Forward,
    Weights,
    base_alone,
    module,
    of_policy,
    row_log_probs,
    row_scores,
    with_adapter,
    with_values,
    without_wrappers,
)
from memfit.families.shared.masks import make_masks
from memfit.meta import Meter, Tensor
from memfit.meta.distributed.offload import Load
from memfit.meta.layers.dequantised import QUANTISED_DTYPE
from memfit.meta.losses.preference import RATINGS, RESULTS, judge, sum_over_ranks
from memfit.plan.simulate.fsdp_units import Named, Units
from memfit.plan.simulate.in_backward import Updates
from memfit.plan.simulate.one_block import run_block
from memfit.plan.simulate.program import Comparing, OwnProgram
from memfit.plan.simulate.sampled.update import learn_values, reinforce, score_tokens
from memfit.plan.simulate.setting import (
    Batch,
    Block,
    Inputs,
    Mark,
    Rated,
    Recording,
    Repeat,
    Row,
    Run,
    Setting,
)
from memfit.plan.simulate.stages import begin_stage, run_stages
from memfit.records.ledger import Kind
from memfit.records.model import VALUE_MODEL, Architecture, Model, Weight
from memfit.records.recipe import Regularisation

Part = tuple[Kind, str]  # kind, owner
Parts = dict[Part, int]
ROUNDING: Part = (Kind.FRAGMENTATION, "rounding")  # what blocks are larger than their tensors
NONE = Regularisation()  # of evaluations
ENDS = 3  # cycles simulated of a run of equal ones: first, middle, last
ALL = slice(None)
LONGEST = 16  # blocks of the longest cycle that is looked for
AFTER_PRODUCT = "'"  # marks the segment that begins with a backward's first product
WRAPPER = "base_model.model."  # what peft puts before every name


def split_rows(
    model: Model, recomputed: int, selective: int = 0, *, offloads: bool = False
) -> tuple[tuple[Row, ...], list[Block]]:
    """The rows outside the blocks, and each block.

    The first `recomputed` ones run twice, and the next `selective` ones but for their products.
    offloads: what all but the last one save waits in host memory.
    """
    outside, blocks = _read_rows(model)
    kind = model.architecture.kind
    return outside, [
        Block(
            rows=rows,
            recomputed=index < recomputed + selective,
            selective=recomputed <= index < recomputed + selective,
            offloads=offloads and index < len(blocks) - 1,
            first_offloaded=offloads and index == 0,
            kind=kind(index),
        )
        for index, rows in enumerate(blocks)
    ]


@lru_cache(maxsize=16)
def _read_rows(model: Model) -> tuple[tuple[Row, ...], list[tuple[Row, ...]]]:
    """The rows outside the blocks, and each block's; cached, as a search asks for every number of
    recomputed blocks."""
    outside: list[Row] = []
    blocks: list[list[Row]] = [[] for _ in range(model.architecture.layers)]
    for weight in model.weights:
        (outside if weight.layer < 0 else blocks[weight.layer]).append(_row(weight))
    return tuple(outside), [tuple(rows) for rows in blocks]


def _row(weight: Weight) -> Row:
    name = weight.name.removeprefix(WRAPPER).replace(COPY, ".")  # which is read in its place
    own = VALUE_MODEL if weight.of_value else ""
    name = name.removeprefix(own)
    if weight.layer >= 0:
        name = own + name.partition(f".{weight.layer}.")[2]
    elif weight.part != "head":
        name = own + name.partition(".")[2]
    return Row(
        name=name, shape=weight.shape, dtype=QUANTISED_DTYPE if weight.coding else weight.dtype,
        trainable=weight.trainable, part=weight.part,
    )  # fmt: skip


def find_runs(blocks: Iterable[Block]) -> tuple[Run, ...]:
    """Neighbours that are alike, joined; and cycles of neighbours that are."""
    known: list[Block] = []
    order: list[int] = []  # which of the known ones each block is: numbers compare quickly
    for block in blocks:
        if block not in known:
            known.append(block)
        order.append(known.index(block))
    runs: list[Run] = []
    at = 0
    while at < len(order):
        length, count = _longest_run(order[at:])
        runs.append(Run(cycle=tuple(known[i] for i in order[at : at + length]), count=count))
        at += length * count
    return tuple(runs)


def _longest_run(order: list[int]) -> tuple[int, int]:
    """(blocks of a cycle, cycles) at the start: those that leave the fewest blocks to simulate."""
    best, saved = (1, _cycles(order, 1)), -1
    for length in range(1, min(LONGEST, len(order) // ENDS) + 1):
        count = _cycles(order, length)
        if (count - ENDS) * length > saved:
            best, saved = (length, count), (count - ENDS) * length
    return best


def _cycles(order: list[int], length: int) -> int:
    """How often the first `length` blocks stand one behind the other."""
    count = 1
    while order[count * length : (count + 1) * length] == order[:length]:
        count += 1
    return count


def shorten(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs as they are simulated."""
    return tuple(Run(cycle=r.cycle, count=min(r.count, ENDS)) for r in runs)


def repeats(runs: tuple[Run, ...]) -> list[Repeat]:
    """How often each simulated block stands in the model, in its order."""
    found: list[Repeat] = []
    cycle = 0
    for run in runs:
        simulated = min(run.count, ENDS)
        for at in range(simulated):
            middle = at == 1 and run.count > ENDS
            found += [Repeat(cycle, run.count - 2 if middle else 1)] * len(run.cycle)
            cycle += 1
    return found


def record(setting: Setting, batch: Batch, *, unrolled: bool = False) -> Recording:
    """Run a first micro-batch, and a later one where there is any, and log every byte.

    unrolled: loops run every pass, see `Meter.passes`.
    """
    with without_collecting():  # storages die by reference counting
        return Simulation(setting, batch, unrolled).run()


class Simulation:
    """One step of the small model on a meter."""

    def __init__(self, setting: Setting, batch: Batch, unrolled: bool) -> None:
        self.setting, self.batch = setting, batch
        a = setting.architecture
        self.program = setting.program or OwnProgram(family=a.family, chunk=setting.loss.chunk)
        self.meter = Meter(
            grid=setting.grid,
            cuda=setting.cuda,
            autocast=setting.precision.autocast, low=setting.precision.compute,
            vocab=a.vocab, unrolled=unrolled,
        )  # fmt: skip
        self.loop: dict[str, list[Tensor]] = {}
        updates: Callable[[Tensor], None] | None = None
        if setting.in_backward is not None:
            updates = Updates(self.meter, setting.in_backward).update
        self.units: Units | None = None
        if setting.sharding is None:
            self.meter.on_gradient = updates
        else:
            self.units = Units(self.meter, setting.sharding, updates)
        self.outside = self._outside()
        if setting.stages is None:
            self._tie(a)
        self.blocks: list[tuple[Weights, Block]] = []
        for run in setting.runs:
            for block in run.cycle * run.count:
                self.blocks.append((self._block(block.rows), block))
        bare = setting.loss.references > 0 or setting.loss.scores == "reference"
        self.base = [
            (self._reference(w), replace(b, recomputed=False, reentrant=False, offloads=False))
            for w, b in self.blocks
            if bare
        ]
        valued = setting.loss.answers is not None and setting.loss.answers.values
        self.valued = [(with_adapter(with_values(w), "value"), b) for w, b in self.blocks if valued]
        judged = setting.loss.scores == "reward"
        self.judged = [(with_adapter(w, "reward"), b) for w, b in self.blocks if judged]
        self.held = [self.outside, *(w for w, _ in self.blocks)]  # a value's own weights, too
        self.blocks = [(of_policy(without_wrappers(w)), b) for w, b in self.blocks]
        self.without_gradient = [
            (
                {name: weight.detached() for name, weight in w.items()},
                replace(b, recomputed=False, reentrant=False, offloads=False),
            )
            for w, b in self.blocks
            if setting.loss.mismatches
        ]
        self.scale = meta.parameter(self.meter, (), "float32", trainable=False)
        self.first_product = 0
        if unrolled:
            self.meter.on_product = self._note_product
        self.marks: list[Mark] = []
        self.waiting: dict[int, int] = {}  # bytes of each block that wait on the host
        self.rewards: Tensor | None = None
        self.values: Tensor | None = None  # sums of what a value's micro-batches say

    def _tie(self, a: Architecture) -> None:
        """The embedding is a head that has no weight of its own, or has a trained copy alone."""
        head = f"lm_head{ORIGINAL}weight" if "lm_head.weight" in self.outside else "lm_head.weight"
        if a.scores:
            return
        tied = a.tied_embeddings or head == "lm_head.weight"
        if tied and "lm_head.base_layer.weight" not in self.outside:
            name = next(r.name for r in self.setting.outside if r.part == "embedding")
            self.outside[head] = self.outside[name]

    def _reference(self, weights: Weights) -> Weights:
        """The base alone; a second model's weights are seen as of its dtype, and counted apart."""
        base, second = base_alone(weights), self.setting.loss.second
        if not second:
            return base
        return {name: w.viewed(w.shape, w.strides, second) for name, w in base.items()}

    def _weights(self, rows: tuple[Row, ...]) -> Weights:
        made: Weights = {}
        for row in rows:
            self.meter.owner = owner_of(row.part)
            made[row.name] = meta.parameter(
                self.meter, row.shape, row.dtype, trainable=row.trainable
            )
        return made

    def _outside(self) -> Weights:
        rows = self.setting.outside
        if self.units is None:
            return self._weights(rows)
        tied = self.setting.architecture.tied_embeddings
        return self.units.outside(map(_name, rows), owner_of, tied=tied)

    def _block(self, rows: tuple[Row, ...]) -> Weights:
        return self._weights(rows) if self.units is None else self.units.block(map(_name, rows))

    def run(self) -> Recording:
        """All micro-batches that differ."""
        if self.setting.stages is not None:
            passes = run_stages(self)
            return self._recording(passes)
        setting = self.setting
        if self.units is not None:
            self.units.defer(first_of_many=setting.micro_batches == "of_one_step")
        first = self._micro_batch()
        if self.units is not None:
            self.units.defer(first_of_many=False)
        if setting.micro_batches == "of_two_steps":
            passes = [first, *self._value_of_step()]
            for weights in self.held:
                for weight in weights.values():
                    weight.grad = None
            self.rewards = self.values = None  # another step's
            passes += [self._micro_batch(), *self._value_of_step()]
            return self._recording(passes)
        later = self._micro_batch(leaves=not self.valued) if setting.repeats else None
        passes = [first, *([later] if later else [])]
        if self.valued and not setting.evaluates:
            passes += [self._micro_batch(of_values=True, leaves=False) for _ in list(passes)]
        return self._recording(passes)

    def _value_of_step(self) -> list[list[Mark]]:
        """The value's micro-batch of a step that has one of each; none where none is learned."""
        return [self._micro_batch(of_values=True, leaves=False)] if self.valued else []

    def _recording(self, passes: list[list[Mark]]) -> Recording:
        stop = len(self.meter.events)
        return Recording(self.meter, passes, stop, self._gradients(), self.first_product)

    def _note_product(self) -> None:
        self.first_product = len(self.meter.events)

    def _gradients(self) -> list[int]:
        """Storages of whole gradients; those of shards are their units' own."""
        blocks = [weight for weights in self.held[1:] for weight in weights.values()]
        ends = {row.name: row.part != "embedding" for row in self.setting.outside}
        outside = [(ends.get(name, True), weight) for name, weight in self.outside.items()]
        first, last = ([w for end, w in outside if end is late] for late in (False, True))
        if self.units is not None:
            held = [unit.gradient for unit in self.units.shared.units]
        else:
            held = [weight.grad for weight in (*first, *blocks, *last)]
        return list(dict.fromkeys(grad.storage.index for grad in held if grad is not None))

    def product_begins(self) -> None:
        """The first product of a backward ends one segment and begins another."""
        name = f"{self.marks[-1][0]}{AFTER_PRODUCT}"
        self.marks.append(Mark(name, len(self.meter.events)))

    def mark(self, name: str, owner: str) -> None:
        """Begin a segment, and name the component that runs."""
        self.marks.append(Mark(name, len(self.meter.events)))
        self.meter.owner = owner

    def make_batch(self, *, of_values: bool = False) -> Inputs:
        """The tensors of one micro-batch; of_values: whose values are learned."""
        meter, batch = self.meter, self.batch
        meter.owner = "batch"
        shape = (batch.rows, batch.tokens)
        input_ids = meta.empty(meter, shape, "int64", Kind.INPUT)
        labels = meta.empty(meter, shape, "int64", Kind.INPUT)
        ring, position_ids = self.setting.attention.ring, None
        if ring is not None:
            position_ids = meta.empty(meter, (1, batch.tokens), "int64", Kind.INPUT)
        elif batch.documents is not None:
            position_ids = meta.empty(meter, shape, "int64", Kind.INPUT)
        reference: Tensor | None = None
        if self.setting.loss.precomputed:
            reference = meta.empty(meter, (batch.rows,), "float32", Kind.INPUT)
        context: Tensor | None = None
        if self.setting.loss.learns == "conversations":
            context = meta.empty(meter, shape, "int64", Kind.INPUT)
        rated = self._make_rated(shape) if self.setting.loss.rows == "rated" else None
        answers = self._make_aims(shape) if of_values else self._make_answers(shape)
        return Inputs(input_ids, labels, position_ids, reference, context, rated, answers)

    def _make_answers(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """Which tokens count, advantages, and log-probabilities of before."""
        answers = self.setting.loss.answers
        if answers is None or self.setting.loss.scores:
            return ()
        gains = shape if answers.values else shape[:1]
        shapes = [shape, gains, *[shape] * (answers.old + answers.reference)]
        return tuple(meta.empty(self.meter, one, "float32", Kind.INPUT) for one in shapes)

    def _make_aims(self, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """Values in the rollout, what they are to be, and where."""
        return tuple(meta.empty(self.meter, shape, "float32", Kind.INPUT) for _ in range(3))

    def _make_rated(self, shape: tuple[int, int]) -> Rated:
        meter, rows = self.meter, shape[:1]
        desirable = meta.empty(meter, rows, "bool", Kind.INPUT)
        if not self.setting.loss.mismatches:
            return Rated(desirable)
        input_ids, labels = (meta.empty(meter, shape, "int64", Kind.INPUT) for _ in range(2))
        reference: Tensor | None = None
        if self.setting.loss.precomputed:
            reference = meta.empty(meter, rows, "float32", Kind.INPUT)
        return Rated(desirable, input_ids, labels, reference)

    def make_forward(self, inputs: Inputs) -> tuple[Forward, Tensor]:
        """What every part of a micro-batch's forward needs to know, and its labels."""
        setting, precision = self.setting, self.setting.precision
        forward = Forward(
            architecture=setting.architecture, meter=self.meter, kernel=setting.attention.kernel,
            input_ids=inputs.input_ids, position_ids=inputs.position_ids,
            documents=self.batch.documents, adapter_dropout=setting.adapter_dropout,
            narrow=precision.narrow, qat=precision.qat, lean=setting.lean,
            regularisation=NONE if setting.evaluates else setting.regularisation,
            loop=self.loop, quantised=precision.quantised, ring=setting.attention.ring,
            noise_parts=setting.noise_parts,
        )  # fmt: skip
        return forward, inputs.labels

    def _micro_batch(self, *, of_values: bool = False, leaves: bool = True) -> list[Mark]:
        """leaves: whether its loss is there when it ends."""
        meter = self.meter
        inputs = self.make_batch(of_values=of_values)
        forward, labels = self.make_forward(inputs)
        self.marks = []
        sums: Tensor | None = None
        self.mark("embedding", "embedding")
        boundaries: list[int] = []
        if self.units is not None:
            forward = self.units.begin(forward)
        meter.casts = {} if self.setting.precision.caches else None
        with meter.with_autocast(self.setting.precision.autocast):
            if self.setting.loss.scores:
                score_tokens(self, forward, labels, of=self.setting.loss.scores)
                self.mark("end", "")
                return self.marks
            if of_values:
                loss, sums = learn_values(self, forward, boundaries)
            elif self.setting.loss.answers is not None:
                loss, sums = reinforce(self, forward, labels, boundaries)
            else:
                loss, sums = self._learn(forward, inputs, boundaries)
            self._forget_casts(self.blocks, "loss")
        if self.units is not None:
            self.units.end(loss)
        if self.setting.evaluates:
            sums = None
            self.mark("end", "")
            return self.marks
        if of_values:
            self.values = self.values or sums
        else:
            self.rewards = self.rewards or sums  # those of later ones are added to the first's
        sums = None
        self.mark("head", "loss")
        product = meta.mul(loss, self.scale) if self.setting.precision.scaled else loss
        meter.on_product = self.product_begins
        if self.units is not None:
            self.units.shared.backward = True
        with meter.with_autocast(False):
            meta.backward(product, self.watch(boundaries))
        self.pass_all(boundaries)
        if self.units is not None:
            self.units.finish(self.mark)
        loss.grad_fn = product.grad_fn = None  # no loop holds a graph longer
        if not leaves:
            del loss, product
        self.mark("end", "")
        return self.marks

    def _learn(
        self, forward: Forward, inputs: Inputs, boundaries: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of an objective whose data has the answers, and sums where it compares them."""
        if self.setting.loss.compares is not None:
            return self._compare(self.setting.loss.compares, forward, boundaries), None
        if inputs.rated is not None:
            return self._rate(forward, inputs, inputs.rated, boundaries)
        if self.setting.loss.rows == "pairs":
            return self._prefer(forward, inputs, boundaries)
        hidden = _backbone(
            self._with_attention(forward), self, self.outside, self.blocks, boundaries
        )
        self.mark("loss", "loss")
        return self.program.loss(forward, self.outside, hidden, inputs.labels), None

    def find_hidden(self, forward: Forward, boundaries: list[int]) -> Tensor:
        """(batch, tokens, hidden) of the model that is trained."""
        forward = self._with_attention(forward)
        return _backbone(forward, self, self.outside, self.blocks, boundaries)

    def find_valued(self, forward: Forward, boundaries: list[int]) -> Tensor:
        """The same of the base with the value's adapter, or of the value's own model."""
        forward = self._with_attention(forward)
        return _backbone(forward, self, with_values(self.outside), self.valued, boundaries)

    def find_judged(self, forward: Forward) -> Tensor:
        """The same with the adapter of a reward model."""
        return _backbone(self._with_attention(forward), self, self.outside, self.judged, [])

    def find_reference(self, forward: Forward) -> tuple[Weights, Tensor]:
        """The base's own weights outside of its blocks, and what its blocks make."""
        outside = self._reference(self.outside)
        return outside, _backbone(self._with_attention(forward), self, outside, self.base, [])

    def _prefer(
        self, forward: Forward, inputs: Inputs, boundaries: list[int]
    ) -> tuple[Tensor, Tensor]:
        """As train/step/step.py: the reference without a gradient, then the policy; loss, rewards.

        inputs: the reference's log-probabilities where they come with the batch; None where they
        do not, or where no reference is compared with.
        """
        chunk, labels, reference = self.setting.loss.chunk, inputs.labels, inputs.reference
        if self.setting.loss.references:
            outside = self._reference(self.outside)
            plain = replace(forward, adapter_dropout=False)
            hidden = _backbone(self._with_attention(plain), self, outside, self.base, [])
            self.mark("reference", "loss")
            reference = row_log_probs(
                forward, outside, hidden, labels, chunk, cut=self._cuts_vocabulary
            )
            del hidden, outside, plain
            self.mark("embedding", "embedding")
        hidden = _backbone(
            self._with_attention(forward), self, self.outside, self.blocks, boundaries
        )
        self.mark("loss", "loss")
        policy = self._find_policy(forward, inputs, hidden)
        del hidden
        found = judge(policy, labels, RESULTS + bool(self.setting.loss.learns))
        del reference
        return found

    def _find_policy(self, forward: Forward, inputs: Inputs, hidden: Tensor) -> Tensor:
        """(rows,) of what is compared: scores, or log-probabilities."""
        if self.setting.architecture.scores:
            policy = row_scores(forward, self.outside, hidden, inputs.labels)
        else:
            policy = row_log_probs(
                forward, self.outside, hidden, inputs.labels, self.setting.loss.chunk,
                inputs.context, cut=self._cuts_vocabulary,
            )  # fmt: skip
        return policy if self.setting.attention.ring is None else sum_over_ranks(policy)

    @property
    def _cuts_vocabulary(self) -> bool:
        """Whether ranks share products, the head's too."""
        return self.setting.sharding is not None and self.setting.sharding.tp > 1

    def judge_pairs(self, forward: Forward, inputs: Inputs, hidden: Tensor) -> Tensor:
        """The loss of answers whose reference, if any, is there."""
        policy = self._find_policy(forward, inputs, hidden)
        del hidden
        loss, sums = judge(policy, inputs.labels, self._figures)
        if not self.setting.evaluates:
            self.rewards = self.rewards or sums
        return loss

    def end_stages(self) -> None:
        """Ranks without the last stage have sums of no pair."""
        setting = self.setting
        if setting.loss.rows and not setting.evaluates and self.rewards is None:
            self.rewards = meta.empty(self.meter, (self._figures,), "float32")

    @property
    def _figures(self) -> int:
        """How many sums the log shows of compared answers."""
        if self.setting.loss.rows == "rated":
            return RATINGS + self.setting.loss.mismatches
        return RESULTS + bool(self.setting.loss.learns)

    def score_blocks(
        self, forward: Forward, labels: Tensor, blocks: slice, entered: Tensor | None, last: bool,
        base: bool,
    ) -> Tensor:  # fmt: skip
        """A stage without a gradient; behind the last one the rows' log-probabilities."""
        outside = {name: weight.detached() for name, weight in self.outside.items()}
        weights = self.without_gradient
        if base:
            outside, weights = self._reference(self.outside), self.base
        forward = self._with_attention(forward)
        hidden = _backbone(forward, self, outside, weights, [], blocks, entered, last)
        if not last:
            return hidden
        self.mark("reference", "loss")
        return row_log_probs(
            forward, outside, hidden, labels, self.setting.loss.chunk, cut=self._cuts_vocabulary
        )

    def _rate(
        self, forward: Forward, inputs: Inputs, rated: Rated, boundaries: list[int]
    ) -> tuple[Tensor, Tensor]:
        """As train/step/step.py: what needs no gradient, then the policy; loss, rewards."""
        labels, reference, below = inputs.labels, inputs.reference, rated.reference
        plain = replace(forward, adapter_dropout=False)
        others = None
        if rated.input_ids is not None:
            others = replace(plain, input_ids=rated.input_ids)
        if self.setting.loss.references:
            outside = self._reference(self.outside)
            reference = self._score(plain, outside, self.base, labels)
            if others is not None:
                below = self._score(others, outside, self.base, labels)
            del outside
        baseline: Tensor | None = None
        if others is not None:
            live = {name: weight.detached() for name, weight in self.outside.items()}
            own = self._score(others, live, self.without_gradient, labels)
            baseline = meta.empty(self.meter, (), "float32")
            del own, below, live
        del plain, others
        self.mark("embedding", "embedding")
        hidden = _backbone(
            self._with_attention(forward), self, self.outside, self.blocks, boundaries
        )
        self.mark("loss", "loss")
        policy = row_log_probs(
            forward,
            self.outside,
            hidden,
            labels,
            self.setting.loss.chunk,
            cut=self._cuts_vocabulary,
        )
        del hidden
        found = judge(policy, labels, RATINGS + (baseline is not None))
        del reference, baseline
        return found

    def _score(
        self, forward: Forward, outside: Weights, blocks: list[tuple[Weights, Block]],
        labels: Tensor,
    ) -> Tensor:  # fmt: skip
        """(rows,) without a gradient."""
        self.mark("embedding", "embedding")
        hidden = _backbone(self._with_attention(forward), self, outside, blocks, [])
        self.mark("reference", "loss")
        return row_log_probs(
            forward, outside, hidden, labels, self.setting.loss.chunk, cut=self._cuts_vocabulary
        )

    def _compare(self, program: Comparing, forward: Forward, boundaries: list[int]) -> Tensor:
        """As other trainers: the policy, then the reference beside its logits; the loss."""

        def refer() -> list[Tensor]:
            outside = self._reference(self.outside)
            if self.setting.loss.second:
                self.meter.casts, self.meter.casts_frozen = {}, True
            hidden = _backbone(self._with_attention(forward), self, outside, self.base, [])
            self.mark("reference", "loss")
            outputs = program.outputs(forward, outside, hidden)
            del hidden
            self._forget_casts(self.base, "reference")
            return program.returned(outputs)

        hidden = _backbone(
            self._with_attention(forward), self, self.outside, self.blocks, boundaries
        )
        self.mark("loss", "loss")
        outputs = program.outputs(forward, self.outside, hidden)
        del hidden
        self._forget_casts(self.blocks, "loss")
        outputs = program.returned(outputs)
        return program.compare(outputs, refer if self.setting.loss.references else None)

    def _forget_casts(self, blocks: list[tuple[Weights, Block]], then: str) -> None:
        """Autocast keeps its casts of trained weights until a forward has ended; a second model's
        want gradients, too, though none is made."""
        casts, self.meter.casts, self.meter.casts_frozen = self.meter.casts, None, False
        if not casts:
            return
        for index, (weights, _) in enumerate(blocks):
            self.mark(f"block {index}", "blocks")  # as often as there are such blocks
            for weight in weights.values():
                casts.pop(weight.storage.index, None)
        self.mark(then, "loss")

    def _with_attention(self, forward: Forward) -> Forward:
        """As train/step/step.py: positions where ranks have a part of the tokens between products,
        and where documents begin, or one mask for all blocks where rows are longer than their
        window.
        """
        a, tokens = self.setting.architecture, forward.tokens
        if forward.slots is not None:  # whose calls make what they need
            return forward
        sharding = self.setting.sharding
        if sharding is not None and sharding.tp > 1 and forward.position_ids is None:
            counted = meta.empty(self.meter, (tokens,), "int64")
            forward = replace(forward, position_ids=meta.unsqueeze(counted, 0))
        if self.setting.attention.masking is not None:
            shape = (forward.batch, tokens)
            masks = make_masks(
                self.setting.attention.masking, a, self.meter, shape, self._embedded()
            )
            return replace(forward, masks=masks)
        if forward.kernel == "varlen":
            starts = meta.make_starts(forward.input_ids, forward.documents)
            return replace(forward, starts=starts)
        if not a.banded(tokens):
            return forward
        band = meta.make_band(forward.input_ids, tokens, self.setting.precision.compute)
        return replace(forward, band=band)

    def _embedded(self) -> str:
        """The dtype of what the token embedding returns."""
        if self.units is not None:
            return self.setting.precision.compute
        return next(row.dtype for row in self.setting.outside if row.part == "embedding")

    def run_blocks(
        self, forward: Forward, boundaries: list[int], part: slice, entered: Tensor | None,
        last: bool,
    ) -> Tensor:  # fmt: skip
        """Those blocks alone, and the final norm behind the last one; entered: what a stage begins
        with, None of tokens."""
        forward = self._with_attention(forward)
        return _backbone(forward, self, self.outside, self.blocks, boundaries, part, entered, last)

    def watch(self, boundaries: list[int], offset: int = 0) -> Callable[[int], None]:
        """Receives each node of a backward: which block it is of, from block `offset` on."""

        def passing(sequence: int) -> None:
            while boundaries and sequence < boundaries[-1]:
                self._pass(boundaries, offset)

        return passing

    def _pass(self, boundaries: list[int], offset: int) -> None:
        boundaries.pop()
        if boundaries:
            self.mark(f"block {offset + len(boundaries) - 1}", "blocks")
        else:
            self.mark("embedding", "embedding")

    def pass_all(self, boundaries: list[int], offset: int = 0) -> None:
        """Mark the blocks that no node was of."""
        while boundaries:
            self._pass(boundaries, offset)


@module
def _backbone(
    forward: Forward,
    simulation: Simulation,
    outside: Weights,
    blocks: list[tuple[Weights, Block]],
    boundaries: list[int],
    part: slice = ALL,
    entered: Tensor | None = None,
    last: bool = True,
) -> Tensor:
    """The model without its head, or a part of its blocks; notes where each block begins."""
    program, meter = simulation.program, forward.meter
    x, shared, held, own = (
        program.embed(forward, outside) if entered is None else begin_stage(forward, entered)
    )
    load: Load | None = None
    if x.grad_fn is None and any(block.reentrant for _, block in blocks):
        meta.want_gradient(x)  # `enable_input_require_grads`
    units = simulation.units
    for index in range(len(blocks))[part]:
        weights, block = blocks[index]
        simulation.mark(f"block {index}", "blocks")
        boundaries.append(meter.sequence)
        here = _of_kind(forward, block.kind)
        mine = (*own.get(block.kind, ()), *shared)
        if units is not None:
            x, mine = units.blocks[index].enter(x), units.lowered(mine)
        x, load = run_block(here, program, weights, x, mine, block, load)
        simulation.waiting[index] = 0 if load is None else load.nbytes
        if units is not None:
            units.blocks[index].leave(x)
        del here, mine
    del load
    boundaries.append(meter.sequence)
    if not last:
        return x
    simulation.mark("norm", "norm")
    if units is not None:
        x = units.enter(units.tail, x)
    x = program.finish(forward, outside, x)
    del held  # alive until here
    forward.beside.clear()
    return x


def _of_kind(forward: Forward, kind: str) -> Forward:
    """What a block of this kind receives, and holds while it may be recomputed."""
    masks = forward.masks and forward.masks.only(forward.architecture, kind)
    return replace(forward, kind=kind, masks=masks)


def _name(row: Row) -> Named:
    return row.name, row.shape, row.dtype, row.trainable, row.part


def owner_of(part: str) -> str:
    """The component's name in ledgers of a weight's part."""
    return "blocks" if part == "block" else part
