import pytest

from lightning_dpx.replicas.inline_executor import InlineExecutor
from lightning_dpx.replicas.threaded_executor import ThreadedExecutor


@pytest.fixture(params=["inline", "threads"])
def executor(request):
    """Of both kinds, for up to three replicas."""
    made = InlineExecutor() if request.param == "inline" else ThreadedExecutor(range(3), 1)
    yield made
    made.close()
