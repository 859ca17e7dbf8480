"""Micro-batches: the backward of each right after its forward, before the gradient of the merged loss is known.

    stash_gradients  gradients of earlier steps --> aside (or freed, where they would be zeroed before they are used)
    call             micro-batch --forward--> its loss --backward, with the expected gradient--> parameters' gradients
                        +-- the next one, when the activations of this one are gone
    take             parameters' gradients --> held, out of the way of zero_grad; aside --> parameters' gradients
    add_gradients    held x (real / expected gradient of the merged loss) --added--> parameters' gradients

Lightning runs a step as training_step, zero_grad, backward(loss). A micro-batch's activations can only be freed by its
backward, so that must happen inside training_step, when two things are open: what the merged loss's gradient will be,
and whether the gradients that are there will be zeroed. The first is expected (a gradient scaler's scale, divided by
the number of accumulated batches, times the micro-batch's weight) and made good later: a backward is linear, so
gradients are scaled by what the real one is of the expected one, which is 1 but for steps of which some micro-batches
have no loss, and backwards that the user's code changes. The second needs no knowledge: what was there is put aside.
The other way, forwards only in training_step and each forward once more in backward, needs no expectation, and costs
a third of the step.
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_dpx.backward_threads import forget_failed_backward
from lightning_dpx.errors import ReplicationError
from lightning_dpx.replicas.batch_slice import BatchSlice
from lightning_dpx.replicas.containers import map_result
from lightning_dpx.replicas.gradient_addition import added_gradient
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.torch_compat import run_backward

Gradients = list[list[torch.Tensor | None]]  # K x N
_GRADIENT = operator.attrgetter("grad")
_IS_TRAINED = operator.attrgetter("requires_grad")


@dataclass(slots=True, kw_only=True)  # not frozen: one is made in every step
class ExpectedGradient:
    """What the backward of the merged loss will begin with.

    Attributes:
        value: A number, or a tensor of one that lives on an accelerator.
        is_certain: Nothing of the user's stands between the loss and its backward, so that no check is needed.
    """

    value: float | torch.Tensor = 1.0
    is_certain: bool = False


class EarlyBackward:
    """The backwards of one step's micro-batches.

    Args:
        primaries: K replicas with parameters of their own, one of each device.
        expected: What the merged loss's gradient will be.
        weights: By replica index, what each micro-batch's loss counts in the merged one.
    """

    def __init__(
        self,
        primaries: Sequence[Replica],
        expected: ExpectedGradient,
        weights: Mapping[int, float],
    ) -> None:
        self._primaries = primaries
        self._expected = expected
        self._weights = weights
        self._aside: Gradients = []
        self._held: Gradients = []
        self._shown = False
        # What a step freezes, it freezes for the next one: all micro-batches find the flags of the first.
        self._flags = [list(map(_IS_TRAINED, replica.parameters)) for replica in primaries]
        self._later_flags: dict[int, list[bool]] = {}  # by the place of a device, what steps have left

    # ---- the gradients that are there ----

    def stash_gradients(self, zeroed: Collection[int] = (), *, shown: bool = False) -> bool:
        """Before the first micro-batch; says whether there is anything that the step will be added to.

        Args:
            zeroed: Ids of parameters whose gradients will be zeroed before anything uses them: those go at once.
            shown: Every forward finds what is put aside in its place, as it would on one device.
        """
        self._shown = shown
        # What will be zeroed before it is used is freed now, and takes no memory beside the
        # activations.
        self._aside = [_taken(replica, zeroed) for replica in self._primaries]
        return any(column.count(None) < len(column) for column in self._aside)

    def take(self) -> None:
        """After the last micro-batch: the parameters' gradients are those that were put aside."""
        self._held = [_taken(replica) for replica in self._primaries]
        self._put_back()
        for place, flags in self._later_flags.items():
            replica = self._primaries[place]
            if list(map(_IS_TRAINED, replica.parameters)) == self._flags[place]:
                _set_flags(replica, flags)

    def _put_back(self) -> None:
        for replica, column in zip(self._primaries, self._aside, strict=True):
            if column.count(None) == len(column):  # as where all were zeroed
                continue
            for parameter, gradient in zip(replica.parameters, column, strict=True):
                if gradient is not None:
                    parameter.grad = gradient
        self._aside = []

    def add_gradients(self, gradient: torch.Tensor, weights: Mapping[int, float]) -> None:
        """After the real backward of the merged loss: the step's gradients come to those that are there.

        Args:
            gradient: Of the merged loss.
            weights: What each micro-batch's loss counts in it, where it has one.

        Raises:
            ReplicationError: the step's gradients are not those of the loss by any factor.
        """
        held = self._held
        self._held = []
        factor = self._factor(gradient, weights)
        with torch.no_grad():
            for replica, column in zip(self._primaries, held, strict=True):
                for parameter, gradient_of_step in zip(replica.parameters, column, strict=True):
                    if gradient_of_step is None:
                        continue
                    # As good as always the factor is 1, and nothing is multiplied.
                    scaled = gradient_of_step if factor == 1 else gradient_of_step * factor
                    earlier = parameter.grad
                    parameter.grad = scaled if earlier is None else added_gradient(earlier, scaled)

    def before_forward(self, place: int) -> None:
        """A forward on this device begins: it finds the gradients of earlier steps, if it is to look."""
        replica = self._primaries[place]
        flags = list(map(_IS_TRAINED, replica.parameters))
        # The backward of the one before has run with what its step had set, as on one device.
        if flags != self._flags[place]:
            self._later_flags[place] = flags
            _set_flags(replica, self._flags[place])
        if self._shown:
            self._exchange(place)

    def after_forward(self, place: int) -> None:
        """The backward adds to the gradients of this step."""
        if self._shown:
            self._exchange(place)

    def _exchange(self, place: int) -> None:
        replica = self._primaries[place]
        others = self._aside[place]
        self._aside[place] = _taken(replica)
        for parameter, gradient in zip(replica.parameters, others, strict=True):
            if gradient is not None:
                parameter.grad = gradient

    def abandon(self) -> None:
        """After an error: the step leaves no gradients; those of earlier ones are there (again)."""
        self._held = []
        if not self._aside:  # they are there since the last micro-batch has ended
            return
        for replica in self._primaries:
            for parameter in replica.parameters:
                parameter.grad = None
        self._put_back()

    def _factor(self, gradient: torch.Tensor, weights: Mapping[int, float]) -> float:
        """What the real gradients are of those that were computed."""
        # Micro-batches without a loss drop out, and the weights of the others grow by one factor.
        ratios = [weight / self._weights[index] for index, weight in weights.items() if self._weights[index]]
        factor = ratios[0] if ratios else 1.0
        if any(not math.isclose(ratio, factor, rel_tol=1e-9) for ratio in ratios):
            raise ReplicationError(
                "The weights of the micro-batches' losses changed while the step ran, by factors of "
                f"{min(ratios):g} to {max(ratios):g}: let loss_weight give the same for a batch whenever it is asked."
            )
        # Weights are quotients of rows, whose last digit says nothing.
        if math.isclose(factor, 1.0, rel_tol=1e-12):
            factor = 1.0
        if self._expected.is_certain:
            return factor
        # It waits for the device, so it is asked only where something may have changed the
        # gradient.
        real = float(gradient)
        value = self._expected.value
        if real == value:
            return factor
        # The value is a Python number, with more digits than the loss has.
        expected = float(torch.as_tensor(value, dtype=gradient.dtype))  # as the loss's dtype rounds it
        if real == expected:
            return factor
        if not expected or not math.isfinite(real / expected):
            raise ReplicationError(
                f"The backward of the loss began with a gradient of {real:g}, after those of its micro-batches had run "
                f"with {expected:g}, which no factor corrects. Something changes the gradient between training_step "
                "and backward; use micro_batches=1."
            )
        return factor * real / expected

    # ---- a micro-batch ----

    def call(
        self,
        call: Callable[[BatchSlice], Any],
        device_of: Mapping[int, int],
        begin_last: Callable[[int], None] | None = None,
    ) -> "WithBackward":
        """``call`` with its backward, and without the graph of what it returns.

        Args:
            call: A replica's step.
            device_of: By the index of each replica that takes part, the place of its device; in the order of turns.
            begin_last: Called with the place of a device, right before the backward of its last micro-batch.
        """
        # In the order of turns the last replica of each device is the one that stays.
        last = {place: index for index, place in device_of.items()}
        return WithBackward(self, call, device_of, frozenset(last.values()), begin_last)

    def run(self, index: int, output: Any, begin: Callable[[], None] | None = None) -> Any:
        """The backward of what a step returned; and that, without its graph.

        Args:
            index: Of the replica.
            output: What its step returned.
            begin: Called right before the backward, if there is one.
        """
        loss = loss_of(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return output  # there is no loss, or a complaint to come
        weight = self._weights[index]
        # A leaf in place of the loss: the graph is freed, and the merged loss still sees whether
        # anything here requires a gradient.
        mark = loss.detach()
        if loss.requires_grad:
            if begin is not None:
                begin()
            if weight:  # the mean over no tokens is NaN, which no weight takes out of a sum
                self._walk(loss, weight)
            mark.requires_grad_()
        if isinstance(output, torch.Tensor):
            return mark
        extras = {key: value for key, value in output.items() if key != "loss"}
        return {"loss": mark, **map_result(torch.Tensor.detach, extras)}

    def _walk(self, loss: torch.Tensor, weight: float) -> None:
        value = self._expected.value
        if isinstance(value, torch.Tensor):
            gradient = (value.to(loss.device) * weight).to(loss.dtype).view_as(loss)
        else:
            gradient = torch.full_like(loss, value * weight, requires_grad=False)
        kind = loss.device.type
        try:
            if torch.is_autocast_enabled(kind):  # Lightning's backward runs outside of it
                with torch.autocast(kind, enabled=False):
                    run_backward((loss,), (gradient,))
            else:
                run_backward((loss,), (gradient,))
        except BaseException as error:
            # The graph of the failed micro-batch would stay in the engine's queue of this thread.
            forget_failed_backward()
            error.add_note("In the backward of a micro-batch, which runs before the next one's forward.")
            raise


@dataclass(slots=True)
class WithBackward:
    """A replica's step with its backward; made by :meth:`EarlyBackward.call`.

    Attributes:
        early: Runs the backward.
        call: The step.
        device_of: By the index of a replica, the place of its device.
        last: Indices of the replicas with the last micro-batch of a device.
        begin_last: See :meth:`EarlyBackward.call`.
    """

    early: EarlyBackward
    call: Callable[[BatchSlice], Any]
    device_of: Mapping[int, int]
    last: Collection[int]
    begin_last: Callable[[int], None] | None

    def __call__(self, batch_slice: BatchSlice) -> Any:
        """What the step returns, without its graph."""
        index = batch_slice.replica.index
        place = self.device_of[index]
        self.early.before_forward(place)
        output = self.call(batch_slice)
        self.early.after_forward(place)
        begin = None
        if self.begin_last is not None and index in self.last:
            begin = partial(self.begin_last, place)
        return self.early.run(index, output, begin)


def loss_of(output: Any) -> Any:
    """What a step returned, or has under ``"loss"``."""
    if isinstance(output, torch.Tensor):  # asked first: it is much cheaper than to ask for any kind of mapping
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    return output


def _set_flags(replica: Replica, flags: Sequence[bool]) -> None:
    for parameter, is_trained in zip(replica.parameters, flags, strict=True):
        parameter.requires_grad_(is_trained)


def _taken(replica: Replica, freed: Collection[int] = ()) -> list[torch.Tensor | None]:
    """The gradients of the parameters, which have none then; without those of parameters with ids in ``freed``."""
    gradients = list(map(_GRADIENT, replica.parameters))
    if freed:
        for index, parameter in enumerate(replica.parameters):
            if id(parameter) in freed:
                gradients[index] = None
    # Without a look at what is there: to take nothing off is cheaper.
    for parameter in replica.parameters:
        parameter.grad = None
    return gradients
