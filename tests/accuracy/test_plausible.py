"""A measured step beyond the device's data sheet is no measurement."""

import pytest
from msgspec.structs import replace

from memfit.accuracy.plausible import check_possible
from memfit.catalog import find_device
from memfit.core.errors import InvalidRequest


@pytest.fixture
def on_h100(tiny_recipe):
    return replace(tiny_recipe, device="h100-sxm", precision="bf16-mixed", base_format="bf16")


def test_more_than_the_data_sheets_peak_is_refused_with_both_figures(on_h100):
    with pytest.raises(InvalidRequest) as refused:
        check_possible(on_h100, 2e15, 1.0)
    assert "2000 TFLOP/s" in refused.value.message
    assert "`h100-sxm` has 989" in refused.value.message
    assert "synchronize" in refused.value.hint


def test_the_peak_itself_is_possible_and_more_devices_reach_more(on_h100):
    peak = find_device("h100-sxm").flops["bf16"]
    check_possible(on_h100, peak, 1.0)
    eight = replace(on_h100, parallel=replace(on_h100.parallel, dp_shard=8))
    check_possible(eight, 8 * peak, 1.0)
    with pytest.raises(InvalidRequest):
        check_possible(eight, 8.1 * peak, 1.0)


def test_of_a_cpu_nothing_is_said(tiny_recipe):
    check_possible(tiny_recipe, 1e30, 1.0)
