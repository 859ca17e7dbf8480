"""A change of the process lasts from the first thread that enters it to the last that leaves it."""

import threading

import pytest

from lightning_dpx.python_objects.shared_patch import SharedPatch


class _Setting(SharedPatch):
    def __init__(self) -> None:
        super().__init__()
        self.value = "before"
        self.history: list[str] = []

    def make(self) -> None:
        self.history.append(f"made over {self.value}")
        self.value = "changed"

    def undo(self) -> None:
        self.history.append("undone")
        self.value = "before"


class TestSharedPatch:
    def test_it_is_made_once_and_undone_by_the_last(self) -> None:
        setting = _Setting()
        with setting:
            with setting:
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
            with setting:
                entered.set()
                may_leave.wait(10)
                seen.append(setting.value)

        thread = threading.Thread(target=run)
        with setting:
            thread.start()
            assert entered.wait(10)
        assert setting.value == "changed"
        may_leave.set()
        thread.join(10)
        assert seen == ["changed"]
        assert setting.value == "before"

    def test_an_error_inside_undoes_it(self) -> None:
        setting = _Setting()
        with pytest.raises(KeyError), setting:
            raise KeyError
        assert setting.value == "before"

    def test_a_change_that_fails_is_made_again_by_the_next(self) -> None:
        class Fails(_Setting):
            def make(self) -> None:
                if not self.history:
                    self.history.append("failed")
                    raise OSError("no room")
                super().make()

        setting = Fails()
        with pytest.raises(OSError, match="no room"), setting:
            pass
        with setting:
            assert setting.value == "changed"
        assert setting.history == ["failed", "made over before", "undone"]
