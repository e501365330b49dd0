"""Measuring systems side by side in one process: TensorFlow, XLA, stitched.

Rounds are interleaved, so that what slows the machine for a while slows every system; a row keeps the least and the
median round.  A call counts as finished when its outputs can be read: on a CPU that is when it returns, on a GPU
after the devices were synced.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from .errors import OptionError
from .files import write_whole
from .saved_model import relative_error

Call = Callable[[], Any]

LONGEST = 8  # kernels that a row names
SYSTEMS = ("tensorflow", "xla", "stitched")
EAGER = "EagerLocalExecute: "  # begins the event of an eager op, or of a function, whose ops have events of their own
# Executed, but no work: not counted as ops.
FREE_OPS = frozenset({"_Arg", "_Retval", "Const", "_EagerConst", "Identity", "IdentityN", "NoOp", "ReadVariableOp",
                      "VarHandleOp", "_DeviceArg", "_DeviceRetval", "PartitionedCall", "StatefulPartitionedCall"})


@dataclass
class Row:
    """One workload on one system.

    Attributes:
      latency_us: median over the rounds of the mean time of a call.
      min_us: the least round.
      ops: TensorFlow ops that one call executes, without those that do no work.
      kernels: kernels that one call runs: ops, with each stitched op counted as its kernels (XLA: its thunks).
      compile_s: time of the first call beyond a usual one: tracing, optimising, compiling.
      max_rel_error: largest difference from the float64 reference over the output's largest value, worst output.
      peak_bytes: most bytes allocated during a call beyond what was allocated before it.
      note: why a figure is missing.
      read_us: as latency_us, with the outputs copied to the host (on a GPU, where that is another thing).
      memcpys: copies and fills on the GPU in one call; they are no kernels.
      rounds_us: the mean time of a call, round by round.
      gpu_busy_us: time in which the GPU ran kernels or copies of one call.
      dynamic: the system does not know the batch size.
      how: what else is to be said of the figures: a compiler's mode, for example.
      rewrite_s: the part of compile_s that tf_stitch took to rewrite and compile; the rest is TensorFlow's tracing and
        optimising, loading, and the first run.
      longest: (name, calls, microseconds) of the kernels and copies that take longest in one call.
      run: the run that the row was measured in, where a document holds several ("runs" there has its machine).
    """

    workload: str
    system: str
    latency_us: float | None = None
    min_us: float | None = None
    ops: int | None = None
    kernels: int | None = None
    compile_s: float | None = None
    max_rel_error: float | None = None
    peak_bytes: int | None = None
    note: str = ""
    rounds_us: list[float] = field(default_factory=list)
    read_us: float | None = None
    memcpys: int | None = None
    gpu_busy_us: float | None = None
    dynamic: bool = False
    how: str = ""
    rewrite_s: float | None = None
    run: str = ""
    longest: list[tuple[str, int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class OpTime:
    """Time spent in one op or kernel over a traced call."""

    name: str
    kind: str
    calls: int
    us: float


@dataclass
class Trace:
    """What one call executed."""

    ops: list[OpTime] = field(default_factory=list)
    kernels: list[OpTime] = field(default_factory=list)
    gpu_busy_us: float | None = None


def max_rel_error(outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Worst :func:`~tf_stitch.saved_model.relative_error` of the outputs; the reference may be of a wider type.

    Raises:
      ValueError: the numbers of outputs differ.
    """
    if len(outputs) != len(reference):
        raise ValueError(f"There are {len(outputs)} outputs but {len(reference)} reference outputs.")
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(outputs, reference)]
    return max((relative_error(a.astype(b.dtype), b) for a, b in pairs), default=0.0)


def finish(outputs: Any) -> Any:
    """Waits until the outputs of a call can be read: on a GPU, until all its streams are idle.

    By the driver: tf.test.experimental.sync_devices would do it with two eager ops, whose Python takes longer than
    many a model, and which no other system's figure would contain.
    """
    for synchronize in _synchronizers():
        synchronize()
    return outputs


@functools.cache
def _synchronizers() -> tuple[Callable[[], None], ...]:
    """For each GPU of TensorFlow a function that waits for it; none without GPUs."""
    names = [d.name for d in tf.config.get_visible_devices("GPU")]
    return tuple(_synchronizer(int(name.rsplit(":", 1)[1])) for name in names)


def _synchronizer(ordinal: int) -> Callable[[], None]:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, popped = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()

    def check(result: int) -> None:
        if result:
            raise RuntimeError(f"The CUDA driver reports error {result} while waiting for GPU {ordinal}.")

    check(cuda.cuInit(0))
    check(cuda.cuDeviceGet(ctypes.byref(device), ordinal))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))  # the one that TensorFlow uses; kept for good

    def synchronize() -> None:
        check(cuda.cuCtxPushCurrent_v2(context))
        check(cuda.cuCtxSynchronize())
        check(cuda.cuCtxPopCurrent_v2(ctypes.byref(popped)))

    return synchronize


def interleave(calls: dict[str, Call], rounds: int, round_s: float = 0.05) -> dict[str, list[float]]:
    """Mean seconds a call takes, per system and round.

    Args:
      calls: what to time; each is called a few times first.
      rounds: how often every system gets its turn.
      round_s: length of a turn in seconds (at least one call).
    """
    counts = {name: _calls_in(call, round_s) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for i in range(rounds if order else 0):
        for name in order[i % len(order):] + order[:i % len(order)]:
            call, count = calls[name], counts[name]
            start = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - start) / count)
    return samples


def _calls_in(call: Call, seconds: float) -> int:
    """How many calls fit in ``seconds``, from the best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return max(1, min(1000, int(seconds / min(times))))


def first_call_s(call: Call) -> float:
    """Seconds of the first call beyond those of the second."""
    start = time.perf_counter()
    call()
    middle = time.perf_counter()
    call()
    return max(0.0, (middle - start) - (time.perf_counter() - middle))


def peak_bytes(call: Call) -> int:
    """Bytes allocated during a call at its peak, beyond what was allocated before; all devices together.

    On a CPU, TensorFlow counts only allocations of 256 KiB and more, unless TF_CPU_ALLOCATOR_USE_BFC=1 was set
    before it was imported.
    """
    devices = [d.name.removeprefix("/physical_device:") for d in
               tf.config.list_physical_devices("GPU") or tf.config.list_physical_devices("CPU")]
    for device in devices:
        tf.config.experimental.reset_memory_stats(device)
    before = [tf.config.experimental.get_memory_info(d)["current"] for d in devices]
    call()
    return sum(tf.config.experimental.get_memory_info(d)["peak"] - b for d, b in zip(devices, before))


def trace(call: Call) -> Trace:
    """What a call executed, from TensorFlow's profiler (XPlane).

    Ops are host events named "node:Type", those of eager ops, and "tf_stitch:name" for the runs of stitched programs.
    Kernels are the events of a GPU's streams, or on a CPU XLA's thunks and the steps of stitched programs
    ("tf_stitch_kernel:name").
    TensorFlow stops reporting cheap ops after some ten calls of a function, so trace a young one.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        tf.profiler.experimental.start(folder, options=options)
        try:
            call()
        finally:
            tf.profiler.experimental.stop()
        spaces = []
        for path in Path(folder).rglob("*.xplane.pb"):
            spaces.append(xplane_pb2.XSpace.FromString(path.read_bytes()))
    return _read(plane for space in spaces for plane in space.planes)


def _read(planes: Iterable[Any]) -> Trace:
    ops: dict[tuple[str, str], list[float]] = {}
    kernels: dict[tuple[str, str], list[float]] = {}
    busy: list[tuple[int, int]] = []
    for plane in planes:
        on_gpu = plane.name.startswith("/device:GPU")
        stats = {i: m.name for i, m in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                name, us = plane.event_metadata[event.metadata_id].name, event.duration_ps / 1e6
                if on_gpu:
                    if line.name.startswith("Stream"):
                        kernels.setdefault((name, "copy" if _is_copy(name) else "gpu"), []).append(us)
                        start = line.timestamp_ns * 1000 + event.offset_ps
                        busy.append((start, start + event.duration_ps))
                elif name.startswith("tf_stitch:"):
                    ops.setdefault((name.split(":", 1)[1], "StitchedProgram"), []).append(us)
                elif name.startswith("tf_stitch_kernel:"):
                    kernels.setdefault((name.split(":", 1)[1], "stitched"), []).append(us)
                elif any(stats[s.metadata_id] == "hlo_op" for s in event.stats):
                    if not name.startswith("end: "):
                        kernels.setdefault((name, "xla"), []).append(us)
                elif line.name.startswith(("tf_", "python")) and _op_type(name):
                    ops.setdefault((name.rsplit(":", 1)[0], _op_type(name)), []).append(us)
    return Trace(_summary(ops), _summary(kernels), _covered(busy) / 1e6 if busy else None)


def _is_copy(event: str) -> bool:
    """True for a GPU stream's events that move or fill memory."""
    return event.lower().startswith(("memcpy", "memset"))


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """The length that intervals cover together."""
    total = end = 0
    for a, b in sorted(spans):
        total += max(0, b - max(a, end))
        end = max(end, b)
    return total


def _op_type(event: str) -> str:
    """The op type of an event "node:Type", or of an eager op's; "" for events that are no ops (spaces, scopes,
    functions).
    """
    event = event.replace(EAGER, "eager:")
    node, colon, kind = event.rpartition(":")
    is_op = colon and node and not node.endswith(":") and kind.replace("_", "").isalnum() and " " not in node
    return kind if is_op and not kind.startswith("__") and kind != "StitchedProgram" else ""


def _summary(found: dict[tuple[str, str], list[float]]) -> list[OpTime]:
    rows = [OpTime(name, kind, len(times), sum(times)) for (name, kind), times in found.items()]
    return sorted(rows, key=lambda r: -r.us)


def counts(traced: Trace) -> tuple[int, int]:
    """(ops, kernels) of a traced call, as in :class:`Row`."""
    ops = sum(o.calls for o in traced.ops if o.kind not in FREE_OPS)
    on_gpu = [k for k in traced.kernels if k.kind in ("gpu", "copy")]
    if on_gpu:
        return ops, sum(k.calls for k in on_gpu if k.kind == "gpu")
    stitched_ops = sum(o.calls for o in traced.ops if o.kind == "StitchedProgram")
    return ops, ops - stitched_ops + sum(k.calls for k in traced.kernels)


def measure(workload: str, calls: dict[str, Call], *, rounds: int, round_s: float = 0.05,
            started: Callable[[Row], None] = lambda row: None,
            quiet: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> dict[str, Row]:
    """A row per system: first call, counts, peak memory on a GPU, then interleaved rounds.

    A system whose first call raises gets a row with the reason and no figures; ``started`` is called after the first
    call of every other one.  ``quiet`` is entered for all that comes after the first calls.
    """
    rows = {name: Row(workload, name) for name in calls}
    good = first_calls(rows, calls, started)
    with quiet():
        observe(rows, good, rounds, round_s)
    return rows


def first_calls(rows: dict[str, Row], calls: dict[str, Call],
                started: Callable[[Row], None] = lambda row: None) -> dict[str, Call]:
    """Notes what the first calls take; returns the calls that work, the others' rows say why not."""
    good: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            rows[name].compile_s = first_call_s(call)
        except Exception as error:  # a system that cannot run the workload is a result too
            rows[name].note = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        good[name] = call
        started(rows[name])
    return good


def observe(rows: dict[str, Row], calls: dict[str, Call], rounds: int, round_s: float) -> None:
    """Counts, peak memory on a GPU and times of calls that were made before."""
    for name, call in calls.items():
        _observe(rows[name], call)
    _time(rows, calls, rounds, round_s)


def _observe(row: Row, call: Call) -> None:
    """What one call allocates and executes."""
    if tf.config.list_physical_devices("GPU"):  # on a CPU the count needs an allocator that changes the timing
        row.peak_bytes = peak_bytes(call)
    traced = trace(call)
    row.ops, row.kernels = counts(traced)
    row.longest = [(k.name[:80], k.calls, round(k.us, 2)) for k in traced.kernels[:LONGEST]]
    if traced.gpu_busy_us is not None:
        row.gpu_busy_us = traced.gpu_busy_us
        row.memcpys = sum(k.calls for k in traced.kernels if k.kind == "copy")


def _time(rows: dict[str, Row], calls: dict[str, Call], rounds: int, round_s: float) -> None:
    for name, times in interleave(calls, rounds, round_s).items():
        rows[name].rounds_us = [round(t * 1e6, 2) for t in times]
        rows[name].latency_us = statistics.median(times) * 1e6
        rows[name].min_us = min(times) * 1e6
    if tf.config.list_physical_devices("GPU"):
        reading = {name: _reading(call) for name, call in calls.items()}
        for name, times in interleave(reading, rounds, round_s).items():
            rows[name].read_us = statistics.median(times) * 1e6


def _reading(call: Call) -> Call:
    """A call whose outputs are copied to the host."""
    return lambda: [np.asarray(t) for t in tf.nest.flatten(call())]


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, devices, versions, commit, date and command."""
    gpus = [tf.config.experimental.get_device_details(d).get("device_name", d.name)
            for d in tf.config.list_physical_devices("GPU")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([Path(sys.executable).name, *_arguments()]),
        "commit": os.environ.get("TF_STITCH_COMMIT") or _git("describe", "--always", "--dirty"),  # no git in a copy
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "tensorflow": tf.__version__,
        "tf_stitch": _version("tf-stitch"),
        "keras": _version("keras"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "compiler": _first_line("g++", "--version"),
        "load_average": os.getloadavg()[0],
    }


def _arguments() -> list[str]:
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", module.name, *sys.argv[1:]] if module else [Path(sys.argv[0]).name, *sys.argv[1:]]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _first_line(*command: str) -> str:
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return "not found"
    return out.splitlines()[0].strip() if out else ""


def _git(*arguments: str) -> str:
    return _first_line("git", "-C", str(Path(__file__).resolve().parent), *arguments)


def _cpu_name() -> str:
    """Model and widest vector unit; some virtual machines give a bare model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    vector = next((f for f in ("avx512f", "avx2", "sse4_2") if f in flags), platform.machine())
    return f"{facts.get('model name', platform.machine())} ({vector})"


def ratio(rows: Sequence[Row], workload: str, system: str, base: str = "tensorflow",
          dynamic: bool = False) -> float | None:
    """How many times faster ``system`` is than ``base``; None when one has no figure.

    The median of the ratios of each round, which sees both systems at about the same moment: other work on the
    machine, that comes and goes, moves it less than it moves the latencies.
    """
    found = {r.system: r for r in rows if (r.workload, r.dynamic) == (workload, dynamic)}
    a, b = found.get(system), found.get(base)
    if a is None or b is None or not a.latency_us or not b.latency_us:
        return None
    if a.rounds_us and len(a.rounds_us) == len(b.rounds_us):
        return statistics.median(y / x for x, y in zip(a.rounds_us, b.rounds_us))
    return b.latency_us / a.latency_us


def over_best(rows: Sequence[Row], row: Row) -> float | None:
    """The latency of the fastest other system over the row's: below 1 something else is faster."""
    others = [x for r in rows if (r.workload, r.dynamic) == (row.workload, row.dynamic) and r.system != row.system
              and (x := ratio(rows, row.workload, row.system, r.system, row.dynamic))]
    return min(others, default=None)


def table(document: Mapping[str, Any]) -> Table:
    """The rows of a document; ratios are TensorFlow's, XLA's and the fastest other system's latency over this one's."""
    rows = [Row(**r) for r in document["rows"]]
    out = Table(title=f"{document['device']}, {document['cores']} cores; TensorFlow "
                      f"{document['versions']['tensorflow']}; {document['date']}")
    for name in ("workload", "system"):
        out.add_column(name)
    on_gpu = ("memcpys", "busy us", "read us") if any(r.gpu_busy_us for r in rows) else ()
    for name in ("median us", "min us", "vs TF", "vs XLA", "vs best", "ops", "kernels", *on_gpu, "compile s",
                 "max rel err", "peak KiB"):
        out.add_column(name, justify="right", no_wrap=True)
    last = ""
    for r in rows:
        label = f"{r.workload}, any batch" if r.dynamic else r.workload
        if last and label != last:
            out.add_section()
        out.add_row(label if label != last else "", r.system, *(_figures(r, rows, bool(on_gpu)) if not r.note
                                                                else [r.note]))
        last = label
    return out


def _figures(r: Row, rows: Sequence[Row], on_gpu: bool) -> list[str]:
    ratios = [_text(found, "{:.2f}x") for found in (ratio(rows, r.workload, r.system, "tensorflow", r.dynamic),
                                                    ratio(rows, r.workload, r.system, "xla", r.dynamic),
                                                    over_best(rows, r))]
    gpu = [_text(r.memcpys, "{}"), _text(r.gpu_busy_us, "{:.0f}"), _text(r.read_us, "{:.0f}")] if on_gpu else []
    return [_text(r.latency_us, "{:.0f}"), _text(r.min_us, "{:.0f}"), *ratios, _text(r.ops, "{}"),
            _text(r.kernels, "{}"), *gpu, _text(r.compile_s, "{:.2f}"), _text(r.max_rel_error, "{:.1e}"),
            _text(r.peak_bytes and r.peak_bytes / 1024, "{:.0f}")]


def _text(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


VERSIONS = ("tensorflow", "tf_stitch", "keras", "numpy", "python", "compiler")


def document(rows: Sequence[Row], facts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The result file: device, versions, commit, date, command, what else is known, then a row per system."""
    versions = {k: facts[k] for k in VERSIONS} | facts.get("peers", {})
    known = {"device": ", ".join([*facts["gpus"], facts["cpu"]]), "versions": versions}
    known |= {k: facts[k] for k in ("commit", "date", "command", "cores", "load_average")}
    return {**known, **more, "rows": [asdict(r) for r in rows]}


def save(document: Mapping[str, Any], folder: Path, name: str, lines: Sequence[str] = ()) -> tuple[Path, Path]:
    """Writes a :func:`document` as NAME.json, and as NAME.txt (the table, facts, then ``lines``); returns the paths."""
    facts = {k: v for k, v in document.items() if isinstance(v, str | int | float)} | document["versions"]
    return write(folder, name, document, facts, [table(document)], lines)


def write(folder: Path, name: str, data: Any, facts: Mapping[str, Any], tables: Iterable[Any],
          lines: Sequence[str] = ()) -> tuple[Path, Path]:
    """Writes NAME.json (``data``) and NAME.txt (the tables, the facts, then ``lines``) and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.json", folder / f"{name}.txt"
    out = io.StringIO()
    console = Console(file=out, width=200)
    for one in tables:
        console.print(one)
    console.print("\n".join([*(f"{k}: {v}" for k, v in facts.items()), *lines]), highlight=False, soft_wrap=True)
    write_whole(paths[0], (json.dumps(data, indent=1) + "\n").encode())
    write_whole(paths[1], out.getvalue().encode())
    return paths


def profile_table(traced: Trace, title: str, top: int = 15) -> Table:
    """Where the time of a traced call went: ops (a stitched op includes its kernels), then kernels."""
    out = Table(title=title)
    for name in ("what", "kind"):
        out.add_column(name, overflow="fold", max_width=70)
    for name in ("calls", "us", "share"):
        out.add_column(name, justify="right")
    for group in (traced.ops, traced.kernels):
        total = sum(o.us for o in group) or 1.0
        for o in group[:top]:
            out.add_row(o.name, o.kind, str(o.calls), f"{o.us:.1f}", f"{o.us / total:.0%}")
        out.add_section()
    return out


def by_kind(traced: Trace) -> Counter[str]:
    """Microseconds per op type."""
    out: Counter[str] = Counter()
    for o in traced.ops:
        out[o.kind] += round(o.us)
    return out


def bench_saved_model(path: str, *, signature: str = "serving_default", inputs: dict[str, np.ndarray] | None = None,
                      batch: int = 1, systems: Sequence[str] = SYSTEMS, rounds: int = 20) -> list[Row]:
    """Times a SavedModel's signature as it is, with XLA, and rewritten; errors are those beside the model as it is.

    Args:
      path: the SavedModel folder.
      signature: which signature to call.
      inputs: arrays by input name, or by "signature/name" (default: drawn from the signature, unknown batch dims being
        ``batch``).
      batch: size of unknown dims of drawn inputs.
      systems: which of :data:`SYSTEMS` to run.
      rounds: interleaved rounds.

    Raises:
      OptionError: an unknown system, a signature the model does not have, inputs that it does not take, or no rounds.
      SavedModelError: the folder cannot be read or rewritten, or the signature fails on the inputs.
    """
    from . import saved_model

    _check(systems, rounds)
    report = None
    with tempfile.TemporaryDirectory() as folder:
        plain = saved_model.load(path)
        fetch = saved_model.signature_of(plain, signature)
        specs = fetch.structured_input_signature[1]
        values = saved_model.sample_inputs(fetch, batch, signature, inputs)
        args = {k: tf.constant(v, specs[k].dtype) for k, v in values.items()}
        functions: dict[str, Callable[..., Any]] = {"tensorflow": fetch}
        functions["xla"] = tf.function(lambda **kw: fetch(**kw), jit_compile=True)
        if "stitched" in systems:
            target = str(Path(folder) / "rewritten")
            report = saved_model.rewrite_saved_model(path, target, verify=False)
            rewritten = saved_model.load_saved_model(target)
            functions["stitched"] = saved_model.signature_of(rewritten, signature)
        calls = {name: _call(functions[name], args) for name in systems}
        rows = measure(Path(path).name, calls, rounds=rounds)
        stitched = rows.get("stitched")
        if stitched and report and stitched.compile_s is not None:
            stitched.rewrite_s = report.seconds
            stitched.compile_s += report.seconds
        base = fetch(**args)
        for name, row in rows.items():
            if not row.note:
                got = functions[name](**args)
                keys = sorted(base)
                row.max_rel_error = max_rel_error([got[k].numpy() for k in keys], [base[k].numpy() for k in keys])
    return list(rows.values())


def _call(function: Callable[..., Any], args: dict[str, tf.Tensor]) -> Call:
    return lambda: finish(function(**args))


def _check(systems: Sequence[str], rounds: int) -> None:
    unknown = set(systems) - set(SYSTEMS)
    if unknown:
        raise OptionError(f"Unknown system {', '.join(sorted(unknown))}; use {', '.join(SYSTEMS)}.")
    if rounds < 1:
        raise OptionError(f"The number of rounds is {rounds}; use at least 1.")
