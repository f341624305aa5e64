"""Published models that have the sizes of a catalogue row, and texts that name a row in words.

A hub id is looked up in a table, never guessed from its suffix: `Mixtral-8x22B-Instruct-v0.1` has
768 more rows in its vocabulary than its base. Whole ids of publishers stand in `published.toml`;
mirrors are accounts that publish the same weights under the same name, family by family.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from memfit.catalog.toml_rows import slug

# account -> rows whose names begin so, and which it publishes with unchanged sizes. Unsloth's Phi
# are rewritten as Llama and Mistral, and stand in no list.
MIRRORS = {
    "unsloth": (
        "llama-", "qwen2-", "qwen2.5-", "qwen3-", "qwen3.5-", "gemma-", "mistral-7b-v0",
        "mistral-nemo", "mistral-small-24b", "mistral-large-", "mixtral-", "magistral-",
        "openhermes-", "deepseek-r1-distill-", "granite-", "gpt-oss-", "olmo-2-", "olmo-3-",
        "smollm2-", "tinyllama", "kimi-k2-", "glm-4.7-flash", "minimax-m2",
    ),
    "nousresearch": ("llama-2-", "llama-3-", "llama-3.1-", "llama-3.2-", "codellama-"),
    "huggyllama": ("llama-",),
    "mistral-community": ("mixtral-",),
    # the accounts of ModelScope's own, which ms-swift names (swift/llm/model/model/*.py)
    "llm-research": ("llama-", "mistral-", "gemma-", "phi-"),
    "ai-modelscope": ("llama-", "mistral-", "mixtral-", "gemma-", "phi-2"),
    "zhipuai": ("glm-",),
    "01ai": ("yi-",),
    "openai-mirror": ("gpt-oss-",),
    "thudm": ("glm-",),  # the name of zai-org before
}  # fmt: skip
# names of a mirror's own for a published model
ALIASES = {
    "unsloth/llama-2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "unsloth/llama-2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "unsloth/tinyllama-chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "unsloth/tinyllama": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "unsloth/mistral-7b": "mistralai/Mistral-7B-v0.1",
    "unsloth/mistral-7b-v0.2": "alpindale/Mistral-7B-v0.2-hf",
    "unsloth/codellama-7b": "codellama/CodeLlama-7b-hf",
    "unsloth/codellama-13b": "codellama/CodeLlama-13b-hf",
    "unsloth/codellama-34b": "codellama/CodeLlama-34b-hf",
    "unsloth/yi-6b": "01-ai/Yi-6B",
    "unsloth/solar-10.7b": "upstage/SOLAR-10.7B-v1.0",
    "unsloth/llama-3.1-nemotron-70b-instruct": "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF",
    "unsloth/zephyr-sft": "HuggingFaceH4/mistral-7b-sft-beta",
}
# how names of a family that memfit lacks begin -> the family, as docs/lacking.md has it
UNSUPPORTED = {
    "gemma-4-": "gemma4", "gemma-3n-": "gemma3n",
    "ministral-3-": "ministral3", "mistral-small-3.": "mistral3", "lfm2": "lfm2",
    "granite-4.": "granitemoehybrid", "llama-4-": "llama4",
    "nvidia-nemotron-": "nemotron_h", "deepseek-v4": "deepseek_v4", "deepseek-v3.2": "deepseek_v32",
    "glm-5": "glm_moe_dsa", "falcon-mamba": "falcon_mamba", "llama-3_3-nemotron": "nemotron-nas",
    "exaone-3": "exaone", "mimo-": "mimo", "step-3.5": "step3p5", "minicpm": "minicpm3",
    "falcon-h1": "falcon_h1", "ernie-4.5-21b": "ernie4_5_moe", "ernie-4.5-300b": "ernie4_5_moe",
    "kimi-linear": "kimi_linear", "internlm3": "internlm3", "apertus-": "apertus",
    "gpt-neo-": "gpt_neo", "nemotron-nano": "nemotron_h", "nemotron-3": "nemotron_h",
}  # fmt: skip
MORE_THAN_TEXT = frozenset({
    "vl", "vision", "omni", "audio", "llava", "pixtral", "internvl", "paligemma", "idefics",
    "multimodal", "voxtral", "whisper",
})  # fmt: skip
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
    "onnx": "ONNX is a graph for inference",
    "openvino": "OpenVINO is Intel's format for inference",
    "ctranslate2": "CTranslate2 is a format for inference",
    "hqq": "HQQ is a quantisation for inference",
    "aqlm": "AQLM is a quantisation for inference",
    "int4": "its weights are stored in 4 bits for inference",
    "int8": "its weights are stored in 8 bits for inference",
    "4bit": "its weights are stored in 4 bits",
    "8bit": "its weights are stored in 8 bits",
}


_ADDRESS = re.compile(
    r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co|modelscope\.cn/models)/", re.IGNORECASE
)


def strip_address(name: str) -> str:
    """The hub id of a page's address, which people copy; any other name as it is."""
    bare = _ADDRESS.sub("", name.strip())
    return name if bare == name.strip() else "/".join(bare.split("/")[:2])


class Named(NamedTuple):
    """The row whose sizes a published model has."""

    row: str
    hub: str  # where its weights are
    max_sequence: int = 0  # 0: the row's own
    quantised: bool = False  # the name is of a copy in four bits; `hub` is of what it was made from


@cache
def published_ids() -> dict[str, tuple[str, ...]]:
    """Row -> hub ids with its sizes, as published.toml has them."""
    text = Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    return {row: tuple(ids) for row, ids in tomllib.loads(text).items()}


@cache
def _by_id() -> dict[str, Named]:
    """Every published id in lower case, and what follows its account."""
    found: dict[str, Named] = {}
    for row, ids in published_ids().items():
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
    name = name.strip()
    quantised = IN_FOUR_BITS.search(name) is not None
    bare = IN_FOUR_BITS.sub("", name)
    published = ALIASES.get(bare.lower(), bare)
    account, slash, tail = published.lower().rpartition("/")
    made = _by_id().get(published.lower())
    if made is None and published is not bare:
        made = Named(rows[tail], "")
    if made is None and slash and account in MIRRORS:
        made = _by_id().get(tail) or (Named(rows[tail], "") if tail in rows else None)
        if made is None or not made.row.startswith(MIRRORS[account]):
            return None
        made = made if quantised else made._replace(hub=name)
    if made is None or (quantised and account not in MIRRORS and published is bare):
        return None
    return made._replace(quantised=True) if quantised else made


def find_unsupported(name: str) -> str:
    """The family of a model by its name, where memfit has none for it; "" for another name."""
    tail = slug(name).rpartition("/")[2].replace("_", "-") + "-"
    starts = [start for start in UNSUPPORTED if tail.startswith(start.replace("_", "-"))]
    return UNSUPPORTED[max(starts, key=len)] if starts else ""


def reads_more_than_text(name: str) -> bool:
    """Whether a model reads images or sound, by the words that publishers put in such names."""
    words = re.split(r"[/_.\-\s]+|(?<=[a-z])(?=\d)", name.lower())
    return not MORE_THAN_TEXT.isdisjoint(words)


def find_stored(name: str) -> str:
    """Why a model of this name is not trained: its weights are quantised; "" for another name."""
    words = re.split(r"[/_.\-\s]+", name.lower())
    return next((why for word, why in STORED.items() if word in words), "")


def strip_stored(name: str) -> str:
    """The name without its format, which may be that of the model that it was made from."""
    words = "|".join(STORED)
    name = re.sub(rf"[-_.\s](quantized\.)?({words})\b.*$", "", name, flags=re.IGNORECASE)
    return re.sub(r"-(bf16|fp16)$", "", name.rpartition("/")[2], flags=re.IGNORECASE)


# rows that a size in words means only with a word of their own: `qwen 7b` is of the latest Qwen
_OWN_WORDS = {
    "qwen1.5-": "1.5", "granite-3b-code": "code", "granite-8b-code": "code",
    "mixtral-8x22b-instruct": "instruct", "amd-": "amd", "open_llama": "open",
    "mistral-7b-v0.1": "v0.1", "mistral-7b-v0.2": "v0.2", "qwen2.5-14b": "2.5",
    "qwen2.5-32b": "2.5", "gemma-2-27b": "2", "llama-2-70b": "2",
}  # fmt: skip
_WHOLE = re.compile(r"a?\d+(?:\.\d+)?[bm]|\d+x\d+b|v\d[\d.]*")  # 8b, a3b, 8x7b, v0.1
_GLUED = re.compile(r"([a-z]+)(\d[\d.]*)")  # llama3.1, qwen3


def split_words(name: str) -> frozenset[str]:
    """`Qwen2.5-7B` -> qwen, 2.5, 7b: what a name in words is compared by."""
    found: list[str] = []
    for word in re.split(r"[-/:\s]+", re.sub(r"(\d)_(\d)", r"\1.\2", slug(name))):
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
    return tuple(Named(row, "") for row in _begun(own, words) or own) or tuple(
        named for each, named in _by_id().items() if "/" in each and words <= split_words(each)
    )


def find_earlier(name: str, rows: Iterable[str]) -> list[str]:
    """Rows that the words of a name fit too, and that only a word of their own would name."""
    words = split_words(name)
    return _begun([r for r in rows if words <= split_words(r) and _needs_its_word(r, words)], words)


def find_begun(name: str, rows: Iterable[str]) -> list[str]:
    """Rows that have every word of a name without a size, and begin with one: of `llama3`."""
    words = split_words(name)
    return _begun([row for row in rows if words and words <= split_words(row)], words)


def _begun(rows: list[str], words: frozenset[str]) -> list[str]:
    """Of some rows those whose names begin with a typed word."""
    return [row for row in rows if split_words(re.split(r"[-_.]", row)[0]) & words]
