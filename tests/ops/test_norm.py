"""The RMS norm: its definition, its independence of the other rows, transformers' module."""

import numpy as np
import pytest

from isobit.ops.norm.cpu import group_norm, norm
from isobit.ops.work import forced_pieces
from tests.ops import plain


@pytest.mark.parametrize("width", [1, 31, 40, 100])
def test_is_the_definition_rounding_by_rounding(width):
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((3, width)).astype(np.float32), rng.standard_normal(width).astype(np.float32)
    expected = np.stack([plain.norm(row, weight, 1e-6) for row in x])
    assert norm(x, weight, 1e-6).tobytes() == expected.tobytes()


def test_group_norm_is_the_norm_of_each_group_with_its_part_of_the_weight():
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((5, 3, 40)).astype(np.float32), rng.standard_normal(120).astype(np.float32)
    grouped = group_norm(x, weight, 3, 1e-5)
    for group in range(3):
        part = weight[group * 40 : (group + 1) * 40]
        assert grouped[:, group].tobytes() == norm(np.ascontiguousarray(x[:, group]), part, 1e-5).tobytes()


def test_takes_a_read_only_weight_and_large_batches_on_all_threads():
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((700, 256)).astype(np.float32), rng.standard_normal(256).astype(np.float32)
    weight.flags.writeable = False
    with forced_pieces(1):
        alone = norm(x, weight, 1e-6)
    assert norm(x, weight, 1e-6).tobytes() == alone.tobytes()
    assert norm(x[300:301], weight, 1e-6).tobytes() == alone[300:301].tobytes()


def test_agrees_with_transformers():
    torch = pytest.importorskip("torch", reason="needs the optional package torch")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="needs transformers")
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((6, 96)).astype(np.float32), rng.standard_normal(96).astype(np.float32)
    for group_size, groups in ((None, 1), (32, 3)):
        module = modeling.Qwen4ExpTextRMSNorm(96, group_size=group_size, eps=1e-6)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(weight))
            expected = module(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(group_norm(x, weight, groups, 1e-6), expected, rtol=2e-6)
