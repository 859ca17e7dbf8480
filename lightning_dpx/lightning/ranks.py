"""Who a strategy says it is: a replica inside a step, a process outside; and the collectives among those."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dpx.errors import CollectiveError
from lightning_dpx.lightning.lightning_compat import all_gather_processes, reduce_processes
from lightning_dpx.lightning.processes.connect import gather_objects, on_wire
from lightning_dpx.reducers import between_processes
from lightning_dpx.replicas import ReplicaRank, collectives, current_rank
from lightning_dpx.torch_compat import tree_map_only

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy


class Ranks:
    """What code written for DDP asks a strategy, answered for replicas as well.

    Args:
        strategy: Whose processes and replicas are counted.

    Attributes:
        rows_of_step: What the slices of this process count in the step that is under way.
    """

    def __init__(self, strategy: "DPXStrategy") -> None:
        self._strategy = strategy
        self._first_replica = 0
        self._num_replicas = 0
        self.rows_of_step: float = 0.0
        self._num_meetings = 0  # with other processes
        self._alone_because = ""

    def count_replicas(self, first: int, total: int) -> None:
        """The replicas of all processes are counted.

        Args:
            first: The index of the first one of this process among them.
            total: How many there are.
        """
        self._first_replica = first
        self._num_replicas = total

    def of_shadow(self, num_replicas: int) -> "Ranks":
        """Ranks for a rehearsal with ``num_replicas`` replicas, without any other process."""
        ranks = Ranks(self._strategy)
        ranks.count_replicas(0, num_replicas)
        return ranks

    @property
    def num_processes(self) -> int:
        """Processes that train together, each with its own replicas."""
        environment = self._strategy.cluster_environment
        if environment is None:
            return 1
        return environment.world_size()

    @property
    def process_rank(self) -> int:
        """The rank of this process among them."""
        environment = self._strategy.cluster_environment
        if environment is None:
            return 0
        return environment.global_rank()

    @property
    def global_rank(self) -> int:
        """The replica inside a step, the process outside."""
        rank = current_rank()
        if rank is None:
            return self.process_rank
        return self._first_replica + rank.rank

    @property
    def local_rank(self) -> int:
        """The replica inside a step, the process of this machine outside."""
        rank = current_rank()
        if rank is not None:
            return rank.rank
        environment = self._strategy.cluster_environment
        if environment is None:
            return 0
        return environment.local_rank()

    @property
    def world_size(self) -> int:
        """The replicas that take part in the step, or the number of processes outside."""
        rank = current_rank()
        if rank is None:
            return self.num_processes
        # How many replicas have rows in other processes is not known here, so all are counted.
        if self.num_processes == 1:
            return rank.world_size
        return self._num_replicas

    @property
    def is_connected(self) -> bool:
        """Whether there are other processes, and a process group to reach them."""
        return self.num_processes > 1 and torch.distributed.is_initialized()

    def barrier(self, name: str | None = None) -> None:
        """Waits for the other replicas inside a step, for the other processes outside."""
        if (rank := _rank_with_peers()) is not None:
            rank.meet_all("barrier", None)
        # A replica without peers has nothing to wait for; the processes themselves meet
        # outside of steps.
        elif current_rank() is None and self.is_connected:
            self._meet(f"barrier {name or ''}".rstrip(), torch.distributed.barrier)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Replica ``src``'s object inside a step, process ``src``'s outside."""
        if (rank := _rank_with_peers()) is not None:
            return collectives.broadcast(rank, obj, src)
        if current_rank() is not None or not self.is_connected:
            return obj
        box = [obj]
        self._meet("broadcast", lambda: torch.distributed.broadcast_object_list(box, src))
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean (sum, min, max) over the replicas inside a step, over the processes outside."""
        if not isinstance(tensor, Tensor):
            return tensor
        if (rank := _rank_with_peers()) is not None:
            # Lightning allows a ReduceOp, whose text ends in the name, as well as a plain name.
            return collectives.reduce(rank, tensor, str(reduce_op).rpartition(".")[2].lower() if reduce_op else "mean")
        if current_rank() is not None or not self.is_connected:
            return tensor
        # A copy: collectives of torch.distributed write into the tensor that they are given.
        wire = on_wire(tensor)
        reduced = self._meet("reduce", lambda: reduce_processes(wire, group, reduce_op))
        return reduced.to(tensor.device)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """(K, ...) from (...) of K replicas inside a step, of K processes outside."""
        if (rank := _rank_with_peers()) is not None:
            return collectives.all_gather(rank, tensor, sync_grads)
        if current_rank() is not None or not self.is_connected:
            return tensor
        wire = on_wire(tensor)
        gathered: Tensor = self._meet("all_gather", lambda: all_gather_processes(wire, group, sync_grads))
        return gathered.to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) say yes: replicas inside a step, processes outside."""
        if (rank := _rank_with_peers()) is not None:
            # Votes are Python values, so no device has to be waited for.
            votes, _ = rank.meet_all("reduce_boolean_decision", bool(decision))
            num_votes = int(sum(votes))
            if all:
                return num_votes == len(votes)
            return num_votes > 0
        if current_rank() is not None or not self.is_connected:
            return decision
        votes_of_all = self.reduce(torch.tensor(int(decision), device=self._strategy.root_device), reduce_op="sum")
        if all:
            return bool(votes_of_all == self.num_processes)
        return bool(votes_of_all)

    @property
    def num_meetings(self) -> int:
        """How often other processes have been met until now."""
        return self._num_meetings

    @contextmanager
    def alone(self, why: str) -> Iterator[None]:
        """The other processes do not come to what is tried in here: they would take it for something else.

        Args:
            why: The text of the error where it tries to meet them.
        """
        before = self._alone_because
        self._alone_because = why
        try:
            yield
        finally:
            self._alone_because = before

    def _begin_meeting(self) -> None:
        if self._alone_because:
            raise CollectiveError(self._alone_because)
        self._num_meetings += 1

    def _meet(self, what: str, call: Callable[[], Any]) -> Any:
        """What ``call``, a collective of all processes, returns. Trial runs of a lone replica come here, too."""
        self._begin_meeting()
        # So that an error says which process is lost.
        return between_processes(what, call)

    def reach_other_processes(
        self, kind: str, values: list[Any], *, each: bool, gradients: bool
    ) -> tuple[list[Any], int]:
        """See :class:`lightning_dpx.replicas.InterProcess`. One object per process travels, by way of the host.

        Raises:
            CollectiveError: the processes meet for different things, one is lost, or replicas are missing.
        """
        self._begin_meeting()
        # On the host and without a graph: a pickled CUDA tensor would ask for the
        # same device there.
        mine = kind, self.rows_of_step, tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), values)
        everyone: list[tuple[str, float, list[Any]]] = gather_objects(f"{kind} inside a step", mine)
        kinds = [theirs for theirs, _, _ in everyone]
        # Without a look each process would take what the others gave to another call for its own.
        if len(set(kinds)) > 1:
            calls = ", ".join(f"process {process} calls {theirs}" for process, theirs in enumerate(kinds))
            raise CollectiveError(
                f"The processes do not agree inside a step: {calls}. Let all of them make the same calls, in one order."
            )
        counts = [len(theirs) for _, _, theirs in everyone]
        if each and sum(counts) != self._num_replicas:
            raise CollectiveError(
                f"{kind} inside a step needs all {self._num_replicas} replicas of {self.num_processes} processes; in "
                f"this short batch {sum(counts)} have rows. Use drop_last=True."
            )
        # Each process's gradients count by its rows in the end; what crosses over must count by those it came from.
        weigh = gradients and not self._strategy.session.loss_is_sum
        found = []
        for process, (_, rows, theirs) in enumerate(everyone):
            factor = rows / self.rows_of_step if weigh else 1.0
            if process == self.process_rank:
                # Its own values keep their graphs; those of other processes have none.
                found += values
            elif factor == 1:
                found += theirs
            else:
                found += [value * factor for value in theirs]
        return found, sum(counts[: self.process_rank])


def _rank_with_peers() -> ReplicaRank | None:
    rank = current_rank()
    if rank is None or rank.is_alone:
        return None
    return rank
