"""For `make site`: a link out of docs/ to a file of the repository is its text alone."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_path).parent

    def name(link: re.Match[str]) -> str:
        inside = (here / link[2]).resolve().is_relative_to(docs)
        return link[0] if inside else link[1]

    return LINK.sub(name, markdown)
