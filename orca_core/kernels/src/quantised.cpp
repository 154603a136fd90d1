#include "quantised.h"

#include <algorithm>

namespace orca {
namespace {

// An integer of 8 bits leaves the lower half of its float32 empty: the upper half is its bfloat16.
__m512i pairs_of_bytes(const char* evens, const char* odds) {
  const auto wide = [](const char* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
  };
  return _mm512_or_si512(_mm512_srli_epi32(wide(evens), 16), wide(odds));
}

// A row is 16 even inputs and 16 odd ones of the first half of the columns, then of the second.
void unpack_bytes(const char* from, int64_t n, pair* to) {
  for (int64_t k = 0; k < n; ++k, from += 64, to += kPanel) {
    _mm_prefetch(from + kAhead, _MM_HINT_T0);
    _mm512_store_si512(to, pairs_of_bytes(from, from + 16));
    _mm512_store_si512(to + kLanes, pairs_of_bytes(from + 32, from + 48));
  }
}

constexpr bf16 small_bf16(int value) {
  const int magnitude = value < 0 ? -value : value, sign = value < 0 ? 0x8000 : 0;
  if (magnitude == 0) return 0;
  int exponent = 0;
  while (magnitude >> (exponent + 1) != 0) ++exponent;
  return static_cast<bf16>(sign | (127 + exponent) << 7 | (magnitude << (7 - exponent) & 0x7f));
}

// Of 16 integers from `first` on, twice: what lies above the four bits of an index does not matter then.
struct alignas(64) Table {
  bf16 values[32] = {};
  constexpr explicit Table(int first) {
    for (int i = 0; i < 32; ++i) values[i] = small_bf16(first + i % 16);
  }
};

constexpr Table kAroundZero(-8), kFromZero(0);

// 64 bytes are two rows: a word holds one input of one column of them, first row and first half of columns lowest.
void unpack_nibbles(const char* from, int64_t n, bool with_minimum, pair* to) {
  const __m512i table = _mm512_load_si512(with_minimum ? kFromZero.values : kAroundZero.values);
  for (int64_t k = 0; k < n; k += 2, from += 64, to += 2 * kPanel) {
    _mm_prefetch(from + kAhead, _MM_HINT_T0);
    const __m512i words = _mm512_loadu_si512(from);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(words, table));
    _mm512_store_si512(to + kLanes, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table));
    _mm512_store_si512(to + 2 * kLanes, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table));
    _mm512_store_si512(to + 3 * kLanes, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table));
  }
}

}  // namespace

void unpack_pairs(const orca_format& format, const char* from, int64_t n, pair* to) {
  if (format.bits == 8) {
    unpack_bytes(from, n, to);
  } else {
    unpack_nibbles(from, n, format.with_minimum != 0, to);
  }
}

void unpack_panel(const Layout& layout, const char* panel, pair* to) {
  for (int64_t group = 0; group < layout.n_groups(); ++group, panel += layout.group_bytes) {
    const int64_t begin = group * layout.group_pairs, end = std::min(layout.n_pairs, begin + layout.group_pairs);
    unpack_pairs(layout.format, panel + layout.head_bytes(), end - begin, to + begin * kPanel);
  }
}

void sum_groups(const bf16* x, const Layout& layout, float* sums) {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  for (int64_t k = 0; k < layout.n_pairs; k += kGroupPairs) {
    const auto n = static_cast<int>(std::min<int64_t>(kGroupPairs, layout.n_pairs - k));
    const __m512i values = _mm512_maskz_loadu_epi32(first_lanes(n), x + 2 * k);
    *sums++ = _mm512_reduce_add_ps(dot(_mm512_setzero_ps(), values, ones));
  }
}

}  // namespace orca
