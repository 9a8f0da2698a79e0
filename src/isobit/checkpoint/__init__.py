"""Files and host arrays: reading, writing, making and quantizing checkpoints."""

from isobit.kernels import configure

configure()
