"""Errors that users see.  Each message is one sentence: what is wrong, where, and what to do."""
from __future__ import annotations


class StitchError(Exception):
    """Base of every error tf_stitch raises on purpose."""


class OptionError(StitchError, ValueError):
    """An option or argument has a value that cannot be used."""


class ImportFailed(StitchError):
    """A TensorFlow node cannot be expressed in the IR; the node stays TensorFlow's.

    ``node`` is its name, "" when it is no single node.
    """

    node: str = ""


class Unschedulable(StitchError):
    """A fused group has no consistent schedule; the planner splits it."""


class CompileError(StitchError):
    """The C++ or CUDA compiler is missing or failed; the message carries its first error line."""


class DeviceError(StitchError):
    """A GPU, or what is needed to run kernels on one, is not there."""


class SavedModelError(StitchError):
    """A SavedModel cannot be read, or the destination cannot be written."""


class VerifyError(StitchError):
    """The rewritten model's outputs differ from the original's by more than the tolerance."""


class ProgramError(StitchError, ValueError):
    """A program cannot be written as bytes, or bytes are not a program."""


class GuardFailed(StitchError):
    """A program's kernels cannot run these inputs; in the op the original TensorFlow nodes would run."""
