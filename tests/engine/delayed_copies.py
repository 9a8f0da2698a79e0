"""Copies that run as late as a device may run them: what is not waited for, or not kept alive, comes out wrong."""

from collections import deque
from types import SimpleNamespace

import numpy as np

from isobit.ops.copies import ARRIVED, Arrival, Copies

POISON = 0xEE


class Queue:
    """Copies in order, of which the first `done` have run."""

    def __init__(self):
        self.done = self.begun = 0
        self._waiting = deque()

    def begin(self, run, sources=None) -> "DelayedArrival":
        self._waiting.append((run, sources))
        self.begun += 1
        return DelayedArrival(self, self.begun)

    def run(self, up_to: int) -> None:
        while self.done < up_to and self._waiting:
            run, sources = self._waiting[0]
            run()
            self._waiting.popleft()
            self.done += 1
            del run, sources


class DelayedArrival(Arrival):
    def __init__(self, queue: Queue, number: int):
        self.queue, self.number = queue, number

    def arrived(self) -> bool:
        return self.queue.done >= self.number

    def precede(self) -> None:
        self.queue.run(self.number)

    def wait(self) -> None:
        self.queue.run(self.number)


class DelayedCopies(Copies):
    """Runs copies only when they are waited for, or when `pass_time` says so. Arrays of whole numbers go at once."""

    def __init__(self, ops):
        self.ops = ops
        self.uploads, self.downloads = Queue(), Queue()
        self._blocks = []

    def pass_time(self, uploads: int, downloads: int) -> None:
        """Run so many of either."""
        self.downloads.run(self.downloads.done + downloads)
        self.uploads.run(self.uploads.done + uploads)

    def host_block(self, nbytes):
        self._blocks.append(np.full(nbytes, POISON, np.uint8))
        return self._blocks[-1]

    def upload(self, work, after=ARRIVED, sources=None) -> Arrival:
        written = []
        put_rows = self.ops.put_rows

        def put_later(x, indices, values):
            if x.dtype.kind == "i":
                put_rows(x, indices, values)
            else:
                written.append((x, list(indices), self._unowned(values)))

        def run():
            after.wait()
            for x, indices, values in written:
                put_rows(x, indices, values)

        self.ops.put_rows = put_later
        try:
            work()
        except BaseException:
            self.uploads.begin(run).wait()
            raise
        finally:
            self.ops.put_rows = put_rows
        return self.uploads.begin(run, sources)

    def download(self, arrays, places) -> Arrival:
        late = []
        for name, array in arrays.items():
            if array.dtype.kind == "i":
                np.copyto(places[name], array)
            else:
                places[name].view(np.uint8)[...] = POISON
                late.append((self._unowned(places[name]), array))
        return self.downloads.begin(lambda: [np.copyto(place, array) for place, array in late])

    def _unowned(self, array):
        """The same memory, not kept alive by this array, if it is of the blocks."""
        address = array.__array_interface__["data"][0]
        if not any(0 <= address - block.ctypes.data < block.nbytes for block in self._blocks):
            return array
        assert array.flags.c_contiguous
        described = {"shape": array.shape, "typestr": array.dtype.str, "data": (address, False), "version": 3}
        return np.asarray(SimpleNamespace(__array_interface__=described))


def delay_copies(pool_or_model) -> DelayedCopies:
    """Have a pool's, or a model's, copies run late."""
    copies = pool_or_model.ops.copies = DelayedCopies(pool_or_model.ops)
    return copies
