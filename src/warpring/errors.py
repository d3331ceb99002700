"""Every error class of warpring. Nothing below this module imports anything of ours.

All of them derive from `WarpringError`, and from the builtin that a caller would expect, so that
`except ValueError` catches a bad argument with or without knowing about warpring.
A message names the function, the argument, the rule, what came, and the remedy.
"""

from __future__ import annotations


class WarpringError(Exception):
    """Base of every error that warpring raises on purpose."""


class ArgumentError(WarpringError, ValueError):
    """A shape, dtype, device, range or alignment rule was broken by an argument."""


class UnsupportedError(WarpringError, NotImplementedError):
    """The request is well formed, but this GPU, format, activation or model has no such path."""


class CheckpointError(WarpringError, ValueError):
    """A checkpoint lacks a tensor, or holds one that is misshapen or unknown; the message names it."""


class CompileError(WarpringError, RuntimeError):
    """A kernel did not compile or load; the message holds the compiler's log."""


class RanksDisagreeError(ArgumentError):
    """Ranks describe one layer differently; the message names each field and which ranks hold which value."""


class WorkspaceBusyError(WarpringError, RuntimeError):
    """A call came while another call holds the same workspace; nothing was changed."""


class PoisonedError(WarpringError, RuntimeError):
    """A layer object failed earlier, or was closed, and refuses to run; build it anew."""


class PeerTimeoutError(WarpringError, TimeoutError):
    """A peer did not do its part in time: dead, stalled, or never launched.

    Attributes:
        rank: the rank that waited.
        peer: the rank that it waited for, -1 where it waited for its own kernels.
        flag: name of what it waited for, a heading of docs/sync.md.
        generation: number of the call, counted from 1.
        expected, seen: the flag's value that ends the wait, and the last one read.
    """

    def __init__(
        self, message: str, *, rank: int, peer: int, flag: str, generation: int, expected: int, seen: int
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.flag = flag
        self.generation = generation
        self.expected = expected
        self.seen = seen
