"""Options of a rewrite: one immutable object that every stage reads."""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import OptionError

HOST_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")


@dataclass(frozen=True)
class Options:
    """What a rewrite may do.

    Attributes:
      target: "auto", "host", or "cuda:sm_NN".  "auto" is the GPU when TensorFlow sees one, else "host".
      levels: x86-64 levels that host code is built for; () means just what this machine has.
      min_ops: a cluster with fewer compute ops than this stays TensorFlow's.
      keep: names of nodes that must still be there after the rewrite (fetched nodes; what is fed is a placeholder).
      skip_ops: TensorFlow op types that are never stitched.
      shared_bytes: on-chip bytes that one block of a kernel may use (0: the target's own default).
      superkernels: GPU code is made so that kernels and products of concurrent requests can share launches: each kernel
        also in a form for many requests (which doubles compile time), products without an epilogue.  For models that
        are served with coalescing on (StitchSession); a request alone takes a little longer.
      grids: on a GPU, runs of small kernels become one cooperative kernel each, with a device-wide barrier between its
        phases: fewer launches.  On an H200 that was slower than replaying the kernels as a CUDA graph (rnn 105 against
        94 us, speech 430 against 202), so it is not the default.
      autotune: on a GPU, time several algorithms of cuBLASLt and cuDNN for each class of shapes when it comes for the
        first time, and take the fastest; else the one that the library recommends.
    """

    target: str = "auto"
    levels: tuple[str, ...] = HOST_LEVELS
    min_ops: int = 2
    keep: tuple[str, ...] = ()
    skip_ops: tuple[str, ...] = ()
    shared_bytes: int = 0
    superkernels: bool = False
    grids: bool = False
    autotune: bool = True

    def __post_init__(self) -> None:
        for name in ("levels", "keep", "skip_ops"):
            value = getattr(self, name)
            entries = (None,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
            if not all(isinstance(e, str) for e in entries):
                raise OptionError(f"Option '{name}' is {value!r}; it takes a tuple of strings.")
            object.__setattr__(self, name, entries)  # options are keys of dicts: no lists
        for name in ("superkernels", "grids", "autotune"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"Option '{name}' is {getattr(self, name)!r}; it must be True or False.")
        for name, least in (("min_ops", 1), ("shared_bytes", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"Option '{name}' is {value!r}; it must be an integer of at least {least}.")
        unknown = set(self.levels) - set(HOST_LEVELS)
        if unknown:
            raise OptionError(f"Option 'levels' has unknown entries {sorted(unknown)}; use {', '.join(HOST_LEVELS)}.")
        if self.target not in ("auto", "host") and not re.fullmatch(r"cuda:sm_\d{2,3}", str(self.target)):
            raise OptionError(f"Target '{self.target}' is not known; use 'auto', 'host' or 'cuda:sm_90'.")

    @classmethod
    def of(cls, options: Options | None) -> Options:
        """``options``, or the defaults for None.  Raises OptionError when it is something else."""
        if options is not None and not isinstance(options, cls):
            raise OptionError(f"Options are a tf_stitch.Options, not a {type(options).__name__}: write "
                              "tf_stitch.Options(min_ops=3), for example.")
        return options or cls()

    @property
    def on_gpu(self) -> bool:
        """True when the target is a GPU."""
        return self.target.startswith("cuda")
