"""Runs libFuzzer on the program parser and planner for long, and keeps a small corpus.

    python -m tests.op.fuzz [--seconds N] [--model SAVED_MODEL ...]       (make fuzz)

Starts from tests/op/corpus, the tests' programs and those of rewritten models, without code and text; works in
build/fuzz.  Afterwards tests/op/corpus is what is needed to reach all that was reached, the smallest inputs first.
"""
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.op import programs
from tests.op.test_fuzz import CORPUS, ROOT, SOURCES, clang
from tf_stitch.program import serialize
from tf_stitch.program.program import Program

LARGEST = 4096  # bytes of an input


def seeds(models: list[Path]) -> list[Program]:
    found = [make() for make in (programs.axpb, programs.chain, programs.rowsum, programs.gather, programs.reshape,
                                 programs.fill, programs.matmul, programs.phased, programs.joinable, programs.columns)]
    if models:
        from tf_stitch.saved_model import read
        from tf_stitch.signing import _stitched

        found += [serialize.loads(n.attr["program"].s) for folder in models for n in _stitched(read(folder))]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a rewritten SavedModel with programs")
    args = parser.parse_args()
    compiler = clang()
    if compiler is None:
        parser.error("no clang found: apt-get install clang libclang-rt-dev, or set CLANG")
    work = ROOT / "build" / "fuzz"
    shutil.rmtree(work, ignore_errors=True)
    (work / "corpus").mkdir(parents=True)
    (work / "small").mkdir()
    binary = work / "fuzzer"
    subprocess.run([compiler, "-std=c++17", "-O2", "-g", "-fsanitize=fuzzer,address,undefined",
                    "-fno-sanitize-recover=all", "-DTF_STITCH_LIBFUZZER", *map(str, SOURCES), "-o", str(binary)],
                   check=True)
    for k, program in enumerate(seeds(args.model)):
        data = serialize.dumps(replace(program, code={}, text=""))[9:]
        (work / "corpus" / f"seed_{k}").write_bytes(data)
    for path in CORPUS.iterdir() if CORPUS.exists() else ():
        shutil.copy(path, work / "corpus")
    with open(work / "log", "w") as log:
        done = subprocess.run([binary, f"-max_total_time={args.seconds}", f"-max_len={LARGEST}", "-rss_limit_mb=2048",
                               "-timeout=10", "-print_final_stats=1", "corpus"], cwd=work, check=False, stderr=log)
    print("".join((work / "log").read_text().splitlines(keepends=True)[-12:]))
    if done.returncode:
        print(f"A finding: see {work} (crash-*, leak-*, timeout-*) and its log.")
        return 1
    subprocess.run([binary, "-merge=1", f"-max_len={LARGEST}", "small", "corpus"], cwd=work, check=True,
                   stderr=subprocess.DEVNULL)
    shutil.rmtree(CORPUS, ignore_errors=True)
    CORPUS.mkdir()
    kept = 0
    for path in sorted((work / "small").iterdir(), key=lambda p: p.stat().st_size):
        kept += path.stat().st_size
        if kept > 100_000:
            break
        shutil.copy(path, CORPUS / path.name[:12])
    print(f"{len(os.listdir(CORPUS))} inputs in {CORPUS}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
