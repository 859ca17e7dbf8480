"""Everything that lightning_dpx raises on its own account.

DPXError
├── ConfigurationError (ValueError)      an argument has a value that is not allowed
├── UnsupportedError (NotImplementedError)  a feature that cannot be had in this combination
│   └── WholeBatchError                  a step that its replicas cannot do on slices; on the whole batch it can be done
├── SliceError (ValueError)              a batch that cannot be cut into slices
├── ReplicationError (TypeError)         a module that cannot be copied faithfully
├── GatherError (ValueError)             replica results that cannot be merged into one
├── ParityError (RuntimeError)           slices that do not give the numbers of one device, where that was asked for
├── CollectiveError (RuntimeError)       replicas that cannot meet in a collective inside a step
├── PlanError (ValueError)               a memory plan that cannot be made, read or applied
│   └── BudgetError (OutOfMemoryError)   no plan meets the budget
└── BenchError (RuntimeError)            a job of a bench that did not finish

Errors raised by user code inside a replica are never wrapped: the original object is raised again, with a note that
names the replica, its device and the stage.
"""

import torch


class DPXError(Exception):
    """Base class of all errors of this package."""


class ConfigurationError(DPXError, ValueError):
    """An argument has a value that is not allowed; the message lists what is."""


class UnsupportedError(DPXError, NotImplementedError):
    """The requested combination of features is refused instead of run wrongly."""


class WholeBatchError(UnsupportedError):
    """A step does what several replicas cannot do on their slices, so one replica must do it on the whole batch.

    Args:
        reason: What it does, as a sentence.
        advice: What to do about it, in sentences.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        text = f"training_step cannot be shared by several replicas: {reason} {advice}".rstrip()
        super().__init__(f"{text} devices=1 can do it.")
        self.reason = reason
        self.advice = advice


class SliceError(DPXError, ValueError):
    """The batch cannot be cut along its batch dim."""


class ReplicationError(DPXError, TypeError):
    """The module holds something that cannot be copied, or whose copy would still point at the original."""


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
    """The results of the replicas have different structures."""


class ParityError(DPXError, RuntimeError):
    """In a rehearsal, a step in slices did not do what it does on one device; ``verify="raise"`` asked to be told."""


class CollectiveError(DPXError, RuntimeError):
    """A collective inside a step cannot complete: a replica has ended, failed, or called something else."""


def describe_error(error: BaseException) -> str:
    """The type and the message of a foreign ``error``, also where its own ``__str__`` fails."""
    try:
        message = str(error)
    except Exception as failure:  # noqa: BLE001  the user's own code
        return f"{type(error).__name__} (its __str__ fails with {type(failure).__name__})"
    return f"{type(error).__name__}: {message}"


class PlanError(DPXError, ValueError):
    """A plan cannot be made or read, or does not belong to this model."""


class BudgetError(PlanError, torch.OutOfMemoryError):
    """No plan meets the budget. What retries with fewer rows when memory runs out (BatchSizeFinder) recognises it.

    Attributes:
        message: What it says.
        smallest: The bytes of activations that can be met; ``None`` where there is no room for any.
        device_index: On which of several devices of a step.
    """

    def __init__(self, message: str, smallest: int | None = None, device_index: int = 0) -> None:
        super().__init__(f"{message} (CUDA out of memory)")  # by these words in args Lightning knows it
        self.message = message
        self.smallest = smallest
        self.device_index = device_index

    def __str__(self) -> str:
        return self.message


class BenchError(DPXError, RuntimeError):
    """A job of a bench ended before it reported."""
