"""What TRL's own loss from tiles allocates, beside `sizes.tiled`; run by TRL's Python.

Writes a JSON list: name, bytes that autograd keeps (theirs, ours), and allocations and frees.
Triton's kernels, which allocate nothing, do nothing here; products into fp32 are as on a GPU.
"""

import json
import sys
from types import SimpleNamespace

import torch
import trl.kernels.chunked_logprob as kernels
import trl.trainer.utils as utils

import size_oracle
from memfit.meta.losses import tiled


class Nothing:
    """A kernel that is launched on a grid."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


class Model(torch.nn.Module):
    """Hidden states and a head, as the class's forward leaves them to TRL."""

    def __init__(self, hidden, weight):
        super().__init__()
        text = SimpleNamespace(model_type="llama")
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.base_model = lambda **_: SimpleNamespace(last_hidden_state=hidden)
        self.head = SimpleNamespace(weight=weight, bias=None)

    def get_output_embeddings(self):
        return self.head


def theirs(hidden, weight):
    model = Model(hidden, weight)
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    outputs = model.forward(labels=LABELS[tuple(hidden.shape[:2])], fused_lm_head=True)
    return (-outputs.log_probs).sum() / 2.0  # as SFTTrainer.compute_loss


def ours(hidden, weight):
    return tiled.tiled_loss(hidden, weight, None)


LOW = ("bfloat16",)
TOKENS, COLUMNS = 64, 512  # of a tile here: no other number of the code depends on them
CASES = {
    "one tile": ([((2, 9, 16),), ((100, 16),)], False),
    "tiles of both kinds": ([((3, 51, 8),), ((1100, 8),)], False),
    "16 bits": ([((2, 81, 8), *LOW), ((700, 8), *LOW)], False),
    "autocast": ([((3, 51, 8),), ((1100, 8),)], True),
    "a frozen head": ([((2, 81, 8), *LOW), ((700, 8), "bfloat16", False)], False),
}
LABELS = {
    (rows, n): torch.zeros(rows, n, dtype=torch.int64) for rows, n in ((2, 9), (3, 51), (2, 81))
}


def without_copy(events):
    """Torch puts into an index of a copy where a dispatch mode looks on, and in place elsewhere.

    FunctionsManual.cpp, index_backward: areAnyTensorSubclassLike.
    """
    backwards = range(len(events) - 4, -1, -1)
    at = next(i for i in backwards if events[i] == events[i + 1] == -events[i + 2] > 0)
    return [*events[:at], *events[at + 1 : at + 3], *events[at + 4 :]]


def main():
    for module in (kernels, utils):
        module._use_triton = lambda device: True
    kernels._forward_kernel = kernels._backward_kernel = Nothing()
    kernels.triton = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    kernels._addmm_fp32 = lambda acc, a, b: None
    kernels.TOKEN_CHUNK_SIZE = tiled.TOKENS = TOKENS
    utils._CHUNKED_LOGPROB_CHUNK_SIZE = tiled.COLUMNS = COLUMNS
    found = []
    for name, (inputs, autocast) in CASES.items():
        real, saved = size_oracle.theirs(theirs, inputs, autocast)
        mine, kept = size_oracle.ours(ours, inputs, autocast)
        found.append([name, [saved, kept], without_copy(real[1:]), mine])  # the batch has labels
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
