"""Rules that are found while they merge: which ways of putting slices together give what one device has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_dpx.lightning.rehearsal.comparison.attribute_judge import AttributeJudge
from lightning_dpx.lightning.rehearsal.comparison.buffer_judge import BufferJudge
from lightning_dpx.lightning.rehearsal.comparison.findings import chosen
from lightning_dpx.lightning.rehearsal.comparison.loss_judge import LossJudge
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation
from lightning_dpx.replicas import MergeRules, Source, Weights
from lightning_dpx.replicas.buffer_sync import BufferRule
from lightning_dpx.replicas.merging.rule_search import Finding, Search
from lightning_dpx.replicas.merging.tolerance import Tolerance


class JudgingRules(MergeRules):
    """Finds the rules while it merges, by what one device made of the same rows.

    Args:
        whole: What one device did.
        tolerance: How far slices may be from it.
        decides_loss: Whether the loss may be a mean or a sum.
        loss_reduction: What it is to begin with.
        unstable: Paths of outputs and names of logged values that change from run to run.

    Attributes:
        loss: What was found of the loss.
        attributes: What was found of Python attributes that the step rebinds.
        of_buffers: What was found of buffers.
        written_buffers: Names of buffers that one device has written.
        findings: What was found of outputs, by path.
        logged_findings: What was found of logged values, by name.
        batch_sizes: Names of logged values with a batch size that slices cannot give, and why.
        draws_by_rows: Who draws more numbers for more rows.
    """

    def __init__(
        self,
        whole: Observation,
        tolerance: Tolerance,
        *,
        decides_loss: bool,
        loss_reduction: str,
        unstable: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(
            loss_reduction=loss_reduction, writes_batch=whole.writes_batch, drops_gradients=whole.drops_gradients
        )
        self.written_buffers: frozenset[str] = frozenset(_written(whole))
        self._whole = whole
        self._tolerance = tolerance
        self._unstable = unstable
        self.attributes: AttributeJudge = AttributeJudge(whole, tolerance, unstable)
        self.of_buffers: BufferJudge = BufferJudge(whole.state, tolerance, self.written_buffers)
        self.loss: LossJudge = LossJudge(whole.loss, tolerance, decides=decides_loss, is_unstable="loss" in unstable)
        self.findings: dict[str, Finding] = {}
        self.logged_findings: dict[str, Finding] = {}
        self.batch_sizes: dict[str, str] = {}
        self.draws_by_rows: set[Source] = set()

    @property
    def lost_names(self) -> frozenset[str]:
        """Names of what one device has logged as nan."""
        logged = self._whole.logged.items()
        return frozenset(
            name for name, one in logged if isinstance(one.value, float | torch.Tensor) and _is_nan(one.value)
        )

    def merge_outputs(self, parts: Sequence[Any], weights: Weights, device: torch.device, dim: int = 0) -> Any:
        """Decides, then merges."""
        whole = self._whole.output
        if (
            # The step merges losses by itself, and asks for the rest of what slices return.
            isinstance(whole, Mapping)
            and "loss" in whole
            and not (isinstance(parts[0], Mapping) and "loss" in parts[0])
        ):
            whole = {key: value for key, value in whole.items() if key != "loss"}
        search = Search(weights=weights, tolerance=self._tolerance, dim=dim, unstable=self._unstable)
        for found in search.examine(whole, parts, "result"):
            self.findings[found.path] = found
        self.outputs = chosen(self.findings)
        return super().merge_outputs(parts, weights, device, dim)

    def merge_logged(
        self, path: str, values: Sequence[Any], weights: Weights, device: torch.device, reduce_fx: str = "mean"
    ) -> Any:
        """Decides, then merges."""
        known = self._whole.logged.get(path)
        if known is not None:
            search = Search(weights=weights, tolerance=self._tolerance, unstable=self._unstable, prefer=reduce_fx)
            for found in search.examine(known.value, values, path):
                self.logged_findings[found.path] = found
            self.logged = chosen(self.logged_findings)
        return super().merge_logged(path, values, weights, device, reduce_fx)

    def decides(self, path: str) -> bool:
        """Whether it is decided how a logged value comes together: all are that one device had, too."""
        return path in self._whole.logged

    def merge_batch_sizes(self, path: str, sizes: Sequence[float]) -> float:
        """Decides, then merges."""
        known = self._whole.logged.get(path)
        if known is not None and known.batch_size is not None and known.batch_size != sum(sizes):
            # A constant that the user names is no count of rows, and must not be added up.
            if all(size == known.batch_size for size in sizes):
                self.same_batch_sizes.add(path)
            else:
                parts = " and ".join(f"{size:g}" for size in sizes)
                self.batch_sizes[path] = f"batch_size={known.batch_size:g} on one device, {parts} from slices"
        return super().merge_batch_sizes(path, sizes)

    @property
    def decides_buffers(self) -> bool:
        """Always: any buffer may turn out to need a rule."""
        return True

    def buffer_rule(self, name: str, value: Callable[[BufferRule], torch.Tensor | None]) -> BufferRule:
        """The first replica's, unless another rule makes of it what one device did."""
        rule = self.of_buffers.rule(name, value)
        if rule != "first":
            self.buffers[name] = rule
        return rule

    def reduction(self, losses: Sequence[torch.Tensor], weights: Weights) -> str:
        """Mean or sum, whichever is the whole batch's loss."""
        self.loss_reduction = self.loss.reduction(losses, weights, self.loss_reduction)
        return self.loss_reduction


def _written(whole: Observation) -> list[str]:
    """Names of tensors, buffers among them, that one device has changed."""
    found: list[str] = []
    for name, value in whole.state.items():
        if isinstance(value, torch.Tensor):
            before = whole.state_before.get(name)
            if not isinstance(before, torch.Tensor) or not torch.equal(before, value):
                found.append(name)
    return found


def _is_nan(value: float | torch.Tensor) -> bool:
    return bool(torch.as_tensor(value).isnan().any())
