"""Tokens of rows cut among ranks: which are whose, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from memfit.core.errors import InvalidRequest
from memfit.parallelism.context import own_parts, row_multiple
from memfit.parallelism.limits import check_ranks
from memfit.records.recipe import Parallel
from tiny_models import CONFIGS, make_recipe


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [2, 3])
def test_tokens_are_dealt_as_torch_deals_them(cp, tp):
    parallel = Parallel(cp=cp, tp=tp)
    tokens = 4 * row_multiple(parallel)
    order = _HeadTailLoadBalancer(tokens, cp, "cpu")._generate_indices()[0]
    for rank in range(parallel.world):
        place = rank // tp
        mine = [token for part in own_parts(tokens, parallel, rank) for token in part]
        assert mine == order.chunk(cp)[place].tolist()
        assert len(mine) % tp == 0


@pytest.mark.parametrize(("changes", "says"), [
    ({"packing": True}, "keeps documents apart"),
    ({"attention": "math"}, "`attention: math` is not held"),
    ({"offload": "activations"}, "`offload: activations` is not built"),
    ({"sequence_length": 18}, "cuts rows into parts of a 4th, which `sequence_length: 18`"),
    ({"family": "gpt2"}, "those of `gpt2` are `gpt2`"),
    ({"config": CONFIGS["mistral"] | {"sliding_window": 8}}, "within windows of 8 tokens"),
    ({"config": CONFIGS["llama"] | {"head_dim": 12}}, "heads of a multiple of 8"),
])  # fmt: skip
def test_what_ranks_cannot_share_is_refused(changes, says):
    recipe = make_recipe(**changes)
    check_ranks(recipe)
    with pytest.raises(InvalidRequest, match=says) as error:
        check_ranks(replace(recipe, parallel=Parallel(cp=2)))
    assert error.value.hint


def test_torchs_own_context_still_has_no_kernel_of_a_cpu():
    """Why `train.ring` calls what it hands over to: once this fails, it need not."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        given = [torch.zeros(1, 2, 32, 16) for _ in range(3)]
        whole = context_parallel(mesh, buffers=given, buffer_seq_dims=[2] * 3)
        with (
            whole, sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            pytest.raises(NotImplementedError, match="flash_attention_for_cpu"),
        ):  # fmt: skip
            torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    finally:
        dist.destroy_process_group()
