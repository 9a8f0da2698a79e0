"""Rounds that write down what each request's rows gave."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from isobit.engine.lane import Lane, Ticket
from isobit.engine.request import FinishReason
from isobit.engine.rounds import Rounds
from isobit.ops.batch import Array


@dataclass
class Record:
    """What one request gave: SHA-256 of the logits that each token was drawn from, and of the final state."""

    tokens: list[int] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)
    state: str = ""


class WatchedRounds(Rounds):
    """Rounds whose requests' logits and final states are recorded, by ticket."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.records: dict[Ticket, Record] = {}

    def _take_token(self, lane: Lane, logits: Array, place: int, token: int, logprob: float) -> None:
        record = self.records.setdefault(lane.ticket, Record())
        record.tokens.append(token)
        record.logits.append(hashlib.sha256(np.ascontiguousarray(self._row(logits, place)).tobytes()).hexdigest())
        super()._take_token(lane, logits, place, token, logprob)

    def _retire(
        self, lane: Lane, reason: FinishReason, error: str | None = None, error_code: str | None = None
    ) -> None:
        if lane.stream is not None:
            self.records.setdefault(lane.ticket, Record()).state = self.state.digest(lane.stream)
        super()._retire(lane, reason, error, error_code)
