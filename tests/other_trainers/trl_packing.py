"""What TRL's own packing and collator make of examples; run by TRL's Python.

Reads a JSON list of [strategy, width, lengths of examples], whose tokens count on from 0; writes
for each the packed rows, each with its ids and the positions that its collator gives them.
"""

import json
import sys

from datasets import Dataset
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


def pack(strategy, width, lengths):
    examples, first = [], 0
    for length in lengths:
        examples.append(list(range(first, first + length)))
        first += length
    whole = {"batch_size": None}  # TRL packs a thousand examples at a time unless it is told to
    packed = pack_dataset(
        Dataset.from_dict({"input_ids": examples}), width, strategy=strategy, map_kwargs=whole
    )
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    rows = []
    for row in packed:
        batch = collate([row])
        rows.append((batch["input_ids"][0].tolist(), batch["position_ids"][0].tolist()))
    return rows


json.dump([pack(*case) for case in json.load(sys.stdin)], sys.stdout)
