"""How much memory the process may use, and how many rows a deep segment may have within it."""

import psutil

GIB = 1 << 30


def anonymous_resident() -> int:
    """Bytes of resident anonymous memory of this process (mapped checkpoint files do not count)."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return psutil.Process().memory_info().rss


def available() -> int:
    """Bytes that the machine can still give without swapping."""
    return psutil.virtual_memory().available


def gib(count: int) -> str:
    """Bytes as a figure for people."""
    return f"{count / GIB:.2f} GiB" if abs(count) >= GIB // 10 else f"{count / 2**20:.1f} MiB"
