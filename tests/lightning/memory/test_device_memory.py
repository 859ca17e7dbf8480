"""What a device holds in a step, as figures and as a table."""

import torch

from lightning_dpx.lightning.memory.device_memory import DeviceMemory, bytes_by_device, flat, table_of

MIB = 2**20
CPU = torch.device("cpu")


def test_storages_are_counted_once_and_sparse_tensors_not_at_all() -> None:
    tensor = torch.ones(4)
    assert bytes_by_device([tensor, tensor[1:], torch.ones(2).double(), torch.eye(2).to_sparse()]) == {CPU: 32}


def test_the_figures_are_flat_and_the_table_says_what_is_not_known() -> None:
    memory = DeviceMemory(parameters=MIB, peak=4 * MIB, peak_by_phase={"forward": 3 * MIB}, total=64 * MIB)
    figures = flat(memory)
    assert (figures["peak_forward"], figures["peak_backward"], figures["parameters"]) == (3 * MIB, 0, MIB)
    title, heads, [row] = table_of({CPU: memory}, {CPU: 5 * MIB})
    cells = dict(zip(heads, row, strict=True))
    assert "MiB" in title
    assert (cells["device"], cells["parameters"], cells["peak forward"]) == ("cpu", "1.0", "3.0")
    assert (cells["highest"], cells["planned"], cells["budget"], cells["of"]) == ("5.0", "-", "-", "64")
