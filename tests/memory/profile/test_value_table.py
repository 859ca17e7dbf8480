"""Values of a step are numbered, and so are their storages."""

import torch

from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.profile.data import SavedValue
from lightning_dpx.memory.profile.value_table import DeadValue, FoundValues
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace


def test_values_of_one_storage_get_its_number_and_the_first_ones_name() -> None:
    found = FoundValues()
    trace = MemoryTrace(torch.device("cpu"))
    with trace:
        one = torch.ones(4)
        two = torch.ones(4)
    first = trace.allocation_of(one.untyped_storage())
    second = trace.allocation_of(two.untyped_storage())
    assert [found.storage_of("a", first), found.storage_of("b", first), found.storage_of("c", second)] == [0, 0, 1]
    assert [name for name, _ in found.memories] == ["a", "c"]


def test_what_forward_let_go_is_dropped_for_nothing() -> None:
    found = FoundValues()
    trace = MemoryTrace(torch.device("cpu"))
    with trace:
        tensor = torch.ones(4)
    source = Value("source", "relu")
    value = Value("dead", "exp")
    value.keep(tensor)
    value.learn(None, (source,))
    found.saved["dead"] = 5
    found.dead.append(DeadValue(value, trace.allocation_of(tensor.untyped_storage()), ""))
    found.add_dead({source: 2})
    (dead,) = found.values
    assert (dead.name, dead.num_bytes, dead.inputs, dead.seconds, dead.saved) == ("dead", 16, (2,), 0.0, 5)
    assert dead.refused == "it does not come from the graph"


def test_where_nothing_is_offloaded_what_only_that_could_drop_is_refused() -> None:
    found = FoundValues()
    offloaded = SavedValue("a", "exp", 16, 0, (), 0.1, "", offloaded=True, copying=0.1)
    remade = SavedValue("b", "exp", 16, 0, (), 0.1, "", copying=0.1)
    found.values = [offloaded, remade]
    found.offload_nothing()
    assert [value.copying for value in found.values] == [0.0, 0.0]
    assert "offloads nothing" in found.values[0].refused
    assert found.values[1].refused == ""
