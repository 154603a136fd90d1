#include "rows.h"

#include <cmath>

namespace orca {
namespace {

float inverse_root_mean_square(const float* x, int64_t size, float eps) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 value = _mm512_maskz_loadu_ps(first_lanes(static_cast<int>(size - i)), x + i);
    sum = _mm512_fmadd_ps(value, value, sum);
  }
  return 1.f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(size) + eps);
}

}  // namespace

void normalise(const float* x, const float* weight, int64_t size, float eps, bf16* out) {
  const __m512 factor = _mm512_set1_ps(inverse_root_mean_square(x, size, eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = first_lanes(static_cast<int>(size - i));
    const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), factor);
    store_bf16(out + i, mask, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, weight + i)));
  }
}

void place_head(float* x, int size, const float* norm, float eps, const float* cos, const float* sin, int rotated,
                bf16* out) {
  if (norm != nullptr) {
    const __m512 factor = _mm512_set1_ps(inverse_root_mean_square(x, size, eps));
    for (int i = 0; i < size; i += kLanes) {
      const __mmask16 mask = first_lanes(size - i);
      const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), factor);
      _mm512_mask_storeu_ps(x + i, mask, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, norm + i)));
    }
  }
  const int half = rotated / 2;
  for (int i = 0; i < half; i += kLanes) {
    const __mmask16 mask = first_lanes(half - i);
    const __m512 first = _mm512_maskz_loadu_ps(mask, x + i), second = _mm512_maskz_loadu_ps(mask, x + half + i);
    const __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
    store_bf16(out + i, mask, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
    store_bf16(out + half + i, mask, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
  }
  for (int i = rotated; i < size; i += kLanes) {
    const __mmask16 mask = first_lanes(size - i);
    store_bf16(out + i, mask, _mm512_maskz_loadu_ps(mask, x + i));
  }
}

void unpack_row(const orca_linear& linear, int64_t token, float scale, float* out) {
  const auto* from = static_cast<const pair*>(linear.weight) + token / kPanel * n_pairs(linear.n_in) * kPanel;
  const __m512i lane = _mm512_set1_epi32(static_cast<int>(token % kPanel));
  const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i where = _mm512_add_epi32(lane, _mm512_slli_epi32(steps, 5));  // kPanel pairs apart
  for (int64_t k = 0; k < n_pairs(linear.n_in); k += kLanes) {
    const int64_t left = n_pairs(linear.n_in) - k;
    const __m512i pairs = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first_lanes(static_cast<int>(left)),
                                                      where, from + k * kPanel, 4);
    const int n = static_cast<int>(2 * left);
    const __m512 low = widen(_mm512_castsi512_si256(pairs)), high = widen(_mm512_extracti64x4_epi64(pairs, 1));
    _mm512_mask_storeu_ps(out + 2 * k, first_lanes(n), _mm512_mul_ps(low, _mm512_set1_ps(scale)));
    _mm512_mask_storeu_ps(out + 2 * k + kLanes, first_lanes(n - kLanes), _mm512_mul_ps(high, _mm512_set1_ps(scale)));
  }
}

}  // namespace orca
