"""A change of the process lasts from the first thread that enters it to the last that leaves it."""

import threading
from collections.abc import Callable

import pytest

from lightning_dpx.python_objects.shared_patch import SharedPatch


class _Setting:
    """What is changed, with what became of it."""

    def __init__(self, *, fails_first: bool = False) -> None:
        self.value = "before"
        self.history: list[str] = []
        self.patch = SharedPatch(self.change)
        self._fails = fails_first

    def change(self) -> Callable[[], None]:
        if self._fails:
            self._fails = False
            raise OSError("no room")
        self.history.append(f"made over {self.value}")
        self.value = "changed"
        return self.put_back

    def put_back(self) -> None:
        self.history.append("undone")
        self.value = "before"


class TestSharedPatch:
    def test_it_is_made_once_and_undone_by_the_last(self) -> None:
        setting = _Setting()
        with setting.patch:
            with setting.patch:
                assert setting.value == "changed"
            assert setting.value == "changed"
        assert setting.value == "before"
        assert setting.history == ["made over before", "undone"]

    def test_runs_that_overlap_leave_in_any_order(self) -> None:
        # The first to enter is the first to leave: what it had found must not come back under the second one.
        setting = _Setting()
        entered = threading.Event()
        may_leave = threading.Event()
        seen: list[str] = []

        def run() -> None:
            with setting.patch:
                entered.set()
                may_leave.wait(10)
                seen.append(setting.value)

        thread = threading.Thread(target=run)
        with setting.patch:
            thread.start()
            assert entered.wait(10)
        assert setting.value == "changed"
        may_leave.set()
        thread.join(10)
        assert seen == ["changed"]
        assert setting.value == "before"

    def test_an_error_inside_undoes_it(self) -> None:
        setting = _Setting()
        with pytest.raises(KeyError), setting.patch:
            raise KeyError
        assert setting.value == "before"

    def test_a_change_that_fails_is_made_again_by_the_next(self) -> None:
        setting = _Setting(fails_first=True)
        with pytest.raises(OSError, match="no room"), setting.patch:
            pass
        with setting.patch:
            assert setting.value == "changed"
        assert setting.history == ["made over before", "undone"]
