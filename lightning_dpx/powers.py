"""When something that costs time is done again: after 1, 2, 4, 8, ... times, ever more rarely as a run goes on."""


def is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, 8, ...

    Args:
        number: Counts something, so it is not negative; 0 passes, too.
    """
    # A power of two has one bit, and the number before it all those below: they share none.
    return number & (number - 1) == 0
