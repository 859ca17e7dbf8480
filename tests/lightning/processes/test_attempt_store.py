"""The processes of one attempt agree on a store of their own, whatever earlier ones have left."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store, TCPStore

from lightning_dpx.errors import CollectiveError
from lightning_dpx.lightning.processes.attempt_store import agent_store, attempt_store, is_kept_by_agent


def attempt(store: Store, ranks: list[int], world_size: int, timeout: float = 30.0) -> dict[int, Store | BaseException]:
    """What each of ``ranks`` gets, all of them at once."""
    found: dict[int, Store | BaseException] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = attempt_store(store.clone(), rank, world_size, timeout)
        except CollectiveError as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def test_all_ranks_share_what_earlier_attempts_have_not_written_to(store: TCPStore) -> None:
    for number in range(3):
        stores = attempt(store, [0, 1, 2], 3)
        shared = [found for found in stores.values() if isinstance(found, Store)]
        assert len(shared) == 3
        assert not shared[0].check(["address"])
        shared[0].set("address", str(number))
        assert [one.get("address") for one in shared] == [str(number).encode()] * 3


def test_a_process_that_was_lost_while_they_joined_does_not_count(store: TCPStore) -> None:
    lost = attempt(store, [1, 2], 3, timeout=0.3)
    assert all(isinstance(error, CollectiveError) for error in lost.values())
    stores = attempt(store, [0, 1, 2], 3)
    assert all(isinstance(found, Store) for found in stores.values())


def test_ranks_that_do_not_come_are_named(store: TCPStore) -> None:
    found = attempt(store, [0, 2], 4, timeout=0.5)
    assert str(found[0]) == "Process 0 of 4 waited for rank 1, 3, which did not come in time."
    assert str(found[2]) == "Process 2 waited for rank 0, which did not come in time."


def test_one_process_waits_for_nobody() -> None:
    attempt_store(HashStore(), 0, 1, timeout=5.0).set("key", "value")


def test_only_torchrun_keeps_a_store(monkeypatch: pytest.MonkeyPatch, store: TCPStore) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert not is_kept_by_agent()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert is_kept_by_agent()
    store.set("left", "behind")
    assert agent_store("127.0.0.1", store.port, 2, 5.0).get("left") == b"behind"
