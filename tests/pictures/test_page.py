"""A page needs nothing but itself."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightning_dpx.pictures import Section, draw_devices, draw_plan, write_page
from tests.pictures.made_up import DEVICES, planned


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
    assert page.counts["script"] == 1
    assert "b" not in page.counts
    assert all(part in text for part in ("A &lt;b&gt;heading", "x &lt; y", "&lt;2&gt;", "a &amp; b", "cuda:4"))


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium")
FIND_OUT = """
<script>
const out = document.createElement("output");
const first = (column) => document.querySelector("tr:has(td)").children[column].textContent;
const heads = document.querySelectorAll("th");
heads[1].click(); out.textContent += "largest " + first(0);
heads[1].click(); out.textContent += "; smallest " + first(0);
heads[0].click(); heads[0].click(); out.textContent += "; by name " + first(0);
document.querySelector(".figure").click();
const picture = document.querySelector("svg");
out.textContent += "; large " + (picture.getBoundingClientRect().width > window.innerWidth);
document.querySelector(".figure").click();
out.textContent += "; scrolls " + (document.documentElement.scrollWidth > window.innerWidth);
const box = document.querySelector("svg[data-hover]").getBoundingClientRect();
const event = new MouseEvent("mousemove", {clientX: box.left + box.width * 0.7, clientY: box.top + 9, bubbles: true});
document.querySelector("svg[data-hover]").dispatchEvent(event);
out.textContent += "; says " + document.querySelector(".tip").textContent;
document.body.append(out);
</script>
"""


@needs_browser
@pytest.mark.parametrize("width", [400, 1200])
def test_tables_are_sorted_pictures_grow_and_the_pointer_names_the_step(tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    profile, plan = planned()
    rows = [["b", "300 MiB"], ["c", "1.5 GiB"], ["a", "1,023 KiB"]]
    write_page(path, "Title", [Section("Table", heads=["name", "peak"], rows=rows, figures=[draw_plan(profile, plan)])])
    path.write_text(path.read_text().replace("</body>", f"{FIND_OUT}</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    folder = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run([*command, folder, path.as_uri()], capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r"<output>(.*)</output>", shown.stdout)
    assert found is not None, shown.stdout[-500:] + shown.stderr[-500:]
    said = found[1]
    assert "largest c; smallest a; by name a; large true; scrolls false; says backward of " in said, said
