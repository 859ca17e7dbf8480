"""What is done ever more rarely is done after 1, 2, 4, 8, ... times."""

from lightning_dpx.powers import is_power_of_two


def test_powers_of_two_are_told_from_other_numbers() -> None:
    assert [number for number in range(1, 70) if is_power_of_two(number)] == [1, 2, 4, 8, 16, 32, 64]
