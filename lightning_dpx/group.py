"""The data-parallel executor group for any ``nn.Module``, without Lightning (MXNet's DataParallelExecutorGroup)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.reducers import GradientReducer, make_reducer
from lightning_dpx.replicas import BatchDim, Execution, Replica, ReplicaSet, Share, check_choice, gather, slice_batch

GradReq = Literal["write", "add", "null"]


class ReplicaGroup:
    """K replicas of ``module`` that run forward and backward on slices of a batch.

    Example::

        group = ReplicaGroup(model, ["cuda:0", "cuda:1"])
        group.forward(x)
        group.backward(torch.ones_like(group.outputs_merged()))
        optimizer.step()        # on model.parameters(); the next forward carries the new values to the replicas

    Legend: K replicas, B rows in a batch, N parameters.

    Args:
        module: Moved to the first device; it stays replica 0 and owns the parameters and their gradients.
        devices: K devices; repeated ones are allowed.
        workload: ``None`` for even shares, or K positive numbers.
        batch_dim: The batch dim of all inputs and outputs, or ``{input path: dim}``; -1 gives an input whole.
        grad_req: ``"write"`` replaces the gradients at each backward, ``"add"`` accumulates, ``"null"`` computes none.
        fixed_params: Names of parameters that get no gradient.
        inputs_need_grad: Also compute the gradients of the floating-point inputs.
        reducer: A registered name, ``"auto"`` or a reducer.
        execution: ``"auto"``, ``"inline"`` or ``"threads"``.

    Raises:
        ConfigurationError: an argument has a value that is not allowed.
        ReplicationError: the module cannot be copied faithfully.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device | str],
        *,
        workload: Sequence[float] | None = None,
        batch_dim: BatchDim = 0,
        grad_req: GradReq = "write",
        fixed_params: Sequence[str] = (),
        inputs_need_grad: bool = False,
        reducer: str | GradientReducer = "auto",
        execution: Execution = "auto",
    ) -> None:
        check_choice("grad_req", grad_req, get_args(GradReq))
        names = dict(module.named_parameters())
        for name in fixed_params:
            if name not in names:
                raise ConfigurationError(f"fixed_params names {name!r}; the parameters are: {', '.join(names)}.")
            names[name].requires_grad_(False)
        if not devices:
            raise ConfigurationError("devices is empty; give at least one device.")
        placed = [canonical_device(device) for device in devices]
        self._set = ReplicaSet(
            module.to(placed[0]),
            placed,
            workload="even" if workload is None else workload,
            batch_dim=batch_dim,
            execution=execution,
        )
        self._reducer = make_reducer(reducer, self._set.devices)
        self._grad_req, self._inputs_need_grad = grad_req, inputs_need_grad
        self._shares: list[Share] = []
        self._outputs: list[Any] = []

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The K replicas; the first holds the module itself."""
        return self._set.replicas

    @property
    def slices(self) -> list[slice]:
        """Rows of the last batch that each active replica got, in sample order."""
        starts = [sum(share.num_rows for share in self._shares[:index]) for index in range(len(self._shares))]
        return [slice(start, start + share.num_rows) for start, share in zip(starts, self._shares, strict=True)]

    def forward(self, *inputs: Any, is_train: bool | None = None) -> None:
        """Cuts ``inputs`` (each with B rows) and runs the module on every slice; see :meth:`outputs`.

        Args:
            inputs: The module's positional inputs.
            is_train: Train or eval mode; ``None`` keeps the module's own.

        Raises:
            SliceError: the inputs cannot be cut.
        """
        if is_train is not None:
            self._set.root.module.train(is_train)
        self._shares = self._set.shares(inputs)
        self._set.state.synchronize()
        self._set.python_state.share()
        self._shares = [Share(share.replica, share.num_rows, self._place(share)) for share in self._shares]
        self._outputs = self._set.run("forward", self._shares, lambda share: share.replica.module(*share.batch))
        self._set.python_state.collect([share.replica for share in self._shares])
        self._set.state.collect_buffers([share.replica for share in self._shares])

    def _place(self, share: Share) -> tuple[Any, ...]:
        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            moved = value.detach().to(share.replica.device)
            return moved.requires_grad_() if self._inputs_need_grad and moved.is_floating_point() else moved

        return tuple(torch.utils._pytree.tree_map(move, share.batch))

    def backward(self, out_grads: torch.Tensor | None = None) -> None:
        """Runs backward on every replica, then sums the parameter gradients into the module.

        Args:
            out_grads: Gradient of the merged output (B rows). ``None`` where the output is a scalar loss, the mean
                over its rows: the replicas' losses are then weighted by their rows.

        Raises:
            ConfigurationError: no forward came before, or ``grad_req="null"``.
        """
        if not self._outputs:
            raise ConfigurationError("backward() needs a forward() before it.")
        if self._grad_req == "null":
            raise ConfigurationError("backward() with grad_req='null'; build the group with 'write' or 'add'.")
        rows = [share.num_rows for share in self._shares]
        if out_grads is None:
            parts: list[Any] = [torch.tensor(size / sum(rows)) for size in rows]
        else:
            parts = slice_batch(out_grads, rows, 0 if isinstance(self._set.batch_dim, dict) else self._set.batch_dim)
        if self._grad_req == "write":
            self._set.root.module.zero_grad(set_to_none=True)
        grads = {share.replica.index: part for share, part in zip(self._shares, parts, strict=True)}
        outputs = dict(zip(grads, self._outputs, strict=True))

        def run_backward(share: Share) -> None:
            output, index = outputs[share.replica.index], share.replica.index
            torch.autograd.backward(output, grads[index].to(output).reshape(output.shape))

        self._set.run("backward", self._shares, run_backward)
        self._reduce()

    def _reduce(self) -> None:
        columns = [replica.parameters for replica in self.replicas]
        summed = self._reducer.reduce([[parameter.grad for parameter in column] for column in columns])
        for replica in self.replicas[1:]:
            replica.module.zero_grad(set_to_none=True)
        for parameter, grad in zip(columns[0], summed, strict=True):
            parameter.grad = grad

    def outputs(self) -> list[Any]:
        """The last forward's output of every active replica, on its device."""
        return list(self._outputs)

    def outputs_merged(self) -> Any:
        """The last forward's outputs as one device would have returned them, on the first device."""
        rows = [share.num_rows for share in self._shares]
        dim = self._set.batch_dim if isinstance(self._set.batch_dim, int) else 0
        return gather(self._outputs, rows, self._set.root.device, max(dim, 0))

    def input_grads(self) -> list[list[torch.Tensor | None]]:
        """Per input, the gradients of every active replica's slice.

        Raises:
            ConfigurationError: the group was built without ``inputs_need_grad=True``.
        """
        if not self._inputs_need_grad:
            raise ConfigurationError("Input gradients need ReplicaGroup(..., inputs_need_grad=True).")
        return [
            [value.grad if isinstance(value, torch.Tensor) else None for value in column]
            for column in zip(*(share.batch for share in self._shares), strict=True)
        ]

    def input_grads_merged(self) -> list[torch.Tensor | None]:
        """Per input, the gradient of the whole batch, on the first device."""
        rows, device = [share.num_rows for share in self._shares], self._set.root.device
        return [gather(column, rows, device) for column in self.input_grads()]

    def get_params(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Copies of the parameters and of the buffers, on the CPU, by name."""
        module = self._set.root.module
        parameters = {name: value.detach().cpu().clone() for name, value in module.named_parameters()}
        return parameters, {name: value.detach().cpu().clone() for name, value in module.named_buffers()}

    @torch.no_grad()
    def set_params(
        self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], *, allow_extra: bool = False
    ) -> None:
        """Writes parameters and buffers by name into all replicas.

        Raises:
            ConfigurationError: a name that the module does not have, unless ``allow_extra``.
        """
        module = self._set.root.module
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, value in {**params, **buffers}.items():
            if name in own:
                own[name].copy_(value)
            elif not allow_extra:
                raise ConfigurationError(f"The module has no {name!r}; it has {', '.join(own)} (or allow_extra=True).")
        self._set.state.mark_changed()

    def close(self) -> None:
        """Ends the workers."""
        self._set.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
