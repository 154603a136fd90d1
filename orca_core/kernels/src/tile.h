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

// Fetch: whether to ask for anything at all.
template <int R, bool Fetch = true>
inline __attribute__((always_inline)) void multiply(
    const pair* x, size_t stride, const pair* panel, int n_pairs, Ahead ahead, __m512 (&sums)[R][2]) {
  const char* fetch = ahead.from;
  for (int k = 0; k < n_pairs; ++k, panel += kPanel) {
    if (Fetch) {
      _mm_prefetch(fetch, _MM_HINT_T0);
      _mm_prefetch(fetch + 64, _MM_HINT_T0);
      fetch += ahead.step;
    }
    const __m512i low = _mm512_loadu_si512(panel), high = _mm512_loadu_si512(panel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512i value = _mm512_set1_epi32(static_cast<int>(x[r * stride + k]));
      sums[r][0] = dot(sums[r][0], value, low);
      sums[r][1] = dot(sums[r][1], value, high);
    }
  }
}

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
