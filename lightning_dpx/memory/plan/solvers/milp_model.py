"""The least extra time within a budget as a mixed-integer program.

The program is that of the note in :mod:`lightning_dpx.memory.plan.solvers.bounds`, and grows where it is too
optimistic: solve, play the solution through in the forecast, add what was missing where the budget was exceeded, solve
again.

    column   for each             from 0 to 1    costs                says
    d[u]     unit                 an integer     its seconds          it is dropped
    c[z]     value not saved      any number     its seconds          it is computed, as something made from it is
    f[v]     value of a unit      an integer     -                    it is uncached: forgotten after every use
    y        use of such a value  any number     its seconds again    it is computed once more, for this use
    p[v]     event t and value    any number     -                    it is there at t, as others needed it earlier

    row      memory at an event t, for those at which the curve of some solution was above the budget:
             sum of bytes[v] p[v] - sum of freed[u](t) d[u]  <=  budget - curve(t), all as shares of the step's peak

[Note: what comes back together]
What is added at an event t holds for every choice, too, so the bound of the solver stays a bound of every choice:

    computed   c[v] >= d[v] if v has been asked for by t. What has been computed had its inputs: c[s] >= c[v] if s is
               not saved, else c[s] >= c[v] + d[s] - 1.
    there      p[s] >= c[s] - f[s] if s is asked for after t: what was computed stays until then, unless it is uncached
               (f <= d), that is, forgotten after every use. Likewise between the first and the last request for s.
    time       An uncached value is computed for every use: once for each request, and once for each value that is
               computed from it: y >= f[s] + d[v] - 1. What is on the way to it is computed as often.

Where that does not explain what is missing, because values are computed on the way or operators take memory inside
while they are repeated, the part of the choice that is computed by t is forbidden as it is: all that can be reached
from it through what is dropped, with what is kept around that. No decision beyond changes when its values come and go:

    part       there(t) - sum of freed(t) (d' - d) over the other units - M k <= budget

holds for every choice d', with k the number of decisions of that part in which it differs, and M large enough. So few
units are solved to the end. Where there are more, the missing bytes are also added as they are; from then on the
program only searches, and proves no more.

Related: Checkmate (Jain et al., 2020), with a variable for every pair of a value and a moment. Here they come only
where the budget binds; sharing and forgetting are those of :mod:`lightning_dpx.memory.execute.values`.
"""

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from lightning_dpx.memory.plan.choice import Choice
from lightning_dpx.memory.plan.solvers.bounds import least_seconds, local_maxima
from lightning_dpx.memory.plan.solvers.highs import Answer, Solver

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.problem import Problem

_MOST_EVENTS = 24  # that get a row at once
_MOST_VALUES = 60  # that may have come back, at each event
_FEW = 12  # units, which are solved to the end
_ROUNDS_OF_FEW = 300
_ROUNDS = 12  # where there are more
_MOST_LEARNED = 8000  # terms of added rows, beyond which the solver takes far longer
_LEAST_WORK = 6e5  # of the solver: about one second
_MOST_WORK = 2e6  # about three
_LARGE = 2**24  # bytes: a step with such a peak takes long enough to be planned for three seconds
_TOLERANCE = 1e-6  # of the solver


class _Columns:
    """What the solver decides on from the start: what is dropped, what is computed on the way, and what is uncached.

    Args:
        problem: What can be dropped.

    Attributes:
        solver: Of the program.
        cost_per_second: What seconds are multiplied by in the program.
        users: By value, what is computed from it.
        dropped: The column of each unit; a share of it may be dropped in the linear program.
        unsaved: By value, the column that says that what is not saved is computed.
        uncached: By value, the column that says that it is forgotten after every use.
    """

    def __init__(self, problem: "Problem") -> None:
        self.solver: Solver = Solver()
        self._problem = problem
        self._relaxation = problem.relaxation
        relaxation = problem.relaxation
        values = problem.profile.values
        # Seconds are brought near one: the solver's tolerances are absolute.
        self.cost_per_second: float = 1 / (max((value.seconds for value in values), default=0.0) or 1.0)
        self.users: dict[int, list[int]] = self._users_of_values()
        self.dropped: list[int] = []
        for seconds in relaxation.seconds:
            self.dropped.append(self.solver.add_column(seconds * self.cost_per_second, integer=True))
        self.unsaved: dict[int, int] = {}
        for value in relaxation.unsaved:
            self.unsaved[value] = self.solver.add_column(values[value].seconds * self.cost_per_second)
        self.uncached: dict[int, int] = {value: self.solver.add_column(integer=True) for value in relaxation.column_of}
        for source, column in self.unsaved.items():
            for user in self.users.get(source, ()):
                self.solver.add_row({self.computed(user): 1, column: -1}, 0)
        for value, column in self.uncached.items():
            self._add_uses(value, column)

    def _users_of_values(self) -> dict[int, list[int]]:
        users: dict[int, list[int]] = defaultdict(list)
        for index, saved in enumerate(self._problem.profile.values):
            # What is dropped and never asked for is never computed, and uses nothing.
            is_asked_for = index in self._relaxation.column_of and index in self._relaxation.requests
            if index in self._relaxation.unsaved or is_asked_for:
                for source in set(saved.inputs):
                    users[source].append(index)
        return dict(users)

    def computed(self, value: int) -> int:
        """The column that says that ``value`` is computed."""
        if value in self.unsaved:
            return self.unsaved[value]
        return self.dropped[self._relaxation.column_of[value]]

    def _add_uses(self, value: int, uncached: int) -> None:
        """The price of forgetting ``value`` after every use."""
        values = self._problem.profile.values
        way = self._relaxation.on_the_way[value]
        self.solver.add_row({uncached: 1, self.computed(value): -1}, 0)
        if self._relaxation.units[self._relaxation.column_of[value]] not in self._problem.forgettable:
            self.solver.add_row({uncached: 1}, 0)
        sources: set[int] = set()
        for index in (value, *way):
            sources.update(values[index].inputs)
        for source in sources:
            if source in self.uncached and values[source].inputs:  # one never rests on another
                self.solver.add_row({uncached: 1, self.uncached[source]: 1}, 1)
        if value not in self._relaxation.requests:
            return
        price = self.cost_per_second * sum(map(self._problem.profile.seconds_again, (value, *way)))
        self.solver.add_cost(uncached, price * (len(self._relaxation.requests[value]) - 1))
        for user in self.users.get(value, ()):
            self.solver.add_row({uncached: 1, self.computed(user): 1, self.solver.add_column(price): -1}, 1)

    def choice(self, values: np.ndarray) -> Choice:
        """What a solution has chosen; integers come back as numbers near 0 or 1."""
        units = self._relaxation.units
        uncached = {value for value, column in self.uncached.items() if values[column] > 0.5}
        return Choice(
            frozenset(unit for unit, column in zip(units, self.dropped, strict=True) if values[column] > 0.5),
            frozenset(units[self._relaxation.column_of[value]] for value in uncached),
        )


class _Returns:
    """Which values are there although backward asks for them later: they were computed for others; see the note.

    Args:
        problem: What can be dropped.
        columns: What the solver decides on.
    """

    def __init__(self, problem: "Problem", columns: _Columns) -> None:
        self._relaxation = problem.relaxation
        self._columns = columns
        self._num_values = len(problem.profile.values)
        requested = columns.uncached.keys() & self._relaxation.requests.keys()
        self._first_requests = sorted((self._relaxation.requests[value][0].event, value) for value in requested)
        self._requested_again = [value for value in requested if len(self._relaxation.requests[value]) > 1]

    def between_requests(self, event: int) -> list[int]:
        """The values that autograd has asked for before ``event``, asks for again after it, and does not use at it."""
        found = []
        for value in self._requested_again:
            requests = self._relaxation.requests[value]
            is_between = requests[0].event <= event <= requests[-1].event
            if not is_between:
                continue
            # While autograd uses it, it is there by the row's own account already.
            if not any(start <= event < stop for start, stop in self._relaxation.in_use(value)):
                found.append(value)
        return found

    def back_by(self, event: int, dropped: frozenset[int]) -> frozenset[int]:
        """The values that ``event`` finds computed although they are asked for later, and the next to be asked for."""
        later = bisect_right(self._first_requests, (event, self._num_values))
        following = [value for _, value in self._first_requests[later:]]
        computed = self._relaxation.computed_by(event, dropped)
        return frozenset(following[:_MOST_VALUES]) | (computed & frozenset(following))

    def there(self, event: int, back: frozenset[int]) -> dict[int, int]:
        """The column, for each value of ``back``, that says whether it is there; see the note."""
        columns = self._columns
        solver = columns.solver
        computed = dict[int, int]()
        there = dict[int, int]()
        for value in sorted(back | self._unsaved_after(back), reverse=True):  # what is computed from it comes first
            users = [user for user in columns.users.get(value, ()) if user in computed or self._is_asked(user, event)]
            of_users = dict.fromkeys(computed.get(user, columns.computed(user)) for user in users)
            if not of_users:
                continue
            # Computed with the only one that is computed from it: the same column serves for both.
            if value in columns.unsaved and len(of_users) == 1:
                computed[value] = next(iter(of_users))
                continue
            computed[value] = solver.add_column()
            for column in of_users:
                if value in columns.unsaved:
                    solver.add_row({column: 1, computed[value]: -1}, 0)
                else:
                    solver.add_row({column: 1, columns.computed(value): 1, computed[value]: -1}, 1)
            if value in back:
                there[value] = solver.add_column()
                solver.add_row({computed[value]: 1, columns.uncached[value]: -1, there[value]: -1}, 0)
        return there

    def _is_asked(self, user: int, event: int) -> bool:
        return user in self._columns.uncached and self._relaxation.requests[user][0].event <= event

    def _unsaved_after(self, back: frozenset[int]) -> set[int]:
        """What is not saved and is computed from ``back`` before anything that is saved."""
        columns = self._columns
        stack = list(back)
        found = set[int]()
        while stack:
            new = {user for user in columns.users.get(stack.pop(), ()) if user in columns.unsaved} - found
            found |= new
            stack += new
        return found


class MilpModel:
    """The choices within a budget, the cheapest first.

    Args:
        problem: What can be dropped.
        budget: Bytes.

    Attributes:
        least: Seconds that no choice within the budget goes below; infinite if there is no such choice.

    Raises:
        UnsupportedError: HiGHS is not installed.
    """

    def __init__(self, problem: "Problem", budget: int) -> None:
        self._columns = _Columns(problem)
        self._returns = _Returns(problem, self._columns)
        self._solver = self._columns.solver
        self._problem = problem
        self._relaxation = problem.relaxation
        self._peak_bytes = max(1, problem.profile.peak)
        self._budget = budget
        self._proves = True  # whether all rows hold for every choice, so that the solver's bound is one of every choice
        self._most_work = min(_MOST_WORK, max(_LEAST_WORK, _MOST_WORK * self._peak_bytes / _LARGE))
        if len(self._relaxation.units) <= _FEW:
            self._most_work = _MOST_WORK  # which few units never take
        self.least: float = least_seconds(self._relaxation, budget)
        self._back_at: dict[int, frozenset[int]] = {}  # event -> what may have come back there, as far as it was added
        self._row_at: dict[int, tuple[int, dict[int, float]]] = {}  # event -> its last row, and the terms of it

    def solve(self) -> list[Choice]:
        """Choices; only the last may be within the budget. Raises ``least`` on the way."""
        found: list[Choice] = []
        if not self._relax():
            return found
        first_terms = self._solver.terms
        rounds = _ROUNDS if len(self._relaxation.units) > _FEW else _ROUNDS_OF_FEW
        for _ in range(rounds):
            if self._solver.work >= self._most_work or self._solver.terms - first_terms > _MOST_LEARNED:
                break
            answer = self._run(integer=True)
            if not len(answer.values):
                break
            found.append(self._columns.choice(answer.values))
            if self._problem.forecast(found[-1]).peak <= self._budget:
                break
            self._learn(found[-1], answer.activity)
        return found

    def _relax(self) -> bool:
        """Adds events until the linear program has none above the budget; whether it has a solution."""
        shares = np.zeros(len(self._columns.dropped))
        while True:
            crossed = local_maxima(self._relaxation.curve_of(shares), self._budget * (1 + _TOLERANCE), _MOST_EVENTS)
            new = [event for event in crossed if event not in self._row_at]
            if not new:
                return True
            for event in new:
                self._add_event(event)
            answer = self._run(integer=False)
            if not len(answer.values):
                return False
            # The solution of these events may be above the budget at others.
            shares = answer.values[self._columns.dropped]

    def _run(self, *, integer: bool) -> Answer:
        answer = self._solver.run(integer=integer, work=self._most_work - self._solver.work)
        # Within the tolerance of the solver its bound may be above the true one.
        if self._proves:
            self.least = max(self.least, answer.least / self._columns.cost_per_second * (1 - _TOLERANCE))
        return answer

    def _learn(self, choice: Choice, activity: np.ndarray) -> None:
        """Adds what was missing at the events where ``choice`` exceeds the budget."""
        dropped = self._problem.values_of(choice.dropped)
        curve = self._problem.timeline(choice).astype(np.float64)
        crossed = local_maxima(curve, self._budget, _MOST_EVENTS)
        news = False
        for event in crossed:
            known = self._back_at.get(event)
            back = self._returns.back_by(event, dropped) | (known or frozenset())
            if back != known:
                self._add_event(event, back)
                news = True
        # What comes back explains the excess, and holds for every choice: the solver is asked
        # again before anything narrower is added.
        if news:
            return
        for event in crossed:
            self._forbid(event, curve[event], choice, dropped)
        if len(self._relaxation.units) <= _FEW:
            return
        # The missing bytes as they are hold for this choice only: from here on the bound proves
        # nothing.
        self._proves = False
        for event in crossed:
            row, terms = self._row_at[event]
            unexplained = (curve[event] - self._relaxation.curve[event]) / self._peak_bytes - float(activity[row])
            self._solver.add_row(terms, self._room_share(event) - unexplained)

    def _forbid(self, event: int, bytes_there: float, choice: Choice, dropped: frozenset[int]) -> None:
        """Forbids the part of ``choice`` that explains the bytes at ``event``; the row is ``part`` of the note."""
        units = self._relaxation.units
        freed = self._relaxation.freed(event) / self._peak_bytes
        part = self._part_of(event, dropped)
        terms = dict[int, float]()
        room = (self._budget - bytes_there) / self._peak_bytes
        # M of the note: by this much the row is relaxed for each decision of the part that differs. It is the excess,
        # and all that the units beside the part can add to it.
        relaxing = (bytes_there - self._budget) / self._peak_bytes
        for at, unit in enumerate(units):
            if at not in part:
                is_dropped = unit in choice.dropped
                terms[self._columns.dropped[at]] = -float(freed[at])
                room -= float(freed[at]) * is_dropped
                added_by_change = freed[at] if is_dropped else -freed[at]
                relaxing += max(0.0, float(added_by_change))
        for at in part:
            decided = [(self._columns.dropped[at], units[at] in choice.dropped)]
            values = self._problem.units[units[at]].values
            decided += [(self._columns.uncached[value], units[at] in choice.uncached) for value in values]
            for column, is_so in decided:  # each that differs counts one
                terms[column] = relaxing if is_so else -relaxing
                room += relaxing * is_so
        self._solver.add_row(terms, room)

    def _part_of(self, event: int, dropped: frozenset[int]) -> set[int]:
        """The columns of what is computed by ``event``, of what is dropped beside it, and of what is kept around."""
        stack = list(self._relaxation.computed_by(event, dropped))
        seen = set(stack)
        part = set[int]()
        while stack:
            value = stack.pop()
            at = self._relaxation.column_of.get(value)
            if at is not None:
                part.add(at)
            if at is not None and value not in dropped:
                continue
            beside = {*self._problem.profile.values[value].inputs, *self._columns.users.get(value, ())}
            if at is not None:
                beside |= set(self._problem.units[self._relaxation.units[at]].values)
            stack += beside - seen
            seen |= beside
        return part

    def _room_share(self, event: int) -> float:
        """What the budget leaves at ``event`` if all is kept, as a share of the peak; negative where it is exceeded."""
        return float(self._budget - self._relaxation.curve[event]) / self._peak_bytes

    def _add_event(self, event: int, back: frozenset[int] | None = None) -> None:
        """What is there at ``event`` fits; with what may have been computed early for others, where that is given."""
        freed = self._relaxation.freed(event) / self._peak_bytes
        terms = {self._columns.dropped[at]: -float(freed[at]) for at in np.nonzero(freed)[0].tolist()}
        if back is not None:
            self._back_at[event] = back
            for value in self._returns.between_requests(event):
                drop = self._columns.computed(value)
                share = self._share_of_peak(value)
                terms[drop] = terms.get(drop, 0.0) + share
                terms[self._columns.uncached[value]] = -share
            for value, column in self._returns.there(event, back).items():
                terms[column] = self._share_of_peak(value)
        self._row_at[event] = self._solver.add_row(terms, self._room_share(event)), terms

    def _share_of_peak(self, value: int) -> float:
        return self._problem.profile.values[value].num_bytes / self._peak_bytes


def milp_choices(problem: "Problem", budget: int) -> list[Choice]:
    """Solutions of the program, and ``problem.proved`` for this budget.

    Raises:
        UnsupportedError: HiGHS is not installed.
    """
    program = MilpModel(problem, budget)
    found = program.solve()
    problem.proved[budget] = program.least
    return found
