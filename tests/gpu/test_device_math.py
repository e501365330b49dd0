"""ts_device.h on a GPU: worst errors over all float32 arguments against double, special values, conversions."""
from __future__ import annotations

import numpy as np
import pytest

from tf_stitch.backend import cuda

pytestmark = pytest.mark.gpu
f32 = np.float32

TEXT = r"""
__device__ double last_place(double want) {
  float w = fabsf((float)want);
  w = isinf(w) ? 3.4028235e38f : w;
  return (double)__int_as_float(__float_as_int(w) + 1) - (double)w;
}
// In units of the last place; a result that must be denormal, or next to it, may be 0 where `flush`.
__device__ double error_of(float got, double want, bool flush) {
  if (isnan(want) || isnan(got)) return isnan(want) && isnan(got) ? 0 : 1e30;
  if (flush && fabs(want) < 1.1756e-38 && got == 0) return 0;
  if (isinf(got) || isinf((float)want)) return got == (float)want ? 0 : 1e30;
  return fabs((double)got - want) / last_place(want);
}
// The worst error in the upper half of *worst, where it is in the lower.
__device__ void note(unsigned long long* worst, double error, unsigned at) {
  atomicMax(worst, (unsigned long long)__float_as_uint((float)error) << 32 | at);
}
// `unit`: the error that counts as 1, in units of the last place
#define WORST(name, got, want, flush, unit)                                                                      \
  extern "C" __global__ void name(unsigned first, unsigned last, unsigned long long* worst) {                    \
    double most = -1; unsigned place = 0;                                                                        \
    for (unsigned long long i = first + blockIdx.x * 256ull + threadIdx.x; i <= last; i += gridDim.x * 256ull) { \
      float x = __uint_as_float((unsigned)i);                                                                    \
      double e = error_of(got, want, flush) / (unit);                                                            \
      if (e > most) most = e, place = (unsigned)i;                                                               \
    }                                                                                                            \
    if (most >= 0) note(worst, most, place);                                                                     \
  }
WORST(erfc_worst, ts_erfc(x), erfc((double)x), true, 1)
WORST(exp_down_worst, ts_exp_down(x), exp((double)x), true, 1)
WORST(ndtr_worst, ts_ndtr(x), normcdf((double)x), true, fabsf(x) < 20 ? 1 + 0.2 * x * x : 1)
WORST(sigmoid_worst, ts_sigmoid(x), 1 / (1 + exp(-(double)x)), true, 1)
WORST(rsqrt_worst, ts_rsqrt(x), 1 / sqrt((double)x), false, 1)
extern "C" __global__ void divide(const float* x, const float* s, float* y, int n) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = ts_divide(x[i], ts_divisor(s[i]));
}
extern "C" __global__ void extremes(const float* x, const float* s, float* y, int n) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[2 * i] = ts_max(x[i], s[i]), y[2 * i + 1] = ts_min(x[i], s[i]);
}
extern "C" __global__ void halves(const float* x, ts_half* h, ts_bfloat16* b, float* y, int n) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  h[i] = ts_to_half(x[i]), b[i] = ts_to_bfloat16(x[i]);
  y[2 * i] = ts_to_float(h[i]), y[2 * i + 1] = ts_to_float(b[i]);
}
"""
DOWN, DOWN_60, UP, ANY = [(0x80000000, 0xFFFFFFFF)], [(0x80000000, 0xC2700000)], [(0, 0x7FFFFFFF)], [(0, 0xFFFFFFFF)]
BOUNDS = {"erfc": (7, ANY), "exp_down": (5, DOWN), "exp_down to -60": (3, DOWN_60), "ndtr": (7, ANY),
          "sigmoid": (5, ANY), "rsqrt": (2, UP)}
SPECIALS = f32([0.0, -0.0, 1, -1, 3, -7, np.inf, -np.inf, np.nan, 1e-30, -1e30, 3e38, -2e-38])


@pytest.fixture(scope="module")
def module():
    target = cuda.device_target()
    return cuda.driver().module_from_buffer(cuda.compile_text(TEXT, (target,))[target])


def call(module, name: str, inputs, outputs, *more) -> list[np.ndarray]:
    """Runs a kernel of one thread per element."""
    driver = cuda.driver()
    n = len(inputs[0])
    arguments = [driver.In(x) for x in inputs] + [driver.Out(y) for y in outputs]
    module.get_function(name)(*arguments, np.int32(n), block=(256, 1, 1), grid=(-(-n // 256), 1))
    return outputs


@pytest.mark.parametrize("name", BOUNDS)
def test_errors_over_all_arguments(module, name):
    bound, ranges = BOUNDS[name]
    worst = np.zeros(1, np.uint64)
    for first, last in ranges:
        kernel = module.get_function(f"{name.split()[0]}_worst")
        kernel(np.uint32(first), np.uint32(last), cuda.driver().InOut(worst), block=(256, 1, 1), grid=(2048, 1))
    error, at = np.uint32(worst[0] >> np.uint64(32)).view(f32), np.uint32(worst[0] & np.uint64(0xFFFFFFFF)).view(f32)
    print(f"{name}: {error:.2f} units of the last place at {at!r}")
    assert error <= bound, at


def test_division_by_one_of_many(module):
    rng = np.random.default_rng(0)
    a, b = (v.ravel() for v in np.meshgrid(SPECIALS, SPECIALS))
    x = np.concatenate([a, rng.integers(0, 2**32, 1 << 22, dtype=np.uint32).view(f32)])
    s = np.concatenate([b, rng.integers(0, 2**32, 1 << 22, dtype=np.uint32).view(f32)])
    s[(np.abs(s) < 2.0**-126) & (s != 0)] = 1  # such divisors count as 0
    (y,) = call(module, "divide", [x, s], [np.empty_like(x)])
    with np.errstate(all="ignore"):
        want = x.astype(np.float64) / s
        near = np.abs(y - want) <= np.where(np.abs(s) <= 2.0**100, 1, 8) * np.spacing(np.abs(want.astype(f32)))
    ok = near | (y == want.astype(f32)) | (np.isnan(y) & np.isnan(want))
    assert ok.all(), (x[~ok][:5], s[~ok][:5], y[~ok][:5])
    usual = (np.abs(s) < 2.0**100) & (np.abs(want) > 2.0**-90) & np.isfinite(want) & (np.abs(want) < 1e38)
    assert (y == want.astype(f32))[usual].mean() > 0.99999  # all but always the nearest
    infinite = np.isinf(x) & np.isfinite(s)
    assert np.array_equal(y[infinite], want[infinite].astype(f32), equal_nan=True)


def test_extremes_and_nan(module):
    a, b = (np.ascontiguousarray(v.ravel()) for v in np.meshgrid(SPECIALS, SPECIALS))
    (y,) = call(module, "extremes", [a, b], [np.empty((len(a), 2), f32)])
    np.testing.assert_array_equal(y[:, 0], np.maximum(a, b))
    np.testing.assert_array_equal(y[:, 1], np.minimum(a, b))


def test_conversions_of_halves(module):
    import ml_dtypes

    rng = np.random.default_rng(1)
    x = np.concatenate([SPECIALS, rng.integers(0, 2**32, 1 << 22, dtype=np.uint32).view(f32),
                        np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(f32),
                        (np.arange(1 << 16, dtype=np.uint32) << 16).view(f32)])
    h, b, y = call(module, "halves", [x], [np.empty(len(x), np.uint16), np.empty(len(x), np.uint16),
                                           np.empty((len(x), 2), f32)])
    with np.errstate(all="ignore"):
        for bits, kind, back in ((h, np.float16, y[:, 0]), (b, ml_dtypes.bfloat16, y[:, 1])):
            want = x.astype(kind).astype(f32)
            np.testing.assert_array_equal(bits.view(kind).astype(f32), want)
            np.testing.assert_array_equal(back, want)
