"""The verbs as Python calls them: what they take, return and raise."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from typing import get_args

import pytest
from msgspec.structs import replace

import memfit
from memfit import api
from memfit.records import to_data
from memfit.records.results import Verdict
from memfit.workflows.python_verbs import read_request
from typed_commands import ASKED, STATED, TINY

WORDS = {"device": "rtx-4090", "method": "lora", "seq_len": 512}


def test_importing_memfit_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import memfit; "
        "print(sorted(set(sys.modules) - before - {'memfit'})); print(sorted(set(dir(memfit))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, names = done.stdout.splitlines()
    assert modules == "[]"
    assert "'plan'" in names


def test_a_verb_is_called_before_and_after_its_package_is_imported():
    code = (
        "import memfit; a = memfit.plan('gpt2', device='l4', seq_len=512);"
        "import memfit.plan.search.search; b = memfit.plan('gpt2', device='l4', seq_len=512);"
        "assert a == b and memfit.plan.search.search; print(a)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("<Plan FITS gpt2 on l4: needs ")


def test_an_attribute_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute `plans`"):
        _ = memfit.plans


def test_a_name_a_dict_a_file_and_a_request_are_the_same(tmp_path):
    data = {"model": "gpt2", "hardware": {"device": "rtx-4090"}, "method": "lora",
            "task": {"sequence_length": 512}}  # fmt: skip
    file = tmp_path / "request.yaml"
    file.write_text(json.dumps(data))
    request = api.read(file)
    for asked, words in (
        ("gpt2", WORDS), (data, {}), (file, {}), (str(file), {}), (request, {}),
        (memfit.Request(model="gpt2"), WORDS),
        ({"model": "gpt2", "method": "lora"}, {"device": "rtx-4090", "sequence_length": "512"}),
        ("gpt2", {"hardware": {"device": "rtx-4090"}, "method": "lora",
                  "task": {"sequence_length": 512}}),
        ("gpt2", {"changes": {"hardware.device": "rtx-4090", "task.sequence_length": 512},
                  "method": "lora"}),
    ):  # fmt: skip
        assert read_request(asked, words) == request
    assert data["task"] == {"sequence_length": 512}  # what was given is left as it was


def test_a_number_of_devices_takes_the_place_of_the_one_that_stands_there(tmp_path):
    file = tmp_path / "request.yaml"
    file.write_text("model: gpt2\nhardware: {device: l4, count: 1, nodes: 1}\n")
    for asked in (file, memfit.Request(model="gpt2"), api.read(file)):
        made = read_request(asked, {"device": "16xh100-sxm"}).hardware
        assert (made.device, made.count, made.nodes) == ("h100-sxm", 8, 2)


def test_a_plan_is_a_request_of_its_own_recipe(tmp_path):
    plan = memfit.plan("gpt2", **WORDS)
    api.write_plan(plan, tmp_path)
    assert memfit.predict(plan).recipe_digest == plan.recipe_digest
    assert memfit.predict(tmp_path / "plan.json").recipe_digest == plan.recipe_digest
    with pytest.raises(memfit.InvalidRequest, match="a plan is fixed"):
        memfit.predict(tmp_path / "plan.json", seq_len=64)


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ({"gradient_checkpointing": True}, "unknown word: `gradient_checkpointing`", "recompute"),
        ({"seq_lenn": 3}, "unknown word: `seq_lenn`", "`seq_len`"),
        ({"precision": "no"}, "`precision: no` in the options", "one of: auto"),
        ({"memory": ""}, "`--memory` is empty", "leave the flag out"),
        ({"seq_len": 4, "sequence_length": 8}, "both set `task.sequence_length`", "keep one"),
        ({"method": "full", "qlora": True}, "both set `method`", "keep one"),
        ({"device": "l4", "changes": {"hardware.device": "t4"}}, "both set `hardware.dev", "keep"),
        ({"alpha": "x"}, "`lora.alpha: x` in the options", "a number above 0"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_an_exception_with_a_hint(words, said, hint):
    with pytest.raises(memfit.InvalidRequest) as caught:
        memfit.plan("gpt2", **words)
    assert said in caught.value.message
    assert hint in caught.value.hint
    assert isinstance(caught.value, memfit.Error)


@pytest.mark.parametrize("asked", [3, None, ["gpt2"], ""])
def test_what_is_no_request_is_refused(asked):
    with pytest.raises(memfit.InvalidRequest) as caught:
        memfit.plan(asked)
    assert caught.value.hint


def test_results_are_one_line_and_plain_data():
    plan = memfit.predict(STATED)
    assert repr(plan).startswith("<Plan FITS tiny on cpu-x86: needs ")
    assert plan.to_dict() == to_data(plan)
    for verdict in get_args(Verdict):
        judged = replace(plan, memory=replace(plan.memory, verdict=verdict))
        assert judged.fits == (verdict == "fits")
    solved = memfit.solve("micro_batch", ASKED)
    assert repr(solved).startswith(f"<Solved micro_batch = {solved.value}: ")
    made = memfit.export("gpt2", "trl", **WORDS)
    assert repr(made).startswith("<Export to trl ")


class Tags(HTMLParser):
    """Refuses tags that do not close."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "words",
    [WORDS, {**WORDS, "memory": "200 MiB"}, {**WORDS, "device": "8xH100"},
     {"device": "mi325x", "seq_len": 512}],
    ids=["fits", "does not fit", "several", "off record"],
)  # fmt: skip
def test_a_notebook_shows_a_plan(words):
    plan = memfit.plan("gpt2", **words)
    html = plan._repr_html_()
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    assert ("DOES NOT FIT" in html) == (plan.memory.verdict == "does_not_fit")
    assert "Memory at the peak" in html
    assert "<script" not in html


def test_what_a_name_holds_is_escaped():
    named = {**STATED, "model": {**TINY, "name": "<script>x</script>"}}
    assert "<script" not in memfit.predict(named)._repr_html_()


def test_another_tools_file_is_checked(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("base_model: meta-llama/Llama-3.2-1B\nadapter: lora\nlora_r: 8\n"
                    "lora_alpha: 16\nlora_target_linear: true\nsequence_len: 512\n"
                    "micro_batch_size: 1\n"
                    "gradient_accumulation_steps: 1\nbf16: true\noptimizer: adamw_torch\n"
                    "datasets:\n  - path: x.jsonl\n    type: alpaca\nnum_epochs: 1\n")  # fmt: skip
    found = memfit.check(file, device="4090")
    assert found.plan.recipe.device == "rtx-4090"
    assert repr(found).startswith(f"<Checked {found.answer.verdict}: <Plan ")
    with pytest.raises(memfit.InvalidRequest, match="there is no such file"):
        memfit.check("nowhere.yaml", device="4090")


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_a_plan_is_certified_trained_and_reported(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps. " * 400)
    asked = {**ASKED, "task": {**ASKED["task"], "data": str(tmp_path / "a.txt")}}
    certificate = memfit.certify(asked, folder=tmp_path / "proof")
    assert repr(certificate).startswith("<Certificate FITS tiny on cpu")
    assert "Peak of each phase" in certificate._repr_html_()
    assert {f.name for f in (tmp_path / "proof").iterdir()} == {"plan.json", "certificate.json"}
    run = memfit.train(asked, tmp_path / "run")
    assert repr(run).startswith("<Run tiny: finished after 3 steps")
    assert repr(memfit.report(tmp_path / "run")).startswith("<Report ")
