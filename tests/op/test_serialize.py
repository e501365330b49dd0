"""The byte format: both readers agree, and no bytes crash them."""
from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.op import programs
from tf_stitch import runtime
from tf_stitch.errors import ProgramError
from tf_stitch.ir import dims as D
from tf_stitch.ir.graph import Guard, SymbolSource
from tf_stitch.ir.separable import Batch
from tf_stitch.program import serialize
from tf_stitch.program.program import Buffer, Program

ALL = [programs.axpb, programs.chain, programs.phased, programs.rowsum, programs.gather, programs.reshape,
       programs.fill, programs.matmul, programs.joinable, programs.columns,
       programs.joinable_matrices]


@pytest.mark.parametrize("make", ALL)
def test_round_trip(make):
    program = make()
    data = serialize.dumps(program)
    assert serialize.loads(data) == program
    assert runtime.check_program(data) == ""


def test_text_may_be_left_out():
    data = serialize.dumps(programs.axpb(), text=False)
    assert serialize.loads(data).text == ""
    assert len(data) < len(serialize.dumps(programs.axpb()))


SYMBOLS = [programs.dim("n"), programs.dim("k", 1), programs.dim("v", None), programs.dim("w", 2, 50)]


@st.composite
def exprs(draw, depth=3):
    if not depth or draw(st.integers(0, 3)) == 0:
        return draw(st.one_of(st.sampled_from(SYMBOLS), st.integers(-5, 100)))
    a, b = draw(exprs(depth - 1)), draw(exprs(depth - 1))
    op = draw(st.sampled_from(["add", "mul", "div", "mod", "min", "max"]))
    positive = b if isinstance(b, D.Expr) else max(1, b)
    return {"add": lambda: a + b, "mul": lambda: a * b, "div": lambda: D.floordiv(a, positive),
            "mod": lambda: D.mod(a, positive), "min": lambda: D.dmin(a, b), "max": lambda: D.dmax(a, b)}[op]()


@given(st.lists(exprs(), min_size=1, max_size=5), st.lists(st.integers(0, 20), min_size=4, max_size=4))
def test_expressions_keep_their_value(dims, values):
    sources = {name: SymbolSource("value", 0, i) for i, name in enumerate("nkvw")}
    program = Program([Buffer("input", 0, "int64", (4,))], [], sources, [Guard("le", d, 0) for d in dims])
    data = serialize.dumps(program)
    assert runtime.check_program(data) == ""
    env = dict(zip("nkvw", values, strict=True))
    for before, after in zip(dims, serialize.loads(data).guards, strict=True):
        assert D.evaluate(after.a, env) == D.evaluate(before, env)


def test_a_size_is_written_with_its_narrowest_range():
    loose, tight = D.symbol("v", None), D.symbol("v", 0, 50)  # a guard, and the shapes that rely on it
    program = Program([Buffer("input", 0, "int64", (tight,))], [], {"v": SymbolSource("value", 0, 0)},
                      [Guard("le", 0, loose)])
    back = serialize.loads(serialize.dumps(program))
    assert back.buffers[0].shape == (tight,)
    assert D.symbols(back.guards[0].b) == D.symbols(tight)


def test_equal_parts_are_stored_once():
    n = programs.dim("n")
    big = D.product([n + i for i in range(6)])
    one = serialize.dumps(programs.program([Buffer("input", 0, "int64", (n, big))], [],
                                           {"n": SymbolSource("dim", 0, 0)}, code={}, text=""))
    many = serialize.dumps(programs.program([Buffer("input", 0, "int64", (n, *[big] * 9))], [],
                                            {"n": SymbolSource("dim", 0, 0)}, code={}, text=""))
    assert len(many) < len(one) + 20


def test_unknown_size_is_refused():
    program = Program([Buffer("input", 0, "int64", (programs.dim("q"),))], [], {}, [])
    with pytest.raises(ProgramError, match="'q', which none of its inputs gives"):
        serialize.dumps(program)


def test_a_number_past_64_bits_is_refused():
    with pytest.raises(ProgramError, match="64 bits"):
        serialize.dumps(Program([Buffer("input", 0, "int64", (1 << 63,))], [], {}, []))


@pytest.mark.parametrize("make", ALL)
def test_every_cut_is_noticed(make):
    data = serialize.dumps(make())
    for end in {*range(0, min(len(data), 300)), *range(300, len(data), 997)}:
        assert runtime.check_program(data[:end])
        with pytest.raises(ProgramError):
            serialize.loads(data[:end])


def test_every_flipped_byte_is_noticed():
    data = serialize.dumps(programs.reshape())
    for at in range(len(data)):
        for bit in (0, 7):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            assert runtime.check_program(bytes(bad))
            with pytest.raises(ProgramError):
                serialize.loads(bytes(bad))


def test_bad_contents_under_a_good_checksum():
    """What gets past the checksum: both readers refuse it or both can live with it; none crashes."""
    rng = random.Random(5)
    refused = 0
    for make in ALL:
        payload = serialize.dumps(make(), text=False)[9:]
        head = payload.index(b"\x7fELF") if b"\x7fELF" in payload else len(payload)
        for _ in range(1500):
            bad = bytearray(payload)
            for _ in range(rng.choice([1, 1, 1, 2, 8])):
                bad[rng.randrange(head)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            data = serialize.seal(bytes(bad))
            refused += bool(runtime.check_program(data))
            with contextlib.suppress(ProgramError):
                serialize.loads(data)
    assert refused > 1500


@pytest.mark.parametrize("change, message", [
    (lambda p: p.buffers.append(Buffer("output", 0, "float32", ())), "output 0 is there twice"),
    (lambda p: p.buffers.append(Buffer("output", 2, "float32", ())), "output 1 is missing"),
    (lambda p: p.steps.clear(), "output 0 is never written"),
    (lambda p: p.symbols.update(n=SymbolSource("dim", 7, 0)), "symbol 'n' reads an input that does not exist"),
    (lambda p: p.symbols.update(n=SymbolSource("dim", 0, 2)), "symbol 'n' reads a dim that does not exist"),
    (lambda p: p.symbols.update(n=SymbolSource("value", 0, 2)), "not of an integer type"),
])
def test_what_the_op_refuses(change, message):
    program = programs.axpb()
    change(program)
    assert message in runtime.check_program(serialize.dumps(program))


@pytest.mark.parametrize("changes, message", [
    ({"first": 1, "phases": (1,) * 5}, "a grid has a step whose kernel it does not hold"),
    ({"bodies": ("t_axpb",), "keeps": ((0, ()),)}, "a grid has a step whose kernel it does not hold"),
    ({"bases": (0, 1, 2)}, "a grid lacks the base of a buffer"),
    ({"phases": (3, 1, 1)}, "steps of a phase depend on each other"),
    ({"phases": ()}, "a grid has no phases"),
    ({"phases": (2, 2, 7)}, "step of a phase 6 does not exist"),
    ({"first": 6}, "step 6 does not exist"),
    ({"keeps": ((0, (2,)), (0, ()))}, "a grid keeps an operand that a step does not have"),
])
def test_grids_that_the_op_refuses(changes, message):
    program = programs.phased()
    assert not runtime.check_program(serialize.dumps(program))
    program.grids = [dataclasses.replace(program.grids[0], **changes)]
    assert message in runtime.check_program(serialize.dumps(program))


def test_grids_that_overlap_are_refused():
    program = programs.phased()
    whole = program.grids[0]
    program.grids = [whole, dataclasses.replace(whole, first=4, phases=(1,))]
    assert "its grids overlap" in runtime.check_program(serialize.dumps(program))


@pytest.mark.parametrize("batch, message", [
    (Batch("n", (0, None), ((0, 1), (0, 1), None, (0, 1))), "its batch is of another number of inputs or outputs"),
    (Batch("n", (0, None, 0), ((0, 1),)), "its batch is of another number of inputs or outputs"),
    (Batch("n", (1, None, 0), ((0, 1), (0, 1), None, (0, 1))), "its batch is a dim of another size"),
    (Batch("v", (0, None, 0), ((0, 1), (0, 1), None, (0, 1))), "its batch is a dim of another size"),
    (Batch("n", (0, None, 1), ((0, 1), (0, 1), None, (0, 1))), "its batch is a dim that does not exist"),
    (Batch("n", (0, None, 0), ((0, 1), (1, 1), None, (0, 1))), "its batch is a dim that does not exist"),
    (Batch("n", (None, None, None), ((0, 1), (0, 1), None, (0, 1))), "its batch is in none of its inputs"),
])
def test_batches_that_the_op_refuses(batch, message):
    program = dataclasses.replace(programs.joinable(), batch=batch)
    assert message in runtime.check_program(serialize.dumps(program))


def test_a_program_without_a_batch_is_as_before():
    data, more = (serialize.dumps(programs.joinable() if b else dataclasses.replace(programs.joinable(), batch=None))
                  for b in (False, True))
    assert more[9:].startswith(data[9:]) and serialize.loads(data).batch is None


def test_other_versions_and_other_bytes():
    data = bytearray(serialize.dumps(programs.axpb()))
    data[4], data[5] = serialize.OLDEST, data[5] ^ serialize.VERSION
    assert not runtime.check_program(bytes(data)) and serialize.loads(bytes(data)) == programs.axpb()
    data[4] = serialize.VERSION + 1
    assert "op library is older than what wrote it" in runtime.check_program(bytes(data))
    data[4] = serialize.OLDEST - 1
    assert f"format version {data[4]}" in runtime.check_program(bytes(data))
    with pytest.raises(ProgramError, match="rewrite the model again"):
        serialize.loads(bytes(data))
    assert "does not start" in runtime.check_program(b"")
    assert "does not start" in runtime.check_program(b"hello, this is no program")
