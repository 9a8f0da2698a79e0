"""Small forwards as CUDA graphs: the first of its shapes runs step by step, the second is captured, then replayed."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock, get_ident
from typing import Any, Protocol

import numpy as np
import torch

from isobit.cuda import memory
from isobit.cuda.batch import place_at
from isobit.errors import first_sentence, ran_out
from isobit.ops.passes import (
    MOST_REPLAYED_ROWS,
    Before,
    Body,
    PassInputs,
    T,
    arrays_of,
    nothing,
    shapes,
    with_wide_pages,
    write_batch,
)

MOST_GRAPHS = 128
ALIGNMENT = 16
log = logging.getLogger(__name__)


class Graph(Protocol):
    """What was launched once, to be launched again."""

    def replay(self) -> None:
        """Launch it, on what its inputs hold by then. NotBegunError where there is no memory to: nothing has run."""


class NotBegunError(Exception):
    """There was no memory to launch a graph; it has changed nothing."""


class Graphs(Protocol):
    """Makes graphs. usable: whether they can be had here."""

    @property
    def usable(self) -> bool: ...

    def capture(self, launch: Callable[[], Any]) -> tuple[Graph, Any]:
        """The graph of what `launch` launches, which is not run, and what it gives: where a replay leaves outputs."""

    def release(self) -> None:
        """Wait until no graph runs: all are given up, and those to come have memory of their own."""

    def cut(self) -> None:
        """Called by `launch`: the device may run what comes before while the host launches what follows."""

    def beside(self, launch: Callable[[], T]) -> Callable[[], T]:
        """Called by `launch`: as `isobit.ops.passes.EagerPasses.beside` says."""


class CudaGraphs:
    """CUDA graphs, which share their memory; of a capture with cuts one for each piece."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._under_way: Pieces | None = None

    @property
    def usable(self) -> bool:
        return not memory.is_emulated()

    def capture(self, launch: Callable[[], Any]) -> tuple[Graph, Any]:
        """As `Graphs.capture` says."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        pieces = self._under_way = Pieces(self._pool)
        try:
            with pieces:
                outputs = launch()
        finally:
            self._under_way = None
        return pieces, outputs

    def release(self) -> None:
        """As `Graphs.release` says."""
        torch.cuda.synchronize()
        self._pool = None

    def cut(self) -> None:
        """As `Graphs.cut` says; a thread that is not capturing changes nothing."""
        pieces = self._pieces_of_thread()
        if pieces is not None:
            pieces.cut()

    def beside(self, launch: Callable[[], T]) -> Callable[[], T]:
        """As `Graphs.beside` says: on a stream of its own; at once for a thread that is not capturing."""
        pieces = self._pieces_of_thread()
        if pieces is None:
            given = launch()
            return lambda: given
        return pieces.beside(launch)

    def _pieces_of_thread(self) -> "Pieces | None":
        """What this thread captures."""
        pieces = self._under_way
        return pieces if pieces is not None and pieces.thread == get_ident() else None


class Pieces:
    """CUDA graphs that are captured, and replayed, one after the other. thread: which captures them.

    What is launched beside the rest allocates on a stream of its own, and is to be waited for before a cut and the end.
    """

    def __init__(self, pool: Any) -> None:
        self.thread = get_ident()
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._unjoined: list[torch.cuda.Event] = []

    def __enter__(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        self._capturing = torch.cuda.graph(self._graphs[-1], pool=self._pool, capture_error_mode="thread_local")
        self._capturing.__enter__()

    def __exit__(self, *error: Any) -> None:
        # A capture that failed before a join would end in an error of its own.
        for done in self._unjoined:
            torch.cuda.current_stream().wait_event(done)
        self._unjoined.clear()
        self._capturing.__exit__(*error)

    def cut(self) -> None:
        """End a graph and begin the next."""
        self.__exit__(None, None, None)
        self.__enter__()

    def beside(self, launch: Callable[[], T]) -> Callable[[], T]:
        """Launch on the side stream what follows from the current one's work so far; what is given joins the two."""
        side, main = side_stream(), torch.cuda.current_stream()
        side.wait_event(main.record_event())
        with torch.cuda.stream(side):
            try:
                given = launch()
            finally:
                done = side.record_event()
                self._unjoined.append(done)

        def joined() -> T:
            main.wait_event(done)
            self._unjoined.remove(done)
            return given

        return joined

    def replay(self) -> None:
        """As `Graph.replay` says; where there is no memory for a later graph, its error."""
        first, *others = self._graphs
        try:
            launch(first)
        except Exception as error:
            if ran_out(error):
                raise NotBegunError(first_sentence(error)) from None
            raise
        for graph in others:
            launch(graph)


def launch(graph: torch.cuda.CUDAGraph) -> None:
    """Launch a graph; where there is no memory for it, once more when what PyTorch keeps unused is given back."""
    try:
        graph.replay()
        return
    except Exception as error:
        if not ran_out(error):
            raise
    memory.release()
    graph.replay()


@cache
def side_stream() -> torch.cuda.Stream:
    """Where graphs have what runs beside the rest."""
    return torch.cuda.Stream()


class GraphPasses:
    """Runs forwards of few rows as graphs. Replaying changes no byte: the same kernels run on the same inputs."""

    def __init__(self, graphs: Graphs | None = None) -> None:
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self._graphs = graphs or CudaGraphs()
        self._busy = Lock()
        self.enabled = True

    def run(
        self, key: Hashable, inputs: PassInputs, body: Body, replayable: bool = True, before: Before = nothing
    ) -> Any:
        """As `isobit.ops.passes.EagerPasses.run` says."""
        if not (replayable and self.enabled and self._graphs.usable and is_small(inputs)):
            before()
            return body(inputs)
        # Engines that share a model come from threads of their own.
        with self._busy:
            return self._in_graph(key, inputs, body, before)

    def cut(self) -> None:
        """As `isobit.ops.passes.EagerPasses.cut` says."""
        self._graphs.cut()

    def beside(self, launch: Callable[[], T]) -> Callable[[], T]:
        """As `isobit.ops.passes.EagerPasses.beside` says."""
        return self._graphs.beside(launch)

    def release(self) -> None:
        """Give up all graphs and their memory; forwards to come are captured anew."""
        with self._busy:
            self._give_up()

    def _in_graph(self, key: Hashable, inputs: PassInputs, body: Body, before: Before) -> Any:
        """The outputs from a graph, which is captured the second time that its shapes come."""
        full_key = (key, shapes(inputs))
        captured = self._captured.get(full_key)
        if captured is None:
            if full_key not in self._seen:
                self._note(full_key)
                before()
                return body(with_wide_pages(inputs))
            captured = self._captured_if_room(full_key, with_wide_pages(inputs), body)
            if captured is None:
                before()
                return body(with_wide_pages(inputs))
        self._captured.move_to_end(full_key)
        if replayed(captured, inputs):
            return captured.outputs
        del captured
        self._give_up()
        before()
        return body(with_wide_pages(inputs))

    def _give_up(self) -> None:
        if self._captured:
            self._graphs.release()
        self._captured.clear()
        self._seen.clear()

    def _note(self, key: Hashable) -> None:
        """Remember shapes, and forget those that did not come again: a key holds a state alive."""
        self._seen[key] = None
        if len(self._seen) > MOST_GRAPHS:
            self._seen.popitem(last=False)

    def _captured_if_room(self, key: Hashable, inputs: PassInputs, body: Body) -> "Captured | None":
        """A new graph, or None when there is no memory for it; nothing was computed then."""
        try:
            return self._capture(key, inputs, body)
        except Exception as error:
            if not ran_out(error) and not ran_out(error.__context__):
                raise
            log.warning("no memory to capture a forward: it runs step by step")
            self._seen.pop(key, None)
        if not self._captured:
            # PyTorch refuses to capture into memory that no graph holds any longer.
            self._graphs.release()
        return None

    def _capture(self, key: Hashable, inputs: PassInputs, body: Body) -> "Captured":
        static = StaticInputs(inputs)
        static.fill(inputs)
        graph, outputs = self._graphs.capture(lambda: body(static.given))
        while len(self._captured) >= MOST_GRAPHS:
            self._captured.popitem(last=False)
        self._captured[key] = Captured(graph, static, outputs)
        del self._seen[key]
        return self._captured[key]


class StaticInputs:
    """A forward's inputs at fixed places on the device: what comes from the host goes there in one copy.

    inputs: page tables as wide as they may become.
    """

    def __init__(self, inputs: PassInputs):
        self._tensors = {name: x.clone() for name, x in inputs.arrays.items() if isinstance(x, torch.Tensor)}
        host_arrays = {name: np.asarray(x) for name, x in inputs.arrays.items() if name not in self._tensors}
        layout = Layout()
        batch_places = {name: layout.add(arrays_of(batch)) for name, batch in inputs.batches.items()}
        array_places = {name: layout.add([array]) for name, array in host_arrays.items()}
        self._staging, self._copied = memory.pinned(layout.nbytes), memory.Moment()
        self._device = memory.zeros((layout.nbytes,), torch.uint8)
        staged = self._staging.numpy()
        self._batches = {name: places.on_host(staged) for name, places in batch_places.items()}
        self._arrays = {name: places.on_host(staged)[0] for name, places in array_places.items()}
        batches = {name: replace(batch) for name, batch in inputs.batches.items()}
        for name, batch in batches.items():
            place_at(batch, batch_places[name].on_device(self._device))
        on_device = {
            name: places.on_device(self._device).view(host_arrays[name].shape) for name, places in array_places.items()
        }
        self.given = PassInputs(batches, {**self._tensors, **on_device})

    def fill(self, inputs: PassInputs) -> None:
        """Put the inputs in their places, in the stream's order."""
        # The last copy may still read the staging memory.
        self._copied.wait()
        for name, batch in inputs.batches.items():
            write_batch(batch, self._batches[name])
        for name, place in self._arrays.items():
            place[...] = inputs.arrays[name]
        self._device.copy_(self._staging, non_blocking=True)
        self._copied.mark()
        for name, tensor in self._tensors.items():
            tensor.copy_(inputs.arrays[name])


class Layout:
    """Places for arrays in one block of memory. nbytes: what they take together."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, arrays: list[np.ndarray]) -> "Places":
        """Places for arrays of one dtype, end to end."""
        places = Places(self.nbytes, [array.shape for array in arrays], arrays[0].dtype)
        self.nbytes += -(-places.nbytes // ALIGNMENT) * ALIGNMENT
        return places


@dataclass(frozen=True)
class Places:
    """Arrays of some shapes end to end in a block of memory, from a byte on."""

    start: int
    shapes: list[tuple[int, ...]]
    dtype: np.dtype

    @property
    def counts(self) -> list[int]:
        """Elements of each array."""
        return [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]

    @property
    def nbytes(self) -> int:
        return sum(self.counts) * self.dtype.itemsize

    def on_host(self, block: np.ndarray) -> list[np.ndarray]:
        """The arrays in a block uint8 [n] on the host."""
        flat = block[self.start : self.start + self.nbytes].view(self.dtype)
        parts = np.split(flat, np.cumsum(self.counts)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def on_device(self, block: torch.Tensor) -> torch.Tensor:
        """All elements [n] in a block uint8 [n] on the device."""
        kind = torch.from_numpy(np.empty(0, self.dtype)).dtype
        return block[self.start : self.start + self.nbytes].view(kind)


@dataclass(frozen=True)
class Captured:
    """A captured forward: its graph, where its inputs go and where its outputs lie."""

    graph: Graph
    inputs: StaticInputs
    outputs: Any


def replayed(captured: Captured, inputs: PassInputs) -> bool:
    """Whether a captured forward was launched for inputs of its shapes; where there was no memory to, nothing ran."""
    captured.inputs.fill(inputs)
    try:
        captured.graph.replay()
    except NotBegunError as error:
        log.warning("no memory to launch a captured forward (%s): it runs step by step", error)
        return False
    return True


def is_small(inputs: PassInputs) -> bool:
    """Whether every batch has few rows."""
    return all(batch.rows <= MOST_REPLAYED_ROWS for batch in inputs.batches.values())
