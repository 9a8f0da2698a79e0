"""Errors that are meant for people."""

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # in messages of PyTorch and its libraries


class IsobitError(Exception):
    """What was wrong, where, what was expected and what to do, in one line.

    The CLI prints the message and exits with code 2; the server answers with OpenAI's error body.
    """


class CheckpointError(IsobitError):
    """A checkpoint folder or one of its files cannot be used."""


class RequestError(IsobitError):
    """A request cannot be served as asked; `param` names the offending field, `code` is OpenAI's code, or None."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(IsobitError):
    """As many requests wait as the server lets wait; try again later."""


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number of things in words: 1 file, 2 files."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def ran_out(error: BaseException | None) -> bool:
    """Whether an error says that memory ran out, on the host or a device."""
    if isinstance(error, RuntimeError):
        return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def first_sentence(error: BaseException) -> str:
    """What an error says first; its kind where it says nothing."""
    lines = str(error).splitlines()
    return lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__
