"""The interface of all reducers: K x N gradients in, N gradients out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.registry import Registry

Gradients = list[torch.Tensor | None]


class GradientReducer(ABC):
    """Sums the gradients of K replicas.

    Subclass it, decorate the class with ``@register_reducer("name")``, and ``DPXStrategy(reducer="name")`` uses it.

    Args:
        devices: K devices, one per replica; the first one owns the parameters.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)

    def reduce(self, grads: Sequence[Gradients], *, average: bool = False) -> Gradients:
        """N gradients on the first device, summed (or averaged) over the replicas.

        Args:
            grads: K x N; K replicas, N parameters in one order. ``None`` means "no gradient" and counts as zero; a
                parameter without a gradient everywhere stays ``None``. The tensors may be reused for the result.
            average: Divide by K.

        Raises:
            ConfigurationError: not one list per device, or lists of different lengths.
        """
        if len(grads) != len(self.devices) or len({len(row) for row in grads}) != 1:
            raise ConfigurationError(
                f"reduce() needs {len(self.devices)} lists of equal length (one per device), got lengths "
                f"{[len(row) for row in grads]}."
            )
        summed = list(grads[0]) if len(grads) == 1 else self._sum(grads)
        return [None if g is None else g / len(grads) for g in summed] if average and len(grads) > 1 else summed

    @abstractmethod
    def _sum(self, grads: Sequence[Gradients]) -> Gradients:
        """The sums for K > 1, on ``self.devices[0]``."""


REDUCERS: Registry[GradientReducer] = Registry("reducer")
register_reducer = REDUCERS.register


def make_reducer(reducer: str | GradientReducer, devices: Sequence[torch.device]) -> GradientReducer:
    """The reducer that ``reducer`` names; ``"auto"`` is the naive one.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if isinstance(reducer, GradientReducer):
        return reducer
    return REDUCERS["naive" if reducer == "auto" else reducer](devices)
