"""Whether drafts save time: what a row costs, and guards that stop drafts that do not pay. They change no token."""

from collections import deque
from dataclasses import dataclass

import numpy as np

WINDOW = 64  # rounds that the cost of a row is measured over
PLAIN_ROUNDS = 2  # of the window that go without drafts, to know what they cost
ESTIMATE_EVERY = 8  # rounds between two estimates
TRIAL_ROUNDS = 4  # drafted rounds before a guard judges
JUDGED_ROUNDS = 32  # the latest drafted rounds that a guard judges by
FIRST_REST = 64  # rounds without drafts after the first stop; each further one is twice as long
LONGEST_REST = 2048


class RoundCosts:
    """What rounds cost by their rows, over the last `WINDOW` rounds of decoding lanes.

    row_seconds: what one more row costs, the median slope between rounds of unlike size (Theil and Sen's estimator,
    which slow outliers do not move); None until rounds of unlike size are known.
    """

    def __init__(self) -> None:
        self.row_seconds: float | None = None
        self._rounds: deque[tuple[int, bool, float]] = deque(maxlen=WINDOW)
        self._since_estimate = 0

    @property
    def needs_plain_round(self) -> bool:
        """Whether the next round should go without drafts, for comparison."""
        return sum(plain for _, plain, _ in self._rounds) < PLAIN_ROUNDS

    def observe(self, rows: int, lanes: int, seconds: float) -> None:
        """A round of `rows` rows for `lanes` decoding lanes took `seconds`; rounds with prompt rows do not count."""
        self._rounds.append((rows, rows == lanes, seconds))
        self._since_estimate += 1
        if self.row_seconds is None or self._since_estimate >= ESTIMATE_EVERY:
            self._since_estimate = 0
            self._estimate()

    def _estimate(self) -> None:
        rows, _, seconds = np.array(self._rounds, dtype=np.float64).T
        more_rows, more_seconds = np.subtract.outer(rows, rows), np.subtract.outer(seconds, seconds)
        unlike = more_rows > 0
        if unlike.any():
            self.row_seconds = max(float(np.median(more_seconds[unlike] / more_rows[unlike])), 0.0)


@dataclass
class DraftCounters:
    """What one source of drafts has done, for metrics: totals since the start, but `resting`, lanes that rest now."""

    drafts: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    stops: int = 0
    probes: int = 0
    resting: int = 0


class DraftGuard:
    """Decides for one lane and one source of drafts whether to draft: a function of what it is told, in order.

    Drafts are tried for TRIAL_ROUNDS; from then on they stop as soon as they have cost more seconds than they saved
    over the last JUDGED_ROUNDS drafted rounds. After a rest they are tried again; each rest is twice as long as the
    one before, until drafts pay for JUDGED_ROUNDS in a row.
    """

    def __init__(self, counters: DraftCounters | None = None) -> None:
        self.counters = counters if counters is not None else DraftCounters()
        self._judged: deque[float] = deque(maxlen=JUDGED_ROUNDS)
        self._rest = FIRST_REST
        self._rest_left = 0

    @property
    def open(self) -> bool:
        """Whether the lane may draft from this source in the next round."""
        return self._rest_left == 0

    def rest(self) -> None:
        """A decoding round of the lane went by; counts when the guard is closed."""
        if self._rest_left == 0:
            return
        self._rest_left -= 1
        if self._rest_left == 0:
            self.counters.resting -= 1
            self.counters.probes += 1

    def observe(self, saved: float, spent: float) -> None:
        """A drafted round: seconds that its accepted tokens would have taken otherwise, seconds that drafting took."""
        self._judged.append(saved - spent)
        if len(self._judged) < TRIAL_ROUNDS:
            return
        if sum(self._judged) < 0:
            self._stop()
        elif len(self._judged) == JUDGED_ROUNDS:
            self._rest = FIRST_REST

    def close(self) -> None:
        """The lane ends."""
        if self._rest_left:
            self.counters.resting -= 1
        self._rest_left = 0

    def _stop(self) -> None:
        self._judged.clear()
        self._rest_left = self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
        self.counters.stops += 1
        self.counters.resting += 1
