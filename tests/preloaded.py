"""What the fork server imports before it forks; see forked.py.

Threads come of OMP_NUM_THREADS=1. `torch.set_num_threads` is not called before a fork: a rank was
once lost to "Invalid thread pool!" of torch's OpenMP. Its cause is not known: 6,000 forks did not
show it again.
"""

import faulthandler
import gc

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from tiny_runs import tiny_recipe

from memfit.records.recipe import Lora
from memfit.train.run import loop as loop
from memfit.train.step.build import build_model

LORA = Lora(rank=3, alpha=8.0, targets=("q_proj", "v_proj"))

faulthandler.enable()  # a process that dies of a signal says where
assert torch.get_num_threads() == 1, "OMP_NUM_THREADS=1 is missing"
for base_format in ("", "fp32", "nf4"):  # imports what is only imported when it is needed
    adapted = {"method": "lora", "lora": LORA, "base_format": base_format} if base_format else {}
    build_model(tiny_recipe(**adapted), "cpu")
gc.collect()
gc.freeze()  # each run collects before its first step: 0.3 s less without the libraries
