"""Which of Lightning's two distributions the package is loaded for, and that it works with either."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lightning_dpx
from lightning_dpx.lightning import lightning_api
from lightning_dpx.lightning.lightning_api import PACKAGES, VARIABLE, choose_package
from tests.programs import REPOSITORY

FOLDER = Path(lightning_dpx.__file__).parent
WITH_BOTH = ["lightning/lightning_api.py", "lightning/lightning_compat.py", "commands/config.py"]
ROOTS = {"lightning", "pytorch_lightning", "lightning_fabric"}
CORE = ["tests/test_parity.py", "tests/lightning/test_lightning_compat.py", "tests/lightning/test_training_step.py"]


def imports_of(statements: list[ast.stmt]) -> set[tuple[str, str, str | None]]:
    """Module, name and new name of every import, as if from ``lightning``."""
    found = set[tuple[str, str, str | None]]()
    for statement in statements:
        for alias in statement.names if isinstance(statement, ast.Import | ast.ImportFrom) else ():
            module = statement.module or "" if isinstance(statement, ast.ImportFrom) else alias.name
            as_lightning = module.replace("pytorch_lightning", "lightning.pytorch")
            found.add((as_lightning.replace("lightning_fabric", "lightning.fabric"), alias.name, alias.asname))
    return found


@pytest.mark.parametrize("file", WITH_BOTH)
def test_the_same_names_come_from_both(file: str) -> None:
    tree = ast.parse((FOLDER / file).read_text())
    (choice,) = [node for node in tree.body if isinstance(node, ast.If)]
    of_lightning = {each for each in imports_of(choice.body) if each[2] != "pl"}
    of_the_other = {each for each in imports_of(choice.orelse) if each[2] != "pl"}
    assert len(of_lightning) > 2
    assert of_lightning == of_the_other


def test_no_other_file_imports_either() -> None:
    guilty = []
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if not ROOTS.isdisjoint(module.split(".")[0] for module in modules):
                guilty.append(path.relative_to(FOLDER).as_posix())
    assert set(guilty) == set(WITH_BOTH)


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if neither were loaded."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for module in PACKAGES.values():
        monkeypatch.delitem(sys.modules, module, raising=False)
    return monkeypatch


def test_what_is_loaded_is_chosen_and_lightning_otherwise(nothing_loaded: pytest.MonkeyPatch) -> None:
    assert choose_package() == "lightning"
    nothing_loaded.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    assert choose_package() == "pytorch_lightning"
    nothing_loaded.setitem(sys.modules, "lightning.pytorch", ModuleType("lightning.pytorch"))
    assert choose_package() == "lightning"


@pytest.mark.parametrize("installed", PACKAGES)
def test_what_is_installed_is_chosen(installed: str, nothing_loaded: pytest.MonkeyPatch) -> None:
    nothing_loaded.setattr(lightning_api, "find_spec", lambda name: name if name == installed else None)
    assert choose_package() == installed


def test_neither_is_an_error_that_says_what_to_install(nothing_loaded: pytest.MonkeyPatch) -> None:
    nothing_loaded.setattr(lightning_api, "find_spec", lambda name: None)
    with pytest.raises(lightning_dpx.UnsupportedError, match="pip install lightning"):
        choose_package()


def test_the_environment_variable_decides(nothing_loaded: pytest.MonkeyPatch) -> None:
    nothing_loaded.setenv(VARIABLE, "pytorch_lightning")
    assert choose_package() == "pytorch_lightning"
    nothing_loaded.setenv(VARIABLE, "fabric")
    with pytest.raises(lightning_dpx.ConfigurationError, match="'fabric' is not allowed; choose one of lightning, py"):
        choose_package()


@pytest.mark.processes
@pytest.mark.skipif(lightning_api.PACKAGE == "pytorch_lightning", reason="this is that")
def test_the_core_of_the_tests_passes_with_the_other_one() -> None:
    # A process of its own, and no fork of one that has loaded Lightning: the choice is made once.
    environment = {**os.environ, VARIABLE: "pytorch_lightning", "PYTHONPATH": str(REPOSITORY)}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE]
    command += ["-k", "not compiled and not lbfgs"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
