"""A report as one HTML file that needs nothing else: no fonts, no network, no script but its own."""

import html
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dpx.pictures.figure import svg_of
from lightning_dpx.pictures.page_script import SCRIPT

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
.about { color: #777; font-size: .85rem } .scroll { overflow-x: auto; margin-bottom: 1rem }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
th { font-weight: 600; border-bottom: 2px solid #bbb; cursor: pointer }
th:first-child, td:first-child { text-align: left }
th[aria-sort=ascending]::after { content: " \\25b4" } th[aria-sort=descending]::after { content: " \\25be" }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 4px }
.figure { overflow: auto; cursor: zoom-in } .figure.large { cursor: zoom-out }
.figure.large svg { max-width: none; width: 250% }
.tip { position: fixed; pointer-events: none; background: #222; color: #eee; font-size: .8rem; padding: .2rem .5rem }
.tip { border-radius: 3px; max-width: 90vw; overflow-wrap: anywhere }
pre { font-size: .8rem; background: #f6f6f6; padding: .8rem; overflow-x: auto }
@media (max-width: 40rem) { body { margin: 1rem auto; padding: 0 .7rem } }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd } .about { color: #999 } pre { background: #262626 }
  th { border-bottom-color: #666 } th, td { border-bottom-color: #383838 }
}
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Attributes:
        heading: Its heading.
        text: A paragraph.
        heads: Of the table's columns; no table without.
        rows: Of the table.
        figures: Drawn below.
        printed: Text in a fixed width, below those.
    """

    heading: str
    text: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Sequence[Any] = ()
    printed: str = ""


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Writes the report.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    about = f"lightning_dpx on torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    body = "\n".join(_section(section) for section in sections)
    # A report comes at the end of a long run, which a folder that is not there should not spoil.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>"
        f'<p class="about">{html.escape(about)}</p>\n{body}\n'
        # At the end, when everything is there that it looks for.
        f"<script>{SCRIPT}</script></body></html>\n",
        encoding="utf-8",
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    if section.heads:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in section.heads)
        rows = ""
        for row in section.rows:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            rows += f"<tr>{cells}</tr>"
        # A wide table scrolls by itself, and the page does not.
        parts.append(f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>')
    parts += [f'<div class="figure">{svg_of(figure)}</div>' for figure in section.figures]
    if section.printed:
        parts.append(f"<pre>{html.escape(section.printed)}</pre>")
    return "\n".join(parts)
