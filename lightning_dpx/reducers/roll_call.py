"""Which of several processes is lost, when a collective fails.

Of the survivors only those that were just talking to the lost one notice at once; the others wait on in the same
collective, and cannot be asked there. So a thread of every process answers for it, through the store of the group:
whether its process waits for the others, too, or where else it is. The first that has found out tells all, since the
next to fail will fail because *it* has ended, and would blame it.
"""

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import distributed_c10d

from lightning_dpx.torch_compat import default_store

Function = TypeVar("Function", bound=Callable[..., Any])

ROLL_CALL_SECONDS = 3.0  # how long everyone has to answer
POLL_SECONDS = 0.2
_HEARD_SECONDS = 10.0  # rank 0 keeps the store, and may end as soon as all have heard what it has found out
_STOP_SECONDS = 1.0
_WAITS = "waits"
_waiting: set[CodeType] = set()  # functions in which a process waits for the others


def waits_for_others(function: Function) -> Function:
    """Decorates a function: a process that is in it is not lost."""
    # By its code, which a frame of another thread can be asked for.
    _waiting.add(function.__code__)  # type: ignore[attr-defined]
    return function


class RollCall:
    """Answers for this process, and asks the others.

    Args:
        store: Of the process group.
        rank: Of this process.
        world_size: Processes.
        run: Which run in this group it is for, counted by all processes alike: what was found out in one says nothing
            of another.
    """

    def __init__(self, store: Any, rank: int, world_size: int, run: int = 1) -> None:
        self.store = store
        # Waiting on one connection blocks it, so each side has its own.
        self._answering = store.clone()
        self._asking = store.clone()
        self._rank = rank
        self._world_size = world_size
        self._run = run
        self._verdict: dict[int, str] = {}
        self._ended = threading.Event()
        # Adding nothing reads the counter; rolls of an earlier run in this group need no answer.
        self._answered = self._answering.add("dpx/rolls", 0)
        self._thread = threading.Thread(target=self._answer, name="dpx-roll-call", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread that is in C++ when the interpreter ends takes the process with it

    def for_next_run(self) -> "RollCall":
        """The roll call of the next run in this group; this one ends."""
        self.stop()
        return RollCall(self.store, self._rank, self._world_size, self._run + 1)

    def stop(self) -> None:
        """No more answers from this process."""
        self._ended.set()
        self._thread.join(_STOP_SECONDS)  # where the store does not answer, it may not come
        atexit.unregister(self.stop)

    def declare_failed(self, error: BaseException) -> None:
        """This process ends with an error of its own; it may be gone when the others ask."""
        with suppress(RuntimeError):  # the store is gone, too
            self._asking.set(self._key("failed", self._rank), f"failed with {type(error).__name__}")

    def lost(self) -> dict[int, str]:
        """The lost ranks, and what is known about each; the same on all processes.

        Raises:
            RuntimeError: the store is lost with the process that kept it.
        """
        try:
            # Another process may have found out, and told, before this one noticed anything.
            return self._verdict or self._ask()
        except RuntimeError:
            if self._verdict:
                return self._verdict
            raise

    def _key(self, *names: str | int) -> str:
        """Under which a run's processes tell each other something."""
        return "/".join(["dpx", f"run {self._run}", *map(str, names)])

    def _ask(self) -> dict[int, str]:
        number = self._asking.add("dpx/rolls", 1)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        answers: dict[int, str] = {}
        end = time.monotonic() + ROLL_CALL_SECONDS
        while len(answers) < len(others) and time.monotonic() < end and not self._verdict:
            for other in others:
                # A process that failed has said so before it ended; it will answer no roll.
                for key in (self._key("failed", other), f"dpx/roll/{number}/{other}"):
                    if other not in answers and self._asking.check([key]):
                        answers[other] = self._asking.get(key).decode()
            time.sleep(POLL_SECONDS / 4)
        if self._verdict:
            return self._verdict
        found = _judge(others, answers)
        if found:
            # Two may find out at once; the first to write is heard by all, the other one takes its
            # words.
            told = self._asking.compare_set(self._key("verdict"), "", json.dumps(found))
            self._verdict = _read(told)
            # It may end before its thread says so, and the others would wait for that.
            self._asking.set(self._key("heard", self._rank), "yes")
            # Where this process keeps the store, the others lose it together with this process.
            self._wait_until_heard([rank for rank in others if rank not in self._verdict])
        return self._verdict

    def _wait_until_heard(self, ranks: list[int]) -> None:
        end = time.monotonic() + _HEARD_SECONDS
        keys = [self._key("heard", rank) for rank in ranks]
        while time.monotonic() < end and not all(self._asking.check([key]) for key in keys):
            time.sleep(POLL_SECONDS / 4)

    def _answer(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                asked = self._answering.add("dpx/rolls", 0)
                for number in range(self._answered + 1, asked + 1):
                    self._answering.set(f"dpx/roll/{number}/{self._rank}", _whereabouts())
                self._answered = asked
                verdict = self._key("verdict")
                if asked and self._answering.check([verdict]):
                    self._verdict = _read(self._answering.get(verdict))
                    self._answering.set(self._key("heard", self._rank), "yes")
                    return
            except RuntimeError:  # the store went with the process that kept it
                return


def _read(told: bytes) -> dict[int, str]:
    return {int(rank): what for rank, what in json.loads(told).items()}


def _judge(others: list[int], answers: dict[int, str]) -> dict[int, str]:
    """The ranks that failed or do not answer; if there are none, those that are elsewhere."""
    # Who is gone is the cause; those that are elsewhere may well have left for the same reason.
    gone = {rank: answers.get(rank, "") for rank in others}
    gone = {rank: what for rank, what in gone.items() if not what or what.startswith("failed")}
    return gone or {rank: what for rank, what in answers.items() if what != _WAITS}


def _whereabouts() -> str:
    """What this process does: it waits for the others, or is somewhere else."""
    frames = sys._current_frames()
    for thread, frame in frames.items():
        # Not only the main thread: replicas call collectives from their own.
        if thread != threading.get_ident() and _waits(frame):
            return _WAITS
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return "is elsewhere"
    return f"is in {main.f_code.co_name} ({main.f_code.co_filename}:{main.f_lineno})"


def _waits(frame: FrameType | None) -> bool:
    while frame is not None:
        # Collectives of the user's own go through torch's file, whoever calls them.
        if frame.f_code in _waiting or frame.f_code.co_filename == distributed_c10d.__file__:
            return True
        frame = frame.f_back
    return False


_current: RollCall | None = None


def start_roll_call() -> None:
    """From now on this process answers; called by all once they are connected."""
    global _current
    store = default_store()
    # The keys of a run stay in the store of its group, where the next one must not read them.
    if _current is not None and _current.store is store:
        _current = _current.for_next_run()
    else:
        _current = RollCall(store, distributed.get_rank(), distributed.get_world_size())


def stop_roll_call() -> None:
    """Ends the answers of this process, at the end of a run."""
    if _current is not None:
        _current.stop()


def current_roll_call() -> RollCall | None:
    """The roll call of the default process group."""
    return _current


def declare_failed(error: BaseException) -> None:
    """The others, if they ask, learn that this process ends with an error of its own."""
    if _current is not None:
        _current.declare_failed(error)
