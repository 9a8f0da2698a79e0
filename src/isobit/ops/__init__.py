"""The row contract: every step of the model, with the bytes of a row depending on that row alone."""

import importlib
from types import SimpleNamespace
from typing import Any

from isobit.kernels import check_compiler, configure

configure()

import numba  # noqa: E402

check_compiler()

OP_FOLDERS = (
    "linear",
    "embedding",
    "norm",
    "gated_residual",
    "delta_rule",
    "sparse_attention",
    "experts",
    "ngram_embedding",
    "sample",
    "rows",
)

DEVICES = ("cpu", "cuda")

Ops = Any  # the namespace of op functions that docs/architecture.md lists


def load_ops(device: str) -> Ops:
    """The op functions of a device kind, as one namespace; raises ValueError for a device that has none."""
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not available: expected one of {', '.join(DEVICES)}")
    functions: dict[str, Any] = {"device": device_kind(device), "family": device}
    for folder in OP_FOLDERS:
        module = importlib.import_module(f"isobit.ops.{folder}.{device}")
        functions.update({name: getattr(module, name) for name in module.__all__})
    return SimpleNamespace(passes=_passes(device), copies=_copies(device), **functions)


def device_kind(device: str) -> str:
    """The device kind that replies depend on: "cpu", or a GPU's compute capability, such as "cuda-9.0"."""
    if device == "cpu":
        return device
    from isobit.cuda.memory import architecture

    return "cuda-{}.{}".format(*architecture())


def _passes(device: str) -> Any:
    if device == "cpu":
        from isobit.ops.replay import TapePasses

        return TapePasses()
    from isobit.cuda.graphs import GraphPasses

    return GraphPasses()


def _copies(device: str) -> Any:
    if device == "cpu":
        from isobit.ops.copies import Copies

        return Copies()
    from isobit.cuda.copies import StreamCopies

    return StreamCopies()


def import_contracts(device: str = "cpu") -> None:
    """Import the device's contract module of every op folder, so that each registers itself."""
    for folder in OP_FOLDERS:
        importlib.import_module(f"isobit.ops.{folder}.{'contract' if device == 'cpu' else device + '_contract'}")


_most_threads: int = getattr(numba.config, "NUMBA_NUM_THREADS")  # noqa: B009
_threads = _most_threads


def threads() -> int:
    """How many threads CPU kernels use."""
    return _threads


def set_threads(count: int) -> None:
    """Use `count` threads in CPU kernels (1 to the number of cores that Numba sees); never changes a bit."""
    global _threads
    _threads = max(1, min(count, _most_threads))
