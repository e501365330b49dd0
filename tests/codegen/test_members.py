"""Parts that are alike share a text: what may differ, what may not, and what the table holds."""
from __future__ import annotations

from tf_stitch.codegen.members import FIRST, LEAST, Members, PartText, members
from tf_stitch.ir import dims as D

TYPES = {**{f"x{k}": "float" for k in range(LEAST)}, "x99": "ts_i64"}


def part(source="x0", rows=40, start=16, width=4, blocks=2, literal="7ll"):
    return PartText([f"TS_PART({FIRST}, {blocks}) {{", f"  TS_BLOCKS(b, {FIRST}, {blocks}) {{",
                     f"    const ts_i64 v1 = ts_i64({literal});", f"    const ts_idx k2 = ts_clip_index(v1, {rows});",
                     f"    TS_RUN_LOAD(float, p3, {source}, {start} + k2 * 16, {width})", "  }", "}"], blocks)


def family(*parts):
    return [len(m.texts) for m in members(parts, TYPES.__getitem__)]


def test_buffers_bounds_starts_and_wide_literals_may_differ():
    assert family(*(part(f"x{k}", 40 + k, 16 * (k + 1), literal=f"{k}ll") for k in range(LEAST))) == [LEAST]
    assert family(part(), part(rows=2), part(rows=3)) == [1, 1, 1], "few compile soon enough"


def test_what_must_be_constant_keeps_parts_apart():
    alike = [part(rows=k) for k in range(2, LEAST + 2)]
    assert family(*alike, part(width=2)) == [LEAST, 1]
    assert family(*alike, part(blocks=3)) == [LEAST, 1]
    assert family(*alike, part(source="x99")) == [LEAST, 1], "another type"
    assert family(*alike, part(literal="7.0f")) == [LEAST, 1]


def test_families_begin_where_their_first_part_was():
    a, b = ([part(width=w, rows=k) for k in range(2, LEAST + 2)] for w in (4, 2))
    mixed = [x for pair in zip(b, a, strict=True) for x in pair]
    assert [m.texts for m in members(mixed, TYPES.__getitem__)] == [b, a]


def test_the_table_holds_what_differs():
    tables: dict[str, str] = {}

    def table(kind: str, values: str) -> str:
        assert kind == "int64_t"
        return tables.setdefault(values, f"t{len(tables)}")

    (made,) = members([part(f"x{k}", 40 + k, 16) for k in range(LEAST)], TYPES.__getitem__)
    lines = made.lines(D.symbol("n0") + 1, lambda d: f"({D.to_text(d)})", table, TYPES.__getitem__)
    assert set(tables) == {", ".join(map(str, range(first, first + LEAST))) for first in (0, 40)}
    text = "\n".join(lines)
    assert made.blocks == 2 * LEAST and f", ({2 * LEAST})) {{" in lines[0] and "TS_MEMBERS(ts_m, " in lines[1]
    assert FIRST not in text and "16 + k2 * 16" in text and "ts_clip_index(v1, ts_c0)" in text
    assert "TS_BUFFER(float, t1[ts_m])" in text and "x0" not in text


def test_a_part_alone_stays_as_it_is():
    lone = Members([part()])
    assert lone.lines(5, str, lambda *_: "", TYPES.__getitem__) == [x.replace(FIRST, "5") for x in part().lines]
