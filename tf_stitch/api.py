"""Rewriting GraphDefs by hand."""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import OptionError
from .options import Options
from .report import Report

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef


def rewrite_graph_def(graph_def: GraphDef, *, target: str = "auto", options: Options | None = None
                      ) -> tuple[GraphDef, Report]:
    """A stitched copy of a GraphDef (its functions included), and what was done.

    Nodes that nothing reads, and those in ``options.keep``, keep their names and outputs; each may be fetched with only
    those placeholders fed that it needed before.  What cannot be
    stitched stays as it is, with the reason in the report.  Loads the op library, so that the result can be
    imported.  Raises OptionError for an option that cannot be used, CompileError when there is no compiler for the GPU
    that ``target`` names, LibraryError when the op library is missing.
    """
    from tensorflow.core.framework import graph_pb2

    from .compiler import check_target
    from .graph.feeds import runs_of_ends
    from .graph.rewriter import rewrite

    if not isinstance(graph_def, graph_pb2.GraphDef):
        raise OptionError(f"rewrite_graph_def takes a GraphDef, not a {type(graph_def).__name__}; "
                          "use graph.as_graph_def().")
    options = Options.of(options)
    if target != "auto":
        options = replace(options, target=target)
    check_target(options)
    missing = set(options.keep) - {n.name for n in graph_def.node}
    if missing:
        raise OptionError(f"Option 'keep' names '{min(missing)}', which is no node of the graph.")
    load_library()
    return rewrite(graph_def, options, runs=runs_of_ends(graph_def, options.keep))


def load_library() -> Any:
    """Makes TensorFlow know the StitchedProgram op: needed before a rewritten model is loaded.

    Raises LibraryError when the op library is missing or does not fit the installed TensorFlow.
    """
    from . import runtime

    return runtime.load()
