"""``trainer.callback_metrics`` and its like in a step whose logs are recorded: what the step has logged is there.

On one device ``self.log`` writes to the Trainer at once, and a step may read that back. Where a step runs as one device
but its logs must not reach the Trainer (a check, a memory profile), it finds the same; and it is noted that it looked,
as replicas log only when all of them have ended their steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_dpx.lightning.lightning_compat import metric_dicts, trainer_of
from lightning_dpx.python_objects.overrides import overridden

Logged = Callable[[], Mapping[str, Any]]


class MetricsOfStep(dict[str, Any]):
    """Metrics of a Trainer, and among them what the step that is running has logged so far.

    Args:
        metrics: Those of the Trainer.
        logged: Gives what the step has logged.
        read_back: Gets the names of what it has read of that.
    """

    def __init__(self, metrics: Mapping[str, Any], logged: Logged, read_back: set[str]) -> None:
        super().__init__(metrics)
        self._logged = logged
        self._read_back = read_back

    def _look_at(self, name: str) -> None:
        logged = self._logged()
        if name in logged:
            self._read_back.add(name)
            self[name] = logged[name]

    def _look_at_all(self) -> None:
        logged = self._logged()
        self._read_back.update(logged)
        self.update(logged)

    def __getitem__(self, name: str) -> Any:
        self._look_at(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self._look_at(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dict."""
        self._look_at(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self._look_at_all()
        return super().__iter__()

    def keys(self) -> Any:
        """As of any dict."""
        self._look_at_all()
        return super().keys()

    def values(self) -> Any:
        """As of any dict."""
        self._look_at_all()
        return super().values()

    def items(self) -> Any:
        """As of any dict."""
        self._look_at_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self.items())

    def __reduce__(self) -> Any:
        """Copies are plain dicts, too."""
        return dict, (self.copy(),)


@contextmanager
def metrics_shown(module: Any, logged: Logged, read_back: set[str]) -> Iterator[None]:
    """For a while the Trainer's metrics hold what a step of ``module`` has logged; see :class:`MetricsOfStep`."""
    trainer = trainer_of(module)
    if trainer is None:
        yield
        return
    connector, dicts = metric_dicts(trainer)
    shown = {name: MetricsOfStep(metrics, logged, read_back) for name, metrics in dicts.items()}
    with overridden(connector, **shown):
        yield


def names_of(name: str, options: Mapping[str, Any], *, trains: bool) -> tuple[str, ...]:
    """The names under which a step finds at once what it has logged with these options, if any.

    Args:
        name: Of the value.
        options: Those of ``self.log``.
        trains: Whether it is a training step, whose values are those of a step unless it says otherwise.
    """
    on_step = options.get("on_step")
    on_epoch = options.get("on_epoch")
    # As Lightning has it: unless told otherwise, a training step logs for the step, an evaluation for the epoch.
    if not (trains if on_step is None else on_step):
        return ()
    is_for_both = not trains if on_epoch is None else on_epoch
    if is_for_both:
        return (name, f"{name}_step")
    return (name,)


def as_metric(value: Any) -> torch.Tensor:
    """A logged number as the Trainer keeps it."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(float(value))
