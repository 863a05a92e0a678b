"""Parts of generated Markdown: tables, and blocks that a title opens."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape


def table_lines(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table; a column whose title begins with # is aligned to the right."""
    yield "|" + "".join(f" {column.removeprefix('#')} |" if column else " |" for column in columns)
    yield "|" + "".join("--:|" if column.startswith("#") else "---|" for column in columns)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return the text of `table_lines`."""
    return "\n".join(table_lines(columns, rows))


def table_cell(text: str) -> str:
    """A text of any lines as a cell of a table."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def folded_block(title: str, markdown_text: str) -> str:
    """Markdown under a title that opens it. The blank lines let Markdown be read within HTML."""
    return f'<details markdown="1">\n<summary>{escape(title, quote=False)}</summary>\n\n{markdown_text}\n\n</details>'
