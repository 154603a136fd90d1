// What all kernels are made of: bfloat16 in vectors of 16 float32 lanes, and the functions softmax and SiLU need.
// Everything here is a pure function of its arguments: the same row gives the same bits whatever is computed beside it.
#pragma once

#include <immintrin.h>
#ifndef __AVX512F__
#include "avx2.h"
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

namespace orca {

using bf16 = uint16_t;
using pair = uint32_t;  // two bfloat16 that lie one after the other: what one lane of a product takes

constexpr int kLanes = 16;

inline __mmask16 first_lanes(int n) {
  return n >= kLanes ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << (n < 0 ? 0 : n)) - 1);
}

inline __mmask32 first_halves(int n) { return n >= 32 ? 0xffffffffu : (1u << (n < 0 ? 0 : n)) - 1; }

inline __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

#ifdef __AVX512BF16__
inline __m256i narrow(__m512 v) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)); }
#else
inline __m256i narrow(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v), upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));  // of two that are equally near, the even one
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
  const __m512 nan = _mm512_castsi512_ps(_mm512_or_si512(upper, _mm512_set1_epi32(0x40)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512 rounded = _mm512_castsi512_ps(_mm512_srli_epi32(up, 16));
  return _mm512_cvtepi32_epi16(_mm512_castps_si512(_mm512_mask_mov_ps(rounded, is_nan, nan)));
}
#endif

inline __m512 load_bf16(const bf16* p, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }

inline void store_bf16(bf16* p, __mmask16 mask, __m512 v) { _mm256_mask_storeu_epi16(p, mask, narrow(v)); }

// Adds the products of two pairs of bfloat16 in each lane.
#ifdef __AVX512BF16__
inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#else
inline __m512 first_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

inline __m512 second_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(second_of(a), second_of(b), _mm512_fmadd_ps(first_of(a), first_of(b), sum));
}
#endif

// Pairs of elements that lie at the same place: of the first 16 of two rows, and of the last 16.
#ifdef __AVX512F__
inline void interleave(__m512i one, __m512i two, __m512i (&to)[2]) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  to[0] = _mm512_permutex2var_epi16(one, first, two);
  to[1] = _mm512_permutex2var_epi16(one, _mm512_add_epi16(first, _mm512_set1_epi16(16)), two);
}
#else
inline __m512i interleaved(__m256i one, __m256i two) {
  const __m256i low = _mm256_unpacklo_epi16(one, two), high = _mm256_unpackhi_epi16(one, two);
  return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}

inline void interleave(__m512i one, __m512i two, __m512i (&to)[2]) {
  to[0] = interleaved(one.low, two.low), to[1] = interleaved(one.high, two.high);
}
#endif

// e to the x, within 2 units in the last place; 1 for 0, 0 below -100, infinity above 88.8, NaN for NaN.
inline __m512 exp(__m512 x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-100.f), _CMP_NLT_UQ);
  const __m512 top = _mm512_min_ps(_mm512_set1_ps(90.f), x);  // in this order NaN stays
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(top, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), top);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
  return _mm512_maskz_scalef_ps(counts, p, n);
}

inline __m512 tanh(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.f);
  const __m512 e = exp(_mm512_add_ps(x, x));  // 1 - 2 / (e^2x + 1): right at both ends, infinities too
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.f), _mm512_add_ps(e, one)));
}

inline __m512 silu(__m512 x) {
  const __m512 e = exp(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.f), e));
}

// In place: afterwards row j holds what was the j-th pair of each of the 16 rows.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace orca
