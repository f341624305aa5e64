"""Extensions of another package, found by its entry point: beside what they stand for here."""

import json
import subprocess
import sys
from importlib.metadata import distributions

import pytest

from memfit.core.registry import GROUP, may_have_plugins
from typed_commands import memfit, quick

PLUGIN = '''
"""An objective, an optimizer, a family, a reader of data and a callback of another package."""

import torch

from memfit.families import families, find_family
from memfit.objectives import LossType, Objective, objectives
from memfit.objectives.shared.pair_losses import hinge
from memfit.optimizers import OptimizerFamily, optimizers
from memfit.train.data.formats import formats
from memfit.train.habits.callbacks import callbacks


class Plain(OptimizerFamily):
    """Gradient descent: no state, and no tensor beside weight and gradient."""

    implementations = ("loop",)

    def state(self, local, settings):
        return ()

    def host_state(self, settings):
        return ()

    def step_temporaries(self, parameters, settings, counted="live"):
        return 0

    def update_alone(self, parameter, settings, meter):
        pass

    def moved(self, parameter, settings):
        return 3 * parameter.nbytes

    def build(self, parameters, settings, ends=frozenset()):
        return torch.optim.SGD(parameters, lr=settings.learning_rate, foreach=False)


class Renamed(type(find_family("llama"))):
    name = "renamed"


def read(path):
    for text in path.read_text().split("==")[1:]:
        prompt, chosen, rejected = text.strip().split("|")
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def note(row, folder):
    with (folder / "noted.txt").open("a") as file:
        file.write(f"{row['step']} {row['loss']}\\n")


def fail(row, folder):
    raise RuntimeError("nobody answers")


optimizers.register("plain")(Plain())
families.register("renamed")(Renamed())
formats.register("pairs")(read)
callbacks.register("note")(note)
callbacks.register("fail")(fail)
objectives.register("margin")(
    Objective(
        "margin", about="pairs of answers",
        loss_types={"margin": LossType(hinge, "a test")},
    )
)
'''
MODEL = {
    "name": "tiny", "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
STATED = {
    "model": MODEL, "weights": "random", "hardware": {"device": "cpu"}, "method": "full",
    "precision": "fp32", "recompute": "none", "loss": "plain", "micro_batch": 2,
    "attention": "flash", "limits": {"memory": "1 GiB"},
}  # fmt: skip
PAIRS = [("What is red?", " A rose.", " The sea."), ("What is wet?", " The sea.", " A rose.")] * 4


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder on Python's path with the package as pip leaves it: a module, and its metadata."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "other_package.py").write_text(PLUGIN)
    about = folder / "other_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[memfit.extensions]\nother = other_package\n")
    return folder


def run(folder, words, data, *, objective, optimizer, callbacks=(), path=""):
    task = {"objective": objective, "data": str(data), "sequence_length": 32, "global_batch": 4,
            "steps": 3}  # fmt: skip
    asked = STATED | {
        "task": task, "optimizer": {"name": optimizer, "learning_rate": 0.5},
        "run": {"callbacks": list(callbacks)}, "preference": {"beta": 2.0},
    }  # fmt: skip
    if not path:
        asked["optimizer"]["momentum"] = 0.0
        asked["preference"] |= {"loss_type": "hinge", "cross_entropy": 0.0}
    (folder / "request.yaml").write_text(json.dumps(asked))
    typed = ("train", "request.yaml", "--folder", words, "--quiet")
    if not path:
        code, _, told = quick(*typed)
        return code, told
    around = {"MEMFIT_CACHE": str(folder / "cache"), "PYTHONPATH": f"{SOURCE}:{path}"}
    done = memfit(*typed, cwd=folder, **around)
    return done.returncode, done.stderr


SOURCE = next(path for path in sys.path if path.endswith("src"))


@pytest.mark.slow
def test_a_run_of_another_packages_parts_is_that_of_memfits_own(
    installed, tmp_path, monkeypatch, certified_here
):
    """The plugin's parts do what memfit's `cpo`, `sgd` and JSONL do: the losses are the same, and
    what the run holds is what the certificate says of the plugin's optimizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    text = "".join(f"=={'|'.join(pair)}\n" for pair in PAIRS)
    (tmp_path / "data.pairs").write_text(text)
    keys = ("prompt", "chosen", "rejected")
    lines = [json.dumps(dict(zip(keys, pair, strict=True))) for pair in PAIRS]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    code, told = run(
        tmp_path, "theirs", "data.pairs", objective="margin", optimizer="plain",
        callbacks=["note", "fail"], path=installed,
    )  # fmt: skip
    assert code == 0, told
    code, told = run(tmp_path, "ours", "data.jsonl", objective="cpo", optimizer="sgd")
    assert code == 0, told
    found = {
        name: json.loads((tmp_path / name / "run.json").read_text()) for name in ("theirs", "ours")
    }
    assert found["theirs"]["losses"] == found["ours"]["losses"]
    noted = (tmp_path / "theirs" / "noted.txt").read_text().split("\n")
    assert noted[:-1] == [f"{step} {loss}" for step, loss in found["theirs"]["losses"]]
    (warning,) = found["theirs"]["warnings"]
    assert "`run.callbacks: fail` failed and is called no more" in warning
    certified = json.loads((tmp_path / "theirs" / "certificate.json").read_text())
    assert found["theirs"]["phases"] == {
        phase: nbytes for phase, nbytes in certified["phases"].items() if phase != "generate"
    }


def test_a_family_of_another_package_is_planned_as_its_model_for_model_twin(installed, tmp_path):
    program = (
        "import json, sys; from memfit import api; from memfit.records import from_data;"
        "from memfit.records.request import Request;"
        "ask = lambda kind: api.plan(from_data(json.loads(sys.argv[1]) | {'model':"
        " json.loads(sys.argv[2]) | {'model_type': kind}}, Request, source='a test'));"
        "plans = [ask(kind) for kind in ('renamed', 'llama')];"
        "print([plan.memory.peak_allocated for plan in plans])"
    )
    asked = STATED | {
        "task": {"sequence_length": 32, "global_batch": 4, "steps": 3},
        "optimizer": {"name": "adamw"},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked), json.dumps(MODEL)],
        capture_output=True, text=True, env={"PYTHONPATH": f"{SOURCE}:{installed}", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first == second > 0


@pytest.mark.parametrize(
    ("key", "value"), [("task.objective", "margin"), ("optimizer.name", "plain")]
)
def test_without_the_package_its_names_are_unknown(key, value):
    code, _, told = quick("plan", "gpt2", "--set", f"{key}={value}")
    assert code == 2
    assert f"`{value}`" in told
    assert "hint:" in told


def test_plugins_are_looked_for_where_importlib_would_find_them(tmp_path):
    """Reading the entry points beside packages finds what importing `importlib.metadata` does."""
    folder, archive = tmp_path / "here", tmp_path / "packed.zip"
    for name in ("one-1.0.dist-info", "two-1.0.egg-info", "other"):
        (folder / name).mkdir(parents=True)
    (folder / "three-1.0.egg-info").write_text("a file, as distutils wrote it")
    (folder / "one-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\na = b:c\n")
    (folder / "other" / "entry_points.txt").write_text("[memfit.extensions]\na = b\n")
    missing = str(tmp_path / "missing")
    assert not may_have_plugins([str(folder), missing])
    own = folder / "two-1.0.egg-info" / "entry_points.txt"
    own.write_text("[memfit.extensions]\na = b\n")
    found = [e for d in distributions(path=[str(folder)]) for e in d.entry_points]
    assert [e.name for e in found if e.group == GROUP] == ["a"]
    assert may_have_plugins([missing, str(folder)])
    own.unlink()
    archive.write_bytes(b"")
    assert may_have_plugins([str(archive)])  # what is inside is not looked at here
