"""A reply's tokens as text: whole characters, cut before the first stop string."""

from collections.abc import Iterable
from typing import Protocol


class CharacterDecoder(Protocol):
    """What turns tokens into text without splitting a character (`checkpoint.tokenizer.Detokenizer`)."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class StopMatcher:
    """Finds the first of some strings in text that arrives in pieces.

    Text is held back while it may be the beginning of a stop string. Of several matches the one that ends first cuts
    the text, and of those that end together the longest.
    """

    def __init__(self, stops: Iterable[str] = ()):
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain to be before any stop string; "" after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        ends = [(self._held.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in self._held]
        if ends:
            end, _, self.matched = min(ends)
            released, self._held = self._held[: end - len(self.matched)], ""
            return released
        kept = self._longest_beginning()
        released, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return released

    def finish(self) -> str:
        """What is still held back, at the end of the text."""
        released, self._held = self._held, ""
        return released

    def _longest_beginning(self) -> int:
        longest = min(len(self._held), len(self._stops[0]) - 1)
        for length in range(longest, 0, -1):
            tail = self._held[len(self._held) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class ReplyText:
    """The text of one reply, token by token. A stop token has no text."""

    def __init__(self, decoder: CharacterDecoder, stop_tokens: frozenset[int], stops: Iterable[str] = ()):
        self._decoder = decoder
        self._stop_tokens = stop_tokens
        self._stops = StopMatcher(stops)
        self.decoded = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.matched is not None

    def push(self, token: int) -> str:
        """The text that this token releases."""
        if token in self._stop_tokens:
            return ""
        text = self._decoder.push(token)
        self.decoded += len(text)
        return self._stops.push(text)

    def finish(self) -> str:
        """The rest of the text, once the last token is in."""
        if self.stopped:
            return ""
        text = self._stops.push(self._decoder.finish())
        return text if self.stopped else text + self._stops.finish()
