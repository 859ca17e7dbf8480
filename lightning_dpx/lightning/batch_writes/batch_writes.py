"""What a step writes into its batch is what hooks find there afterwards, as on one device.

On one device the step and ``on_train_batch_end(outputs, batch, batch_idx)`` have one batch. Here a step has a slice of
it, on its own device and in containers of its own. So where a hook of the user's gets the batch, it gets one whose
tensors and containers may be exchanged without anything happening to what the loader gave; and after the step, what was
written into the slices is put together and put in there, and the rest is moved to the device of the module. An
optimizer that calls its closure again finds it, too.
"""

import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.batch_writes.given_batch import (
    GivenBatch,
    given_batch,
    on_host,
    written_object,
    written_paths,
    wrote_nothing,
)
from lightning_dpx.lightning.batch_writes.looking_hooks import is_looked_at, tell_of_start_hooks
from lightning_dpx.lightning.batch_writes.places import (
    MISSING,
    Path,
    exchange_memory,
    exchangeable,
    is_exchangeable,
    leaves_by_path,
    other_kind,
    put_at,
    value_at,
)
from lightning_dpx.lightning.lightning_api import LightningModule
from lightning_dpx.replicas import BatchSlice, MergeRules, weights_of
from lightning_dpx.torch_compat import tree_map_only


class BatchWrites:
    """The batch of one step, as hooks see it.

    Attributes:
        values: What the last step wrote, put together; by a name for messages.
    """

    def __init__(self) -> None:
        self._shown: Any = MISSING
        self._given: list[GivenBatch] = []
        self._lock = threading.Lock()
        self.values: dict[str, Any] = {}
        self._looked_at: dict[Any, bool] = {}  # by stage and number of callbacks
        self._stage: tuple[Any, int] = (None, 0)  # the last of them: Lightning's stages are slow to hash
        self._is_watching = False

    def is_for(self, module: LightningModule) -> bool:
        """Whether a hook looks at the next batch after its step; if not, the last one is forgotten."""
        trainer: Any = module.trainer
        stage = trainer.state.stage
        num_callbacks = len(trainer.callbacks)
        if stage is not self._stage[0] or num_callbacks != self._stage[1]:
            # Callbacks may be added in the middle of a run, and each stage has hooks of its own.
            kind = self._stage = stage, num_callbacks
            if kind not in self._looked_at:
                self._looked_at[kind] = is_looked_at(module)
                tell_of_start_hooks(module)
            self._is_watching = self._looked_at[kind]
        if not self._is_watching:
            self.forget()
        return self._is_watching

    def move_to(self, device: torch.device) -> None:
        """Hooks find the batch there, where they give it to the module again, or compare it with outputs.

        Not in the trial of a step, which runs no hooks.
        """
        if is_host(device):
            return
        for _, leaf in leaves_by_path(self._shown, ()):
            if is_exchangeable(leaf) and leaf.device != device:
                exchange_memory(leaf, leaf.to(device))

    def forget(self) -> None:
        """Hooks get the next batch as it is, or do not look at it."""
        self._shown = MISSING
        self._given = []

    def begin_again(self) -> None:
        """The step runs again, on the whole batch: what its slices have written is taken back."""
        self._given = []

    @property
    def is_watched(self) -> bool:
        """Whether a hook looks at the batch after its step."""
        return self._shown is not MISSING

    def show(self, batch: Any) -> Any:
        """The batch that hooks get: equal to ``batch``, and exchangeable in all its parts."""
        self._given = []
        self.values = {}  # of the last batch, which would be there beside this one
        self._shown = exchangeable(batch)
        return self._shown

    def note(self, batch_slice: BatchSlice, batch: Any, *, is_as_loaded: bool) -> None:
        """A replica's step begins; for the arguments see :class:`GivenBatch`."""
        # Without a hook that looks, nothing is noted in any step.
        if self._shown is MISSING:
            return
        given = given_batch(batch_slice, batch, self._shown, is_as_loaded=is_as_loaded)
        # Replicas in threads note theirs at the same time.
        with self._lock:
            self._given.append(given)

    def let_go(self, batch_slice: BatchSlice, *, others_follow: bool) -> None:
        """A replica's step is over: what it got need not stay on its device until the last one is.

        Args:
            batch_slice: Of the replica.
            others_follow: Whether its device has micro-batches, which are for where all rows at once are too much.
        """
        if is_host(batch_slice.replica.device):
            return
        with self._lock:
            found = [place for place, one in enumerate(self._given) if one.batch_slice is batch_slice]
        if not found:
            return
        given = self._given[found[-1]]
        if given.is_as_loaded and wrote_nothing(given, self._shown):
            # Where others have written, its rows are wanted again: those that were loaded are the same.
            self._given[found[-1]] = given_batch(batch_slice, batch_slice.batch, self._shown, is_as_loaded=True)
        # What an object of a library's holds is compared with what it held, on the device.
        elif others_follow and not given.objects:
            self._given[found[-1]] = on_host(given, self._shown)

    def finish(self, rules: MergeRules, device: torch.device, dim: int) -> str | None:
        """After the step: hooks find what was written; or else what cannot be put together, and why not.

        Args:
            rules: How values are put together, as far as it is known.
            device: Where.
            dim: The batch dim.
        """
        # They were noted in the order in which threads began; rows are joined in that
        # of the slices.
        given = sorted(self._given, key=lambda one: one.batch_slice.replica.index)
        self._given = []
        self.values = {}
        if all(one.is_untouched for one in given):
            return None
        # One slice has all rows: the object that it has written is the one that hooks find.
        if len(given) > 1 and (problem := next(filter(None, map(written_object, given)), None)) is not None:
            return problem
        # Only hooks of the user's make another kind of container of a batch, and there is no place
        # for that in the one that other hooks have got.
        rows = sum(one.batch_slice.num_rows for one in given)
        if not given[0].is_as_loaded:
            problem = other_kind(self._shown, given[0].batch, (rows, given[0].batch_slice.num_rows), "batch")
            if problem is not None:
                return problem
        now = [one.now(self._shown) for one in given]
        # A path that one slice has written is taken from all of them, as the others have
        # its other rows.
        paths = dict.fromkeys(path for one, parts in zip(given, now, strict=True) for path in written_paths(one, parts))
        for path in paths:
            name = ".".join(["batch", *map(str, path)])
            parts = [own.get(path, MISSING) for own in now]
            if len({part is MISSING for part in parts}) > 1:
                return f"{name} is there on some slices only."
            try:
                whole = self._together(name, path, parts, given, rules, device, dim)
            except GatherError as error:
                return f"{name}: {error}"
            put_at(self._shown, path, whole)
        for path in paths:
            # Messages and checks name all items of such a list, not those of one slice.
            start = self._of_all_rows(path, rows)
            for place, value in leaves_by_path(value_at(self._shown, start), start):
                self.values[".".join(["batch", *map(str, place)])] = value
        return None

    def _of_all_rows(self, path: Path, rows: int) -> Path:
        """The list of one item per row that ``path`` leads through, if there is one; slices have a part of it."""
        for depth in range(len(path)):
            node = value_at(self._shown, path[:depth])
            if isinstance(node, list | tuple) and len(node) == rows:
                return path[:depth]
        return path

    def _together(
        self,
        name: str,
        path: Path,
        parts: Sequence[Any],
        given: Sequence[GivenBatch],
        rules: MergeRules,
        device: torch.device,
        dim: int,
    ) -> Any:
        # Numbers may count rows, and be equal by chance; a text, or that there is nothing, is of no rows.
        is_text = isinstance(parts[0], str | None)
        if len(parts) == 1 or parts[0] is MISSING or (is_text and all(part == parts[0] for part in parts)):
            return parts[0]
        shown = value_at(self._shown, path)
        rows = [one.batch_slice.num_rows for one in given]
        lengths = [len(part) if isinstance(part, list | tuple) else None for part in parts]
        # One item per row, also of a list that is another length by now than the one that it stands for.
        if isinstance(shown, list | tuple) and lengths == rows and len(shown) == sum(rows):
            items = list(chain.from_iterable(parts))
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), type(shown)(items))
        weights = weights_of([one.batch_slice for one in given])
        if shown is MISSING or not isinstance(shown, torch.Tensor):
            # What has no rows, such as a number, is merged as a logged value of that name would be.
            known = rules.merge_logged(name, parts, weights, device) if rules.decides(name) else MISSING
            if known is not MISSING:
                return known
        # The step's own rules are about its outputs; values with rows are joined by
        # their shapes alone.
        return MergeRules().merge_outputs([[part] for part in parts], weights, device, dim)[0]


def unlike_one_batch(problem: str) -> tuple[str, str]:
    """The reason for whole batches, and what to do about it, where slices write what cannot be put together."""
    return (
        f"It writes its batch, which hooks look at afterwards, and what slices write cannot be put together: {problem}",
        "For all devices to take part, write into a batch only what has a row for each of its own.",
    )
