"""Where the boxes and edges of the report's drawing lie.

Boxes are in layers, readers below what they read.  An edge that passes layers has a *wire* in each of them, a place
that is kept free, so that edges are only ever in the gaps between layers, on wires and in the right margin.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

GAP_X, GAP_Y, LINE = 18, 44, 15
MARGIN = 8  # of the lines that lead back, to the boxes

Edge = tuple[str, str]


@dataclass
class Box:
    """One rectangle; ``lines``: its text, the first line in ink, the rest soft.  A wire has none and no width."""

    name: str
    kind: str
    lines: list[str]
    width: int
    anchor: str = ""
    x: float = 0.0
    y: float = 0.0

    @property
    def height(self) -> int:
        return LINE * len(self.lines) + 10 if self.lines else 0

    @property
    def centre(self) -> float:
        return self.x + self.width / 2


def lay_out(boxes: Mapping[str, Box], edges: Sequence[Edge]) -> tuple[float, float, list[str]]:
    """Places the boxes; the drawing's width and height, and the paths of the edges (SVG's "d")."""
    level = _levels(boxes, edges)
    forward, wires = _wired([e for e in edges if level[e[0]] < level[e[1]]], level)
    places = {**boxes, **wires}
    width, bands = _place(places, level, forward)
    paths = [_down(places[a], places[b], bands[level[a]][1]) for a, b in forward]
    paths += [_back(boxes[a], boxes[b], bands[level[a]][1], width) for a, b in edges if level[a] >= level[b]]
    return width, bands[-1][1] + GAP_Y / 2 if bands else GAP_Y, paths


def _levels(boxes: Iterable[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Longest path from a source; edges of loops that lead back do not count.  A source is just above a reader."""
    before: dict[str, list[str]] = {n: [] for n in boxes}
    after: dict[str, list[str]] = {n: [] for n in boxes}
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    level: dict[str, int] = {}
    for root in before:
        stack = [(root, False)]
        open_: set[str] = set()
        while stack:
            name, leaving = stack.pop()
            if leaving:
                level[name] = max((level[b] + 1 for b in before[name] if b in level), default=0)
            elif name not in level and name not in open_:
                open_.add(name)
                stack.append((name, True))
                stack.extend((b, False) for b in before[name])
    for name in before:
        if not before[name] and after[name]:
            level[name] = min(level[r] for r in after[name]) - 1
    return level


def _wired(edges: Sequence[Edge], level: dict[str, int]) -> tuple[list[Edge], dict[str, Box]]:
    """Edges from layer to layer, and the wires that they pass; edges of one box share them.  Adds wires' levels."""
    found: dict[Edge, None] = {}
    wires: dict[str, Box] = {}
    for a, b in edges:
        at = a
        for k in range(level[a] + 1, level[b]):
            wire = f"{a}\0{k}"  # no node's name
            wires.setdefault(wire, Box(wire, "wire", [], 0))
            level[wire] = k
            found[at, wire] = None
            at = wire
        found[at, b] = None
    return list(found), wires


def _place(places: Mapping[str, Box], level: Mapping[str, int], edges: Sequence[Edge]
           ) -> tuple[float, list[tuple[float, float]]]:
    """Boxes in a layer near what they read; the drawing's width, and where each layer begins and ends."""
    before: dict[str, list[str]] = {n: [] for n in places}
    for a, b in edges:
        before[b].append(a)
    layers: list[list[Box]] = [[] for _ in range(max((level[n] for n in places), default=-1) + 1)]
    for name, box in places.items():
        layers[level[name]].append(box)
    width = max((sum(b.width + GAP_X for b in layer) for layer in layers), default=0) + 2 * GAP_X
    bands: list[tuple[float, float]] = []
    y = GAP_Y / 2
    for layer in layers:
        centre = {b.name: _mean([places[n].centre for n in before[b.name]], width / 2) for b in layer}
        layer.sort(key=lambda b: centre[b.name])
        x = (width - sum(b.width + GAP_X for b in layer) + GAP_X) / 2
        for box in layer:
            box.x, box.y = x, y
            x += box.width + GAP_X
        bands.append((y, y + max(b.height for b in layer)))
        y = bands[-1][1] + GAP_Y
    return width, bands


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _down(a: Box, b: Box, end: float) -> str:
    """From a box or wire to one of the next layer: straight to its layer's ``end``, then bent within the gap."""
    middle = (end + b.y) / 2
    return (f"M{a.centre:.1f} {a.y + a.height:.1f}V{end:.1f}"
            f"C{a.centre:.1f} {middle:.1f} {b.centre:.1f} {middle:.1f} {b.centre:.1f} {b.y:.1f}")


def _back(a: Box, b: Box, end: float, width: float) -> str:
    """An edge of a loop, to the same layer or one above: by the right margin."""
    return (f"M{a.centre:.1f} {a.y + a.height:.1f}V{end + MARGIN:.1f}H{width - MARGIN:.1f}"
            f"V{b.y - MARGIN:.1f}H{b.centre:.1f}V{b.y:.1f}")
