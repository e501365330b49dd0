"""What a kernel costs: an analytic estimate that decides whether merging two groups pays.

A kernel's time is a launch plus the larger of its memory time and its compute time, each spread over as
many cores as the kernel has blocks for.  Unknown dims are given nominal sizes (a small and a large one), and
several core counts are tried, so that a merge must pay on the machines and shapes a rewrite will meet, not
on one of them.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import dims as D
from ..ir.dims import Dim
from ..ir.dtypes import DTYPES
from ..ir.graph import Node
from ..ir.ops import CHEAP, COSTLY, EXPENSIVE, OPS
from ..schedule.group import Group
from ..schedule.storage import HEAVY

NOMINAL_DIMS = (4, 256)  # sizes that stand for an unknown dim
PARTIAL_READS = frozenset({"slice", "gather", "gather_nd"})  # touch only what they return of their first operand
NOMINAL_CORES = {"host": (2, 8, 64), "cuda": (132,)}
WIDE = 2  # times as much a block loads in a turn of wide accesses
BLOCKS_TOGETHER = 8  # on a core of a GPU
KNOWN = frozenset({"dot", "conv", "window"})  # what schedules know the time of where a block has it
TILE = 64  # rows, and columns, of what a library's block computes of a product


@dataclass(frozen=True)
class Machine:
    """Rates of one core and of the memory that all cores share (times in ns, sizes in bytes)."""

    launch: float  # a kernel step, parallel dispatch included
    core_bandwidth: float  # bytes per ns that one core streams from memory
    total_bandwidth: float  # bytes per ns that all cores stream together
    cache_bandwidth: float  # bytes per ns and core for what the previous kernel left in the cache
    cache_bytes: float  # a tensor up to this size passes between kernels through the cache
    op_time: Mapping[int, float]  # cost class -> ns per element and core
    product_time: float  # ns per multiply-add of a product and core
    blocks_share: bool = True  # what no block differs in is done once per call, not in every block; where it is not,
    turn: int = 1  # a block loads so many elements of a stage,
    turn_ns: float = 0.0  # waits so long for them, and goes on
    library_launch: float = 0.0  # a call of the matrix library
    library_rate: float = 0.0  # multiply-adds per ns of the matrix library
    library_bandwidth: float = 0.0  # bytes per ns that it reads and writes
    split: float = 0.0  # the least time of a product with fewer tiles than half of the cores: it is folded in parts,
    split_inner: int = 0  # if it folds so many elements, which another kernel then adds


MACHINES = {
    "host": Machine(launch=3000, core_bandwidth=10, total_bandwidth=80, cache_bandwidth=30,
                    cache_bytes=1 << 20, op_time={0: 0.02, CHEAP: 0.08, EXPENSIVE: 0.8, COSTLY: 3.0},
                    product_time=0.08),
    # An H200: kernels as nodes of a CUDA graph, products without tensor cores.
    "cuda": Machine(launch=2000, core_bandwidth=35, total_bandwidth=4000, cache_bandwidth=60,
                    cache_bytes=20 << 20, op_time={0: 0.005, CHEAP: 0.01, EXPENSIVE: 0.08, COSTLY: 0.4},
                    product_time=0.012, blocks_share=False, turn=1024, turn_ns=200, library_launch=3500,
                    library_rate=130000, library_bandwidth=2400, split=7500, split_inner=256),
}


def environments(dims: Iterable[Dim]) -> list[dict[str, int]]:
    """Nominal values for every symbol of ``dims``; one environment when nothing is unknown."""
    symbols = sorted({s for d in dims for s in D.symbols(d)}, key=lambda s: s.name)
    if not symbols:
        return [{}]
    return [{s.name: _nominal(s, k) for s in symbols} for k in range(len(NOMINAL_DIMS))]


def _nominal(s: D.Symbol, k: int) -> int:
    """What stands for an unknown dim in environment ``k``; a range of few sizes should suit its upper half."""
    sizes = NOMINAL_DIMS
    if isinstance(s.hi, int) and s.hi < sizes[-1]:
        sizes = (s.hi // 2 + 1, s.hi)
    return max(s.lo or 0, sizes[k])


def value_of(d: Dim, env: Mapping[str, int]) -> int:
    """``d`` in ``env``, unknown symbols taken as the larger nominal size; never negative."""
    if isinstance(d, int):
        return d
    full = {}
    for s in sorted(D.symbols(d), key=lambda s: s.name):
        guess = env.get(s.name, NOMINAL_DIMS[-1])
        full[s.name] = min(guess, s.hi) if isinstance(s.hi, int) else guess
    return max(0, D.evaluate(d, full))


def nbytes(node: Node, env: Mapping[str, int]) -> int:
    """Bytes of a node's value."""
    return value_of(node.size, env) * DTYPES[node.dtype].size


def evaluations(node: Node, env: Mapping[str, int]) -> int:
    """How many elements are touched to compute a node once."""
    if node.op in ("reduce", "arg_reduce", "scan"):
        return value_of(node.inputs[0].size, env)
    if node.op == "order":
        return value_of(node.size, env) * value_of(node.shape[-1], env)
    if node.op == "segment":
        return value_of(node.inputs[0].size, env) + value_of(node.size, env)
    if node.op == "dot":
        left, _ = node.attrs["contract"]
        return value_of(node.size, env) * value_of(D.product(node.inputs[0].shape[a] for a in left), env)
    if node.op in ("conv", "conv_filter"):
        return value_of(node.size, env) * value_of(D.product(node.inputs[1].shape[:-1]), env)
    if node.op == "window":
        return value_of(node.size, env) * value_of(D.product(node.attrs["size"]), env)
    return value_of(node.size, env)


def element_ns(node: Node, machine: Machine) -> float:
    """Time of one evaluation on one core."""
    if node.op == "dot":
        return machine.product_time
    return machine.op_time.get(CHEAP if node.op in HEAVY else OPS[node.op].cost, machine.op_time[CHEAP])


def compute_ns(node: Node, machine: Machine, env: Mapping[str, int]) -> float:
    """Time to compute a node once on one core."""
    return evaluations(node, env) * element_ns(node, machine)


@dataclass(frozen=True)
class Load:
    """Independent blocks that together take ``ns`` on one core, after ``serial_ns`` that every core spends."""

    blocks: int
    ns: float
    serial_ns: float = 0.0


def part_loads(part: Any, inputs: Sequence[Node], machine: Machine, env: Mapping[str, int]) -> list[Load]:
    """What a part of a schedule with these inputs computes, recomputation in every block and every reader included.

    Reads by attribute what schedule.build returns: stages over boxes, and kept nodes.
    """
    blocks = value_of(part.blocks, env)
    counts = {a.number: max(1, value_of(a.count, env)) for a in part.axes}
    stop = part.kept | set(inputs)
    work: dict[int, float] = {blocks: 0.0}  # by how many blocks share it
    serial = 0.0
    apart = part.block_ns(env) if part.block_ns else 0.0  # a block's products, or windows, when the schedule knows
    work[blocks] += blocks * apart
    for stage in part.stages:
        sizes = [value_of(d, env) for d in stage.shape]
        box = [min(size, value_of(extent, env)) for size, (_, extent) in zip(sizes, stage.box, strict=True)]
        once = math.prod(sizes)
        sharing = max(1, blocks // math.prod(counts[k] for k in stage.once))
        per_call = stage.hoisted and machine.blocks_share
        done = math.prod(box) * (1 if per_call else blocks if stage.hoisted else sharing)
        ns = max(1.0, done / once) * _once_ns(stage, once, stop, machine, env, apart > 0) if once else 0.0
        if machine.turn_ns and (stage.hoisted or _reads_memory(stage, stop, inputs)):
            ns = max(ns, (blocks if stage.hoisted else sharing) * _wait_ns(stage, math.prod(box), blocks, machine))
        if per_call:
            serial += ns  # every call does it, whatever its share of the blocks
        else:
            work[sharing] = work.get(sharing, 0.0) + ns
    return [Load(b, ns, serial if b == blocks else 0.0) for b, ns in work.items()]


def _wait_ns(stage: Any, elements: int, blocks: int, machine: Machine) -> float:
    """How long a block takes at least over ``elements`` of a stage; blocks of the same core wait together.

    What is folded along another dim than the last is loaded element by element, the rest in wide accesses.
    """
    if all(item.node.op in KNOWN for item in stage.items):
        return 0.0
    together = min(max(-(-blocks // NOMINAL_CORES["cuda"][0]), 1), BLOCKS_TOGETHER)
    narrow = stage.hoisted or (stage.folded and len(stage.shape) - 1 not in stage.folded)
    turn = machine.turn if narrow else WIDE * machine.turn
    return -(-elements // turn) * machine.turn_ns / together


def _reads_memory(stage: Any, stop: set[Node], inputs: Sequence[Node]) -> bool:
    """True for a stage that loads what other kernels have written, or the inputs."""
    given = {i for i in inputs if i.rank}
    return any(not given.isdisjoint(n.inputs) for item in stage.items for n in _inlined(item, stop))


def _once_ns(stage: Any, elements: int, stop: set[Node], machine: Machine, env: Mapping[str, int],
             without_known: bool) -> float:
    """Time of a stage over its whole domain, on one core."""
    total = 0.0
    for item in stage.items:
        if without_known and item.node.op in KNOWN:
            continue
        for n in _inlined(item, stop):
            total += element_ns(n, machine) * (elements if n is item.node else min(elements, value_of(n.size, env)))
    return total


def _inlined(item: Any, stop: set[Node]) -> list[Node]:
    """The nodes that an item evaluates at every index: its own, and operands that are kept nowhere."""
    found: dict[Node, None] = {item.node: None}
    stack = [item.body] if item.body is not item.node else list(item.node.inputs)
    while stack:
        n = stack.pop()
        if n not in found and n not in stop:
            found[n] = None
            stack.extend(n.inputs)
    return [n for n in found if n.op != "param"]


@dataclass(frozen=True)
class Estimate:
    """Time of a kernel, and the part of it that computes (both summed over environments and core counts)."""

    ns: float
    compute_ns: float


def _spread(parts: list[Load], cores: int) -> tuple[float, float]:
    """(cores kept busy, time to compute) when the blocks of all parts share ``cores``."""
    work = sum(p.ns for p in parts)
    serial = sum(p.serial_ns for p in parts)
    longest = max(p.ns / max(1, min(cores, p.blocks)) for p in parts)
    spent = serial + max(longest, work / cores)
    return max(1.0, min(cores, (serial + work) / spent)) if spent else cores, spent


def _library_ns(dims: Sequence[int], m: Machine) -> float:
    batch, rows, columns, inner = dims
    elements = batch * (rows * inner + inner * columns + rows * columns)
    ns = m.library_launch + max(math.prod(dims) / m.library_rate, 4 * elements / m.library_bandwidth)
    tiles = batch * -(-rows // TILE) * -(-columns // TILE)
    is_split = inner >= m.split_inner and 2 * tiles <= NOMINAL_CORES["cuda"][0]
    return max(ns, m.split) if is_split else ns


class CostModel:
    """Estimates for one target over nominal environments; times are summed over environments and core counts."""

    def __init__(self, target_name: str, envs: list[dict[str, int]]):
        self.machine = MACHINES[target_name]
        self.cores = NOMINAL_CORES[target_name]
        self.envs = envs
        self.compute: dict[Node, tuple[float, ...]] = {}
        self.bytes: dict[Node, tuple[int, ...]] = {}
        self.loads: dict[int, tuple[Any, list[list[Load]]]] = {}  # by the part's id, with the part

    @property
    def launches_ns(self) -> float:
        """The time of one launch, in the units of Estimate."""
        return self.machine.launch * len(self.cores) * len(self.envs)

    def step_ns(self, ns: float) -> float:
        """The mean time, without its launch, of a step whose Estimate is ``ns``."""
        return ns / (len(self.cores) * len(self.envs)) - self.machine.launch

    def estimate(self, group: Group, scheduled: Any) -> Estimate:
        """Estimated time of a group's kernel under a schedule."""
        loads = self._loads(scheduled)
        if not all(loads):  # a schedule that says no more than its blocks
            loads = [[Load(value_of(scheduled.blocks, env), sum(self._compute(n)[e] for n in group.nodes))]
                     for e, env in enumerate(self.envs)]
        reads = self._reads(group)
        total = compute = 0.0
        for e, parts in enumerate(loads):
            sizes = [read[e] for read in reads] + [self._bytes(n)[e] for n in group.outputs]
            for cores in self.cores:
                busy, spent = _spread(parts, cores)
                memory = sum(self._traffic_ns(size, busy) for size in sizes)
                total += self.machine.launch + max(spent, memory) + 0.25 * min(spent, memory)
                compute += spent
        return Estimate(total, compute)

    def _loads(self, scheduled: Any) -> list[list[Load]]:
        """Per environment, what the parts of a schedule compute; groups that grow share parts."""
        out: list[list[Load]] = [[] for _ in self.envs]
        for part in getattr(scheduled, "parts", ()):
            if id(part) not in self.loads:
                found = [part_loads(part, scheduled.inputs, self.machine, env) for env in self.envs]
                self.loads[id(part)] = part, found
            for here, more in zip(out, self.loads[id(part)][1], strict=True):
                here += more
        return out

    def _reads(self, group: Group) -> list[list[int]]:
        """Bytes per environment that the group reads of each input: what a slice or gather skips is not read."""
        touched = {i: [0] * len(self.envs) for i in group.inputs}
        for n in group.nodes:
            for position, i in enumerate(n.inputs):
                if i in touched:
                    part = n if position == 0 and n.op in PARTIAL_READS else i
                    touched[i] = [t + b for t, b in zip(touched[i], self._bytes(part), strict=True)]
        return [[min(t, b) for t, b in zip(touched[i], self._bytes(i), strict=True)] for i in group.inputs]

    def _traffic_ns(self, size: int, busy: float) -> float:
        m = self.machine
        if size <= m.cache_bytes:
            return size / (m.cache_bandwidth * busy)
        return size / min(m.core_bandwidth * busy, m.total_bandwidth)

    def library_ns(self, dims: Sequence[Dim]) -> float:
        """Time of a library's product of sizes (batch, m, n, k), in the units of Estimate."""
        return len(self.cores) * sum(_library_ns([value_of(d, env) for d in dims], self.machine) for env in self.envs)

    def copy_ns(self, nodes: Iterable[Node]) -> float:
        """Time to compute ``nodes`` once more, on one core, in the units of Estimate."""
        return len(self.cores) * sum(sum(self._compute(n)) for n in nodes)

    def bytes_of(self, node: Node) -> int:
        """Bytes of a value where unknown dims are large."""
        return max(self._bytes(node))

    def _compute(self, node: Node) -> tuple[float, ...]:
        if node not in self.compute:
            self.compute[node] = tuple(compute_ns(node, self.machine, env) for env in self.envs)
        return self.compute[node]

    def _bytes(self, node: Node) -> tuple[int, ...]:
        if node not in self.bytes:
            self.bytes[node] = tuple(nbytes(node, env) for env in self.envs)
        return self.bytes[node]
