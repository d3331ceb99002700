"""Constants of a GPU as data: what a file holds comes back, and what it must not hold is not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from warpring.expert_parallel import machines
from warpring.expert_parallel.machines import DEVICE_NAMES, H200, MACHINES, Calibration, calibration_of, read, write
from warpring.policy import file_of

KNOWN = Calibration(
    H200, ("overhead_us", "exposed"), (8, 16), 40, 12, "glm", 0.011, 0.0234, 0.0567, 0.004, "abc", "2026-05-01"
)


def test_written_calibration_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "DATA_DIR", tmp_path)
    calibration_of.cache_clear()
    assert calibration_of("GPU X") is None
    write(file_of(tmp_path, "GPU X"), "GPU X", KNOWN)
    assert calibration_of("GPU X") == KNOWN
    assert calibration_of("GPU Y") is None


def test_statement_names_the_error_on_points_held_out() -> None:
    assert (
        "40 measured points of 2026-05-01; on 12 others (glm) predictions are off by 2.3 % on average, 5.7 % at worst"
        in (KNOWN.statement)
    )


def test_devices_with_data_are_machines() -> None:
    assert set(DEVICE_NAMES) <= set(MACHINES)


def _machine(**changed: Any) -> dict[str, Any]:
    return {"machine": {**vars(H200), **changed}}


@pytest.mark.parametrize(
    "changed",
    [
        {"schema": 2},
        {"machine": {"name": "x"}},
        _machine(read_gbs=0),
        _machine(exposed="much"),
        _machine(unknown=1),
        {"held_out_error": "small"},
        {"splits": ["a"]},
        {"more": 1},
    ],
)
def test_file_that_is_none_is_not_used_and_says_so(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "gpu.json"
    write(path, "GPU X", KNOWN)
    assert read(path) == KNOWN
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.warns(UserWarning, match="is not used"):
        assert read(path) is None


def test_file_that_lacks_a_field_or_is_no_json_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    write(path, "GPU X", KNOWN)
    held = json.loads(path.read_text())
    del held["worst_held_out"]
    for text in (json.dumps(held), "{", "[]"):
        path.write_text(text)
        with pytest.warns(UserWarning, match="is not used"):
            assert read(path) is None
    assert read(tmp_path / "missing.json") is None
