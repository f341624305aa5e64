"""Published step times: what a row carries of them, what it loses, and that its tokens agree."""

import json
import sys
from pathlib import Path

import pytest

from memfit import accuracy, corpus

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import import_published
import published
from published import NotExpressible, Translated

TIMED = [row for row in corpus.read_corpus() if "time.step_seconds" in row.measurements]
OTHERS = [row for row in TIMED if row.recipe.framework != "memfit"]
LLAMA = {
    "name": "Llama-3-8B", "n_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8,
    "ffn": 14336, "vocab": 128256, "seq_len": 8192,
}  # fmt: skip


def a_row(source, *, model=None, hardware=None, config=None, measured=None, **more):
    """A row as its collector writes it; what is not given is a plain run on 8 H100."""
    return {
        "id": "of-the-test", "source": source, "url_or_path": "https://example.org", "year": 2025,
        "model": LLAMA | (model or {}),
        "hardware": {"gpu": "H100-SXM-80GB", "n_gpus": 8, "gpus_per_node": 8} | (hardware or {}),
        "config": {"dp": 8, "tp": 1, "pp": 1, "cp": 1, "micro_batch": 1, "grad_accum": 1}
        | (config or {}),
        "measured": measured or {}, "derived": {}, "usable_for": ["time"], "confidence": "high",
        "notes": "as stated",
    } | more  # fmt: skip


TITAN = a_row(
    "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md Table 1",
    config={"framework": "torchtitan FSDP2", "recompute": "full", "zero_stage": 3},
    measured={"tokens_per_s_per_gpu": 8192, "peak_mem_gb": 50.5, "peak_mem_unit": "GiB",
              "peak_mem_kind": "reserved"},
    derived={"step_time_s": 1.0},
)  # fmt: skip


def test_a_row_of_time_alone_has_no_memory_figure_and_judges_no_memory():
    row, lost = import_published.make_row(TITAN)
    assert set(row.measurements) == {"time.step_seconds"}
    assert lost == {}
    assert accuracy.compare([row]).compared == ()
    both, _ = import_published.make_row(TITAN | {"usable_for": ["time", "memory"]})
    assert set(both.measurements) == {"time.step_seconds", "memory.peak_reserved"}
    assert len(accuracy.compare([both]).compared) == 1


def test_a_time_is_known_to_half_of_the_last_digit_of_what_was_printed():
    row, _ = import_published.make_row(TITAN)
    found = row.measurements["time.step_seconds"]
    assert found.value == 1.0
    assert found.spread == pytest.approx(0.5 / 8192)
    assert found.counter == "from the printed throughput"
    printed = TITAN | {"measured": {"step_time_s": 1.02}, "derived": {}}
    found = import_published.make_row(printed)[0].measurements["time.step_seconds"]
    assert (found.value, found.spread) == (1.02, pytest.approx(0.005))


def test_a_time_whose_tokens_do_not_agree_with_the_throughput_is_refused():
    wrong = TITAN | {"derived": {"step_time_s": 1.1}}
    with pytest.raises(NotExpressible, match="its step has 65536 tokens, its throughput 72090"):
        import_published.make_row(wrong)


def test_a_reason_says_which_use_was_lost(tmp_path, monkeypatch, capsys):
    one = Translated(request=import_published.translate(TITAN).request, kind="peak_reserved")
    made = {
        "kept": one,
        "no-memory": one._replace(memory_lost="its bytes are not described"),
        "no-time": one._replace(time_lost="one micro-batch, not a step"),
    }
    monkeypatch.setattr(import_published, "translate", lambda row: made[row["id"]])
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [TITAN | {"id": name, "usable_for": ["time", "memory"]} for name in made]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["import", str(file), "--out", str(out)])
    import_published.main()
    held = {row.id: sorted(row.measurements) for row in corpus.read_rows(out)}
    assert held == {
        "published-kept": ["memory.peak_reserved", "time.step_seconds"],
        "published-no-memory": ["time.step_seconds"],
        "published-no-time": ["memory.peak_reserved"],
    }
    refused = corpus.read_refused([out])
    assert {(r.use, r.reason, r.rows) for r in refused} == {
        ("memory", "its bytes are not described", 1), ("time", "one micro-batch, not a step", 1),
    }  # fmt: skip
    assert [r.use for r in accuracy.compare((), refused).refused] == ["memory"]
    assert "2 with a time" in capsys.readouterr().out


def test_what_a_row_does_not_state_is_no_recipe():
    silent = {k: v for k, v in TITAN["config"].items() if k != "recompute"}
    with pytest.raises(NotExpressible, match="`recompute` is not stated"):
        import_published.make_row(TITAN | {"config": silent})


def test_every_timed_rows_ranks_and_machines_are_those_of_its_source():
    for row in OTHERS:
        recipe, said = row.recipe, row.environment
        assert row.measurements["time.step_seconds"].value > 0, row.id
        if "devices" in said:
            world = recipe.parallel.world
            assert world == int(said["devices"]), row.id
            node = int(said.get("devices_per_node", world))
            assert recipe.devices_per_node == (node if world > node else 0), row.id


def test_the_corpus_has_times_of_many_frameworks():
    assert {"megatron", "nanotron", "torchtitan"} <= {row.recipe.framework for row in OTHERS}
    assert published.NotExpressible is NotExpressible
