"""Profiles of few rows become those of many: sizes, times, and what stays of compressed masks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_dpx.memory import Profile, extrapolate, profile_module, scaled


def dropout_on(rows: int) -> Profile:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return profile_module(module, torch.randn(rows, 64))


def compact(profile: Profile) -> list[int]:
    return [value.compact for value in profile.values if value.compact]


@pytest.mark.parametrize("factor", [1, 2, 3.5])
def test_everything_is_scaled_also_compressed_masks(factor: float) -> None:
    profile = dropout_on(64)
    more = scaled(profile, factor)
    assert compact(profile) == [64 * 64]
    assert compact(more) == [factor * 64 * 64]
    assert [v.num_bytes for v in more.values] == [round(factor * v.num_bytes) for v in profile.values]
    assert [s.num_bytes for s in more.storages] == [round(factor * s.num_bytes) for s in profile.storages]
    assert more.peak == pytest.approx(factor * profile.peak, abs=1)
    assert more.scale == factor


def test_two_points_are_a_line_also_for_compressed_masks() -> None:
    few, more, all_rows = dropout_on(32), dropout_on(64), dropout_on(512)
    found = extrapolate(few, more, (32, 64), 512)
    assert compact(found) == compact(all_rows) == [512 * 64]
    assert found.curve == all_rows.curve
    assert found.scale == 8


def test_steps_that_differ_are_taken_in_proportion_to_the_larger_but_for_their_time() -> None:
    few = replace(dropout_on(32), step_seconds=0.002)
    more = replace(dropout_on(64), step_seconds=0.003)
    other = replace(few, requests=few.requests[:-1])
    found = extrapolate(other, more, (32, 64), 512)
    assert found.step_seconds == pytest.approx(0.017), "an empty batch would take 0.001"
    assert found == scaled(more, 8, found.step_seconds / more.step_seconds)
    assert found.curve == scaled(more, 8).curve


def test_what_a_step_leaves_is_on_the_line_or_in_proportion() -> None:
    few, more = replace(dropout_on(32), left_behind=40), replace(dropout_on(64), left_behind=60)
    assert extrapolate(few, more, (32, 64), 128).left_behind == 100
    assert scaled(more, 2).left_behind == 120
