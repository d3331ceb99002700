"""How the ranks of a layer find each other: every wait bounded, every absent rank named.

A layer meets through the store of its torch.distributed group. Each meeting has a number; a rank that gave up withdraws
from it, so that ranks which build the layer again, early or late, still find each other. Ranks that met get connections
of their own (gloo), so that nothing of an earlier life of the layer can reach a later one.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from warpring.errors import PeerTimeoutError, UnsupportedError
from warpring.expert_parallel.problem import check_agreement

_PREFIX = "warpring-expert-parallel"


class Deadline:
    """A bound that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> timedelta:
        """What is left, never less than a millisecond: a wait that is already satisfied always succeeds."""
        return timedelta(seconds=max(1e-3, self._end - time.monotonic()))


class Ranks:
    """The ranks of one layer once they have met.

    Attributes:
        rank, num_ranks: as in the group; 0 of 1 without one.
    """

    def __init__(self, group: Any | None, timeout: float) -> None:
        """Meet; a collective.

        Args:
            group: a torch.distributed process group, or None for one rank alone.
            timeout: seconds that the others may be late.

        Raises:
            PeerTimeoutError: a rank did not come.
        """
        self.rank = 0 if group is None else group.rank()
        self.num_ranks = 1 if group is None else group.size()
        self._timeout = timeout
        self._gloo: Any = None
        self._sent: list[tuple[Any, torch.Tensor, int]] = []
        if self.num_ranks > 1:
            self._meet(group)

    def _meet(self, group: Any) -> None:
        store = _store_of(group)
        deadline = Deadline(self._timeout)
        number, present = _join(store, self.num_ranks)
        meeting = PrefixStore(f"{_PREFIX}/{number}", store)
        meeting.add(f"here/{self.rank}", 1)
        if present == self.num_ranks:
            store.add(f"{_PREFIX}/meeting", 1)
            meeting.set("complete", "yes")
        elif not _is_set(meeting, "complete", deadline.left()):
            # If everyone was there when this rank withdrew, it had not to give up.
            if meeting.add("present", -1) < self.num_ranks - 1:
                self._give_up(meeting)
            meeting.add("present", 1)
        self._gloo = dist.ProcessGroupGloo(meeting, self.rank, self.num_ranks, timedelta(seconds=self._timeout))

    def _give_up(self, meeting: Any) -> None:
        absent = [rank for rank in range(self.num_ranks) if not meeting.add(f"here/{rank}", 0)]
        meeting.add(f"here/{self.rank}", -1)
        raise PeerTimeoutError(
            f"ExpertParallelDecode: rank {self.rank} waited {self._timeout:g} s for rank "
            f"{', '.join(map(str, absent))} to build the layer. Build it on every rank of the group, or raise timeout.",
            rank=self.rank,
            peer=absent[0] if absent else -1,
            flag="rendezvous",
            generation=0,
            expected=self.num_ranks,
            seen=self.num_ranks - len(absent),
        )

    def check_agreement(self, description: dict[str, Any]) -> None:
        """Compare a description (plain values) with every other rank's; a collective.

        Raises:
            RanksDisagreeError: on every rank, naming the fields that differ.
            PeerTimeoutError: a rank is gone.
        """
        text = torch.frombuffer(bytearray(json.dumps(description, sort_keys=True).encode()), dtype=torch.uint8)
        deadline = Deadline(self._timeout)
        for peer in self.peers():
            self.send(torch.tensor([text.numel()]), peer, 0)
            self.send(text, peer, 1)
        texts = [text] * self.num_ranks
        for peer in self.peers():
            size = torch.zeros(1, dtype=torch.int64)
            self.receive(size, peer, 0, deadline, flag="rendezvous")
            texts[peer] = torch.empty(int(size), dtype=torch.uint8)
            self.receive(texts[peer], peer, 1, deadline, flag="rendezvous")
        self.flush(deadline, flag="rendezvous")
        check_agreement([json.loads(bytes(text.tolist())) for text in texts])

    def barrier(self) -> None:
        """Until every rank has come here; PeerTimeoutError where one does not."""
        deadline = Deadline(self._timeout)
        token = torch.zeros(1, dtype=torch.uint8)
        for peer in self.peers():
            self.send(token, peer, 2)
        for peer in self.peers():
            self.receive(token.clone(), peer, 2, deadline, flag="rendezvous")
        self.flush(deadline, flag="rendezvous")

    def peers(self) -> list[int]:
        """All other ranks, starting behind this one, so that not all ranks turn to the same one first."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, generation: int = 0) -> None:
        """Start sending a contiguous CPU tensor; it is kept until `flush`. PeerTimeoutError if the peer is gone."""
        try:
            self._sent.append((self._gloo.send([tensor], peer, tag), tensor, peer))
        except RuntimeError as error:
            raise self._lost(peer, "arrived", generation, Deadline(0), error) from error

    def receive(
        self, out: torch.Tensor, peer: int, tag: int, deadline: Deadline, *, flag: str, generation: int = 0
    ) -> None:
        """Receive into a contiguous CPU tensor; PeerTimeoutError if the peer is gone or late."""
        try:
            self._gloo.recv([out], peer, tag).wait(deadline.left())
        except RuntimeError as error:
            raise self._lost(peer, flag, generation, deadline, error) from error

    def flush(self, deadline: Deadline, *, flag: str, generation: int = 0) -> None:
        """Until everything that was sent is taken; PeerTimeoutError if a peer does not."""
        sent, self._sent = self._sent, []
        for work, _, peer in sent:
            try:
                work.wait(deadline.left())
            except RuntimeError as error:
                raise self._lost(peer, flag, generation, deadline, error) from error

    def _lost(self, peer: int, flag: str, generation: int, deadline: Deadline, error: RuntimeError) -> PeerTimeoutError:
        gone = "onnect" in str(error) or "closed" in str(error)
        what = "its connection closed" if gone else f"nothing came within {deadline.seconds:g} s"
        return PeerTimeoutError(
            f"ExpertParallelDecode: rank {self.rank} waited for rank {peer} (flag {flag}, call {generation}), but "
            f"{what}: it died, is late, or does not make this call.",
            rank=self.rank,
            peer=peer,
            flag=flag,
            generation=generation,
            expected=generation,
            seen=max(0, generation - 1),
        )

    def close(self) -> None:
        """Drop the connections."""
        self._sent = []
        self._gloo = None


def _store_of(group: Any) -> Any:
    """The key-value store behind a process group."""
    try:
        from torch.distributed import distributed_c10d

        return distributed_c10d._get_process_group_store(group)  # pyright: ignore[reportPrivateUsage]
    except (AttributeError, KeyError) as error:
        raise UnsupportedError(
            f"ExpertParallelDecode: group must be a process group of torch.distributed; got {group!r}. Pass "
            "torch.distributed.group.WORLD, or None for one rank alone."
        ) from error


def _join(store: Any, num_ranks: int) -> tuple[int, int]:
    """Enter the first meeting that is not complete: its number, and how many ranks are in it, this one included."""
    while True:
        number = store.add(f"{_PREFIX}/meeting", 0)
        present = store.add(f"{_PREFIX}/{number}/present", 1)
        if present <= num_ranks:
            return number, present
        # Complete, but its last rank has not opened the next one yet.
        store.add(f"{_PREFIX}/{number}/present", -1)
        time.sleep(0.01)


def _is_set(store: Any, key: str, timeout: timedelta) -> bool:
    """Whether a key is set within that time."""
    try:
        store.wait([key], timeout)
    except RuntimeError:
        return False
    return True
