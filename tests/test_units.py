"""Bytes as people write and read them."""

import pytest

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.units import (
    GIB,
    KIB,
    MIB,
    format_bytes,
    format_least,
    format_mib,
    format_part,
    format_seconds,
    parse_byte_rate,
    parse_bytes,
    parse_flops,
    parse_seconds,
    parse_share,
    unit_of_table,
)


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
    ("size", "digits", "text"),
    [(6.3 * MIB, 1, "6.3 MiB"), (GIB, 0, "1024 MiB"), (MIB // 8, 1, "128.0 KiB"), (0, 1, "0.0 MiB")],
)
def test_messages_tell_mib_and_kib_of_small_models(size: float, digits: int, text: str) -> None:
    assert format_mib(size, digits) == text


@pytest.mark.parametrize(("size", "text"), [(512, "512 bytes"), (1536, "1.50 KiB"), (6.3 * MIB, "6.30 MiB")])
def test_small_sizes_are_told_in_the_unit_that_shows_them(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    "size", [1, 1023, 1025, 2049, MIB - 1, MIB, MIB + 1, 7 * MIB + 5000, 7 * MIB + 5243, 3 * GIB + 1]
)
def test_what_is_needed_is_told_as_a_size_that_does(size: int) -> None:
    told = format_least(size)
    assert size <= parse_bytes("memory", told.replace("bytes", "B")) <= size + 0.01 * MIB
    assert format_least(2 * MIB) == format_bytes(2 * MIB), "a round figure stays"


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (1.48 * GIB, 1.5 * GIB, "1.48 of 1.50 GiB"),
        (6.3 * MIB, 8 * MIB, "6.3 of 8.0 MiB"),
        (5 * KIB, 8 * KIB, "5.0 of 8.0 KiB"),
    ],
)
def test_a_part_is_told_in_the_unit_of_the_whole(part: float, whole: float, text: str) -> None:
    assert format_part(part, whole) == text


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50GB/s", 50e9), ("1.5 TB/s", 1.5e12), ("2GiB/s", 2.0 * GIB), ("400Gb/s", 50e9), ("8Mbit/s", 1e6), ("7B/s", 7.0)],
)
def test_rates_count_bytes_or_bits(text: str, rate: float) -> None:
    assert parse_byte_rate("--link", text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["50", "50GB", "fast", "0GB/s", "-1GB/s", "1..5GB/s", "GB/s", "9" * 400 + "GB/s"])
def test_a_rate_without_a_unit_is_refused_with_what_is_required(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--link='.* is not allowed; .*50GB/s in bytes, or 400Gb/s in bits"):
        parse_byte_rate("--link", text)


@pytest.mark.parametrize(("text", "rate"), [("100TF/s", 1e14), ("1.5 PFLOP/s", 1.5e15), ("19.5TFLOPS", 1.95e13)])
def test_operations_per_second(text: str, rate: float) -> None:
    assert parse_flops("--flops", text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["100T", "100", "0TF/s", "TF/s", "100TB/s"])
def test_what_counts_no_operations_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--flops='.* is not allowed; .*such as 100TF/s"):
        parse_flops("--flops", text)


@pytest.mark.parametrize(("text", "seconds"), [("5us", 5e-6), ("0.1 ms", 1e-4), ("0s", 0.0), ("20ns", 2e-8)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds("--latency", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "-1us", "us", "1h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--latency='.* is not allowed; .*such as 5us or 0.1ms"):
        parse_seconds("--latency", text)


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.50 s"), (0.0183, "18.3 ms"), (5e-6, "5.0 us")])
def test_times_are_told_in_the_unit_that_shows_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("largest", "digits", "unit"),
    [(10 * 2**20, 1, "MiB"), (10 * 2**20 - 1, 1, "KiB"), (2**20, 2, "MiB"), (2**20 - 1, 2, "KiB"), (0, 1, "KiB")],
)
def test_tables_of_small_sizes_are_in_kib(largest: int, digits: int, unit: str) -> None:
    assert unit_of_table(largest, digits) == (unit, {"KiB": 2**10, "MiB": 2**20}[unit])
