"""What a choice comes to, on a chain of made-up layers: each saves one MiB and takes a second."""

from dataclasses import replace

import pytest

from lightning_dpx.memory.plan.forecast import Forecast, Forecaster, forecast, timeline, with_overheads
from lightning_dpx.memory.profile.data import PlanOverhead
from tests.memory.made_up import SIZE, chain

LENGTH = 8


def test_a_step_of_which_nothing_is_dropped_is_the_one_that_was_profiled() -> None:
    profile = chain(LENGTH)
    result = forecast(profile, [])
    assert result == Forecast(peak=profile.peak, kept=LENGTH * SIZE, seconds=0.0)
    assert timeline(profile, []) == list(profile.curve)


def test_each_dropped_value_is_made_once_and_the_peak_falls() -> None:
    profile = chain(LENGTH)
    dropped = [1, 2, 3]
    result = forecast(profile, dropped)
    assert result.seconds == len(dropped)
    assert result.kept == (LENGTH - len(dropped)) * SIZE
    assert result.peak < profile.peak
    assert max(timeline(profile, dropped)) == result.peak


def test_values_that_go_after_every_use_take_less_and_longer() -> None:
    """Every one is made anew from the first, which is there: 1 + 2 + ... seconds instead of one each."""
    profile = chain(LENGTH)
    dropped = range(1, LENGTH)
    held = forecast(profile, dropped)
    uncached = forecast(profile, dropped, dropped)
    assert held.seconds == LENGTH - 1
    assert uncached.seconds == sum(range(LENGTH))
    assert uncached.peak < held.peak


def test_what_is_noted_of_a_value_is_noted_once_however_often_it_is_made() -> None:
    profile = replace(chain(LENGTH), overhead=PlanOverhead(per_value=0.75))
    dropped = range(1, LENGTH)
    computations = sum(range(LENGTH))
    assert forecast(profile, dropped).seconds == LENGTH - 1
    assert forecast(profile, dropped, dropped).seconds == computations - 0.75 * (computations - len(dropped))


def test_a_step_that_is_followed_takes_as_much_whatever_is_dropped() -> None:
    profile = replace(chain(LENGTH), overhead=PlanOverhead(per_step=0.5))
    for dropped in ([1], [1, 2, 3]):
        assert with_overheads(profile, forecast(profile, dropped), dropped).seconds == len(dropped) + 0.5
    assert with_overheads(profile, forecast(profile, []), []).seconds == 0.0


def test_a_choice_that_makes_values_too_often_is_out_of_the_question() -> None:
    profile = chain(LENGTH)
    dropped = range(1, LENGTH)
    result = forecast(profile, dropped, dropped, most_times=1)
    assert result.seconds == float("inf")
    assert result.peak > profile.peak
    assert result.rank(None) > forecast(profile, dropped).rank(None)


def test_what_takes_more_than_is_acceptable_is_found_out_with_less_work() -> None:
    profile = chain(LENGTH)
    dropped = range(1, LENGTH)
    forecaster = Forecaster(profile)
    whole = forecaster.forecast(dropped, dropped)
    work = forecaster.work
    same = forecaster.forecast(dropped, dropped, most_bytes=whole.peak, most_seconds=whole.seconds)
    assert same == whole
    assert forecaster.work == 2 * work
    for limits in ({"most_bytes": whole.peak - 1}, {"most_seconds": 0.9 * whole.seconds}):
        before = forecaster.work
        assert forecaster.forecast(dropped, dropped, **limits).seconds == float("inf")
        assert forecaster.work - before < work


def test_the_work_of_forecasts_adds_up_and_depends_on_the_step_only() -> None:
    first, second = Forecaster(chain(LENGTH)), Forecaster(chain(LENGTH, seconds=5.0))
    for each in (first, second):
        each.forecast([1, 2])
    assert first.work == second.work
    once = first.work
    first.forecast([1, 2])
    assert first.work == 2 * once


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(Forecast(90, 0, 1.0), Forecast(50, 0, 2.0), id="the faster of two that fit"),
        pytest.param(Forecast(90, 0, 9.0), Forecast(110, 0, 1.0), id="what fits before what does not"),
        pytest.param(Forecast(110, 0, 9.0), Forecast(120, 0, 1.0), id="the smaller of two that do not fit"),
        pytest.param(Forecast(50, 0, 1.0), Forecast(90, 0, 1.0), id="the smaller of two that are equally fast"),
    ],
)
def test_forecasts_are_ranked_by_a_budget(better: Forecast, worse: Forecast) -> None:
    assert better.rank(100) < worse.rank(100)
