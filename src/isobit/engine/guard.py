"""Whether drafts save time: what rounds cost, and guards that stop drafts that do not pay. They change no token."""

from collections import defaultdict, deque
from dataclasses import dataclass

REMEMBERED = 12  # rounds of one kind that tell what such a round costs
FIRST_ROUNDS = 1  # of a kind, which tell nothing: the device may prepare for those to come
TELLING_ROUNDS = 3  # with drafts, of one kind, before they are judged by what they take
FIRST_PLAIN = 1  # rounds without drafts before the first with some, to compare with
PLAIN_EVERY = 48  # rounds with drafts after which one goes without, to compare anew
TRIAL_ROUNDS = 8  # drafted rounds after which drafts must pay
TRIAL_LOSS = 2.0  # tokens that a trial may cost before that
LATER_TRIAL_LOSS = 0.75  # if the trial before it has failed
JUDGED_ROUNDS = 32  # the latest drafted rounds that a guard judges by
FIRST_REST = 64  # rounds without drafts after the first stop; each further one is twice as long
LONGEST_REST = 2048
LONGEST_FIRST_REST = 96  # of a new lane, whose text may be of another kind than the last one's


class RoundCosts:
    """What rounds with so many decoding lanes and so many rows take, in seconds; the proposing of drafts counts.

    It is the lower quartile, which other work on the machine moves least, after FIRST_ROUNDS of the kind.
    """

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, int], int] = defaultdict(int)
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._drafted_rounds: dict[int, int] = defaultdict(int)

    def needs_plain_round(self, lanes: int) -> bool:
        """Whether the next round of so many lanes should go without drafts, for comparison."""
        return len(self._seconds[lanes, lanes]) < FIRST_PLAIN or self._drafted_rounds[lanes] >= PLAIN_EVERY

    def observe(self, lanes: int, rows: int, seconds: float) -> None:
        """A round took `seconds`; rounds with prompt rows do not count."""
        self._rounds[lanes, rows] += 1
        if self._rounds[lanes, rows] > FIRST_ROUNDS:
            self._seconds[lanes, rows].append(seconds)
        self._drafted_rounds[lanes] = self._drafted_rounds[lanes] + 1 if rows > lanes else 0

    def typical(self, lanes: int, rows: int) -> float | None:
        """What such a round costs, None if there was none."""
        seconds = sorted(self._seconds[lanes, rows])
        return seconds[len(seconds) // 4] if seconds else None

    def lost_tokens(self, lanes: int, rows: int) -> float | None:
        """Tokens that rounds without drafts give in the time that such a round takes longer; None if unknown."""
        drafted, plain = self.typical(lanes, rows), self.typical(lanes, lanes)
        if drafted is None or not plain or (rows > lanes and len(self._seconds[lanes, rows]) < TELLING_ROUNDS):
            return None
        return (drafted - plain) * lanes / plain


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

    Drafts stop when, over the last JUDGED_ROUNDS drafted rounds, they cost more tokens than were accepted: more by
    TRIAL_LOSS in the first TRIAL_ROUNDS, which are a trial. After a rest there is another trial, which may cost less;
    each rest is twice as long as the one before, until drafts have paid for JUDGED_ROUNDS in a row.

    after: the rests (see `rests`) of the lane that ended last; a new one goes on with them, so that requests which
    follow each other do not each have a trial to lose.
    """

    def __init__(self, counters: DraftCounters | None = None, after: tuple[int, int] | None = None) -> None:
        self.counters = counters if counters is not None else DraftCounters()
        self._judged: deque[float] = deque(maxlen=JUDGED_ROUNDS)
        self._rest, left = after if after is not None else (FIRST_REST, 0)
        self._rest_left = min(left, LONGEST_FIRST_REST)
        self.counters.resting += self._rest_left > 0

    @property
    def rests(self) -> tuple[int, int]:
        """Rounds that its next rest takes, and rounds that are left of the present one."""
        return self._rest, self._rest_left

    @property
    def open(self) -> bool:
        """Whether the lane may draft from this source in the next round."""
        return self._rest_left == 0

    def rest(self) -> None:
        """A decoding round of the lane went by without a draft from this source."""
        if self._rest_left == 0:
            return
        self._rest_left -= 1
        if self._rest_left == 0:
            self.counters.resting -= 1
            self.counters.probes += 1

    def observe(self, accepted: int, lost: float) -> None:
        """A drafted round: its accepted tokens, and the tokens that drafting cost (see `RoundCosts.lost_tokens`)."""
        self._judged.append(accepted - lost)
        trial_loss = TRIAL_LOSS if self._rest == FIRST_REST else LATER_TRIAL_LOSS
        allowed = trial_loss if len(self._judged) < TRIAL_ROUNDS else 0.0
        if sum(self._judged) < -allowed:
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
