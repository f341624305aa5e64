"""Liger's kernels and losses without logits: what their keys do, and where they do nothing."""

import pytest

from memfit.check import read_files
from memfit.core.errors import InvalidRequest
from undescribed import assert_named

AXOLOTL = "base_model: Qwen/Qwen3-0.6B\n"
TRL = "model_name_or_path: Qwen/Qwen3-0.6B\nuse_liger_kernel: true\n"
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\n"
CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"


def read(folder, text, **more):
    file = folder / "tool.yaml"
    file.write_text(text)
    return read_files([file], {"hardware": {"device": "h100-sxm"}, **more})


def test_a_loss_without_its_plugin_is_not_there(tmp_path):
    found = read(tmp_path, AXOLOTL + "cut_cross_entropy: true\n")
    assert found.request.loss != "fused"
    assert any("does nothing without its plugin" in said for said in found.assumed)
    assert read(tmp_path, AXOLOTL + CUT).request.loss == "fused"


def test_a_loss_that_is_set_stands_in_place_of_the_files(tmp_path):
    assert read(tmp_path, AXOLOTL + CUT, loss="plain").request.loss == "plain"


def test_ligers_loss_of_pairs_is_refused(tmp_path):
    assert_named(
        r"`use_liger_kernel: true` in .* of pairs is not described",
        lambda: read(tmp_path, TRL + "precompute_ref_log_probs: true\nloss_type: sigmoid\n"),
    )


@pytest.mark.parametrize("text", [AXOLOTL + LIGER, AXOLOTL + CUT, TRL])
def test_memfits_own_step_has_none_of_them(tmp_path, text):
    with pytest.raises(InvalidRequest, match="memfit's own step has none of these kernels"):
        read(tmp_path, text, framework="memfit")
