// The one product everything is built on: up to 12 rows times a panel.
//
// A panel is a [k, 32] matrix as the instruction wants it: for each pair of k, 32 columns of two bfloat16 each, 128
// bytes. Every element of the result is one chain of additions over k, so it depends neither on the rows beside it nor
// on the number of threads.
#pragma once

#include "simd.h"

namespace orca {

constexpr int kPanel = 32;
constexpr int kMaxRows = 12;  // 24 sums, 2 vectors of the panel and the row's pair fill 27 of 32 registers

// What to ask memory for while computing: `step` bytes from `from` on for each pair of k.
struct Ahead {
  const char* from;
  size_t step;
};

// Which cache is to hold it.
enum class Ask { kNothing, kFirst, kSecond };

template <Ask ask>
inline __attribute__((always_inline)) void fetch_pair(const char* at) {
  if constexpr (ask == Ask::kFirst) _mm_prefetch(at, _MM_HINT_T0), _mm_prefetch(at + 64, _MM_HINT_T0);
  if constexpr (ask == Ask::kSecond) _mm_prefetch(at, _MM_HINT_T1), _mm_prefetch(at + 64, _MM_HINT_T1);
}

#ifdef __AVX512F__
constexpr int kRowsOfBase = 3;  // an address is a base and 0, 4 or 8 times one register: three rows for each base

template <int R, Ask ask>
inline __attribute__((always_inline)) void multiply(
    const pair* x, size_t stride, const pair* panel, int n_pairs, Ahead ahead, __m512 (&sums)[R][2]) {
  constexpr int kBases = (R + kRowsOfBase - 1) / kRowsOfBase;
  const pair* bases[kBases];
  for (int i = 0; i < kBases; ++i) {
    bases[i] = x + i * kRowsOfBase * stride;
    __asm__("" : "+r"(bases[i]));  // or compilers keep a register for each row, and have too few
  }
  const char* fetch = ahead.from;
  for (int k = 0; k < n_pairs; ++k, panel += kPanel) {
    fetch_pair<ask>(fetch);
    fetch += ahead.step;
    const __m512i low = _mm512_loadu_si512(panel), high = _mm512_loadu_si512(panel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const pair* row = bases[r / kRowsOfBase] + r % kRowsOfBase * stride;
      const __m512i value = _mm512_set1_epi32(static_cast<int>(*row));
      sums[r][0] = dot(sums[r][0], value, low);
      sums[r][1] = dot(sums[r][1], value, high);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kBases; ++i) ++bases[i];
  }
}

#else
// N rows times 8 * V columns of the panel: more sums than 12 do not fit into AVX2's 16 registers.
template <int N, int V, Ask ask>
inline __attribute__((always_inline)) void multiply_part(const pair* x, size_t stride, const pair* panel, int n_pairs,
                                                         Ahead ahead, __m256 (&sums)[N][V]) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const char* fetch = ahead.from;
  for (int k = 0; k < n_pairs; ++k, panel += kPanel) {
    fetch_pair<ask>(fetch);
    fetch += ahead.step;
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const auto one_of = [&](__m256i pairs) {
        return _mm256_castsi256_ps(odd ? _mm256_and_si256(pairs, upper) : _mm256_slli_epi32(pairs, 16));
      };
      __m256 columns[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        columns[v] = one_of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + 8 * v)));
      }
#pragma GCC unroll 6
      for (int r = 0; r < N; ++r) {
        const __m256 value = one_of(_mm256_set1_epi32(static_cast<int>(x[r * stride + k])));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] = _mm256_fmadd_ps(value, columns[v], sums[r][v]);
      }
    }
  }
}

// Rows [First, First + N) of R. A few take all columns at once, more take them half by half.
template <int First, int N, Ask ask, int R>
inline __attribute__((always_inline)) void multiply_rows(const pair* x, size_t stride, const pair* panel, int n_pairs,
                                                         Ahead ahead, __m512 (&sums)[R][2]) {
  constexpr int kHalves = N <= 3 ? 2 : 1;
  for (int half = 0; half < 2; half += kHalves) {
    __m256 part[N][2 * kHalves];
    for (int r = 0; r < N; ++r) {
      for (int i = 0; i < kHalves; ++i) {
        part[r][2 * i] = sums[First + r][half + i].low, part[r][2 * i + 1] = sums[First + r][half + i].high;
      }
    }
    const pair* from = panel + half * kLanes;
    if (half == 0) {
      multiply_part<N, 2 * kHalves, ask>(x + First * stride, stride, from, n_pairs, ahead, part);
    } else {
      multiply_part<N, 2 * kHalves, Ask::kNothing>(x + First * stride, stride, from, n_pairs, ahead, part);
    }
    for (int r = 0; r < N; ++r) {
      for (int i = 0; i < kHalves; ++i) sums[First + r][half + i] = {part[r][2 * i], part[r][2 * i + 1]};
    }
  }
}

template <int R, Ask ask>
inline __attribute__((always_inline)) void multiply(
    const pair* x, size_t stride, const pair* panel, int n_pairs, Ahead ahead, __m512 (&sums)[R][2]) {
  constexpr int kFirst = R <= 6 ? R : (R + 1) / 2;
  multiply_rows<0, kFirst, ask>(x, stride, panel, n_pairs, ahead, sums);
  if constexpr (R > kFirst) multiply_rows<kFirst, R - kFirst, Ask::kNothing>(x, stride, panel, n_pairs, ahead, sums);
}
#endif

// Calls `body` with a constant of type integral_constant<int, n> for 1 <= n <= kMaxRows.
template <int R>
struct Rows {
  static constexpr int value = R;
};

template <class Body>
inline void with_rows(int n, Body&& body) {
  switch (n) {
    case 1: return body(Rows<1>());
    case 2: return body(Rows<2>());
    case 3: return body(Rows<3>());
    case 4: return body(Rows<4>());
    case 5: return body(Rows<5>());
    case 6: return body(Rows<6>());
    case 7: return body(Rows<7>());
    case 8: return body(Rows<8>());
    case 9: return body(Rows<9>());
    case 10: return body(Rows<10>());
    case 11: return body(Rows<11>());
    default: return body(Rows<12>());
  }
}

}  // namespace orca
