"""What is given to a group is checked before anything is changed by it."""

import pytest
import torch
from torch import nn

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.group.arguments import check_fixed_params, check_inputs_named, check_value, gradient_requests


def test_parameters_that_are_not_named_are_written() -> None:
    module = nn.Linear(2, 1)
    assert gradient_requests(module, {"bias": "null"}) == {"weight": "write", "bias": "null"}
    assert gradient_requests(module, "add") == {"weight": "add", "bias": "add"}


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match="'weights'; the parameters are: weight, bias"):
        gradient_requests(nn.Linear(2, 1), {"weights": "add"})
    with pytest.raises(ConfigurationError, match="'weights'; the parameters are: weight, bias"):
        check_fixed_params(["weights"], ["weight", "bias"])
    with pytest.raises(ConfigurationError, match=r"'x'; Linear\.forward takes input"):
        check_inputs_named(nn.Linear(2, 1), {"x": 1})


def test_a_text_is_no_list_of_names() -> None:
    with pytest.raises(ConfigurationError, match=r"give a list: \['weight'\]"):
        check_fixed_params("weight", ["weight"])


def test_values_have_the_shape_of_what_they_replace() -> None:
    with pytest.raises(ConfigurationError, match=r"has shape \(1,\), the module's has \(2,\)"):
        check_value("bias", torch.ones(1), torch.ones(2))
