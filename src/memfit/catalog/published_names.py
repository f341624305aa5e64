"""Published models that have the sizes of a catalogue row, and texts that name a row in words.

A hub id is looked up in a table, never guessed from its suffix: `Mixtral-8x22B-Instruct-v0.1` has
768 more rows in its vocabulary than its base. Whole ids of publishers are listed with their row;
mirrors are accounts that publish the same weights under the same name, family by family.
Sizes: litgpt/config.py (Apache-2.0) has those of every id up to DeepSeek; of the others the model's
own card says that it was trained from the row's model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from memfit.catalog.toml_rows import slug

# row -> ids with its sizes; `@` gives the longest row of tokens where that differs
PUBLISHED: dict[str, tuple[str, ...]] = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-chat-hf",),
    "llama-2-13b": ("meta-llama/Llama-2-13b-chat-hf",),
    "llama-2-70b": ("meta-llama/Llama-2-70b-chat-hf",),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Llama-3-8B-Instruct"),
    "llama-3-70b": ("meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Llama-3-70B-Instruct"),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B-Instruct",
        "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF",
    ),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B-Instruct", "meta-llama/Meta-Llama-3.1-405B-Instruct",
    ),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B-Instruct",),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B-Instruct",),
    "llama-3.3-70b-instruct": ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B",),
    "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",),
    "mistral-7b-v0.1": ("mistralai/Mistral-7B-Instruct-v0.1",),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-Instruct-v0.3",),
    "mixtral-8x7b-v0.1": ("mistralai/Mixtral-8x7B-Instruct-v0.1",),
    "qwen2.5-0.5b": (
        "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B", "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    "qwen2.5-1.5b": (
        "Qwen/Qwen2.5-1.5B-Instruct@32768", "Qwen/Qwen2.5-Coder-1.5B@32768",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct@32768", "Qwen/Qwen2.5-Math-1.5B@4096",
        "Qwen/Qwen2.5-Math-1.5B-Instruct@4096",
    ),
    "qwen2.5-3b": (
        "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-Coder-3B", "Qwen/Qwen2.5-Coder-3B-Instruct",
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B-Instruct@32768", "Qwen/Qwen2.5-Coder-7B@32768",
        "Qwen/Qwen2.5-Coder-7B-Instruct@32768", "Qwen/Qwen2.5-Math-7B@4096",
        "Qwen/Qwen2.5-Math-7B-Instruct@4096",
    ),
    "qwen2.5-14b": (
        "Qwen/Qwen2.5-14B-Instruct@32768", "Qwen/Qwen2.5-Coder-14B@32768",
        "Qwen/Qwen2.5-Coder-14B-Instruct@32768",
    ),
    "qwen2.5-32b": (
        "Qwen/Qwen2.5-32B-Instruct@32768", "Qwen/Qwen2.5-Coder-32B@32768",
        "Qwen/Qwen2.5-Coder-32B-Instruct@32768", "Qwen/QwQ-32B@40960", "Qwen/QwQ-32B-Preview@32768",
    ),
    "qwen2.5-72b": (
        "Qwen/Qwen2.5-72B-Instruct@32768", "Qwen/Qwen2.5-Math-72B@4096",
        "Qwen/Qwen2.5-Math-72B-Instruct@4096",
    ),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B-Base@32768",),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B-Base@32768",),
    "qwen3-4b": (
        "Qwen/Qwen3-4B-Base@32768", "Qwen/Qwen3-4B-Instruct-2507@262144",
        "Qwen/Qwen3-4B-Thinking-2507@262144",
    ),
    "qwen3-8b": ("Qwen/Qwen3-8B-Base@32768",),
    "qwen3-14b": ("Qwen/Qwen3-14B-Base@32768",),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B-Base@32768", "Qwen/Qwen3-30B-A3B-Instruct-2507@262144",
        "Qwen/Qwen3-30B-A3B-Thinking-2507@262144",
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B-Instruct-2507@262144", "Qwen/Qwen3-235B-A22B-Thinking-2507@262144",
    ),
    "gemma-2b": ("google/gemma-2b-it",),
    "gemma-7b": ("google/gemma-7b-it",),
    "gemma-2-2b": ("google/gemma-2-2b-it",),
    "gemma-2-9b": ("google/gemma-2-9b-it",),
    "gemma-2-27b": ("google/gemma-2-27b-it",),
    "phi-4": ("microsoft/Phi-4-reasoning@32768", "microsoft/Phi-4-reasoning-plus@32768"),
    "phi-4-mini-instruct": ("microsoft/Phi-4-mini-reasoning",),
    "olmo-2-7b": (
        "allenai/OLMo-2-1124-7B-SFT", "allenai/OLMo-2-1124-7B-DPO",
        "allenai/OLMo-2-1124-7B-Instruct",
    ),
    "olmo-2-13b": (
        "allenai/OLMo-2-1124-13B-SFT", "allenai/OLMo-2-1124-13B-DPO",
        "allenai/OLMo-2-1124-13B-Instruct",
    ),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct",),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M-Instruct",),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B-Instruct",),
    "stablelm-3b-4e1t": ("stabilityai/stablelm-zephyr-3b",),
    "falcon-7b": ("tiiuae/falcon-7b-instruct",),
    "falcon-40b": ("tiiuae/falcon-40b-instruct",),
    "falcon-180b": ("tiiuae/falcon-180B-chat",),
    **{
        f"pythia-{size}": (f"EleutherAI/pythia-{size}-deduped",)
        for size in ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
    },
    "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite-Chat",),
    "deepseek-v2": ("deepseek-ai/DeepSeek-V2-Chat",),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3-0324"),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1-Zero", "deepseek-ai/DeepSeek-R1-0528"),
    "gemma-3-1b-it": ("google/gemma-3-1b-pt",),
}  # fmt: skip
# account -> rows whose names begin so, and which it publishes with unchanged sizes. Unsloth's Phi
# are rewritten as Llama and Mistral, and stand in no list.
MIRRORS = {
    "unsloth": ("llama-", "qwen2.5-", "qwen3-", "gemma-", "mistral-7b-v0", "smollm2-", "tinyllama"),
    "nousresearch": ("llama-2-", "llama-3-", "llama-3.1-", "llama-3.2-"),
}
# names of a mirror's own for a published model
ALIASES = {
    "unsloth/llama-2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "unsloth/llama-2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "unsloth/tinyllama-chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
IN_FOUR_BITS = re.compile(r"(-unsloth)?-bnb-4bit$", re.IGNORECASE)  # whose name a mirror adds
STORED = {  # formats that are for inference: what is in a name -> what it is
    "gguf": "GGUF is llama.cpp's file for inference",
    "ggml": "GGML is llama.cpp's older file for inference",
    "gptq": "GPTQ is a quantisation for inference, calibrated once and fixed",
    "awq": "AWQ is a quantisation for inference, calibrated once and fixed",
    "exl2": "EXL2 is ExLlama's quantisation for inference",
    "exl3": "EXL3 is ExLlama's quantisation for inference",
    "mlx": "MLX is Apple's format",
    "fp8": "its weights are stored in FP8 for inference",
    "nvfp4": "its weights are stored in NVFP4 for inference",
    "w4a16": "its weights are stored in 4 bits for inference",
    "w8a8": "its weights and activations are in 8 bits for inference",
    "hqq": "HQQ is a quantisation for inference",
    "aqlm": "AQLM is a quantisation for inference",
    "int4": "its weights are stored in 4 bits for inference",
    "int8": "its weights are stored in 8 bits for inference",
    "4bit": "its weights are stored in 4 bits",
    "8bit": "its weights are stored in 8 bits",
}


class Named(NamedTuple):
    """The row whose sizes a published model has."""

    row: str
    hub: str  # where its weights are
    max_sequence: int = 0  # 0: the row's own
    quantised: bool = False  # the name is of a copy in four bits; `hub` is of what it was made from


@cache
def _by_id() -> dict[str, Named]:
    """Every published id in lower case, and what follows its account."""
    found: dict[str, Named] = {}
    for row, ids in PUBLISHED.items():
        for each in ids:
            hub, _, longest = each.partition("@")
            named = Named(row, hub, int(longest or 0))
            found[hub.lower()] = named
            found.setdefault(hub.lower().partition("/")[2], named)
    return found


def find_published(name: str, rows: dict[str, str]) -> Named | None:
    """The row of a hub id that is no row's own; None where no row is known to have its sizes.

    rows: names of the catalogue's rows, in lower case, and of their hub ids -> their ids.
    """
    name = ALIASES.get(name.strip().lower(), name.strip())
    lower = name.lower()
    account, slash, tail = lower.rpartition("/")
    if (found := _by_id().get(lower)) is not None:
        return found
    if not slash or account not in MIRRORS:
        return None
    tail = IN_FOUR_BITS.sub("", tail)
    row = rows.get(tail, "")
    made = _by_id().get(tail) or (Named(row, "") if row else None)
    if made is None or not made.row.startswith(MIRRORS[account]):
        return None
    if IN_FOUR_BITS.search(lower):
        return made._replace(quantised=True)
    return made._replace(hub=name)


def find_stored(name: str) -> str:
    """Why a model of this name is not trained: its weights are quantised; "" for another name."""
    words = re.split(r"[/_.\-\s]+", name.lower())
    return next((why for word, why in STORED.items() if word in words), "")


def strip_stored(name: str) -> str:
    """The name without its format, which may be that of the model that it was made from."""
    words = "|".join(STORED)
    return re.sub(rf"[-_.]({words})\b.*$", "", name, flags=re.IGNORECASE).rpartition("/")[2]


# rows that a size in words means only with a word of their own: `qwen 7b` is of the latest Qwen
_OWN_WORDS = {
    "qwen1.5-": "1.5", "granite-3b-code": "code", "granite-8b-code": "code",
    "mixtral-8x22b-instruct": "instruct", "amd-": "amd", "open_llama": "open",
}  # fmt: skip
_WHOLE = re.compile(r"a?\d+(?:\.\d+)?[bm]|\d+x\d+b|v\d[\d.]*")  # 8b, a3b, 8x7b, v0.1
_GLUED = re.compile(r"([a-z]+)(\d[\d.]*)")  # llama3.1, qwen3


def split_words(name: str) -> frozenset[str]:
    """`Qwen2.5-7B` -> qwen, 2.5, 7b: what a name in words is compared by."""
    found: list[str] = []
    for word in re.split(r"[-/\s]+", re.sub(r"(\d)_(\d)", r"\1.\2", slug(name))):
        glued = _GLUED.fullmatch(word)
        found += [word] if _WHOLE.fullmatch(word) or not glued else [glued[1], glued[2]]
    return frozenset(word for word in found if word)


def _needs_its_word(row: str, words: frozenset[str]) -> bool:
    """Whether a row is of an earlier or a further trained model, and its own word is not typed."""
    return any(row.startswith(start) and word not in words for start, word in _OWN_WORDS.items())


def find_in_words(name: str, rows: Iterable[str]) -> tuple[Named, ...]:
    """Rows that a size in words means (`llama 8b`, `qwen3 8b base`); () without a size in it.

    A row whose name begins with a typed word goes before one that has it further on: `mistral 7b`
    is not OpenHermes.
    """
    words = split_words(name)
    if "/" in name or not any(_WHOLE.fullmatch(word) and word[-1] in "bm" for word in words):
        return ()
    own = [row for row in rows if words <= split_words(row) and not _needs_its_word(row, words)]
    begun = [row for row in own if split_words(re.split(r"[-_.]", row)[0]) & words]
    return tuple(Named(row, "") for row in begun or own) or tuple(
        named for each, named in _by_id().items() if "/" in each and words <= split_words(each)
    )
