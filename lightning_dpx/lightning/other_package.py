"""A Trainer of the distribution of Lightning that this package was not loaded for is told so.

Its registry of strategies gets a "dpx" that raises. Where that distribution is loaded only later (``import
lightning_dpx`` stands before ``import pytorch_lightning`` in a sorted file), this happens as soon as it is.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import MODULE, PACKAGE, PACKAGES, VARIABLE

_OTHER = next(package for package in PACKAGES if package != PACKAGE)
_OTHER_MODULE = PACKAGES[_OTHER]
_STRATEGIES = f"{_OTHER_MODULE}.strategies"


def refuse_other_package() -> None:
    """Makes ``strategy="dpx"`` of the other distribution an error that names both, now or once that is loaded."""
    loaded = sys.modules.get(_STRATEGIES)
    if loaded is not None:
        _register(loaded)
    else:
        sys.meta_path.insert(0, _OnceLoaded())


def _register(strategies: Any) -> None:
    registry = strategies.StrategyRegistry
    if "dpx" not in registry:
        registry.register("dpx", _refuse, description=f"of {MODULE}")


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ConfigurationError(
        f"This Trainer is one of {_OTHER_MODULE}, but lightning_dpx was loaded for {MODULE}, and the classes of one "
        f"are not those of the other. Use the Trainer of {MODULE}; or import {_OTHER_MODULE} before lightning_dpx, "
        f"and {MODULE} not at all; or set the environment variable {VARIABLE}={_OTHER}."
    )


class _OnceLoaded(MetaPathFinder):
    """Sees the other distribution's strategies being imported, once, and leaves the importing to Python."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only of that module."""
        if fullname != _STRATEGIES:
            return None
        # Before find_spec(), which asks every finder again, this one included.
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """Loads a module as ``loader`` does, and registers the refusal in it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As Python does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As Python does; the registry is there afterwards."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # for those who look for its source
        _register(module)
