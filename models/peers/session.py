"""Many workloads in the peers: processes compile side by side, as many as there are cores, then one after the other
measures while nothing else runs.

A row's ``compile_s`` is therefore that of a machine that compiles other workloads too, and torch's "max-autotune"
chooses kernels by timing them while others use the GPU; the faster of torch's modes is the row that counts.
"""
from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
AUTOTUNED = "max-autotune"
MODES = {"jax": ("",), "torch": ("reduce-overhead", AUTOTUNED)}
HEAVY = ("speech", "dien", "birnn", "gpt2", "rnn", "mobilenetv3", "nmt", "bert")  # compile longest, so they start first
MEASURE_S = 1.3  # what one process takes to measure
PATIENCE_S = 20.0  # one that takes so long is given up
TIME_OVER = "not measured: the time was over"
Row = dict[str, Any]


@dataclass(eq=False)
class _Process:
    """A peer's process for one workload; what it says on standard error is kept for the note."""

    peer: str
    workload: str
    mode: str
    command: Sequence[str]
    errors: IO[str] = field(default_factory=lambda: tempfile.TemporaryFile("w+"))  # noqa: SIM115 (lives as long)

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True,
                                        env={"TORCHINDUCTOR_COMPILE_THREADS": self.threads(), **os.environ})

    def threads(self) -> str:
        """Of torch's compiler: the processes together keep the cores busy."""
        return "4" if self.mode == AUTOTUNED else "1"

    def row(self, end: float) -> Row:
        """Lets the process measure, and reads its row; ``end`` is a time.monotonic()."""
        try:
            left = min(PATIENCE_S, max(0.1, end - time.monotonic()))
            text, _ = self.process.communicate("go\n", timeout=left)
            return json.loads(text.splitlines()[-1])
        except subprocess.TimeoutExpired:
            self.kill()
            return self.missing(TIME_OVER)
        except (ValueError, IndexError):
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines()
            return self.missing(f"the process died: {said[-1] if said else self.process.returncode}"[:300])

    def kill(self) -> None:
        """Ends the process if it still runs, and the compilers that torch started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def missing(self, note: str) -> Row:
        return {"workload": self.workload, "system": self.peer, "note": note, "how": f"{self.peer} {self.mode}".strip()}


def rows(peers: Sequence[str], workloads: Sequence[str], folder: Path, seconds: float, *, rounds: int = 20,
         round_s: float = 0.05) -> Iterator[Row]:
    """Rows of all workloads in all peers and modes, each as soon as it is there; :func:`best` sums them up.

    Args:
      peers: "jax", "torch", or one mode of a peer: "torch:max-autotune".
      workloads: names; their files are in ``folder``.
      folder: files of :mod:`models.reference`, made with the weights.
      seconds: what has no figure by then gets a row that says so.
      rounds, round_s: as the benchmark's.
    """
    end = time.monotonic() + seconds
    names = sorted(workloads, key=lambda w: HEAVY.index(w) if w in HEAVY else len(HEAVY))
    processes = [_process(peer, w, mode, folder, rounds, round_s)
                 for peer, mode in itertools.chain.from_iterable(map(modes, peers)) for w in names]
    started: list[_Process] = []
    try:
        _compile(processes, started, end)
        for p in processes:
            yield p.row(end) if p in started else p.missing(TIME_OVER)
    finally:
        for p in started:
            p.kill()


def modes(peer: str) -> list[tuple[str, str]]:
    """The peer and mode of "torch:max-autotune"; of "torch" the peer and each of its modes; [] of an unknown one."""
    name, _, mode = peer.partition(":")
    return [(name, m) for m in MODES.get(name, ()) if mode in ("", m)]


def _process(peer: str, workload: str, mode: str, folder: Path, rounds: int, round_s: float) -> _Process:
    command = [sys.executable, "-m", "models.peers", peer, workload, f"--folder={folder}", f"--rounds={rounds}",
               f"--round-s={round_s}", "--wait", *([f"--mode={mode}"] if mode else [])]
    return _Process(peer, workload, mode, command)


def _compile(processes: Sequence[_Process], started: list[_Process], end: float) -> None:
    """Starts processes, as many at a time as there are cores, until each has compiled or ended.

    Those that have not when the time to measure the others begins are ended and taken from ``started``.
    """
    width = len(os.sched_getaffinity(0))
    waiting, compiling, start = list(processes), set(), time.monotonic()
    with selectors.DefaultSelector() as selector:
        while waiting or compiling:
            while waiting and len(compiling) < width:
                p = waiting.pop(0)
                p.start()
                started.append(p)
                compiling.add(p)
                selector.register(p.process.stdout, selectors.EVENT_READ, p)
            left = end - MEASURE_S * (len(started) - len(compiling)) - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(timeout=left):
                p = key.data
                selector.unregister(key.fileobj)
                compiling.remove(p)
                print(f"  {p.peer} {p.mode} {p.workload}: compiled after {time.monotonic() - start:.0f} s",
                      file=sys.stderr, flush=True)
    for p in compiling:
        p.kill()
        started.remove(p)


def best(found: Sequence[Row]) -> list[Row]:
    """One row per workload and peer: its fastest mode, with the latencies of the others in ``others_us``."""
    by_key: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        by_key.setdefault((row["workload"], row["system"]), []).append(row)
    out = []
    for same in by_key.values():
        first, *rest = sorted(same, key=lambda r: r.get("latency_us") or float("inf"))
        others = {r["how"]: r.get("latency_us") or r["note"] for r in rest}
        out.append({**first, **({"others_us": others} if others else {})})
    return out
