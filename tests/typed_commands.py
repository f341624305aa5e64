"""The command line run as a user types it, in a process of its own or in this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from memfit.cli.app import run_words

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "name": "tiny", "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
ASKED = {
    "model": TINY, "weights": "random", "hardware": {"device": "cpu"},
    "task": {"sequence_length": 64, "global_batch": 4, "steps": 3},
    "optimizer": {"name": "adamw"}, "limits": {"memory": "1 GiB"},
}  # fmt: skip
STATED = ASKED | {
    "method": "full", "precision": "fp32", "recompute": "none", "loss": "plain", "micro_batch": 2,
    "attention": "flash",
}  # fmt: skip


def memfit(*arguments, cwd, **environment):
    """Run the command in a process of its own, as a shell would."""
    return subprocess.run(
        [sys.executable, "-m", "memfit", *map(str, arguments)], cwd=cwd, check=False,
        capture_output=True, text=True, encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8",
             "COLUMNS": "80", **environment},
    )  # fmt: skip


def quick(*arguments):
    """The same in this process, for what needs no process: (exit code, stdout, stderr)."""
    code = []
    runner = CliRunner()
    with runner.isolation() as streams:
        words = [str(a) for a in arguments]
        code.append(run_words(words))
        return code[0], streams[0].getvalue().decode(), streams[1].getvalue().decode()


def write(tmp_path, data):
    file = tmp_path / "changed.yaml"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def strict(text):
    """Parse JSON that any reader accepts: no NaN, no Infinity, one document."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)
