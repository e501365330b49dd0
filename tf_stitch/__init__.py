"""tf_stitch runs large parts of a TensorFlow model as stitched kernels.

    @tf_stitch.function                 # a tf.function whose graphs are stitched
    tf_stitch.enable(), disable()       # every tf.function of the process, Keras fit and predict included
    tf_stitch.rewrite_saved_model(src, dst)
    tf_stitch.rewrite_graph_def(graph_def)
    tf_stitch.StitchSession()           # serves several models to concurrent requests

Importing tf_stitch is cheap: TensorFlow is imported when something needs it.  Once both are imported, in either
order, rewritten SavedModels load with ``tf.saved_model.load``.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from .api import load_library, rewrite_graph_def
    from .errors import CompileError, OptionError, SavedModelError, StitchError, VerifyError
    from .hook import disable, enable, function, is_enabled, reports
    from .options import Options
    from .report import Report
    from .runtime import LibraryError
    from .saved_model import load_saved_model, rewrite_saved_model
    from .serving import StitchSession

__version__ = "0.1.0"

_HOME = {
    "function": "hook", "enable": "hook", "disable": "hook", "is_enabled": "hook", "reports": "hook",
    "rewrite_graph_def": "api", "load_library": "api",
    "rewrite_saved_model": "saved_model", "load_saved_model": "saved_model",
    "StitchSession": "serving", "Options": "options", "Report": "report",
    "StitchError": "errors", "OptionError": "errors", "CompileError": "errors", "SavedModelError": "errors",
    "VerifyError": "errors", "LibraryError": "runtime",
}

__all__ = ["CompileError", "LibraryError", "OptionError", "Options", "Report", "SavedModelError", "StitchError",
           "StitchSession", "VerifyError", "disable", "enable", "function", "is_enabled", "load_library",
           "load_saved_model", "reports", "rewrite_graph_def", "rewrite_saved_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tf_stitch' has no attribute '{name}'")
    home = import_module(f".{_HOME[name]}", __name__)
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_op(_: Any) -> None:
    """Makes TensorFlow know the op, so that rewritten models load."""
    import logging

    from . import runtime
    from .errors import StitchError as Error

    try:
        runtime.load()
    except Error as error:  # everything that needs no op still works
        logging.getLogger("tf_stitch").warning("%s", error)


wrapt.register_post_import_hook(_register_op, "tensorflow")  # at once when it is imported already
