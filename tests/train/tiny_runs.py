"""A tiny recipe whose knobs a test changes, and text to train it on."""

import random
from pathlib import Path

from msgspec.structs import replace

from memfit.plan.request.model_reference import with_head
from memfit.records.model import ModelReference
from memfit.records.recipe import Freeze, Lora, Optimizer, Recipe

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OPTIMIZER = Optimizer(
    name="adamw", implementation="fused", learning_rate=3e-3, weight_decay=0.0, beta1=0.9,
    beta2=0.999, eps=1e-8, momentum=0.9, schedule="cosine", warmup_steps=2, clip_norm=1.0,
)  # fmt: skip
RECIPE = Recipe(
    model=ModelReference(name="tiny", source="", config=CONFIG),
    weights="random", objective="pretrain", method="full", lora=Lora(), freeze=Freeze(),
    base_format="fp32", precision="fp32", optimizer=OPTIMIZER, recompute_blocks=0,
    attention="flash", loss="plain", loss_chunk=0, sequence_length=32, packing=True,
    micro_batch=2, accumulation=2, steps=6, device="cpu-x86", seed=0,
)  # fmt: skip


def tiny_recipe(**changes) -> Recipe:
    """RECIPE with keys changed; `optimizer` may be a dict of changes to its own keys."""
    if isinstance(changes.get("optimizer"), dict):
        changes["optimizer"] = replace(OPTIMIZER, **changes["optimizer"])
    made = replace(RECIPE, **changes)
    return replace(made, model=with_head(made.model, made.objective))


def write_text(folder: Path, documents: int = 12) -> Path:
    """A folder of small text files about nothing, the same every time."""
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "hills"]
    chance = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        text = " ".join(chance.choice(words) for _ in range(20 + 7 * i))
        (folder / f"{i:02}.txt").write_text(f"Chapter {i}.\n{text}.\n")
    return folder
