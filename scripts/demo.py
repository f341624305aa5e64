"""The demo: a small Llama-shaped model from scratch on real text, then LoRA on what it learned.

The text is what every machine with Python has: the standard library's own source. Everything
happens through the command line that a user has: `memfit train`, `memfit generate`. With --ranks
the first run is on so many processes, and the only one.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
FOLDER = Path("runs/demo")
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo"}
EVALUATION_EVERY = 25  # every 25th file is held out


def read_sources() -> list[tuple[str, str]]:
    """(name, text) of the standard library's modules, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED & set(relative.parts) or path.stat().st_size < 2000:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        found.append((relative.as_posix().replace("/", "."), text))
    return found


def read_pairs(sources: list[tuple[str, str]]) -> list[dict[str, str]]:
    """What a function is called and takes -> what its docstring says it does."""
    pairs = []
    for _, text in sources:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (words := ast.get_docstring(node)):
                head = f"def {node.name}({ast.unparse(node.args)}):\n"
                first = words.strip().split("\n\n")[0]
                pairs.append({"prompt": head, "completion": f'    """{first}"""\n'})
    return pairs


def write_data() -> None:
    """Corpus, held-out files and docstring pairs under runs/demo."""
    sources = read_sources()
    for index, (name, text) in enumerate(sources):
        part = "held_out" if index % EVALUATION_EVERY == 0 else "corpus"
        target = FOLDER / part / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    lines = [json.dumps(pair) for pair in read_pairs(sources)]
    size = sum(len(text) for _, text in sources) / 1e6
    print(f"{len(sources)} modules ({size:.1f} MB), {len(lines)} docstrings", flush=True)
    (FOLDER / "docstrings.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def memfit(*arguments: str) -> None:
    """Run memfit as a user would; stop where it stops."""
    print(f"\n$ memfit {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "memfit", *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1, help="processes of this machine")
    asked = parser.parse_args()
    steps = asked.steps
    if not (FOLDER / "docstrings.jsonl").exists():  # written last
        write_data()
    full, lora = str(FOLDER / "full"), str(FOLDER / "lora")
    recipes = HERE / "recipes"
    if asked.ranks > 1:
        many = str(FOLDER / f"ranks-{asked.ranks}")
        memfit("train", str(recipes / "demo-llama_full_cpu.yaml"), "--folder", many,
               "--set", f"task.steps={steps}", "--set", f"hardware.count={asked.ranks}",
               "--set", "micro_batch=2")  # fmt: skip
        memfit("generate", many, "def read_lines(path):")
        print(f"\nopen {many}/report.html; {many}/ranks has what the other ranks say")
        return
    memfit("train", str(recipes / "demo-llama_full_cpu.yaml"), "--folder", full,
           "--set", f"task.steps={steps}")  # fmt: skip
    memfit("generate", full, "def read_lines(path):")
    memfit("train", str(recipes / "demo-llama_lora_cpu.yaml"), "--folder", lora,
           "--set", f"task.steps={max(4, steps // 3)}")  # fmt: skip
    memfit("generate", lora, "def read_lines(path):\n")
    memfit("report", full)
    print(f"\nopen {FOLDER / 'full' / 'report.html'} and {FOLDER / 'lora' / 'report.html'}")


if __name__ == "__main__":
    main()
