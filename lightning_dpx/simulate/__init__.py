"""Simulated devices ``sim:0``, ``sim:1``, ...: rehearse and test a run on several devices on any machine.

They behave like accelerators: tensors of different devices do not mix, copies are explicit and counted, memory is
accounted and may run out, autograd runs one thread per device, each device has its own random generator. The arithmetic
is the CPU's. Sparse and quantized tensors, ``torch.compile``, CUDA graphs and custom kernels are not supported, work is
done when a call returns (streams and events have nothing to wait for), and ``torch.Generator(device="sim")`` calls
itself a CPU generator.
"""

from lightning_dpx.simulate.backend import MAX_DEVICES, is_loaded
from lightning_dpx.simulate.build import is_built, require_build_tools
from lightning_dpx.simulate.devices import Transfer, clear_traffic, simulate, traffic

__all__ = [
    "MAX_DEVICES",
    "Transfer",
    "clear_traffic",
    "is_built",
    "is_loaded",
    "require_build_tools",
    "simulate",
    "traffic",
]
