"""Every primitive of the table on the host, judged by the interpreter."""
from __future__ import annotations

import pytest

from tests.primitives import forms, judge
from tf_stitch.backend import host
from tf_stitch.compiler import compile_together
from tf_stitch.ir.dtypes import DTYPES
from tf_stitch.ir.ops import OPS
from tf_stitch.options import Options


def test_every_op_has_a_form():
    assert {f.op for dtype in DTYPES for f in forms(dtype)} == set(OPS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_primitives(dtype):
    made = forms(dtype)
    programs = compile_together([f.graph for f in made], Options(target="host", levels=()))
    compared, wrong = judge(zip(made, programs, strict=True), host.run)
    assert not wrong, "\n".join(wrong)
    assert compared > 4 * len(made)
