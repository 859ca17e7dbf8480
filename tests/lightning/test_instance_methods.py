"""A module has other methods for the time of a step, and no longer."""

from torch import nn

from lightning_dpx.lightning.instance_methods import InstanceMethods, remove_instance_methods
from lightning_dpx.registry import Registry


class Logs(nn.Module):
    def log(self) -> str:
        return "class"


def other() -> str:
    return "step"


def test_the_methods_are_there_within_the_block_and_the_users_own_come_back() -> None:
    module = Logs()
    with InstanceMethods(module, {"log": other}):
        assert module.log() == "step"
    assert "log" not in vars(module)
    mine = Logs()
    vars(mine)["log"] = lambda: "user"
    with InstanceMethods(mine, {"log": other}):
        assert mine.log() == "step"
    assert mine.log() == "user"


def test_a_block_that_is_left_late_leaves_the_methods_of_the_next_one() -> None:
    module = Logs()
    late, current = InstanceMethods(module, {"log": lambda: "late"}), InstanceMethods(module, {"log": other})
    late.__enter__()
    with current:
        late.__exit__()
        assert module.log() == "step"


def test_what_an_abandoned_step_left_is_removed_and_what_the_user_put_there_is_not() -> None:
    module = nn.Sequential(Logs())
    of_this_package = Registry("kind", object).register
    InstanceMethods(module[0], {"log": of_this_package}).__enter__()
    vars(module[0])["other"] = other
    remove_instance_methods(module)
    assert module[0].log() == "class"
    assert module[0].other is other
