"""What the host must know of the protocol's kernels: their error codes and flags (`kernels/sync.cuh`), their CTAs."""

from __future__ import annotations

from enum import IntEnum

#: Threads a CTA of role1, role4 and role3 (`kThreads` in ep_dispatch.cu, ep_shared.cu, ep_combine.cu).
DISPATCH_THREADS = 512
SHARED_THREADS = 256
COMBINE_THREADS = 256


class Code(IntEnum):
    """`EpError.code`: what went wrong."""

    OK = 0
    TIMEOUT = 1  # a flag did not come: peer, flag, expected, seen
    TOO_MANY_TOKENS = 2  # this rank's own token count: expected = the limit, seen = the count (int32)
    PEER_TOO_MANY_TOKENS = 3  # `peer` had to refuse its token count
    OVERLAP = 4  # a call began while another one held the same workspace


class Flag(IntEnum):
    """`EpError.flag`: what was waited for; the lower-case names are headings of docs/sync.md."""

    NO_FLAG = 0
    META = 1
    ARRIVED = 2
    DONE = 3
    PLAN = 4
    L1_FULL = 5
    L1_EMPTY = 6
    L2_FULL = 7
    L2_EMPTY = 8

    @property
    def heading(self) -> str:
        """The flag's name in docs/sync.md and in messages."""
        return self.name.lower()
