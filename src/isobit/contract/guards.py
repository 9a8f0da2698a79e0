"""Memory that tells what was done to it: poisoned outputs and lent inputs between guard zones."""

import sys
from typing import Any

import numpy as np

from isobit.ops import buffers, cases

GUARD = 256  # bytes before and after each guarded array


class GuardedMemory:
    """A context in which ops get their outputs poisoned, and outputs, states and inputs stand between guard zones."""

    def __init__(self, poison: int):
        self.poison = poison
        self._given: list[tuple[np.ndarray, bytes]] = []
        self._memory: list[tuple[np.ndarray, np.ndarray]] = []
        # Without a CUDA contract loaded there is no device whose memory could be guarded.
        self._device = DeviceMemory(poison) if "isobit.ops.device_cases" in sys.modules else None

    def __enter__(self) -> "GuardedMemory":
        self._allocator = buffers.set_allocator(self._allocate)
        self._lender = cases.set_lender(self._lend)
        if self._device is not None:
            self._device.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        buffers.set_allocator(self._allocator)
        cases.set_lender(self._lender)
        if self._device is not None:
            self._device.__exit__()

    def _allocate(self, shape, dtype=np.float32) -> np.ndarray:
        shape = tuple(int(n) for n in np.atleast_1d(shape))
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(size + 2 * GUARD, self.poison, np.uint8)
        array = raw[GUARD : GUARD + size].view(dtype).reshape(shape)
        self._memory.append((raw, array))
        return array

    def _lend(self, array: np.ndarray) -> np.ndarray:
        lent = self._allocate(array.shape, array.dtype)
        lent[...] = array
        self._given.append((lent, lent.tobytes()))
        return lent

    def problem(self) -> str | None:
        """What was written that should not have been, in one line, or None."""
        for raw, array in self._memory:
            for zone, where in ((raw[:GUARD], "before"), (raw[GUARD + array.nbytes :], "past the end of")):
                if (zone != self.poison).any():
                    return f"wrote {where} an array of {array.dtype}{list(array.shape)}"
        for lent, before in self._given:
            if lent.tobytes() != before:
                return f"changed an input of {lent.dtype}{list(lent.shape)}"
        return None if self._device is None else self._device.problem()


class DeviceMemory:
    """The same for arrays of the CUDA device: `isobit.cuda.memory` gives poisoned arrays between guard zones."""

    def __init__(self, poison: int):
        self.poison = poison
        self._memory: list[tuple[Any, Any]] = []
        self._watched: list[tuple[Any, Any]] = []

    def __enter__(self) -> "DeviceMemory":
        from isobit.cuda import memory
        from isobit.ops import device_cases

        self._allocator = memory.set_allocator(self._allocate)
        self._watch = device_cases.set_watch(lambda tensor: self._watched.append((tensor, tensor.clone())))
        return self

    def __exit__(self, *_: object) -> None:
        from isobit.cuda import memory
        from isobit.ops import device_cases

        memory.set_allocator(self._allocator)
        device_cases.set_watch(self._watch)

    def _allocate(self, shape: Any, dtype: Any = None) -> Any:
        import torch

        from isobit.cuda import memory

        dtype = dtype or torch.float32
        size = int(np.prod([int(n) for n in shape], dtype=np.int64)) * dtype.itemsize
        raw = torch.full((size + 2 * GUARD,), self.poison, dtype=torch.uint8, device=memory.device())
        array = raw[GUARD : GUARD + size].view(dtype).view(tuple(shape))
        self._memory.append((raw, array))
        return array

    def problem(self) -> str | None:
        """What was written that should not have been, in one line, or None."""
        import torch

        zones = [
            (zone, f"wrote {where} a device array of {array.dtype}{list(array.shape)}")
            for raw, array in self._memory
            for zone, where in ((raw[:GUARD], "before"), (raw[GUARD + array.nbytes :], "past the end of"))
        ]
        changes = [
            (
                (tensor.reshape(-1).view(torch.uint8) != before.reshape(-1).view(torch.uint8)).any(),
                f"changed an input of {tensor.dtype}{list(tensor.shape)} on the device",
            )
            for tensor, before in self._watched
        ]
        # One wait for the device each, however many arrays there are.
        written = (torch.stack([zone for zone, _ in zones]) != self.poison).any(dim=1).tolist() if zones else []
        changed = torch.stack([flag for flag, _ in changes]).tolist() if changes else []
        found = [*zip(written, zones, strict=True), *zip(changed, changes, strict=True)]
        return next((text for wrong, (_, text) in found if wrong), None)
