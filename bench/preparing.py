"""Preparing data: tokens per CPU second beside an older checkout, and 2 GB of text and 5 M chats.

    python bench/preparing.py rates TREE [MEGABYTES]   a checkout to compare with; 100 MB each
    python bench/preparing.py large [MEGABYTES ROWS]   2,000 MB of text, 5,000,000 conversations

`rates`: the data is cut into files of 10 MB, and each file is tokenised by both checkouts in turn,
whole processes, so that what else the machine does falls on both; the tokens must be equal, bit by
bit. Such a file is too small for processes side by side: what is compared is one process, without
its imports. `large`: tokenised by one command that is killed after a while, gone on from by the
next one, and started once more with the cache; what all processes hold is looked at meanwhile.
Writes bench/results/preparing.json. Texts are drawn from 100,000 made words by Zipf's law; above 64
MB they are paragraphs of those, in another order. The tokenizer is a byte-level BPE of 32,000
tokens trained on the first 10 MB.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "preparing.json"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIECE, POOL = 10, 64  # MB: a file of `rates`; what is drawn word by word
WIDTH = 1024
KINDS = {"text": "pretrain", "chats": "sft"}


class Words:
    """Made words and sentences of them."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = np.random.default_rng(seed)
        letters = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
        sizes = np.maximum(1, self._chance.gamma(4, 1.6, 100_000).astype(int))
        weights = 1 / np.arange(2, len(letters) + 2)
        drawn = self._chance.choice(letters, sizes.sum(), p=weights / weights.sum())
        ends = np.cumsum(sizes)
        text = "".join(drawn.tolist())
        self._words = [text[e - n : e] for e, n in zip(ends.tolist(), sizes.tolist(), strict=True)]
        odds = 1 / np.arange(1, len(self._words) + 1) ** 1.05
        self._odds = np.cumsum(odds / odds.sum())

    def paragraph(self, count: int) -> str:
        """Some words, with points, numbers and ends of lines between them."""
        found = np.searchsorted(self._odds, self._chance.random(count)).tolist()
        parts = []
        for number, index in enumerate(found, 1):
            word = self._words[min(index, len(self._words) - 1)]
            mark = ". " if number % 13 == 0 else ", " if number % 7 == 0 else " "
            parts.append(f"{word}{mark}" if number % 97 else f"{word} {index}\n")
        return "".join(parts)

    def pool(self, megabytes: int) -> list[str]:
        """Paragraphs of so many MB in all."""
        made, size = [], 0
        while size < megabytes * 10**6:
            made.append(self.paragraph(400) + "\n\n")
            size += len(made[-1])
        return made


def write_text(path: Path, megabytes: int, pool: list[str], seed: int = 1) -> None:
    """A text of paragraphs in a drawn order."""
    chance, size = np.random.default_rng(seed), 0
    with path.open("w") as file:
        while size < megabytes * 10**6:
            for index in chance.permutation(len(pool)).tolist():
                size += file.write(pool[index])
                if size >= megabytes * 10**6:
                    break


def write_chats(path: Path, rows: int, pool: list[str], seed: int = 2) -> None:
    """Conversations of one or two turns, of a short question and a longer answer each."""
    said = [s.strip() for p in pool[: 4 * 10**4] for s in p.split(". ") if s.strip()]
    drawn = np.random.default_rng(seed).integers(0, len(said), (rows, 4)).tolist()
    with path.open("w") as file:
        for number, (a, b, c, d) in enumerate(drawn):
            turns = [("user", said[a] + "?"), ("assistant", said[b] + ".")]
            if number % 3 == 0:
                turns += [("user", said[c] + "?"), ("assistant", said[d] + ".")]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def prepare(data: Path, objective: str, tokenizer: Path, cache: Path, *, rows: bool) -> None:
    """What a child does; prints a line of JSON."""
    from memfit.train.data.readers import find_sources
    from memfit.train.data.sampler import build_rows
    from memfit.train.data.tokenizer import read_tokenizer
    from memfit.train.data.tokens import read_corpus

    own = read_tokenizer(str(tokenizer))
    start = time.perf_counter()
    sources = find_sources(str(data), cache) if rows else find_sources(str(data))
    corpus = read_corpus(sources, own, objective, cache)
    found: dict[str, Any] = {"read_seconds": time.perf_counter() - start}
    if rows:
        made, _ = build_rows(
            corpus, objective=objective, packing=True, width=WIDTH, seed=0, name="the data"
        )
        count = int(-(-made.per_epoch // 1))
        for first in range(0, count, 2**16):
            made.costs(first, min(2**16, count - first))
        found |= {"rows": count, "with_rows_seconds": time.perf_counter() - start}
    else:
        arrays = [corpus.tokens, corpus.offsets]
        arrays += [] if corpus.learned is None else [corpus.learned]
        found["bits"] = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16]
    print(json.dumps({**found, "tokens": len(corpus.tokens), "documents": corpus.documents}))


def start(tree: Path, *arguments: object) -> subprocess.Popen[str]:
    """A child that prepares with a checkout's code."""
    command = [sys.executable, __file__, "prepare", *(str(a) for a in arguments)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def end(child: subprocess.Popen[str]) -> tuple[dict[str, Any], float]:
    """What a child printed, and CPU seconds of it and of its own children."""
    assert child.stdout is not None
    text = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return json.loads(text) if text else {}, used.ru_utime + used.ru_stime


def sum_memory(pid: int) -> dict[str, int]:
    """Bytes of a process and all of its descendants; `resident` counts shared pages of each."""
    total = {"RssAnon": 0, "VmRSS": 0, "Pss": 0}
    waiting = [pid]
    while waiting:
        home = Path("/proc") / str(waiting.pop())
        try:
            lines = (home / "status").read_text() + (home / "smaps_rollup").read_text()
            for task in (home / "task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except (OSError, ProcessLookupError):
            continue  # it has ended
        for row in (line.split() for line in lines.splitlines()):
            if row and row[0][:-1] in total:
                total[row[0][:-1]] += int(row[1]) * 1024
    return total


def make_tokenizer(folder: Path, pool: list[str]) -> Path:
    """A tokenizer with a chat template."""
    from memfit.train.data.tokenizer import train_tokenizer

    texts, size = [], 0
    while size < 10**7:
        texts.append(pool[len(texts) % len(pool)])
        size += len(texts[-1])
    own = train_tokenizer(texts, 32_000, folder)
    own.wrapped.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    own.wrapped.chat_template = TEMPLATE
    own.save(folder)
    return folder


def compare(tree: Path, megabytes: int, home: Path) -> None:
    """Both checkouts, file by file in turn; written after each."""
    pool = Words().pool(min(megabytes, POOL))
    tokenizer = make_tokenizer(home / "tokenizer", pool)
    found: dict[str, Any] = {}
    for kind, objective in KINDS.items():
        used = {"before": 0.0, "now": 0.0}
        tokens = 0
        for number in range(megabytes // PIECE):
            file = home / ("a.txt" if kind == "text" else "a.jsonl")
            if kind == "text":
                write_text(file, PIECE, pool, seed=number)
            else:
                write_chats(file, PIECE * 10**6 // 340, pool, seed=number)
            arms = {"before": tree, "now": HERE.parent}
            answers = {}
            for arm in sorted(arms, reverse=number % 2 == 0):
                cache = home / f"{arm}-{kind}-{number}"
                child = start(arms[arm], file, objective, tokenizer, cache, "")
                answers[arm], seconds = end(child)
                assert child.returncode == 0
                used[arm] += seconds - imports(arms[arm], tokenizer)
                subprocess.run(["rm", "-r", str(cache)], check=True)
            assert answers["before"]["bits"] == answers["now"]["bits"], "other tokens"
            tokens += answers["now"]["tokens"]
            rates = {arm: tokens / seconds for arm, seconds in used.items()}
            found[kind] = {
                "megabytes": PIECE * (number + 1), "tokens_per_cpu_second": rates,
                "ratio": rates["now"] / rates["before"],
            }  # fmt: skip
            write("rates", found)


_imports: dict[Path, float] = {}


def imports(tree: Path, tokenizer: Path) -> float:
    """CPU seconds of a child that imports, reads the tokenizer and stops: in every command."""
    if tree not in _imports:
        code = (
            "from memfit.train.data.tokens import read_corpus;"
            f"from memfit.train.data.tokenizer import read_tokenizer as r; r({str(tokenizer)!r})"
        )
        times = []
        for _ in range(3):
            environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
            child = subprocess.Popen([sys.executable, "-c", code], env=environment)
            _, _, used = os.wait4(child.pid, 0)
            child.returncode = 0
            times.append(used.ru_utime + used.ru_stime)
        _imports[tree] = sorted(times)[1]
    return _imports[tree]


def watch(child: subprocess.Popen[str], cache: Path, stop: int | None) -> dict[str, int]:
    """Peaks until it ends, or until its tokens take more than `stop` bytes: then it is killed."""
    peaks = {"RssAnon": 0, "VmRSS": 0, "Pss": 0}
    while True:
        for name, value in sum_memory(child.pid).items():
            peaks[name] = max(peaks[name], value)
        made = sum(p.stat().st_size for p in (cache / "tokens").glob(".*/tokens.bin"))
        if stop is not None and made > stop:
            child.kill()
            return peaks
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return peaks
        time.sleep(0.25)


def prepare_large(kind: str, file: Path, tokenizer: Path, home: Path) -> dict[str, Any]:
    """Tokenised, killed, gone on from, and read once more."""
    cache, objective, tree = home / f"cache-{kind}", KINDS[kind], HERE.parent
    begun = time.perf_counter()
    peaks, ended = [], []
    for stop in (file.stat().st_size // 8, None):
        child = start(tree, file, objective, tokenizer, cache, "rows")
        peaks.append(watch(child, cache, stop))
        answer, _ = end(child)
        folders = list((cache / "tokens").glob(".*/progress.json"))
        ended.append(json.loads(folders[0].read_text())["shards"] if folders else None)
        print(kind, child.returncode, answer, peaks[-1], ended, flush=True)
    wall = time.perf_counter() - begun
    child = start(tree, file, objective, tokenizer, cache, "rows")
    watch(child, cache, None)
    again, _ = end(child)
    size = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file())
    return {
        "bytes": file.stat().st_size, "tokens": answer["tokens"], "documents": answer["documents"],
        "seconds": wall,
        "shards_when_killed": ended[0],
        "peak": {name: max(p[name] for p in peaks) for name in peaks[0]},
        "second_start_seconds": {
            "tokens": again["read_seconds"], "with_rows": again["with_rows_seconds"]
        },
        "cache_bytes": size,
    }  # fmt: skip


def write(name: str, found: dict[str, Any]) -> None:
    """Put an answer beside the other one of the file."""
    from memfit.records import write_atomically

    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[name] = {
        **found, "cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{n: version(n) for n in ("transformers", "tokenizers", "numpy")},
    }  # fmt: skip
    write_atomically(RESULTS, (json.dumps(known, indent=1) + "\n").encode())
    print(json.dumps(known[name], indent=1))


def main() -> None:
    """See the module."""
    name, *rest = sys.argv[1:]
    if name == "prepare":
        data, objective, tokenizer, cache, rows = rest
        prepare(Path(data), objective, Path(tokenizer), Path(cache), rows=bool(rows))
        return
    with tempfile.TemporaryDirectory(prefix="memfit-preparing-") as folder:
        home = Path(folder)
        if name == "rates":
            tree, megabytes = Path(rest[0]).resolve(), int(rest[1]) if rest[1:] else 100
            compare(tree, megabytes, home)
            return
        megabytes, rows = (int(x) for x in rest) if rest else (2000, 5_000_000)
        pool = Words().pool(min(megabytes, POOL))
        tokenizer = make_tokenizer(home / "tokenizer", pool)
        write_text(home / "a.txt", megabytes, pool)
        write_chats(home / "a.jsonl", rows, pool)
        del pool
        found: dict[str, Any] = {}
        for kind, file in (("chats", "a.jsonl"), ("text", "a.txt")):
            found[kind] = prepare_large(kind, home / file, tokenizer, home)
            write("large", found)


if __name__ == "__main__":
    main()
