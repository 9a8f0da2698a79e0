"""Small forwards as CUDA graphs: the first of its shapes runs step by step, the second is captured, then replayed."""

import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import torch

from isobit.cuda import memory
from isobit.cuda.batch import packed_arrays, place_at
from isobit.errors import ran_out
from isobit.ops.passes import MOST_REPLAYED_ROWS, Before, Body, PassInputs, nothing, shapes, with_wide_pages

MOST_GRAPHS = 128
ALIGNMENT = 16
log = logging.getLogger(__name__)


class GraphPasses:
    """Runs forwards of few rows as graphs. Replaying changes no byte: the same kernels run on the same inputs."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self._pool: Any = None
        self._busy = Lock()
        self.enabled = True

    def run(
        self, key: Hashable, inputs: PassInputs, body: Body, replayable: bool = True, before: Before = nothing
    ) -> Any:
        """As `isobit.ops.passes.EagerPasses.run` says."""
        if not (replayable and self.enabled and not memory.is_emulated() and is_small(inputs)):
            before()
            return body(inputs)
        # Engines that share a model come from threads of their own.
        with self._busy:
            return self._in_graph(key, with_wide_pages(inputs), body, before)

    def release(self) -> None:
        """Give up all graphs and their memory; forwards to come are captured anew."""
        with self._busy:
            if self._captured:
                torch.cuda.synchronize()
            self._captured.clear()
            self._seen.clear()
            self._pool = None

    def _in_graph(self, key: Hashable, inputs: PassInputs, body: Body, before: Before) -> Any:
        """The outputs from a graph, which is captured the second time that its shapes come."""
        full_key = (key, shapes(inputs))
        captured = self._captured.get(full_key)
        if captured is None:
            if full_key not in self._seen:
                self._note(full_key)
                before()
                return body(inputs)
            captured = self._captured_if_room(full_key, inputs, body)
            if captured is None:
                before()
                return body(inputs)
        self._captured.move_to_end(full_key)
        captured.inputs.fill(inputs)
        captured.graph.replay()
        return captured.outputs

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
        return None

    def _capture(self, key: Hashable, inputs: PassInputs, body: Body) -> "Captured":
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = StaticInputs(inputs)
        static.fill(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = body(static.given)
        while len(self._captured) >= MOST_GRAPHS:
            self._captured.popitem(last=False)
        self._captured[key] = Captured(graph, static, outputs)
        del self._seen[key]
        return self._captured[key]


class StaticInputs:
    """A forward's inputs at fixed places on the device: what comes from the host goes there in one copy."""

    def __init__(self, inputs: PassInputs):
        pieces = host_pieces(inputs)
        self._offsets, size = {}, 0
        for name, piece in pieces.items():
            self._offsets[name] = size
            size += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
        self._staging = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(max(size, 1), dtype=torch.uint8, device=memory.device())
        self._copied = torch.cuda.Event()
        self._tensors = {name: x.clone() for name, x in inputs.arrays.items() if isinstance(x, torch.Tensor)}
        batches = {name: replace(batch) for name, batch in inputs.batches.items()}
        for name, batch in batches.items():
            place_at(batch, self._part(f"batch {name}", pieces[f"batch {name}"]))
        arrays: dict[str, Any] = dict(self._tensors)
        for name, x in inputs.arrays.items():
            if name not in arrays:
                arrays[name] = self._part(name, pieces[name]).view(x.shape)
        self.given = PassInputs(batches, arrays)

    def _part(self, name: str, piece: np.ndarray) -> torch.Tensor:
        part = self._device[self._offsets[name] : self._offsets[name] + piece.nbytes]
        return part.view(torch.from_numpy(piece[:0]).dtype)

    def fill(self, inputs: PassInputs) -> None:
        """Put the inputs in their places, in the stream's order."""
        # The last copy may still read the staging memory.
        self._copied.synchronize()
        staging = self._staging.numpy()
        for name, piece in host_pieces(inputs).items():
            staging[self._offsets[name] : self._offsets[name] + piece.nbytes] = piece.view(np.uint8)
        self._device.copy_(self._staging, non_blocking=True)
        self._copied.record()
        for name, tensor in self._tensors.items():
            tensor.copy_(inputs.arrays[name])


@dataclass(frozen=True)
class Captured:
    """A captured forward: its graph, where its inputs go and where its outputs lie."""

    graph: torch.cuda.CUDAGraph
    inputs: StaticInputs
    outputs: Any


def host_pieces(inputs: PassInputs) -> dict[str, np.ndarray]:
    """What comes from the host, each flat: the batches' arrays, and arrays that lie there."""
    pieces = {f"batch {name}": packed_arrays(batch) for name, batch in inputs.batches.items()}
    for name, x in inputs.arrays.items():
        if not isinstance(x, torch.Tensor):
            pieces[name] = np.ascontiguousarray(x).reshape(-1)
    return pieces


def is_small(inputs: PassInputs) -> bool:
    """Whether every batch has few rows."""
    return all(batch.rows <= MOST_REPLAYED_ROWS for batch in inputs.batches.values())
