"""Forwards through recorded graphs, replayed by a stand-in for CUDA's or on a GPU: the same bytes as step by step.

The stand-in keeps what a graph has: recording runs no kernel, inputs and outputs lie at fixed places, and a replay
knows nothing but what those places hold.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from isobit.checkpoint.reader import Checkpoint  # noqa: E402
from isobit.cuda import graphs as graphs_module  # noqa: E402
from isobit.cuda import kernels, memory  # noqa: E402
from isobit.cuda.graphs import CudaGraphs, GraphPasses, NotBegunError  # noqa: E402
from isobit.model.drafting import propose_mtp  # noqa: E402
from isobit.model.load import load_model  # noqa: E402
from isobit.model.plan import Plan, Segment  # noqa: E402
from isobit.model.state import StatePool, Stream  # noqa: E402
from isobit.ops import load_ops  # noqa: E402
from isobit.ops.batch import PAGE_ROWS, Batch  # noqa: E402
from isobit.ops.passes import PassInputs  # noqa: E402
from isobit.ops.sample import Draw  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

STEPS = 16
STARTS = (PAGE_ROWS - 6, 3)  # rows before the first round, all zeros in the state


class RerunGraphs:
    """Graphs that run their steps again on the same inputs. replays, cuts: how many there were."""

    usable = True

    def __init__(self) -> None:
        self.replays = self.cuts = 0

    def capture(self, launch: Callable[[], Any]) -> tuple["Rerun", Any]:
        with launches_dropped():
            outputs = launch()
        poison(outputs)
        return Rerun(self, launch, outputs), outputs

    def release(self) -> None:
        """Nothing is kept."""

    def cut(self) -> None:
        self.cuts += 1

    def beside(self, launch: Callable[[], Any]) -> Callable[[], Any]:
        """As late as can be: what comes before the join must not need it."""
        return launch


class Rerun:
    def __init__(self, graphs: RerunGraphs, launch: Callable[[], Any], outputs: Any):
        self.graphs, self.launch, self.outputs = graphs, launch, outputs

    def replay(self) -> None:
        self.graphs.replays += 1
        for place, value in zip(self.outputs, self.launch(), strict=True):
            place.copy_(value)


@contextmanager
def launches_dropped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.Kernel, "__call__", lambda *arguments, **options: None)
        yield


def poison(outputs: Any) -> None:
    for output in outputs:
        output.view(-1).view(torch.uint8).fill_(0xFF)


class CountedCudaGraphs(CudaGraphs):
    """CUDA's own. replays, cuts: how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = self.cuts = 0

    def capture(self, launch: Callable[[], Any]) -> tuple[Any, Any]:
        pieces, outputs = super().capture(launch)
        return SimpleNamespace(replay=lambda: self.replay(pieces)), outputs

    def replay(self, pieces: Any) -> None:
        self.replays += 1
        pieces.replay()

    def cut(self) -> None:
        self.cuts += 1
        super().cut()


@pytest.fixture(params=["stand-in", "on a GPU"])
def graphs(request):
    if request.param == "stand-in":
        return RerunGraphs()
    request.getfixturevalue("real_gpu")
    return CountedCudaGraphs()


@pytest.fixture
def models(test_checkpoint, graphs):
    """The same model twice: step by step, and through graphs."""
    loaded = [load_model(Checkpoint(test_checkpoint), load_ops("cuda"), context=192) for _ in range(2)]
    loaded[0].ops.passes.enabled = False
    loaded[1].ops.passes = GraphPasses(graphs)
    return loaded


def test_replays_follow_the_tokens_positions_pages_slots_journals_and_draws(models, graphs):
    """Rounds of one or two lanes, rows or windows, past the ends of pages, with drafts now and then."""
    rng = np.random.default_rng(3)
    states = [model.new_state(slots=3, pages=12) for model in models]
    streams = [[a_stream(state, rows) for rows in STARTS] for state in states]
    for step in range(STEPS):
        lanes = [0, 1] if step % 3 == 0 else [step % 2]
        windows = [a_window(rng, step) for _ in lanes]
        depths = [int(rng.integers(1, 4)) for _ in lanes]
        draws = [a_draw(rng) for tokens, wanted, _ in windows for _ in range(len(tokens) if wanted == "all" else 1)]
        settled = [int(rng.integers(1, len(tokens) + 1)) for tokens, _, _ in windows]
        found = []
        for model, state, own in zip(models, states, streams, strict=True):
            plan = Plan(tuple(Segment(own[lane], *window) for lane, window in zip(lanes, windows, strict=True)))
            logits, drawn = model.draw(state, plan, draws)
            samples = model.ops.samples_to_host(drawn)
            for lane, (_, _, journaled), rows in zip(lanes, windows, settled, strict=True):
                if journaled:
                    state.settle(own[lane], rows)
            results = [model.ops.to_host(logits), *samples.arrays]
            if step % 4 == 3:
                drawn_like = draws[: len(lanes)]
                results.append(propose_mtp(model, state, [own[i] for i in lanes], [7] * len(lanes), depths, drawn_like))
            found.append([x.tobytes() if isinstance(x, np.ndarray) else x for x in results])
        assert found[0] == found[1]
        if step == STEPS // 2:
            move_to_another_slot(states, streams)
    assert [states[0].digest(s) for s in streams[0]] == [states[1].digest(s) for s in streams[1]]
    assert streams[0][0].rows > PAGE_ROWS
    assert graphs.replays > STEPS // 2
    assert graphs.cuts >= 1


def a_stream(state: StatePool, rows: int) -> Stream:
    stream = state.open()
    state.reserve(stream, rows)
    stream.rows = rows
    return stream


def a_window(rng: np.random.Generator, step: int) -> tuple[tuple[int, ...], str, bool]:
    """One row, or a journaled window."""
    count = 1 if step % 4 else 3
    return tuple(rng.integers(0, 300, count).tolist()), "all" if count == 3 else "last", count == 3


def a_draw(rng: np.random.Generator) -> Draw:
    temperature, top_k = float(rng.choice([0.0, 0.7, 1.0])), int(rng.choice([0, 5]))
    return Draw(temperature, top_k, 0.9, 0.01, seed=int(rng.integers(2**40)), position=int(rng.integers(1000)))


def move_to_another_slot(states, streams) -> None:
    """The first stream goes on from a kept state in the slot that was free."""
    for state, own in zip(states, streams, strict=True):
        kept = state.save(own[0])
        moved = state.restore(kept)
        state.drop(kept)
        state.close(own[0])
        own[0] = moved


def a_batch(pages: list[int]) -> Batch:
    one = np.ones(1, np.int32)
    return Batch(one, np.array([0, 1], np.int32), one, np.array([pages], np.int32))


def test_a_narrower_page_table_leaves_nothing_of_a_wider_one():
    passes = GraphPasses(RerunGraphs())
    for pages, expected in (([5, 6, 7, 8],) * 2, ([1, 2, 3, 4],) * 2, ([9, 9, 9], [9, 9, 9, 0])):
        given = passes.run("pages", PassInputs({"trunk": a_batch(pages)}), lambda x: (placed_pages(x),))
        assert given[0].tolist() == [expected]


def placed_pages(inputs: PassInputs) -> Any:
    from isobit.cuda.batch import placed

    return placed(inputs.batches["trunk"]).pages.clone()


def test_a_download_holds_what_the_tensor_held_then():
    for count in (3, memory.DOWNLOAD_BYTES):
        tensor = torch.arange(count, dtype=torch.float32, device=memory.device())
        sent = [memory.Download(tensor), memory.Download(tensor + 1)]
        tensor.zero_()
        later = memory.Download(tensor)
        assert later.result().tolist() == [0.0] * count
        assert [download.result()[-1] for download in sent] == [count - 1, count]


def test_the_memory_of_downloads_is_used_again_when_their_results_are_out(monkeypatch):
    waits: list[int] = []
    made: list[Any] = []

    def pinned(nbytes: int) -> Any:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    moment = SimpleNamespace(mark=lambda: None, wait=lambda: waits.append(1))
    monkeypatch.setattr(memory, "_emulated", False)
    monkeypatch.setattr(memory, "_free_slots", [])
    monkeypatch.setattr(memory, "Moment", lambda: moment)
    monkeypatch.setattr(memory, "pinned", pinned)
    first, second = memory.Download(torch.tensor([1, 2])), memory.Download(torch.tensor([3.0]))
    kept = first.result()
    third = memory.Download(torch.tensor([9, 9]))
    assert (kept.tolist(), second.result().tolist(), third.result().tolist()) == ([1, 2], [3.0], [9, 9])
    assert (len(made), len(waits)) == (2, 3)
    memory.Download(torch.zeros(memory.DOWNLOAD_BYTES)).result()
    assert len(memory._free_slots) == 2


class CudaStandIn:
    """What CudaGraphs calls of PyTorch; `done` lists captures and replays in their order."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.made = 0

    def new_graph(self) -> Any:
        self.made += 1
        number = self.made
        return SimpleNamespace(number=number, replay=lambda: self.done.append(("replay", number)))

    @contextmanager
    def capturing(self, graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self.done.append(("begin", graph.number))
        yield
        self.done.append(("end", graph.number))


def test_a_cut_ends_one_graph_and_begins_another_and_both_are_replayed(monkeypatch):
    cuda = CudaStandIn()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.new_graph)
    monkeypatch.setattr(torch.cuda, "graph", cuda.capturing)
    graphs = CudaGraphs()
    graphs.cut()

    def launch() -> str:
        cuda.done.append(("first half", 0))
        stranger = threading.Thread(target=graphs.cut)
        stranger.start()
        stranger.join()
        graphs.cut()
        cuda.done.append(("second half", 0))
        return "outputs"

    graph, outputs = graphs.capture(launch)
    assert outputs == "outputs"
    assert cuda.done == [("begin", 1), ("first half", 0), ("end", 1), ("begin", 2), ("second half", 0), ("end", 2)]
    graph.replay()
    assert cuda.done[-2:] == [("replay", 1), ("replay", 2)]
    graphs.cut()
    assert cuda.made == 2


class StreamStandIn:
    def __init__(self, name: str, done: list[str]):
        self.name, self.done = name, done

    def record_event(self) -> str:
        self.done.append(f"{self.name} records")
        return f"{self.name}'s event"

    def wait_event(self, event: str) -> None:
        self.done.append(f"{self.name} waits for {event}")


@pytest.mark.parametrize("capturing", [True, False])
def test_what_runs_beside_begins_after_the_work_before_and_is_joined(monkeypatch, capturing):
    done: list[str] = []
    main, side, current = StreamStandIn("main", done), StreamStandIn("side", done), ["main"]

    @contextmanager
    def entered(stream: StreamStandIn) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    cuda = CudaStandIn()
    monkeypatch.setattr(graphs_module, "side_stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.new_graph)
    monkeypatch.setattr(torch.cuda, "graph", cuda.capturing)
    graphs = CudaGraphs()

    def launch() -> None:
        joined = graphs.beside(lambda: done.append(f"work on {current[-1]}") or "given")
        done.append(f"next on {current[-1]}")
        assert joined() == "given"

    if capturing:
        graphs.capture(launch)
        forked = ["main records", "side waits for main's event", "work on side", "side records"]
        assert done == [*forked, "next on main", "main waits for side's event"]
    else:
        launch()
        assert done == ["work on main", "next on main"]


class ShortGraphs(RerunGraphs):
    """Graphs that there is no memory for at the first capture. released: how often their memory was given back."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = self.released = 0

    def capture(self, launch: Callable[[], Any]) -> tuple[Rerun, Any]:
        self.captures += 1
        if self.captures == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return super().capture(launch)

    def release(self) -> None:
        self.released += 1


def test_a_forward_that_there_is_no_memory_to_capture_runs_step_by_step():
    passes = GraphPasses(ShortGraphs())
    befores = []

    def run(token: int) -> int:
        inputs = PassInputs({}, {"tokens": np.array([token], np.int32)})
        body = lambda given: (torch.as_tensor(given.array("tokens")) + 1,)  # noqa: E731
        return int(passes.run("key", inputs, body, before=lambda: befores.append(token))[0])

    assert [run(token) for token in range(6)] == [1, 2, 3, 4, 5, 6]
    # The third is the first of its shapes again; the fourth is captured, in other memory than what no graph holds.
    assert befores == [0, 1, 2]
    assert passes._graphs.released == 1
    passes.release()
    assert passes._graphs.released == 2
    assert [run(token) for token in range(3)] == [1, 2, 3]
    assert befores == [0, 1, 2, 0]


class ShortLaunches(RerunGraphs):
    """Graphs that there is no memory to launch when `fails` is set; `released` counts how often all were given up."""

    def __init__(self) -> None:
        super().__init__()
        self.fails, self.released = False, 0

    def capture(self, launch: Callable[[], Any]) -> tuple[Any, Any]:
        rerun, outputs = super().capture(launch)

        def replay() -> None:
            if self.fails:
                raise NotBegunError("CUDA error: out of memory")
            rerun.replay()

        return SimpleNamespace(replay=replay), outputs

    def release(self) -> None:
        self.released += 1


def test_a_forward_that_there_is_no_memory_to_launch_runs_step_by_step_with_the_same_bytes(test_checkpoint, caplog):
    model = load_model(Checkpoint(test_checkpoint), load_ops("cuda"), context=64)
    graphs = ShortLaunches()
    model.ops.passes = GraphPasses(graphs)
    state = model.new_state(slots=1, pages=2)

    def logits(short_at: int) -> list[bytes]:
        stream, found = state.open(), []
        for step in range(6):
            graphs.fails = step == short_at
            found.append(model.ops.to_host(model.forward(state, Plan((Segment(stream, (5 + step,)),)))).tobytes())
        found.append(state.digest(stream))
        state.close(stream)
        return found

    expected = logits(short_at=-1)
    # The first row has none for the MTP head, the second is the first with one.
    assert (graphs.replays, graphs.released) == (4, 0)
    assert logits(short_at=3) == expected
    assert caplog.messages == [
        "no memory to launch a captured forward (CUDA error: out of memory): it runs step by step"
    ]
    # The one after the failure is the first of its shapes again.
    assert (graphs.replays, graphs.released) == (4 + 3 + 1, 1)


@pytest.mark.parametrize(
    ("short", "outcome"), [({1: 1}, "done"), ({1: 2}, "not begun"), ({2: 1}, "done"), ({2: 2}, "lost")]
)
def test_a_launch_is_tried_again_when_unused_memory_is_given_back(monkeypatch, short, outcome):
    """short: how many launches of a graph, by its place, there is no memory for."""
    done: list[Any] = []

    class Graph:
        def __init__(self, place: int):
            self.place = place

        def replay(self) -> None:
            if short.get(self.place, 0):
                short[self.place] -= 1
                raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere")
            done.append(self.place)

    short = dict(short)
    monkeypatch.setattr(memory, "release", lambda: done.append("release"))
    pieces = graphs_module.Pieces("pool")
    pieces._graphs = [Graph(1), Graph(2)]
    if outcome == "done":
        pieces.replay()
        assert [step for step in done if step != "release"] == [1, 2]
    else:
        expected = NotBegunError if outcome == "not begun" else RuntimeError
        with pytest.raises(expected, match="out of memory"):
            pieces.replay()
        assert [step for step in done if step != "release"] == ([] if outcome == "not begun" else [1])
    assert done.count("release") == 1
