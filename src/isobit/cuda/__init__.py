"""The CUDA device kind: kernels compiled at run time, memory, the arrays of a batch.

Kernels are CUDA C++ beside the ops (`ops/<op>/*.cu`) in the dialect of device.cuh. NVRTC compiles them for the GPU;
g++ compiles the same sources against `emulator/`, where tests run them without one.
"""
