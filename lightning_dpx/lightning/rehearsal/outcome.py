"""What a rehearsal is asked for, and what it finds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison
from lightning_dpx.replicas.merging.rule_search import Finding
from lightning_dpx.replicas.merging.rules import MEANS, Kind

Key = tuple[str, int]  # the name of a step, and the index of its loader


class RehearsalEnded(Exception):  # noqa: N818  no failure of what was rehearsed
    """Says what becomes of a rehearsal, and of the step from here on."""


class NotRehearsed(RehearsalEnded):
    """The step cannot be rehearsed, and goes on without; the message says why."""


class PartsAppear(RehearsalEnded):
    """The step makes parameters, which replicas would draw each for itself, or metrics; the message names them.

    One batch goes whole, and the next one is rehearsed.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice


class SlicesFail(RehearsalEnded):
    """The step runs on the whole batch, but not on its slices; the stage goes on with whole batches."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice


class NumbersLost(Exception):  # noqa: N818  slices have not failed by themselves
    """Slices have nan for what is a number on the whole batch; the message names it."""


@dataclass(slots=True, kw_only=True)  # not frozen: one is made in every step
class Call:
    """What the trainer called.

    Attributes:
        name: Of the step.
        args: The batch and the indices.
        kwargs: What else was given.
        active: Indices of the replicas that take part.
        num_rows: Of the batch.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    active: tuple[int, ...]
    num_rows: int

    @property
    def dataloader_idx(self) -> int:
        """The index of the loader, in an evaluation with several."""
        return self.key[1]

    @property
    def key(self) -> Key:
        """What rules are found for."""
        return key_of(self.name, self.args)


def key_of(name: str, args: Sequence[Any]) -> Key:
    """What rules are found for: by loader, as each may give batches of another kind.

    Args:
        name: Of a step.
        args: What it is called with.
    """
    if name != "training_step" and len(args) > 2:
        return name, args[2]
    return name, 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a rehearsal on some rows has shown.

    Attributes:
        comparison: Of slices with one device.
        judge: The rules by which the slices were put together.
        findings: Rules that fit outputs and kept values, by path.
        logged: Rules that fit logged values, by path.
        unstable: What cannot be compared, as it changes from run to run or as roundings grow.
        rounding: Of that, what roundings change.
    """

    comparison: Comparison
    judge: JudgingRules
    findings: dict[str, Finding] = field(default_factory=dict)
    logged: dict[str, Finding] = field(default_factory=dict)
    unstable: frozenset[str] = frozenset()
    rounding: frozenset[str] = frozenset()

    def settle_numbers(self) -> None:
        """Drops the rules of numbers that may be added to or set: several rules still fit them.

        Where others than the first slice have added nothing, the step is rehearsed again as soon as one does.
        """
        # A number that is set and one that is added to look alike where it was zero before.
        for path in self.judge.attributes.numbers_among(self.findings):
            rules = self.findings[f"self.{path}"].rules
            kinds = {rule.kind for rule in rules}
            adds_nothing = "first" in kinds and not kinds.isdisjoint({"added", "sum"})
            # Where each slice changes elements of its own, all rules that fit give the same.
            is_settled = "added" not in kinds or len(kinds) == 1 or "changes" in kinds
            if is_settled and not adds_nothing:
                continue
            # Left open, so that the value of the first replica stays until more is known.
            del self.findings[f"self.{path}"]
            self.judge.attributes.settle(path, ())
            if adds_nothing:
                self.comparison.changed.discard(path)
            else:
                self.comparison.blame_unsettled(path)

    @property
    def is_sure(self) -> bool:
        """Whether more rows could show nothing else."""
        return not self._unsure

    @property
    def is_ambiguous(self) -> bool:
        """Whether other rows could show more: several rules fit, of values that were not zero."""
        return any(self._fitting_kinds())

    @property
    def has_constants(self) -> bool:
        """Whether a value was the same everywhere: a setting, or a mean of any kind over rows that are alike."""
        found = (*self.findings.values(), *self.logged.values())
        return any(one.is_constant and len(one.rules) > 1 and one.path not in self.unstable for one in found)

    @property
    def has_counts(self) -> bool:
        """Whether a value may count what differs, which more rows have not as much more of."""
        found = (*self.findings.values(), *self.logged.values())
        return any(one.is_count and one.path not in self.unstable for one in found)

    @property
    def is_some_mean(self) -> bool:
        """Whether no rules but kinds of mean are left to choose from.

        Rows are nearly alike there, such as the losses of a network that has learned nothing yet.
        """
        return all(kinds <= MEANS for kinds in self._fitting_kinds())

    def _fitting_kinds(self) -> list[set[Kind]]:
        """The kinds of rules that fit a value, of each that several fit."""
        found: list[set[Kind]] = []
        for one in self._unsure:
            if len(one.rules) > 1 and one.rules[0].kind != "by type":
                found.append({rule.kind for rule in one.rules})
        return found

    @property
    def _unsure(self) -> list[Finding]:
        # What changes from run to run stays unsure on any rows.
        found = (*self.findings.values(), *self.logged.values())
        return [one for one in found if not one.is_sure and one.path not in self.unstable]


def in_one_line(error: BaseException) -> str:
    """The type of a foreign error and the first line of what it says."""
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # noqa: BLE001  the user's own class
        text = ""
    return f"{type(error).__name__}: {text}".rstrip(": ").rstrip(".") + "."


def writes_parameters(names: Sequence[str]) -> SlicesFail:
    """The error of a forward that writes these parameters."""
    return SlicesFail(
        f"It writes parameter {', '.join(names[:3])} in its forward, which each replica would do for itself.",
        "Write it between the steps instead (on_train_batch_end).",
    )
