"""Figures become files."""

from pathlib import Path

import pytest

from lightning_dpx.pictures import draw_devices, save_figure
from tests.pictures.made_up import DEVICES


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_figures_become_files(suffix: str, begins: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"devices{suffix}"
    save_figure(draw_devices(DEVICES[:1]), path)
    assert path.read_bytes().startswith(begins)
