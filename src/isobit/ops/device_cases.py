"""What the CUDA contracts of the ops share: rows and state pools on the device and back."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from isobit.cuda import memory
from isobit.ops.cases import given
from isobit.ops.contract import Case, Outputs


def _unwatched(tensor: Any) -> None:
    pass


_watch: Callable[[Any], None] = _unwatched


def on_device(array: np.ndarray) -> Any:
    """An input of a call, on the device. The contract may lend it, and then looks whether it was changed."""
    tensor = memory.to_device(given(array))
    _watch(tensor)
    return tensor


def set_watch(watch: Callable[[Any], None]) -> Callable[[Any], None]:
    """Replace what sees the inputs on the device; returns the previous. For the contract's hygiene gate only."""
    global _watch
    previous, _watch = _watch, watch
    return previous


def to_host(outputs: dict[str, Any]) -> Outputs:
    """Output tensors as NumPy arrays; halves as their bits."""
    return {name: _host(value) for name, value in outputs.items()}


def _host(value: Any) -> np.ndarray:
    array = value if isinstance(value, np.ndarray) else memory.to_host(value)
    return array.view(np.uint16) if array.dtype == np.float16 else array


class HasState(Protocol):
    """An op whose calls leave something behind."""

    def device_state(self, case: Case, state: Any) -> dict[str, Any]:
        """The live tensors of the state (NumPy arrays where a pool stays on the host)."""


class DeviceState:
    """Base of stateful CUDA contracts: they say where their state lies, `device_state`; the rest follows."""

    def final_state(self: HasState, case: Case, state: Any) -> Outputs:
        return to_host(self.device_state(case, state))

    def put_state(self: HasState, case: Case, state: Any, arrays: Outputs) -> None:
        """Write the arrays that `final_state` gave, changed, back to the device: for planted defects."""
        for name, live in self.device_state(case, state).items():
            if isinstance(live, np.ndarray):
                live[...] = arrays[name]
            else:
                live.view(torch_view(live)).copy_(memory.to_device(_same_kind(arrays[name])))


def torch_view(tensor: Any) -> Any:
    """The dtype under which a tensor's bytes are copied: halves as int16."""
    import torch

    return torch.int16 if tensor.dtype == torch.float16 else tensor.dtype


def _same_kind(array: np.ndarray) -> np.ndarray:
    return array.view(np.int16) if array.dtype == np.uint16 else array


def overrun(tensor: Any, nbytes: int) -> None:
    """Change `nbytes` bytes behind a tensor, where the memory it lies in goes so far: for planted defects."""
    import torch

    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    end = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    raw[end : end + nbytes] ^= 0xFF
