"""The tenants of models.serving and models.soak: a few architectures, each with several sets of weights.

An architecture is traced, saved and rewritten once.  Its other tenants are the same graphs beside other weights.
"""
from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tf_stitch
from tf_stitch.saved_model import MODEL
from tf_stitch.serving.load import Client
from tf_stitch.serving.policies import Model, merging

from .workload import Params
from .workloads import REGISTRY

KINDS = {"resnet18": 1, "speech": 1, "bert": 1, "dlrm": 16}  # workload: batch of a request
SAMPLES = 4  # distinct inputs of each architecture
COPIES = {"stitched": tf_stitch.Options(), "superkernel": tf_stitch.Options(superkernels=True)}
VARIABLES = "variables"


def tenants(kinds: Sequence[str], each: int, folder: Path, policies: Sequence[str] = ("stitched",), *,
            slo_ms: float = 50.0, prepared: Path | None = None, say: Callable[[str], None] = print) -> list[Model]:
    """``each`` tenants of each kind, with the copies that the policies serve, their inputs and right answers.

    Args:
      kinds: names of workloads.
      folder: where they are written.
      policies: of tf_stitch.serving.policies.
      prepared: a folder that :func:`prepare` filled; what is there is not rewritten here.
    """
    begin = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda kind: _Kind(kind, folder, slo_ms, "batching" in policies).tenants(each), kinds))
    say(f"{each * len(made)} tenants saved in {time.perf_counter() - begin:.1f} s")
    wanted = [(models[0], policy) for models in made for policy in policies if policy in COPIES]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: _stitch(*job, prepared), wanted))
    say(f"{len(wanted)} models stitched at {time.perf_counter() - begin:.1f} s")
    return [_with_copies(m, models[0], policies) for models in made for m in models]


def prepare(kinds: Sequence[str], goal: Path, target: str) -> None:
    """Rewrites a model of each kind for ``target`` (a GPU need not be here) and keeps the graphs, without weights."""
    goal.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tf_stitch_prepare_") as temporary:
        for model in tenants(kinds, 1, Path(temporary), ()):
            for policy in COPIES:
                begin = time.perf_counter()
                _stitch(model, policy, None, target)
                shutil.copyfile(_copy(model, policy) / MODEL, goal / f"{_copy(model, policy).name}.pb")
                print(f"{_copy(model, policy).name}: {time.perf_counter() - begin:.1f} s", flush=True)


class _Kind:
    """One architecture."""

    def __init__(self, name: str, folder: Path, slo_ms: float, merged: bool) -> None:
        self.workload, self.folder, self.slo_ms, self.merged = REGISTRY[name], folder, slo_ms, merged
        self.instance = self.workload.instance()
        self.module = tf.Module()
        self.module.weights = self.instance.params.variables
        self.module.call = self._callable(lambda function: function)
        rng = np.random.default_rng(self.workload.seed + 1)
        batch = KINDS.get(name, 1)
        # The same inputs for all weights, so that an answer of the wrong tenant shows.
        self.samples = [{f"x{i}": a for i, a in enumerate(self.workload.inputs(rng, batch))} for _ in range(SAMPLES)]

    def tenants(self, each: int) -> list[Model]:
        """The first one is saved whole; the others are its graph and other weights."""
        return [self._tenant(k) for k in range(each)]

    def _tenant(self, k: int) -> Model:
        path = self.folder / f"{self.workload.name}_{k}"
        if k == 0:
            tf.saved_model.save(self.module, os.fspath(path), signatures=self.module.call)
            if self.merged:
                self._save_merged(path.with_name(f"{path.name}_batching"))
        else:
            self.workload.make(_Redrawn(self.workload.seed + k, self.module.weights))
            (path / VARIABLES).mkdir(parents=True)
            tf.train.Checkpoint(root=self.module).write(os.fspath(path / VARIABLES / VARIABLES))
            shutil.copyfile(path.with_name(f"{self.workload.name}_0") / MODEL, path / MODEL)
        return Model(path, Client(path.name, self.slo_ms, self.samples, self._right()))

    def _right(self) -> list[dict[str, np.ndarray]]:
        return [{key: y.numpy() for key, y in self.module.call(*map(tf.constant, s.values())).items()}
                for s in self.samples]

    def _save_merged(self, path: Path) -> None:
        module = tf.Module()
        module.weights = self.module.weights
        module.call = self._callable(merging)
        tf.saved_model.save(module, os.fspath(path), signatures=module.call)

    def _callable(self, wrap: Callable[[Any], Any]) -> Any:
        specs = [tf.TensorSpec(s.shape, s.dtype, f"x{i}") for i, s in enumerate(self.instance.signature())]
        function = wrap(lambda *args: tf.nest.flatten(self.instance.function(*args)))

        def call(*args: tf.Tensor) -> dict[str, tf.Tensor]:
            return {f"y{i}": y for i, y in enumerate(function(*args))}

        return tf.function(call, autograph=False, input_signature=specs)


class _Redrawn(Params):
    """Draws weights into variables that are there."""

    def __init__(self, seed: int, variables: Sequence[tf.Variable]) -> None:
        super().__init__(seed)
        self._targets = iter(variables)

    def variable(self, value: np.ndarray, trainable: bool = True) -> tf.Variable:
        var = next(self._targets)
        var.assign(value)
        self.variables.append(var)
        return var


def _copy(model: Model, policy: str) -> Path:
    return model.folder.with_name(f"{model.folder.name}_{policy}")


def _stitch(model: Model, policy: str, prepared: Path | None, target: str = "auto") -> None:
    goal = _copy(model, policy)
    graph = prepared / f"{goal.name}.pb" if prepared else None
    if graph is not None and graph.exists():
        _beside(graph, model.folder, goal)
    else:
        tf_stitch.rewrite_saved_model(model.folder, goal, target=target, options=COPIES[policy], verify=False)


def _with_copies(model: Model, first: Model, policies: Sequence[str]) -> Model:
    copies = {policy: _copy(model, policy) for policy in policies if policy in (*COPIES, "batching")}
    for policy, folder in copies.items():
        if not folder.exists():
            _beside(_copy(first, policy) / MODEL, model.folder, folder)
    return replace(model, copies=copies)


def _beside(graph: Path, weights: Path, goal: Path) -> None:
    """A SavedModel of one graph and the weights of another."""
    goal.mkdir()
    shutil.copyfile(graph, goal / MODEL)
    (goal / VARIABLES).symlink_to((weights / VARIABLES).absolute(), target_is_directory=True)
