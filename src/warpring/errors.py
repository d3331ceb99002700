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
