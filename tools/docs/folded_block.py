"""A block that is folded on the site and where the tree is browsed."""

from html import escape


def folded_block(title: str, markdown_text: str) -> str:
    """Markdown under a title that opens it. The blank lines let Markdown be read within HTML."""
    return f'<details markdown="1">\n<summary>{escape(title, quote=False)}</summary>\n\n{markdown_text}\n\n</details>'
