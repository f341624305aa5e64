"""What a screen, the README or a page of the documentation says to type can be typed."""

import ast
import contextlib
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from memfit.cli.app import app
from typed_commands import quick

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("", "sh", "bash", "console")
SMALL = ["smollm2-135m", "--set", "task.sequence_length=128"]
PLANS = {
    "fits": ["smollm2-135m", "--device", "rtx-4090"],
    "does not fit": ["gpt2", "--device", "l4", "--memory", "200 MiB", "--set", "method=full"],
    "several devices": ["llama-3.2-1b", "--device", "h100-sxm", "--set", "hardware.count=8"],
    "another framework": ["llama-3.1-8b", "--device", "h100-sxm", "--set", "framework=torchtitan"],
    "hf-trainer": ["gpt2", "--device", "rtx-4090", "--set", "framework=hf-trainer"],
    "off record": ["smollm2-135m", "--device", "mi325x"],
}


def join(text):
    """Lines of a shell, those that end with a backslash joined to the next."""
    return re.sub(r"\\\n\s*", "", text).splitlines()


def commands(text):
    """Every `memfit …` line, without its comment."""
    lines = (line.strip() for line in join(text))
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("memfit ")]


def blocks(text):
    """The code blocks of a page that a shell would take."""
    fences = re.split(r"^ *```(\w*)\n?", text, flags=re.M)  # text, language, body, "", text, …
    return [fences[at + 1] for at in range(1, len(fences) - 1, 4) if fences[at] in SHELL]


def documented():
    """Every command of a code block, by its page."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        pytest.param(words, id=f"{page.stem}: {shlex.join(words)[:80]}")
        for page in pages
        if "targets" not in page.parts
        for block in blocks(page.read_text(encoding="utf-8"))
        for words in commands(block)
    ]


def parse(words):
    """Parse a command line as click does, without running it."""
    context = app.make_context("memfit", list(words))
    _, command, rest = app.resolve_command(context, [*context._protected_args, *context.args])
    return command.make_context(words[0], rest, parent=context)


DOCUMENTED = documented()


def test_the_documentation_has_commands():
    assert len(DOCUMENTED) > 40


@pytest.mark.parametrize("words", DOCUMENTED)
def test_a_documented_command_line_is_parsed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith((".yaml", ".json", ".py")) and "/" not in word:
            (tmp_path / word).touch()  # that an argument asks for
    with contextlib.suppress(click.exceptions.Exit):  # of --help and --version
        parse(words)


def test_a_command_line_that_is_wrong_is_not_parsed():
    with pytest.raises(click.UsageError):
        parse(["plan", "gpt2", "--no-such-option"])


def hinted():
    """Every command between backticks in a text of the program, but for those whose verb is put in
    as it runs; what is put in elsewhere is left out."""
    found = set()
    for path in sorted((ROOT / "src" / "memfit").rglob("*.py")):
        if "`memfit " not in (source := path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(source)):
            pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = (piece.value for piece in pieces if isinstance(piece, ast.Constant))
            joined = " ".join(text for text in texts if isinstance(text, str))
            found |= set(re.findall(r"`memfit ([a-z][^`]*)`", joined))
    return sorted(found)


def test_the_commands_of_hints_exist():
    found = hinted()
    assert len(found) > 40
    for text in found:
        verb, *rest = shlex.split(text)
        command = app.get_command(click.Context(app), verb)
        assert command is not None, text
        known = {option for each in command.params for option in each.opts}
        assert {word for word in rest if word.startswith("--")} <= {*known, "--help"}, text


def after(out, heading):
    """The commands below a heading of a screen."""
    return commands(out.partition(f"\n{heading}")[2])


@pytest.mark.slow
@pytest.mark.wide  # tests/screens/test_short.py types what such screens say, too
@pytest.mark.parametrize("words", PLANS.values(), ids=list(PLANS))
def test_what_a_plan_says_to_type_next_can_be_typed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = quick("plan", *words)
    assert code in (0, 3), err
    shown = after(out, "Next")
    assert shown
    for command in shown:
        parse(command)
        if command[0] in ("plan", "predict"):
            assert quick(*command)[0] in (0, 3), command


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_what_a_plan_and_its_certificate_say_to_type_next_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = quick("plan", *SMALL, "--device", "rtx-4090", "--folder", "first")
    for command in after(out, "Next"):
        code, found, err = quick(*command)
        assert code == 0, (command, err)
        for further in after(found, "Next"):
            parse(further)


TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_the_commands_from_a_plan_to_a_text_run_as_they_are_printed(tmp_path, monkeypatch):
    """Each screen's `Next` is typed in turn, with data where one says that it is one's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    text = {"text": "The cat sat on a mat while the rain fell. " * 20}
    (tmp_path / "YOUR_DATA.jsonl").write_text(f"{json.dumps(text)}\n" * 20)
    keys = ["--set", "task.sequence_length=64", "--set", "task.steps=2"]
    command = ["plan", "config.json", "--device", "cpu", "--memory", "4 GiB", *keys]
    command += ["--folder", "first"]
    typed = []
    while command:
        code, out, err = quick(*command)
        assert code == 0, (command, err)
        typed.append(command[0])
        command = next(iter(after(out, "Next")), None)
    assert typed == ["plan", "certify", "train", "generate"]


def test_a_models_configuration_is_a_model_under_any_name(tmp_path, monkeypatch):
    """It was refused as a request with an unknown key."""
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "tiny.json"):
        (tmp_path / name).write_text(json.dumps(TINY))
        code, out, err = quick("plan", name, "--device", "h100-sxm", "--json")
        assert code == 0, err
        assert json.loads(out)["recipe"]["model"]["config"]["vocab_size"] == 512
    assert json.loads(out)["recipe"]["model"]["name"] == "tiny"


def test_a_plan_that_one_would_change_is_planned_again_as_the_hint_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--device", "rtx-4090", "--set", "method=lora", "--folder", "first"]
    assert quick("plan", *words)[0] == 0
    code, _, err = quick("plan", "first", "--set", "lora.rank=4")
    assert code == 2
    verb, *anew = shlex.split(re.search(r"`memfit (.*)`", err)[1])
    code, out, err = quick(verb, *anew, "--json")
    assert code == 0, err
    recipe = json.loads(out)["recipe"]
    assert (recipe["lora"]["rank"], recipe["sequence_length"]) == (4, 128)


@pytest.mark.parametrize(("model", "count"), [("llama-3.2-1b", 1), ("llama-3.1-8b", 8)])
def test_a_certificate_of_another_frameworks_plan_is_refused(model, count, tmp_path, monkeypatch):
    """With stages, it ended in a ValueError."""
    monkeypatch.chdir(tmp_path)
    changes = ["--set", "framework=megatron", "--set", f"hardware.count={count}"]
    words = [model, "--device", "h100-sxm", *changes, "--folder", "first"]
    assert quick("plan", *words)[0] == 0
    for target in ("first", "first/plan.json"):
        code, _, err = quick("certify", target)
        assert code == 2
        assert "`framework: megatron` is another framework's step" in err
        assert "hint:" in err
        assert "Traceback" not in err


def test_a_run_folder_stands_for_its_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick("plan", *SMALL, "--device", "rtx-4090", "--folder", "first")
    code, out, err = quick("plan", "first")
    assert code == 0, err
    assert out.startswith("FITS  smollm2-135m")
