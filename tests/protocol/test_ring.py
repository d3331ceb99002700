"""protocol/ring.pml through the model checker: the protocol has no fault, and would have one without any safeguard."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "protocol" / "ring.pml"
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"left out: the model check of protocol/ring.pml needs {' and '.join(MISSING)}"
)

#: Two ranks, three calls: as many as can be in flight, and one more to come round to a used buffer.
REPLAYS = ("-DRANKS=2", "-DCALLS=3", "-DCOARSE")
#: Three ranks, two calls.
THREE_RANKS = ("-DRANKS=3", "-DCALLS=2", "-DCOMM=1", "-DCOARSE")
#: One rank, step by step: five blocks a call on three slots, two CTAs of each role, two tasks of each GEMM.
RING = ("-DRANKS=1", "-DCALLS=3", "-DBLOCKS=5", "-DCOMPUTE=2", "-DN1=2", "-DN2=2")
#: One rank whose CTAs of role2 can be two uses of a slot apart.
FAR_APART = ("-DRANKS=1", "-DCALLS=1", "-DBLOCKS=4", "-DCOMPUTE=3", "-DSLOTS=2")
#: Safeguard -> a view that misses it, and how.
SAFEGUARDS = {
    "NO_META_TAG": (REPLAYS, "assertion violated"),
    "NO_META_BUFFERS": (REPLAYS, "invalid end state"),
    "NO_WHOLE_PACKET": (REPLAYS, "assertion violated"),
    "NO_PLAN_TAG": (REPLAYS, "assertion violated"),
    "NO_ARRIVED": (REPLAYS, "assertion violated"),
    "NO_COUNT_OF_CTAS": (REPLAYS, "assertion violated"),
    "NO_DONE": (REPLAYS, "invalid end state"),
    "NO_L1_FULL": (RING, "assertion violated"),
    "NO_L1_EMPTY": (RING, "assertion violated"),
    "NO_L2_FULL": (RING, "assertion violated"),
    "NO_L2_EMPTY": (RING, "assertion violated"),
    "NO_TOGGLE": (RING, "assertion violated"),
    "NO_TOKENS_OF_SECOND": (FAR_APART, "assertion violated"),
    "NO_LAST_TICKETS": (RING, "invalid end state"),
    "NO_BLOCK_BASE": (RING, "assertion violated"),
}
#: What may go: role3 waits for ranks without work for it too, because that is cheaper than to find out which have some.
REDUNDANT = ("NO_DONE_OF_IDLE_PEERS",)


def check(folder: Path, *defines: str, optimize: str = "-O0") -> str:
    """The checker's report on the model with these macros: of a fault, or that it has been through every state."""
    subprocess.run(["spin", "-a", *defines, str(MODEL)], cwd=folder, check=True, capture_output=True, timeout=60)
    compiler = ["gcc", optimize, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, timeout=120)
    done = subprocess.run(["./pan", "-m100000"], cwd=folder, check=True, capture_output=True, text=True, timeout=240)
    if "errors: 0" in done.stdout:
        assert not re.search("Search not completed|max search depth too small", done.stdout)
    return done.stdout


@pytest.mark.parametrize(
    "view", [REPLAYS, THREE_RANKS, RING, FAR_APART], ids=["replays", "three_ranks", "ring", "far_apart"]
)
def test_no_deadlock_no_stale_acceptance_no_lost_block_no_overwrite(view: tuple[str, ...], tmp_path: Path) -> None:
    assert "errors: 0" in check(tmp_path, *view, optimize="-O2")


@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_without_a_safeguard_the_checker_finds_the_fault(safeguard: str, tmp_path: Path) -> None:
    view, fault = SAFEGUARDS[safeguard]
    report = check(tmp_path, *view, f"-D{safeguard}")
    assert "errors: 1" in report
    assert fault in report


@pytest.mark.parametrize("safeguard", REDUNDANT)
def test_what_the_docs_call_redundant_is(safeguard: str, tmp_path: Path) -> None:
    assert "errors: 0" in check(tmp_path, *REPLAYS, f"-D{safeguard}", optimize="-O2")


def test_more_slots_than_lag_are_enough_and_as_many_are_not(tmp_path: Path) -> None:
    assert "errors: 0" in check(tmp_path, *RING, "-DLAG=1", "-DSLOTS=2")
    assert "invalid end state" in check(tmp_path, *RING, "-DLAG=1", "-DSLOTS=1")
    assert "invalid end state" in check(tmp_path, *RING, "-DLAG=2", "-DSLOTS=2")


def test_every_safeguard_of_the_model_is_taken_away_once() -> None:
    switches = set(re.findall(r"#\s*(?:ifdef|ifndef)\s+(NO_\w+)", MODEL.read_text()))
    assert switches == {*SAFEGUARDS, *REDUNDANT}
