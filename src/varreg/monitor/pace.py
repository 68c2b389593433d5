"""Decide when to record: every n-th step, or as often as a share of the time allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from varreg.errors import VarregError
from varreg.thresholds import MONITOR_SHARE

_TICK = time.get_clock_info("perf_counter").resolution


class Pace:
    """Decides at which steps to record. Without `every`, a record is due when time allows it: all
    records so far, and one more that takes as long as the last, may take `share` of the time that
    has passed.

    The first record does not count, since caches are cold.

    >>> now = 0.0
    >>> pace = Pace(None, share=0.01, clock=lambda: now)
    >>> recorded = []
    >>> for step in range(1, 300):  # a step takes 10 ms, a record 3 ms
    ...     now += 0.010
    ...     if pace.is_due(step):
    ...         recorded.append(step)
    ...         now += 0.003
    ...         steps_until_next = pace.rest(step, cost=0.003)
    >>> recorded
    [1, 2, 61, 91, 121, 151, 181, 211, 241, 271]
    """

    def __init__(
        self,
        every: int | None,
        share: float = MONITOR_SHARE,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or every < 1
        ):
            raise VarregError(
                "varreg: every must be a positive whole number, in steps, or None for as often as "
                f"{share:.0%} of the time allows; got {every!r}."
            )
        self.fixed, self.share, self.clock = every, share, clock
        self.every = every or 1
        """The number of steps between the last two records."""
        self.records = 0
        self.spent = 0.0
        """The seconds that all records but the first took."""
        self._last = 0  # the step of the last record
        self._due: int | None = None  # the step of the next record, if all processes agreed on one
        self._ended = self._origin = self._until = clock()

    def is_due(self, step: int) -> bool:
        """Return whether to record this step."""
        if self.fixed is not None:
            return step % self.fixed == 0 or self.records == 0
        if self._due is not None:
            return step >= self._due
        return self.clock() >= self._until

    def rest(self, step: int, cost: float) -> int:
        """Plan the next record after one that took `cost` seconds. Return the estimated number of
        steps until then.
        """
        now, steps = self.clock(), max(1, step - self._last)
        per_step = max((now - cost - self._ended) / steps, _TICK)
        self.records += 1
        if self.records == 1:
            self._origin = self._until = now
        else:
            self.every = self.fixed or steps
            self.spent += cost
            # count the next record in advance, so that the share is never exceeded
            due = (self.spent + cost) / self.share - (now - self._origin)
            pause = max(cost * (1 / self.share - 1), due)
            self._until = now + pause
        self._last, self._ended = step, now
        return max(1, math.ceil((self._until - now) / per_step))

    def agree(self, step: int) -> None:
        """Record this step next, whatever the clock says. All processes must agree on it."""
        self._due = step

    @property
    def spent_share(self) -> float:
        """Return the share of records in the time since the first record."""
        passed = self.clock() - self._origin
        return self.spent / passed if passed > 0 else 0.0
