"""Threads of the user's own are told from those of Python and installed packages."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

from lightning_dpx.python_objects.other_threads import user_code_runs_elsewhere


def test_a_thread_that_waits_in_the_users_function_counts_until_it_ends() -> None:
    orders: queue.Queue[None] = queue.Queue()
    begun = threading.Event()

    def act() -> None:
        begun.set()
        orders.get()

    assert not user_code_runs_elsewhere()
    thread = threading.Thread(target=act)
    thread.start()
    begun.wait()
    assert user_code_runs_elsewhere()
    orders.put(None)
    thread.join()
    assert not user_code_runs_elsewhere()


def test_idle_threads_of_libraries_do_not() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert not user_code_runs_elsewhere()
