"""Runs tests with ``pytorch_lightning``: what they import as ``lightning`` is that.

``LIGHTNING_DPX_PACKAGE=pytorch_lightning python -m pytest ...``; see :mod:`lightning_dpx.lightning.lightning_api`. In a
program ``lightning`` and ``pytorch_lightning`` are different modules; the tests are written for one of them only.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


class _Alias(MetaPathFinder, Loader):
    """Finds ``lightning.pytorch.X`` as ``pytorch_lightning.X``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_known = any(fullname == name or fullname.startswith(f"{name}.") for name in NAMES)
        return ModuleSpec(fullname, self) if is_known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        head, tail = next((name, spec.name.removeprefix(name)) for name in NAMES if spec.name.startswith(name))
        return import_module(NAMES[head] + tail)

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed under its own name."""


def install() -> None:
    """From now on in this process."""
    import pytorch_lightning

    sys.modules["lightning"] = ModuleType("lightning")
    sys.modules["lightning"].pytorch = pytorch_lightning  # type: ignore[attr-defined]
    sys.modules["lightning"].__path__ = []
    sys.meta_path.insert(0, _Alias())
