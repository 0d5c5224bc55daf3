"""Hook of mkdocs: links that leave `docs/` become names, as a site has no source tree beside it.

`tests/test_docs.py` checks their targets: it reads the pages as they lie in the repository.
"""

from __future__ import annotations

import re

# [yes][swap] with [swap]: ../../tests/ema/test_swap.py "tests/ema/test_swap.py::test_name"
_DEFINITION = re.compile(r'^\[([\w-]+)\]: (?:\.\./)+\S+ "([^"]*)"\n?', re.MULTILINE)
_REFERENCE = re.compile(r"\[([^\]]+)\]\[([\w-]+)\]")
# [text](../../fixtures/README.md) and [text](../examples/train_resume.py)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: object, **_: object) -> str:
    """Replace links to files that are no pages by their text and path."""
    depth = page.file.src_uri.count("/")  # type: ignore[attr-defined]

    def shown(found: re.Match[str]) -> str:
        leaves = found[2].count("../") > depth or not re.search(r"\.md(#|$)", found[3])
        return f"{found[1]} (`{found[3]}`)" if leaves else found[0]

    titles = dict(_DEFINITION.findall(markdown))

    def titled(found: re.Match[str]) -> str:
        title = titles.get(found[2])
        return found[0] if title is None else f'<abbr title="{title}">{found[1]}</abbr>'

    return _OUTSIDE.sub(shown, _REFERENCE.sub(titled, _DEFINITION.sub("", markdown)))
