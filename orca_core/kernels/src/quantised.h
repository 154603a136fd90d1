// Weights of 8 and 4 bits.
//
// An integer of 8 bits fits a bfloat16 exactly, so the one product of tile.h takes it as it is, and its sums are scaled
// afterwards: over the whole row where an output has one scale, else after each group of 32 inputs. Nothing is rounded a
// second time. A few rows turn 16 pairs at a time into bfloat16, in the nearest cache, while the panel is read; many
// rows do it once for the whole panel. Both then compute the same sums in the same order.
#pragma once

#include <algorithm>

#include "linear.h"

namespace orca {

constexpr int kGroupPairs = 16;  // 32 inputs: one scale, and what is turned into bfloat16 at a time
constexpr int64_t kAhead = 4096;  // bytes ahead in the stream, where all rows fit into one pass

// Where things lie in a panel: for each group its scales, its minima, then its pairs.
struct Layout {
  orca_format format;
  int64_t n_pairs, group_pairs;  // of an output; that share a scale
  int64_t row_bytes;             // one pair of all 32 columns
  int64_t scale_bytes;           // one scale, or minimum, of all 32 columns
  int64_t group_bytes, panel_bytes;

  Layout(const orca_format& f, int64_t n_in) : format(f), n_pairs(n_in / 2) {
    group_pairs = f.grouped != 0 ? kGroupPairs : n_pairs;
    row_bytes = kPanel * 2 * f.bits / 8;
    scale_bytes = f.bits == 16 ? 0 : kPanel * (f.grouped != 0 ? 2 : 4);
    const int64_t rows = f.bits == 16 ? n_pairs : (group_pairs + kGroupPairs - 1) / kGroupPairs * kGroupPairs;
    group_bytes = head_bytes() + rows * row_bytes;
    panel_bytes = n_groups() * group_bytes;
  }

  int64_t n_groups() const { return (n_pairs + group_pairs - 1) / group_pairs; }
  int64_t head_bytes() const { return scale_bytes * (format.with_minimum != 0 ? 2 : 1); }
};

// The numbers of `n` pairs of all 32 columns, as a panel of bfloat16. Those of 4 bits come two at a time: `to`
// has room for an even number.
void unpack_pairs(const orca_format& format, const char* from, int64_t n, pair* to);

// A whole panel, without its scales.
void unpack_panel(const Layout& layout, const char* panel, pair* to);

// The sum of each group of 32 elements of a row, float32 [groups]: what minima are multiplied by.
void sum_groups(const bf16* x, const Layout& layout, float* sums);

// 32 scales, or minima.
inline void read_scales(const orca_format& format, const char* from, __m512 (&to)[2]) {
  for (int half = 0; half < 2; ++half) {
    const char* at = from + half * kLanes * (format.grouped != 0 ? 2 : 4);
    to[half] = format.grouped != 0 ? _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))
                                   : _mm512_loadu_ps(at);
  }
}

// R rows and one panel. unpacked: of unpack_panel, or null: pairs are unpacked here, on the way.
template <int R>
struct QuantisedTile {
  const Layout& layout;
  const char* panel;
  const pair *unpacked, *x;
  size_t stride;
  Ahead ahead;

  // Adds to `parts` pairs [begin, end) of a group whose pairs begin at `from`.
  inline __attribute__((always_inline)) void multiply_pairs(int64_t begin, int64_t end, const char* from,
                                                            __m512 (&parts)[R][2]) const {
    if (unpacked != nullptr) {
      const Ahead here{ahead.from + static_cast<size_t>(begin) * ahead.step, ahead.step};
      multiply<R, Ask::kFirst>(x + begin, stride, unpacked + begin * kPanel, static_cast<int>(end - begin), here, parts);
      return;
    }
    for (int64_t k = begin; k < end; k += kGroupPairs, from += kGroupPairs * layout.row_bytes) {
      alignas(64) pair buffer[kGroupPairs * kPanel];
      const int n = static_cast<int>(std::min<int64_t>(kGroupPairs, end - k));
      unpack_pairs(layout.format, from, n, buffer);
      multiply<R, Ask::kNothing>(x + k, stride, buffer, n, {nullptr, 0}, parts);
    }
  }

  // group_sums: of the first row, those of the others behind them; used where there are minima. A function of its own:
  // see multiply_panel.
  template <bool WithMinimum>
  __attribute__((noinline)) void add_products(const float* group_sums, __m512 (&sums)[R][2]) const {
    const int64_t n_groups = layout.n_groups();
    const char* at = panel;
    for (int64_t group = 0; group < n_groups; ++group, at += layout.group_bytes) {
      const int64_t begin = group * layout.group_pairs;
      __m512 parts[R][2], scales[2], minima[2];
      for (int r = 0; r < R; ++r) parts[r][0] = parts[r][1] = _mm512_setzero_ps();
      multiply_pairs(begin, std::min(layout.n_pairs, begin + layout.group_pairs), at + layout.head_bytes(), parts);
      read_scales(layout.format, at, scales);
      if (WithMinimum) read_scales(layout.format, at + layout.scale_bytes, minima);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        if (WithMinimum) {
          const __m512 sum = _mm512_set1_ps(group_sums[r * n_groups + group]);
          sums[r][0] = _mm512_fmadd_ps(sum, minima[0], sums[r][0]);
          sums[r][1] = _mm512_fmadd_ps(sum, minima[1], sums[r][1]);
        }
        sums[r][0] = _mm512_fmadd_ps(parts[r][0], scales[0], sums[r][0]);
        sums[r][1] = _mm512_fmadd_ps(parts[r][1], scales[1], sums[r][1]);
      }
    }
  }
};

}  // namespace orca
