"""The floating-point environment: whatever a caller's thread has, isobit computes in the default one."""

import ctypes
import platform

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.request import Request, Sampling
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.ops import environment, load_ops
from isobit.ops.linear import team
from isobit.ops.work import _pool, forced_pieces, run_split
from tests.engine.listening import reply

DOWNWARD = {"x86_64": 0x400, "AMD64": 0x400, "aarch64": 0x800000, "arm64": 0x800000}.get(platform.machine())
FLUSH_SUBNORMALS, CONTROL_AT = 0x8040, slice(28, 32)  # of x86-64's SSE unit, in glibc's fenv_t
NEAREST_THIRD = np.float32(0.33333334)


def third() -> np.float32:
    return np.float32(1) / np.float32(3)


def smallest_halved() -> float:
    return float(np.float32(2**-126) / np.float32(2))


@pytest.fixture
def rounding_down():
    if DOWNWARD is None or environment._get is None:
        pytest.skip("needs a C library with fenv.h, and its constants for this processor")
    own = ctypes.create_string_buffer(environment.ENVIRONMENT_BYTES)
    environment._get(own)
    ctypes.CDLL(None).fesetround(DOWNWARD)
    yield
    environment._set(own)


@pytest.fixture
def flushing():
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs x86-64 and glibc")
    own = ctypes.create_string_buffer(environment.ENVIRONMENT_BYTES)
    environment._get(own)
    changed = bytearray(own.raw)
    control = int.from_bytes(changed[CONTROL_AT], "little") | FLUSH_SUBNORMALS
    changed[CONTROL_AT] = control.to_bytes(4, "little")
    environment._set(ctypes.create_string_buffer(bytes(changed), len(changed)))
    yield
    environment._set(own)


def test_the_default_rounds_to_nearest_for_a_while(rounding_down):
    before = third()
    assert before < NEAREST_THIRD
    with environment.default():
        assert third() == NEAREST_THIRD
    assert third() == before
    environment.set_default()
    assert third() == NEAREST_THIRD


def test_the_default_keeps_subnormals(flushing):
    assert smallest_halved() == 0
    with environment.default():
        assert smallest_halved() == 2**-127
    assert smallest_halved() == 0
    environment.set_default()
    assert smallest_halved() == 2**-127


def test_the_pools_threads_have_the_default(rounding_down):
    _pool.cache_clear()
    found = {}

    def note(first, last):
        found[first] = third()

    with forced_pieces(2):
        run_split(note, 0, 2)
    assert found[0] < NEAREST_THIRD
    assert found[1] == NEAREST_THIRD
    _pool.cache_clear()


def test_the_teams_members_have_the_default(rounding_down, monkeypatch):
    found = []

    def note_and_end(board, watches):
        found.append(third())
        raise SystemExit

    monkeypatch.setattr(team, "help_others", note_and_end)
    with pytest.raises(SystemExit):
        team.Team()._attend()
    assert found == [NEAREST_THIRD]


def of_engine(folder) -> tuple[str, ...]:
    engine = Engine(folder, EngineSettings(context=128, parallel=1))
    try:
        finished = reply(engine, Request(tuple(range(1, 90)), 8, Sampling(seed=2), reuse=False))[0]
        return finished.token_hash, finished.logits_hash
    finally:
        engine.close()


def of_model(folder) -> tuple[str, ...]:
    model = load_model(Checkpoint(folder), load_ops("cpu"), context=128)
    state = model.new_state(1, 2)
    stream = state.open()
    logits = [model.forward(state, Plan((Segment(stream, (token,) * 9),))).tobytes().hex() for token in range(1, 10)]
    return (*logits, state.digest(stream))


@pytest.mark.parametrize("computed", [of_engine, of_model])
def test_replies_do_not_depend_on_the_callers_environment(computed, test_checkpoint, request):
    expected = computed(test_checkpoint)
    request.getfixturevalue("rounding_down")
    assert computed(test_checkpoint) == expected
