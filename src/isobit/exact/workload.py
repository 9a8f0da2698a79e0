"""Random requests, and one of them computed as a cell says."""

import dataclasses
import queue
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isobit.engine.drafts import CopyProposer, Drafter, LaneDrafts, MtpProposer, Proposer
from isobit.engine.engine import Engine
from isobit.engine.lane import Ticket
from isobit.engine.request import Event, Finished, PrefillMode, PromptProgress, Request, Sampling
from isobit.engine.settings import EngineSettings
from isobit.errors import IsobitError
from isobit.exact.cells import Cell
from isobit.exact.watch import Record, WatchedRounds
from isobit.model.flash_next import FlashNext
from isobit.ops import set_threads

PREFILLS: dict[str, tuple[PrefillMode, float | None]] = {
    "serial": ("serial", None),
    "batched": ("batched", None),
    "deep small": ("deep", 0.13),
    "deep middle": ("deep", 0.4),
    "deep whole": ("deep", 1.0),
}
REPLY_TOKENS = 24
CACHE_GIB = 0.5
HOST_CACHE_GIB = 0.5
ORACLE = Cell("serial", "alone", "off", "fresh", "sampled", "1")


@dataclass(frozen=True)
class Subject:
    """A request to compute in many ways, and what it gave row by row, alone and undrafted."""

    request: Request
    expected: Record


class HalfRightProposer:
    """Proposes what the request is known to say, every second token or so wrong."""

    name = "half right"
    most = 5

    def __init__(self, subject: Subject, rng: np.random.Generator, vocabulary: int):
        self.subject, self.rng, self.vocabulary = subject, rng, vocabulary

    def propose(self, lanes: Sequence[LaneDrafts], depths: Sequence[int]) -> list[list[int]]:
        return [self._one(tuple(lane.tokens), depth) for lane, depth in zip(lanes, depths, strict=True)]

    def _one(self, tokens: tuple[int, ...], depth: int) -> list[int]:
        prompt = self.subject.request.tokens
        if tokens[: len(prompt)] != prompt:
            return []
        following = self.subject.expected.tokens[len(tokens) - len(prompt) :][:depth]
        right = self.rng.random(len(following)) < 0.7
        return [t if ok else (t + 1) % self.vocabulary for t, ok in zip(following, right, strict=True)]


class Laboratory:
    """One checkpoint, loaded once, with engines that share its weights. `context`: rows of a request at most."""

    def __init__(self, folder: str | Path, rng: np.random.Generator, context: int | None = None, device: str = "auto"):
        self.folder, self.device = folder, device
        self.rng = rng
        self.spill = tempfile.TemporaryDirectory(prefix="isobit-exact-")
        self.model: FlashNext | None = None
        self.engine = self._open(context)
        self.model, self.context = self.engine.model, self.engine.context

    def close(self) -> None:
        """Stop the engine and remove what was spilled."""
        self.engine.close()
        self.spill.cleanup()

    def can_run(self, cell: Cell) -> bool:
        """Whether the checkpoint has what the cell names: MTP drafts need an MTP head."""
        return cell.drafts not in ("mtp", "both") or self.engine.model.mtp is not None

    def subject(self, sampled: bool) -> Subject:
        """A new random request past the selection budget, and the oracle's record of it."""
        budget = self.engine.config.indexer_budget
        longest = self.context - REPLY_TOKENS - 1
        length = int(self.rng.integers(min(budget + 8, longest - 1), min(3 * budget + 64, longest)))
        request = Request(
            tokens=self._tokens(length),
            max_tokens=REPLY_TOKENS,
            sampling=Sampling(
                temperature=float(self.rng.uniform(0.5, 1.2)) if sampled else 0.0,
                top_k=int(self.rng.choice([0, 20])),
                top_p=float(self.rng.choice([1.0, 0.9])),
                min_p=float(self.rng.choice([0.0, 0.02])),
                seed=int(self.rng.integers(1 << 62)),
            ),
        )
        blank = Subject(request, Record())
        return Subject(request, self.run(blank, ORACLE))

    def run(self, subject: Subject, cell: Cell) -> Record:
        """Compute the subject's request as the cell says."""
        set_threads(int(cell.threads))
        request = self._prepared(subject.request, cell)
        self._draft_as(cell.drafts, subject)
        return self._submit(request, cell.company)

    def _prepared(self, request: Request, cell: Cell) -> Request:
        mode, share = PREFILLS[cell.prefill]
        rows = None if share is None else max(1, int(share * len(request.tokens)))
        request = dataclasses.replace(
            request, prefill=mode, segment_rows=rows, draft=cell.drafts != "off", reuse=cell.start != "fresh"
        )
        if cell.start != "fresh":
            self._keep_some(request)
        if cell.start == "from host memory":
            self.engine.rounds.cache.evict_all()
        if cell.start == "after restart":
            self.engine.close()
            self.engine = self._open(self.context)
        return request

    def _keep_some(self, request: Request) -> None:
        """Leave kept states of the request's prompt behind, at random rows of a prompt that then parts from it."""
        length = len(request.tokens)
        shared = int(self.rng.integers(length // 4, length))
        rows = sorted({int(row) for row in self.rng.integers(1, shared, 3)} | {shared})
        other = (*request.tokens[:shared], *self._tokens(4))
        self._finish(Request(other, 1, keep_rows=tuple(rows), draft=False))

    def _submit(self, request: Request, company: str) -> Record:
        strangers: list[queue.Queue[Finished]] = []

        def bring_strangers() -> None:
            for _ in range(3):
                tokens = self._tokens(int(self.rng.integers(1, len(request.tokens))))
                ended: queue.Queue[Finished] = queue.Queue()
                strangers.append(ended)
                self.engine.submit(Request(tokens, 6, reuse=False), only_the_end(ended))

        arrivals = [bring_strangers] if company == "strangers mid-prefill" else []

        def on_event(event: Event) -> None:
            if isinstance(event, PromptProgress) and arrivals:
                arrivals.pop()()

        if company == "among strangers":
            bring_strangers()
        record = self._finish(request, on_event)
        for ended in strangers:
            ended.get(timeout=600)
        return record

    def _finish(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Record:
        ended: queue.Queue[Finished] = queue.Queue()
        listeners = [only_the_end(ended), *([on_event] if on_event else [])]

        def listen(event: Event) -> None:
            for listener in listeners[::-1]:
                listener(event)

        ticket: Ticket = self.engine.submit(request, listen)
        finished = ended.get(timeout=3600)
        if finished.reason == "error":
            raise IsobitError(f"a request of the exactness matrix failed: {finished.error}")
        rounds = self.engine.rounds
        assert isinstance(rounds, WatchedRounds)
        return rounds.records.pop(ticket)

    def _draft_as(self, drafts: str, subject: Subject) -> None:
        rounds = self.engine.rounds
        sources: list[Proposer] = []
        if drafts in ("copies", "both"):
            sources.append(CopyProposer(shortest=2))
        if drafts in ("mtp", "both") and self.engine.model.mtp is not None:
            sources.append(MtpProposer(self.engine.model, rounds.state, 3))
        if drafts == "half right":
            sources.append(HalfRightProposer(subject, self.rng, self.engine.config.vocab_size))
        rounds.drafter = Drafter(sources)

    def _tokens(self, count: int) -> tuple[int, ...]:
        """Random ids with repetitions, so that copies are proposed, and end tokens among them."""
        tokens = self.rng.integers(0, self.engine.config.vocab_size, count)
        if count > 16:
            tokens[count // 2 :] = np.resize(tokens[: max(count // 3, 1)], count - count // 2)
        ends = self.engine.config.eos_token_ids
        if ends:
            tokens[self.rng.integers(0, count, max(count // 20, 1))] = ends[0]
        return tuple(tokens.tolist())

    def _open(self, context: int | None) -> Engine:
        settings = EngineSettings(
            context=context,
            device=self.device,
            parallel=4,
            decode_share=32,
            prompt_cache_gib=CACHE_GIB,
            host_cache_gib=HOST_CACHE_GIB,
            spill_dir=self.spill.name,
        )
        return Engine(self.folder, settings, rounds=WatchedRounds, model=self.model)


def only_the_end(ended: "queue.Queue[Finished]") -> Callable[[Event], None]:
    """A listener that passes on how a request ended."""
    return lambda event: ended.put(event) if isinstance(event, Finished) else None
