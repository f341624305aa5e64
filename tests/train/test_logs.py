"""A log that cannot be written ends the run with the file's name, wherever the disk fails."""

import pytest

from memfit.core.errors import RunFailed
from memfit.train.run.logs import NAME, Log

ROW = {
    "step": 1, "loss": 1.0, "learning_rate": 0.1, "seconds": 1.0, "tokens_per_second": 1.0,
    "tokens": 1, "watched": False,
}  # fmt: skip


def fail_to_open(folder):
    (folder / "run").write_text("a file where the run's folder should be")
    Log(folder / "run", 0)


def fail_to_write(folder):
    with Log(folder, 0) as log, open("/dev/full", "ab", buffering=0) as full:
        log._file.close()
        log._file = full
        log.write(ROW)


def fail_to_flush(folder):
    with Log(folder, 0) as log, open("/dev/full", "ab") as full:
        log._file.close()
        log._file = full  # which cannot be synchronised either
        log.flush()


@pytest.mark.parametrize(
    ("fail", "name"), [(fail_to_open, "run/"), (fail_to_write, ""), (fail_to_flush, "")]
)
def test_a_disk_that_fails_ends_the_run_by_name(fail, name, tmp_path):
    with pytest.raises(RunFailed) as caught:
        fail(tmp_path)
    assert f"could not write `{tmp_path / (name + NAME)}`: " in caught.value.message
    assert "start the same command again" in caught.value.hint
