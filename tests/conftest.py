"""What every test runs under: one thread, no network, fixed seeds."""

from __future__ import annotations

import os

# Before torch and the Hugging Face libraries are imported: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["MPLBACKEND"] = "Agg"

import random

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # two workers share two cores, and results must not hang on the number of threads


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same global random states, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
