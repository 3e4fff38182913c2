"""Every exception of the product.

TftError
├── ConfigError            the user's flags, variables or topology cannot work; raised before training starts
│   └── UnsupportedError   this Megatron, device or optimizer is not served
├── PatchError             a patch target is missing, moved or has other parameters than expected
├── ControlError           the control channel cannot be opened or was lost
│   └── ProtocolError      a peer sent something that the protocol does not allow
└── RecoveryError          a phase of a recovery failed; carries the phase
    └── DumpError          the dying-gasp checkpoint was not written (older checkpoints are untouched)

Interrupted (BaseException) is not an error: it unwinds the main thread out of a collective when the controller
stops training. It does not derive from Exception, so that no `except Exception` of user code swallows it.
"""

from __future__ import annotations


class TftError(Exception):
    """Base of every error that the product raises."""


class ConfigError(TftError):
    """A flag, variable or topology that cannot work.

    Args:
        message: what is wrong and why.
        change: what the user has to change, naming the flag or variable; appended to the message.

    Attributes:
        message, change: the two parts, for those who show them apart.
    """

    def __init__(self, message: str, *, change: str = "") -> None:
        super().__init__(f"{message} {change}".strip())
        self.message = message
        self.change = change


class UnsupportedError(ConfigError):
    """This version, device or optimizer is not served."""


class PatchError(TftError):
    """A patch target is missing, has moved, or has other parameters than expected."""


class ControlError(TftError):
    """The control channel cannot be opened, or was lost."""


class ProtocolError(ControlError):
    """A peer sent something that the protocol does not allow."""


class RecoveryError(TftError):
    """A phase of a recovery failed on this rank.

    Args:
        phase: name of the phase (see protocol.phases).
        message: what failed and why.
        collateral: only because another rank failed or is gone; this rank is not to be blamed.
    """

    def __init__(self, phase: str, message: str, *, collateral: bool = False) -> None:
        super().__init__(f"{phase}: {message}")
        self.phase = phase
        self.collateral = collateral


class DumpError(RecoveryError):
    """The dying-gasp checkpoint was not written; older checkpoints and the tracker are untouched."""

    def __init__(self, message: str, *, collateral: bool = False) -> None:
        super().__init__("dump", message, collateral=collateral)


class Interrupted(BaseException):
    """Training was stopped by the controller; unwinds the main thread to the guard around train()."""
