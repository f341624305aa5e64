"""Plans, certificates and runs written out by hand, for what only shows or joins them."""

import msgspec

from memfit.core.units import GIB, MIB
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.model import ModelReference
from memfit.records.recipe import Freeze, Lora, Optimizer, Recipe
from memfit.records.request import Request, Task
from memfit.records.results import (
    Certificate,
    Considered,
    Cost,
    Lever,
    Measurement,
    Memory,
    Nearest,
    Plan,
    Run,
    Tensor,
    Time,
)
from memfit.records.timeline import Timeline

HOSTILE = "<script>alert('x')</script>"


def recipe(**changes):
    made = Recipe(
        model=ModelReference(name="llama-3.1-8b", source="", config={"model_type": "llama"}),
        weights="random", objective="pretrain", method="full", lora=Lora(), freeze=Freeze(),
        base_format="fp32", precision="bf16-mixed",
        optimizer=Optimizer(
            name="adamw", implementation="fused", learning_rate=2e-5, weight_decay=0.0, beta1=0.9,
            beta2=0.999, eps=1e-8, momentum=0.9, schedule="cosine", warmup_steps=0, clip_norm=1.0,
        ),
        recompute_blocks=12, attention="flash", loss="chunked", loss_chunk=1024,
        sequence_length=4096, packing=True, micro_batch=2, accumulation=8, steps=1000,
        device="h100-sxm", seed=0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def ledger(*, more=0):
    """Backward holds the peak; every phase and the usual kinds occur."""
    rows = [
        (Phase.LOAD, Kind.PARAMETERS, "blocks", 30 * GIB, "8,030,261,248 weights in fp32"),
        (Phase.FORWARD, Kind.PARAMETERS, "blocks", 30 * GIB, "8,030,261,248 weights in fp32"),
        (Phase.FORWARD, Kind.ACTIVATIONS, "blocks", 9 * GIB, "20 blocks kept whole"),
        (Phase.BACKWARD, Kind.PARAMETERS, "blocks", 28 * GIB, "weights of 32 blocks in fp32"),
        (Phase.BACKWARD, Kind.PARAMETERS, "head", 2 * GIB, "the head's weight in fp32"),
        (Phase.BACKWARD, Kind.GRADIENTS, "blocks", 15 * GIB + more, "as many as weights"),
        (Phase.BACKWARD, Kind.OPTIMIZER_STATE, "optimizer", 20 * GIB, "AdamW: two fp32 a weight"),
        (Phase.BACKWARD, Kind.ACTIVATIONS, "blocks", 9 * GIB,
         "12 of 32 blocks recomputed: 45.7 bytes a token and hidden unit for the other 20"),
        (Phase.BACKWARD, Kind.LOGITS, "head", 300 * MIB, "one chunk of 1024 tokens x 128256"),
        (Phase.OPTIMIZER_STEP, Kind.PARAMETERS, "blocks", 30 * GIB, "weights in fp32"),
        (Phase.OPTIMIZER_STEP, Kind.OPTIMIZER_STATE, "optimizer", 20 * GIB, "two fp32 a weight"),
    ]  # fmt: skip
    return Ledger(
        entries=tuple(
            Entry(phase=p, kind=k, owner=o, nbytes=n, because=b) for p, k, o, n, b in rows
        )
    )


def memory(held, *, usable=80 * GIB, verdict="fits", cuda=True):
    peak = held.peak
    reserved = peak + GIB if cuda else None
    return Memory(
        peak_allocated=peak,
        peak_reserved=reserved,
        device_total=reserved + GIB // 2 if reserved else None,
        usable=usable,
        verdict=verdict,
        because="what `h100-sxm` gives to torch",
        peak_phase=held.peak_phase,
        entries=held.at(held.peak_phase),
    )


def considered(
    label, nbytes, time, fits, *, chosen=False, exact=True, because="fits, slower", changes=None
):
    return Considered(
        label=label, changes=changes or {}, peak_allocated=nbytes, device_total=nbytes + GIB,
        exact=exact, relative_time=time, fits=fits, chosen=chosen, because=because,
    )  # fmt: skip


def plan(*, usable=80 * GIB, verdict="fits", cuda=True, name="llama-3.1-8b", **task):
    made = recipe()
    made = msgspec.structs.replace(
        made, model=msgspec.structs.replace(made.model, name=name),
        device="h100-sxm" if cuda else "cpu-x86",
    )  # fmt: skip
    held = ledger()
    label = "full bf16-mixed, micro-batch {}, recompute {}/32 blocks, loss chunked 1024"
    return Plan(
        recipe_digest=made.digest,
        request=Request(model=name, task=Task(**task)),
        recipe=made,
        memory=memory(held, usable=usable, verdict=verdict, cuda=cuda),
        time=Time(
            step_seconds=8.4, tokens_per_second=7800.0, tokens_per_second_per_device=7800.0,
            mfu=0.41, hfu=0.47, model_flops_per_step=3.2e15, total_seconds=8400.0,
            because="assumed 65% of the dense peak; not yet checked against measurements",
        ),
        cost=Cost(device_hours=2.33, usd=None, kwh=1.63, because="no price in the catalogue"),
        ledger=held,
        timeline=Timeline(spans=()),
        considered=(
            considered(label.format(2, 12), held.peak, 1.0, True, chosen=True,
                       because="the fastest that fits"),
            *(considered(label.format(1, n), held.peak - n * GIB, 1 + n / 100, True)
              for n in range(4, 9)),
            *(considered(label.format(4, n), held.peak + 30 * GIB, 0.9, False, exact=False,
                         because="needs 22.10 GiB more than there is") for n in range(3)),
        ),
        levers=(
            considered("more", held.peak - 7 * GIB, 1.17, True, changes={"recompute": "full"}),
            considered("none", held.peak + 9 * GIB, 0.92, False, changes={"recompute": "none"},
                       because="needs 3.10 GiB more than there is"),
            considered("half", held.peak - 30 * GIB, 0.98, True, changes={"precision": "bf16"},
                       because="fits and is faster, but changes what is learned"),
            considered("opt", held.peak, 1.01, True,
                       changes={"optimizer.implementation": "foreach"}),
        ),
        assumptions=("sequence_length 4096 (not asked for)", "1000 steps (no length given)"),
        versions={"memfit": "0.1.0"},
    )  # fmt: skip


def certificate(of, *, more=0, module="model.layers.31.mlp"):
    held = ledger(more=more)
    return Certificate(
        recipe_digest=of.recipe_digest,
        recipe=of.recipe,
        device=of.recipe.device,
        memory=memory(
            held,
            usable=of.memory.usable,
            verdict=of.memory.verdict,
            cuda=of.memory.device_total is not None,
        ),
        phases={str(p): held.total(p) for p in held.phases},
        ledger=held,
        at_peak=tuple(
            Tensor(
                nbytes=(12 - n) * 64 * MIB,
                count=2,
                kind="activations",
                module=module,
                op="aten.mm",
                shape=(1, 4096),
                dtype="bfloat16",
                source="transformers/models/llama/modeling_llama.py:164",
            )
            for n in range(12)
        ),
        bounds=("every document fills its sequence", "micro-batches of 2 x 4096 tokens"),
        seconds=3.21,
        versions={"memfit": "0.1.0", "torch": "2.13.0"},
    )


def levers():
    def lever(changes, removed, peak, verdict, *, exact=True, because="the peak is in loss"):
        return Lever(
            changes=changes, peak_allocated=peak, device_total=peak and peak + GIB, removed=removed,
            verdict=verdict, exact=exact, because=because,
        )  # fmt: skip

    return (
        lever({"recompute": "full"}, 9 * GIB, 62 * GIB, "fits"),
        lever({"precision": "bf16"}, 5 * GIB, 66 * GIB, "at_risk", exact=False),
        lever({"optimizer.implementation": "foreach"}, 0, 71 * GIB, "fits"),
        lever({"attention": "math"}, -2 * GIB, 73 * GIB, "does_not_fit"),
        lever({"loss": "chunked", "loss_chunk": 1024}, None, None, None, because="it failed"),
    )


def nearest(of, *, fits=True):
    held = ledger(more=-GIB)
    verdict = "fits" if fits else "does_not_fit"
    return Nearest(
        changes={"recompute": {"blocks": 30}, "loss_chunk": 1024}, recipe_digest="0" * 16,
        memory=memory(held, usable=(80 if fits else 60) * GIB, verdict=verdict),
        relative_time=1.177, exact=True,
    )  # fmt: skip


def run(of, *, steps=200, finished=True):
    held = ledger(more=MIB)
    peak = held.peak
    return Run(
        recipe_digest=of.recipe_digest,
        recipe=of.recipe,
        measurements={
            "memory.peak_allocated": Measurement(value=float(peak), unit="B", counter="live"),
            "memory.rss_peak": Measurement(value=float(90 * GIB), unit="B", counter="getrusage"),
            "time.step_seconds": Measurement(value=9.1, unit="s", counter="clock", n=20),
            "time.tokens_per_second": Measurement(value=7200.0, unit="tokens/s", counter="clock"),
        },
        phases={str(p): held.total(p) for p in held.phases},
        ledger=held,
        losses=tuple((n, 8.0 / (1 + n / 40) + 0.1 * (n % 3)) for n in range(1, steps + 1)),
        evaluations=tuple((n, 8.1 / (1 + n / 40)) for n in range(50, steps + 1, 50)),
        steps_done=steps,
        finished=finished,
        environment={"python": "3.11.7", "torch": "2.13.0", "processors": "2"},
    )
