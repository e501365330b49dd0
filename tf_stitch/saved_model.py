"""Rewrites a SavedModel folder into another one, and checks that both give the same numbers."""
from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .errors import OptionError, SavedModelError, VerifyError
from .options import Options
from .report import Report
from .restored import restore_what_is_read

Progress = Callable[[int, int, str], None]
Inputs = Mapping[str, Any]

MODEL, FINGERPRINT = "saved_model.pb", "fingerprint.pb"
BATCHES = (1, 3, 17)
# Sizes tried for further unknown dims when the model refuses the batch size there (image sides and the like).
OTHER_SIZES = (None, 8, 16, 32, 64, 128, 224)
TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1, "float64": 1e-10, "complex128": 1e-10}
DEFAULT_TOLERANCE = 1e-4
INIT_SIGNATURE = "__saved_model_init_op"


def rewrite_saved_model(src: str | os.PathLike[str], dst: str | os.PathLike[str], *, target: str = "auto",
                        options: Options | None = None, verify: bool = True, overwrite: bool = False,
                        inputs: Inputs | str | os.PathLike[str] | None = None, warmup: bool = False,
                        progress: Progress | None = None) -> Report:
    """Writes a stitched copy of the SavedModel ``src`` to ``dst`` and returns what was done.

    Args:
      src: a SavedModel folder.
      dst: the folder to make; it must not exist unless ``overwrite``.  It appears whole or not at all.
      target: "auto", "host" or "cuda:sm_NN"; see :class:`tf_stitch.options.Options`.
      options: everything else; ``target`` wins when it is not "auto".
      verify: run both models on the same inputs; ``Report.errors`` then holds the worst error per output, relative
        to the output's largest value.
      inputs: inputs for the verification by name, or the path of an .npz file of them; else they are drawn.
      warmup: also write ``assets.extra/tf_serving_warmup_requests``, which TensorFlow Serving sends to the model before
        it says that it is ready; the requests are ``inputs`` or drawn.
      progress: called with (steps done, steps in all, what was just done).

    Raises:
      SavedModelError: ``src`` cannot be read or ``dst`` cannot be written.
      VerifyError: an output differs by more than the tolerance; ``dst`` is then not written.
      OptionError: an option or the sample inputs cannot be used.
      CompileError: there is no compiler for the GPU that ``target`` names.
    """
    from .graph.devices import gpu_target

    source, goal = Path(src), Path(dst)
    options = Options.of(options)
    if target != "auto":
        options = replace(options, target=target)
    model = read(source)
    _check_goal(source, goal, overwrite)
    samples = load_inputs(inputs)
    for meta in model.meta_graphs:
        restore_what_is_read(meta)
    report = rewrite_model(model, options, progress)
    with _written(model, source, goal, overwrite) as folder:
        if verify:
            report.errors.update(compare(source, folder, samples, progress))
            if options.on_gpu and gpu_target() is None:
                report.notes.append("Verified on the CPU, where the original operations run: there is no GPU here to "
                                    "run the stitched kernels on.")
        if warmup:
            from .warmup import write

            write(folder, samples)
    if not report.clusters:
        report.notes.append(_nothing_stitched(report))
    return report


def _nothing_stitched(report: Report) -> str:
    """Says so, with the most frequent reason."""
    reasons = [why for why, *_ in report.reasons()] or [why for _, why in report.untouched()]
    return f"Nothing was stitched: {reasons[0] if reasons else 'the model holds no op to stitch.'}"


def explain_saved_model(src: str | os.PathLike[str], options: Options | None = None,
                        progress: Progress | None = None) -> Report:
    """What :func:`rewrite_saved_model` would do; nothing is written."""
    return rewrite_model(read(Path(src)), Options.of(options), progress)


# --- reading -----------------------------------------------------------------------------------------

def read(folder: Path) -> Any:
    """The SavedModel proto of a folder.  Raises SavedModelError."""
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf import saved_model_pb2

    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise SavedModelError(f"'{folder}' {what}; give the folder of a SavedModel (it holds {MODEL}).")
    if not (folder / MODEL).is_file():
        if (folder / "saved_model.pbtxt").is_file():
            raise SavedModelError(f"'{folder}' holds a SavedModel as text, which is not supported; save it as {MODEL}.")
        raise SavedModelError(f"'{folder}' is no SavedModel: it holds no {MODEL}; give the folder that "
                              "model.export() or tf.saved_model.save() wrote.")
    try:
        model = saved_model_pb2.SavedModel.FromString((folder / MODEL).read_bytes())
    except DecodeError:
        raise SavedModelError(f"'{folder / MODEL}' is damaged and cannot be read; export the model again.") from None
    except OSError as error:
        raise SavedModelError(f"'{folder / MODEL}' cannot be read: {error.strerror}.") from None
    if not model.meta_graphs:
        raise SavedModelError(f"'{folder / MODEL}' holds no graph; export the model again.")
    return model


def stitched_nodes(model: Any) -> Iterator[Any]:
    """The StitchedProgram nodes of all graphs and functions of a SavedModel proto."""
    from .graph.rewriter import OP

    for meta in model.meta_graphs:
        for nodes in (meta.graph_def.node, *(f.node_def for f in meta.graph_def.library.function)):
            yield from (n for n in nodes if n.op == OP)


def load_inputs(inputs: Inputs | str | os.PathLike[str] | None) -> dict[str, np.ndarray]:
    """Sample inputs as arrays by name.  Raises OptionError when the file cannot be used."""
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping):
        return {name: np.asarray(value) for name, value in inputs.items()}
    try:
        with np.load(inputs, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, AttributeError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "it is no .npz file of plain arrays"
        raise OptionError(f"The inputs '{os.fspath(inputs)}' cannot be read: {reason}.") from None


def _check_goal(source: Path, goal: Path, overwrite: bool) -> None:
    if goal.exists() and goal.resolve() == source.resolve():
        raise SavedModelError(f"'{goal}' is the source itself; give another folder to write to.")
    if source.resolve() in goal.resolve().parents:
        raise SavedModelError(f"'{goal}' lies inside the source; give another folder to write to.")
    if os.path.lexists(goal) and not overwrite:
        raise SavedModelError(f"'{goal}' exists already; use --overwrite (overwrite=True) or another folder.")
    if os.path.lexists(goal) and not goal.is_dir():
        raise SavedModelError(f"'{goal}' is no folder; it is not overwritten, use another folder.")
    if goal.is_dir() and any(goal.iterdir()) and not (goal / MODEL).exists():
        raise SavedModelError(f"'{goal}' is a folder that is no SavedModel; it is not overwritten, use another folder.")


# --- rewriting ---------------------------------------------------------------------------------------

def rewrite_model(model: Any, options: Options, progress: Progress | None = None) -> Report:
    """Rewrites every MetaGraph of a SavedModel proto in place."""
    from . import runtime
    from .compiler import check_target
    from .graph import collections, feeds
    from .graph.calls import annotate_variables
    from .graph.rewriter import OP, rewrite
    from .graph.view import op_def

    check_target(options)
    runtime.load()  # the rewritten graph names the op
    report = Report()
    for meta in model.meta_graphs:
        keep = tuple(dict.fromkeys((*options.keep, *_fetchable(meta))))
        annotate_variables(meta.graph_def)
        graph, fed = feeds.cut(meta.graph_def, set(_fed(meta)))
        graph, part = rewrite(graph, replace(options, keep=(*keep, *fed)), keep_in=_captured(meta), progress=progress,
                              runs=_model_runs(meta, graph, fed, options.keep))
        feeds.join(graph, fed)
        report.extend(part)
        meta.graph_def.CopyFrom(graph)
        collections.forget_gone(meta)
        ops = meta.meta_info_def.stripped_op_list
        if ops.op and part.clusters and all(o.name != OP for o in ops.op):
            ops.op.append(op_def(OP))
    return report


def _tensors(infos: Iterable[Any]) -> Iterator[str]:
    """Names of the tensors that TensorInfos hold."""
    for info in infos:
        names = [info.name, *(c.name for c in info.composite_tensor.components),
                 info.coo_sparse.values_tensor_name, info.coo_sparse.indices_tensor_name,
                 info.coo_sparse.dense_shape_tensor_name]
        yield from (n for n in names if n)


def _fed(meta: Any) -> Iterator[str]:
    """Tensors of the main graph that are inputs of signatures."""
    return (t for s in meta.signature_def.values() for t in _tensors(s.inputs.values()))


def _model_runs(meta: Any, graph: Any, stands: Mapping[str, str], keep: Iterable[str]
                ) -> dict[frozenset[str], list[str]]:
    """What signatures fetch of the main graph, by what they feed, and each node of ``keep`` with what it needs.

    ``graph`` and ``stands`` as from feeds.cut.
    """
    from .graph import feeds

    placeholder = {tensor: name for name, tensor in stands.items()}
    runs: dict[frozenset[str], list[str]] = {}
    for s in meta.signature_def.values():
        inputs = (t.removesuffix(":0") for t in _tensors(s.inputs.values()))
        fed = frozenset(placeholder.get(t, t.split(":")[0]) for t in inputs)
        runs.setdefault(fed, []).extend(t.split(":")[0] for t in _tensors(s.outputs.values()))
    for given, fetched in feeds.runs_of(graph, keep).items() if runs else ():
        runs.setdefault(given, []).extend(fetched)
    return runs


def _fetchable(meta: Any) -> Iterator[str]:
    """Nodes of the main graph that the MetaGraph names."""
    from .graph import collections

    for s in meta.signature_def.values():
        yield from (t.split(":")[0] for t in _tensors((*s.inputs.values(), *s.outputs.values())))
    saver = meta.saver_def
    saving = saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name
    yield from (n.split(":")[0] for n in saving if n)
    yield from collections.named(meta)
    yield from (a.tensor_info.name.split(":")[0] for a in meta.asset_file_def)


def _captured(meta: Any) -> dict[str, set[str]]:
    """Nodes of functions that other functions capture a tensor of: loading looks for them by name."""
    nodes = (n.captured_tensor for n in meta.object_graph_def.nodes if n.WhichOneof("kind") == "captured_tensor")
    found: dict[str, set[str]] = {}
    for tensor in nodes:
        found.setdefault(tensor.concrete_function, set()).add(tensor.name.split(":")[0])
    return found


# --- writing -----------------------------------------------------------------------------------------

@contextlib.contextmanager
def _written(model: Any, source: Path, goal: Path, overwrite: bool) -> Iterator[Path]:
    """The new model in a folder beside ``goal``; it becomes ``goal`` when the body ends well, else it is removed."""
    goal = goal.absolute()
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{goal.name}.", dir=goal.parent))
    except OSError as error:
        raise SavedModelError(f"'{goal.parent}' cannot be written: {error.strerror}.") from None
    try:
        with _disk_errors(goal):
            _fill(model, source, folder)
        yield folder
        with _disk_errors(goal):
            _put(folder, goal, overwrite)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(model: Any, source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=lambda where, names: [
        n for n in names if Path(where) == source and n in (MODEL, FINGERPRINT)])
    data = _serialized(model)
    with open(folder / MODEL, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(folder, 0o777 & ~umask)  # mkdtemp makes private folders
    if (source / FINGERPRINT).exists():
        _fingerprint(folder)


def _serialized(model: Any) -> bytes:
    from google.protobuf.message import EncodeError

    try:
        return model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError):
        raise SavedModelError(f"{MODEL} of the rewritten model is larger than the 2 GB that TensorFlow reads; use "
                              "--native (levels=()) for less machine code, or variables for its large constants."
                              ) from None


def _fingerprint(folder: Path) -> None:
    """The fingerprint of the new model (the old one would be wrong)."""
    from tensorflow.python.saved_model import fingerprinting_utils

    fingerprinting_utils.write_fingerprint(os.fspath(folder))


def _put(folder: Path, goal: Path, overwrite: bool) -> None:
    if not os.path.lexists(goal):
        os.rename(folder, goal)
        return
    if not overwrite:
        raise SavedModelError(f"'{goal}' was made by somebody else meanwhile; use another folder.")
    old = Path(tempfile.mkdtemp(prefix=f".{goal.name}.old.", dir=goal.parent))
    try:
        os.rename(goal, old / "model")
        os.rename(folder, goal)
    except BaseException:  # an interrupt too; the old model is never removed before the new one is in its place
        if os.path.lexists(old / "model"):
            os.rename(old / "model", goal)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _disk_errors(goal: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, shutil.Error) as error:
        text = str(error)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text
        reason = "the disk is full" if full else getattr(error, "strerror", None) or text
        raise SavedModelError(f"'{goal}' cannot be written: {reason}; nothing was left behind.") from None


# --- verifying ---------------------------------------------------------------------------------------

def load(folder: str | os.PathLike[str]) -> Any:
    """A SavedModel, stitched or not, loaded into this process.  Raises SavedModelError."""
    import tensorflow as tf

    from . import runtime

    read(Path(folder))
    runtime.load()
    try:
        return tf.saved_model.load(os.fspath(folder))
    except Exception as error:
        raise SavedModelError(f"'{folder}' cannot be loaded by TensorFlow: {_first_line(error)}") from None


def load_saved_model(folder: str | os.PathLike[str]) -> Any:
    """A rewritten SavedModel, loaded as ``tf.saved_model.load`` does; its signatures are called the short way.

    That is, without TensorFlow's Python and, where they are little more than stitched programs, without its executor
    (see :mod:`tf_stitch.fast_call`).  Under ``tf_stitch.enable()`` those of every loaded model are.

    Raises SavedModelError when the folder cannot be loaded.
    """
    from . import fast_call, hook

    model = load(folder)
    hook.watch()
    for signature in getattr(model, "signatures", {}).values():
        fast_call.shorten(signature)
    return model


def signature_of(model: Any, name: str = "serving_default") -> Any:
    """A loaded model's signature: a function of named tensors.  Raises OptionError when it has none of that name."""
    names = [n for n in model.signatures if n != INIT_SIGNATURE]
    if name in names:
        return model.signatures[name]
    has = f"it has {', '.join(map(repr, names))}" if names else "it has none"
    raise OptionError(f"The model has no signature '{name}'; {has}.")


def sample_inputs(signature: Any, batch: int = 1, name: str = "signature", given: Inputs | None = None
                  ) -> dict[str, Any]:
    """Inputs that a loaded model's signature accepts: those that are given (by name, or "signature/name"), else drawn
    ones, whose unknown first dims are ``batch``.

    Raises OptionError when what is given is not of the signature, SavedModelError when the signature fails on it or
    none could be drawn.
    """
    wrapped = Signature(name, _Keeper(None, signature), signature.structured_input_signature[1])
    if given:
        own = _given(wrapped, given)
        if own is None:
            raise _of_no_signature(given, [wrapped])
        _run(wrapped, own)
        return own
    return _accepted(wrapped, batch)


def inputs_of_shapes(signature: Any, shapes: Mapping[str, Sequence[int]], name: str) -> dict[str, Any]:
    """Inputs of given shapes, drawn for a loaded model's signature.

    Raises OptionError when the signature takes no such shapes, SavedModelError when it accepts nothing of them.
    """
    import tensorflow as tf

    specs = signature.structured_input_signature[1]
    if set(shapes) != set(specs) or any(d < 0 for shape in shapes.values() for d in shape) or not all(
            specs[k].shape.is_compatible_with(shape) for k, shape in shapes.items()):
        raise OptionError(f"The signature '{name}' takes {_shapes_text({k: s.shape for k, s in specs.items()})}, not "
                          f"{_shapes_text(shapes)}.")
    drawn = {k: tf.TensorSpec(shape, specs[k].dtype) for k, shape in shapes.items()}
    return _accepted(Signature(name, _Keeper(None, signature), drawn), 1)


def _shapes_text(shapes: Mapping[str, Any]) -> str:
    return ", ".join(f"'{k}' {shape if hasattr(shape, 'rank') else tuple(shape)}" for k, shape in shapes.items()
                     ) or "nothing"


def _accepted(signature: Signature, batch: int) -> dict[str, Any]:
    """The first drawn inputs that a signature does not refuse."""
    for inputs in _drawn(signature, batch):
        with contextlib.suppress(SavedModelError):
            _run(signature, inputs)
            return inputs
    raise SavedModelError(_NOT_DRAWN.format(signature.name))


_NOT_DRAWN = ("No inputs could be drawn that the signature '{}' accepts; give some with --inputs FILE.npz (inputs=...) "
              "or use --no-verify (verify=False).")


@dataclass(frozen=True)
class Signature:
    """A callable of a loaded model and its named inputs."""

    name: str
    call: Callable[..., Mapping[str, Any]]
    inputs: Mapping[str, Any]  # name -> TensorSpec


def compare(original: Path, rewritten: Path, samples: Inputs | None = None,
            progress: Progress | None = None) -> dict[str, float]:
    """Worst error per output, as "signature/output", relative to the output's largest value.

    Both models run every signature on the same inputs: ``samples`` where they hold all inputs of a signature,
    else inputs drawn from it with batch sizes 1, 3 and 17; meanwhile no product of this process uses TF32, whose
    rounding would pass for errors.  Raises VerifyError when an error is above the
    tolerance of its element type, SavedModelError when a model cannot be loaded or run.
    """
    theirs, mine = signatures(original), signatures(rewritten)
    if not theirs:
        raise SavedModelError(f"'{original}' has no signature to verify it with; export it with one or use --no-verify "
                              "(verify=False).")
    if samples and all(_given(s, samples) is None for s in theirs.values()):
        raise _of_no_signature(samples, theirs.values())
    errors: dict[str, tuple[float, str]] = {}
    for k, (name, reference) in enumerate(theirs.items()):
        if name not in mine:
            raise VerifyError(f"The rewritten model has lost the signature '{name}'.")
        with _without_tf32():
            for got, want in _runs(reference, mine[name], samples or {}):
                _record(errors, name, got, want)
        if progress:
            progress(k + 1, len(theirs), f"verified {name}")
    _judge(errors, original)
    return {k: v for k, (v, _) in errors.items()}


_tf32_lock = threading.Lock()


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    import tensorflow as tf

    switch = tf.config.experimental
    with _tf32_lock:
        was = switch.tensor_float_32_execution_enabled()
        switch.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            switch.enable_tensor_float_32_execution(was)


def signatures(folder: Path) -> dict[str, Signature]:
    """The signatures of a SavedModel, loaded into this process."""
    model = load(folder)
    return {name: Signature(name, _Keeper(model, fn), fn.structured_input_signature[1])
            for name, fn in model.signatures.items() if name != INIT_SIGNATURE}


@dataclass(frozen=True)
class _Keeper:
    """A signature that keeps its model alive; results are arrays (of sparse and ragged tensors, those in them)."""

    model: Any
    fn: Callable[..., Mapping[str, Any]]

    def __call__(self, **inputs: Any) -> dict[str, np.ndarray]:
        return {name: _array(value.numpy()) for name, value in _plain(self.fn(**inputs)).items()
                if hasattr(value, "numpy")}


def _plain(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs by name, sparse and ragged ones taken apart ("name[0]", "name[1]" ...)."""
    import tensorflow as tf

    found: dict[str, Any] = {}
    for name, value in outputs.items():
        parts = tf.nest.flatten(value, expand_composites=True)
        found.update({name: value} if parts[0] is value else {f"{name}[{k}]": part for k, part in enumerate(parts)})
    return found


def _array(value: Any) -> np.ndarray:
    return np.asarray(value, object if isinstance(value, bytes) else None)  # a single string comes as bytes


def _runs(reference: Signature, mine: Signature, samples: Inputs
          ) -> Iterator[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]]:
    """(rewritten, original) outputs for every set of inputs."""
    if samples:
        given = _given(reference, samples)
        if given is not None:
            want = _run(reference, given)
            yield _run(mine, given), want
            return
    done = 0
    for batch in BATCHES if _has_unknown(reference) else BATCHES[:1]:
        for inputs in _drawn(reference, batch):
            try:
                want = _run(reference, inputs)
            except SavedModelError:
                continue  # the original cannot take these sizes or indices either
            yield _run(mine, inputs), want
            done += 1
            break
    if not done:
        raise SavedModelError(_NOT_DRAWN.format(reference.name))


def _run(signature: Signature, inputs: Inputs) -> Mapping[str, np.ndarray]:
    import tensorflow as tf

    try:
        return signature.call(**{k: tf.constant(v, signature.inputs[k].dtype) for k, v in inputs.items()})
    except Exception as error:
        reason = _first_line(error)
        raise SavedModelError(f"Signature '{signature.name}' fails on the sample inputs: {reason}") from None


def _given(signature: Signature, samples: Inputs) -> dict[str, Any] | None:
    """The samples of this signature; None when they are for others."""
    own = {k.removeprefix(f"{signature.name}/"): v for k, v in samples.items()
           if "/" not in k or k.startswith(f"{signature.name}/")}
    if set(signature.inputs) <= set(own):
        return {k: own[k] for k in signature.inputs}
    if set(own) & set(signature.inputs):
        missing = sorted(set(signature.inputs) - set(own))
        raise OptionError(f"The inputs lack '{missing[0]}' of the signature '{signature.name}', which takes "
                          f"{', '.join(sorted(signature.inputs))}.")
    return None


def _of_no_signature(samples: Inputs, among: Iterable[Signature]) -> OptionError:
    takes = "; ".join(f"'{s.name}' takes {', '.join(sorted(s.inputs)) or 'nothing'}" for s in among)
    return OptionError(f"The inputs ({', '.join(sorted(samples))}) are of no signature: {takes}.")


def _has_unknown(signature: Signature) -> bool:
    return any(s.shape.rank is None or None in s.shape.as_list() for s in signature.inputs.values())


def _drawn(signature: Signature, batch: int) -> Iterator[dict[str, Any]]:
    """Inputs of a batch size, with several guesses for other unknown dims and for the range of integers."""
    several = any(s.shape.rank and None in s.shape.as_list()[1:] for s in signature.inputs.values())
    integers = any(s.dtype.is_integer for s in signature.inputs.values())
    for other in OTHER_SIZES if several else (None,):
        for top in (16, 2, 1, None) if integers else (1,):
            rng = np.random.default_rng(batch)
            yield {name: _draw(spec, batch, other or batch, top, rng) for name, spec in signature.inputs.items()}


def _draw(spec: Any, batch: int, other: int, top: int | None, rng: np.random.Generator) -> Any:
    """Values for an input.  Integers are below ``top``; with None, vectors rise from 0 to ``batch``, as the ends of a
    ragged tensor's rows do."""
    dims: Sequence[int | None] = [None] if spec.shape.rank is None else spec.shape.as_list()
    shape = [d if d is not None else batch if i == 0 else other for i, d in enumerate(dims)]
    dtype = spec.dtype
    if dtype.is_bool:
        return rng.random(shape) < 0.5
    if dtype.is_integer:
        rising = top is None and len(shape) == 1 and shape[0] > 1
        values = np.linspace(0, batch, shape[0]) if rising else rng.integers(0, top or 1, shape)
        return values.astype(dtype.as_numpy_dtype)
    if dtype.name == "string":
        return rng.choice(np.array(["a", "b", "the", "cat"], object), shape)
    if dtype.is_complex:
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype.as_numpy_dtype)
    return rng.standard_normal(shape).astype(dtype.as_numpy_dtype)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude of ``want``; infinite when shapes, types or NaNs differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.size:
        return 0.0
    if want.dtype.kind in "OSUb":
        return 0.0 if bool(np.array_equal(got, want)) else float("inf")
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), want.astype(wide)
    finite = np.isfinite(b)
    if not (np.isfinite(a[finite]).all() and np.array_equal(a[~finite], b[~finite], equal_nan=True)):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(b[finite]).max())
    worst = float(np.abs(a[finite] - b[finite]).max())
    return worst / scale if scale else worst


def _record(errors: dict[str, tuple[float, str]], signature: str, got: Mapping[str, np.ndarray],
            want: Mapping[str, np.ndarray]) -> None:
    for name, value in want.items():
        error = relative_error(got[name], value) if name in got else float("inf")
        key = f"{signature}/{name}"
        errors[key] = (max(error, errors.get(key, (0.0, ""))[0]), value.dtype.name)


def _judge(errors: dict[str, tuple[float, str]], original: Path) -> None:
    bad = {k: e for k, (e, dtype) in errors.items() if not e <= _tolerance(dtype)}
    if not bad:
        return
    name = max(bad, key=lambda k: bad[k])
    raise VerifyError(f"Output '{name}' of the rewritten model differs from the original's by {bad[name]:.1e} of its "
                      f"largest value, so nothing was written; if '{original}' is random by design, use --no-verify.")


def _tolerance(dtype: str) -> float:
    """Integers are ids and counts: they must be equal."""
    return 0.0 if "int" in dtype else TOLERANCE.get(dtype, DEFAULT_TOLERANCE)


# How TensorFlow begins the message of an op that failed; the reason follows.
_NO_REASON = ("Graph execution error", "Detected at node", "<stack traces unavailable>", 'File "', "in user code:")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(getattr(error, "message", None) or error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_NO_REASON)] or lines
    return (lines[0].removeprefix(f"{type(error).__name__}: ") if lines else type(error).__name__)[:300]
