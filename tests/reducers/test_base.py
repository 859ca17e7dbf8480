"""What all reducers refuse, and which one is chosen."""

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.reducers import choose_reducer, make_reducer

CPU = torch.device("cpu")


def test_lists_that_do_not_fit_and_unknown_names_are_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="2 lists of equal length"):
        make_reducer("naive", [CPU] * 2).reduce([[torch.ones(1)], []])
    with pytest.raises(dpx.ConfigurationError, match="2 lists of equal length"):
        make_reducer("naive", [CPU] * 2).reduce([[torch.ones(1)]] * 3)
    with pytest.raises(dpx.ConfigurationError, match=r"parameter 1 differ between the replicas: \[2\] .* and \[3\]"):
        make_reducer("naive", [CPU] * 2).reduce([[None, torch.ones(2)], [None, torch.ones(3)]])
    with pytest.raises(dpx.ConfigurationError, match=r"parameter net\.bias differ between"):
        make_reducer("naive", [CPU] * 2).reduce([[torch.ones(2)], [torch.ones(3)]], names=["net.bias"])
    with pytest.raises(
        dpx.ConfigurationError, match=r"Unknown reducer 'naiv'; available: .*naive.*Did you mean 'naive'"
    ):
        make_reducer("naiv", [CPU])
    with pytest.raises(dpx.ConfigurationError, match=r"communication_dtype=torch\.int8"):
        make_reducer("naive", [CPU], torch.int8)
    with pytest.raises(dpx.ConfigurationError, match="a CUDA device per replica, got cpu, cpu"):
        make_reducer("nccl", [CPU] * 2)


def test_auto_follows_the_devices() -> None:
    assert choose_reducer([CPU] * 4) == "naive"
    assert choose_reducer([torch.device("cuda", 0)] * 2) == "naive"
    assert choose_reducer([CPU, torch.device("cuda", 0)]) == "collective"


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(dpx.ConfigurationError, match="'naive' is taken by NaiveReducer"):
        dpx.register_reducer("naive")(dpx.GradientReducer)


@pytest.mark.parametrize("owners", [[0], [0, 2], [0, -1], [0, 1, 1]])
def test_owners_are_one_replica_for_each_parameter(owners) -> None:
    reducer = make_reducer("naive", [torch.device("cpu")] * 2)
    with pytest.raises(dpx.ConfigurationError, match=r"owners=.* is not allowed; give one of the replicas 0 to 1 for"):
        reducer.reduce([[torch.ones(1), None], [torch.ones(1), torch.ones(1)]], owners=owners)
