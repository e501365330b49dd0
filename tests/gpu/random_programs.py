"""Random programs: many small kernels over temporaries that share the arena, and matrix products between them."""
from __future__ import annotations

import numpy as np

from tests.gpu.kernels import on_gpu
from tests.op import programs
from tf_stitch.ir.graph import SymbolSource
from tf_stitch.program.program import AliasStep, Buffer, LibraryStep, Program


class Drawn:
    """A program over float32 [n, n] values, and the same in NumPy."""

    def __init__(self, seed: int, steps: int = 25):
        rng = np.random.default_rng(seed)
        n = programs.dim("n")
        self.buffers = [Buffer("input", i, "float32", (n, n)) for i in range(3)]
        self.steps: list = []
        self.recipe: list[tuple] = []  # (operation, operands, result) over buffers
        for t in range(steps):
            out = len(self.buffers)
            kind = "output" if t >= steps - 2 else "temp"
            self.buffers.append(Buffer(kind, t - (steps - 2) if kind == "output" else t, "float32", (n, n)))
            recent = range(max(0, out - 6), out) if rng.random() < 0.8 else range(out)
            a, b = (int(x) for x in rng.choice(list(recent), 2))
            self._add(str(rng.choice(["axpb", "mul", "matmul"], p=[0.45, 0.4, 0.15])), a, b, out, n)
        self.buffers.append(Buffer("output", 2, "float32", (n * n,)))
        self.steps.append(AliasStep(3 + int(rng.integers(steps - 2)), len(self.buffers) - 1))
        self.plain = programs.program(self.buffers, self.steps, {"n": SymbolSource("dim", 0, 0)}, code={}, text="")

    @property
    def program(self) -> Program:
        """With code for the GPU."""
        return on_gpu(self.plain)

    def _add(self, operation, a, b, out, n):
        operands = (a,) if operation == "axpb" else (a, b)
        if operation == "matmul":
            self.steps.append(LibraryStep("matmul", (a, b, out), (1, n, n, n), (0,) * 5, "dot"))
        else:
            self.steps.append(programs.launch(f"t_{operation}", (*operands, out), n * n))
        self.recipe.append((operation, operands, out))

    def in_tf(self, *inputs):
        """What the program computes; NumPy arrays or tensors."""
        values = dict(enumerate(inputs))
        for operation, operands, out in self.recipe:
            x = [values[i] for i in operands]
            values[out] = (2 * x[0] + 1 if operation == "axpb" else x[0] * x[1] if operation == "mul"
                           else x[0] @ x[1])
        source = self.steps[-1].source
        first = len(self.buffers) - 3
        flat = values[source]
        return values[first], values[first + 1], (flat.reshape(-1) if isinstance(flat, np.ndarray) else flat)
