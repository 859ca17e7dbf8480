"""Names of calls and of what they save: ``blocks.2#3:0`` is the first value of the third call of ``blocks.2``."""


def path_of(call: str) -> str:
    """The path of the module that is called: ``blocks.2`` of ``blocks.2#3``."""
    return call.partition("#")[0]


def numbered(call: str) -> tuple[str, int]:
    """The path of the module that is called, and which of its calls this is, from 1: the first has no number."""
    path, _, number = call.partition("#")
    return path, int(number or 1)


def call_of(value: str) -> tuple[str, int]:
    """The same of the call that saves a value of this name."""
    return numbered(value.rpartition(":")[0])


def paths_round(path: str) -> list[str]:
    """The module and all modules that it is in, from the inside out; not the model itself, whose path is empty."""
    found = []
    while path:
        found.append(path)
        path = path.rpartition(".")[0]
    return found
