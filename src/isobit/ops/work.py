"""How a kernel's work is divided among threads: by its size alone, and never so that a bit depends on it."""

from numba import njit

from isobit.ops import threads

SERIAL_WORK = 16384  # elements that one core finishes in about the time that waking the others takes


def parts(elements: int) -> int:
    """Into how many parts to cut a kernel that touches so many elements."""
    return threads() if elements > SERIAL_WORK else 1


def run_split(kernel, parallel_kernel, elements: int, count: int, *arguments) -> None:
    """Run `kernel(*arguments, 0, count)`, or its parallel form over parts of `count` where the work is worth it."""
    pieces = parts(elements)
    if pieces == 1:
        kernel(*arguments, 0, count)
    else:
        parallel_kernel(*arguments, count, pieces)


@njit(forceinline=True, nogil=True, error_model="numpy")
def part_start(part, total_parts, count):
    """Where part `part` of `count` items begins; part `total_parts` begins at the end."""
    return part * count // total_parts
