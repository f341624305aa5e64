"""`memfit train` as it is typed, of answers that are compared, on two processes of this machine."""

import json
from pathlib import Path

import pytest

from memfit.records import read_json
from memfit.records.results import Run
from typed_commands import quick

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
PAIRS = [
    {"prompt": f"What follows {n}? ", "chosen": f"{n + 1} does.", "rejected": "no " * (n % 7 + 1)}
    for n in range(13)
]
RATED = [
    {"prompt": f"What follows {n}? ", "completion": f"{n + n % 2} does.", "label": n % 2 == 1}
    for n in range(13)
]
CP = "pairs on ranks that share rows"
CASES = {
    CP: ("dpo", PAIRS, {"cp": 2}, 2),
    "rated answers on shards": ("kto", RATED, {"dp_shard": 2}, 4),
}  # fmt: skip
# torch's launcher leaves the files that it gave its processes to the collector
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def ask(objective, data, parallel, rows):
    """rows: of a micro-batch of one process; ranks with rows of their own share them."""
    count = 2 if parallel else 1
    own = rows // parallel.get("dp_shard", 1)
    return {
        "model": CONFIG, "weights": "random", "precision": "fp32", "micro_batch": own,
        "loss": "plain", "method": "lora", "recompute": "none", "parallel": parallel or "auto",
        "lora": {"rank": 4}, "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "hardware": {"device": "cpu", "count": count},
        "task": {"objective": objective, "data": str(data), "sequence_length": 32,
                 "global_batch": 8, "steps": 4},
        "run": {"save_every": 4},
    }  # fmt: skip


@pytest.mark.usefixtures("certified_here")
@pytest.mark.parametrize(
    "name", [CP, pytest.param("rated answers on shards", marks=pytest.mark.wide)]
)
def test_ranks_learn_what_one_process_does_within_their_certificate(name, tmp_path):
    objective, lines, parallel, rows = CASES[name]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    logs = []
    for place, mesh in (("one", {}), ("two", parallel)):
        file, folder = tmp_path / f"{place}.json", tmp_path / place
        file.write_text(json.dumps(ask(objective, data, mesh, rows)))
        code, _, said = quick("train", file, "--folder", folder)  # which starts the ranks
        assert code == 0, said
        logs.append([*map(json.loads, (folder / "log.jsonl").read_text().splitlines())])
    one, two = logs
    assert len(one) == len(two) == 4
    assert {row["ranks"] for row in two} == {2}
    for mine, other in zip(two, one, strict=True):
        for key in ("loss", "reward_margin", "grad_norm"):
            assert mine[key] == pytest.approx(other[key], rel=2e-5, abs=2e-6), key
    run = read_json(Path(tmp_path / "two" / "run.json"), Run)
    assert run.finished
    assert not run.warnings  # such as of bytes above the certificate
    assert len(run.ranks) == 2
    certified = json.loads((tmp_path / "two" / "certificate.json").read_text())["phases"]
    for phases in run.ranks:
        for phase, nbytes in phases.items():
            assert nbytes <= certified[str(phase)], phase
