"""What checks have found of every step of a run: how its results are merged, and the findings that this rests on.

A step is checked several times, and none of its checks sees all: in the first batch a count may have been zero, later
rows may show that what looked like a sum is none. So each check adds to what was found before it:

    findings of this check --refined--> findings of all checks --the first rule that fits all--> MergeRules
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.rehearsal.comparison.attribute_judge import AttributeJudge
from lightning_dpx.lightning.rehearsal.comparison.findings import chosen, found_at, is_kept, refined, undecided
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.number_judge import CHANGES
from lightning_dpx.lightning.rehearsal.outcome import Key, Outcome
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.replicas import AttributeRules, ListPlace, MergeRules
from lightning_dpx.replicas.buffer_sync import BufferRule
from lightning_dpx.replicas.merging.rule_search import Finding

Findings = tuple[dict[str, Finding], dict[str, Finding]]  # of what the step returns and keeps, and of what it logs


class KnownRules:
    """The rules and findings of a run, by stage and loader.

    Args:
        loss_reduction: As given to the strategy; "auto" counts as a mean until a check has seen a sum.
    """

    def __init__(self, loss_reduction: str) -> None:
        self._loss_reduction = loss_reduction
        self._rules: dict[Key, MergeRules] = {}
        self._found: dict[Key, Findings] = {}

    def forget(self) -> None:
        """The run is over."""
        self._rules.clear()
        self._found.clear()

    def forget_findings(self, key: Key) -> None:
        """The next check starts anew; until then, results are merged as before."""
        self._found.pop(key, None)

    def of(self, key: Key) -> MergeRules:
        """How the results of a step are merged; by their types, where no check has found anything."""
        if key not in self._rules:
            self._rules[key] = MergeRules(loss_reduction="sum" if self._loss_reduction == "sum" else "mean")
        return self._rules[key]

    def asked_for(self, key: Key) -> MergeRules | None:
        """The rules of a step whose results were merged before; ``None`` of any other."""
        return self._rules.get(key)

    def items(self) -> Iterator[tuple[Key, MergeRules]]:
        """All that there are."""
        return iter(self._rules.items())

    def is_checked(self, key: Key) -> bool:
        """Whether a check of this step has ended."""
        return key in self._found

    def findings(self, key: Key) -> Findings:
        """What checks have found of a step that is checked."""
        return self._found[key]

    @contextmanager
    def judged_by(self, key: Key, judge: JudgingRules | None) -> Iterator[None]:
        """For a while, results of this step are merged by ``judge``; no rule that is found meanwhile remains."""
        rules = dict(self._rules)
        if judge is not None:
            rules[key] = judge
        # A rehearsal that fails half-way leaves no rule behind.
        with overridden(self, _rules=rules):
            yield

    def learn(self, key: Key, outcome: Outcome, news: frozenset[str], *, num_repeats: int | None) -> MergeRules:
        """Joins what a check has found with what earlier ones did, which saw only zeros, or not all.

        Args:
            key: Of the step.
            outcome: Of the check.
            news: Paths of what the step did for the first time since an earlier check.
            num_repeats: How often this step was checked again, if it will not be any more.

        Returns the rules from here on.
        """
        findings = outcome.findings
        logged = outcome.logged
        earlier = self._found.get(key)
        if earlier is not None:
            of_outputs = _without(earlier[0], news)
            of_logs = _without(earlier[1], news)
            findings = refined(of_outputs, findings)
            logged = refined(of_logs, logged)
            self._tell_late_sums(key, {**findings, **logged})
        self._found[key] = findings, logged
        before = self._rules[key]
        # What differs from run to run was compared with nothing, and is no number that has only been zero.
        still_zero = (undecided(findings) | undecided(logged)) - outcome.unstable
        if still_zero and num_repeats is not None:
            _tell_undecided(key, still_zero, num_repeats)
            still_zero = frozenset()
        before.news.learn(
            findings.keys() | logged.keys(),
            outcome.comparison.changed,
            undecided=still_zero,
            news=news,
            checked=outcome.findings.keys() | outcome.logged.keys(),
        )
        before.news.lost_names |= outcome.judge.lost_names
        # Attributes are found among the outputs, and have rules of their own.
        judge = outcome.judge
        self._rules[key] = MergeRules(
            outputs={path: rule for path, rule in chosen(findings).items() if not is_kept(path)},
            logged=chosen(logged),
            loss_reduction=judge.loss_reduction,
            loss_is_open=judge.loss.rests_on_one,
            news=before.news,
            attributes=_attribute_rules(before.attributes, judge.attributes, findings),
            buffers=_buffer_rules(before.buffers, judge),
            same_batch_sizes=judge.same_batch_sizes,
            metrics_give_slices=judge.metrics_give_slices,
            draws_once=judge.draws_once,
            drawn_rows=judge.drawn_rows,
            draws=before.draws or judge.draws,
            writes_batch=before.writes_batch or judge.writes_batch,
            drops_gradients=before.drops_gradients or judge.drops_gradients,
            written_buffers=before.written_buffers | judge.written_buffers,
        )
        return self._rules[key]

    def narrow(self, key: Key, outcome: Outcome) -> None:
        """Keeps the rules that fit the rows of another look, too; what is still undecided is left alone."""
        rules = self._rules[key]
        of_outputs, of_logs = self._found[key]
        for chosen_rules, before, now in (
            (rules.outputs, of_outputs, outcome.findings),
            (rules.logged, of_logs, outcome.logged),
        ):
            # Of what was only zero nothing has been found that could be narrowed.
            for path in before.keys() & now.keys() - rules.news.undecided:
                before[path] = now[path]
                if CHANGES not in now[path].rules:
                    rules.attributes.disjoint.discard(path.removeprefix("self."))
                if now[path].rules and path in chosen_rules:
                    chosen_rules[path] = now[path].rules[0]

    def narrow_buffers(self, key: Key, judge: JudgingRules, unstable: frozenset[str]) -> list[str]:
        """Takes over the rules of buffers that another look has found to come together in another way by now.

        Args:
            key: Of the step.
            judge: Of the look.
            unstable: What it could not compare.

        Returns the names of those that come together in no way any more.
        """
        rules = self._rules[key]
        rules.written_buffers |= judge.written_buffers
        lost: list[str] = []
        for name, fitting in judge.of_buffers.fitting.items():
            # Beside a large count a few rows are next to nothing, and all rules fit.
            if rules.buffers.get(name, "first") in fitting or f"state:{name}" in unstable:
                continue
            if fitting:
                rules.buffers[name] = fitting[0]
            elif rules.buffers.pop(name, None) is not None:
                lost.append(name)
        return lost

    def narrow_numbers(self, key: Key, judge: JudgingRules, unstable: frozenset[str]) -> list[str]:
        """Forgets the rules of attributes whose numbers come together by no rule on the rows of another look.

        Args:
            key: Of the step.
            judge: Of the look.
            unstable: What it could not compare.

        Returns the attributes; what the first slice has is theirs from here on.
        """
        rules = self._rules[key].attributes
        numbers = judge.attributes.numbers
        lost: list[str] = []
        for path, fitting in numbers.fitting.items():
            # What all slices have like one device tells nothing of its rule.
            is_known = bool(fitting) or path in numbers.equal or path not in rules.rebound
            if is_known or not unstable.isdisjoint({f"state:{path}", f"structure:{path}"}):
                continue
            rules.rebound.discard(path)
            rules.rules.pop(f"self.{path}", None)
            lost.append(path)
        return lost

    def _tell_late_sums(self, key: Key, findings: Mapping[str, Finding]) -> None:
        """Batches until here may have been averaged, where they had to be added."""
        kinds = {path: one.rules[0].kind for path, one in findings.items() if one.rules}
        was_zero = self._rules[key].news.undecided
        sums = [path.removeprefix("result.") for path in was_zero if kinds.get(path) == "sum"]
        if sums:
            rank_zero_warn(
                f"dpx: {', '.join(sums)} of {key[0]} had been zero until the last batch, so its values were merged "
                "by their type there; they add up, as is seen now."
            )


def _tell_undecided(key: Key, paths: frozenset[str], num_repeats: int) -> None:
    """No further check will tell whether these add up."""
    names = ", ".join(sorted(path.removeprefix("result.") for path in paths))
    rank_zero_warn(
        f"dpx: {names} of {key[0]} was zero or missing in all of {num_repeats + 1} checks, so it is not known whether "
        "it adds up over slices: floating-point numbers are averaged, integers added."
    )


def _without(findings: Mapping[str, Finding], paths: frozenset[str]) -> dict[str, Finding]:
    return {path: one for path, one in findings.items() if path not in paths}


def _buffer_rules(earlier: Mapping[str, BufferRule], judge: JudgingRules) -> dict[str, BufferRule]:
    """How buffers come together after another rehearsal.

    Args:
        earlier: The rules until here.
        judge: Of the rehearsal.
    """
    rules = dict(judge.buffers)
    for name, rule in earlier.items():
        fitting = judge.of_buffers.fitting.get(name)
        # Beside a large count the few rows of a check are next to nothing, in half precision soon, and all rules fit.
        if fitting is None or rule in fitting:
            rules[name] = rule
    return rules


def _attribute_rules(earlier: AttributeRules, judge: AttributeJudge, findings: Mapping[str, Finding]) -> AttributeRules:
    """How attributes come together after another rehearsal.

    Args:
        earlier: The rules until here.
        judge: Of the rehearsal.
        findings: Of it and earlier ones, together.
    """
    rules = {path: rule for path, rule in chosen(findings).items() if is_kept(path)}
    # One item without a rule, and the list cannot be put together.
    appended = dict[ListPlace, int]()
    for place, number in judge.appended.items():
        if all(one.rules for one in found_at(place, findings)):
            appended[place] = number
    rebound = {path for path in judge.numbers_among(findings) if f"self.{path}" in rules}
    return AttributeRules(
        rules=rules,
        appended=appended,
        growing=earlier.growing | judge.growing,
        rebound=rebound,
        disjoint={path for path in rebound if CHANGES in findings[f"self.{path}"].rules},
        read=judge.read,
        row_counts=earlier.row_counts,
    )
