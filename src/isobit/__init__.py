"""isobit: bit-exact inference for EXL3-quantized Qwen3.8 Flash Next checkpoints."""

__version__ = "0.1.0"
