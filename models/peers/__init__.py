"""The workloads in JAX (jax.jit) and PyTorch (torch.compile), to be compared with TensorFlow's.

One definition of each, over the few operations that both libraries have (:mod:`.ops`); weights, inputs and the float64
results come from files that :mod:`models.reference` wrote, so that every system computes the same function of the
same numbers.  A library runs in a process of its own (``python -m models.peers``): two libraries in one process share
neither the GPU's memory pool nor, always, its CUDA libraries.
"""
