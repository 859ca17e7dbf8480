"""Who asks for the state of the host's generator is told of it while it listens, and leaves torch as it was."""

import threading

import torch

from lightning_dpx.memory.tracing.generator_states import GeneratorStateWatch


def test_a_listener_is_given_the_states_that_its_own_thread_asks_for() -> None:
    get = torch.get_rng_state
    states = GeneratorStateWatch()
    told: list[torch.Tensor] = []
    states.tell(told.append)
    state = torch.get_rng_state()
    other = threading.Thread(target=torch.get_rng_state)
    other.start()
    other.join()
    states.tell_no_more(told.append)
    torch.get_rng_state()
    assert [one is state for one in told] == [True]
    assert torch.get_rng_state is get
