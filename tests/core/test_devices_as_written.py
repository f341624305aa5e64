import pytest

from memfit.core.devices_as_written import MOST, read_devices
from memfit.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "name", "count", "nodes"),
    [
        ("8xH100", "H100", 8, 0), ("H100:8", "H100", 8, 0), ("8 x H100", "H100", 8, 0),
        ("8×H100", "H100", 8, 0), ("8 H100", "H100", 8, 0), ("H100 x8", "H100", 8, 0),
        ("h100x8", "h100", 8, 0), ("2x4090", "4090", 2, 0), ("rtx-4090:4x2", "rtx-4090", 2, 4),
        ("4090x2", "4090", 2, 0), ("4090 x2", "4090", 2, 0), ("4090*2", "4090", 2, 0),
        ("2 4090", "4090", 2, 0), ("24 GB", "24 GB", 0, 0), ("24 gib", "24 gib", 0, 0),
        ("2 gb10", "gb10", 2, 0), ("8 B200", "B200", 8, 0),
        ("mi300x x 8", "mi300x", 8, 0), (" H100 : 8 ", "H100", 8, 0),
        ("1024xH100", "H100", 1024, 0), ("8 H100 pcie", "H100 pcie", 8, 0),
        ("cpu-x86", "cpu-x86", 0, 0), ("4060 Ti", "4060 Ti", 0, 0), ("6000 Ada", "6000 Ada", 0, 0),
        ("2x4060 Ti", "4060 Ti", 2, 0), ("rtx 4090", "rtx 4090", 0, 0),
        ("rtx4090", "rtx4090", 0, 0), ("mi300x", "mi300x", 0, 0),
        ("A100 80GB", "A100 80GB", 0, 0), ("RTX 6000 Ada", "RTX 6000 Ada", 0, 0),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", 0, 0), ("tpu v7x", "tpu v7x", 0, 0),
    ],
)  # fmt: skip
def test_a_text_says_which_device_and_how_many(text, name, count, nodes):
    assert read_devices(text) == (name, count, nodes)


@pytest.mark.parametrize("text", ["H100:0", "0xH100", "4090:0x2"])
def test_no_devices_are_refused(text):
    with pytest.raises(InvalidRequest, match="names no device"):
        read_devices(text)


@pytest.mark.parametrize("number", [str(MOST + 1), "9" * 30, "9" * 5001])
@pytest.mark.parametrize("text", ["H100:{}", "{}xH100", "H100 x {}", "4090:{}x2", "4090:2x{}"])
def test_more_than_any_cluster_has_is_refused(number, text):
    """Five thousand digits are no number that Python reads; factors of 10^18 take minutes."""
    with pytest.raises(InvalidRequest, match="names more than 1,048,576 devices"):
        read_devices(text.format(number))


def test_as_many_as_may_be_are_read():
    assert read_devices(f"H100:{MOST // 8}x008") == ("H100", 8, MOST // 8)
    with pytest.raises(InvalidRequest, match="names more than"):
        read_devices(f"H100:{MOST // 4}x8")
