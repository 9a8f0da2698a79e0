"""Kernels by source, name and macros, launched on PyTorch's current stream; or on the emulator, for tests.

`load("ops/linear/few_rows.cu", "few_rows", BITS=3)(grid, block, x, rows)`: tensors are passed as pointers, None as the
null pointer, int as int32 or int64, float as float32, `Double` as float64, `Fields` as a struct.

In a graph a kernel that is launched `early` may begin before the kernel before it has ended (programmatic dependent
launch), as soon as that one lets it: once its inputs are there, or at once where the next kernel reads constants only.
Until its own `await_inputs()` a kernel reads nothing but what came as `Constant` or `Settled`, and it writes nothing.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from struct import Struct, calcsize
from typing import Any, Protocol

import torch

from isobit.cuda import compile as compiler
from isobit.cuda import memory
from isobit.cuda.errors import DeviceMemoryError, KernelError

Size = int | tuple[int, ...]
UNASKED_SHARED_BYTES = 48 << 10
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
EARLY_IN_GRAPHS = True  # whether kernels begin early there; bench/cuda compares
EARLY_FROM = (9, 0)  # compute capability
ALL_SHARED_PERCENT = 100
ARGUMENT_BYTES = 8
POINTER, INTEGER, FLOAT, DOUBLE = "Q", "q", "f4x", "d"  # as `struct` has them; the driver reads as much as it needs


class Double:
    """A float64 argument."""

    def __init__(self, value: float):
        self.value = value


class Constant:
    """A tensor, or None, that no kernel writes once a model is loaded: what an early kernel may read at once."""

    def __init__(self, tensor: Any):
        self.tensor = tensor


class Settled(Constant):
    """A tensor that neither the kernel before nor those beside it write: what an early kernel may read at once."""


class Fields:
    """A struct of 8 bytes a field: tensors, None and ints (int64), each as it would be passed alone."""

    def __init__(self, *values: Any):
        self.values = values


class Launcher(Protocol):
    """A compiled kernel of the GPU or of the emulator."""

    def __call__(self, grid: Size, block: Size, *arguments: Any, shared: int = 0, early: bool = False) -> None: ...


class Kernel:
    """One kernel, compiled at its first launch."""

    def __init__(self, source: str, name: str, defines: dict[str, int]):
        self.source, self.name, self.defines = source, name, defines
        self._launchers: dict[str, Launcher] = {}

    def __call__(self, grid: Size, block: Size, *arguments: Any, shared: int = 0, early: bool = False) -> None:
        """Launch `grid` blocks of `block` threads with `shared` bytes of dynamic shared memory.

        early: the kernel awaits its inputs itself, in every block.
        """
        self.launcher()(grid, block, *arguments, shared=shared, early=early)

    def launcher(self) -> Launcher:
        """Compile the kernel if this device has not yet; raises DeviceError."""
        kind = _rehearsed or ("emulator" if memory.is_emulated() else "gpu")
        if kind not in self._launchers:
            self._launchers[kind] = _launcher(self, kind)
        return self._launchers[kind]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.defines.items())})"


@cache
def _kernel(source: str, name: str, defines: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel(source, name, dict(defines))


def load(source: str, name: str, **defines: int) -> Kernel:
    """The kernel `name` of a source below the package, with these macros; the same object for the same ones."""
    return _kernel(source, name, tuple(sorted(defines.items())))


class Arguments:
    """Room for a kernel's arguments of certain kinds, and their addresses; 8 bytes for each, and each of a struct.

    kinds: of each argument, what `struct` calls it. address: of void*[n], which point to the arguments.
    """

    def __init__(self, kinds: tuple[str, ...]):
        layout = Struct("<" + "".join(kinds))
        values = layout.size // ARGUMENT_BYTES
        self._room = (ctypes.c_uint64 * (values + len(kinds)))()
        self._pack_into = layout.pack_into
        at = ctypes.addressof(self._room)
        self.address = at + layout.size
        for index, kind in enumerate(kinds):
            self._room[values + index] = at
            at += calcsize("<" + kind)

    def hold(self, values: list[Any]) -> None:
        """These are the arguments from here on."""
        self._pack_into(self._room, 0, *values)


_free_arguments: dict[tuple[str, ...], list[Arguments]] = {}


def take_arguments(given: tuple[Any, ...]) -> tuple[Arguments, list[Arguments]]:
    """(What holds the arguments of a launch, the list to append it to once the kernel is launched)."""
    kinds: list[str] = []
    values: list[Any] = []
    for argument in given:
        kind = type(argument)
        if kind is Constant or kind is Settled:
            argument = argument.tensor
            kind = type(argument)
        # Most are these two, and there are many launches to a forward.
        if kind is torch.Tensor:
            kinds.append(POINTER)
            values.append(argument.data_ptr())
        elif kind is int:
            kinds.append(INTEGER)
            values.append(argument)
        else:
            _append(argument, kinds, values)
    key = tuple(kinds)
    free = _free_arguments.get(key)
    if free is None:
        free = _free_arguments.setdefault(key, [])
    # Other threads launch, too: to take one of a list is a single step.
    try:
        taken = free.pop()
    except IndexError:
        taken = Arguments(key)
    taken.hold(values)
    return taken, free


def _append(argument: Any, kinds: list[str], values: list[Any]) -> None:
    """Add an argument's kind and what is stored of it."""
    if argument is None:
        kinds.append(POINTER)
        values.append(0)
    elif isinstance(argument, torch.Tensor):
        kinds.append(POINTER)
        values.append(argument.data_ptr())
    elif isinstance(argument, int):
        kinds.append(INTEGER)
        values.append(argument)
    elif isinstance(argument, float):
        kinds.append(FLOAT)
        values.append(argument)
    elif isinstance(argument, Fields):
        kinds.append(f"{len(argument.values)}{INTEGER}")
        values.extend(map(_field, argument.values))
    elif isinstance(argument, Double):
        kinds.append(DOUBLE)
        values.append(argument.value)
    else:
        raise TypeError(f"a kernel takes no {type(argument).__name__}")


def _field(given: Any) -> int:
    argument = given.tensor if isinstance(given, Constant) else given
    if argument is None:
        return 0
    return argument if isinstance(argument, int) else int(argument.data_ptr())


def three(size: Size) -> tuple[int, int, int]:
    """A grid or block size as three numbers."""
    if isinstance(size, int):
        return size, 1, 1
    x, y, z = (*size, 1, 1)[:3]
    return x, y, z


_rehearsed: str | None = None


@contextmanager
def rehearsal(capability: tuple[int, int]) -> Iterator[None]:
    """Launches compile their kernel for a GPU of this compute capability and run nothing; arrays lie on the host.

    For tests, and to fill the store of compiled kernels, on a machine without a GPU.
    """
    global _rehearsed
    emulated, emulated_capability = memory.is_emulated(), memory.architecture() if memory.is_emulated() else (0, 0)
    _rehearsed = compiler.architecture_name(capability)
    memory.emulate(True, capability)
    try:
        yield
    finally:
        _rehearsed = None
        memory.emulate(emulated, emulated_capability)


def _launcher(kernel: Kernel, kind: str) -> Launcher:
    if kind == "gpu":
        return _GpuKernel(kernel)
    if kind == "emulator":
        from isobit.cuda.emulator import EmulatedKernel

        return EmulatedKernel(kernel.source, kernel.name, kernel.defines)
    compiler.binary(kernel.source, kernel.defines, kind)
    return _run_nothing


def _run_nothing(grid: Size, block: Size, *arguments: Any, shared: int = 0, early: bool = False) -> None:
    pass


class _GpuKernel:
    def __init__(self, kernel: Kernel):
        from cuda.bindings import driver

        torch.cuda.init()
        self._name, self._entry = repr(kernel), kernel.name.encode()
        self._driver = driver
        self._stream = memory.current_stream
        self._is_capturing = torch.cuda.is_current_stream_capturing
        self._can_be_early = memory.architecture() >= EARLY_FROM
        self._kernel = kernel
        self._late = self._loaded()
        self._early: _Function | None = None

    def __call__(self, grid: Size, block: Size, *arguments: Any, shared: int = 0, early: bool = False) -> None:
        function = self._late
        if early and self._can_be_early:
            # Loaded at the first launch, which is no graph's.
            self._early = self._early or self._loaded_for_early_launches()
            # Outside of graphs the weights may have been written by the kernel before.
            if EARLY_IN_GRAPHS and self._is_capturing():
                function = self._early
        if shared > function.shared:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(self._driver.cuFuncSetAttribute(function.handle, attribute, shared))
            function.shared = shared
        launch = self._launch_early if function is self._early else self._launch_late
        taken, free = take_arguments(arguments)
        launch(function, three(grid), three(block), shared, self._stream(), taken.address)
        free.append(taken)

    def _launch_late(
        self, function: "_Function", grid: tuple, block: tuple, shared: int, stream: int, addresses: int
    ) -> None:
        self._checked(self._driver.cuLaunchKernel(function.handle, *grid, *block, shared, stream, addresses, 0))

    def _launch_early(
        self, function: "_Function", grid: tuple, block: tuple, shared: int, stream: int, addresses: int
    ) -> None:
        driver = self._driver
        attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = shared, stream
        config.attrs, config.numAttrs = [attribute], 1
        self._checked(driver.cuLaunchKernelEx(config, function.handle, addresses, 0))

    def _loaded(self) -> "_Function":
        module = self._module()
        handle = self._checked(self._driver.cuModuleGetFunction(module, self._entry))
        attributes = self._driver.CUfunction_attribute
        own = self._checked(self._driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle))
        # A block's own arrays and the dynamic one have so much together unless more is asked for.
        return _Function(module, handle, UNASKED_SHARED_BYTES - int(own))

    def _loaded_for_early_launches(self) -> "_Function":
        function = self._loaded()
        # Kernels that divide a multiprocessor's memory in different ways are not on it at the same time.
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._checked(self._driver.cuFuncSetAttribute(function.handle, attribute, ALL_SHARED_PERCENT))
        return function

    def _module(self) -> Any:
        """The kernel's module; one that the driver refuses is compiled once more, since the kept one may be bad."""
        source, defines = self._kernel.source, self._kernel.defines
        architecture = compiler.architecture_name(memory.architecture())
        result, *module = self._driver.cuModuleLoadData(compiler.binary(source, defines, architecture))
        if int(result) and result.name != OUT_OF_MEMORY:
            code = compiler.binary(source, defines, architecture, anew=True)
            result, *module = self._driver.cuModuleLoadData(code)
        return self._checked((result, *module))

    def registers(self) -> int:
        """32-bit registers of one thread."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return int(self._checked(self._driver.cuFuncGetAttribute(attribute, self._late.handle)))

    def _checked(self, result: tuple) -> Any:
        code, *values = result
        if int(code):
            if code.name == OUT_OF_MEMORY:
                raise DeviceMemoryError(f"out of memory for the kernel {self._name}")
            raise KernelError(
                f"kernel {self._name}: the CUDA driver says {code.name}: update the driver, or use --device cpu"
            )
        return values[0] if values else None


@dataclass
class _Function:
    """A kernel as the driver has it; `shared`: the most dynamic shared memory that it may have, in bytes."""

    module: Any
    handle: Any
    shared: int
