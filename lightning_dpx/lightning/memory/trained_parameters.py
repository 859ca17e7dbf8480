"""Which parameters get gradients: a run may unfreeze some, and its steps then hold more than was planned for."""

from collections.abc import Sequence

from torch import nn

from lightning_dpx.errors import some_of


class TrainedParameters:
    """The parameters that have got gradients so far, by their places in a list."""

    def __init__(self) -> None:
        self._known: list[bool] = []
        self._unplanned: list[str] = []  # names of those that got them since memory was planned

    def note(self, parameters: Sequence[nn.Parameter], module: nn.Module) -> bool:
        """Notes those that get gradients from now on; says whether they are others than before.

        Some that no longer do take nothing more, and are back in the steps of a run that trains parts in turns.

        Args:
            parameters: All of the module, in the order of every call.
            module: Whose they are.
        """
        now = [parameter.requires_grad for parameter in parameters]
        if now == self._known:
            return False
        known = self._known
        if len(known) != len(now):
            # Other parameters than before, none of which is known.
            self._known = now
            return bool(known)
        self._known = list(map(bool.__or__, known, now))
        names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, is_trained, was_trained in zip(parameters, now, known, strict=True):
            if is_trained and not was_trained:
                self._unplanned.append(names.get(parameter, "one without a name"))
        return self._known != known

    def are_planned_for(self) -> None:
        """Memory is planned for all of them."""
        self._unplanned.clear()

    def explain(self, error: BaseException) -> None:
        """Names in the refusal of a budget what has come to be trained since there was a plan."""
        if self._unplanned:
            error.add_note(
                f"The plans of before were for a step that trained less: {some_of(self._unplanned)} were unfrozen "
                "since, and get gradients and states of optimizers."
            )
