"""The reference's weights on its device: NumPy's bits, counted before they are loaded."""

import re

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.trellis import dequantize, dequantize_inner
from isobit.checkpoint.weights import CODEBOOKS, WIDTHS, Exl3Linear
from isobit.errors import IsobitError
from isobit.fidelity.parameters import parameters

torch = pytest.importorskip("torch", reason="needs isobit[fidelity]")
pytest.importorskip("transformers.models.qwen4_exp", reason="needs isobit[fidelity]")
from isobit.fidelity import check, tensors  # noqa: E402
from isobit.fidelity.reference import whole_float32  # noqa: E402

CPU = torch.device("cpu")
FORMATS = [(codebook, bits) for codebook in CODEBOOKS for bits in WIDTHS if codebook == "mul1" or bits % 1 == 0]


def random_linear(codebook, bits, k=384, n=256):
    rng = np.random.default_rng(7)
    trellis = rng.integers(-(2**15), 2**15, (k // 16, n // 16, int(16 * bits)), np.int16)
    suh, svh = (rng.standard_normal(size).astype(np.float16) for size in (k, n))
    return Exl3Linear("layer", trellis, suh, svh, None, bits, codebook, k - 5, n - 9)


@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_tensors_hold_the_bits_of_the_arrays(codebook, bits, monkeypatch):
    monkeypatch.setattr(tensors, "PIECE_VALUES", 256 * 256)
    linear = random_linear(codebook, bits)
    weight = tensors.dequantized(linear, CPU).numpy()
    assert weight.tobytes() == np.ascontiguousarray(dequantize(linear, np.float32).T).tobytes()
    pieces = [tensors._inner_rows(linear, rows, CPU) for rows in tensors._pieces(linear)]
    assert len(pieces) == 2
    np.testing.assert_array_equal(torch.cat(pieces).numpy(), dequantize_inner(linear).astype(np.float32))


def test_a_checkpoint_has_the_same_parameters_on_a_device(test_checkpoint):
    checkpoint = Checkpoint(test_checkpoint)
    on_device = dict(parameters(checkpoint, arrays=tensors.DeviceArrays(CPU)))
    for name, array in parameters(checkpoint):
        assert np.asarray(on_device.pop(name)).tobytes() == array.tobytes(), name
    assert not on_device


def test_what_does_not_fit_a_gpu_is_refused_with_the_numbers(test_checkpoint, monkeypatch):
    monkeypatch.setattr(check, "_place", lambda device: torch.device("cuda"))
    monkeypatch.setattr(check, "_device_limit", lambda reference: 4 << 30)
    checkpoint = Checkpoint(test_checkpoint)
    with pytest.raises(IsobitError, match="on the GPU") as refused:
        check.fitting_reference(test_checkpoint, checkpoint, 64, device="cuda")
    assert re.search(
        r"needs 4\.\d\d GiB on the GPU \(weights .*64 tokens .*\), but 4\.00 GiB are available", str(refused.value)
    )
    monkeypatch.setattr(check, "_device_limit", lambda reference: 8 << 30)
    assert check.fitting_reference(test_checkpoint, checkpoint, 64, device="cuda").device.type == "cuda"
    monkeypatch.setattr(check, "available", lambda: 1 << 10)
    with pytest.raises(IsobitError, match="main memory"):
        check.fitting_reference(test_checkpoint, checkpoint, 64, device="cuda")


def test_products_keep_all_bits_and_the_switches_are_put_back():
    torch.set_float32_matmul_precision("high")
    try:
        with whole_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
