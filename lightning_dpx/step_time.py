"""How long a training step would take on many devices of many nodes: plain numbers in, plain numbers out.

One process drives the D devices of a node, and N nodes run one such process each::

    devices  | forward | backward             |                        | optimizer |
    links               [bucket] [bucket] ..[bucket]                               [parameters]
    network                                         [all gradients]

- Compute is that of the slowest device, however many there are: weak scaling, the rows of a device stay the same, and
  nodes are equal. Batches that accumulate compute one after the other, and are reduced once, with the last backward.
- Within a node every copy takes the time of both of its devices, latency + bytes / link, as simulated devices have it
  (:func:`lightning_dpx.simulate`). A bucket of gradients begins to travel when backward has filled it, and when the
  bucket before it has gone from the same device. What has not gone by the end of backward is waited for. After the
  optimizer the owners' parameters go back to the other devices, and before each forward the buffers do.
- That links work while devices compute is a choice of the hardware and its queues: :attr:`StepTime.seconds` counts on
  it, :attr:`StepTime.seconds_in_line` does not, nor do the clocks of simulated devices.
- Between nodes a ring all-reduce moves 2 (N-1)/N of the gradients' bytes through every node (Patarasuk and Yuan, 2009),
  in 2 (N-1) rounds of one latency each. It starts when the node has reduced all of its gradients, so that no part of
  it is hidden; before it goes one number for each parameter, which tells what every node has.
- Not counted: loading a batch and bringing it to the devices, additions of a reduction (memory is faster than links by
  an order of magnitude), nodes that are slower than others, and congestion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from lightning_dpx.boundaries import halves, split_at_boundaries
from lightning_dpx.errors import UnsupportedError

Copy = tuple[int, int, float]  # from which device to which one, and bytes
MOST_NODES = 1024  # of the table, unless told otherwise
_BYTES_OF_A_COUNT = 8  # what nodes tell each other of a parameter: a float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What bytes travel over.

    Attributes:
        bytes_per_second: Of one device, or of one node.
        latency: Seconds that a copy, or a round between nodes, takes beside.
    """

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """The time of one copy."""
        return self.latency + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the slowest device of a node computes in a step.

    Attributes:
        forward: Seconds, of one batch.
        backward: Seconds, of one batch, with what is computed again.
        optimizer: Seconds, once in a step.
        rows: Samples of a batch of the whole node.
        batches: How many accumulate their gradients.
    """

    forward: float
    backward: float
    optimizer: float
    rows: int
    batches: int = 1

    @property
    def seconds(self) -> float:
        """Seconds of a step in which nothing travels."""
        return self.batches * (self.forward + self.backward) + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that travel together within a node.

    Attributes:
        ready: Seconds from the beginning of backward until every device has them.
        gradients: Bytes of each, as it travels.
        owners: The device that each of them is summed for.
    """

    ready: float
    gradients: Sequence[float]
    owners: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, whose devices one process drives.

    Attributes:
        num_devices: D.
        reducer: A name of ``lightning_dpx/reducers``.
        link: Between its devices; ``None`` where there is one device.
        buckets: In the order in which backward fills them; of gradients that are sent after it, too.
        parameters: What goes back to the other devices, each with its owner and its bytes.
        buffers: Bytes of each copy of buffers from the first device to another, before a forward.
        times_shown: How often gradients of other owners come to the first device, where hooks of the user look for
            them: three times in a step of Lightning.
        groups: Of the devices that are well linked, for the reducer ``"hierarchical"``.
    """

    num_devices: int
    reducer: str = "collective"
    link: Link | None = None
    buckets: Sequence[Bucket] = ()
    parameters: Sequence[tuple[int, float]] = ()
    buffers: Sequence[float] = ()
    times_shown: int = 0
    groups: Sequence[Sequence[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step on so many nodes, in seconds.

    Attributes:
        nodes: N.
        num_devices: Of all nodes.
        samples: Of all nodes.
        compute: Of the slowest device.
        reduction: Within the node, after backward: what it did not hide.
        hidden: Within the node, while backward ran.
        between_nodes: The all-reduce of the nodes.
        parameters: Within the node, from the owners back to the other devices, with buffers, and with gradients that
            hooks are shown.
        seconds_in_line: Of the step if no link works while its device computes.
    """

    nodes: int
    num_devices: int
    samples: int
    compute: float
    reduction: float
    hidden: float
    between_nodes: float
    parameters: float
    seconds_in_line: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.compute + self.reduction + self.between_nodes + self.parameters

    @property
    def samples_per_second(self) -> float:
        """Over all nodes."""
        return self.samples / self.seconds

    @property
    def efficiency(self) -> float:
        """Samples per second over those of as many devices that need not wait for each other."""
        return self.compute / self.seconds


def predict_step(work: Work, node: Node, gradients: float, nodes: int, network: Link | None) -> StepTime:
    """The time of a step on ``nodes`` nodes.

    Args:
        work: What a device computes.
        node: How its devices are linked, and what travels there.
        gradients: Bytes of all gradients as they travel between nodes.
        nodes: N.
        network: Between nodes; of no use where there is one.

    Raises:
        UnsupportedError: it is not known what the reducer moves.
    """
    exposed, reducing = _reduction(work, node)
    returning = _returning(node, work.batches)
    between = 0.0
    if nodes > 1 and network is not None:
        # Before the gradients, nodes agree on how many rows each has, and which parameters have gradients.
        num_parameters = sum(len(bucket.gradients) for bucket in node.buckets)
        between = ring_seconds(_BYTES_OF_A_COUNT * (1 + nodes + num_parameters), nodes, network)
        between += ring_seconds(gradients, nodes, network)
    # Each device's own queue, as clocks of devices add up what each of them did.
    in_line = [one + other for one, other in zip(reducing, returning, strict=True)]
    return StepTime(
        nodes=nodes,
        num_devices=nodes * node.num_devices,
        samples=nodes * work.rows * work.batches,
        compute=work.seconds,
        reduction=exposed,
        hidden=max(0.0, max(reducing) - exposed),
        between_nodes=between,
        parameters=max(returning),
        seconds_in_line=work.seconds + between + max(in_line),
    )


def predict_steps(
    work: Work, node: Node, gradients: float, network: Link | None, most_nodes: int = MOST_NODES
) -> list[StepTime]:
    """Steps on 1, 2, 4, ... nodes, up to ``most_nodes`` and on as many; see :func:`predict_step`.

    Raises:
        UnsupportedError: it is not known what the reducer moves.
    """
    steps = []
    for nodes in node_counts(most_nodes):
        steps.append(predict_step(work, node, gradients, nodes, network))
    return steps


def node_counts(most: int) -> list[int]:
    """Powers of 2 below ``most``, and ``most``."""
    counts = []
    nodes = 1
    while nodes < most:
        counts.append(nodes)
        nodes *= 2
    return [*counts, most]


def ring_seconds(num_bytes: float, nodes: int, network: Link) -> float:
    """A ring all-reduce of ``num_bytes`` bytes: every node sends and receives 2 (N-1)/N of them, in 2 (N-1) rounds."""
    rounds = 2 * (nodes - 1)
    return rounds * network.seconds(num_bytes / nodes)


def _reduction(work: Work, node: Node) -> tuple[float, list[float]]:
    """How long backward is waited for, and how long each device's link works in all."""
    gone = [0.0] * node.num_devices  # when each link is free, from the beginning of backward
    in_all = [0.0] * node.num_devices
    for bucket in node.buckets:
        busy = link_seconds(reduction_copies(node, bucket), node)
        for device, seconds in enumerate(busy):
            if seconds:
                # Not before it is filled, and not before the one ahead of it has gone.
                gone[device] = max(gone[device], bucket.ready) + seconds
                in_all[device] += seconds
    return max(0.0, max(gone) - work.backward), in_all


def _returning(node: Node, batches: int) -> list[float]:
    """How long each device's link works for parameters, once, and for buffers, before each forward."""
    once = link_seconds(chain(_from_owners(node.parameters, node.num_devices), _shown(node)), node)
    each = link_seconds(_from_owners([(0, size) for size in node.buffers], node.num_devices), node)
    return [one + batches * other for one, other in zip(once, each, strict=True)]


def link_seconds(copies: Iterator[Copy], node: Node) -> list[float]:
    """The time that copies take on each device: every copy counts at both of its ends."""
    busy = [0.0] * node.num_devices
    if node.link is None:
        return busy
    for source, target, num_bytes in copies:
        seconds = node.link.seconds(num_bytes)
        busy[source] += seconds
        busy[target] += seconds
    return busy


def _shown(node: Node) -> Iterator[Copy]:
    """Gradients that come to the first device for hooks to look at."""
    for bucket in node.buckets:
        for owner, size in zip(bucket.owners, bucket.gradients, strict=True):
            if owner:
                for _ in range(node.times_shown):
                    yield owner, 0, size


def _from_owners(messages: Sequence[tuple[int, float]], num_devices: int) -> Iterator[Copy]:
    for owner, num_bytes in messages:
        for device in range(num_devices):
            if device != owner:
                yield owner, device, num_bytes


def reduction_copies(node: Node, bucket: Bucket) -> Iterator[Copy]:
    """What a reducer copies for one bucket; see ``lightning_dpx/reducers``, whose tests hold both together.

    Raises:
        UnsupportedError: it is not known what the reducer moves.
    """
    if node.num_devices == 1:
        return iter(())
    if node.reducer not in _COPIES:
        raise UnsupportedError(
            f"How long a step takes is predicted for the reducers {', '.join(sorted(_COPIES))}, and not for "
            f"{node.reducer!r}; choose one of them, or leave out what asks for times."
        )
    return _COPIES[node.reducer](node, bucket)


def _collective(node: Node, bucket: Bucket) -> Iterator[Copy]:
    """Every device sums its share of the bucket, and the owner gathers the shares."""
    by_owner: dict[int, float] = {}
    for owner, size in zip(bucket.owners, bucket.gradients, strict=True):
        by_owner[owner] = by_owner.get(owner, 0.0) + size
    for owner, size in by_owner.items():
        share = size / node.num_devices
        # Each device gets its share from all others, and only then is there a sum to gather.
        for device in range(node.num_devices):
            for other in range(node.num_devices):
                if other != device:
                    yield other, device, share
            if device != owner:
                yield device, owner, share


def _naive(node: Node, bucket: Bucket) -> Iterator[Copy]:
    """Gradients are dealt to the devices, from the last one on, summed there and handed to their owners."""
    for turn, index in enumerate(reversed(range(len(bucket.gradients)))):
        yield from _sum_at(turn % node.num_devices, bucket.owners[index], bucket.gradients[index], node)


def _colocate(node: Node, bucket: Bucket) -> Iterator[Copy]:
    """Every gradient is summed where its owner is."""
    for owner, size in zip(bucket.owners, bucket.gradients, strict=True):
        yield from _sum_at(owner, owner, size, node)


def _sum_at(meeting: int, owner: int, size: float, node: Node) -> Iterator[Copy]:
    for device in range(node.num_devices):
        if device != meeting:
            yield device, meeting, size
    if meeting != owner:
        yield meeting, owner, size


def _hierarchical(node: Node, bucket: Bucket) -> Iterator[Copy]:
    """Groups sum to one of their devices, in turn, and these to that of the owner's group."""
    groups = node.groups or halves(node.num_devices)
    # The bucket is cut once more, so that every device of a group leads a part of it.
    for turn, run in enumerate(split_at_boundaries(bucket.gradients, 2 * max(map(len, groups)))):
        # Taken as if all of a run went to the owner of its first gradient.
        size = sum(bucket.gradients[index] for index in run)
        owner = bucket.owners[run[0]]
        ordered = sorted(groups, key=lambda group: owner not in group)
        leaders = [group[turn % len(group)] for group in ordered]
        for leader, group in zip(leaders, ordered, strict=True):
            for member in group:
                if member != leader:
                    yield member, leader, size
        for leader in leaders[1:]:
            yield leader, leaders[0], size
        if leaders[0] != owner:
            yield leaders[0], owner, size


def _nccl(node: Node, bucket: Bucket) -> Iterator[Copy]:
    """A chain to the owner, through which the sums pass in small pieces, so that all of its links work at once."""
    # No device holds more than a piece at a time, so each link carries the bucket once.
    size = sum(bucket.gradients)
    for device in range(1, node.num_devices):
        yield device, device - 1, size


_COPIES = {
    "collective": _collective,
    "naive": _naive,
    "colocate": _colocate,
    "hierarchical": _hierarchical,
    "nccl": _nccl,
}


def messages_of(sizes: Sequence[float], owners: Sequence[int], small: float) -> list[tuple[int, float]]:
    """Parameters with their owners, as they travel: those of up to ``small`` bytes go together."""
    together: dict[int, float] = {}
    messages: list[tuple[int, float]] = []
    for owner, size in zip(owners, sizes, strict=True):
        # Small ones of an owner travel as one, since each copy waits for the latency of its link.
        if size > small:
            messages.append((owner, size))
        else:
            together[owner] = together.get(owner, 0.0) + size
    return list(chain(messages, together.items()))
