"""What holds for every test: no network, one thread for tiny models, no figure windows, GPU tests skipped visibly."""

import os

import pytest
from hypothesis import settings

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg", COLUMNS="120"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A deadline would measure the machine, not the law; the same examples on every run keep a failure reproducible.
settings.register_profile("diversed", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "diversed"))


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
