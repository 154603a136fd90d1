#include "rows.h"

#include <algorithm>
#include <cmath>

#include "quantised.h"

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

namespace {

// Lane `token % 32` of up to 16 pairs of a panel, as float32: the first 16 elements, and those behind them.
struct Lane {
  __m512 low, high;

  Lane(const pair* pairs, int64_t token, int n) {
    const __m512i lane = _mm512_set1_epi32(static_cast<int>(token % kPanel));
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i where = _mm512_add_epi32(lane, _mm512_slli_epi32(steps, 5));  // kPanel pairs apart
    const __m512i found = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first_lanes(n), where, pairs, 4);
    low = widen(_mm512_castsi512_si256(found)), high = widen(_mm512_extracti64x4_epi64(found, 1));
  }

  // times factor, plus offset; `n` pairs
  void store(float* out, int n, float factor, float offset) const {
    const __m512 f = _mm512_set1_ps(factor), o = _mm512_set1_ps(offset);
    _mm512_mask_storeu_ps(out, first_lanes(2 * n), _mm512_fmadd_ps(low, f, o));
    _mm512_mask_storeu_ps(out + kLanes, first_lanes(2 * n - kLanes), _mm512_fmadd_ps(high, f, o));
  }
};

float one_of(const __m512 (&values)[2], int64_t token) {
  alignas(64) float all[kPanel];
  _mm512_store_ps(all, values[0]), _mm512_store_ps(all + kLanes, values[1]);
  return all[token % kPanel];
}

void unpack_quantised_row(const Layout& layout, const char* panel, int64_t token, float scale, float* out) {
  for (int64_t group = 0; group < layout.n_groups(); ++group, panel += layout.group_bytes) {
    __m512 scales[2], minima[2];
    read_scales(layout.format, panel, scales);
    if (layout.format.with_minimum != 0) read_scales(layout.format, panel + layout.scale_bytes, minima);
    const float factor = one_of(scales, token) * scale;
    const float offset = layout.format.with_minimum != 0 ? one_of(minima, token) * scale : 0.f;
    const int64_t begin = group * layout.group_pairs, end = std::min(layout.n_pairs, begin + layout.group_pairs);
    const char* from = panel + layout.head_bytes();
    for (int64_t k = begin; k < end; k += kGroupPairs, from += kGroupPairs * layout.row_bytes) {
      alignas(64) pair buffer[kGroupPairs * kPanel];
      const int n = static_cast<int>(std::min<int64_t>(kGroupPairs, end - k));
      unpack_pairs(layout.format, from, n, buffer);
      Lane(buffer, token, n).store(out + 2 * k, n, factor, offset);
    }
  }
}

}  // namespace

void unpack_row(const orca_linear& linear, int64_t token, float scale, float* out) {
  const Layout layout(linear.format, linear.n_in);
  const char* panel = static_cast<const char*>(linear.weight) + token / kPanel * layout.panel_bytes;
  if (layout.format.bits != 16) return unpack_quantised_row(layout, panel, token, scale, out);
  const auto* from = reinterpret_cast<const pair*>(panel);
  for (int64_t k = 0; k < layout.n_pairs; k += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, layout.n_pairs - k));
    Lane(from + k * kPanel, token, n).store(out + 2 * k, n, scale, 0.f);
  }
}

}  // namespace orca
