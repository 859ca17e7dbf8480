"""Bytes as people write and read them."""

import pytest

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.units import GIB, MIB, format_bytes, format_mib, format_part, parse_bytes, parse_share


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 * GIB), ("512 MiB", 512 * MIB), ("1.5 MiB", 3 * MIB // 2), ("2GB", 2 * 10**9), (7, 7)]
)
def test_what_people_write_becomes_bytes(text: str | int, size: int) -> None:
    assert parse_bytes("memory", text) == size


@pytest.mark.parametrize("text", ["8 apples", "-1", 0, True, "1..2GiB", "", "9" * 400 + "GiB"])
def test_what_is_no_size_is_refused_with_the_argument_and_an_example(text: str | int) -> None:
    with pytest.raises(ConfigurationError, match=r"memory=.* is not allowed; give positive bytes or .*'8GiB'"):
        parse_bytes("memory", text)


def test_a_share_is_written_in_percent() -> None:
    assert parse_share("memory", " 62.5 % ") == 0.625


@pytest.mark.parametrize("text", ["0%", "101%", "-1%", "half", "0.5", "1.2.3%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"memory=.* is not allowed; give more than 0% and at most 100%"):
        parse_share("memory", text)


@pytest.mark.parametrize(
    ("size", "digits", "text"), [(6.3 * MIB, 1, "6.3 MiB"), (GIB, 0, "1024 MiB"), (MIB // 8, 2, "0.12 MiB")]
)
def test_messages_tell_mib(size: float, digits: int, text: str) -> None:
    assert format_mib(size, digits) == text


@pytest.mark.parametrize(("size", "text"), [(512, "512 bytes"), (1536, "1.50 KiB"), (6.3 * MIB, "6.30 MiB")])
def test_small_sizes_are_told_in_the_unit_that_shows_them(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(1.48 * GIB, 1.5 * GIB, "1.48 of 1.50 GiB"), (6.3 * MIB, 8 * MIB, "6.3 of 8.0 MiB")]
)
def test_a_part_is_told_in_the_unit_of_the_whole(part: float, whole: float, text: str) -> None:
    assert format_part(part, whole) == text
