"""bench/sanitize.py without a GPU: the layers that it runs, and its log, with a stand-in for the sanitizer."""

from __future__ import annotations

import os
import re
import runpy
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from warpring.bench.ep_cases import Outcome, Verifier

SCRIPT = Path(__file__).parents[2] / "bench" / "sanitize.py"


@pytest.fixture
def script() -> dict[str, Any]:
    """The script's names."""
    return runpy.run_path(str(SCRIPT))


def test_every_form_shared_expert_and_mode_of_expert_parallelism_runs(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    script["run_expert_parallel"](torch.device("cpu"))
    number = len(script["EP_LAYERS"]) * 2 * 2 * 2
    assert len(script["EP_LAYERS"]) >= 2
    assert f"ran {number} layers of expert parallelism, {4 * number} calls" in capsys.readouterr().out


def test_some_layers_of_expert_parallelism_alone(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = script["run_expert_parallel"]
    monkeypatch.setitem(
        script["main"].__globals__, "run_expert_parallel", lambda _, layers: run(torch.device("cpu"), layers)
    )
    last = script["EP_LAYERS"][-1]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "expert_parallel", "--layers", last, "--inside"])
    assert script["main"]() == 0
    assert "ran 8 layers of expert parallelism" in capsys.readouterr().out
    args = script["argparse"].Namespace(tool=["memcheck"], layers=[last], seconds=None, kernels=None)
    assert f"expert_parallel --layers {last} --inside" in script["sanitize"]("/bin/true", "expert_parallel", args)[0]


def test_a_tool_that_takes_too_long_is_ended_with_what_it_started(script: dict[str, Any], tmp_path: Path) -> None:
    fake = tmp_path / "sanitizer"
    fake.write_text("#!/bin/sh\necho begun\nsleep 300 &\necho $! > $0.child\nwait\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    args = script["argparse"].Namespace(tool=["memcheck"], layers=["any"], seconds=1.0, kernels=["ep_dispatch"])
    log, code = script["sanitize"](str(fake), "expert_parallel", args)
    assert code == 124
    assert log.splitlines()[2:] == ["begun", "ended after 1 s", "exit code 124"]
    child = Path("/proc") / (tmp_path / "sanitizer.child").read_text().strip() / "stat"
    end = time.monotonic() + 30
    while child.exists() and child.read_text().rsplit(") ", 1)[1][0] != "Z":
        assert time.monotonic() < end, "it runs on"
        time.sleep(0.05)


def test_a_wrong_result_ends_the_run(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "compare", lambda *args: Outcome(0.9, 1.0, 0.0, 1))
    with pytest.raises(SystemExit, match=r"fp8 shared 0 sequence, .*: Outcome"):
        script["run_expert_parallel"](torch.device("cpu"))


def test_rings_have_a_slot_for_every_block(script: dict[str, Any]) -> None:
    """Or role1 would wait for role2, which a sanitizer may start only after it."""
    for name in script["EP_LAYERS"]:
        for num_shared in (0, 1):
            options = {"num_shared": num_shared, "max_tokens": script["EP_TOKENS"]}
            problem = Verifier(name, None, torch.device("cpu"), **options).problem
            for sequence, grids in ((False, (16, 116)), (True, (132, 132))):
                assert script["plan_schedule"](problem, *grids, sequence=sequence).num_slots >= problem.max_blocks


@pytest.mark.parametrize("code", [0, 9])
def test_log_has_every_tool_and_the_worst_exit_code_counts(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f'#!/bin/sh\necho "cached $PYTORCH_NO_CUDA_MEMORY_CACHING $*"\nexit {code}\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(script["main"].__globals__, "run_part", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "expert_parallel", "--output", str(tmp_path)])
    assert script["main"]() == code
    log = (tmp_path / "sanitizer_expert_parallel.log").read_text()
    assert re.findall(r"^\$ compute-sanitizer --tool (\w+)", log, re.MULTILINE) == ["memcheck", "racecheck"]
    assert log.count(f"exit code {code}") == 2
    assert log.count("cached 1 --tool") == 2
    assert log.count("kernel_substring=ep_") == 4  # of each tool the command and its echo
    assert not (tmp_path / "sanitizer.log").exists()


def test_some_of_the_formats_and_sizes_reach_the_run_inside(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[tuple[list[str], list[int], list[str]]] = []
    monkeypatch.setitem(script["main"].__globals__, "run_decode", lambda *args: ran.append(args))
    some = ["--formats", "mxfp8", "--sizes", "2", "0", "--ways", "tile", "warp"]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "decode", *some, "--inside"])
    assert script["main"]() == 0
    assert ran == [(["mxfp8"], [2, 0], ["tile", "warp"])]
    chosen = {"formats": ["mxfp8"], "sizes": [2, 0], "ways": ["tile", "warp"]}
    args = script["argparse"].Namespace(tool=["memcheck"], **chosen, seconds=None, kernels=None)
    log, code = script["sanitize"]("/bin/true", "decode", args)
    assert code == 0
    assert f"python bench/sanitize.py decode {' '.join(some)} --inside" in log


def test_unknown_part_is_refused(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "attention"])
    with pytest.raises(SystemExit) as stop:
        script["main"]()
    assert stop.value.code == 2


def test_a_log_keeps_the_sanitizers_own_first_lines_and_the_end(script: dict[str, Any]) -> None:
    own, last = script["OWN_LINES"], script["LAST_LINES"]
    fault = [f"========= line {i}" for i in range(own + 5)]
    other = [f"ours {i}" for i in range(3 * last)]
    assert script["told"]([*fault, *other]) == [*fault[:own], *other[-last:]]
    assert script["told"](fault[:3]) == fault[:3]
