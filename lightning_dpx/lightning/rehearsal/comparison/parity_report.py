"""What a comparison found, and the line that says so."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dpx.errors import some_of

NAMED = 3  # that many names of each kind are told; the rest is counted
_WITHOUT_NAMES = ("loss", "gradient", "new weight")
_NUMBER = re.compile(r"(?<![\w.'])[-+]?\d[\d.,e+-]*")  # not those in names, such as net.0.weight


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What was compared, and what of it differs.

    Attributes:
        rows: Of the rehearsal.
        sizes: Of its slices.
        stage: The step's name.
        counts: How many values of each kind are as on one device, in the order of the line.
        differences: What is not, in words, each with its kind.
        largest: The largest relative difference among what is.
        skipped: What could not be compared, in words.
        notes: What else the user should know.
        kept: Attributes that hold something of one slice after the step.
        apart: Paths of all that slices did not make as one device did; see :class:`Comparer` for their form.
        changed: Attributes that the step changes.
    """

    rows: int
    sizes: tuple[int, ...]
    stage: str
    counts: dict[str, int] = field(default_factory=dict)
    differences: list[tuple[str, str]] = field(default_factory=list)
    largest: float = 0.0
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    apart: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)

    def uses_kept(self, what: str) -> str:
        """What a second step in slices does differently because of what the first one kept, as a sentence."""
        named = some_of(self.kept)
        return f"A second step uses what the first one kept in {named}, which is of one slice: {what}."

    def blame_unsettled(self, path: str) -> None:
        """Adds an attribute of which it is not known whether steps add to it, or set it."""
        text = f"self.{path} is the first slice's only, as steps may add to it or set it"
        self.differences.append(("state", text))

    def blame_sums(self, names: Sequence[str]) -> None:
        """Adds attributes that steps add to, and so have the first slice's part of every step."""
        named = some_of(names)
        self.differences.append(("state", f"what steps add up in {named} is the first slice's part only"))
        self.kept = [name for name in self.kept if name not in names]

    def tell_of_hooks(self, changed: str) -> None:
        """Adds that parameters have hooks, and what these have changed, if anything."""
        if changed:
            text = f"hooks of parameters change {changed}, once for the gradient of each slice"
            self.differences.append(("hook", text))
        else:
            self.notes.append("Hooks of parameters get the gradient of each slice")

    @property
    def _all_notes(self) -> list[str]:
        # A difference of that kind says the same, and more.
        if not self.kept or "kept" in dict(self.differences):
            return self.notes
        named = some_of(self.kept)
        return [*self.notes, f"What the step keeps in {named} is of one slice, not of the whole batch"]

    def line(self) -> str:
        """What is as on one device."""
        described = []
        for kind, count in self.counts.items():
            if kind == "loss" and count:
                described.append(kind)
            elif count:
                plural = "s" if count > 1 else ""
                described.append(f"{count} {kind}{plural}")
        skipped = f"; not compared: {', '.join(self.skipped)}" if self.skipped else ""
        notes = "".join(f". {note}" for note in self._all_notes)
        # A step may do nothing that can be compared, which must not read
        # like a check that has failed.
        if not described:
            nothing = f"{self.stage} returns, logs and changes nothing" if not self.skipped else self.stage
            return f"dpx: checked on {self.rows} rows: {nothing}{skipped}{notes}."
        return (
            f"dpx: checked on {self.rows} rows: {', '.join(described)} as on one device (largest difference "
            f"{short(self.largest)}; {self.stage}){skipped}{notes}."
        )

    def subjects(self) -> frozenset[str]:
        """What differs, without the numbers, which are others on other rows."""
        found: set[str] = set()
        for kind, text in self.differences:
            # Of these the text names the largest ones first, which may be others, too.
            found.add(kind if kind in _WITHOUT_NAMES else _NUMBER.sub("", text))
        return frozenset(found)

    def summary(self) -> str:
        """What differs."""
        return "; ".join(text for _, text in self.differences)

    def complaint(self) -> str:
        """What differs, and the ways out."""
        # With the sizes, a user can cut the same rows by hand and see the difference.
        cut = ", ".join(map(str, self.sizes[:-1])) + f" and {self.sizes[-1]}"
        notes = "".join(f" {note}." for note in self._all_notes)
        kinds = dict.fromkeys(kind for kind, _ in self.differences)
        if "loss" in kinds:  # from which the gradients follow
            kinds.pop("gradient", None)
        ways = "; ".join(_WAYS_OUT[kind].replace("{step}", self.stage) for kind in kinds)
        return (
            f"dpx: {self.stage} on {self.rows} rows in slices of {cut} is not what it is on one device: "
            f"{self.summary()}.{notes} Ways out: {ways}. verify='first' runs such a stage on the first replica, as one "
            "device would; verify='off' does not look."
        )


_WAYS_OUT = {
    "loss": (
        "compute the loss of the whole batch in training_step_end(outputs), or from self.all_gather(..., "
        "sync_grads=True) in the step; where the loss is a mean over something else than rows (tokens, valid pixels), "
        "say how much a slice weighs in a method loss_weight(batch)"
    ),
    "gradient": (
        "gradients that are edited before they are summed (a hook on a parameter, .grad in the step) are those of a "
        "slice; edit them in on_before_optimizer_step. A loss may be the whole batch's by chance and have other "
        "gradients (normalized by the batch, say): compute it in training_step_end(outputs)"
    ),
    "hook": "look at gradients in on_after_backward or on_before_optimizer_step, which see those of the whole batch",
    "new weight": "what a step writes between its optimizer steps, write in on_train_batch_end",
    "logged value": (
        "log what belongs to the whole batch in a hook that sees all of it ({step}_end(outputs), on_..._batch_end), "
        "from self.all_gather(...) in the step, or by a torchmetrics metric"
    ),
    "logger call": (
        "log with self.log(...), whose values come together from slices, or call the logger in on_train_batch_end and "
        "its like, which see the whole batch"
    ),
    "output": "return what belongs to the rows, and compute the rest in {step}_end(outputs)",
    "kept value": (
        "append what belongs to the rows, and compute the rest at the epoch's end; or append in on_train_batch_end and "
        "its like, which see the whole batch"
    ),
    "kept": (
        "what a step keeps for the next one is that of the first slice; compute it from self.all_gather(...) in the "
        "step, or in on_train_batch_end and its like, which see the whole batch"
    ),
    "state": (
        "what a step counts or keeps is that of a slice; count and keep in on_train_batch_end and its like, which see "
        "the whole batch"
    ),
}


def short(value: float) -> str:
    """2e-7 and not 2e-07."""
    if value == 0:
        return "0"
    # As the gradients of a slice of one row may be, where a standard deviation is taken.
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
