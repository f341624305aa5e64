"""torchtitan's step: FSDP2 in mixed precision, with tensor, context and pipeline parallelism.

Read from pytorch/torchtitan between December 2024 and August 2025 (`parallelize.py` of llama3,
`train.py`, `components/loss.py`, `distributed/activation_checkpoint.py`); what changed in between
goes by `options.version`, the year and month of the code.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import (
    Framework,
    Job,
    Knob,
    Peaks,
    Rule,
    Slack,
    TimeTraits,
    divide,
    frameworks,
    make_ledger,
    obey,
)  # fmt: skip
from memfit.plan.frameworks.shared.plain import plain_values
from memfit.plan.frameworks.torchtitan.held import describe_instants
from memfit.plan.frameworks.torchtitan.stage import (
    count_elements,
    count_stage,
    find_round,
    find_stage,
    leave_alike,
    refuse_zero_bubble,
)
from memfit.plan.step_time.arrays import Number, larger, where
from memfit.records.ledger import Ledger


@final
class Torchtitan(Framework):
    """`torchtitan/train.py` with a dense decoder: Llama 3 and what is built like it."""

    name = "torchtitan"
    # per-op selective checkpointing keeps every second product
    time = TimeTraits(torch_schedules=True, products_repeated=0.5)
    title = "torchtitan"
    source = (
        "pytorch/torchtitan 9dec370 (2024-12), e7c0cae (2025-06), 6fc499f (2025-08); the loss of"
        " chunks: b5bcd76 (2026-11)"
    )
    values: ClassVar = plain_values(
        precision=("bf16-mixed", "fp8-mixed"), implementation=("fused", "foreach", "loop"),
        recompute=("selective", "full", "none"), attention=("flash", "cudnn"),
        loss=("plain", "chunked"), compile=("none", "blocks"),
    )  # fmt: skip
    axes = (
        "dp_replicate", "dp_shard", "tp", "sequence_parallel", "cp", "pp", "virtual_pp",
    )  # fmt: skip
    knobs = {  # noqa: RUF012
        "version": Knob(default=202508, means="year and month of the code, such as 202412"),
        "pipeline_schedule": Knob(
            default="1F1B", means="the order of a pipeline's pieces",
            values=("1F1B", "Interleaved1F1B", "GPipe", "ZBVZeroBubble", "InterleavedZeroBubble"),
        ),
        "loss_chunks": Knob(
            default=8, means="`loss.num_chunks`: pieces of the tokens, of `loss: chunked`"
        ),
        # what follows changes the time of a step alone
        "async_tp": Knob(default=False, means="tp's collectives run beside its products"),
        "float8_recipe": Knob(
            default="tensorwise", means="how FP8 values are scaled, of `precision: fp8-mixed`",
            values=("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"),
        ),
        "float8_all_gather": Knob(default=False, means="weights are gathered in FP8"),
        "cp_rotate": Knob(
            default="allgather", means="how keys and values reach the other cp ranks",
            values=("allgather", "alltoall"),
        ),
    }  # fmt: skip
    arrays = True
    slack = Slack(
        low=0.97, typical=1.04, high=1.15,
        source="fitted: rows of pytorch/torchtitan and pytorch/ao with split `fit`; their range",
    )  # fmt: skip

    def rules(self, job: Job) -> list[Rule]:
        """What `parallelize.py` does not do, or cuts into equal parts."""
        p, a = job.recipe.parallel, job.model.architecture
        return [
            Rule(
                "sequence parallelism", (p.tp > 1) & ~where(p.sequence_parallel, True, False),
                "`parallel.tp: {}` without `sequence_parallel: true`: torchtitan has none",
                (p.tp,), "between products, its tensor parallelism cuts the tokens",
            ),
            *(
                Rule(
                    what, n % p.tp != 0, "`parallel.tp: {}` does not divide {} {} of `{}`",
                    (p.tp, n, what, job.model.name), "cuts of unequal size are not described",
                )
                for what, n in (
                    ("heads", a.heads), ("key-value heads", a.kv_heads), ("vocab", a.vocab),
                )
            ),
            *_schedule_rules(job),
            *_chunk_rules(job),
        ]  # fmt: skip

    def check(self, job: Job) -> None:
        """Refuse what `parallelize.py` does otherwise, or what is not read."""
        a = job.model.architecture
        if a.experts.count or a.latent.kv_rank:
            raise InvalidRequest(
                f"`{job.model.name}` has experts or latent attention; of torchtitan, only dense"
                " decoders are described",
                hint="",
            )
        obey(self.rules(job))

    def predict(self, job: Job) -> Ledger:
        """The largest pipeline rank's ledger."""
        if job.recipe.parallel.pp > 1:
            refuse_zero_bubble(job)
        elements = count_elements(job.model)
        stages = (find_stage(job, rank) for rank in range(job.recipe.parallel.pp))
        ledgers = (
            make_ledger(describe_instants(job, elements, count_stage(stage)))
            for stage in leave_alike(stages)
        )
        return max(ledgers, key=lambda ledger: ledger.peak)

    def measure(self, job: Job) -> Peaks:
        """See `Framework.measure`."""
        from memfit.plan.frameworks.torchtitan.columns import measure

        return measure(job)


def _schedule_rules(job: Job) -> list[Rule]:
    """What torch's schedules need; `clock.orders` says the same of one recipe."""
    p, micro = job.recipe.parallel, job.recipe.accumulation
    several, round_ = p.virtual_pp > 1, find_round(job)
    over = micro % round_
    gpipe = job.option("pipeline_schedule") == "GPipe"
    return [
        Rule(
            "GPipe", several & gpipe, "`options.pipeline_schedule: GPipe` with `virtual_pp: {}`:"
            " it holds one piece a rank", (p.virtual_pp,), "use Interleaved1F1B",
        ),
        Rule(
            "rounds", several & ((round_ < p.pp) | ((over > 0) & (over < p.pp))),
            "{} micro-batches in rounds of {} leave fewer than the {} ranks", (micro, round_, p.pp),
            "a multiple of `pp` micro-batches",
        ),
    ]  # fmt: skip


def _chunk_rules(job: Job) -> list[Rule]:
    """`ChunkedLossWrapper` cuts a rank's tokens into equal parts."""
    r = job.recipe
    if r.loss != "chunked":
        return []
    tokens = r.tokens // r.parallel.cp
    chunks: Number = larger(1, job.option("loss_chunks"))
    return [divide("chunks", "options.loss_chunks", chunks, "tokens", tokens)]


frameworks.register("torchtitan")(Torchtitan())
