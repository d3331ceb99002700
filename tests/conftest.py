"""Shared test settings: GPU tests run where a GPU is, and say why they do not elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


def pytest_configure() -> None:
    """Workers share the cores, where nothing else says how many threads each has: more of them wait for each other."""
    if "OMP_NUM_THREADS" not in os.environ and (workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT")):
        threads = max(1, len(os.sched_getaffinity(0)) // int(workers))
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that tests start


@pytest.fixture(scope="session", autouse=True)
def _untuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `warpring tune` measured on this machine decides no test."""
    nowhere = tmp_path_factory.mktemp("untuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warpring.policy.tuned_dir", lambda: nowhere)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and num_gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none found"))
        if item.get_closest_marker("multi_gpu") and num_gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs; found {num_gpus}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says in every run, however quiet, which checks a missing tool left out."""
    skipped = (report.longrepr for report in terminalreporter.stats.get("skipped", []))
    reasons = {str(why[2]).removeprefix("Skipped: ") for why in skipped if isinstance(why, tuple)}
    for reason in sorted(reason for reason in reasons if reason.startswith("left out: ")):
        terminalreporter.write_line(reason)
