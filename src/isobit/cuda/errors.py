"""What can be wrong with a GPU or its software, in one line for a person."""

from isobit.errors import IsobitError


class DeviceError(IsobitError):
    """There is no usable GPU, or its software is missing, too old or failing."""


class KernelError(DeviceError):
    """A kernel could not be compiled or launched."""


class DeviceMemoryError(KernelError, MemoryError):
    """The driver has no memory for a kernel or its launch."""
