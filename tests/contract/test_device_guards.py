"""Guarded device memory sees what a kernel writes beside its outputs, and changed inputs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.contract.guards import GuardedMemory  # noqa: E402
from isobit.cuda import memory  # noqa: E402
from isobit.ops import device_cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")


def test_sound_writes_are_no_problem():
    with GuardedMemory(0x7F) as guarded:
        memory.empty((3, 5)).fill_(1)
        device_cases.on_device(np.ones(4, np.float32))
    assert guarded.problem() is None


def test_new_arrays_are_poisoned():
    with GuardedMemory(0xFF):
        assert torch.isnan(memory.empty((7,))).all()


@pytest.mark.parametrize(("element", "where"), [(-1, "before"), (15, "past the end of")])
def test_a_write_beside_an_array_is_seen(element, where):
    with GuardedMemory(0x7F) as guarded:
        array = memory.empty((3, 5))
        torch.as_strided(array, (1,), (1,), array.storage_offset() + element).fill_(0)
    assert where in str(guarded.problem())


def test_a_changed_input_is_seen():
    with GuardedMemory(0x7F) as guarded:
        device_cases.on_device(np.zeros(4, np.float32))[3] = -0.0
    assert "changed an input" in str(guarded.problem())
