"""For `make site`: a link out of docs/ to a file of the repository is its text alone."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]"  # the text
    r"\((?!\w+:|#)([^)\s#]+)(?:#[^)\s]*)?(?:\s+['\"]([^'\"]*)['\"])?\)"  # the file, the title
)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_path).parent

    def name(link: re.Match[str]) -> str:
        inside = (here / link[2]).resolve().is_relative_to(docs)
        if inside:
            return link[0]
        return f'<span title="{link[3]}">{link[1]}</span>' if link[3] else link[1]

    return LINK.sub(name, markdown)
