"""What is said of checks, and what ``verify`` asks to follow from a difference: a warning, an error, whole batches."""

from typing import TYPE_CHECKING

from lightning_dpx.errors import ParityError
from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.options import Verify
from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison
from lightning_dpx.replicas import MergeRules

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session
    from lightning_dpx.lightning.strategy import DPXStrategy

_CHECKED_AGAIN = ", and is in later batches that do it, until a check has seen it; the step is checked again"


class Verdicts:
    """Says what the rehearsals of a run have found, once each.

    Args:
        strategy: Whose steps are checked.
        verify: What happens when they differ from one device.
    """

    def __init__(self, strategy: "DPXStrategy", verify: Verify) -> None:
        self._strategy = strategy
        self._verify = verify
        # Not emptied by forget: a second fit of the same strategy need not say the same again.
        self._said: set[str] = set()
        self._unchecked = ""

    @property
    def _session(self) -> "Session":
        """The run whose steps are checked."""
        return self._strategy.replicated_session

    def forget(self) -> None:
        """The run is over."""
        self._unchecked = ""

    def say(self, text: str, topic: str = "") -> None:
        """Says a line once; of those with a topic one, as they differ in figures only."""
        said = topic or text
        if said not in self._said:
            rank_zero_info(text)
        self._said.add(said)

    def agrees(self, comparison: Comparison) -> None:
        """A step is what it is on one device."""
        self.say(comparison.line())

    def differs(self, name: str, comparison: Comparison, *, is_told: bool) -> None:
        """A step is not what it is on one device.

        Args:
            name: Of the step.
            comparison: What differs.
            is_told: Whether all of it was told of this step before.

        Raises:
            ParityError: with ``verify="raise"``, also in a later look: the user asked for parity and not for a report.
        """
        if self._verify == "raise":
            raise ParityError(comparison.complaint())
        if self._verify == "first":
            text = f"on {comparison.rows} rows its slices differ from one device: {comparison.summary()}."
            self._session.whole_batches.give_whole(name, text, "verify='warn' runs its slices all the same.")
        # Rehearsed again because it has done something new, a step differs by what was told before as well.
        elif not is_told:
            rank_zero_warn(comparison.complaint())

    def normalizes_slices(self, name: str, norms: list[str]) -> bool:
        """Norms are left out of a comparison, and they are a difference all the same; whether batches go whole."""
        if self._verify != "first" or not norms:
            return False
        names = ", ".join(norms[:3])
        self._session.whole_batches.give_whole(
            name,
            f"{names} would normalize by slice, and not by batch as on one device.",
            "Trainer(sync_batchnorm=True) makes it the whole batch's; verify='warn' runs slices all the same.",
        )
        return True

    def note_unchecked(self, text: str) -> None:
        """A step could not be rehearsed, as ``text`` says; with ``verify="raise"`` its run ends after the step."""
        # Not before it: what the step raises in a rehearsal it mostly raises itself, and then as the user's own error,
        # which a debugger, or a search for a batch size, knows.
        if self._verify == "raise":
            self._unchecked = text
        else:
            self.say(text)

    def refuse_unchecked(self) -> None:
        """Called once a step has run.

        Raises:
            ParityError: it could not be checked, and ``verify="raise"``.
        """
        text = self._unchecked
        self._unchecked = ""
        if text:
            raise ParityError(
                f"{text.rstrip('.')}. With verify='raise' every step has to be checked: mend what the check cannot do, "
                "or give verify='warn', which goes on unchecked and says so."
            )

    def take_news(self, name: str, rules: MergeRules, then: str = _CHECKED_AGAIN) -> frozenset[str]:
        """Takes, and announces, what a step did for the first time since it was rehearsed."""
        news = rules.news.take()
        if news:
            paths = ", ".join(sorted(path.removeprefix("result.") for path in news))
            self.say(
                f"dpx: {name} has done more in the last batch than when it was checked ({paths}): that was put "
                f"together unchecked there (an attribute holds what slices made of it){then}."
            )
        return news
