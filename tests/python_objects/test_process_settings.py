"""Settings of the process that a step changes and puts back are seen, at its operators."""

import io
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from lightning_dpx.python_objects.process_settings import SettingsWatch, gpus_compute_in_tf32

HANDLERS = list[str]()
CACHE = dict[int, torch.Tensor]()


class Mode:
    """A flag that libraries keep at a class, and weights that a number may stand for."""

    is_fast = False
    weights: Any = torch.ones(2)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def rough_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@contextmanager
def fast() -> Iterator[None]:
    Mode.is_fast = True
    yield
    Mode.is_fast = False


@contextmanager
def one_weight() -> Iterator[None]:
    before = Mode.weights
    Mode.weights = 1.0
    yield
    Mode.weights = before


@contextmanager
def handling() -> Iterator[None]:
    HANDLERS.append("handler")
    yield
    HANDLERS.pop()


@contextmanager
def rough_products_of_one_backend() -> Iterator[None]:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    yield
    matmul.fp32_precision = before


class Net(nn.Module):
    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.context = context

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        known = CACHE.setdefault(len(rows), rows)
        with self.context():
            rows = rows + known
        return rows * (1 + Mode.is_fast + len(HANDLERS)) * Mode.weights


def seen_in(context: Callable[[], Any]) -> set[str]:
    CACHE.clear()
    net = Net(context)
    watch = SettingsWatch(net)
    rows = torch.ones(2)
    with watch:
        net(rows)
        torch.relu(rows)  # after the context has been left
    watch.look()
    return watch.switched


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (lambda: sdpa_kernel(SDPBackend.MATH), {"flash attention", "memory-efficient attention"}),
        (lambda: default_dtype(torch.float64), {"torch's default dtype"}),
        (parametrize.cached, {"cached parametrizations"}),
        (lambda: torch.autograd.set_detect_anomaly(True), {"detection of anomalies"}),
        (rough_products, {"precision of float32 products"}),
        (rough_products_of_one_backend, {"precision of float32 products"}),  # of which torch's name for all raises
        (torch.sparse.check_sparse_tensor_invariants, {"checks of sparse tensors"}),
        (warnings.catch_warnings, {"filters of warnings"}),
        (lambda: redirect_stdout(io.StringIO()), {"the standard output"}),
        (fast, {"Mode.is_fast"}),
        (one_weight, {"Mode.weights"}),
        (handling, {"HANDLERS"}),
        (torch.no_grad, set()),  # a thread's own
    ],
)
def test_what_is_set_while_an_operator_runs_is_seen(context: Callable[[], Any], expected: set[str]) -> None:
    found = seen_in(context)
    assert expected <= found
    assert expected or not found, "a cache that grows does no harm"


def test_a_stack_of_a_package_that_the_users_code_does_not_name_is_seen() -> None:
    package = types.ModuleType("handlers_of_effects")
    code = """
STACK = []
KNOWN = {}

def handled(rows):
    KNOWN[len(KNOWN)] = rows
    STACK.append(rows)
    rows = rows * 2
    STACK.pop()
    return rows + 1
"""
    exec(code, vars(package))
    net = Net(torch.no_grad)
    net.step = package.handled
    watch = SettingsWatch(net)
    with watch:
        net.step(torch.ones(2))
    assert watch.switched == {"handlers_of_effects.STACK"}


def test_gpus_that_are_asked_for_whole_float32_do_not_compute_in_tf32() -> None:
    """It was taken for granted, as the older names raise: checks on GPUs passed what differs in the fourth digit."""
    backends: Any = torch.backends
    # One by one: what other tests have asked of a single kind of operator holds for it whatever all are asked.
    kinds = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        assert not gpus_compute_in_tf32()
        backends.cudnn.conv.fp32_precision = "tf32"
        assert gpus_compute_in_tf32()
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision
