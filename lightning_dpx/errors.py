"""The public errors of lightning_dpx.

DPXError
├── ConfigurationError (ValueError)      an argument has a value that is not allowed
├── UnsupportedError (NotImplementedError)  a feature that cannot be had in this combination
│   └── WholeBatchError                  a step that its replicas cannot do on slices; on the whole batch it can be done
├── SliceError (ValueError)              a batch that cannot be cut into slices
├── ReplicationError (TypeError)         a module that cannot be copied faithfully
│   └── SharedWriteError                 a step that writes a parameter which several replicas share
├── GatherError (ValueError)             replica results that cannot be merged into one
├── ParityError (RuntimeError)           slices that do not give the numbers of one device, where that was asked for
├── CollectiveError (RuntimeError)       replicas that cannot meet in a collective inside a step
├── PlanError (ValueError)               a memory plan that cannot be made, read or applied
│   └── BudgetError (OutOfMemoryError)   no plan meets the budget
└── BenchError (RuntimeError)            a job of a bench that did not finish

Subclasses stand beside what raises them: UncuttableBatch (replicas/batch_reading.py), UnequalShapesError
(replicas/collectives.py), NoLossError, DoesNotFitError and more. RunAgain, NotRecomputable and StepAbandoned steer the
package's own code, and reach no user.

Errors raised by user code inside a replica are never wrapped: the original object is raised again, with a note that
names the replica, its device and the stage.
"""

import os
from collections.abc import Sequence

import torch


class DPXError(Exception):
    """Base class of all errors of this package.

    Examples:
        >>> try:
        ...     dpx.DPXStrategy(micro_batches=0)
        ... except dpx.DPXError as error:
        ...     print(type(error).__name__)
        ConfigurationError
    """


# Every error is one of Python's kinds as well, so that callers who know nothing of this package,
# such as a parser of configs, can catch it.
class ConfigurationError(DPXError, ValueError):
    """An argument has a value that is not allowed; the message lists what is.

    Examples:
        >>> dpx.DPXStrategy(reducer="colocated")
        Traceback (most recent call last):
        lightning_dpx.errors.ConfigurationError: Unknown reducer 'colocated'; available: ... Did you mean 'colocate'?
    """


class UnsupportedError(DPXError, NotImplementedError):
    """The requested combination of features is refused instead of run wrongly.

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("sim:0")
        >>> shift = dpx.shift_activations(net, "1", {"sim:0": "sim:1"}, torch.ones(2, 4, device="sim:0"))
        >>> torch.save(net, "net.pt")
        Traceback (most recent call last):
        lightning_dpx.errors.UnsupportedError: ... cannot be pickled: call unshift_activations(module) first...
    """


class WholeBatchError(UnsupportedError):
    """A step does what several replicas cannot do on their slices, so one replica must do it on the whole batch.

    Args:
        reason: What it does, as a sentence.
        advice: What to do about it, in sentences.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        text = f"training_step cannot be shared by several replicas: {reason} {advice}".rstrip()
        # A step that fails on slices runs there as it was written, so the message ends with
        # that way out.
        super().__init__(f"{text} One device can do it, with the whole batch (devices=1, micro_batches=1).")
        # Kept by themselves: a batch that goes on whole is announced with them,
        # in another sentence.
        self.reason = reason
        self.advice = advice


class SliceError(DPXError, ValueError):
    """The batch cannot be cut along its batch dim.

    Examples:
        >>> group = dpx.ReplicaGroup(nn.Linear(4, 2), ["sim:0", "sim:1"], batch_dim=2)
        >>> group.forward(torch.ones(6, 4))
        Traceback (most recent call last):
        lightning_dpx.errors.SliceError: batch_dim=2 is out of range for 0 of shape (6, 4); ...
    """


class ReplicationError(DPXError, TypeError):
    """The module holds something that cannot be copied, or whose copy would still point at the original.

    Examples:
        >>> dpx.ReplicaGroup(nn.LazyLinear(2), ["cpu", "cpu"])
        Traceback (most recent call last):
        lightning_dpx.errors.ReplicationError: Parameter weight is lazy and has no value yet; run one forward before ...
    """


class SharedWriteError(ReplicationError):
    """A step wrote a parameter that several replicas share.

    Args:
        message: What was written, and what to do.
        name: Of the parameter.
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class GatherError(DPXError, ValueError):
    """The results of the replicas have different structures.

    Examples:
        >>> class Odd(nn.Linear):
        ...     def forward(self, rows):
        ...         return super().forward(rows) if rows.sum() > 0 else None
        >>> group = dpx.ReplicaGroup(Odd(4, 2), ["sim:0", "sim:1"])
        >>> group.forward(torch.tensor([[1.0] * 4, [-1.0] * 4]))
        >>> group.outputs_merged()
        Traceback (most recent call last):
        lightning_dpx.errors.GatherError: Replica 1 on sim:1 returned None, and others did not, ...
    """


class ParityError(DPXError, RuntimeError):
    """In a rehearsal, a step in slices did not do what it does on one device; ``verify="raise"`` asked to be told.

    Examples:
        >>> class Spread(BoringModel):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).std()  # no mean over rows
        >>> strategy = dpx.DPXStrategy(verify="raise", execution="inline")
        >>> trainer = Trainer(strategy=strategy, accelerator="sim", devices=2, **quiet)
        >>> trainer.fit(Spread(), DataLoader(torch.randn(64, 32), batch_size=16))
        Traceback (most recent call last):
        lightning_dpx.errors.ParityError: dpx: training_step on ... is not what it is on one device: ...
    """


class CollectiveError(DPXError, RuntimeError):
    """A collective inside a step cannot complete: a replica has ended, failed, or called something else.

    Examples:
        >>> class Sometimes(BoringModel):
        ...     def training_step(self, batch, batch_idx):
        ...         if batch.sum() > 0:  # not in all replicas
        ...             self.all_gather(batch.mean())
        ...         return self(batch).mean()
        >>> rows = torch.cat([torch.ones(8, 32), -torch.ones(8, 32)])
        >>> strategy = dpx.DPXStrategy(verify="off", execution="inline")
        >>> trainer = Trainer(strategy=strategy, accelerator="sim", devices=2, **quiet)
        >>> trainer.fit(Sometimes(), DataLoader(rows, batch_size=16))
        Traceback (most recent call last):
        lightning_dpx.errors.CollectiveError: A collective inside a step cannot complete: replicas 0 (all_gather) ...
    """

    is_disagreement = False  # the replicas of one step call different things, and nothing has been done yet


def describe_error(error: BaseException) -> str:
    """The type and the message of a foreign ``error``, also where its own ``__str__`` fails."""
    # The error is the user's own, and so is the code of its message.
    try:
        message = str(error)
    except Exception as failure:  # noqa: BLE001  the user's own code
        # The failure of the message must not take the place of the error.
        return f"{type(error).__name__} (its __str__ fails with {type(failure).__name__})"
    return f"{type(error).__name__}: {message}"


def name_file(error: OSError, path: str | os.PathLike[str]) -> None:
    """Has ``error`` name the file that was to be written, and not the one that is written beside it and renamed."""
    if error.filename is None:
        return
    error.filename = os.fspath(path)
    # A rename names both.
    if error.filename2 is not None:
        del error.filename2


class PlanError(DPXError, ValueError):
    """A plan cannot be made or read, or does not belong to this model.

    Examples:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        >>> plan = dpx.search_plan(net, torch.ones(64, 64), budget=0.7, progress=False)
        >>> dpx.apply_plan(nn.Linear(64, 64), plan)
        Traceback (most recent call last):
        lightning_dpx.errors.PlanError: ...
    """


class BudgetError(PlanError, torch.OutOfMemoryError):
    """No plan meets the budget. What retries with fewer rows when memory runs out (BatchSizeFinder) recognizes it.

    Attributes:
        message: What it says.
        smallest: The bytes of activations that can be met; ``None`` where there is no room for any.
        device_index: On which of several devices of a step.

    Examples:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        >>> try:
        ...     dpx.search_plan(net, torch.ones(64, 64), budget=1000, progress=False)
        ... except dpx.BudgetError as error:
        ...     print(error.smallest > 1000)
        True
    """

    def __init__(self, message: str, smallest: int | None = None, device_index: int = 0) -> None:
        super().__init__(f"{message} (CUDA out of memory)")  # by these words in args Lightning knows it
        self.message = message
        self.smallest = smallest
        self.device_index = device_index

    def __str__(self) -> str:
        # People read the message without those words.
        return self.message


class BenchError(DPXError, RuntimeError):
    """A job of a bench ended before it reported."""


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first of ``names``, and how many are left: ``a, b, c and 4 more``."""
    listed = ", ".join(names[:most])
    left = len(names) - most
    if left > 0:
        return f"{listed} and {left} more"
    return listed
