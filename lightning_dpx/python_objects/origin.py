"""Where a class or a file comes from: Python, a framework, an installed package, or the user's own code."""

import sys
import sysconfig
from functools import cache
from pathlib import Path

_RUN_STEPS = frozenset({"lightning", "lightning_fabric", "pytorch_lightning", "lightning_dpx"})
_LIBRARIES = _RUN_STEPS | {
    "abc", "builtins", "collections", "dataclasses", "functools", "logging", "numpy", "threading", "torch",
    "torchmetrics", "torchvision", "typing",
}  # fmt: skip
_OF_ENVIRONMENTS = {"site-packages", "dist-packages"}  # the names of their folders for packages
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def package_of(name: str | None) -> str:
    """The top-level package of a file called ``name``, as ``__module__`` has it; ``__main__`` is one, too."""
    return (name or "builtins").partition(".")[0]


def without_libraries(packages: frozenset[str]) -> frozenset[str]:
    """Those of ``packages`` that are neither Python's nor a framework's."""
    return packages - _LIBRARIES


def is_library(kind: type) -> bool:
    """Whether ``kind`` belongs to Python, to torch, or to what stands between them and the user's code."""
    return package_of(kind.__module__) in _LIBRARIES


def runs_steps(kind: type) -> bool:
    """Whether ``kind`` belongs to what runs steps, and so leads to everything there is: Lightning and this package."""
    return package_of(kind.__module__) in _RUN_STEPS


@cache
def is_installed(name: str | None) -> bool:
    """Whether the file called ``name`` belongs to Python or to an installed package, and not to the user's own code."""
    # What is built into Python has no file, and a checkout of this package lies in none
    # of the folders.
    if package_of(name) in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    # Parts of Python that are built in, such as sys, have no file either.
    if file is None and package_of(name) in sys.stdlib_module_names:
        return True
    # Without a file it is the `__main__` of a notebook or a prompt: the user's own code.
    if file is None:
        return False
    path = Path(file)
    # Also where another environment has it, on which this one is laid (by a .pth file, say, or the system's).
    is_in_environment = not _OF_ENVIRONMENTS.isdisjoint(path.parts)
    return is_in_environment or any(path.is_relative_to(folder) for folder in _INSTALLED)


def is_followed(name: str | None, packages: frozenset[str]) -> bool:
    """Whether code of the file called ``name`` is followed: that of ``packages``, and all that is the user's own."""
    return package_of(name) in packages or not is_installed(name)
