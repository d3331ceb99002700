"""bench/gpu_session.sh with a stand-in for Python: order, shares of the time, going on after what is finished."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_session.sh"
STEPS = ["compile", "decode", "peers", "end_to_end", "ncu", "classical", "grouped", "shared", "accuracy"]


class Session:
    """The script in a folder of its own; `broken` names what the stand-in fails at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, folder / "seen"
        self.python = folder / "python"
        self.python.write_text(
            '#!/bin/sh\nif [ "$1" = -c ]; then echo qwen3-30b-a3b mxfp8; echo h64xi32xe4xk2 bf16; exit; fi\n'
            f'echo "$*" >> {self.seen}\n'
            'case "$*" in *"${BROKEN:-no such}"*) echo "it broke"; exit 3 ;; esac\n'
            'case "$*" in *"${SLOW:-no such}"*) sleep 30 ;; esac\n'
        )
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def run(self, *argv: str, broken: str = "no such", slow: str = "no such") -> tuple[int, str]:
        """Exit code and output."""
        env = os.environ | {"PYTHON": str(self.python), "STATE": str(self.folder / "state"), "BROKEN": broken}
        env |= {"RESULTS": str(self.folder / "results"), "SLOW": slow}
        done = subprocess.run(["bash", str(SCRIPT), *argv], env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def called(self) -> list[str]:
        """Command lines of the stand-in so far."""
        return self.seen.read_text().splitlines() if self.seen.exists() else []


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


def test_all_steps_run_in_order_into_one_folder(session: Session, tmp_path: Path) -> None:
    code, out = session.run()
    assert code == 0, out
    assert [line.split(":")[0] for line in out.splitlines()] == STEPS
    called = session.called()
    compiled = {line for line in called if "precompile" in line}
    assert compiled == {
        "-m warpring precompile --model qwen3-30b-a3b --format mxfp8",
        "-m warpring precompile --shape h64xi32xe4xk2 --format bf16",
    }
    outputs = re.findall(r"(?:--output|--jsonl) (\S+)", "\n".join(called))
    assert outputs == [
        f"{tmp_path}/results/{name}.jsonl"
        for name in ("decode", "peers", "end_to_end", *["profile"] * 5, "decode", "grouped", "shared", "accuracy")
    ]


def test_steps_of_two_gpus_run_where_they_are_asked_for(session: Session, tmp_path: Path) -> None:
    code, out = session.run("--within", "500", "ep_bar", "ep_ablation", "ep_verify", "ep_soak")
    assert code == 0, out
    run = "-m torch.distributed.run --nproc-per-node 2"
    called = [re.sub(r"--time-budget \d+", "--time-budget N", line) for line in session.called()]
    assert called == [
        f"{run} bench/expert_parallel.py bar --output {tmp_path}/results/expert_parallel.jsonl --time-budget N",
        f"{run} bench/expert_parallel.py ablation --output {tmp_path}/results/expert_parallel.jsonl --time-budget N",
        f"{run} -m warpring ep-verify --jsonl {tmp_path}/results/ep_verify.jsonl",
        f"{run} -m warpring ep-verify --soak 10000 --jsonl {tmp_path}/results/soak.jsonl",
    ]


def test_failed_step_does_not_stop_the_others_and_alone_is_repeated(session: Session) -> None:
    code, out = session.run(broken="peers.py")
    assert code == 1
    assert "peers: exit code 3" in out
    assert "it broke" in out
    assert "accuracy: exit code 0" in out
    before = len(session.called())
    code, out = session.run()
    assert code == 0
    assert [line.split()[0] for line in session.called()[before:]] == ["bench/peers.py"]
    assert out.count("done before") == len(STEPS) - 1


def test_finished_steps_are_repeated_on_request(session: Session) -> None:
    session.run("shared")
    assert session.run("shared", "--again")[0] == 0
    assert len(session.called()) == 2


def test_a_layer_that_cannot_be_profiled_does_not_stop_the_next(session: Session) -> None:
    code, out = session.run("ncu", broken="gpt-oss")
    assert code == 1, out
    models = [re.findall(r"--model (\S+)", line)[0] for line in session.called()]
    assert models == ["qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3-ep8", "h2048xi512xe256xk8", "qwen3-235b-a22b"]


def test_time_is_shared_out_and_the_scripts_are_told(session: Session) -> None:
    code, out = session.run("--within", "300", "decode", "end_to_end")
    assert code == 0, out
    budgets = [int(value) for value in re.findall(r"--time-budget (\d+)", "\n".join(session.called()))]
    assert budgets[0] == 140, "half of 300 s, less 10 to come to an end"
    assert 280 <= budgets[1] <= 290, "what the first left over goes to the second"


def test_step_that_overruns_its_share_is_ended_and_a_share_too_small_is_left_out(session: Session) -> None:
    code, out = session.run("--within", "12", "decode", "end_to_end", slow="decode.py")
    assert code == 1
    assert "decode: exit code 124" in out
    code, out = session.run("--within", "4", "ncu")
    assert code == 1
    assert "ncu: left out" in out


@pytest.mark.parametrize("argv", [("nope",), ("decode", "ncu2")])
def test_unknown_step_is_refused(session: Session, argv: tuple[str, ...]) -> None:
    code, out = session.run(*argv)
    assert code == 2
    assert f"no step is called '{argv[-1]}'; there are: {' '.join(STEPS)}" in out
    assert session.called() == []


def test_help_lists_every_step_with_its_minutes(session: Session) -> None:
    code, out = session.run("--help")
    assert code == 0
    assert re.findall(r"^(\w+) +[\d.]+ +\S", out, re.MULTILINE) == STEPS
