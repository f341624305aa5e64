"""Whole runs of a tiny model on tiny text."""

import io
import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny_runs import CONFIG, OPTIMIZER, tiny_recipe, write_text
from transformers import (
    AutoModelForCausalLM,
    TrainingArguments,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from memfit import catalog
from memfit.certify import trace
from memfit.certify.evidence.certificate import make_certificate
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records import read_json
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora
from memfit.records.request import Request, Task
from memfit.records.results import Certificate, Memory, Run
from memfit.train.checkpoint.whole import save_checkpoint
from memfit.train.data.prepare import build_samplers, find_bounds, find_lengths, read_data
from memfit.train.measure.counters import Meter, measure, run_step, to_batch
from memfit.train.model.weights import fill_weights
from memfit.train.run.loop import Cadence, train
from memfit.train.run.progress import (
    Facts,
    Moment,
    Plain,
    live_lines,
    open_progress,
    remaining,
)
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.schedule import learning_rate
from memfit.train.step.step import evaluate

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def request_(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    data, held_out = write_text(root / "data"), write_text(root / "held_out", 12)
    task = Task(data=str(data), evaluation=str(held_out))
    return Request(model=CONFIG, task=task)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def go(request_, cache, tmp_path):
    def start(recipe, folder="run", **options):
        options = {"cadence": Cadence(save_every=2, evaluate_every=3)} | options
        return train(recipe, request_, tmp_path / folder, cache=cache, **options)

    return start


def weights_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return dict(model.named_parameters())


def test_a_run_is_the_textbook_loop(go, request_, cache, tmp_path):
    recipe = tiny_recipe()
    run = go(recipe, cadence=Cadence(save_every=2, evaluate_every=3, evaluate_tokens=10**9))
    sampler, held_out = build_samplers(request_, recipe, read_data(request_, recipe.model, cache))
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    losses = []
    for step in range(recipe.steps):
        micros = sampler.sample(step)
        targets = sum(m.targets for m in micros)
        total = 0.0
        for micro in micros:
            documents = [
                (micro.input_ids[i, a:b], micro.labels[i, a:b])
                for i, lengths in enumerate(micro.documents)
                for a, b in zip(np.cumsum((0, *lengths)), np.cumsum(lengths), strict=False)
            ]
            for ids, labels in documents:
                logits = model(torch.from_numpy(ids)[None]).logits[0]
                loss = torch.nn.functional.cross_entropy(
                    logits, torch.from_numpy(labels), ignore_index=-100, reduction="sum"
                )
                (loss / targets).backward()
                total += float(loss.detach()) / targets
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.optimizer, step, recipe.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert [loss for _, loss in run.losses] == pytest.approx(losses, rel=1e-5)
    trained = weights_of(tmp_path / "run")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-4, atol=1e-6)
    built = Built(recipe, model, optimizer)
    parts = [evaluate(built, to_batch(m, CPU)) for m in held_out.all_once()]
    mean = float(sum(p[0] for p in parts) / sum(p[1] for p in parts))
    assert run.evaluations[-1][1] == pytest.approx(mean, rel=1e-4)


def test_the_rehearsal_leaves_no_trace(request_, cache, tmp_path):
    recipe = tiny_recipe(
        method="lora", lora=Lora(rank=2, alpha=4.0, dropout=0.2, targets=("q_proj",))
    )
    sampler, _ = build_samplers(request_, recipe, read_data(request_, recipe.model, cache))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model = Meter(CPU).rehearse(recipe, sampler.sample(0)[:1])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    plain = build_model(recipe, "cpu")
    finals = []
    for each in (model, plain):
        fill_weights(each, recipe)
        built = Built(recipe, each, build_optimizer(recipe, each))
        assert not built.optimizer.state
        torch.manual_seed(7)
        run_step(built, sampler.sample(0))
        finals.append([*each.parameters(), *each.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


RECIPES = {
    "fp32": {},
    "bf16": {"precision": "bf16", "base_format": "bf16"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "recompute": {"recompute_blocks": 2},
    "unpacked": {"packing": False},
    "one micro-batch": {"accumulation": 1},
    "lora": {"method": "lora", "lora": Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))},
    "math": {"attention": "math"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_measured_peak_is_the_certified_one_to_the_byte(name, go, request_, cache):
    recipe = tiny_recipe(**RECIPES[name])
    run = go(recipe)
    data, held_out = find_bounds(request_, recipe, cache)
    device = catalog.find_device("cpu-x86")
    made = make_certificate(recipe, device, None, None, data=data, held_out=held_out)
    certified = {phase: n for phase, n in made.phases.items() if phase != "generate"}
    assert run.phases == certified
    assert run.measurements["memory.peak_allocated"].value == made.memory.peak_allocated
    assert run.measurements["memory.rss_peak"].value > made.memory.peak_allocated


def test_measure_is_the_certified_worst_case_to_the_byte():
    recipe = tiny_recipe()
    device = catalog.find_device("cpu-x86")
    measured, traced = measure(recipe, device, steps=2), trace(recipe, device)
    assert measured.measurements["memory.peak_allocated"].value == traced.peak
    assert measured.ledger.by_kind(Phase.ACCUMULATE) == traced.ledger.by_kind(Phase.ACCUMULATE)
    assert measured.measurements["time.step_seconds"].n == 2
    assert measured.measurements["time.tokens_per_second"].value > 0


def test_the_log_has_one_line_a_step(go, tmp_path):
    run = go(tiny_recipe())
    rows = [json.loads(x) for x in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [(row["step"], row["loss"]) for row in rows] == list(run.losses)
    assert [row["step"] for row in rows if "evaluation_loss" in row] == [3, 6]
    assert {"learning_rate", "grad_norm", "tokens_per_second", "seconds"} <= rows[0].keys()
    assert read_json(tmp_path / "run" / "run.json", Run) == run
    assert run.finished
    assert run.steps_done == 6


def test_an_evaluation_costs_a_twentieth_of_the_run_and_reads_the_same_tokens(go, tmp_path):
    # 20 steps of 128 tokens, evaluated 10 times: 38 tokens each, so at least the global batch
    recipe = tiny_recipe(steps=20)
    run = go(recipe, "short", cadence=Cadence(save_every=20))
    rows = [
        json.loads(line) for line in (tmp_path / "short" / "log.jsonl").read_text().splitlines()
    ]
    evaluated = [row for row in rows if "evaluation_loss" in row]
    assert {row["evaluation_whole"] for row in evaluated[:-1]} == {False}
    (sampled,) = {row["evaluation_targets"] for row in evaluated[:-1]}
    assert 96 < sampled <= 128
    assert evaluated[-1]["evaluation_whole"]
    stated = Cadence(save_every=20, evaluate_every=10, evaluate_tokens=128)
    same = go(recipe, "same", cadence=stated)
    assert dict(same.evaluations)[10] == dict(run.evaluations)[10]
    counter = same.measurements["loss.evaluation"].counter
    assert counter.startswith(f"a fixed sample of {sampled} held-out tokens, standard error ")
    fewer = go(recipe, "fewer", cadence=replace(stated, evaluate_tokens=64))
    assert dict(fewer.evaluations)[20] != dict(same.evaluations)[20]


def test_the_reported_loss_is_of_everything_held_out_by_default(go, request_, cache, tmp_path):
    """Of the saved model, one document after the other, through Hugging Face's class."""
    run = go(tiny_recipe(steps=20), cadence=Cadence(save_every=20))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    corpus = read_data(request_, tiny_recipe().model, cache).held_out
    losses = []
    with torch.no_grad():
        for start, stop in zip(corpus.offsets, corpus.offsets[1:], strict=False):
            ids = torch.from_numpy(corpus.tokens[start:stop].astype("int64"))[None]
            width = tiny_recipe().sequence_length
            for first in range(0, ids.shape[1] - 1, width):  # rows cut documents
                part = ids[:, first : first + width + 1]
                logits = model(part[:, :-1]).logits[0]
                losses.append(
                    torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="none")
                )
    losses = torch.cat(losses)
    measured = run.measurements["loss.evaluation"]
    assert measured.counter.startswith(f"all {len(losses):,} held-out tokens, standard error ")
    assert measured.value == pytest.approx(float(losses.mean()), rel=0.01)
    # tokens of one micro-batch are alike: more than were they independent of each other
    alone = float(losses.std()) / len(losses) ** 0.5
    assert alone < measured.spread < 4 * alone


def test_runs_of_other_seeds_are_evaluated_on_the_same_sample(request_, cache):
    data = read_data(request_, tiny_recipe().model, cache)
    read = []
    for seed in (0, 1, 2):
        _, held_out = build_samplers(request_, tiny_recipe(seed=seed), data)
        read.append([m.input_ids.tolist() for m in held_out.all_once(64)])
        assert not held_out.reads_all(64)
        assert held_out.reads_all(10**9)
    assert read[0] == read[1] == read[2]


def test_a_finished_run_is_returned_as_it_is(go, tmp_path):
    run = go(tiny_recipe())
    changed = (tmp_path / "run" / "model" / "model.safetensors").stat().st_mtime_ns
    assert go(tiny_recipe()) == run
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_mtime_ns == changed


class StopAfter:
    """A progress that presses Ctrl-C once a step is done."""

    def __init__(self, step):
        self.step = step

    def begin(self, facts):
        pass

    def note(self, text):
        pass

    def show(self, moment):
        if moment.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)

    def end(self):
        pass


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_that_was_stopped_goes_on_bit_by_bit(dropout, go, request_, cache, tmp_path):
    base = tmp_path / "base"
    go(tiny_recipe(steps=1), "seed")
    (tmp_path / "seed" / "model").rename(base)
    config = json.loads((base / "config.json").read_text())
    recipe = tiny_recipe(
        method="lora",
        lora=Lora(rank=2, alpha=4.0, dropout=dropout, targets=("q_proj", "v_proj")),
        weights="pretrained",
        model=ModelReference(name="base", source=str(base), config=config),
    )
    whole = go(recipe, "whole")
    with pytest.raises(RunFailed, match="interrupted after step 3 of 6; a checkpoint is saved"):
        go(recipe, "cut", progress=StopAfter(3))
    half = read_json(tmp_path / "cut" / "run.json", Run)
    assert half.steps_done == 3
    assert not half.finished
    resumed = go(recipe, "cut")
    assert resumed.losses == whole.losses
    assert resumed.evaluations == whole.evaluations
    names = ("whole", "cut")
    one, two = ((tmp_path / n / "model" / "adapter_model.safetensors").read_bytes() for n in names)
    assert one == two


def test_a_run_with_8_bit_states_that_was_stopped_goes_on_bit_by_bit(go, tmp_path):
    recipe = tiny_recipe(optimizer={"name": "adamw8bit", "implementation": "loop"})
    whole = go(recipe, "whole")
    with pytest.raises(RunFailed, match="interrupted after step 3 of 6"):
        go(recipe, "cut", progress=StopAfter(3))
    resumed = go(recipe, "cut")
    assert resumed.losses == whole.losses
    file = Path("model") / "model.safetensors"
    assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "cut" / file).read_bytes()


def test_a_log_line_beyond_the_checkpoint_is_cut(go, tmp_path):
    with pytest.raises(RunFailed):
        go(tiny_recipe(), progress=StopAfter(3))
    log = tmp_path / "run" / "log.jsonl"
    with log.open("a") as file:
        file.write('{"step": 4, "loss": 99.0, "watched": false}\n{"step": 5, "lo')
    run = go(tiny_recipe())
    assert [step for step, _ in run.losses] == [1, 2, 3, 4, 5, 6]
    assert all(loss < 99 for _, loss in run.losses)


def test_a_folder_of_another_recipe_is_refused_with_both_digests(go, tmp_path):
    go(tiny_recipe())
    other = tiny_recipe(seed=1)
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    with pytest.raises(InvalidRequest) as refused:
        go(other)
    assert tiny_recipe().digest in refused.value.message
    assert other.digest in refused.value.message
    assert "another run folder" in refused.value.hint
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before


def test_other_data_in_the_same_folder_is_refused(go, request_, cache, tmp_path):
    go(tiny_recipe())
    other = write_text(tmp_path / "other", 4)
    changed = replace(request_, task=replace(request_.task, data=str(other)))
    # the tokenizer of a model without one is trained on the data, so it changes with it
    with pytest.raises(InvalidRequest, match=r"is of data .* but this run is of data"):
        train(tiny_recipe(), changed, tmp_path / "run", cache=cache)


def test_two_processes_cannot_train_in_one_folder(go):
    failures = []

    class Second(StopAfter):
        def show(self, moment):
            if moment.step == 1:
                thread = threading.Thread(target=self.intrude)
                thread.start()
                thread.join()

        def intrude(self):
            try:
                go(tiny_recipe())
            except InvalidRequest as error:
                failures.append(error.message)

    go(tiny_recipe(), progress=Second(1))
    assert len(failures) == 1
    assert "another process is training" in failures[0]


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(go, tmp_path):
    recipe = tiny_recipe(optimizer={"learning_rate": 1e30, "clip_norm": 0.0, "warmup_steps": 0})
    with pytest.raises(RunFailed, match=r"the loss of step \d+ is (nan|inf)") as failure:
        go(recipe)
    assert "learning_rate" in failure.value.hint
    assert not (tmp_path / "run" / "model").exists()


def certificate(recipe, peak):
    entry = Entry(
        kind=Kind.PARAMETERS, phase=Phase.BACKWARD, owner="model", nbytes=peak, because="a test"
    )
    memory = Memory(
        peak_allocated=peak, peak_reserved=None, device_total=None, usable=None,
        verdict="fits", because="", peak_phase="backward", entries=(entry,),
    )  # fmt: skip
    return Certificate(
        recipe_digest=recipe.digest, recipe=recipe, device="cpu-x86", memory=memory,
        phases={"backward": peak}, ledger=Ledger(entries=(entry,)), at_peak=(), bounds=(),
        seconds=0.0, versions={},
    )  # fmt: skip


def test_a_certificate_of_another_recipe_is_refused(go, tmp_path):
    with pytest.raises(InvalidRequest, match="is of recipe"):
        go(tiny_recipe(), certificate=certificate(tiny_recipe(seed=9), 1000))
    assert not (tmp_path / "run").exists()


def test_a_recipe_without_steps_is_refused(go):
    with pytest.raises(InvalidRequest, match="no steps"):
        go(tiny_recipe(steps=0))


def test_a_model_with_too_small_a_vocabulary_is_refused(request_, cache, tmp_path):
    data = read_data(request_, tiny_recipe().model, cache)
    small = ModelReference(name="small", source="", config={**CONFIG, "vocab_size": 260})
    asked = replace(request_, tokenizer=data.tokenizer.source)
    with pytest.raises(InvalidRequest, match=r"300 tokens but `small` has a vocabulary of 260"):
        train(tiny_recipe(model=small), asked, tmp_path / "run", cache=cache)


def test_epochs_become_steps_that_show_every_token(request_, cache):
    task = replace(request_.task, epochs=2.0, global_batch=4)
    found = find_lengths(replace(request_, task=task), tiny_recipe().model, 32, cache)
    tokens = len(read_data(request_, tiny_recipe().model, cache).training.tokens)
    assert found.task.steps == -(-2 * tokens // (4 * 32))
    assert found.task.epochs is None
    stated = replace(request_, task=replace(task, epochs=None, steps=7))
    assert find_lengths(stated, tiny_recipe().model, 32, cache) == stated


HALF = 10  # of 20 steps, wsd falls in the last half
SCHEDULES = {
    "cosine": ({}, get_cosine_schedule_with_warmup),
    "linear": ({}, get_linear_schedule_with_warmup),
    "constant": ({}, lambda o, w, _: get_constant_schedule_with_warmup(o, w)),
    "cosine to a tenth": (
        {"floor": 0.1},
        lambda o, w, n: get_cosine_with_min_lr_schedule_with_warmup(o, w, n, min_lr_rate=0.1),
    ),
    "linear to a tenth": (
        {"floor": 0.1},
        lambda o, w, n: get_polynomial_decay_schedule_with_warmup(o, w, n, lr_end=0.1),
    ),
    "polynomial": (
        {"floor": 0.2, "power": 2.0},
        lambda o, w, n: get_polynomial_decay_schedule_with_warmup(o, w, n, lr_end=0.2, power=2.0),
    ),
    "inverse-sqrt": ({}, lambda o, w, _: get_inverse_sqrt_schedule(o, w)),
    "wsd": (
        {"floor": 0.05, "decay_ratio": 0.5},
        lambda o, w, n: get_wsd_schedule(
            o, w, HALF, n, decay_type="linear", min_lr_ratio=0.05
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("case", SCHEDULES)
def test_the_schedule_is_transformers_own(case, warmup):
    changes, make = SCHEDULES[case]
    settings = replace(
        OPTIMIZER,
        schedule=case.partition(" ")[0],
        warmup_steps=warmup,
        learning_rate=1.0,
        **changes,
    )
    rates = [learning_rate(settings, step, 20) for step in range(20)]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = make(optimizer, warmup, 20)
    theirs = []
    for _ in range(20):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(theirs)


@pytest.mark.parametrize(("ratio", "steps"), [(0.03, 1000), (0.1, 25), (0.0, 10), (0.5, 1)])
def test_a_share_of_warmup_is_the_trainers(ratio, steps, tmp_path):
    settings = replace(OPTIMIZER, warmup_steps=0, warmup_ratio=ratio)
    theirs = TrainingArguments(output_dir=str(tmp_path), warmup_steps=ratio, use_cpu=True)
    assert settings.warmup(steps) == theirs.get_warmup_steps(steps)


MOMENT = Moment(
    step=40, loss=5.12345, learning_rate=1.2e-3, seconds=1.5, tokens_per_second=12345.6,
    memory=812 * 2**20, evaluation_loss=None,
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_lines_fit_the_terminal_and_say_what_was_promised(width):
    facts = Facts(steps=120, done=0, predicted_step_seconds=1.4, certified_peak=2**30)
    lines = live_lines(facts, MOMENT, [1.5], width)
    assert all(len(line) <= width for line in lines)
    if width >= 80:
        assert "40/120  2 min 0 s left (predicted 1 min 52 s)" in lines[0]
        assert "loss 5.1235" in lines[1]
        assert "12.3K tokens/s" in lines[1]
        assert "812.0 MiB of 1.0 GiB certified" in lines[1]


@pytest.mark.parametrize("steps", [100, 210])  # a twentieth of 210 is 11 steps, not 10
def test_progress_on_a_pipe_is_a_few_plain_lines(steps):
    stream = io.StringIO()
    progress = open_progress(stream)
    assert isinstance(progress, Plain)
    progress.begin(Facts(steps=steps, done=0, predicted_step_seconds=None, certified_peak=None))
    for step in range(1, steps + 1):
        progress.show(MOMENT._replace(step=step))
    progress.end()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 21
    assert lines[0].startswith(f"step 1/{steps}  loss 5.1235")
    assert lines[-1].endswith("done")
    assert "\x1b" not in stream.getvalue()


def test_what_is_left_of_a_run_is_read_off_its_last_twenty_steps():
    stream = io.StringIO()
    progress = open_progress(stream)
    facts = Facts(steps=1000, done=0, predicted_step_seconds=None, certified_peak=None)
    progress.begin(facts)
    times = [3.0] * 40 + [1.0] * 10  # the median of the last 20 is 2, of the last 21 it is 3
    for step, seconds in enumerate(times, start=1):
        progress.show(MOMENT._replace(step=step, seconds=seconds))
    last = stream.getvalue().splitlines()[-1]
    moment = MOMENT._replace(step=50, seconds=1.0)
    assert last.endswith(remaining(facts, moment, [2.0]))
    assert not last.endswith(remaining(facts, moment, [3.0]))


def test_progress_on_a_terminal_redraws_two_lines(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    progress = open_progress(stream)
    progress.begin(Facts(steps=120, done=0, predicted_step_seconds=1.4, certified_peak=2**30))
    progress.note("3 binary files passed over")
    progress.show(MOMENT)
    progress.show(MOMENT._replace(step=41, evaluation_loss=4.5))
    progress.end()
    shown = stream.getvalue()
    assert "3 binary files passed over" in shown
    assert "held-out 4.5000" in shown
    assert "\x1b[3" not in shown, "no colour"


def test_a_run_on_a_full_disk_fails_clearly_and_goes_on_later(go, monkeypatch, tmp_path):
    import resource

    recipe = tiny_recipe()
    whole = go(recipe, "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "whole" / "model" / "model.safetensors").stat().st_size
    with pytest.raises(RunFailed):
        go(recipe, progress=StopAfter(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        with pytest.raises(RunFailed, match="could not save the checkpoint of step 4"):
            go(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert go(recipe).losses == whole.losses


def test_a_checkpoint_without_its_run_json_is_still_checked(go, tmp_path, request_, cache):
    recipe, other = tiny_recipe(), tiny_recipe(seed=5)
    data = read_data(request_, recipe.model, cache)
    model = build_model(other, "cpu")
    fill_weights(model, other)
    built = Built(other, model, build_optimizer(other, model))
    save_checkpoint(tmp_path / "run", 2, built, data.training.digest)
    with pytest.raises(InvalidRequest, match=other.digest):
        go(recipe)
