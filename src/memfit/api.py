"""The verbs: the command line, Python and the page call these, and nothing else.

    plan(request) -> Plan            predict(request) -> Plan        certify(plan) -> Certificate
    train(request, folder) -> Run    measure(request) -> Run         report(folder) -> Report

Torch is imported only by the verbs that need it, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from msgspec import structs

from memfit import catalog, families
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import installed_versions
from memfit.files.run_folder import find_plan as find_plan  # the command line calls the api only
from memfit.files.run_folder import is_plan as is_plan
from memfit.files.run_folder import read_plan as read_plan
from memfit.files.run_folder import state as state
from memfit.plan.request import problem as problems
from memfit.plan.request.problem import find_device as find_device
from memfit.plan.search import search
from memfit.records import from_data, write_atomically, write_json
from memfit.records.hardware import Device
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.records.results import Certificate, Diff, Plan, Report, Run, WayOut
from memfit.workflows import look_up
from memfit.workflows.load_inputs import change as change
from memfit.workflows.load_inputs import place_devices
from memfit.workflows.load_inputs import put as put
from memfit.workflows.load_inputs import put_all as put_all
from memfit.workflows.load_inputs import read as read
from memfit.workflows.load_inputs import read_certificate as read_certificate
from memfit.workflows.load_inputs import read_data as read_data
from memfit.workflows.look_up import time_exchanges as time_exchanges

if TYPE_CHECKING:
    from memfit.accuracy.corpus import append_row as append_row
    from memfit.accuracy.corpus import submit_row as submit_row
    from memfit.accuracy.memory_errors import Accuracy
    from memfit.accuracy.time_errors import TimeAccuracy
    from memfit.certify import with_full_traces as with_full_traces
    from memfit.certify import without_cache as without_cache
    from memfit.check import Checked
    from memfit.check.answers import judge as judge
    from memfit.check.out_of_memory import Message
    from memfit.check.out_of_memory import diagnose as diagnose
    from memfit.check.smaller_changes import Change
    from memfit.check.smaller_changes import make_patch as make_patch
    from memfit.core.number_formats import formats as formats
    from memfit.export import export as export
    from memfit.export import write_export as write_export
    from memfit.plan.budget.budget import Budget
    from memfit.plan.budget.offers import Offers
    from memfit.plan.questions.compare import Comparison
    from memfit.plan.questions.rules import Rule
    from memfit.plan.questions.solve import Solved
    from memfit.plan.questions.why_not import WhyNot
    from memfit.plan.request.as_stated import read_unplanned as read_unplanned
    from memfit.report.join import join as join
    from memfit.report.pipeline_strip import Strip
    from memfit.report.runs import list_runs as list_runs
    from memfit.report.runs import read_run as read_run
    from memfit.report.step_memory import StepMemory
    from memfit.report.step_trace import write_step_trace as write_step_trace
    from memfit.report.timeline_files import check_writable as check_writable
    from memfit.train.checkpoint.merge import merge as merge
    from memfit.train.run.progress import Progress
    from memfit.train.run.progress import open_progress as open_progress
    from memfit.workflows.certify_request import certify as certify
    from memfit.workflows.certify_request import find_levers as find_levers
    from memfit.workflows.certify_request import find_nearest as find_nearest
    from memfit.workflows.doctor import Diagnosis
    from memfit.workflows.elastic import Elastic as Elastic
    from memfit.workflows.elastic import read_elastic as read_elastic
    from memfit.workflows.launch_ranks import is_first_rank as is_first_rank
    from memfit.workflows.prepare_run import find_machine as find_machine
    from memfit.workflows.prepare_run import prepare as prepare

LIBRARIES = (
    "memfit", "torch", "transformers", "peft", "safetensors", "tokenizers", "datasets", "numpy",
)  # fmt: skip


# what other verbs than `plan` need, imported at its first use; each says at home what it does
_LATER = {
    "append_row": "memfit.accuracy.corpus.append_row",
    "submit_row": "memfit.accuracy.corpus.submit_row",
    "with_full_traces": "memfit.certify.with_full_traces",
    "without_cache": "memfit.certify.without_cache",
    "judge": "memfit.check.answers.judge",
    "diagnose": "memfit.check.out_of_memory.diagnose",
    "make_patch": "memfit.check.smaller_changes.make_patch",
    "formats": "memfit.core.number_formats.formats",
    "export": "memfit.export.export",
    "write_export": "memfit.export.write_export",
    "read_unplanned": "memfit.plan.request.as_stated.read_unplanned",
    "join": "memfit.report.join.join",
    "list_runs": "memfit.report.runs.list_runs",
    "read_run": "memfit.report.runs.read_run",
    "write_step_trace": "memfit.report.step_trace.write_step_trace",
    "check_writable": "memfit.report.timeline_files.check_writable",
    "merge": "memfit.train.checkpoint.merge.merge",
    "open_progress": "memfit.train.run.progress.open_progress",
    "certify": "memfit.workflows.certify_request.certify",
    "find_levers": "memfit.workflows.certify_request.find_levers",
    "find_nearest": "memfit.workflows.certify_request.find_nearest",
    "Elastic": "memfit.workflows.elastic.Elastic",
    "read_elastic": "memfit.workflows.elastic.read_elastic",
    "is_first_rank": "memfit.workflows.launch_ranks.is_first_rank",
    "find_machine": "memfit.workflows.prepare_run.find_machine",
    "prepare": "memfit.workflows.prepare_run.prepare",
}


def __getattr__(name: str) -> Any:
    """A function of a verb that a plan does not need."""
    if name in _LATER:
        module, _, function = _LATER[name].rpartition(".")
        return getattr(import_module(module), function)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")


models, devices, networks = look_up.find_models, look_up.find_devices, look_up.find_networks


def plan(request: Request, *, device: Device | None = None, levers: bool = True) -> Plan:
    """Decide every `auto`. The verdict is `does_not_fit` when nothing meets the limits.

    levers: False leaves out what each knob turned would save and, of a plan that does not fit, what
    would make it fit: both are further plans, which take most of the time.

    device: stands for the request's own, such as one that was measured.
    """
    found = search.search(problems.read_problem(request, device=device), levers=levers)
    if not levers or device is not None or found.memory.verdict in ("fits", "unproven"):
        return found
    from memfit.plan.questions.ways_out import find_ways_out

    return structs.replace(found, ways_out=find_ways_out(request, found, plan_fitting))


def plan_briefly(request: Request) -> Plan:
    """As `plan`, with what a short screen shows: the levers that matter most, where it shows any,
    and of what was considered the chosen recipe.
    """
    problem = problems.read_problem(request)
    found = search.search_briefly(problem)
    verdict = found.plan.memory.verdict
    ways: tuple[WayOut, ...] = ()
    if verdict in ("does_not_fit", "at_risk"):
        from memfit.plan.questions.ways_out import find_ways_out

        ways = find_ways_out(request, found.plan, plan_fitting)
    levers = () if ways or verdict == "does_not_fit" else search.find_shown_levers(problem, found)
    return structs.replace(found.plan, levers=levers, ways_out=ways)


def plan_alone(request: Request) -> Plan:
    """As `plan`, without levers and ways out."""
    return search.search(problems.read_problem(request), levers=False)


def plan_roughly(request: Request) -> Plan:
    """As `plan_alone`; what fits, or does not, by far is not replayed: its bytes are a range."""
    problem = structs.replace(problems.read_problem(request), exact=False)
    return search.search(problem, levers=False)


def plan_fitting(request: Request) -> Plan | None:
    """As `plan_alone`; None where nothing fits, without a look for the nearest miss."""
    return search.find_fitting(problems.read_problem(request))


def compare(request: Request, devices: str, objective: str = "fastest") -> Comparison:
    """The best plan on each offer, `h100-sxm:8,a100-sxm-80:64`, and which offer is the best.

    Raises InvalidRequest for what is no offer or no objective; an offer without a plan is a row.
    """
    from memfit.plan.budget.offers import read_offers
    from memfit.plan.questions import compare as comparing

    known = get_args(comparing.Objective)
    if objective not in known:
        raise InvalidRequest(f"`{objective}` is no objective", hint=f"one of {', '.join(known)}")
    offers = read_offers(devices)
    return comparing.compare(request, offers, cast(comparing.Objective, objective), plan_alone)


def solve(field: str, request: Request) -> Solved:
    """The most of `field` that fits, see `memfit.plan.questions.solve`."""
    from memfit.plan.questions import solve as solving

    return solving.solve(field, request, plan_roughly, plan_alone, plan)


def why_not(request: Request, changes: Mapping[str, Any]) -> WhyNot:
    """Why a request with these dotted keys set was not chosen."""
    from memfit.plan.questions import why_not as judging

    return judging.why_not(request, change(request, changes), changes, plan_alone)


def predict(request: Request) -> Plan:
    """Memory and time of one fully stated configuration; no search, no levers.

    Of another framework's step (`framework:`) too, whose defaults stand for what is left open.
    """
    return search.predict_request(request)


def predict_with_levers(request: Request) -> Plan:
    """As `predict`, with what each knob turned would save or cost (of memfit's own step)."""
    return search.predict(problems.read_problem(request), levers=True)


def refuse_ranks(request: Request) -> None:
    """Raise InvalidRequest for what only one process, and only memfit's own, can do."""
    problems.check_own_step(request.framework)
    if request.ranks > 1:
        raise InvalidRequest(
            f"the request is for {request.ranks} devices, and `memfit measure` runs on one",
            hint="`memfit train` runs on many; for one device, leave `parallel`,"
            " `hardware.count` and `hardware.nodes` out",
        )


def add_tracker(request: Request, name: str) -> Request:
    """Return the request with one more of `run.trackers`, where it has not that one already."""
    trackers = tuple(dict.fromkeys((*request.run.trackers, name)))
    return structs.replace(request, run=structs.replace(request.run, trackers=trackers))


def train(
    request: Request,
    folder: Path,
    *,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
    override: bool = False,
    continues: bool = False,
    elastic: Elastic | None = None,
    alone: bool = False,
) -> Run:
    """Plan and certify where that has not been done, then run exactly the certified recipe.

    Of a request for many ranks this process starts them, or is one where a launcher has. The same
    call resumes from the newest complete checkpoint. override: also where the certificate says that
    it does not fit. continues: the folder's run goes on beyond its end, with more steps or another
    schedule. elastic: what happens when a rank that this process started is lost. alone: this
    process does nothing else, so packages that no step calls need not be imported. Raises
    RunFailed (with what was saved intact), DoesNotFit, NotCertified, InvalidRequest.
    """
    from memfit.workflows import elastic as regaining
    from memfit.workflows import launch_ranks
    from memfit.workflows.prepare_child import prepare_apart

    problems.check_own_step(request.framework)
    if not request.task.data:
        raise InvalidRequest("no training data is named", hint="set `task.data`, a file or folder")
    if request.ranks > 1:
        return launch_ranks.train_ranks(
            request, folder, progress=progress, say=say, override=override,
            policy=elastic or regaining.Elastic(), continues=continues,
        )  # fmt: skip
    prepared = prepare_apart(request, folder, say=say, override=override, continues=continues)
    if alone:
        launch_ranks.import_for_run(prepared.plan.recipe)
    from memfit.train.run import loop

    return loop.train(
        prepared.plan.recipe,
        prepared.request,
        folder,
        certificate=prepared.certificate,
        predicted_seconds=prepared.plan.time.step_seconds,
        progress=progress,
        override=override,
    )


def report(folder: Path) -> Report:
    """Join the files of a run folder; raises InvalidRequest when there is no plan."""
    from memfit.report import join as reporting

    return reporting.read_report(folder)


def versions() -> dict[str, str]:
    """memfit's own version and those of the libraries a step depends on, where installed."""
    return installed_versions(LIBRARIES)


def write_plan(plan: Plan, folder: Path) -> None:
    """plan.json of a run folder."""
    write_json(folder / "plan.json", plan)


def write_certificate(certificate: Certificate, folder: Path) -> None:
    """certificate.json of a run folder."""
    write_json(folder / "certificate.json", certificate)


def diff(a: str, b: str, *, say: Callable[[str], None] = lambda _: None) -> Diff:
    """Two certificates side by side; each a certificate.json, run folder, plan.json or request."""
    from memfit.report import difference

    first = difference.find_certificate(a, say)
    return difference.compare(first, difference.find_certificate(b, say), names=(a, b))


def export_targets() -> list[str]:
    """Names of the tools that a plan can be written for."""
    from memfit.export.target import exports

    return exports.names()


def check(files: Sequence[Path], data: dict[str, Any], config: str = "") -> tuple[Checked, Plan]:
    """Configurations of other tools as a request, and its prediction; see `memfit.check`.

    data: what the files do not say, such as `hardware`; config: which of the configurations that a
    Python file makes. Raises InvalidRequest naming the key.
    """
    from memfit.check import answers

    return answers.answer_files(files, dict(place_devices(data)), predict, config)


def find_changes(
    files: Sequence[Path],
    data: dict[str, Any],
    plan: Plan,
    config: str = "",
    left_out: Mapping[str, str] | None = None,
) -> tuple[Change, ...]:
    """The smallest changes to other tools' files with which they fit; see `memfit.check`.

    plan: what `check` answered of the same files, data and config; left_out: what it left out.
    """
    from memfit import check as checking

    return checking.find_changes(files, dict(place_devices(data)), plan, predict, config, left_out)


def read_out_of_memory(log: Path) -> Message:
    """The CUDA out-of-memory message of a log; InvalidRequest where there is none."""
    from memfit.check import out_of_memory

    return out_of_memory.read_message(log)


def write_timeline(recording: Path, certificate: Certificate, folder: Path) -> list[Path]:
    """timeline.html, timeline.trace.json and, of a GPU, timeline.snapshot.pickle of a run folder.

    recording: the file that `certify(tape=…)` left.
    """
    from memfit.certify.evidence.recording import read_recording
    from memfit.report import timeline_files

    return timeline_files.write_timeline(read_recording(recording), certificate, folder)


def write_report(folder: Path) -> Report:
    """Join a run folder's files and write report.json and report.html into it."""
    from memfit.report.page import render_page

    made = report(folder)
    write_json(folder / "report.json", made)
    write_atomically(folder / "report.html", render_page(made, folder=str(folder)).encode())
    return made


PIECES = 20_000  # of a pipeline that a page draws


# what the rules that depend on a batch are held against
RULES_PEAK = (
    "peaks are of Hugging Face's Trainer: full AdamW training in fp32, nothing recomputed, one row"
    " of the model's own length in a micro-batch, gradients accumulated over two"
)


def rules(model: str) -> tuple[Rule, ...]:
    """Rules of thumb beside exact accounting, for any model that a request can name."""
    from msgspec.structs import replace

    from memfit.accuracy import folklore
    from memfit.plan.questions import rules as thumb

    stated = {
        "model": model, "framework": "hf-trainer", "weights": "random", "method": "full",
        "precision": "fp32", "recompute": "none", "loss": "plain", "micro_batch": 1,
        "optimizer": {"name": "adamw"}, "task": {"global_batch": 2},
        "hardware": {"device": "h100-sxm"},
    }  # fmt: skip
    request = from_data(stated, Request, source="the rules")
    plan = search.predict_request(request)
    peak = plan.memory.peak_allocated
    judged = folklore.read_judged()
    return tuple(
        replace(rule, measured=folklore.say(judged[rule.name])) if rule.name in judged else rule
        for rule in thumb.rules(families.read_model(plan.recipe.model), predicted_peak=peak)
    )


def accuracy(rows: Sequence[Path] = (), ways: Sequence[str] = ()) -> Accuracy:
    """Every measured run of these files, or of memfit's own corpus, predicted today and compared.

    ways: the fields that will be grouped by; raises InvalidRequest for one that is none.
    """
    from memfit.accuracy import corpus
    from memfit.accuracy import memory_errors as judging

    _check_ways(ways, judging.WAYS)
    return judging.compare(corpus.read_corpus(rows), corpus.read_refused(rows))


def accuracy_of_times(rows: Sequence[Path] = (), ways: Sequence[str] = ()) -> TimeAccuracy:
    """The same of every row that says how long a step took."""
    from memfit.accuracy import corpus
    from memfit.accuracy import time_errors as judging

    _check_ways(ways, judging.WAYS)
    return judging.compare_times(corpus.read_corpus(rows), corpus.read_refused(rows))


def _check_ways(ways: Sequence[str], known: Sequence[str]) -> None:
    for way in ways:
        if way not in known:
            raise InvalidRequest(
                f"rows cannot be grouped by `{way}`", hint=f"by one of {', '.join(known)}"
            )


def budget(**known: Any) -> Budget:
    """Solve a budget from texts with units; see `memfit.plan.budget.budget.read_budget`."""
    from memfit.plan.budget import budget as budgets

    return budgets.solve_budget(budgets.read_budget(**known))


def budget_offers(**known: Any) -> Offers:
    """What money and time buy on several offers; see `plan.budget.offers.read_offers_request`."""
    from memfit.plan.budget import offers

    return offers.compare_offers(offers.read_offers_request(**known))


def schema(of: str = "request") -> dict[str, Any]:
    """JSON Schema of request.yaml, or of a `row` of the corpus of measured runs."""
    from memfit.accuracy import corpus
    from memfit.files import request_file

    return corpus.schema() if of == "row" else request_file.schema()


def init(path: Path) -> Path:
    """Write a commented request.yaml and the schema beside it; never over an existing file."""
    from memfit.files import request_file

    return request_file.write_template(path)


def doctor() -> Diagnosis:
    """Versions, this machine, its accelerators and caches."""
    from memfit.workflows import doctor as doctors

    return doctors.diagnose(versions())


def supported_families() -> list[str]:
    """Names of the model families that can be planned and trained."""
    return families.families.names()


def supported_frameworks() -> list[str]:
    """Names of the frameworks whose steps can be planned, memfit's own first."""
    from memfit.plan.frameworks import frameworks

    return sorted(frameworks.names(), key=lambda name: (not frameworks.find(name).runs, name))


def draw_pipeline(plan: Plan) -> Strip | None:
    """The pieces of the plan's pipeline in predicted seconds; None without a pipeline."""
    from memfit.report import pipeline_strip

    return pipeline_strip.draw_strip(plan, PIECES)


def draw_step(
    request: Request, *, rank: int | None = None, on_phase: Callable[[str], None] = lambda _: None
) -> StepMemory:
    """Certify what a request plans, with its memory over the events of a step.

    rank: of many devices; None takes the fullest. on_phase: called with what begins.
    Raises NotCertified, and InvalidRequest for another framework's step.
    """
    from memfit.report import step_memory

    return step_memory.draw_step(request, rank, plan, on_phase)


def calibrate(
    device: str = "auto",
    *,
    row: str = "",
    quick: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Device:
    """Measure this machine's device and write its row of the user's own devices.toml.

    row: its id; without one the catalogue's row of that device, whose figures it replaces.
    """
    from memfit.workflows import calibrate_device

    return calibrate_device.calibrate(device, row=row, quick=quick, say=say)


def measure(recipe: Recipe, *, steps: int = 3) -> Run:
    """A few real steps of a recipe on this machine, on random tokens and weights."""
    from memfit.train.measure import counters as measuring

    found = measuring.measure(recipe, catalog.find_device(recipe.device), steps)
    return Run(
        recipe_digest=recipe.digest,
        recipe=recipe,
        measurements=found.measurements,
        phases=found.phases,
        ledger=found.ledger,
        losses=(),
        evaluations=(),
        steps_done=steps,
        finished=True,
        environment=found.environment,
    )


def generate(
    folder: Path, prompt: str, *, tokens: int = 100, temperature: float = 0.8, seed: int = 0,
    top_k: int = 50, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0,
    stop_words: tuple[str, ...] = (), chat: bool = False,
) -> str:  # fmt: skip
    """What the model of a run says after a prompt, or to a user's message (chat); a run folder
    keeps it for its report."""
    from memfit.train.run import generate as generation

    made = generation.generate(
        folder, prompt, max_new_tokens=tokens, temperature=temperature, seed=seed, top_k=top_k,
        top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, stop_words=stop_words,
        chat=chat,
    )  # fmt: skip
    if (folder / "plan.json").exists():
        between = "\n" if chat else ""
        write_atomically(folder / "sample.txt", f"{prompt}{between}{made}".encode())
        write_report(folder)
    return made
