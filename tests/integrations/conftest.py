"""Devices that the transformers tests run on, and quiet libraries."""

from __future__ import annotations

import pytest
import torch
import transformers


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
