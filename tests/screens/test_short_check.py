"""The short screen of `memfit check`: 24 lines of 80 columns, whatever the files say."""

import pytest

from memfit.screens.short import MOST
from memfit.screens.widgets.terminal import cells
from typed_commands import quick

MODEL = "model_name_or_path: Qwen/Qwen3-0.6B\n"
BIG = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 8\nmax_length: 4096\n"
STRANGE = "".join(f"a_key_that_nobody_knows_{n}: some/long-model-name-{n}\n" for n in range(9))
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 23.65 GiB of which 1.00 GiB is free. Process 1 has 12.00 GiB memory in use."
    " Including non-PyTorch memory, this process has 10.65 GiB memory in use. Of the allocated"
    " memory 9.00 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)
CASES = {
    "fits": (MODEL, "", 0, ["FITS", "a step", "tokens/s", "read as TRL"]),
    "does not fit": (BIG, "", 3, ["DOES NOT FIT", "Smallest changes that fit", "GiB"]),
    "one key": (MODEL + "reward_model_path: a/b\n", "", 4, ["NOT KNOWN", "`reward_model_path: a"]),
    "nine keys": (BIG + STRANGE, "", 3, ["Not described (", "of 9)", "Smallest changes"]),
    "a log": (MODEL, LOG, 4, ["The out-of-memory message", "beyond the prediction, "]),
    "all at once": (BIG + STRANGE, LOG, 3, ["Not described", "2.00 GiB was asked", "Smallest"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "log", "code", "said"), CASES.values(), ids=CASES)
def test_an_answer_is_24_lines_of_80_columns(tmp_path, text, log, code, said):
    (tmp_path / "sft.yaml").write_text(text)
    words = ["check", str(tmp_path / "sft.yaml"), "--device", "rtx-4090"]
    if log:
        (tmp_path / "log").write_text(log)
        words += ["--oom", str(tmp_path / "log")]
    done, out, err = quick(*words)
    assert (done, err) == (code, "")
    lines = out.splitlines()
    assert len(lines) <= MOST
    assert max(map(cells, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    for part in said:
        assert part in out
    assert "Assumed: " in out
    assert quick(*words, "--why")[1].count("\n") > 2 * MOST
