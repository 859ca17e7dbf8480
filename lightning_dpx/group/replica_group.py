"""The data-parallel executor group for any ``nn.Module``, without Lightning (MXNet's DataParallelExecutorGroup).

forward             inputs --> slices --> the module on each --> outputs, on their devices
backward            gradients of the outputs --> each replica's backward --> gradients.py
forward_backward    both, one micro-batch after the other
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from torch import nn

from lightning_dpx.arguments import check_is_module, is_whole_number
from lightning_dpx.devices import present_devices
from lightning_dpx.errors import ConfigurationError, SliceError
from lightning_dpx.group.arguments import (
    GradReq,
    check_fixed_params,
    check_inputs_named,
    check_not_shifted,
    gradient_requests,
)
from lightning_dpx.group.gradients import GroupGradients
from lightning_dpx.group.inputs import by_name, call_module, gradients_by_input, on_replica
from lightning_dpx.group.named_values import copied_parameters, mean_buffers, write_by_name
from lightning_dpx.group.output_monitors import OutputMonitors
from lightning_dpx.group.outputs import merge_outputs, shapes_of_outputs, update_metric
from lightning_dpx.group.parameter_hooks import ParameterHookCalls
from lightning_dpx.group.shared_parameters import adopt_buffers, adopt_parameters, parameters_by_replica
from lightning_dpx.python_objects.overrides import preserve_modes
from lightning_dpx.reducers import GradientReducer, make_reducer
from lightning_dpx.replicas import (
    BatchDim,
    BatchSlice,
    Execution,
    InputGradients,
    MicroBatches,
    OutputDims,
    OutputGradients,
    Replica,
    ReplicaSet,
    TwoPasses,
    check_micro_batches,
    join_input_gradients,
    map_result,
)
from lightning_dpx.shifting import has_shifts
from lightning_dpx.torch_compat import version_counter


class ReplicaGroup:
    """K replicas of ``module`` that run forward and backward on slices of a batch.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> group = dpx.ReplicaGroup(model, ["sim:0", "sim:1"])  # or "cuda:0", "cuda:1"
        >>> group.forward(torch.ones(6, 4))
        >>> group.backward(torch.ones_like(group.outputs_merged()))
        >>> optimizer.step()  # the next forward carries the new values to the replicas

    Submodules, parameters and hooks may be added, removed or exchanged between the steps. Hooks of parameters are
    called with the gradient of all rows, as on one device.

    Legend: K replicas, B rows in a batch, N parameters.

    Args:
        module: Moved to the first device; it stays replica 0 and owns the parameters and their gradients.
        devices: K devices; repeated ones are allowed.
        workload: ``None`` for even shares, K positive numbers, or ``"auto"`` for shares by measured speed.
        batch_dim: The batch dim of all inputs and outputs, or ``{input: dim}`` with positions (``"0"``), keywords and
            paths within them (``"0.pixels"``), ``"output"`` for the outputs, or ``"output.1"`` for one of them, and
            ``"labels"`` for those of a metric; 0 for those that are not named. -1 gives an input whole, and is for an
            output that has no rows and is the same on all replicas.
        grad_req: ``"write"`` replaces the gradients at each backward, ``"add"`` accumulates, ``"null"`` computes none;
            or ``{parameter name: one of them}``, with "write" for those that are not named. ``"add"`` by itself is also
            for the gradients of the inputs: they add up as long as batches have the same shapes, until :meth:`reshape`.
        fixed_params: Names of parameters that get no gradient; as with "null", in this group alone.
        inputs_need_grad: Also compute the gradients of the floating-point inputs: of tensors and those in containers,
            and not of what packed sequences and graphs hold.
        shared_group: A group whose parameters of the same names this one uses, replica by replica: one copy of the
            values and one of the gradients, for modules of different shapes of input (bucketing). Buffers in the state
            dict of both, of the same name, shape and dtype, are one as well.
        reducer: A registered name, ``"auto"`` or a reducer.
        execution: ``"auto"``, ``"inline"`` or ``"threads"``.
        micro_batches: M, or one M for each device: a device's slice is cut into M micro-batches of nearly equal rows,
            each with a replica of its own that shares the parameters of the first on its device. Only the activations
            of one are held: :meth:`forward_backward` runs each forward and backward before the next one begins;
            :meth:`forward` keeps no graph, and :meth:`backward` then runs each forward once more, with the same random
            numbers.

    Raises:
        ConfigurationError: an argument has a value that is not allowed, or the module is shifted.
        ReplicationError: the module cannot be copied faithfully.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str],
        *,
        workload: Literal["auto"] | Sequence[float] | None = None,
        batch_dim: BatchDim = 0,
        grad_req: GradReq | Mapping[str, GradReq] = "write",
        fixed_params: Sequence[str] = (),
        inputs_need_grad: bool = False,
        shared_group: "ReplicaGroup | None" = None,
        reducer: str | GradientReducer = "auto",
        execution: Execution = "auto",
        micro_batches: MicroBatches = 1,
    ) -> None:
        check_is_module(module)
        if not devices:
            raise ConfigurationError("devices is empty; give at least one device.")
        check_not_shifted(module)
        placed = present_devices(devices)
        module.to(placed[0])
        # Before anything is named: parameters of the other group stand in the module from here on.
        existing = self._adopt_shared(module, shared_group, placed)
        requests = gradient_requests(module, grad_req)
        check_fixed_params(fixed_params, requests)
        self._inputs_need_grad = inputs_need_grad
        self._input_gradients = InputGradients(adds=grad_req == "add")
        check_inputs_named(module, batch_dim)
        check_micro_batches(micro_batches)
        self._set = ReplicaSet(
            module,
            placed,
            workload="even" if workload is None else workload,
            batch_dim=batch_dim,
            execution=execution,
            existing=existing,
            micro_batches=micro_batches,
        )
        reduces = make_reducer(reducer, self._set.devices)
        otherwise = "write" if isinstance(grad_req, Mapping) else grad_req
        self._gradients = GroupGradients(self._set, reduces, requests, fixed_params, otherwise)
        self._output_dims = OutputDims.read(batch_dim)
        self._monitors = OutputMonitors()
        self._slices: list[BatchSlice] = []
        self._outputs: list[Any] = []
        self._left: list[int] = []  # versions of the buffers as the last forward left them
        self._modes: list[bool] = []  # train or eval, of each submodule in the last forward
        self._num_positional = 0
        self._two_passes: TwoPasses | None = None  # of a forward that kept no graph

    @staticmethod
    def _adopt_shared(
        module: nn.Module, shared_group: "ReplicaGroup | None", devices: Sequence[torch.device]
    ) -> list[dict[str, nn.Parameter]]:
        """Puts the parameters and buffers of another group into ``module``; returns its parameters by replica."""
        if shared_group is None:
            return []
        if not isinstance(shared_group, ReplicaGroup):
            raise ConfigurationError(f"shared_group={type(shared_group).__name__} is not allowed; give a ReplicaGroup.")
        # Of one class, whose groups may look into each other.
        theirs = shared_group._set
        existing = parameters_by_replica(theirs.primaries, devices)
        adopt_parameters(module, existing[0])
        adopt_buffers(module, theirs.root.module)
        return existing

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The K replicas, M for each device with micro-batches; the first holds the module itself."""
        return self._set.replicas

    @property
    def slices(self) -> list[slice]:
        """Rows of the last batch that each active replica got, in sample order."""
        found = []
        start = 0
        for batch_slice in self._slices:
            found.append(slice(start, start + batch_slice.num_rows))
            start += batch_slice.num_rows
        return found

    def reshape(self, num_rows: int) -> None:
        """Prepares for batches of another size: :attr:`slices` are those of ``num_rows`` rows from now on.

        A :meth:`forward` does it by itself; parameters and replicas stay as they are. Gradients of inputs
        that add up (``grad_req="add"``) begin anew.

        Raises:
            ConfigurationError: not a positive number of rows.
        """
        if not is_whole_number(num_rows) or num_rows < 1:
            raise ConfigurationError(f"num_rows={num_rows!r} is not allowed; give at least one row, as an int.")
        # A smaller batch would else be taken for the last one of an epoch, and given
        # to fewer replicas.
        self._set.partition.forget_usual_rows()
        sizes = self._set.sizes(num_rows)
        self._input_gradients.forget()
        self._outputs = []
        self._slices = []
        for replica, size in zip(self.replicas, sizes, strict=True):
            if size:
                # There are no rows yet, only numbers of them.
                self._slices.append(BatchSlice(replica, size, None))

    def output_shapes(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The shapes of the merged outputs for these inputs, in the outputs' own structure, without computing them.

        The module runs on tensors without values, and is afterwards what it was before. Where shapes, or branches,
        depend on values, torch raises its own error.
        """
        return shapes_of_outputs(self._set.root.module, self._set.root.device, inputs, named_inputs)

    def forward(self, *inputs: Any, is_train: bool | None = None, **named_inputs: Any) -> None:
        """Cuts the inputs (each with B rows) and runs the module on every slice; see :meth:`outputs`.

        Args:
            inputs: The module's positional inputs.
            is_train: Train or eval mode of all submodules in this forward; ``None`` takes the module's own.
            named_inputs: The module's keyword inputs.

        Raises:
            SliceError: the inputs cannot be cut.
        """
        with self._step(is_train):
            self._begin(inputs, named_inputs)
            self._two_passes = TwoPasses(self._set) if self._takes_turns and torch.is_grad_enabled() else None
            if self._two_passes is None:
                outputs = self._set.run("forward", self._slices, self._run_module)
            else:
                outputs = self._two_passes.first(self._slices, self._run_module)
            self._end(outputs)

    def forward_backward(
        self, *inputs: Any, out_grads: Any = None, is_train: bool | None = None, **named_inputs: Any
    ) -> None:
        """Both at once: each micro-batch forward and backward before the next one on its device begins.

        For gradients that are known beforehand; :meth:`forward` and :meth:`backward` are for those that depend on the
        outputs, at the cost of a second forward of every micro-batch. The outputs have no graph.

        Args:
            inputs: The module's positional inputs.
            out_grads: See :meth:`backward`; most often ``None``, for a module that returns its loss.
            is_train: See :meth:`forward`.
            named_inputs: The module's keyword inputs.

        Raises:
            ConfigurationError: ``grad_req="null"``.
            SliceError: the inputs cannot be cut, or ``out_grads`` has another number of rows, structure or shape than
                the outputs.
        """
        self._check_wants_gradients()
        walked: list[bool] = []
        with self._step(is_train):
            self._begin(inputs, named_inputs)
            # Wrong rows are refused before anything runs, and before the gradients of the last
            # step are gone.
            grads = self._read_gradients(out_grads)
            rows = self._rows_by_replica()

            def run_both(batch_slice: BatchSlice) -> Any:
                output = self._run_module(batch_slice)
                hooks.hold(batch_slice.replica)
                walked.append(grads.walk(output, rows[batch_slice.replica.index]))
                # Its graph has had its backward, and would hold the next micro-batch's memory back.
                return map_result(torch.Tensor.detach, output)

            with self._summed_gradients() as hooks:
                self._end(self._set.run("forward", self._slices, run_both))
                _check_walked(walked)

    @contextmanager
    def _step(self, is_train: bool | None) -> Iterator[None]:
        """A forward, in its mode; the module's own mode is for what comes after it."""
        # Nothing of the last forward is left if this one fails: a backward would take the old outputs
        # for those of the new slices.
        self._outputs = []
        self._slices = []
        self._two_passes = None
        self._follow_module()
        modules = self._set.root.modules
        with preserve_modes(modules):
            if is_train is not None:
                self._set.root.module.train(is_train)
            self._modes = [module.training for module in modules]
            with self._gradients.without_fixed():
                yield

    def _begin(self, inputs: Sequence[Any], named_inputs: Mapping[str, Any]) -> None:
        """The inputs on their replicas, which have the parameters and buffers of the first.

        Raises:
            SliceError: there are none, or they cannot be cut.
        """
        if not inputs and not named_inputs:
            raise SliceError("There are no inputs to cut; give those of the module, each with a row for every example.")
        self._num_positional = len(inputs)
        slices = self._set.slices(by_name(inputs, named_inputs))
        # After the cut: a batch that is refused has changed nothing on the replicas.
        self._set.python_state.share()
        # Between two evaluations, say, weights may be exchanged for their averages, through .data.
        self._set.state.parameters.compare_unless_changed()
        self._set.state.synchronize()
        self._slices = [on_replica(one, need_grads=self._inputs_need_grad) for one in slices]

    def _follow_module(self) -> None:
        """Where the user has given the module other parts, parameters or hooks, the replicas are copied again.

        Raises:
            ConfigurationError: the module was moved since the group was made, or a part of it was shifted.
        """
        root = self._set.root
        # One parameter tells: the module was moved as a whole when the group was made.
        first = next(root.module.parameters(), None)
        if first is not None and first.device != root.device:
            raise ConfigurationError(
                f"The module lives on {first.device}, and the group was made with it on {root.device}: move it back, "
                "or make a new group."
            )
        for replica in self.replicas if has_shifts() else ():
            check_not_shifted(replica.module)
        before = root.parameters
        if self._set.structure.has_changed:
            with self._monitors.taken_off(lambda: self.replicas):
                self._set.remake()
        else:
            root.refresh()  # of a single replica nobody asks whether it has changed
        if self._set.root.parameters is not before:
            self._gradients.follow_module()

    def _end(self, outputs: list[Any]) -> None:
        """What the forward left on the replicas comes to the first."""
        # Replicas without rows have run nothing, and hold what the last batch left there.
        active = [batch_slice.replica for batch_slice in self._slices]
        self._set.python_state.collect(active)
        self._set.state.buffers.collect(active)
        self._left = [version_counter(buffer) for buffer in self._set.root.buffers]
        self._outputs = outputs

    def _run_module(self, batch_slice: BatchSlice) -> Any:
        return call_module(batch_slice, self._num_positional)

    @property
    # Micro-batches of one device run one after the other, and only one of them may hold its graph.
    def _takes_turns(self) -> bool:
        """Whether some device has several micro-batches of the batch."""
        return len({self._set.partition.device_of[one.replica.index] for one in self._slices}) < len(self._slices)

    def backward(self, out_grads: Any = None) -> None:
        """Runs backward on every replica, then sums the parameter gradients into the module.

        Args:
            out_grads: Gradients of the merged outputs (B rows), in the outputs' own structure; ``None`` in the place of
                an output that needs none. None at all where the output is a scalar loss, the mean over its rows: the
                replicas' losses are then weighted by their rows.

        Raises:
            ConfigurationError: no forward came before, or one without gradients, or ``grad_req="null"``.
            SliceError: ``out_grads`` has another number of rows, structure or shape than the outputs; or there are
                none, and the output is no scalar loss.
        """
        if not self._outputs:
            raise ConfigurationError("backward() needs a forward() before it.")
        self._check_wants_gradients()
        grads = self._read_gradients(out_grads)
        rows = self._rows_by_replica()
        # Replicas without rows have no outputs, so all go by the index of the replica.
        outputs = dict(zip(rows, self._outputs, strict=True))
        # Before the gradients of the last step are gone.
        for index, output in outputs.items():
            grads.check(output, rows[index])
        with self._summed_gradients() as hooks:
            if self._two_passes is not None:
                walked = self._run_again(self._two_passes, grads, hooks)
            else:
                walked = self._set.run(
                    "backward",
                    self._slices,
                    lambda one: grads.walk(outputs[one.replica.index], rows[one.replica.index]),
                )
            _check_walked(walked)

    def _run_again(self, two_passes: TwoPasses, grads: OutputGradients, hooks: ParameterHookCalls) -> list[bool]:
        """The second forward of every micro-batch, with its backward; monitors have seen the first."""
        walked: list[bool] = []

        def walk(batch_slice: BatchSlice) -> None:
            output = self._run_module(batch_slice)
            hooks.hold(batch_slice.replica)
            walked.append(grads.walk(output, rows[batch_slice.replica.index]))

        rows = self._rows_by_replica()
        modules = self._set.root.modules
        self._monitors.are_silent = True
        try:
            with preserve_modes(modules), self._gradients.without_fixed():
                # As in the first forward, whatever the module is set to by now.
                for module, mode in zip(modules, self._modes, strict=True):
                    module.training = mode
                two_passes.second(self._slices, walk)
        finally:
            self._monitors.are_silent = False
        return walked

    def _check_wants_gradients(self) -> None:
        if not self._gradients.are_wanted and not self._inputs_need_grad:
            raise ConfigurationError("backward() with grad_req='null'; build the group with 'write' or 'add'.")

    def _read_gradients(self, out_grads: Any) -> OutputGradients:
        """What the replicas' backwards begin with.

        Raises:
            SliceError: ``out_grads`` has another number of rows.
        """
        num_rows = sum(batch_slice.num_rows for batch_slice in self._slices)
        return OutputGradients.read(out_grads, num_rows, self._output_dims)

    def _rows_by_replica(self) -> dict[int, slice]:
        return {one.replica.index: rows for one, rows in zip(self._slices, self.slices, strict=True)}

    def _batches_by_replica(self) -> list[Any]:
        batches: list[Any] = [None] * len(self.replicas)
        for one in self._slices:
            batches[one.replica.index] = one.batch
        return batches

    @contextmanager
    def _summed_gradients(self) -> Iterator[ParameterHookCalls]:
        """A backward, whose gradients are then summed into the module; an error leaves nothing of it there."""
        # An error of the reducer undoes the gradients of the inputs as well.
        with (
            self._gradients.of_a_backward() as hooks,
            self._input_gradients.of_a_backward(self._batches_by_replica()),
        ):
            yield hooks
            self._gradients.reduce()

    def outputs(self) -> list[Any]:
        """The last forward's output of every active replica, on its device."""
        return list(self._outputs)

    def outputs_merged(self) -> Any:
        """The last forward's outputs as one device would have returned them, on the first device.

        Raises:
            ConfigurationError: no forward came before, or a :meth:`reshape` after it.
            GatherError: the replicas returned different structures, or some of them ``None``.
        """
        if not self._outputs:
            raise ConfigurationError("outputs_merged() needs a forward() before it.")
        return merge_outputs(self._slices, self._outputs, self._set.root.device, self._output_dims)

    def input_grads(self) -> list[list[Any]]:
        """Per input (positional, then keyword), the gradients of every active replica's slice, nested as the input.

        Raises:
            ConfigurationError: the group was built without ``inputs_need_grad=True``, or no forward came before.
        """
        if not self._inputs_need_grad:
            raise ConfigurationError("Input gradients need ReplicaGroup(..., inputs_need_grad=True).")
        if not self._outputs:
            raise ConfigurationError("input_grads() needs a forward() and a backward() before it.")
        return gradients_by_input(self._slices)

    def input_grads_merged(self) -> list[Any]:
        """Per input, the gradient of the whole batch, on the first device (the sum, for an input given whole)."""
        if not self.input_grads():
            return []
        rows = [batch_slice.num_rows for batch_slice in self._slices]
        device = self._set.root.device
        batch_dim = self._set.slicer.batch_dim
        found = []
        for name in self._slices[0].batch:
            parts = [batch_slice.batch[name] for batch_slice in self._slices]
            found.append(join_input_gradients(parts, rows, device, batch_dim, name))
        return found

    def update_metric(self, metric: Any, labels: Any) -> None:
        """Calls ``metric.update(outputs, labels)`` once per active replica, with its slice of ``labels`` (B rows).

        Args:
            metric: A torchmetrics metric, or anything with such an ``update``; a ``device`` of its own is respected.
            labels: A tensor, or several in a container; cut as inputs are, by ``batch_dim`` with the name
                ``"labels"``.

        Raises:
            ConfigurationError: no forward came before.
            SliceError: the labels have another number of rows than the batch, or cannot be cut.
        """
        if not self._outputs:
            raise ConfigurationError("update_metric() needs a forward() before it.")
        batch_dim = self._set.slicer.batch_dim
        update_metric(metric, labels, self._slices, self._outputs, self._set.root.device, batch_dim)

    def install_monitor(self, monitor: Callable[[int, str, torch.Tensor], None] | None) -> None:
        """Calls ``monitor(replica, name, tensor)`` for the output of every submodule of every replica.

        Args:
            monitor: Gets the replica's index, the submodule's name and each tensor that it returned, where it lives;
                replicas in threads call it at the same time. ``None`` removes the monitors.

        Raises:
            ConfigurationError: the monitor cannot be called.
        """
        if monitor is not None and not callable(monitor):
            raise ConfigurationError(
                f"monitor={monitor!r} is not allowed; give a function of (replica, name, tensor), as TensorMonitor()."
            )
        self._monitors.exchange(monitor, self.replicas)

    def get_params(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Copies of the parameters, and of the buffers, on the CPU, by name.

        Buffers are their mean over the replicas that had rows in the last forward, integer ones those of the first; or
        the module's own, where they were written since.
        """
        root = self._set.root
        replicas = [batch_slice.replica for batch_slice in self._slices]
        # What was written since is on the first replica alone; the others get it before their next
        # forward.
        if not self._outputs or self._left != [version_counter(buffer) for buffer in root.buffers]:
            replicas = [root]
        return copied_parameters(root.module), mean_buffers(replicas)

    def set_params(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], *, allow_extra: bool = False
    ) -> None:
        """Writes parameters and buffers by name into all replicas; those that are not named keep their values.

        Raises:
            ConfigurationError: a name that the module does not have, unless ``allow_extra``; or a value of another
                shape, or that is no tensor.
        """
        write_by_name(self._set.root.module, {**params, **buffers}, allow_extra=allow_extra)
        # Only the first replica was written to; the others get the values before
        # their next forward.
        self._set.mark_changed()

    def close(self) -> None:
        """Ends the threads that run the replicas."""
        self._set.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_walked(walked: Sequence[bool]) -> None:
    """Whether some replica had a graph.

    Raises:
        ConfigurationError: none had.
    """
    if not any(walked):
        raise ConfigurationError(
            "backward() found nothing to compute gradients of: the forward ran under torch.no_grad(), or no parameter "
            "or input that it used requires a gradient. Run the forward with gradients on."
        )
