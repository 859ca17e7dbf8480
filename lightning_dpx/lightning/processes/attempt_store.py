"""A store that the processes of one attempt share, where torchrun keeps the store of all attempts.

When a process is lost, torchrun ends the others and starts all of them again. Its agent keeps one TCPStore for as long
as it lives (torch 2.13, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), where processes of a later attempt find addresses
of those that are gone: gloo connects to closed ports until it gives up, also under Lightning's ddp. So the processes of
an attempt first agree on a prefix of their own:

    each process   hello/RANK = a name that no other process has
    rank 0         roster = the names of all ranks          others   once their own name is in it: ack/RANK = the roster
    rank 0         when all have acknowledged the same: final = the roster, which is the prefix

A name that a lost process has left is never acknowledged, so a roster that has it comes to nothing.
"""

import hashlib
import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_dpx.errors import CollectiveError

_POLL_SECONDS = 0.05
_ROOT = "dpx/attempt"


def is_kept_by_agent() -> bool:
    """Whether torchrun keeps the store, and earlier attempts may have left something in it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_store(address: str, port: int, world_size: int, timeout: float) -> Store:
    """A connection to the store that torchrun keeps.

    Args:
        address: Of the agent of the first node.
        port: Of the same agent.
        world_size: Processes.
        timeout: Seconds to wait for it.
    """
    # Never the master: the agent has the server, and a second one could not have the port.
    return TCPStore(address, port, world_size, is_master=False, timeout=timedelta(seconds=timeout))


def attempt_store(store: Store, rank: int, world_size: int, timeout: float) -> Store:
    """What the processes that call this together share of ``store``, and no earlier process has written to.

    Args:
        store: That of all attempts.
        rank: Of this process.
        world_size: Processes.
        timeout: Seconds to wait for the others.

    Raises:
        CollectiveError: not all processes came in time; names their ranks where rank 0 knows them.
    """
    # Ranks and process ids may come again in a later attempt; this name does not.
    name = uuid.uuid4().hex
    # By a clock that no one sets back.
    end = time.monotonic() + timeout
    store.set(f"{_ROOT}/hello/{rank}", name)
    roster = _gathered(store, world_size, end) if rank == 0 else _joined(store, rank, name, end)
    # A digest, as a roster grows with the processes and begins every key.
    return PrefixStore(f"{_ROOT}/{hashlib.sha256(roster.encode()).hexdigest()}", store)


def _gathered(store: Store, world_size: int, end: float) -> str:
    """The roster that all ranks have acknowledged, as rank 0 waits for it."""
    published = ""
    missing = list(range(world_size))
    while time.monotonic() < end:
        # By check and not by wait, which would block until its timeout and name no rank.
        missing = [rank for rank in range(world_size) if not store.check([f"{_ROOT}/hello/{rank}"])]
        if not missing:
            names = [store.get(f"{_ROOT}/hello/{rank}").decode() for rank in range(world_size)]
            roster = " ".join(names)
            # A hello may be left of a lost process, whose successor says its own later: publish anew whenever one does.
            if roster != published:
                store.set(f"{_ROOT}/roster", roster)
                published = roster
            # The very roster: an acknowledgment of an earlier one may come
            # from a process that is lost.
            missing = [rank for rank in range(1, world_size) if not _has_acknowledged(store, rank, roster)]
            if not missing:
                store.set(f"{_ROOT}/final", roster)
                return roster
        time.sleep(_POLL_SECONDS)
    raise CollectiveError(
        f"Process 0 of {world_size} waited for rank {', '.join(map(str, missing))}, which did not come in time."
    )


def _has_acknowledged(store: Store, rank: int, roster: str) -> bool:
    key = f"{_ROOT}/ack/{rank}"
    return store.check([key]) and store.get(key).decode() == roster


def _joined(store: Store, rank: int, name: str, end: float) -> str:
    """The first final roster with this process in it, as the other ranks wait for it."""
    acknowledged = ""
    while time.monotonic() < end:
        if store.check([f"{_ROOT}/final"]):
            final = store.get(f"{_ROOT}/final").decode()
            # The final roster of an earlier attempt is there as well, and has other names.
            if name in final:
                return final
        if store.check([f"{_ROOT}/roster"]):
            roster = store.get(f"{_ROOT}/roster").decode()
            # Again for each new roster, as a successor of another rank may have changed it.
            if name in roster and roster != acknowledged:
                store.set(f"{_ROOT}/ack/{rank}", roster)
                acknowledged = roster
        time.sleep(_POLL_SECONDS)
    raise CollectiveError(f"Process {rank} waited for rank 0, which did not come in time.")
