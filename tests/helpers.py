"""A file beside a user's script, with a state of its own."""

SEEN = list[int]()


def note() -> float:
    SEEN.append(1)
    return float(len(SEEN))


def forget() -> None:
    SEEN.clear()
