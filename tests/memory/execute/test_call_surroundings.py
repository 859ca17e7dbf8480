"""What a call finds around itself is there again while it is made again, and as before afterwards."""

import threading

import pytest
import torch
from torch import nn

from lightning_dpx.memory.execute.call_surroundings import CallSurroundings
from lightning_dpx.memory.execute.module_anatomy import Anatomy

HOST = torch.device("cpu")


def surroundings_of(module: nn.Module, home: torch.device = HOST) -> CallSurroundings:
    anatomy = Anatomy(module)
    return CallSurroundings(anatomy, anatomy.state.marks(), home)


def test_switches_and_autocast_are_those_of_the_call() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        then = surroundings_of(module)
    module[1].eval()
    with torch.no_grad(), then.restored("net"):
        assert module[1].training
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert not module[1].training
    assert not torch.is_autocast_enabled("cpu")


def test_as_many_threads_share_its_operators_as_in_the_call() -> None:
    """On machines with many cores, a backward in a thread of its own made sums again with other bits."""
    before = torch.get_num_threads()
    then = surroundings_of(nn.Linear(2, 2))
    torch.set_num_threads(before + 1)
    with then.restored("net"):
        within = torch.get_num_threads()
    afterwards = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (within, afterwards) == (before, before + 1)


def test_new_threads_have_the_number_of_the_caller_after_a_backward_on_an_accelerator() -> None:
    """autograd's thread of a device may be older than the caller's number, and what a thread sets is for new ones."""
    before = torch.get_num_threads()
    then = surroundings_of(nn.Linear(2, 2), home=torch.device("meta"))

    def old_thread() -> None:
        torch.set_num_threads(before + 1)
        with then.restored("net"):
            pass

    seen: list[int] = []
    for task in (old_thread, lambda: seen.append(torch.get_num_threads())):
        thread = threading.Thread(target=task)
        thread.start()
        thread.join()
    torch.set_num_threads(before)  # also where this fails
    assert seen == [before]


def test_statistics_are_those_of_the_call_and_are_written_once() -> None:
    module = nn.BatchNorm1d(2).eval()
    then = surroundings_of(module)
    module.running_mean.fill_(7)
    held = module.running_mean
    with then.restored("norm"):
        assert module.running_mean.tolist() == [0, 0]
        module.running_mean.fill_(9)
    assert module.running_mean is held
    assert held.tolist() == [7, 7]


def test_what_cannot_be_as_it_was_is_told() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.zeros(4096))
    then = surroundings_of(module)
    module.table.fill_(1)
    assert then.difference(module) == "Linear.table"
    with pytest.raises(RuntimeError, match="Buffer 'table' of a Linear in 'net' was changed"), then.restored("net"):
        pass
    then = surroundings_of(module)
    with torch.no_grad():
        module.weight.add_(1)
    assert then.difference(module) == "a parameter of Linear"
    with pytest.raises(RuntimeError, match="A parameter of 'net' was changed in place"):
        then.check_parameters("net")
