"""``trainer.fit(torch.compile(model))``: a LightningModule that is compiled as a whole.

Lightning unwraps it: the forward and the steps of the module become compiled functions, and ``_compiler_ctx`` keeps
those from before. Before a run it looks at that attribute and refuses all strategies but three of its own, by class.
"""

from typing import Any

from lightning_dpx.lightning.lightning_api import pl
from lightning_dpx.lightning.lightning_compat import compiler_context_of, set_compiler_context


class CompiledWhole:
    """Hides from Lightning, until a run begins, that the module is compiled; it stays compiled all the time."""

    def __init__(self) -> None:
        self._hidden: tuple[Any, Any] | None = None  # a module, and its context

    def hide(self, module: "pl.LightningModule | None") -> None:
        """A Trainer was given ``module``, and looks at it next."""
        context = compiler_context_of(module)
        if context is not None:
            self._hidden = (module, context)
            set_compiler_context(module, None)

    def show(self) -> None:
        """The run begins, or has failed before: ``lightning.pytorch.utilities.compile.to_uncompiled`` works again."""
        if self._hidden is not None:
            set_compiler_context(*self._hidden)
            self._hidden = None
