"""What several rehearsals have found of one step, together."""

from collections.abc import Mapping

from lightning_dpx.replicas import ListPlace
from lightning_dpx.replicas.merging.rule_search import Finding
from lightning_dpx.replicas.merging.rules import Rule


def is_kept(path: str) -> bool:
    """Whether it is that of what a step keeps, and not of what it returns."""
    return path.startswith("self.")


def found_at(place: ListPlace, findings: Mapping[str, Finding]) -> list[Finding]:
    """Of those, what was found of the items of a list."""
    return [found for path, found in findings.items() if path.startswith(f"{place}.")]


def chosen(findings: Mapping[str, Finding]) -> dict[str, Rule]:
    """The preferred rule of every value that has one."""
    return {path: found.rules[0] for path, found in findings.items() if found.rules}


def undecided(findings: Mapping[str, Finding]) -> frozenset[str]:
    """Paths of values that have only been zero."""
    return frozenset(path for path, found in findings.items() if found.rules and found.rules[0].kind == "by type")


def refined(first: Mapping[str, Finding], second: Mapping[str, Finding]) -> dict[str, Finding]:
    """What two rehearsals on different rows have found together: the rules that fit both times."""
    result = dict(first)
    for path, found in second.items():
        earlier = first.get(path)
        # A rule that failed once has failed; zeros say nothing, so what is
        # seen later takes their place.
        if earlier is None or not found.rules or not earlier.rules or earlier.rules[0].kind == "by type":
            result[path] = found if earlier is None or earlier.rules else earlier
            continue
        if found.rules[0].kind == "by type":
            continue
        # In the order of the earlier ones, which have merged results already.
        both = tuple(rule for rule in earlier.rules if rule in found.rules)
        text = "" if both else "no way of putting slices together gives it on all rows that were tried"
        is_sure = len(both) == 1 or earlier.is_sure or found.is_sure
        result[path] = Finding(
            path=path,
            rules=both,
            is_sure=is_sure,
            is_constant=earlier.is_constant and found.is_constant,
            is_count=earlier.is_count and found.is_count,
            error=found.error,
            text=text,
        )
    return result
