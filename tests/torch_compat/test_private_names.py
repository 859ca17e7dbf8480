"""Every private name of torch that the package uses is there: an upgrade that takes one away fails by its name."""

import ast
import importlib
import inspect
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dpx import torch_compat
from lightning_dpx.torch_compat import PRIVATE_NAMES

# Modules that torch imports only when they are used.
LAZY = ("torch.distributed.fsdp", "torch._dynamo.config", "torch._functorch.config", "torch._inductor.cpp_builder")


@pytest.fixture(scope="module", autouse=True)
def _lazy_modules() -> None:
    for name in LAZY:
        importlib.import_module(name)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_name_is_there(name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    holder: Any = eval(owner, {"torch": torch})
    # What some versions set on their objects is named in the class alone.
    assert hasattr(holder, attribute) or attribute in inspect.getsource(holder), name


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_entry_says_why_and_what_breaks_and_on_which_version_it_was_seen(name: str) -> None:
    entry = PRIVATE_NAMES[name]
    assert entry.why
    assert entry.without
    assert entry.checked_on.startswith("torch ")


def test_the_table_lists_what_the_folder_uses() -> None:
    """Names in ``import``, ``a._name`` and ``attrgetter("_name")``; the table has each as the end of a path."""
    files = Path(torch_compat.__file__).parent.glob("*.py")
    nodes = chain.from_iterable(ast.walk(ast.parse(path.read_text())) for path in files)
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            used.update(alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attrgetter":
            used.update(argument.value for argument in node.args if isinstance(argument, ast.Constant))
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    listed = {part.strip("()") for path in PRIVATE_NAMES for part in path.split(".")}
    assert private - listed - {"_C", "_is_param"} == set(), "_is_param is a mark that we set"


def test_what_it_exports_is_there() -> None:
    assert [name for name in torch_compat.__all__ if not hasattr(torch_compat, name)] == []
