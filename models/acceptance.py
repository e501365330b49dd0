"""Models that nobody here wrote (Keras, keras_hub) and small stateful ones, to be saved, rewritten and compared.

Every model comes with a float64 twin of the same weights: the reference that TensorFlow's own float32 error is
measured against.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Arrays = dict[str, np.ndarray]
Sample = Callable[[np.random.Generator, int], Arrays]


@dataclass(frozen=True)
class Case:
    """A model ready to be saved.

    Attributes:
      save: writes it as a SavedModel folder.
      reference: (signature, inputs) -> the outputs of the float64 twin, flattened in sorted name order.
      samples: per signature, draws inputs by name for a batch size.
      stateful: a call changes what the next one returns.
    """

    save: Callable[[str], None]
    reference: Callable[[str, Arrays], list[np.ndarray]]
    samples: dict[str, Sample]
    stateful: bool = False


@dataclass(frozen=True)
class Acceptance:
    """A named builder; ``build(full)`` gives the full size, or a reduced one for quick runs."""

    name: str
    build: Callable[[bool], Case]
    floating: bool = True


REGISTRY: dict[str, Acceptance] = {}


def acceptance(name: str, *, floating: bool = True) -> Callable[[Callable[[bool], Case]], Callable[[bool], Case]]:
    """Registers the decorated builder; ``floating``: its ops are mostly float arithmetic."""

    def add(build: Callable[[bool], Case]) -> Callable[[bool], Case]:
        REGISTRY[name] = Acceptance(name, build, floating)
        return build

    return add


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Keras layers built inside compute and keep their weights in float type ``name``."""
    old = keras.config.dtype_policy()
    floatx = keras.config.floatx()
    keras.config.set_dtype_policy(name)
    keras.config.set_floatx(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(old)
        keras.config.set_floatx(floatx)


def randomise(model: keras.Model, rng: np.random.Generator) -> None:
    """Moves vectors away from their initial 0, 1 or 1e-6, and batch-norm statistics too, so that each has an effect.

    The statistics are not those of a batch: that makes a random deep network chaotic, with float32 errors of 1e-4.
    """
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.moving_mean.assign(0.1 * rng.standard_normal(layer.moving_mean.shape))
            layer.moving_variance.assign(rng.uniform(0.5, 1.5, layer.moving_variance.shape))
    for var in model.trainable_variables:
        if len(var.shape) > 1:
            continue
        scale = any(word in var.path for word in ("gamma", "scale"))
        value = (1.0 if scale else 0.0) + 0.1 * rng.standard_normal(var.shape)
        var.assign(0.2 * value if "layer_scale" in var.path else value)


def temper(model: keras.Model, inputs: Any) -> None:
    """Gives a random classifier outputs that depend on its inputs, and a softmax that is not a bare 0 and 1.

    Batch-norm variances shrink together until the features of different inputs differ by a twentieth of their size;
    then the last dense (or 1x1 convolution) layer is scaled so that logits have a spread of 2.
    """
    last = [layer for layer in model.layers if hasattr(layer, "kernel")][-1]
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    tower = keras.Model(model.input, last.input)
    features = np.asarray(tower(inputs))
    for _ in range(20 if norms else 0):
        if features.std(0).mean() > 0.05 * np.abs(features).mean():
            break
        for layer in norms:
            layer.moving_variance.assign(layer.moving_variance * 0.8)
        features = np.asarray(tower(inputs))
    kernel = np.asarray(last.kernel)
    logits = features.reshape(-1, kernel.shape[-2]) @ kernel.reshape(kernel.shape[-2:])
    last.kernel.assign(kernel * (2.0 / np.std(logits)))


def _keras_case(build: Callable[[], keras.Model], sample: Sample, classifier: bool = False) -> Case:
    """A Keras model with randomised weights, and its float64 twin.

    Args:
      build: makes the model under the current dtype policy.
      sample: inputs by name; a model with one input has one entry.
      classifier: the last layer is a dense layer with softmax.
    """
    keras.utils.set_random_seed(7)
    rng = np.random.default_rng(7)
    model = build()
    randomise(model, rng)
    if classifier:
        temper(model, _arguments(model, sample(rng, 16)))
    with _precision("float64"):
        twin = build()
    twin.set_weights(model.get_weights())
    assert all(v.dtype != "float32" for v in twin.trainable_variables)

    def reference(_: str, inputs: Arrays) -> list[np.ndarray]:
        outputs = twin(_arguments(twin, inputs, np.float64))
        return [np.asarray(t) for t in tf.nest.flatten(outputs)]

    return Case(lambda path: model.export(path, verbose=False), reference, {"serving_default": sample})


def _arguments(model: keras.Model, inputs: Arrays, dtype: type = np.float32) -> Any:
    """Inputs as the model's own call takes them: a single tensor, or a dict by input name."""
    tensors = {k: tf.constant(v.astype(dtype) if v.dtype == np.float32 else v) for k, v in inputs.items()}
    return tensors if isinstance(model.input, dict) else next(iter(tensors.values()))


def _images(size: int) -> Sample:
    """Patches of random colour under noise: white noise alone looks the same to a deep network every time."""

    def draw(rng: np.random.Generator, batch: int) -> Arrays:
        patches = np.kron(rng.uniform(0, 255, (batch, 4, 4, 3)), np.ones((1, size // 4, size // 4, 1)))
        return {"image": np.clip(patches + rng.normal(0, 20, (batch, size, size, 3)), 0, 255).astype(np.float32)}

    return draw


def _application(name: str, small: int) -> None:
    def build(full: bool) -> Case:
        size, classes = (224, 1000) if full else (small, 100)
        make = getattr(keras.applications, name)
        shape = (size, size, 3)
        preprocessed = name == "ResNet50"  # the others rescale pixels themselves

        def model() -> keras.Model:
            pixels = keras.Input(shape, name="image")
            x = keras.layers.Rescaling(1 / 127.5, -1)(pixels) if preprocessed else pixels
            return make(weights=None, input_tensor=x, input_shape=shape, classes=classes)

        return _keras_case(model, _images(size), classifier=True)

    acceptance(name)(build)


for _name, _size in (("MobileNetV3Small", 64), ("ResNet50", 64), ("EfficientNetB0", 64), ("ConvNeXtTiny", 32)):
    _application(_name, _size)


def _tokens(vocabulary: int, length: int, segments: bool) -> Sample:
    def draw(rng: np.random.Generator, batch: int) -> Arrays:
        lengths = rng.integers(length // 2, length + 1, batch)
        mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
        out = {"token_ids": rng.integers(1, vocabulary, (batch, length), np.int32) * mask, "padding_mask": mask}
        if segments:
            out["segment_ids"] = (np.arange(length) >= lengths[:, None] // 2).astype(np.int32) * mask
        return out

    return draw


def _backbone(kind: str, full: bool, **options: Any) -> Case:
    import keras_hub

    layers, heads, width, words, length = (4, 8, 256, 8000, 64) if full else (2, 4, 64, 500, 24)
    make = getattr(keras_hub.models, kind)

    def model() -> keras.Model:
        return make(vocabulary_size=words, num_layers=layers, num_heads=heads, hidden_dim=width,
                    intermediate_dim=4 * width, max_sequence_length=length, dropout=0.1, **options)

    return _keras_case(model, _tokens(words, length, kind == "BertBackbone"))


@acceptance("BertBackbone")
def build_bert(full: bool) -> Case:
    return _backbone("BertBackbone", full, num_segments=2)


@acceptance("GPT2Backbone")
def build_gpt2(full: bool) -> Case:
    return _backbone("GPT2Backbone", full)


@acceptance("TextRNN")
def build_text(full: bool) -> Case:
    """Embedding with masking, an LSTM, a GRU and a bidirectional LSTM over sequences of unknown length."""
    words, width, length = (5000, 64, 40) if full else (200, 16, 12)

    def model() -> keras.Model:
        tokens = keras.Input((None,), dtype="int32", name="tokens")
        x = keras.layers.Embedding(words, width, mask_zero=True)(tokens)
        x = keras.layers.LSTM(width, return_sequences=True)(x)
        x = keras.layers.Bidirectional(keras.layers.LSTM(width // 2, return_sequences=True))(x)
        x = keras.layers.GRU(width)(x)
        return keras.Model(tokens, keras.layers.Dense(5, "softmax")(x))

    def draw(rng: np.random.Generator, batch: int) -> Arrays:
        keep = np.arange(length) < rng.integers(1, length + 1, batch)[:, None]
        return {"tokens": rng.integers(1, words, (batch, length), np.int32) * keep.astype(np.int32)}

    return _keras_case(model, draw)


CITIES = ["Aachen", "Bergen", "Cork", "Delft", "Evora", "Fano", "Ghent"]


@acceptance("WideDeep")
def build_wide_deep(full: bool) -> Case:
    """Wide and deep (arXiv 1606.07792): string lookup, hashing, crossed one-hots, embeddings, a dense tower."""
    bins, width = (1000, 128) if full else (50, 32)
    layers = keras.layers

    def model() -> keras.Model:
        city = keras.Input((1,), dtype="string", name="city")
        device = keras.Input((1,), dtype="string", name="device")
        numbers = keras.Input((8,), name="numbers")
        city_id = layers.StringLookup(vocabulary=CITIES)(city)
        device_id = layers.Hashing(bins)(device)
        wide = layers.Concatenate()([layers.CategoryEncoding(len(CITIES) + 1, output_mode="one_hot")(city_id), numbers])
        deep = layers.Concatenate()([
            layers.Flatten()(layers.Embedding(len(CITIES) + 1, 8)(city_id)),
            layers.Flatten()(layers.Embedding(bins, 16)(device_id)),
            layers.BatchNormalization()(numbers),
        ])
        for units in (width, width // 2):
            deep = layers.LayerNormalization()(layers.Dense(units, "gelu")(deep))
        score = layers.Dense(1)(wide) + layers.Dense(1)(deep)
        inputs = {"city": city, "device": device, "numbers": numbers}
        return keras.Model(inputs, layers.Activation("sigmoid")(score))

    def draw(rng: np.random.Generator, batch: int) -> Arrays:
        devices = np.array([f"device-{i}" for i in rng.integers(0, 200, batch)], object)[:, None]
        return {"city": rng.choice(np.array([*CITIES, "Unknown"], object), (batch, 1)), "device": devices,
                "numbers": rng.standard_normal((batch, 8)).astype(np.float32)}

    return _keras_case(model, draw)


class RunningScorer(tf.Module):
    """Keeps a running mean and variance of its inputs; ``observe`` updates them, ``score`` uses them."""

    def __init__(self, width: int, dtype: tf.DType) -> None:
        super().__init__()
        rng = np.random.default_rng(11)

        def variable(value: np.ndarray, trainable: bool = True) -> tf.Variable:
            return tf.Variable(value.astype(np.float32).astype(dtype.as_numpy_dtype), trainable=trainable)

        self.mean, self.variance = variable(np.zeros(width), False), variable(np.ones(width), False)
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.hidden = variable(rng.standard_normal((width, width)) * width ** -0.5)
        self.out = variable(rng.standard_normal((width, 3)) * width ** -0.5)
        spec = tf.TensorSpec([None, width], dtype, "x")
        self.observe = tf.function(self._observe, input_signature=[spec])
        self.score = tf.function(self._score, input_signature=[spec])

    def _observe(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        mean, variance = tf.nn.moments(x, [0])
        rate = 1.0 / tf.cast(self.count.assign_add(1), x.dtype)
        mean = self.mean.assign_add(rate * (mean - self.mean))
        variance = self.variance.assign_add(rate * (variance - self.variance))
        return {"mean": tf.identity(mean), "spread": tf.sqrt(variance)}

    def _score(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        y = (x - self.mean) * tf.math.rsqrt(self.variance + 1e-3)
        y = tf.matmul(tf.nn.softplus(tf.matmul(y, self.hidden)), self.out)
        return {"probability": tf.nn.softmax(y), "energy": -tf.reduce_logsumexp(y, 1)}


@acceptance("RunningScorer")
def build_scorer(full: bool) -> Case:
    width = 256 if full else 24
    module, twin = RunningScorer(width, tf.float32), RunningScorer(width, tf.float64)

    def reference(signature: str, inputs: Arrays) -> list[np.ndarray]:
        outputs = getattr(twin, signature)(tf.constant(inputs["x"].astype(np.float64)))
        return [np.asarray(outputs[k]) for k in sorted(outputs)]

    def draw(rng: np.random.Generator, batch: int) -> Arrays:
        return {"x": (1.0 + 2.0 * rng.standard_normal((batch, width))).astype(np.float32)}

    def save(path: str) -> None:
        tf.saved_model.save(module, path, signatures={"observe": module.observe, "score": module.score})

    return Case(save, reference, {"observe": draw, "score": draw}, stateful=True)
