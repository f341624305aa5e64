"""What a user does from the first question to the job on a cluster, typed as one types it.

A cell is a catalogue model, where, how and with whose step. It is planned, predicted from its own
plan, certified, written for every tool that takes it, read back by `check`, and launched; what the
answers say of one recipe must agree. Two steps are trained of a tiny model of the same family, by
the same method, and reported.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.certify import in_this_process
from memfit.cli.neighbours import LAUNCHERS
from memfit.export.target import exports, find_target
from typed_commands import quick

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "certify"))

from tiny_steps import CONFIGS

QLORA = {"method": "lora", "base_format": "nf4"}
DPO = {"method": "lora", "task.objective": "dpo", "task.sequence_length": 512}
H100, L40S = {"hardware.device": "h100-sxm"}, {"hardware.device": "l40s"}
SHARE = {
    "llama": ("smollm2-135m", H100, {"method": "full"}),
    "gemma3_text": ("gemma-3-1b-it", L40S, {"framework": "trl", "method": "lora"}),
    "qwen2": ("qwen2.5-0.5b", H100, DPO),
    "mistral": (
        "mistral-7b-v0.3", H100 | {"hardware.count": 8},
        {"framework": "deepspeed", "method": "full"},
    ),
    "phi3": ("phi-3-mini-4k-instruct", H100, {"framework": "hf-trainer", **QLORA}),
}  # fmt: skip

# whose frameworks' files tests/export checks in every plan
EXPORTED = ("gemma3_text", "mistral")


def typed(verb, *words, expect=(0,)):
    """What a command prints; anything but these exit codes is a failure of the test."""
    code, out, err = quick(verb, *words)
    assert code in expect, (verb, words, code, err)
    return out, err


def answer(verb, *words, expect=(0,)):
    """The JSON of a command."""
    return json.loads(typed(verb, *words, "--json", "--quiet", expect=expect)[0])


def options(keys):
    """Keys as one types them."""
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def plan(model, where, how, folder):
    """`plan`, and `predict` of what it wrote: the same recipe, bytes and seconds."""
    keys = {"task.sequence_length": 1024, **where, **how}
    planned = answer("plan", model, *options(keys), "--folder", folder)
    again = answer("predict", folder)
    assert again["recipe_digest"] == planned["recipe_digest"]
    assert again["memory"]["verdict"] == planned["memory"]["verdict"]
    for key in ("peak_allocated", "peak_reserved", "device_total", "usable"):
        assert again["memory"][key] == planned["memory"][key], key
    assert again["time"]["step_seconds"] == planned["time"]["step_seconds"]
    return planned


def certify(planned, folder):
    """The certificate of a plan that fits does not refute it; others' steps have none."""
    if planned["recipe"]["framework"] != "memfit":
        _, err = typed("certify", folder, expect=(2,))
        assert "is another framework's step" in err
        assert "\nhint: " in err
        return
    with in_this_process():  # another one would import all libraries again
        proved = answer("certify", folder / "plan.json")
    assert proved["recipe_digest"] == planned["recipe_digest"]
    predicted, certified = planned["memory"], proved["memory"]
    assert certified["verdict"] == predicted["verdict"]
    assert certified["peak_allocated"] == pytest.approx(predicted["peak_allocated"], rel=0.01)
    assert certified["peak_reserved"] == pytest.approx(predicted["peak_reserved"], rel=0.03)


def export(targets, folder, place):
    """Written for each tool that takes it: `check` gives the verdict and the peak of the claim."""
    took = []
    for target in targets:
        out = place / target
        code, text, err = quick("export", folder, "--to", target, "--out", out, "--json")
        if code:
            assert code in (2, 3), (target, err)
            assert "\nhint: " in err, (target, err)
            continue
        took.append(target)
        made = json.loads(text)
        assert {path.name for path in out.rglob("*") if path.is_file()} == set(made["files"])
        check_scripts(out)
        assert bool(made["check"]) == find_target(target).reads_back
        if made["check"]:
            read_back(made, out)
    return took


def read_back(made, out):
    """The `check` that an export says to type next."""
    words = [out / word if word in made["files"] else word for word in made["check"][1:]]
    code, text, err = quick(*words, "--json")
    assert code in (0, 3), (words, code, err)
    memory = json.loads(text)["plan"]["memory"]
    assert memory["verdict"] == made["verdict"], words
    assert memory["peak_allocated"] == made["peak"]["peak_allocated"], words
    assert memory["device_total"] == made["peak"]["device_total"], words


def launch(planned, folder, on, out):
    """The job's files, and that a shell reads its script."""
    made = answer("launch", folder, "--on", on, "--out", out)
    if not made["changed"]:  # what another trainer's own file cannot say as it was planned
        assert made["recipe_digest"] == planned["recipe_digest"]
        assert made["verdict"] == planned["memory"]["verdict"]
    check_scripts(out)


def check_scripts(folder):
    for path in folder.rglob("*"):
        if path.suffix in (".sh", ".sbatch"):
            done = subprocess.run(["bash", "-n", path], check=False, capture_output=True, text=True)
            assert done.returncode == 0, (path.name, done.stderr)
        elif path.suffix == ".py":
            compile(path.read_text(), str(path), "exec")


def train(family, how, folder):
    """Two steps of a tiny model of the family, and its report: what was measured was certified."""
    request = folder / "request.yaml"
    request.write_text(json.dumps(make_request(family, how, folder)))
    home = folder / "tiny"
    with in_this_process():
        typed("train", request, "--folder", home, "--quiet")
    report = answer("report", home)
    found = {c["name"]: c for c in report["comparisons"]}["memory.peak_allocated"]
    assert found["measured"] == found["certified"]
    assert found["predicted"] == found["certified"]
    assert report["run"]["finished"]
    assert report["run"]["steps_done"] == 2
    return home


def make_request(family, how, folder):
    data = folder / "data.txt"
    data.write_text("The cat sat on a mat while the rain fell. " * 200)
    task = {"data": str(data), "sequence_length": 48, "steps": 2, "global_batch": 4}
    return {
        "model": {"name": f"tiny-{family}", **CONFIGS[family], "vocab_size": 512},
        "weights": "random", "hardware": {"device": "cpu"}, "limits": {"memory": "4 GiB"},
        "task": task, **{key: how[key] for key in ("method", "base_format") if key in how},
        **({"freeze": {"last_blocks": 2}} if how["method"] == "freeze" else {}),
    }  # fmt: skip


# of the other families: each with a place, and a way to train it
WIDE = {
    "qwen3": ("qwen3-0.6b", {"hardware.device": "rtx-4090"}, {"method": "lora"}),
    "bloom": ("bloom-560m", L40S, {"method": "lora"}),
    "gpt_neox": ("pythia-160m", {"hardware.device": "t4"}, QLORA),
    "opt": ("opt-125m", L40S, {"method": "full"}),
    "gpt2": ("gpt2", H100, {"method": "dora"}),
    "gemma": ("gemma-2b", H100, {"framework": "trl", "method": "full"}),
    "gemma2": ("gemma-2-2b", H100, {"method": "lora"}),
    "olmo2": ("olmo-2-1b", H100, {"method": "freeze", "freeze.last_blocks": 2}),
    "smollm3": ("smollm3-3b", H100, {"framework": "hf-trainer", "method": "lora"}),
    "stablelm": ("stablelm-2-1_6b", L40S, QLORA),
    "phi": ("phi-2", H100, {"framework": "deepspeed", "method": "lora"}),
    "granite": ("granite-3.1-2b-base", H100, DPO),
    "falcon": ("falcon-7b", H100 | {"hardware.count": 8}, {"method": "full"}),
    "mpt": ("mpt-7b", H100 | {"hardware.count": 2}, {"method": "lora"}),
    "qwen3_moe": ("qwen3-30b-a3b", H100 | {"hardware.count": 8}, {"method": "lora"}),
    "qwen2_moe": ("qwen1.5-moe-a2.7b", H100 | {"hardware.count": 8}, {"method": "full"}),
    "mixtral": (
        "mixtral-8x7b-v0.1", H100 | {"hardware.count": 8, "hardware.nodes": 2},
        {"framework": "megatron", "method": "full"},
    ),
    "llama": (
        "llama-3.1-8b", H100 | {"hardware.count": 8}, {"framework": "torchtitan", "method": "full"},
    ),
}  # fmt: skip
TARGETS = exports.names()  # a third each in `make test`: tests/export writes plans for all
CELLS = [
    *(
        pytest.param(
            family,
            cell,
            TARGETS[at % 3 :: 3],
            id=f"{family}-{cell[0]}",
            marks=[pytest.mark.wide] if family in EXPORTED else [],
        )
        for at, (family, cell) in enumerate(SHARE.items())
    ),
    *(
        pytest.param(family, cell, TARGETS, id=f"{family}-{cell[0]}", marks=pytest.mark.wide)
        for family, cell in WIDE.items()
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cell", "targets"), CELLS)
def test_a_journey_from_a_plan_to_a_job(family, cell, targets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, where, how = cell
    planned = plan(model, where, how, tmp_path / "first")
    certify(planned, tmp_path / "first")
    assert export(targets, tmp_path / "first", tmp_path / "tools")
    on = LAUNCHERS[len(model) % len(LAUNCHERS)]
    launch(planned, tmp_path / "first", on, tmp_path / "job")
    home = train(family, how, tmp_path)
    launch(json.loads((home / "plan.json").read_text()), home, on, tmp_path / "own")
