"""Data prepared in small shards, in a session of its own, for the test that kills it."""

import os
from pathlib import Path

from memfit.train.data.readers import find_sources
from memfit.train.data.shards import parts, split, workers
from memfit.train.data.tokenizer import read_tokenizer
from memfit.train.data.tokens import read_corpus


def prepare(data: Path, tokenizer: str, cache: Path, enough: int) -> None:
    os.setsid()
    split.SHARD, workers.ENOUGH, parts.COMMIT = 8000, enough, 0.0
    workers._count_cores = lambda: 3
    read_corpus(find_sources(str(data)), read_tokenizer(tokenizer), "sft", cache)
