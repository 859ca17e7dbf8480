"""Within a budget, batches for validation, test and prediction that would not fit are cut into micro-batches.

    first batch of a stage --an eighth, a quarter of its rows--> bytes as a function of rows --> M --> its rehearsal

What keeps nothing for a backward takes little, so most evaluation steps stay as they are. Of one that is cut, the
outputs of its micro-batches are what stays.
"""

import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.lightning.evaluation import loader_index
from lightning_dpx.lightning.lightning_api import TrainerFn, rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.memory.batch_shapes import KnownShapes
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.profiled_steps import by_device
from lightning_dpx.lightning.memory.static import StaticMemory
from lightning_dpx.lightning.memory.static_of_steps import StaticOfSteps
from lightning_dpx.lightning.rehearsal.few_rows import FewRows
from lightning_dpx.lightning.rehearsal.outcome import Call
from lightning_dpx.lightning.rehearsal.shadow_step import ShadowStep
from lightning_dpx.lightning.rehearsal.whole_run import WholeRun
from lightning_dpx.memory import BesideActivations
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.replicas import BatchSlice, UncuttableBatch
from lightning_dpx.replicas.shared_iterators import code_iterators_guarded
from lightning_dpx.torch_compat import tree_leaves
from lightning_dpx.units import format_bytes

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


@dataclass(frozen=True, slots=True)
class EvaluationBytes:
    """What an evaluation step takes on a device beside parameters, as a function of its rows.

    Attributes:
        fixed: Bytes of any batch.
        per_row: Bytes of a row at the peak.
        kept: Bytes of a row of what the step returns.
        copies: What every micro-batch has copies of, such as buffers; a step in one piece has none.
    """

    fixed: float
    per_row: float
    kept: float
    copies: BesideActivations = field(default_factory=BesideActivations)

    def peak(self, rows: int, number: int = 1) -> int:
        """Bytes at the peak of the last of ``number`` micro-batches, with the outputs of the others."""
        largest = -(-rows // number)
        activations = int(self.fixed + largest * self.per_row + (rows - largest) * self.kept)
        return activations + self.copies.of(number)

    def least_peak(self, rows: int) -> int:
        """Bytes at the peak of the micro-batches that take least."""
        # More of them have fewer rows each, and more copies.
        return min(self.peak(rows, number) for number in range(min(2, rows), rows + 1))

    def least_number(self, rows: int, room: int) -> int | None:
        """Of micro-batches that fit into ``room`` bytes; ``None`` where no number does."""
        for number in range(1, rows + 1):
            if self.peak(rows, number) <= room:
                return number
        return None


class EvaluationCuts:
    """Decides, of the first batch of an evaluation and of larger ones, into how many micro-batches slices are cut.

    Args:
        session: Whose steps.
        planning: Has the budgets.
        static: What a training step of slices needs beside its activations.
    """

    def __init__(self, session: "Session", planning: MemoryPlanning, static: StaticOfSteps) -> None:
        self._session = session
        self._planning = planning
        self._static = static
        self._known: dict[tuple[str, int], KnownShapes] = defaultdict(KnownShapes)
        self._why_cut = ""  # of the evaluation that was cut last

    def cut(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether slices of this stage are cut further from here on.

        Args:
            name: Of the step.
            args: What Lightning calls it with.
            kwargs: The arguments that it gives by name.
        """
        session = self._session
        known = self._known[name, loader_index(args)]
        # By loader: the batches of one may fit where those of another do not.
        if known.covers(args[0]) or self._stays_whole(name):
            return False
        try:
            num_rows = session.replicas.slicer.read(args[0]).num_rows
            with session.replicas.partition.slices_in_one_piece(training=False):
                slices = session.replicas.slices(args[0])
        except UncuttableBatch:
            return False  # as is announced, or known by now
        # Once for each shape, whatever is found: a step that could not be
        # measured is not tried again.
        known.add(args[0])
        # As the step would run in one piece, whatever number holds by now.
        active = tuple(batch_slice.replica.index for batch_slice in slices)
        call = Call(name=name, args=args, kwargs=kwargs, active=active, num_rows=num_rows)
        needs = self._measured(call)
        if needs is None:
            return False
        return self._cut(name, needs, slices if len(slices) > 1 else [_with_rows(slices[0], num_rows)])

    def _stays_whole(self, name: str) -> bool:
        """Whether it is known without looking that this stage cannot be cut, or not now."""
        session = self._session
        # Two runs of a step on this process alone would wait for the others; and nothing is cut
        # that no rehearsal checks.
        cannot = session.spans_processes or session.shifts or session.options.verify == "off"
        # On several devices a step by hand takes turns with its like: there every replica has a device for itself.
        cannot = cannot or (not session.module.automatic_optimization and len(session.replicas.devices) > 1)
        # Gradients that wait on replicas would be lost with them.
        return bool(cannot or session.step.holds_gradients or session.whole_batches.reason_for(name) is not None)

    def _measured(self, call: Call) -> EvaluationBytes | None:
        """What the step takes, by two runs of a shadow module on a few rows; ``None`` where those do not run."""
        strategy = self._session.strategy
        # Small parts, as the whole batch is what may not fit; two of them, for a line.
        few = max(1, call.num_rows // 8)
        more = max(2, call.num_rows // 4)
        # A single row cannot be cut.
        if call.num_rows < more:
            return None
        requested: list[str] = []
        try:
            # The trace counts operators one by one, and compiled code would show it none.
            with code_iterators_guarded(self._session.module, requested), uncompiled():
                step = ShadowStep(strategy, call, requested)
                run = WholeRun(step, FewRows(call, step.replicas))
                # Evaluation steps run no optimizers, so no hooks are called around them.
                with step.sandbox.opened(calls_hooks=False):
                    first = self._bytes_of(run, few)
                    second = self._bytes_of(run, more)
        except Exception as error:  # noqa: BLE001  a failure in here is none of the run
            # The frames hold on to tensors of the failed run.
            traceback.clear_frames(error.__traceback__)
            return None
        # An iterator that gives no item back was asked for one, so the step has not run as it will.
        if requested:
            return None
        per_row = max(0.0, (second[0] - first[0]) / (more - few))
        return EvaluationBytes(
            fixed=max(0.0, first[0] - few * per_row),
            per_row=per_row,
            kept=second[1] / more,
            copies=self._static.copies_for_micro_batches(self._session.replicas.root),
        )

    def _bytes_of(self, run: WholeRun, num_rows: int) -> tuple[int, int]:
        """Bytes at the peak of the step on so many rows, and bytes of what it returns."""
        device = self._session.strategy.root_device
        trace = CostModel(device).trace()
        seen = run.observe(num_rows, watched=trace)
        # What is returned stays until the last micro-batch is through.
        returned = [leaf for leaf in tree_leaves(seen.output) if isinstance(leaf, torch.Tensor)]
        return trace.peak_of_passing(), sum(leaf.nbytes for leaf in returned if leaf.device == device)

    def _cut(self, name: str, needs: EvaluationBytes, slices: list[BatchSlice]) -> bool:
        session = self._session
        partition = session.replicas.partition
        numbers = list(partition.numbers(training=False))
        trains = session.trainer.state.fn == TrainerFn.FITTING
        said: list[str] = []
        for home, here in by_device(slices).items():
            # Without a fit there will be no gradients and no optimizer state.
            held = self._static.of(slices).between_steps(home) if trains else StaticMemory(slices).present(home)
            # Replicas that share the device may be at their peaks at once.
            room = (self._planning.rooms.budgets.limit(home, session.replicas.devices) - held) // len(here)
            rows = here[0].num_rows
            number = needs.least_number(rows, room)
            takes = (
                f"{name} on {rows} rows takes {format_bytes(needs.peak(rows))} on {home}, where "
                f"{format_bytes(max(0, room))} are left by {self._planning.rooms.option()}"
            )
            # Over its budget, as one device would be: no evaluation is refused.
            if number is None:
                least = format_bytes(needs.least_peak(rows))
                # What takes nothing is not what exceeds it: parameters and gradients alone do.
                if needs.peak(rows):
                    rank_zero_warn(f"dpx: {takes}. {self._stays()}, as micro-batches take {least} at the least.")
                continue
            place = partition.device_of[here[0].replica.index]
            # Never fewer, as an earlier loader or a larger batch needed them.
            if number > numbers[place]:
                # No number but the one that was asked for, whose bits may matter; what that means is said.
                if not session.options.chooses_micro_batches:
                    self._tell_of_too_few(takes, needs.peak(rows, numbers[place]), numbers[place], number)
                    continue
                numbers[place] = number
                said.append(f"{takes}: it runs in {number} micro-batches ({format_bytes(needs.peak(rows, number))})")
        if not said:
            return False
        why_whole = session.replicas.why_no_micro_batches()
        if why_whole:
            rank_zero_warn(f"dpx: {'; '.join(said)}, if it could be cut. It stays in one piece: {why_whole}")
            return False
        # Kept for the rehearsal, which may take the cut back and then says what it was for.
        self._why_cut = "; ".join(said)
        if not session.cut_slices(numbers, training=False):
            return True
        rank_zero_info(f"dpx: {self._why_cut}.")
        session.verification.reopen(name)
        return True

    def _stays(self) -> str:
        if self._session.options.chooses_micro_batches:
            return "It stays in one piece"
        return f"It runs as micro_batches={self._session.options.micro_batches} says"

    def _tell_of_too_few(self, takes: str, peak: int, given: int, number: int) -> None:
        in_so_many = f", in {given} micro-batches {format_bytes(peak)}" if given > 1 else ""
        rank_zero_warn(
            f"dpx: {takes}{in_so_many}. It exceeds that, as micro_batches={self._session.options.micro_batches} was "
            f"asked for; micro_batches='auto' would try {number}."
        )

    def leave(self, name: str, reason: str) -> bool:
        """Takes a cut back after a rehearsal: micro-batches are not what one device gives.

        Args:
            name: Of the step.
            reason: What speaks against them, in a sentence that begins with "they".

        Returns:
            Whether they had been chosen here; what the user chose stays.
        """
        if not self._why_cut:
            return False
        rank_zero_warn(
            f"dpx: {self._why_cut} no longer, as {reason} So {name} stays in one piece, over its budget; "
            "micro_batches=M cuts it all the same, into M."
        )
        self._why_cut = ""
        session = self._session
        session.replicas.partition.stop_cutting_slices(training=False)
        session.verification.reopen(name)
        return True


def _with_rows(batch_slice: BatchSlice, num_rows: int) -> BatchSlice:
    """The same slice with its number of rows, which that of a whole batch does not have."""
    return BatchSlice(batch_slice.replica, num_rows, batch_slice.batch)
