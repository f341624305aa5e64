"""The page that is shipped: what its sources build to, and no heavier than it may be."""

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES, PAGE = ROOT / "ui", ROOT / "src" / "memfit" / "ui" / "page"
MOST = 150_000  # bytes, gzipped


def test_the_shipped_page_is_of_these_sources():
    """The same digest as `ui/build.mjs` makes; it needs no Node."""
    digest = hashlib.sha256()
    names = [f"src/{path.name}" for path in sorted((SOURCES / "src").iterdir())]
    for name in (*names, "build.mjs", "package-lock.json", "tsconfig.json"):
        digest.update(f"{name}\0".encode() + (SOURCES / name).read_bytes() + b"\0")
    for name in ("app.js", "app.css"):
        head = (PAGE / name).read_text(encoding="utf-8").splitlines()[0]
        found = re.search(r"built from ui/ ([0-9a-f]{64})", head)
        assert found is not None, "no digest in its first line"
        assert found[1] == digest.hexdigest(), "build it again: make page"
    for name in ("index.html", "icon.svg"):
        assert (PAGE / name).read_bytes() == (SOURCES / "src" / name).read_bytes()


def test_the_shipped_page_is_what_the_sources_build_to(tmp_path):
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    if not (SOURCES / "node_modules" / "esbuild").exists():
        pytest.skip("esbuild is not installed: make page-tools")
    subprocess.run(["node", SOURCES / "build.mjs", tmp_path], check=True, capture_output=True)
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_bytes() for path in PAGE.iterdir()}


def test_every_package_whose_code_is_in_the_page_is_named_with_its_licence():
    """What the sources import, and what npm's lock file says of it; it needs no Node."""
    texts = [path.read_text(encoding="utf-8") for path in (SOURCES / "src").glob("*.ts*")]
    imported = {
        name.split("/")[0] for text in texts for name in re.findall(r'from "([^."][^"]*)"', text)
    }
    locked = json.loads((SOURCES / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    licences = (PAGE / "licences.txt").read_text(encoding="utf-8")
    assert imported
    for name in imported:
        row = locked[f"node_modules/{name}"]
        assert f"{name} {row['version']} ({row['license']})\n" in licences
    assert licences.count("Copyright") == len(imported)
    assert licences in (ROOT / "NOTICES.md").read_text(encoding="utf-8"), "run `make docs`"


def test_the_page_is_light():
    assert sum(len(gzip.compress(path.read_bytes())) for path in PAGE.iterdir()) < MOST


def test_the_page_names_no_other_origin():
    """Only the names of XML's namespaces, which nothing is asked of."""
    for path in PAGE.iterdir():
        found = set(re.findall(r"https?://[^\s\"'`)]+", path.read_text(encoding="utf-8")))
        assert all("www.w3.org" in url for url in found), (path, found)
