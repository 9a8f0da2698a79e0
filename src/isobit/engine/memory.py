"""How much memory the process may use, and how many rows a deep segment may have within it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 1 << 30
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Controller:
    """Where Linux tells of a control group's memory. mark: before the group's path in OWN_GROUP; folder: of all groups.

    limit, used: files of one number, or "max"; pages: lines of memory.stat with the pages of files.
    """

    mark: str
    folder: str
    limit: str
    used: str
    pages: tuple[str, str]


CONTROLLERS = (
    Controller("0::", ".", "memory.max", "memory.current", ("active_file", "inactive_file")),
    Controller(
        ":memory:",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


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
    """Bytes that the machine, or the container that the process runs in, can still give without swapping."""
    return min([psutil.virtual_memory().available, *left_in_groups()])


def left_in_groups(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> Iterator[int]:
    """What each of Linux's control groups around the process has left of its limit, if it has one, in bytes.

    Pages of files count as left, since they can go. Formats: the kernel's admin-guide, cgroup-v2 and cgroup-v1/memory;
    elsewhere there are none.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for controller in CONTROLLERS:
        top = groups / controller.folder
        for path in (line.partition(controller.mark)[2] for line in lines if controller.mark in line):
            inmost = top / path.lstrip("/")
            for folder in (inmost, *(parent for parent in inmost.parents if parent.is_relative_to(top))):
                yield from _left_in(folder, controller)


def _left_in(folder: Path, controller: Controller) -> Iterator[int]:
    """What a group has left, unless it has no limit or tells nothing."""
    try:
        limit, used = ((folder / file).read_text().strip() for file in (controller.limit, controller.used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        if limit != "max":
            yield max(0, int(limit) - int(used) + sum(int(stat[pages]) for pages in controller.pages))
    except (OSError, ValueError, KeyError):
        return


def gib(count: int) -> str:
    """Bytes as a figure for people."""
    return f"{count / GIB:.2f} GiB" if abs(count) >= GIB // 10 else f"{count / 2**20:.1f} MiB"
