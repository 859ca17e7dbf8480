"""What loaders give a step: batches that it fetches itself, parts of several loaders, rows as Lightning counts them."""

from collections.abc import Iterator
from typing import Any

from lightning_dpx.lightning.lightning_api import Trainer
from lightning_dpx.lightning.lightning_compat import DataFetcherWrapper, batch_sizes_in, combined_loader
from lightning_dpx.replicas import children_of


class RewindableBatches(Iterator[Any]):
    """``dataloader_iter`` for a step that may run several times: each time it fetches the same batches.

    Args:
        batches: What Lightning gave the step.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._fetched: list[Any] = []
        self._position = 0

    def rewind(self) -> None:
        """The step begins anew."""
        self._position = 0

    def __next__(self) -> Any:
        if self._position == len(self._fetched):
            self._fetched.append(next(self._batches))
        self._position += 1
        return self._fetched[self._position - 1]

    def __getattr__(self, name: str) -> Any:
        # Steps also ask a fetcher how far it is, such as by `done`.
        return getattr(self._batches, name)


def fetches_by_itself(batch: Any) -> bool:
    """Whether a step takes ``dataloader_iter``: it fetches and moves its batches itself."""
    if type(batch) in (list, tuple, dict):  # as most are; the classes asked for next are abstract, which is slow to ask
        return False
    return isinstance(batch, DataFetcherWrapper | RewindableBatches)


def paths_of_loaders(trainer: Trainer, stage: str) -> list[str]:
    """Where in a batch the parts are that each training loader returned; ``""`` where there is one loader only."""
    # Only training combines several loaders into one batch; evaluation takes one after the other.
    combined = combined_loader(trainer.fit_loop) if stage == "training_step" else None
    if combined is None or len(combined.flattened) < 2:
        return [""]
    return _leaf_paths(combined.iterables, "")


def _leaf_paths(node: Any, path: str) -> list[str]:
    children = children_of(node)
    if children is None:
        return [path]
    leaves: list[str] = []
    for name, child in children:
        leaves += _leaf_paths(child, f"{path}.{name}" if path else name)
    return leaves


def rows_to_weigh_by(batch: Any) -> int:
    """The rows of a batch that is not cut, as Lightning counts them for its logs; 1 where it cannot.

    Several processes weigh their gradients and logged values by it.
    """
    if isinstance(batch, Iterator):  # to count would be to consume
        return 1
    try:
        return next((rows for rows in batch_sizes_in(batch) if rows is not None), 1)
    except Exception:  # noqa: BLE001  whatever objects raise over which one device does not iterate
        return 1
