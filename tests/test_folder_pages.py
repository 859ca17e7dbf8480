"""The pages that explain a folder: what they name exists, and what they show runs."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_dpx"
PAGES = sorted(PACKAGE.rglob("README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.relative_to(PACKAGE)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(r"`([\w/]+\.(?:py|cpp))`", page.read_text())
    assert named
    missing = [name for name in named if not (page.parent / name).exists() and not (PACKAGE / name).exists()]
    assert not missing


def test_the_flows_of_the_package_name_what_is_in_their_files() -> None:
    flows = "".join((PACKAGE / "README.md").read_text().split("```")[3::2])
    # A file, and behind it what of it is meant: functions that are called, or a class.
    named = re.findall(r"([\w/]+/\w+\.py|step\.py) (\w+)(?= *(?:->|,|\n|$))", flows)
    assert len(named) > 8
    missing = [f"{file}: {name}" for file, name in named if not re.search(rf"\b{name}\b", (PACKAGE / file).read_text())]
    assert not missing


def test_every_file_that_a_docstring_or_comment_sends_to_is_there() -> None:
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for reference in re.findall(r"\bsee\s+([\w/]+\.py(?:\s+and\s+[\w/]+\.py)*)", path.read_text()):
            for name in re.split(r"\s+and\s+", reference):
                if not any(f"/{file}".endswith(f"/{name}") for file in files):
                    missing.append(f"{path.name}: {name}")
    assert not missing


def test_the_drawing_of_the_package_shows_all_that_is_there() -> None:
    drawing = (PACKAGE / "README.md").read_text().split("```")[1]
    shown = set(re.findall(r"\b\w+(?:/|\.py\b)", drawing))
    there = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert shown == there


def test_every_entry_of_the_overview_of_memory_planning_is_there() -> None:
    overview = (PACKAGE / "memory" / "__init__.py").read_text().partition('"""')[2].partition('"""')[0]
    folder = PACKAGE / "memory"
    entries = re.findall(r"^( *)([a-z_]+/?)  ", overview, re.MULTILINE)
    assert len(entries) > 6
    for indent, name in entries:
        if len(indent) > 4:  # the second line of an entry
            continue
        if not indent:
            folder = PACKAGE / "memory" / name if name.endswith("/") else PACKAGE / "memory"
        found = folder if name.endswith("/") else folder / f"{name}.py"
        assert found.exists(), name


# simulate() would change how many devices the other tests have
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "simulate"],
    ids=lambda page: str(page.parent.relative_to(PACKAGE)),
)
@pytest.mark.usefixtures("own_registries")
def test_what_a_page_shows_runs(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), {"__name__": "page"})


def test_every_room_of_the_package_has_a_page() -> None:
    rooms = {
        "lightning",
        "lightning/memory",
        "lightning/rehearsal",
        "memory",
        "reducers",
        "replicas",
        "shifting",
        "simulate",
    }
    assert rooms <= {str(page.parent.relative_to(PACKAGE)) for page in PAGES}
