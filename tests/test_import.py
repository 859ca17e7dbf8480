"""``import lightning_dpx`` loads what a training needs; what only some use is loaded when they use it.

What is loaded is read from the sources, without a fresh interpreter: the modules of the package that the import
reaches through statements at the top of modules, and the libraries that these name there.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning_dpx

PACKAGE = Path(lightning_dpx.__file__).parent

# Each takes from 20 ms (highspy) to seconds (matplotlib, Inductor) of processor time.
ONLY_WHEN_USED = (
    "highspy", "jsonargparse", "matplotlib", "pandas", "rich", "scipy", "sklearn", "torch._inductor",
    "torch.utils.cpp_extension", "torch_geometric", "transformers", "lightning_dpx.bench", "lightning_dpx.cli",
    "lightning_dpx.commands",
)  # fmt: skip
NEEDED = {"lightning", "lightning_dpx", "numpy", "torch", "torchmetrics", "yaml", *sys.stdlib_module_names}


def _imported_by(path: Path) -> Iterator[str]:
    """Names of the modules that a module may import when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _source_of(name: str) -> Path | None:
    path = PACKAGE.parent.joinpath(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _reached() -> set[str]:
    """All names that the import reaches, of the package and of others."""
    found: set[str] = set()
    waiting = [PACKAGE.name]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        source = _source_of(name) if name.split(".")[0] == PACKAGE.name else None
        if source is not None:
            waiting += _imported_by(source)
    return found


def test_the_import_does_not_load_what_only_some_use() -> None:
    reached = _reached()
    assert "lightning_dpx.lightning.strategy" in reached
    assert [name for name in ONLY_WHEN_USED if any(f"{one}.".startswith(f"{name}.") for one in reached)] == []


def test_the_import_loads_no_library_that_training_does_not_need() -> None:
    assert {name.split(".")[0] for name in _reached()} - NEEDED == set()
