"""A Trainer of the distribution of Lightning that is not in use."""

import importlib.machinery

import pytest

from lightning_dpx.lightning import lightning_api
from tests.programs import printed_by

pytestmark = pytest.mark.skipif(lightning_api.PACKAGE == "pytorch_lightning", reason="both are one")

TRAINER = """
try:
    pytorch_lightning.Trainer(strategy="dpx", accelerator="cpu", devices=2)
except lightning_dpx.ConfigurationError as error:
    print("refused:", error)
print(pytorch_lightning.strategies.__spec__.loader)
"""


@pytest.mark.parametrize("order", ["lightning_dpx, pytorch_lightning", "pytorch_lightning, lightning_dpx"])
def test_it_is_refused_whichever_is_loaded_first(order: str) -> None:
    # Programs of the tests begin with lightning_dpx loaded; for the other order its last step is done once more.
    again = "" if order.startswith("lightning_dpx") else "lightning_dpx.refuse_other_package()\n"
    printed = printed_by(f"import {order}\n{again}{TRAINER}")
    assert (
        "refused: This Trainer is one of pytorch_lightning, but lightning_dpx was loaded for lightning.pytorch"
        in printed
    )
    assert "LIGHTNING_DPX_PACKAGE=pytorch_lightning" in printed
    assert importlib.machinery.SourceFileLoader.__name__ in printed
