import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable():
    """Every test starts from the same seed, in double precision, on one thread of its own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)
