"""torch's out-of-memory message, parsed and joined with a prediction."""

import io
import json

import pytest

from memfit import api
from memfit.check.out_of_memory import find_segment, read_message
from memfit.cli.app import app, run
from memfit.core.errors import InvalidRequest

GIB, MIB = 2**30, 2**20
# the words of torch 2.x (c10/cuda/CUDACachingAllocator.cpp), and those of 1.x
NEW = (
    "step 1\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a"
    " total capacity of 23.65 GiB of which 512.00 MiB is free. Including non-PyTorch memory, this"
    " process has 23.10 GiB memory in use. Of the allocated memory 21.50 GiB is allocated by"
    " PyTorch, and 1.25 GiB is reserved by PyTorch but unallocated. If reserved but unallocated"
    " memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total"
    " capacity; 13.50 GiB already allocated; 8.75 MiB free; 13.75 GiB reserved in total by PyTorch)"
)
CONFIG = (
    "model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 2048\nper_device_train_batch_size: 1\n"
    "dtype: bfloat16\nattn_implementation: sdpa\n"
)


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_the_words_of_torch_2(tmp_path):
    message = read_message(write(tmp_path, "log", NEW))
    assert message.tried == round(1.16 * GIB)
    assert message.capacity == round(23.65 * GIB)
    assert message.free == 512 * MIB
    assert message.allocated == round(21.5 * GIB)
    assert message.reserved == round(21.5 * GIB) + round(1.25 * GIB)
    assert message.in_use == round(23.1 * GIB)
    assert message.outside == pytest.approx(0.4 * GIB, abs=0.01 * GIB)


def test_the_words_of_torch_1(tmp_path):
    message = read_message(write(tmp_path, "log", OLD))
    assert (message.tried, message.free) == (20 * MIB, round(8.75 * MIB))
    assert message.reserved == round(13.75 * GIB)


@pytest.mark.parametrize("log", ["loss 2.3\n", "", NEW[: NEW.index(" 1.16")]])  # and one cut short
def test_a_log_without_one_is_refused(tmp_path, log):
    with pytest.raises(InvalidRequest, match="no CUDA out-of-memory"):
        read_message(write(tmp_path, "log", log))


@pytest.mark.parametrize(("tensor", "segment"), [
    (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB),
    (10 * MIB + 1, 12 * MIB),
])  # fmt: skip
def test_segments_are_the_allocators(tensor, segment):
    """get_allocation_size: kSmallBuffer, kLargeBuffer, and multiples of kRoundLarge."""
    assert find_segment(tensor) == segment


def test_the_tensor_is_named_by_its_size(tmp_path):
    """2048 x 151,936 logits in fp32 are 1.159 GiB; in 16 bits they are half of that."""
    config = write(tmp_path, "trl.yaml", CONFIG)
    _, plan = api.check([config], {"hardware": {"device": "rtx-4090"}})
    found = api.diagnose(read_message(write(tmp_path, "log", NEW)), plan)
    assert [(one.what, one.dtype) for one in found.suspects] == [("logits", "float32")]
    assert found.fragmented
    half = NEW.replace("1.16 GiB", "594.00 MiB")
    low = api.diagnose(read_message(write(tmp_path, "log", half)), plan)
    # and as large as the embedding in fp32, 151,936 x 1024: both are named
    assert [one.nbytes for one in low.suspects] == [2048 * 151_936 * 2] * 2
    assert {one.dtype for one in low.suspects} == {"bfloat16", "float32"}
    other = api.diagnose(read_message(write(tmp_path, "log", NEW.replace("1.16", "7.77"))), plan)
    assert other.suspects == ()
    assert not other.fragmented


def test_the_phase_is_the_first_that_needs_so_much(tmp_path):
    config = write(tmp_path, "trl.yaml", CONFIG)
    _, plan = api.check([config], {"hardware": {"device": "rtx-4090"}})
    peaks = {phase.value: plan.ledger.live(phase) for phase in plan.ledger.phases}
    log = NEW.replace("21.50 GiB", f"{(peaks['loss'] - 1.2 * GIB) / GIB:.2f} GiB")
    phase = api.diagnose(read_message(write(tmp_path, "log", log)), plan).phase
    assert peaks[phase] >= peaks["loss"] - GIB
    assert api.diagnose(read_message(write(tmp_path, "log", NEW)), plan).phase == ""


def test_the_command_joins_both(tmp_path, capsys):
    config, log = write(tmp_path, "trl.yaml", CONFIG), write(tmp_path, "log", NEW)
    words = ["check", str(config), "--device", "rtx-4090", "--oom", str(log)]
    run(lambda: app.main(words, prog_name="memfit", standalone_mode=False))
    assert "logits, 1 x 2048 x 151936 in float32" in " ".join(capsys.readouterr().out.split())
    run(lambda: app.main([*words, "--json"], prog_name="memfit", standalone_mode=False))
    assert json.loads(capsys.readouterr().out)["oom"]["suspects"][0]["what"] == "logits"


@pytest.mark.parametrize(("device", "other"), [("rtx-4090", False), ("h100-sxm", True)])
def test_a_message_of_another_device_is_said_to_be(tmp_path, device, other, capsys):
    config, log = write(tmp_path, "trl.yaml", CONFIG), write(tmp_path, "log", NEW)
    words = ["check", str(config), "--device", device, "--oom", str(log)]
    run(lambda: app.main(words, prog_name="memfit", standalone_mode=False))
    assert ("of another size than the one" in " ".join(capsys.readouterr().out.split())) == other


def test_numbers_that_end_a_sentence_are_numbers(tmp_path):
    log = write(tmp_path, "log", "CUDA out of memory. Tried to allocate 1.5 GiB. 1.2.3 GiB free")
    assert read_message(log).tried == 3 * GIB // 2
    with pytest.raises(InvalidRequest, match="no CUDA out-of-memory"):
        read_message(write(tmp_path, "log", "Tried to allocate ... GiB"))


# a card that another process shares, pieces that no tensor uses, and rows longer than planned
OTHERS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of"
    " which 1.00 GiB is free. Process 1 has 12.00 GiB memory in use. Including non-PyTorch memory,"
    " this process has 10.65 GiB memory in use. Of the allocated memory 9.00 GiB is allocated by"
    " PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)
PIECES = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 23.65 GiB of"
    " which 0.50 GiB is free. Including non-PyTorch memory, this process has 23.15 GiB memory in"
    " use. Of the allocated memory 8.00 GiB is allocated by PyTorch, and 14.60 GiB is reserved by"
    " PyTorch but unallocated."
)
# 16,384 tokens' logits over 151,936 words in 16 bits: 4.64 GiB, eight times those planned
LONGER = (
    "CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 23.65 GiB of"
    " which 3.00 GiB is free. Including non-PyTorch memory, this process has 20.65 GiB memory in"
    " use. Of the allocated memory 19.80 GiB is allocated by PyTorch, and 300.00 MiB is reserved by"
    " PyTorch but unallocated."
)


def check_with(folder, log, *, stdin=None, monkeypatch=None):
    config = write(folder, "trl.yaml", CONFIG)
    if stdin is None:
        source = str(write(folder, "log", log))
    else:
        source = "-"
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log.encode())))
    words = ["check", str(config), "--device", "rtx-4090", "--oom", source]
    return run(lambda: app.main(words, prog_name="memfit", standalone_mode=False))


@pytest.mark.parametrize(
    ("log", "first", "nbytes"),
    [
        (OTHERS, "other processes", 12.0 * GIB),
        (PIECES, "fragmentation", 14.6 * GIB),
        (LONGER, "logits of 16,384 tokens", None),
    ],
)
def test_a_log_that_contradicts_the_prediction_is_the_headline(
    tmp_path, capsys, log, first, nbytes
):
    assert check_with(tmp_path, log) == 4
    said = " ".join(capsys.readouterr().out.split())
    headline = said[: said.index("a step of")]
    assert "NOT KNOWN" in headline
    assert "FITS" not in said
    assert "ran out of memory" in headline
    assert first in headline
    _, plan = api.check([tmp_path / "trl.yaml"], {"hardware": {"device": "rtx-4090"}})
    causes = api.diagnose(read_message(tmp_path / "log"), plan).causes
    assert list(causes) == sorted(causes, key=lambda one: -one.nbytes)
    if nbytes:
        assert causes[0].nbytes == pytest.approx(nbytes, abs=0.02 * GIB)


def test_a_log_is_read_from_stdin(tmp_path, monkeypatch, capsys):
    assert check_with(tmp_path, OTHERS, stdin=True, monkeypatch=monkeypatch) == 4
    assert "other processes" in capsys.readouterr().out


def test_absurd_digits_are_no_message(tmp_path):
    digits = "9" * 400
    with pytest.raises(InvalidRequest, match="no CUDA out-of-memory"):
        read_message(write(tmp_path, "log", f"Tried to allocate {digits}.00 GiB"))
    log = NEW.replace("23.65", f"{digits}.{digits}")
    assert read_message(write(tmp_path, "log", log)).capacity is None


def test_a_prediction_that_agrees_with_its_log_keeps_its_verdict(tmp_path):
    config = write(tmp_path, "trl.yaml", CONFIG.replace("0.6B", "8B"))
    words = ["check", str(config), "--device", "rtx-4090", "--oom", str(write(tmp_path, "l", NEW))]
    assert run(lambda: app.main(words, prog_name="memfit", standalone_mode=False)) == 3
