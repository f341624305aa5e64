"""The corpus: rows read strictly, write back the same, and say where they come from."""

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import made_by_hand as made
from memfit.accuracy import corpus
from memfit.core.errors import InvalidRequest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import import_published
import published

ROWS = corpus.read_corpus()


def test_the_corpus_that_memfit_comes_with_reads_and_writes_back_byte_for_byte():
    for file in sorted(corpus.home().glob("*.jsonl")):
        rows = list(corpus.read_rows(file))
        assert rows, file
        assert "".join(map(corpus.line, rows)) == file.read_text(encoding="utf-8")


def test_every_row_has_the_digest_of_its_recipe_and_a_source():
    for row in ROWS:
        assert row.recipe_digest == row.recipe.digest, row.id
        assert row.source.name
        assert row.source.url or row.source.name == corpus.OWN, row.id
        assert row.out_of_memory or row.measurements, row.id


def test_rows_of_one_group_are_never_split_between_fit_and_test():
    groups = {}
    for row in ROWS:
        if row.source.group:
            groups.setdefault(row.source.group, set()).add(row.split)
    assert all(len(splits) == 1 for splits in groups.values())


def test_half_of_all_names_may_be_fitted_on():
    fit = [corpus.split_of(f"name-{n}") for n in range(1000)].count("fit")
    assert 450 < fit < 550


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("recipe"), "line 1"),
        (lambda d: d.update(nonsense=1), "unknown key `nonsense`"),
        (lambda d: d.update(split="both"), "`split: both`"),
    ],
)
def test_a_wrong_row_is_named_with_its_file_line_and_key(tmp_path, change, said):
    data = json.loads(corpus.line(ROWS[0]))
    change(data)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(data) + "\n")
    with pytest.raises(InvalidRequest) as error:
        list(corpus.read_rows(file))
    assert said in str(error.value)
    assert "rows.jsonl, line 1" in str(error.value)


def test_two_rows_of_one_id_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="no rows"):
        corpus.read_corpus([tmp_path])
    file = tmp_path / "rows.jsonl"
    file.write_text(corpus.line(ROWS[0]) * 2)
    with pytest.raises(InvalidRequest, match="the id"):
        corpus.read_corpus([file])


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("allocated (torch max_memory_allocated GiB, inferred)", "peak_allocated"),
        ("active (torch max_memory_active)", "peak_active"),
        ("reserved (inferred)", "peak_reserved"),
        ("reserved-like (non-monotonic; tool unstated)", "unspecified"),
        ("nvidia-smi (integer GiB)", "device_total"),
        ("unspecified (rank 0)", "unspecified"),
    ],
)
def test_a_memory_figure_counts_what_its_source_says(said, kind):
    assert published.kind_of({"measured": {"peak_mem_kind": said}}) == kind


def test_a_printed_figure_is_known_to_half_of_its_last_digit():
    row = {
        "measured": {"peak_mem_gb": 82.4, "peak_mem_unit": "GB10", "peak_mem_kind": "reserved"},
        "usable_for": ["memory"], "derived": {},
    }  # fmt: skip
    found = import_published.measure_memory(row, "peak_reserved")["memory.peak_reserved"]
    assert (found.value, found.spread) == (82.4e9, pytest.approx(0.05e9))
    row["measured"]["peak_mem_gb"] = 67.0
    assert import_published.measure_memory(row, "x")["memory.x"].spread == 0.5e9
    by_code = import_published.measure_memory(row, "x", unit=2**30)["memory.x"]
    assert by_code.value == 67 * 2**30


def test_a_source_whose_code_says_what_it_counted_overrules_its_page():
    by_id = {row.id: row for row in corpus.read_corpus() if row.memory}
    zero = by_id["published-deepspeed-qwen3-32b-mi300x8-zero3-rccl"]
    assert zero.memory["peak_allocated"].value == 96.45e9  # max_memory_allocated() / 1e9
    assert zero.recipe.recompute_blocks == 0
    swift = [row for row in by_id.values() if row.source.name.startswith("modelscope")]
    assert {(*row.memory, row.source.confidence) for row in swift} == {("peak_reserved", "low")}
    assert len(swift) == 52


def test_the_published_schema_names_every_field_of_a_row():
    schema = json.loads((corpus.home() / "row.schema.json").read_text(encoding="utf-8"))
    assert schema == json.loads(json.dumps(corpus.schema()))
    assert set(schema["properties"]) == set(corpus.Row.__struct_fields__)
    assert {"id", "source", "recipe", "measurements"} <= set(schema["required"])
    assert set(schema["$defs"]["Recipe"]["properties"]) == set(ROWS[0].recipe.__struct_fields__)


def test_a_figure_printed_twice_is_one_run():
    from msgspec.structs import replace

    row = next(r for r in ROWS if "peak_allocated" in r.memory)
    figure = replace(row.memory["peak_allocated"], value=10.0, spread=0.5)

    def printed(value, spread, **changes):
        found = {"memory.peak_allocated": replace(figure, value=value, spread=spread)}
        return replace(row, measurements=found, **changes)

    assert import_published.same_run(printed(10.0, 0.5), printed(10.3, 0.05))
    assert not import_published.same_run(printed(10.0, 0.5), printed(10.6, 0.05))
    other = printed(10.0, 0.5, recipe_digest="another")
    assert not import_published.same_run(printed(10.0, 0.5), other)


def test_a_source_without_a_translator_is_not_expressible():
    with pytest.raises(published.NotExpressible, match="of `nobody/nothing`"):
        import_published.translate({"source": "nobody/nothing README"})


def test_a_submitted_row_is_one_file_that_reads_and_names_none_of_the_users_folders(
    tmp_path, monkeypatch, capfd
):
    from memfit.cli.app import app
    from memfit.cli.app import run as run_app

    folder = tmp_path / "secret-project" / "my-model"
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    words = ["measure", str(folder), "--device", "cpu", "--steps", "1", "--submit"]
    for word in ("task.sequence_length=16", "task.global_batch=1", "method=full", "precision=fp32"):
        words += ["--set", word]
    done = run_app(lambda: app.main(words, prog_name="memfit", standalone_mode=False))
    assert done == 0, capfd.readouterr().err
    (file,) = tmp_path.glob("memfit-*.jsonl")
    assert "secret-project" not in file.read_text()
    (row,) = corpus.read_corpus([file])
    assert row.source.name == corpus.OWN
    assert row.recipe.model.name == "my-model"
    assert row.memory["peak_allocated"].value > 0
    assert row.recipe_digest == row.recipe.digest
    assert "pull request" in capfd.readouterr().err


def test_a_run_that_was_quicker_than_its_device_gives_no_row(tmp_path):
    plan = made.plan()
    run = made.run(plan)
    rate = run.measurements["time.tokens_per_second"]
    beyond = replace(rate, value=100 * plan.time.tokens_per_second)
    quick = replace(run, measurements={**run.measurements, "time.tokens_per_second": beyond})
    file = tmp_path / "rows.jsonl"
    with pytest.raises(InvalidRequest, match="is no measurement"):
        corpus.append_row(file, plan, quick)
    assert not file.exists()
    corpus.append_row(file, plan, run)
    assert len(corpus.read_corpus([file])) == 1
