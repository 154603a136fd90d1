// Scores to weights, block after block: the largest score so far, and the sum of weights under it, go along.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#pragma once

#include <limits>

#include "attention_block.h"

namespace orca {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Which keys of a block a row at `position` sees, as a mask of 16 from `first` on.
inline __mmask16 visible(int position, int window, int first) {
  const __mmask16 not_later = first_lanes(position + 1 - first);
  if (window == 0) return not_later;
  return not_later & static_cast<__mmask16>(~first_lanes(position + 1 - window - first));
}

// Scores of R rows as softmax sees them: scaled, capped, and nothing where a row does not see the key. Their largest ones.
template <int R>
void scale(const Attention& a, const int* positions, int first, int n_vectors, __m512 (&scores)[R][4],
           float (&largest)[kLanes]) {
  const __m512 factor = _mm512_set1_ps(a.spec.scale), cap = _mm512_set1_ps(a.spec.softcap);
  for (int r = 0; r < R; ++r) {
    const bool sees_all = a.spec.window == 0 && positions[r] + 1 - first >= n_vectors * kLanes;
    __m512 top = _mm512_set1_ps(kNothing);
    for (int i = 0; i < n_vectors; ++i) {
      __m512 score = _mm512_mul_ps(scores[r][i], factor);
      if (a.spec.softcap != 0) score = _mm512_mul_ps(cap, tanh(_mm512_div_ps(score, cap)));
      if (!sees_all) {
        const __mmask16 seen = visible(positions[r], a.spec.window, first + i * kLanes);
        score = _mm512_mask_mov_ps(_mm512_set1_ps(kNothing), seen, score);
      }
      scores[r][i] = score;
      top = _mm512_max_ps(top, score);
    }
    largest[r] = _mm512_reduce_max_ps(top);
  }
}

// Scores of R rows become weights in `desk.weights`; what the rows have so far is scaled to the new largest score. What
// there is one of for each row is computed for all rows at once.
template <int R>
void soften(const Attention& a, Desk& desk, int row, const int* positions, int first, int n_vectors,
            __m512 (&scores)[R][4]) {
  alignas(64) float largest[kLanes], bases[kLanes], keeps[kLanes], sums[kLanes];
  scale<R>(a, positions, first, n_vectors, scores, largest);
  const __mmask16 rows = first_lanes(R);
  const __m512 before = _mm512_maskz_loadu_ps(rows, desk.top + row);
  const __m512 top = _mm512_max_ps(before, _mm512_maskz_loadu_ps(rows, largest));
  const __mmask16 sees_any = _mm512_cmp_ps_mask(top, _mm512_set1_ps(kNothing), _CMP_NEQ_UQ);
  const __m512 base = _mm512_mask_mov_ps(_mm512_setzero_ps(), sees_any, top);
  const __m512 keep = exp(_mm512_sub_ps(before, base));
  _mm512_mask_storeu_ps(desk.top + row, rows, top);
  _mm512_store_ps(bases, base), _mm512_store_ps(keeps, keep);
  for (int r = 0; r < R; ++r) {
    const __m512 base_of_row = _mm512_set1_ps(bases[r]);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < n_vectors; ++i) {
      const __m256i weight = narrow(exp(_mm512_sub_ps(scores[r][i], base_of_row)));
      _mm256_store_si256(reinterpret_cast<__m256i*>(desk.weights + r * kBlock + i * kLanes), weight);
      sum = _mm512_add_ps(sum, widen(weight));  // as they were rounded, so that they add up to 1
    }
    sums[r] = _mm512_reduce_add_ps(sum);
  }
  const __m512 sum = _mm512_maskz_loadu_ps(rows, desk.sum + row);
  _mm512_mask_storeu_ps(desk.sum + row, rows, _mm512_fmadd_ps(sum, keep, _mm512_maskz_loadu_ps(rows, sums)));
  for (int r = 0; r < R; ++r) {
    if (keeps[r] == 1.f) continue;
    float* out = desk.out + static_cast<size_t>(row + r) * desk.padded;
    for (int i = 0; i < desk.padded; i += kLanes) {
      _mm512_store_ps(out + i, _mm512_mul_ps(_mm512_load_ps(out + i), _mm512_set1_ps(keeps[r])));
    }
  }
}

}  // namespace orca
