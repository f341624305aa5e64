"""Nobody trains under a certificate that does not hold, or that says no, without saying so."""

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from memfit import api
from memfit.certify import in_this_process
from memfit.cli.app import app, run
from memfit.core.errors import DoesNotFit, InvalidRequest, NotCertified
from memfit.records import from_data, read_json, write_json
from memfit.records.request import Request
from memfit.records.results import Certificate, Plan, Run
from memfit.records.shapes import RowBounds
from memfit.train.run import loop
from memfit.workflows import prepare_run

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
TEXT = "a few words of text that a tokenizer can learn from\n" * 40


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "data.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(monkeypatch, cache):
    monkeypatch.setenv("MEMFIT_CACHE", str(cache))


def ask(data, **limits):
    stated = {
        "model": CONFIG, "weights": "random", "precision": "fp32", "limits": limits,
        "hardware": {"device": "cpu"}, "method": "full", "micro_batch": 2, "recompute": "none",
        "loss": "plain", "attention": "flash", "optimizer": {"name": "adamw"},
        "task": {"data": str(data), "sequence_length": 32, "global_batch": 2, "steps": 2},
    }  # fmt: skip
    return from_data(stated, Request, source="the test")


@pytest.fixture(scope="module")
def planned(data, cache, tmp_path_factory):
    """A plan and a certificate that hold, made once."""
    with pytest.MonkeyPatch.context() as patch, in_this_process():
        patch.setenv("MEMFIT_CACHE", str(cache))
        folder = tmp_path_factory.mktemp("planned")
        api.prepare(ask(data, memory="1 GiB"), folder)
    return folder


@pytest.fixture
def folder(planned, tmp_path):
    """A run folder that has been planned and certified, and has not begun."""
    made = tmp_path / "run"
    made.mkdir()
    for name in ("request.json", "plan.json", "certificate.json"):
        (made / name).write_bytes((planned / name).read_bytes())
    return made


@pytest.fixture
def certified(monkeypatch, planned):
    """Counts what is certified; the answer is the certificate that was made once."""
    made = []

    def answer(recipe, **keys):
        made.append(recipe)
        return read_json(planned / "certificate.json", Certificate)

    monkeypatch.setattr(prepare_run, "certify", answer)
    return made


def spoil(folder, **changes):
    file = folder / "certificate.json"
    memory = changes.pop("memory", {})
    proof = read_json(file, Certificate)
    write_json(file, replace(proof, **changes, memory=replace(proof.memory, **memory)))


def start(folder, data, **keys):
    said = []
    done = api.train(ask(data, memory="1 GiB"), folder, say=said.append, **keys)
    return done, " ".join(said)


def test_a_certificate_that_holds_is_used_as_it_is(folder, data, certified):
    before = (folder / "certificate.json").read_bytes()
    done, said = start(folder, data)
    assert done.finished
    assert done.warnings == ()
    assert not certified
    assert "does not hold" not in said
    assert (folder / "certificate.json").read_bytes() == before


STALE = {
    "another torch": (
        lambda proof: {"versions": {**proof.versions, "torch": "2.9.1"}},
        "made with torch 2.9.1, and this is torch ",
    ),
    "a library that is gone": (
        lambda proof: {"versions": {**proof.versions, "nobody-has-this": "1.0"}},
        "nobody-has-this 1.0, and this is nobody-has-this not installed",
    ),
    "another recipe": (
        lambda proof: {"recipe_digest": "0123456789abcdef"},
        "it is of recipe 0123456789abcdef, the plan of ",
    ),
    "shorter rows": (
        lambda proof: {"data": RowBounds(tokens=16, documents=4, longest=16)},
        "the training data has rows of at most 32 tokens",
    ),
    "no bounds": (lambda proof: {"data": None}, "does not say for which training data it holds"),
}


@pytest.mark.parametrize("name", STALE)
def test_a_stale_certificate_is_made_again_and_both_sides_are_named(name, folder, data, certified):
    change, why = STALE[name]
    good = read_json(folder / "certificate.json", Certificate)
    spoil(folder, **change(good))
    said = []
    prepared = api.prepare(ask(data, memory="1 GiB"), folder, say=said.append)
    assert why in " ".join(said)
    assert "certifying again" in " ".join(said)
    assert len(certified) == 1
    assert prepared.plan == read_json(folder / "plan.json", Plan)
    held = read_json(folder / "certificate.json", Certificate)
    assert (held.recipe_digest, held.versions, held.data) == (
        good.recipe_digest, good.versions, good.data)  # fmt: skip


def test_the_trainer_itself_refuses_what_is_stale_or_failing(folder, data):
    request, plan = ask(data, memory="1 GiB"), read_json(folder / "plan.json", Plan)

    def go(**keys):
        proof = read_json(folder / "certificate.json", Certificate)
        return loop.train(plan.recipe, request, folder, certificate=proof, **keys)

    good = read_json(folder / "certificate.json", Certificate)
    spoil(folder, versions={**good.versions, "torch": "2.9.1"})
    with pytest.raises(InvalidRequest, match=r"made with torch 2\.9\.1, and this is torch 2"):
        go()
    spoil(folder, versions=good.versions, data=RowBounds(tokens=16, documents=4, longest=16))
    with pytest.raises(InvalidRequest, match="holds for rows of at most 16 tokens"):
        go()
    spoil(folder, data=good.data, memory={"verdict": "does_not_fit"})
    with pytest.raises(DoesNotFit):
        go()
    assert not (folder / "run.json").exists()
    assert any("does not fit" in warning for warning in go(override=True).warnings)


def test_a_failing_certificate_is_refused_with_exit_3_and_overridden_once(folder, data):
    spoil(folder, memory={"verdict": "does_not_fit", "usable": 1000})
    with pytest.raises(DoesNotFit, match=r"certified: needs .* may use") as refused:
        start(folder, data)
    assert refused.value.exit_code == 3
    assert "--anyway" in refused.value.hint
    assert not (folder / "run.json").exists()
    done, _ = start(folder, data, override=True)
    assert done.finished
    assert any("the certificate says: does not fit" in warning for warning in done.warnings)


def test_at_risk_trains_and_says_so(folder, data):
    spoil(folder, memory={"verdict": "at_risk", "because": "the band straddles the limit"})
    done, _ = start(folder, data)
    assert done.finished
    assert any("at risk (the band straddles the limit)" in warning for warning in done.warnings)
    assert read_json(folder / "run.json", Run).warnings == done.warnings


def test_a_plan_that_a_new_certificate_refutes_is_planned_again_until_it_has_begun(
    folder, data, monkeypatch, planned
):
    def refute(recipe, **keys):
        proof = read_json(planned / "certificate.json", Certificate)
        return replace(proof, memory=replace(proof.memory, verdict="does_not_fit"))

    monkeypatch.setattr(prepare_run, "certify", refute)
    (folder / "certificate.json").unlink()
    said = []
    with pytest.raises(NotCertified, match="3 plans in a row"):
        api.prepare(ask(data, memory="1 GiB"), folder, say=said.append)
    assert any("planning again" in line for line in said)
    (folder / "run.json").write_text("{}")
    with pytest.raises(DoesNotFit):
        api.prepare(ask(data, memory="1 GiB"), folder)


def command(*words):
    """The command line in this process: its exit code and both its streams."""
    with CliRunner().isolation() as (out, err, _):
        code = run(lambda: app.main([*words], prog_name="memfit", standalone_mode=False))
        return code, out.getvalue().decode(), err.getvalue().decode()


def test_the_command_line_trains_a_plan_under_its_folders_certificate(folder):
    spoil(folder, memory={"verdict": "does_not_fit", "usable": 1000})
    plan = str(folder / "plan.json")
    code, _, said = command("train", plan)
    assert code == 3, said
    assert "--anyway" in said
    code, shown, said = command("train", plan, "--anyway")
    assert code == 0, said
    assert "warning: the certificate says: does not fit" in said
    assert "the certificate says: does not fit" in shown


def test_what_cannot_be_certified_is_trained_only_when_overridden(folder, data, monkeypatch):
    def refuse(*_, **__):
        raise NotCertified("this torch cannot be traced", hint="use another")

    monkeypatch.setattr(prepare_run, "certify", refuse)
    spoil(folder, versions={"torch": "1.0"})
    with pytest.raises(NotCertified, match="cannot be traced") as refused:
        start(folder, data)
    assert refused.value.hint == f"use another; {prepare_run.ANYWAY}"
    assert not (folder / "run.json").exists()
    done, said = start(folder, data, override=True)
    assert done.finished
    assert "training without a certificate: this torch cannot be traced" in said
    assert not (folder / "certificate.json").exists()
    assert (folder / prepare_run.STALE).exists()
    assert api.write_report(folder).certificate is None
