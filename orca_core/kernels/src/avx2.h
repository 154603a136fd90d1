// The vectors of AVX-512 that the kernels use, as pairs of AVX2's: the sources stay as they are.
//
// Within namespace orca these names hide those of immintrin.h, of which a CPU with AVX2 alone could run none. Masks of
// elements of 16 bits must be the first n, as those of first_lanes and first_halves are.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

// clang has these as macros
#undef _mm512_cmp_ps_mask
#undef _mm512_mask_cmp_ps_mask
#undef _mm512_extractf32x8_ps
#undef _mm512_extracti64x4_epi64
#undef _mm512_mask_i32gather_epi32
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_i32x4
#undef _mm512_cvtph_ps

#define ORCA_PAIR inline __attribute__((always_inline))

namespace orca {

struct __m512 { __m256 low, high; };
struct __m512i { __m256i low, high; };
struct __m512d { __m256d low, high; };

// Each of the two halves by itself.
#define ORCA_EACH1(type, name, half, from) \
  ORCA_PAIR type name(from a) { return {half(a.low), half(a.high)}; }
#define ORCA_EACH2(type, name, half) \
  ORCA_PAIR type name(type a, type b) { return {half(a.low, b.low), half(a.high, b.high)}; }
#define ORCA_EACH3(type, name, half) \
  ORCA_PAIR type name(type a, type b, type c) { return {half(a.low, b.low, c.low), half(a.high, b.high, c.high)}; }
#define ORCA_SHIFT(name, half) \
  ORCA_PAIR __m512i name(__m512i a, int n) { return {half(a.low, n), half(a.high, n)}; }
#define ORCA_SET(type, name, half, from) \
  ORCA_PAIR type name(from value) { return {half(value), half(value)}; }

ORCA_EACH2(__m512, _mm512_add_ps, _mm256_add_ps)
ORCA_EACH2(__m512, _mm512_sub_ps, _mm256_sub_ps)
ORCA_EACH2(__m512, _mm512_mul_ps, _mm256_mul_ps)
ORCA_EACH2(__m512, _mm512_div_ps, _mm256_div_ps)
ORCA_EACH2(__m512, _mm512_min_ps, _mm256_min_ps)
ORCA_EACH2(__m512, _mm512_max_ps, _mm256_max_ps)
ORCA_EACH3(__m512, _mm512_fmadd_ps, _mm256_fmadd_ps)
ORCA_EACH3(__m512, _mm512_fmsub_ps, _mm256_fmsub_ps)
ORCA_EACH3(__m512, _mm512_fnmadd_ps, _mm256_fnmadd_ps)
ORCA_EACH2(__m512d, _mm512_add_pd, _mm256_add_pd)
ORCA_EACH2(__m512d, _mm512_mul_pd, _mm256_mul_pd)
ORCA_EACH2(__m512i, _mm512_add_epi16, _mm256_add_epi16)
ORCA_EACH2(__m512i, _mm512_add_epi32, _mm256_add_epi32)
ORCA_EACH2(__m512i, _mm512_add_epi64, _mm256_add_epi64)
ORCA_EACH2(__m512i, _mm512_and_si512, _mm256_and_si256)
ORCA_EACH2(__m512i, _mm512_or_si512, _mm256_or_si256)
ORCA_EACH2(__m512i, _mm512_xor_si512, _mm256_xor_si256)
ORCA_EACH2(__m512i, _mm512_unpacklo_epi32, _mm256_unpacklo_epi32)
ORCA_EACH2(__m512i, _mm512_unpackhi_epi32, _mm256_unpackhi_epi32)
ORCA_EACH2(__m512i, _mm512_unpacklo_epi64, _mm256_unpacklo_epi64)
ORCA_EACH2(__m512i, _mm512_unpackhi_epi64, _mm256_unpackhi_epi64)
ORCA_SHIFT(_mm512_slli_epi32, _mm256_slli_epi32)
ORCA_SHIFT(_mm512_srli_epi32, _mm256_srli_epi32)
ORCA_SHIFT(_mm512_srli_epi16, _mm256_srli_epi16)
ORCA_EACH1(__m512, _mm512_castsi512_ps, _mm256_castsi256_ps, __m512i)
ORCA_EACH1(__m512i, _mm512_castps_si512, _mm256_castps_si256, __m512)
ORCA_EACH1(__m512, _mm512_cvtepi32_ps, _mm256_cvtepi32_ps, __m512i)
ORCA_SET(__m512, _mm512_set1_ps, _mm256_set1_ps, float)
ORCA_SET(__m512d, _mm512_set1_pd, _mm256_set1_pd, double)
ORCA_SET(__m512i, _mm512_set1_epi16, _mm256_set1_epi16, int16_t)
ORCA_SET(__m512i, _mm512_set1_epi32, _mm256_set1_epi32, int32_t)

#undef ORCA_EACH1
#undef ORCA_EACH2
#undef ORCA_EACH3
#undef ORCA_SHIFT
#undef ORCA_SET

ORCA_PAIR __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
ORCA_PAIR __m512d _mm512_setzero_pd() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
ORCA_PAIR __m512i _mm512_setzero_si512() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
ORCA_PAIR __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l,
                                    int m, int n, int o, int p) {
  return {_mm256_setr_epi32(a, b, c, d, e, f, g, h), _mm256_setr_epi32(i, j, k, l, m, n, o, p)};
}

ORCA_PAIR __m256 _mm512_castps512_ps256(__m512 a) { return a.low; }
ORCA_PAIR __m256 _mm512_extractf32x8_ps(__m512 a, int) { return a.high; }
ORCA_PAIR __m256i _mm512_castsi512_si256(__m512i a) { return a.low; }
ORCA_PAIR __m256i _mm512_extracti64x4_epi64(__m512i a, int) { return a.high; }
ORCA_PAIR float _mm512_cvtss_f32(__m512 a) { return _mm256_cvtss_f32(a.low); }
ORCA_PAIR __m512 _mm512_abs_ps(__m512 a) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
ORCA_PAIR __m512 _mm512_roundscale_ps(__m512 a, int) {  // to the nearest whole number, as in the one use
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
}

// --- wider and narrower

ORCA_PAIR __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}
ORCA_PAIR __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return {_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))};
}
ORCA_PAIR __m512 _mm512_cvtph_ps(__m256i a) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}
ORCA_PAIR __m512d _mm512_cvtps_pd(__m256 a) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))};
}
ORCA_PAIR __m512i _mm512_cvtpd_epi64(__m512d a) {
  alignas(32) double from[8];
  alignas(32) int64_t to[8];
  _mm256_store_pd(from, a.low), _mm256_store_pd(from + 4, a.high);
  for (int i = 0; i < 8; ++i) to[i] = _mm_cvtsd_si64(_mm_load_sd(from + i));
  const auto* at = reinterpret_cast<const __m256i*>(to);
  return {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
}
// The lower half of each 32 bits, which is at most 65535.
ORCA_PAIR __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(a.low, a.high), 0xd8);
}

// --- sums and largest of all lanes, in AVX-512's order

ORCA_PAIR float _mm512_reduce_add_ps(__m512 a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
ORCA_PAIR float _mm512_reduce_max_ps(__m512 a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
ORCA_PAIR double _mm512_reduce_add_pd(__m512d a) {
  const __m256d four = _mm256_add_pd(a.low, a.high);
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
ORCA_PAIR int64_t _mm512_reduce_add_epi64(__m512i a) {
  const __m256i four = _mm256_add_epi64(a.low, a.high);
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return _mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1);
}
ORCA_PAIR int _mm512_reduce_add_epi32(__m512i a) {
  alignas(32) uint32_t all[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(all), _mm256_add_epi32(a.low, a.high));
  uint32_t sum = 0;
  for (const uint32_t each : all) sum += each;
  return static_cast<int>(sum);
}

// --- memory

ORCA_PAIR __m512 _mm512_loadu_ps(const void* p) {
  const auto* at = static_cast<const float*>(p);
  return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}
ORCA_PAIR __m512 _mm512_load_ps(const void* p) { return _mm512_loadu_ps(p); }
ORCA_PAIR void _mm512_storeu_ps(void* p, __m512 a) {
  auto* at = static_cast<float*>(p);
  _mm256_storeu_ps(at, a.low), _mm256_storeu_ps(at + 8, a.high);
}
ORCA_PAIR void _mm512_store_ps(void* p, __m512 a) { _mm512_storeu_ps(p, a); }
ORCA_PAIR __m512i _mm512_loadu_si512(const void* p) {
  const auto* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
ORCA_PAIR __m512i _mm512_load_si512(const void* p) { return _mm512_loadu_si512(p); }
ORCA_PAIR void _mm512_storeu_si512(void* p, __m512i a) {
  auto* at = static_cast<__m256i*>(p);
  _mm256_storeu_si256(at, a.low), _mm256_storeu_si256(at + 1, a.high);
}
ORCA_PAIR void _mm512_store_si512(void* p, __m512i a) { _mm512_storeu_si512(p, a); }

// --- masks

// All bits of the lanes whose bit is set.
ORCA_PAIR __m256i lanes_of(unsigned mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bits), bits);
}
ORCA_PAIR __m512 _mm512_mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 a) {
  const __m256 low = _mm256_castsi256_ps(lanes_of(mask)), high = _mm256_castsi256_ps(lanes_of(mask >> 8));
  return {_mm256_blendv_ps(otherwise.low, a.low, low), _mm256_blendv_ps(otherwise.high, a.high, high)};
}
ORCA_PAIR __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) {
  if (mask == 0xffff) return _mm512_loadu_ps(p);
  const auto* at = static_cast<const float*>(p);
  return {_mm256_maskload_ps(at, lanes_of(mask)), _mm256_maskload_ps(at + 8, lanes_of(mask >> 8))};
}
ORCA_PAIR __m512 _mm512_mask_loadu_ps(__m512 otherwise, __mmask16 mask, const void* p) {
  return mask == 0xffff ? _mm512_loadu_ps(p) : _mm512_mask_mov_ps(otherwise, mask, _mm512_maskz_loadu_ps(mask, p));
}
ORCA_PAIR void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 a) {
  if (mask == 0xffff) return _mm512_storeu_ps(p, a);
  auto* at = static_cast<float*>(p);
  _mm256_maskstore_ps(at, lanes_of(mask), a.low), _mm256_maskstore_ps(at + 8, lanes_of(mask >> 8), a.high);
}
ORCA_PAIR __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* p) {
  return _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, p));
}
ORCA_PAIR __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
  if (mask == 0xffffffffu) return _mm512_loadu_si512(p);
  alignas(32) uint16_t all[32] = {};
  std::memcpy(all, p, 2 * static_cast<size_t>(__builtin_popcount(mask)));
  return _mm512_loadu_si512(all);
}
ORCA_PAIR __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
  if (mask == 0xffff) return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  alignas(32) uint16_t all[16] = {};
  std::memcpy(all, p, 2 * static_cast<size_t>(__builtin_popcount(mask)));
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(all));
}
ORCA_PAIR void _mm256_mask_storeu_epi16(void* p, __mmask16 mask, __m256i a) {
  if (mask == 0xffff) return _mm256_storeu_si256(static_cast<__m256i*>(p), a);
  alignas(32) uint16_t all[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(all), a);
  std::memcpy(p, all, 2 * static_cast<size_t>(__builtin_popcount(mask)));
}
ORCA_PAIR __m512i _mm512_mask_i32gather_epi32(__m512i otherwise, __mmask16 mask, __m512i where, const void* p, int) {
  const auto* at = static_cast<const int*>(p);
  return {_mm256_mask_i32gather_epi32(otherwise.low, at, where.low, lanes_of(mask), 4),
          _mm256_mask_i32gather_epi32(otherwise.high, at, where.high, lanes_of(mask >> 8), 4)};
}

template <int Relation>
ORCA_PAIR __mmask16 compared(__m512 a, __m512 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, Relation));
  return static_cast<__mmask16>(low | _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, Relation)) << 8);
}
ORCA_PAIR __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int relation) {
  switch (relation) {
    case _CMP_NLT_UQ: return compared<_CMP_NLT_UQ>(a, b);
    case _CMP_GE_OQ: return compared<_CMP_GE_OQ>(a, b);
    case _CMP_NEQ_UQ: return compared<_CMP_NEQ_UQ>(a, b);
    case _CMP_EQ_OQ: return compared<_CMP_EQ_OQ>(a, b);
    case _CMP_UNORD_Q: return compared<_CMP_UNORD_Q>(a, b);
    default: __builtin_trap();  // another is to be added here
  }
}
ORCA_PAIR __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int relation) {
  return mask & _mm512_cmp_ps_mask(a, b, relation);
}
ORCA_PAIR __m512 _mm512_mask_max_ps(__m512 otherwise, __mmask16 mask, __m512 a, __m512 b) {
  return _mm512_mask_mov_ps(otherwise, mask, _mm512_max_ps(a, b));
}

// p times 2 to the n, a whole number: in two steps, since one alone may be out of range.
ORCA_PAIR __m256 scaled(__m256 p, __m256 n) {
  const __m256i all = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(all, 1), bias = _mm256_set1_epi32(127);
  const auto power = [&](__m256i e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, bias), 23)); };
  return _mm256_mul_ps(_mm256_mul_ps(p, power(first)), power(_mm256_sub_epi32(all, first)));
}
ORCA_PAIR __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 p, __m512 n) {
  return _mm512_mask_mov_ps(_mm512_setzero_ps(), mask, {scaled(p.low, n.low), scaled(p.high, n.high)});
}

// --- other orders

// Two of the four quarters of a, then of b: the even ones (0x88) or the odd ones (0xdd).
ORCA_PAIR __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int which) {
  return which == 0x88 ? __m512i{_mm256_permute2x128_si256(a.low, a.high, 0x20), _mm256_permute2x128_si256(b.low, b.high, 0x20)}
                       : __m512i{_mm256_permute2x128_si256(a.low, a.high, 0x31), _mm256_permute2x128_si256(b.low, b.high, 0x31)};
}
// The table's halves must be the same.
ORCA_PAIR __m512i _mm512_permutexvar_epi16(__m512i where, __m512i table) {
  const __m128i a = _mm256_castsi256_si128(table.low), b = _mm256_extracti128_si256(table.low, 1);
  const __m128i byte = _mm_set1_epi16(0xff);
  const __m256i low = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
  const auto look_up = [&](__m256i words) {
    const __m256i index = _mm256_and_si256(words, _mm256_set1_epi16(15));
    const __m256i upper = _mm256_shuffle_epi8(high, index);  // index's own upper bytes are 0: they find entry 0
    const __m256i lower = _mm256_shuffle_epi8(low, index);
    return _mm256_or_si256(_mm256_slli_epi16(upper, 8), _mm256_and_si256(lower, _mm256_set1_epi16(0xff)));
  };
  return {look_up(where.low), look_up(where.high)};
}

}  // namespace orca

#undef ORCA_PAIR
