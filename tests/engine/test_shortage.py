"""Memory that runs out while the engine serves: the same replies in smaller rounds, or a clear error; never others."""

import dataclasses

import pytest

from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import Finished, Request, Sampling
from isobit.engine.shortage import REMEMBERED_SECONDS, Shortage, fewer_rows
from tests.engine.listening import prompt, reply, together
from tests.short_memory import every, larger_than, never, only, short_device_memory, short_memory

SETTINGS = EngineSettings(context=300, device="cpu", parallel=3, segment_rows=150, prompt_cache_gib=0.05)
MOST_PROMPT = 200


@pytest.fixture(scope="module")
def engine(test_checkpoint):
    engine = Engine(test_checkpoint, SETTINGS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def requests(engine):
    """A long prompt, a repetitive one that is drafted, one with logprobs."""
    repeated = prompt(engine, 12, 8) * 5
    return [
        Request(prompt(engine, MOST_PROMPT), 8, Sampling(seed=3), keep_rows=(90,)),
        Request(repeated, 12, Sampling(temperature=0.0)),
        Request(prompt(engine, 20, 6), 6, Sampling(seed=9), logprobs=2),
    ]


@pytest.fixture(scope="module")
def expected(engine, requests):
    return [reply(engine, request)[0] for request in requests]


@pytest.fixture(autouse=True)
def forgetful(engine):
    """Each test begins with nothing kept and nothing remembered."""
    engine.rounds.cache.evict_all()
    engine.rounds.shortage = Shortage()
    yield
    assert engine.rounds.state.free_slots == engine.budget.lanes


def is_right(finished: Finished, undisturbed: Finished) -> bool:
    """Whether a reply is the undisturbed one, or an error that says so."""
    if finished.error is not None:
        assert finished.error_code == "out_of_memory" or "send the request again" in finished.error
        assert undisturbed.tokens[: len(finished.tokens)] == finished.tokens
        return False
    assert finished.tokens == undisturbed.tokens
    assert finished.logits_hash == undisturbed.logits_hash
    return True


def test_wherever_memory_runs_out_once_every_reply_is_the_same(engine, requests, expected):
    with short_memory() as allocations:
        together(engine, requests)
        total = allocations.count
        assert total > 500
        for number in range(1, total, 1 + total // 12):
            engine.rounds.cache.evict_all()
            engine.rounds.shortage = Shortage()
            allocations.count, allocations.fails = 0, only(number)
            finished = together(engine, requests)
            assert all(is_right(*pair) for pair in zip(finished, expected, strict=True)), [f.error for f in finished]
        assert allocations.failures >= 10


@pytest.mark.parametrize("step", [400, 130, 40, 13])
def test_however_often_memory_runs_out_no_reply_is_another(engine, requests, expected, step):
    with short_memory(every(step)) as allocations:
        finished = together(engine, requests)
        allocations.fails = never
        right = [is_right(*pair) for pair in zip(finished, expected, strict=True)]
        assert allocations.failures
        assert all(right) or step <= 130
        assert all(is_right(*pair) for pair in zip(together(engine, requests), expected, strict=True))


def test_a_segment_that_is_too_large_shrinks_and_the_reply_says_so(engine, expected):
    request = Request(prompt(engine, MOST_PROMPT), 8, Sampling(seed=3), reuse=False)
    with short_memory() as allocations:
        sizes = []
        allocations.fails = lambda number, nbytes: sizes.append(nbytes) or False
        reply(engine, request)
        allocations.fails = larger_than(max(sizes) * 3 // 4)
        finished = reply(engine, request)[0]
        assert is_right(finished, expected[0])
        assert finished.segment_rows == 75
        assert finished.notice == "prompt segments of 75 rows, not 150: memory ran out in a larger one"
        failures = allocations.failures
        again = reply(engine, dataclasses.replace(request, max_tokens=2))[0]
        assert (again.segment_rows, again.notice) == (75, finished.notice)
        assert allocations.failures == failures


def test_where_not_even_a_row_fits_the_request_ends_with_the_numbers_and_others_are_served(engine, requests, expected):
    with short_memory(larger_than(300)):
        failed = reply(engine, requests[0])[0]
    assert (failed.reason, failed.error_code, failed.tokens) == ("error", "out_of_memory", ())
    assert "GiB free" in failed.error
    assert "one row of this request needs up to" in failed.error
    assert "--parallel" in failed.error
    assert all(is_right(*pair) for pair in zip(together(engine, requests), expected, strict=True))


def test_a_lane_goes_on_beside_one_that_has_to_end(engine, requests, expected, monkeypatch):
    inputs, victim = type(engine.model)._inputs, requests[0].tokens[0]
    assert all(request.tokens[0] != victim for request in requests[1:])

    def short(model, state, plan, *others):
        if any(segment.stream.rows == 0 and segment.tokens[0] == victim for segment in plan.segments):
            raise MemoryError("no room")
        return inputs(model, state, plan, *others)

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "_inputs", short)
        first, *others = together(engine, requests)
    assert first.error_code == "out_of_memory"
    assert all(is_right(*pair) for pair in zip(others, expected[1:], strict=True))


def test_what_was_too_large_is_tried_again_after_a_while():
    now = [0.0]
    shortage = Shortage(lambda: now[0])
    assert (shortage.rows, shortage.apart) == (None, False)
    shortage.limit_rows(64)
    shortage.part()
    now[0] = REMEMBERED_SECONDS - 1
    assert (shortage.rows, shortage.apart) == (64, True)
    now[0] += 1
    assert (shortage.rows, shortage.apart) == (None, False)


def test_segments_are_halved_down_to_the_batched_pass_and_then_to_one_row():
    sizes = [8192]
    while sizes[-1] > 1:
        sizes.append(fewer_rows(sizes[-1]))
    assert sizes == [8192, 4096, 2048, 1024, 512, 256, 128, 64, 1]
    assert fewer_rows(100) == 64


def graphs_of_own_memory():
    """Stand-ins for CUDA graphs, whose replays allocate nothing."""
    from isobit.cuda import memory
    from tests.cuda.test_graphs import RerunGraphs

    allocate, zeros = memory._allocate, memory.zeros

    class Graphs(RerunGraphs):
        def capture(self, launch):
            rerun, outputs = super().capture(launch)

            def launch_again():
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(memory, "_allocate", allocate)
                    patch.setattr(memory, "zeros", zeros)
                    return launch()

            rerun.launch = launch_again
            return rerun, outputs

    return Graphs()


@pytest.fixture
def device_engine(emulated_cuda, test_checkpoint):
    """An engine whose forwards become graphs, on the emulator those of a stand-in."""
    from isobit.cuda import memory
    from isobit.cuda.graphs import GraphPasses

    settings = EngineSettings(context=100, device="cuda", parallel=2, segment_rows=4, prompt_cache_gib=0.01)
    engine = Engine(test_checkpoint, settings)
    if memory.is_emulated():
        engine.model.ops.passes = GraphPasses(graphs_of_own_memory())
    yield engine
    engine.close()


def start_over(engine: Engine) -> None:
    """Nothing is kept, remembered or captured."""
    engine.rounds.cache.evict_all()
    engine.rounds.shortage = Shortage()
    engine.model.ops.passes.release()


def test_on_the_device_too(device_engine):
    request = Request(prompt(device_engine, 5), 2, Sampling(seed=3), logprobs=1)
    undisturbed = reply(device_engine, request)[0]
    with short_device_memory() as allocations:
        start_over(device_engine)
        assert is_right(reply(device_engine, request)[0], undisturbed)
        total = allocations.count
        assert total > 100
        for fails in (every(2 * total // 3), only(30)):
            start_over(device_engine)
            allocations.count, allocations.failures, allocations.fails = 0, 0, fails
            assert is_right(reply(device_engine, request)[0], undisturbed)
            assert allocations.failures


def test_a_forward_that_there_is_no_memory_to_capture_changes_no_reply(device_engine, monkeypatch, caplog):
    # The third forward of three is captured.
    request = Request(prompt(device_engine, 1), 3, Sampling(seed=3), draft=False)
    undisturbed = reply(device_engine, request)[0]
    start_over(device_engine)
    passes = device_engine.model.ops.passes
    capture = passes._graphs.capture
    with short_device_memory() as allocations, monkeypatch.context() as patch:

        def capture_short(launch):
            allocations.count, allocations.fails = 0, only(20)
            try:
                return capture(launch)
            finally:
                allocations.fails = never

        patch.setattr(passes._graphs, "capture", capture_short)
        assert is_right(reply(device_engine, request)[0], undisturbed)
        assert allocations.failures == 1
    assert "no memory to capture a forward" in caplog.text
    assert not passes._captured
    device_engine.rounds.cache.evict_all()
    assert is_right(reply(device_engine, request)[0], undisturbed)
    assert passes._captured
