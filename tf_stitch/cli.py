"""The tf-stitch command: rewrite, sign, explain, bench, serve-bench, doctor.

Results go to stdout, progress and messages to stderr.  Exit status: 0 done, 1 failed (one sentence on stderr),
2 wrong usage, 130 interrupted.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .errors import OptionError, StitchError
from .files import write_whole
from .quiet import quiet_stderr

Progress = Callable[[int, int, str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = _parser().parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what matters comes as an exception
    logging.basicConfig(format="%(message)s", level=logging.ERROR if args.quiet else logging.WARNING)
    try:
        _check_files_to_write(args)
        if args.run is not _doctor:
            _load_tensorflow()
        return args.run(args)
    except StitchError as error:
        print(f"tf-stitch: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"tf-stitch: There is not enough memory ({error or 'none is left'}).", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of stdout has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("tf-stitch: interrupted", file=sys.stderr)
        return 130


# --- commands ----------------------------------------------------------------------------------------

def _rewrite(args: argparse.Namespace) -> int:
    from .saved_model import rewrite_saved_model

    with _progress(args) as progress:
        report = rewrite_saved_model(args.src, args.dst, target=args.target, options=_options(args), verify=args.verify,
                                     overwrite=args.overwrite, inputs=args.inputs, warmup=args.warmup,
                                     progress=progress)
    _print_report(report, args)
    if not args.quiet and not args.json:
        print(f"Written: {args.dst}")
    return 0


def _sign(args: argparse.Namespace) -> int:
    from . import signing

    if args.new_key:
        done = f"Written: {args.new_key} (keep it secret) and {signing.new_key(args.new_key)}"
    elif not args.model:
        raise OptionError("Give the folder of a rewritten SavedModel, or --new-key FILE.")
    elif args.check:
        done = f"Signed: all {signing.check_saved_model(args.model, args.check)} stitched ops of {args.model}"
    elif args.key:
        done = f"Signed: {signing.sign_saved_model(args.model, args.key)} stitched ops of {args.model}"
    else:
        raise OptionError("Give --key FILE to sign the model with, or --check FILE to check its signatures.")
    if not args.quiet:
        print(done)
    return 0


def _explain(args: argparse.Namespace) -> int:
    from .saved_model import explain_saved_model

    with _progress(args) as progress:
        report = explain_saved_model(args.src, _options(args), progress)
    _print_report(report, args)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .bench import bench_saved_model, document, machine, table
    from .saved_model import load_inputs

    rows = bench_saved_model(args.src, signature=args.signature, inputs=load_inputs(args.inputs) or None,
                             batch=args.batch, systems=args.systems.split(","), rounds=args.rounds)
    found = document(rows, machine())
    if args.json:
        print(json.dumps(found, indent=1))
    elif not args.quiet:
        Console(width=None if sys.stdout.isatty() else 200).print(table(found))
    if args.plot:  # may fail: what took long to measure is told by now
        from .bench_plots import plot

        plot(found, args.plot)
    return int(all(r.note for r in rows))


def _serve_bench(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .bench import machine
    from .serving import serve_bench

    plan = serve_bench.plan_of(args)
    say = (lambda _: None) if args.quiet or args.json else (lambda text: print(text, file=sys.stderr))
    rows = serve_bench.of_models(args, plan, say)
    if args.json:
        print(serve_bench.to_json(rows, machine=machine()))
    elif not args.quiet:
        Console(width=None if sys.stdout.isatty() else 200).print(serve_bench.table(rows))
    if args.plot:  # may fail: what took long to measure is told by now
        from .serving.plots import plot

        plot(rows, args.plot)
    return int(any(r.bad for r in rows))


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    with quiet_stderr():
        return doctor.main(json_output=args.json, quiet=args.quiet)


def _check_files_to_write(args: argparse.Namespace) -> None:
    """Raises OptionError where it shows before a long run that its page or plot cannot be written."""
    for path in filter(None, (getattr(args, name, None) for name in ("html", "plot"))):
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path):
            raise OptionError(f"'{path}' cannot be written: it is a folder; give the name of a file.")
        if not os.path.isdir(folder):
            raise OptionError(f"'{path}' cannot be written: there is no folder '{folder}'.")


def _load_tensorflow() -> None:
    with quiet_stderr():
        try:
            import tensorflow  # noqa: F401

            from . import runtime

            runtime.load()
        except ImportError as error:
            raise error if isinstance(error, StitchError) else StitchError(
                f"TensorFlow cannot be imported ({error}); run 'tf-stitch doctor'.") from None


# --- shared ------------------------------------------------------------------------------------------

def _options(args: argparse.Namespace) -> Any:
    from .options import Options

    chosen: dict[str, Any] = {"target": args.target, "skip_ops": tuple(args.skip_op)}
    if args.min_ops is not None:
        chosen["min_ops"] = args.min_ops
    if args.native:
        chosen["levels"] = ()
    return Options(**chosen)


def _print_report(report: Any, args: argparse.Namespace) -> None:
    if args.html:
        try:
            write_whole(args.html, report.to_html(f"tf_stitch: {args.src}").encode())
        except OSError as error:
            raise OptionError(f"The HTML report '{args.html}' cannot be written: {error.strerror}.") from None
    if args.json:
        print(report.to_json())
    elif not args.quiet:
        report.print()
    if args.quiet or args.json:
        for note in report.notes:
            print(f"tf-stitch: {note}", file=sys.stderr)


@contextlib.contextmanager
def _progress(args: argparse.Namespace) -> Iterator[Progress | None]:
    """A bar on stderr per kind of work; nothing with -q or --json, or when stderr is no terminal."""
    if args.quiet or args.json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bars = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    console=Console(stderr=True), transient=True)
    tasks: dict[str, Any] = {}

    def tell(done: int, total: int, what: str) -> None:
        kind = what.split()[0]
        if kind not in tasks:
            tasks[kind] = bars.add_task(what, total=total)
        bars.update(tasks[kind], completed=done, total=total, description=what)

    with bars:
        yield tell


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tf-stitch", description="Runs large parts of a TensorFlow model as stitched "
                                     "kernels.")
    from . import __version__

    parser.add_argument("--version", action="version", version=f"tf-stitch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    output.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")

    how = argparse.ArgumentParser(add_help=False)
    how.add_argument("--target", default="auto", metavar="TARGET", help="auto, host or cuda:sm_NN (default: auto)")
    how.add_argument("--native", action="store_true", help="build code for this machine only (faster to build)")
    how.add_argument("--min-ops", type=_positive, metavar="N", help="leave clusters of fewer compute ops to TensorFlow")
    how.add_argument("--skip-op", action="append", default=[], metavar="TYPE", help="never stitch ops of this type")
    how.add_argument("--html", metavar="FILE", help="also write the report as a self-contained web page")

    rewrite = commands.add_parser("rewrite", parents=[output, how], help="write a stitched copy of a SavedModel",
                                  description="Writes a stitched copy of the SavedModel SRC to DST.")
    rewrite.add_argument("src", metavar="SRC")
    rewrite.add_argument("dst", metavar="DST")
    rewrite.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True,
                         help="run both models on the same inputs and compare (default: yes)")
    rewrite.add_argument("--inputs", metavar="FILE.npz", help="inputs for the verification, by name")
    rewrite.add_argument("--overwrite", action="store_true", help="replace DST when it is a SavedModel already")
    rewrite.add_argument("--warmup", action="store_true", help="also write warm-up requests for TensorFlow Serving")
    rewrite.set_defaults(run=_rewrite)

    sign = commands.add_parser("sign", help="sign a rewritten model's native code, or check that",
                               description="Signs the native code in the rewritten SavedModel MODEL in place, for "
                               "servers with TF_STITCH_ALLOW=signed.")
    sign.add_argument("model", metavar="MODEL", nargs="?")
    sign.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    how_to_sign = sign.add_mutually_exclusive_group()
    how_to_sign.add_argument("--key", metavar="FILE", help="private key to sign with (Ed25519, PEM)")
    how_to_sign.add_argument("--check", metavar="FILE", help="check the signatures with these public keys instead")
    how_to_sign.add_argument("--new-key", metavar="FILE", help="make a key: FILE, and FILE.pub for the servers")
    sign.set_defaults(run=_sign)

    explain = commands.add_parser("explain", parents=[output, how], help="say what would be stitched and what not",
                                  description="Prints what of the SavedModel SRC is stitched, what is not, and why.")
    explain.add_argument("src", metavar="SRC")
    explain.set_defaults(run=_explain)

    bench = commands.add_parser("bench", parents=[output], help="time a SavedModel: TensorFlow, XLA, stitched",
                                description="Times a signature of the SavedModel SRC: TensorFlow, XLA and stitched, "
                                "interleaved.")
    bench.add_argument("src", metavar="SRC")
    bench.add_argument("--signature", default="serving_default", metavar="NAME")
    bench.add_argument("--inputs", metavar="FILE.npz", help="inputs by name (default: drawn from the signature)")
    bench.add_argument("--batch", type=_positive, default=1, metavar="N", help="size of unknown dims of drawn inputs")
    bench.add_argument("--rounds", type=_positive, default=20, metavar="N")
    bench.add_argument("--systems", default="tensorflow,xla,stitched", metavar="LIST")
    bench.add_argument("--plot", metavar="FILE.png", help="also draw the results (needs matplotlib)")
    bench.set_defaults(run=_bench)

    serve = commands.add_parser("serve-bench", parents=[output], help="serve several SavedModels under load",
                                description="Serves SavedModels to one open-loop load, with the device shared in "
                                "different ways. Exit status 1 when an answer was wrong or failed.")
    serve.add_argument("models", metavar="NAME=FOLDER", nargs="+")
    serve.add_argument("--slo-ms", action="append", default=[], metavar="[NAME=]MS",
                       help="when answers are due (default: 50)")
    serve.add_argument("--rate", type=_above_zero, action="append", metavar="R",
                       help="requests a second, or the speed of the trace (default: search the highest that meets the "
                       "SLO; a trace is sent at its own speed)")
    serve.add_argument("--trace", metavar="FILE", help="send these requests (StitchSession.record wrote them)")
    serve.add_argument("--target", type=_percent, default=99.0, metavar="PERCENT",
                       help="share of requests within their SLO that the search asks for (default: 99)")
    serve.add_argument("--policies", metavar="LIST", help="of timeslice,hyperq,batching,"
                       "stitched,superkernel (default: these) and processes,mps")
    serve.add_argument("--seconds", type=_above_zero, default=2.0, metavar="S", help="of each load (default: 2)")
    serve.add_argument("--batch", type=_positive, default=1, metavar="N", help="size of unknown dims of drawn inputs")
    serve.add_argument("--threads", type=_positive, default=1, metavar="N", help="that submit requests (default: 1)")
    serve.add_argument("--seed", type=_whole, default=0, metavar="N", help="of arrivals")
    serve.add_argument("--gpu-memory-mb", type=_positive, default=4096, metavar="MB",
                       help="of each model on a GPU (hyperq needs its own share for each; default: 4096)")
    serve.add_argument("--plot", metavar="FILE.png", help="also draw the results (needs matplotlib)")
    serve.set_defaults(run=_serve_bench)

    doctor = commands.add_parser("doctor", parents=[output], help="say what was found here and what is missing")
    doctor.set_defaults(run=_doctor)
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no positive integer")
    return value


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is no integer of at least 0")
    return int(text)


def _percent(text: str) -> float:
    value = _above_zero(text)
    if value > 100:
        raise argparse.ArgumentTypeError(f"'{text}' is more than 100 percent")
    return value


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
