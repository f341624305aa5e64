"""memfit diff: what changed in recipe, libraries and bytes; and what is no certificate."""

import json

import msgspec
import pytest

import made_by_hand as made
from memfit.core.errors import InvalidRequest, NotCertified
from memfit.core.units import GIB, MIB
from memfit.records import write_json
from memfit.records.results import Tensor
from memfit.report import difference
from memfit.workflows.load_inputs import read_certificate, what_is
from typed_commands import quick, strict

replace = msgspec.structs.replace


def tensor(module, nbytes=MIB, count=1, **changes):
    row = Tensor(nbytes=nbytes, count=count, kind="activations", module=module, op="aten.mm",
                 source="x.py:1")  # fmt: skip
    return replace(row, **changes)


@pytest.fixture
def pair():
    """A, and B with another recipe, library, gradients and tensors."""
    a = made.certificate(made.plan())
    plan = made.plan()
    recipe = made.recipe(recompute_blocks=32, allocator="expandable_segments:True")
    b = made.certificate(replace(plan, recipe=recipe, recipe_digest=recipe.digest), more=GIB)
    block = "model.layers.{}.mlp"
    return (
        replace(a, at_peak=(
            tensor(block.format("*"), count=32), tensor("model.norm"), tensor(block.format(3), 7),
        )),
        replace(b, versions={**b.versions, "torch": "2.14.0", "torchao": "0.18"}, at_peak=(
            tensor(block.format("*"), count=20, source="x.py:9"), tensor("model.norm"),
            tensor("lm_head", 5 * MIB), tensor(block.format(30), 7, source="y.py:2"),
        )),
    )  # fmt: skip


def test_recipe_versions_and_bytes_are_compared_by_hand_worked_rows(pair):
    diff = difference.compare(*pair, names=("a.json", "b.json"))
    assert diff.recipe == {
        "recompute_blocks": (12, 32), "allocator": ("", "expandable_segments:True"),
    }  # fmt: skip
    assert diff.versions == {"torch": ("2.13.0", "2.14.0"), "torchao": (None, "0.18")}
    assert {c.name: c.difference for c in diff.numbers} == {
        "peak_allocated": GIB, "peak_reserved": GIB, "device_total": GIB, "usable": 0,
    }  # fmt: skip
    assert {c.name: c.difference for c in diff.phases if c.difference} == {"backward": GIB}
    assert [c.name for c in diff.phases] == ["load", "forward", "backward", "optimizer_step"]
    assert diff.components[0].name == "backward/gradients"
    assert [c.difference for c in diff.components] == [GIB] + [0] * (len(diff.components) - 1)


def test_modules_and_tensors_take_blocks_for_one_and_lines_for_nothing(pair):
    diff = difference.compare(*pair, names=("a", "b"))
    assert {(c.name, c.a, c.b) for c in diff.modules} == {
        ("model.layers.*.mlp", 32 * MIB + 7, 20 * MIB + 7), ("model.norm", MIB, MIB),
        ("lm_head", None, 5 * MIB),
    }  # fmt: skip
    assert [(t.module, t.count, t.total) for t in diff.appeared] == [("lm_head", 1, 5 * MIB)]
    assert [(t.module, t.count) for t in diff.disappeared] == [("model.layers.*.mlp", 12)]


def test_a_certificate_and_itself_do_not_differ(pair):
    diff = difference.compare(pair[0], pair[0], names=("a", "a"))
    assert (diff.recipe, diff.versions, diff.appeared, diff.disappeared) == ({}, {}, (), ())
    changes = (*diff.numbers, *diff.phases, *diff.components, *diff.modules)
    assert {c.difference for c in changes} == {0}


def test_swapping_the_two_swaps_every_sign(pair):
    one = difference.compare(*pair, names=("a", "b"))
    other = difference.compare(*reversed(pair), names=("b", "a"))
    assert one.appeared == other.disappeared
    for a, b in zip(
        sorted(one.modules, key=lambda c: c.name), sorted(other.modules, key=lambda c: c.name),
        strict=True,
    ):  # fmt: skip
        assert (a.name, a.difference) == (b.name, -b.difference)


@pytest.fixture
def no_certifying(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("what is on disk needs no certifying")

    monkeypatch.setattr(difference, "certify", fail)


def test_a_file_a_folder_and_a_plan_beside_it_are_taken_as_they_stand(
    pair, tmp_path, no_certifying
):
    plan = made.plan()
    a = replace(pair[0], recipe=plan.recipe, recipe_digest=plan.recipe.digest)
    write_json(tmp_path / "certificate.json", a)
    write_json(tmp_path / "plan.json", plan)
    write_json(tmp_path / "b.json", pair[1])
    for target in (tmp_path, tmp_path / "certificate.json", tmp_path / "plan.json"):
        code, out, err = quick("diff", target, tmp_path / "b.json", "--json")
        assert (code, err) == (0, "")
        data = strict(out)
        assert data["a"]["recipe_digest"] == a.recipe_digest
        assert data["recipe"]["recompute_blocks"] == [12, 32]
    code, out, err = quick("diff", tmp_path, tmp_path / "b.json")
    assert (code, err) == (0, "")
    assert "recompute_blocks: 12 -> 32" in out
    assert "torch: 2.13.0 -> 2.14.0" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_requests_are_planned_and_certified_first(tmp_path):
    from typed_commands import STATED, write

    file = write(tmp_path, STATED)
    other = tmp_path / "other.yaml"
    other.write_text(json.dumps(STATED | {"recompute": "full"}))
    code, out, err = quick("diff", file, other, "--json")
    assert code == 0
    assert err.count("certifying recipe") == 2
    data = strict(out)
    assert list(data["recipe"]) == ["recompute_blocks"]
    forward = {c["name"]: c for c in data["components"]}["forward/activations"]
    assert forward["b"] < forward["a"]


# what is no certificate


@pytest.mark.parametrize(("content", "said", "hint"), [
    ("{", "is not JSON", ""),
    ("[1]", "is not a certificate", "`memfit certify` writes certificate.json"),
    ('{"considered": []}', "is not a certificate; it holds a plan", "`memfit certify` writes"),
    ('{"comparisons": []}', "is not a certificate; it holds a report", "`memfit certify` writes"),
    ('{"at_peak": [], "schema": 2}', "of schema 2, and this memfit reads", "certify again"),
    ('{"at_peak": [], "schema": 1}', "required field", ""),
    ('{"at_peak": [], "schema": 1, "x": 3}', "", ""),
])  # fmt: skip
def test_what_is_no_certificate_is_said_once(tmp_path, content, said, hint):
    file = tmp_path / "certificate.json"
    file.write_text(content)
    with pytest.raises(InvalidRequest) as caught:
        read_certificate(file)
    assert str(file) in caught.value.message or said == "required field"
    assert said in caught.value.message
    assert caught.value.hint.startswith(hint) or hint in caught.value.hint
    assert quick("diff", file, file)[:2] == (2, "")


def test_an_empty_folder_and_a_missing_file_say_what_is_wanted(tmp_path):
    code, out, err = quick("diff", tmp_path, tmp_path)
    assert (code, out) == (2, "")
    assert "holds neither certificate.json nor plan.json\nhint: name a run's folder" in err
    code, out, err = quick("diff", tmp_path / "no.json", tmp_path)
    assert (code, out) == (2, "")
    assert "no.json" in err


def test_a_file_says_what_it_holds(pair, tmp_path):
    plan = made.plan()
    records = {
        "a certificate": pair[0], "a plan": plan, "a request": plan.request,
        "a run": made.run(plan),
    }  # fmt: skip
    for name, record in records.items():
        write_json(tmp_path / "x.json", record)
        assert what_is(tmp_path / "x.json") == name
    (tmp_path / "x.json").write_text("no")
    assert what_is(tmp_path / "x.json") == what_is(tmp_path) == ""
    assert from_json(pair[0], tmp_path) == pair[0]


def from_json(certificate, folder):
    write_json(folder / "c.json", certificate)
    return read_certificate(folder / "c.json")


# what cannot be certified: one error each, its own exit code, nothing left behind


def test_a_torch_that_is_too_old_is_named_with_the_oldest_that_works(monkeypatch):
    from memfit import certify

    monkeypatch.setattr(certify, "version", lambda _: "2.9.1+cu126")
    with pytest.raises(NotCertified, match=r"torch 2\.9\.1\+cu126 is older than 2\.11") as caught:
        certify.check_libraries()
    assert caught.value.exit_code == 4
    assert "torch>=2.11" in caught.value.hint
    for fine in ("2.11.0", "2.13.0+cpu", "3.0.0a0+git1"):
        monkeypatch.setattr(certify, "version", lambda _, fine=fine: fine)
        certify.check_libraries()


def test_a_torch_that_nobody_tried_is_said_among_the_bounds(monkeypatch):
    from memfit.certify.evidence import certificate

    assert certificate._torch_bounds() == ()
    monkeypatch.setattr(certificate, "version", lambda _: "2.99.0")
    (bound,) = certificate._torch_bounds()
    assert "torch 2.99.0 is newer than 2.13" in bound


@pytest.mark.parametrize(("changes", "code", "said"), [
    ({"model": {"model_type": "mamba", "hidden_size": 3}}, 2, "mamba"),
    ({"hardware": {"device": "no-such-card"}}, 2, "unknown device: `no-such-card`"),
])  # fmt: skip
def test_what_has_no_row_is_one_error_and_leaves_nothing(tmp_path, changes, code, said):
    from typed_commands import STATED, write

    file = write(tmp_path, STATED | changes)
    found, out, err = quick("certify", file, "--folder", tmp_path / "run", "--timeline")
    assert (found, out) == (code, "")
    assert said in err
    assert err.count("error:") == err.count("hint:") == 1
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_is_refused_before_certifying(tmp_path):
    from typed_commands import STATED, write

    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", "/proc/run"):
        code, out, err = quick("certify", write(tmp_path, STATED), "--timeline", "--folder", place)
        assert (code, out) == (2, "")
        assert f"cannot write in `{place}`" in err
        assert "certifying" not in err
    code, out, err = quick("certify", write(tmp_path, STATED), "--timeline")
    assert (code, out) == (2, "")
    assert "no folder is named\nhint: add `--folder" in err
