"""Nsight Compute's CSV: units, stalls, calls told apart; and the script around ncu, with a stand-in for it."""

from __future__ import annotations

import json
import runpy
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from warpring import UnsupportedError, WarpringError
from warpring.bench import read_peak
from warpring.bench.ncu import METRICS, parse_raw
from warpring.bench.records import load

SCRIPT = Path(__file__).parents[2] / "bench" / "ncu_profile.py"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: name -> unit and value of a launch, as ncu prints them with --print-units base.
LAUNCH: dict[str, tuple[str, str]] = {
    "ID": ("", "1"),
    "Kernel Name": ("", "moe_gate_up_3d_batched"),
    "Block Size": ("", "(256, 1, 1)"),
    "Grid Size": ("", "(264, 1, 1)"),
    "gpu__time_duration.sum": ("nsecond", "12,500"),
    "dram__bytes_read.sum": ("byte", "40,000,000"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("%", "31.5"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "48.2"),
    "launch__registers_per_thread": ("register/thread", "96"),
    "launch__shared_mem_per_block_static": ("byte/block", "1,024"),
    "launch__shared_mem_per_block_dynamic": ("byte/block", "65,536"),
    STALL.format("long_scoreboard"): ("inst", "6"),
    STALL.format("wait"): ("inst", "2.5"),
    STALL.format("selected"): ("inst", "1"),
    STALL.format("barrier"): ("inst", "0.5"),
    STALL.format("gmma"): ("inst", "0"),
}
MARK = LAUNCH | {
    "Kernel Name": ("", "at::cuda::(anonymous namespace)::spin_kernel(long)"),
    "dram__bytes_read.sum": ("byte", "n/a"),
}


def page(*launches: dict[str, tuple[str, str]], before: str = "==PROF== Connected to process 7\n") -> str:
    def line(cells: list[str]) -> str:
        return ",".join(f'"{cell}"' for cell in cells) + "\n"

    names = list(launches[0])
    rows = [line([launch[name][1] for name in names]) for launch in launches]
    return before + line(names) + line([launches[0][name][0] for name in names]) + "".join(rows)


def test_launch_is_read_with_its_units() -> None:
    ((found,),) = parse_raw(page(MARK, LAUNCH), "spin_kernel")
    assert (found.kernel, found.grid, found.block) == ("moe_gate_up_3d_batched", "(264, 1, 1)", "(256, 1, 1)")
    assert found.duration_us == pytest.approx(12.5)
    assert found.dram_gbs == pytest.approx(3200)
    assert (found.issue_share, found.occupancy) == pytest.approx((0.315, 0.482))
    assert (found.registers, found.smem_bytes) == (96, 1024 + 65536)


def test_stalls_are_shares_of_all_of_a_warps_time_longest_first() -> None:
    ((found,),) = parse_raw(page(MARK, LAUNCH), "spin_kernel")
    assert found.stalls == (("long_scoreboard", 0.6), ("wait", 0.25), ("barrier", 0.05))


@pytest.mark.parametrize(
    ("unit", "value", "gbs"), [("Mbyte", "40", 3200), ("Gbyte", "0.04", 3200), ("Kbyte", "40,000", 3200)]
)
def test_units_with_prefixes_count(unit: str, value: str, gbs: float) -> None:
    launch = LAUNCH | {"dram__bytes_read.sum": (unit, value), "gpu__time_duration.sum": ("usecond", "12.5")}
    mark = MARK | {"dram__bytes_read.sum": (unit, "n/a"), "gpu__time_duration.sum": ("usecond", "1")}
    assert parse_raw(page(mark, launch), "spin_kernel")[0][0].dram_gbs == pytest.approx(gbs)


def test_issue_slots_may_come_as_instructions_a_cycle() -> None:
    def renamed(launch: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        kept = {name: cell for name, cell in launch.items() if not name.startswith("smsp__issue_active")}
        return kept | {"smsp__issue_active.avg.per_cycle_active": ("inst/cycle", "0.315")}

    assert parse_raw(page(renamed(MARK), renamed(LAUNCH)), "spin_kernel")[0][0].issue_share == pytest.approx(0.315)


def test_marks_tell_calls_apart_whatever_each_launches() -> None:
    down = LAUNCH | {"Kernel Name": ("", "void warpring::moe_down_3d_batched(Arguments)")}
    found = parse_raw(page(MARK, LAUNCH, down, MARK, LAUNCH), "spin_kernel")
    assert [[p.kernel for p in call] for call in found] == [
        ["moe_gate_up_3d_batched", "moe_down_3d_batched"],
        ["moe_gate_up_3d_batched"],
    ]


def test_missing_metric_is_named() -> None:
    launch = LAUNCH | {"dram__bytes_read.sum": ("byte", "n/a")}
    with pytest.raises(WarpringError, match=r"moe_gate_up_3d_batched has no number for dram__bytes_read.sum: 'n/a'"):
        parse_raw(page(MARK, launch), "spin_kernel")


def test_refusal_of_ncu_is_told() -> None:
    with pytest.raises(WarpringError, match="no page of metrics; ncu said: ==ERROR== ERR_NVGPUCTRPERM"):
        parse_raw("==ERROR== ERR_NVGPUCTRPERM\n", "spin_kernel")


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, refuse: str = "no such option") -> Path:
    """An ncu that runs the command and then writes pages for as many calls as that made, two launches each."""
    seen = folder / "seen"
    script = folder / "ncu"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, subprocess, sys\n"
        "argv = sys.argv[1:]\n"
        f"open({str(seen)!r}, 'a').write(' '.join(argv) + '\\n')\n"
        f"if {refuse!r} in ' '.join(argv):\n"
        "    sys.exit('==ERROR== unknown metric')\n"
        "log, at = argv[argv.index('--log-file') + 1], argv.index(sys.executable)\n"
        "subprocess.run(argv[at:], check=True)\n"
        "calls = json.loads(pathlib.Path(argv[argv.index('--calls') + 1]).read_text())\n"
        f"mark, launch = {page(MARK).splitlines()[3]!r}, {page(LAUNCH).splitlines()[3]!r}\n"
        f"head = {page(MARK).splitlines()[:3]!r}\n"
        "pathlib.Path(log).write_text('\\n'.join(head + [mark, launch, launch] * len(calls)) + '\\n')\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return seen


def run_script(monkeypatch: pytest.MonkeyPatch, output: Path) -> int:
    argv = ["--model", "h64xi32xe4xk2", "--formats", "mxfp8", "--paths", "reference", "--batches", "1,3"]
    monkeypatch.setattr(sys, "argv", ["ncu_profile.py", *argv, "--device", "cpu", "--output", str(output)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_script_records_every_kernel_of_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fake_ncu(tmp_path, monkeypatch)
    assert run_script(monkeypatch, tmp_path / "profile.jsonl") == 0
    recs = load(tmp_path / "profile.jsonl")
    assert [(r["path"], r["num_tokens"]) for r in recs] == [("reference", b) for b in (1, 1, 3, 3)]
    assert recs[0]["stalls"] == "long_scoreboard 60 %, wait 25 %, barrier 5 %"
    assert recs[0]["fraction_of_peak"] == pytest.approx(3200 / recs[0]["read_peak_gbs"], rel=1e-2)
    assert "--clock-control none" in seen.read_text()
    assert capsys.readouterr().out.count("96 registers, 66560 B shared, 0 B spilled") == 4


def test_metrics_that_this_ncu_does_not_know_are_asked_for_by_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake_ncu(tmp_path, monkeypatch, refuse=METRICS[-1])
    assert run_script(monkeypatch, tmp_path / "profile.jsonl") == 0
    assert "--section SpeedOfLight" in seen.read_text().splitlines()[-1]
    assert len(load(tmp_path / "profile.jsonl")) == 4


def test_failing_ncu_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ncu(tmp_path, monkeypatch, refuse="--csv")
    monkeypatch.setattr(sys, "argv", ["ncu_profile.py", "--device", "cpu", "--output", str(tmp_path / "p.jsonl")])
    with pytest.raises(WarpringError, match=r"gave no profile(?s:.*)unknown metric"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_missing_ncu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["ncu_profile.py", "--device", "cpu"])
    with pytest.raises(UnsupportedError, match="needs Nsight Compute"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_calls_to_profile_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(read_peak.READ_BYTES, "cpu", 1 << 20)
    calls = tmp_path / "calls.json"
    argv = ["--calls", str(calls), "--model", "h64xi32xe4xk2", "--formats", "bf16,mxfp4", "--paths", "reference"]
    monkeypatch.setattr(sys, "argv", ["ncu_profile.py", *argv, "--batches", "2", "--device", "cpu"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    found: list[dict[str, Any]] = json.loads(calls.read_text())
    assert [(call["format"], call["num_tokens"]) for call in found] == [("bf16", 2), ("mxfp4", 2)]


@pytest.mark.gpu
def test_kernels_that_ran_are_listed_with_their_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls.json"
    argv = ["--calls", str(calls), "--model", "h64xi32xe4xk2", "--formats", "mxfp8", "--batches", "2"]
    monkeypatch.setattr(sys, "argv", ["ncu_profile.py", *argv])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert set(json.loads(calls.read_text())[0]["spills"]) >= {"moe_tile"}
