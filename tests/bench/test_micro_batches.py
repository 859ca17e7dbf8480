import pytest

from lightning_dpx.bench.micro_batches import step_milliseconds


@pytest.mark.parametrize("way", ["whole", "by hand", "dpx"])
def test_every_way_is_timed(way: str) -> None:
    assert step_milliseconds("nothing", 2, way, num_steps=2) > 0
