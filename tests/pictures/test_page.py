"""A page needs nothing but itself."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from lightning_dpx.pictures import Section, draw_devices, write_page
from tests.pictures.made_up import DEVICES


class Elements(HTMLParser):
    """Counts elements, and collects what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loaded += [value for key, value in attrs if key in ("src", "href", "xlink:href") and value[:1] != "#"]


def test_a_page_is_one_file_with_escaped_text(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "report.html"
    section = Section("A <b>heading", "x < y", ["a", "b"], [["1", "<2>"]], [draw_devices(DEVICES)], "a & b")
    write_page(path, "Title & more", [section, Section("Empty")])
    page = Elements()
    text = path.read_text(encoding="utf-8")
    page.feed(text)
    assert page.counts["svg"] == page.counts["table"] == page.counts["pre"] == 1
    assert page.counts["h2"] == 2
    assert not page.loaded
    assert "script" not in page.counts
    assert "b" not in page.counts
    assert all(part in text for part in ("A &lt;b&gt;heading", "x &lt; y", "&lt;2&gt;", "a &amp; b", "cuda:4"))
