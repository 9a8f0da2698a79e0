"""A loaded test model, shared by the tests of the model."""

import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.model.load import load_model
from isobit.ops import load_ops


@pytest.fixture(scope="session")
def model(test_checkpoint):
    return load_model(Checkpoint(test_checkpoint), load_ops("cpu"), context=512)
