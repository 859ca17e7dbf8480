"""The backend of simulated devices is compiled once, by whoever comes first."""

import pytest

from lightning_dpx.simulate.build import cached_library
from tests import programs
from tests.conftest import SIMULATED

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


def test_without_a_compiler_the_package_works_and_simulate_says_what_to_install(tmp_path) -> None:
    script = (
        "import torch, lightning_dpx as dpx\n"
        "group = dpx.ReplicaGroup(torch.nn.Linear(2, 1), ['cpu', 'cpu'])\n"
        "group.forward(torch.ones(4, 2)); print('rows', len(group.outputs_merged()))\n"
        "dpx.simulate(2)\n"
    )
    printed = programs.printed_by(script, PATH="", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert "rows 4" in printed
    assert "UnsupportedError" in printed
    assert "apt install g++" in printed


def test_no_text_is_made_with_streams_whose_parts_may_be_of_two_standard_libraries() -> None:
    """Numbers that were written to one ended the process on a machine with another standard library."""
    compiled = cached_library().read_bytes()
    assert b"basic_ostringstream" not in compiled
    assert b"_ZNSols" not in compiled, "no std::ostream::operator<< of a number"


@pytest.mark.slow
def test_a_compilation_that_was_killed_is_simply_done_again(tmp_path) -> None:
    program = "import lightning_dpx as dpx; dpx.simulate(2); import torch; print(torch.ones(2, device='sim:1').sum())"
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    killed = programs.start("-c", program, environment=environment)
    while not list(tmp_path.glob("building_*/build.ninja")):
        assert killed.poll() is None
    killed.kill()
    killed.wait()
    again = programs.run("-c", program, environment=environment)
    assert "tensor(2., device='sim:1')" in again.stdout, again.stderr
    assert len(list(tmp_path.glob("*.so"))) == 1
