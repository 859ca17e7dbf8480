"""What a call draws is drawn again when it is made again, and by nobody else."""

import copy
import random

import numpy as np
import pytest
import torch

from lightning_dpx.memory.execute.call_draws import CallDraws
from lightning_dpx.python_objects.process_generators import GeneratorWatch

CPU = torch.device("cpu")


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def test_a_call_draws_its_numbers_again_and_the_generators_go_on_behind_it() -> None:
    draws = CallDraws(CPU, GeneratorWatch())
    first = drawn()
    draws.end()
    assert draws.drew
    after = drawn()
    with draws.repeated():
        assert drawn() == first
        draws.check_end("a call")
    assert drawn() not in (first, after)
    with draws.repeated():  # for a second backward
        assert drawn() == first


def test_of_a_call_that_draws_nothing_no_state_stays() -> None:
    draws = CallDraws(CPU, GeneratorWatch())
    assert draws.num_bytes == torch.get_rng_state().nbytes
    assert not draws.drew, "nobody knows before it is over"
    draws.end()
    assert (draws.drew, draws.num_bytes) == (False, 0)
    expected = torch.get_rng_state()
    with draws.repeated():
        torch.rand(1)  # by others: nothing of theirs is put back
    assert not torch.equal(torch.get_rng_state(), expected)


def test_numbers_of_python_and_numpy_count_and_take_no_memory_of_torch() -> None:
    draws = CallDraws(CPU, GeneratorWatch())
    first = random.random(), float(np.random.rand())
    draws.end()
    assert (draws.drew, draws.num_bytes) == (True, 0)
    with draws.repeated():
        assert (random.random(), float(np.random.rand())) == first


def test_other_numbers_than_the_first_time_are_noticed() -> None:
    draws = CallDraws(CPU, GeneratorWatch())
    torch.rand(1)
    draws.end()
    with draws.repeated():
        torch.rand(2, 17)
        with pytest.raises(RuntimeError, match=r"'cell#2' drew other random numbers"):
            draws.check_end("cell#2")


def test_one_that_is_followed_only_so_far_ends_there() -> None:
    draws = CallDraws(CPU, GeneratorWatch())
    torch.rand(1)
    here = draws.digest()
    torch.rand(1)
    draws.end()
    whole = copy.copy(draws)
    draws.end_at(here)
    with draws.repeated():
        torch.rand(1)
        draws.check_end("a call")
        with pytest.raises(RuntimeError, match="drew other random numbers"):
            whole.check_end("a copy, which is followed to its end")
