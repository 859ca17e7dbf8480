"""The picture of a plan shows the numbers that it was given."""

from dataclasses import replace

from lightning_dpx.memory import timeline_of
from lightning_dpx.pictures import draw_plan, draw_prices
from tests.pictures.made_up import MIB, planned


def test_the_curve_of_a_plan_reaches_its_predicted_peak() -> None:
    profile, plan = planned()
    curve = timeline_of(profile, plan)
    assert max(curve) == plan.peak
    assert len(curve) == len(profile.curve)
    above, below = draw_plan(profile, plan).axes
    drawn = {line.get_label(): max(line.get_ydata()) for line in above.lines if not line.get_label().startswith("_")}
    assert drawn["with the plan"] == plan.peak / MIB
    assert drawn["everything kept"] == profile.peak / MIB
    assert {text.get_text() for text in below.get_legend().get_texts()} == {d.action for d in plan.decisions}


def test_a_budget_far_above_the_step_is_told_where_it_cannot_be_drawn() -> None:
    profile, plan = planned()
    for budget, label in ((profile.peak, "budget"), (40 * MIB, "budget: 40 MiB, above")):
        axes = draw_plan(profile, replace(plan, budget=budget)).axes[0]
        assert label in {text.get_text() for text in axes.get_legend().get_texts()}
        assert axes.get_ylim()[1] < 2 * profile.peak / MIB


def test_prices_hold_every_plan_and_the_one_that_is_free() -> None:
    figure = draw_prices([(10 * MIB, 0.2), (20 * MIB, 0.1)], 40 * MIB, chosen=(20 * MIB, 0.1))
    line = figure.axes[0].lines[0]
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(10, 20), (20, 10), (40, 0)]
