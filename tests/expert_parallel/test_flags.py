"""Codes and flags are the same numbers in the kernels, in Python and in docs/sync.md."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from warpring.expert_parallel import flags
from warpring.expert_parallel.workspace import EpParams, EpState
from warpring.runtime.jit import KERNEL_DIR

DOCS = Path(__file__).parents[2] / "docs" / "sync.md"


def enum_of(name: str) -> dict[str, int]:
    """An enum of sync.cuh: kL1Empty = 6 gives L1_EMPTY: 6."""
    body = re.search(rf"enum {name} : uint32_t {{(.*?)}};", (KERNEL_DIR / "sync.cuh").read_text(), re.S)
    assert body
    members = re.findall(r"k(\w+) = (\d+),", body[1])
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", member).upper(): int(number) for member, number in members}


@pytest.mark.parametrize(("name", "mirror"), [("EpCode", flags.Code), ("EpFlag", flags.Flag)])
def test_numbers_agree_with_the_kernels(name: str, mirror: type[IntEnum]) -> None:
    assert enum_of(name) == {member.name: member.value for member in mirror}


@pytest.mark.parametrize("kernel", ["dispatch", "shared", "combine"])
def test_ctas_agree_with_the_kernels(kernel: str) -> None:
    threads = re.search(r"constexpr int kThreads = (\d+);", (KERNEL_DIR / f"ep_{kernel}.cu").read_text())
    assert threads
    assert int(threads[1]) == getattr(flags, f"{kernel.upper()}_THREADS")


def records() -> dict[str, str]:
    """Records of docs/sync.md by the name that each begins with."""
    blocks = re.findall(r"^```\n(.*?)^```", DOCS.read_text(), re.S | re.M)
    return {re.split(r"[\s\[,]", block)[0]: block for block in blocks}


def test_every_flag_has_its_record() -> None:
    waited_for = {flag.heading for flag in flags.Flag if flag is not flags.Flag.NO_FLAG}
    assert waited_for <= set(records())
    for name, record in records().items():
        for part in ("writer", "reader", "reset", "proof", "test"):
            assert re.search(rf"^{part} +\S", record, re.M), f"{name}: no {part}"


def test_every_word_that_kernels_hand_each_other_is_in_a_record() -> None:
    """All of the layer's state, of the symmetric signals and of the ring's, as the structs have them."""
    text = "\n".join(records().values())
    signals = [name.removeprefix("gmem_").removesuffix("_offset") for name, _ in EpParams._fields_[1:]]
    carriers = {"rows", "partials", "ring_info", "ring_x", "ring_x_scale", "ring_act", "ring_act_scale", "state"}
    numbers = {"meta_bytes", "row_bytes", "timeout_ns", "max_tokens", "num_slots", "max_blocks", "comm_ctas"}
    numbers |= {"compute_ctas", "lag", "pinned_error", "reserved"}
    handed = {*signals, *(name for name, _ in EpState._fields_)} - carriers - numbers
    assert handed >= {"arrived", "done", "meta", "plan", "l1_full"}
    assert handed >= {"tickets", "claimed", "poison", "combine_begun", "combine_done"}
    assert [name for name in sorted(handed) if not re.search(rf"\b{name}\b", text)] == []


def test_proofs_and_tests_that_records_name_exist() -> None:
    root = DOCS.parents[1]
    model = (root / "protocol" / "ring.pml").read_text()
    for name, record in records().items():
        for safeguard in re.findall(r"NO_\w+", record):
            assert safeguard in model, f"{name}: protocol/ring.pml has no {safeguard}"
        cited = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", record)
        assert cited, name
        for path, test in cited:
            text = (root / path).read_text()
            assert not test or f"def {test}(" in text, f"{name}: {path} has no {test}"
