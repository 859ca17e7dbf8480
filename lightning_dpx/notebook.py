"""What a notebook shows of an object at the end of a cell: a table, as ``_repr_html_`` returns it."""

import html
from collections.abc import Sequence

_RIGHT = "text-align: right"
_LEFT = "text-align: left"
_BOLD = "; font-weight: bold"


def html_table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, most_rows: int = 24, marked: int = -1
) -> str:
    """A table in HTML.

    Args:
        caption: A sentence above it.
        heads: Of the columns; the first one holds names, the others numbers.
        rows: A text for each column.
        most_rows: Those beyond are counted, and not shown.
        marked: The number of a row in bold.
    """
    lines = [f'<table><caption style="{_LEFT}">{html.escape(caption)}</caption>', "<thead><tr>"]
    for column, head in enumerate(heads):
        # What a model or a device is called may hold anything, so all texts are escaped.
        lines.append(f'<th style="{_RIGHT if column else _LEFT}">{html.escape(head)}</th>')
    lines.append("</tr></thead><tbody>")
    for number, row in enumerate(rows[:most_rows]):
        weight = _BOLD if number == marked else ""
        lines.append("<tr>")
        for column, text in enumerate(row):
            lines.append(f'<td style="{_RIGHT if column else _LEFT}{weight}">{html.escape(text)}</td>')
        lines.append("</tr>")
    if len(rows) > most_rows:
        more = f"{len(rows) - most_rows} more"
        lines.append(f'<tr><td colspan="{len(heads)}" style="{_LEFT}">{more}</td></tr>')
    lines.append("</tbody></table>")
    return "".join(lines)
