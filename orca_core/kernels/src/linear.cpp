#include "linear.h"

#include <algorithm>

#include "quantised.h"
#include "scratch.h"

namespace orca {
namespace {

constexpr int64_t kPartBytes = 128 * 1024;  // of weights: what one thread takes at a time, where there is plenty
constexpr int64_t kPartsPerThread = 8;
constexpr int64_t kPanelsWorthSums = 8;  // each part adds up the groups of its rows anew
constexpr int64_t kRowsWorthCutting = 4 * kMaxRows;  // fewer would read the panel for too little

// Columns [column, column + 32) of R rows.
template <int R>
void store(const Target& y, int64_t row, int64_t column, int64_t n_out, const __m512 (&sums)[R][2]) {
  if (y.into == Into::kGated) {
    const __mmask16 mask = first_lanes(static_cast<int>(std::min<int64_t>(n_out / 2 - column / 2, kLanes)));
    for (int r = 0; r < R; ++r) {
      bf16* out = static_cast<bf16*>(y.data) + (row + r) * y.stride + column / 2;
      store_bf16(out, mask, _mm512_mul_ps(silu(sums[r][0]), sums[r][1]));
    }
    return;
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t first = column + half * kLanes;
    const __mmask16 mask = first_lanes(static_cast<int>(std::min<int64_t>(n_out - first, kLanes)));
    for (int r = 0; r < R; ++r) {
      float* out = static_cast<float*>(y.data) + (row + r) * y.stride + first;
      __m512 value = sums[r][half];
      if (y.into == Into::kResidual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, out));
      _mm512_mask_storeu_ps(out, mask, value);
    }
  }
}

void add_bias(const float* bias, int64_t column, int64_t n_out, __m512 (&start)[2]) {
  for (int half = 0; half < 2; ++half) {
    const int64_t first = column + half * kLanes;
    const __mmask16 mask = first_lanes(static_cast<int>(std::min<int64_t>(n_out - first, kLanes)));
    start[half] = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, bias + first);
  }
}

// What some rows share while they are multiplied with panels.
struct Product {
  const orca_linear& linear;
  const Layout& layout;
  Rows16 x;
  const Target& y;
  const float* group_sums;  // of row `first_row` and those behind it
  int64_t first_row;
};

// The panel as bfloat16, for many rows.
const pair* unpacked(const Layout& layout, const char* weight) {
  thread_local Scratch scratch;
  const size_t n_pairs = static_cast<size_t>(layout.n_pairs) + 1;  // pairs of 4 bits come two at a time
  auto* to = static_cast<pair*>(scratch.get(n_pairs * kPanel * sizeof(pair)));
  unpack_panel(layout, weight, to);
  return to;
}

// Zen 4 reads the stream of few rows ahead by itself, and who asks for its small first-level cache holds it up. For more
// rows it wants to be asked, for its second-level cache and from farther away. Others were not found to, nor is AVX2.
#ifdef __AVX512F__
const bool kReadsAhead = __builtin_cpu_is("amd") != 0;
#else
constexpr bool kReadsAhead = false;
#endif
constexpr int kFewRows = 5;
constexpr int64_t kFarAhead = 8192;

// A function of its own for each: beside other code, compilers run out of registers in the innermost loop.
template <int R, Ask ask>
__attribute__((noinline)) void multiply_panel(Rows16 x, const Layout& layout, const char* weight, Ahead ahead,
                                              const __m512 (&start)[2], __m512 (&sums)[R][2]) {
  __m512 own[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) own[r][0] = start[0], own[r][1] = start[1];
  multiply<R, ask>(reinterpret_cast<const pair*>(x.data), static_cast<size_t>(x.stride / 2),
                   reinterpret_cast<const pair*>(weight), static_cast<int>(layout.n_pairs), ahead, own);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sums[r][0] = own[r][0], sums[r][1] = own[r][1];
}

// One tile: a little ahead in the one stream. Several: each fetches its part of the next panel.
Ahead ahead_of(const Layout& layout, const char* weight, int64_t tile, int64_t n_tiles, int64_t distance) {
  const int64_t step = (layout.row_bytes + n_tiles - 1) / n_tiles;
  return {weight + (n_tiles == 1 ? distance : layout.panel_bytes + tile * layout.n_pairs * step),
          static_cast<size_t>(step)};
}

// Tile number `tile` of a panel in bfloat16.
template <int R>
void multiply_tile(Rows16 x, const Layout& layout, const char* weight, int64_t tile, int64_t n_tiles,
                   const __m512 (&start)[2], __m512 (&sums)[R][2]) {
  if (!kReadsAhead) {
    const Ahead ahead = ahead_of(layout, weight, tile, n_tiles, kAhead);
    multiply_panel<R, Ask::kFirst>(x, layout, weight, ahead, start, sums);
  } else if constexpr (R <= kFewRows) {
    multiply_panel<R, Ask::kNothing>(x, layout, weight, {weight, 0}, start, sums);
  } else {
    const Ahead ahead = ahead_of(layout, weight, tile, n_tiles, kFarAhead);
    multiply_panel<R, Ask::kSecond>(x, layout, weight, ahead, start, sums);
  }
}

// Rows [row, row + n_rows).
void one_panel(const Product& p, int64_t panel, int64_t row, int64_t n_rows) {
  const Layout& layout = p.layout;
  const int64_t column = panel * kPanel, n_out = p.linear.n_out;
  const int64_t packed_out = p.y.into == Into::kGated ? n_panels(n_out) * kPanel : n_out;
  const char* weight = static_cast<const char*>(p.linear.weight) + panel * layout.panel_bytes;
  const int64_t n_tiles = (n_rows + kMaxRows - 1) / kMaxRows, first = row;
  const bool quantised = layout.format.bits != 16;
  const pair* wide = quantised && n_tiles > 1 ? unpacked(layout, weight) : nullptr;
  __m512 start[2];
  add_bias(p.linear.bias, column, packed_out, start);
  for (int64_t tile = 0; tile < n_tiles; ++tile) {
    const int64_t end = first + n_rows * (tile + 1) / n_tiles;
    const Rows16 x{p.x.data + row * p.x.stride, p.x.stride};
    with_rows(static_cast<int>(end - row), [&](auto constant) {
      constexpr int R = decltype(constant)::value;
      __m512 sums[R][2];
      if (quantised) {
        for (int r = 0; r < R; ++r) sums[r][0] = start[0], sums[r][1] = start[1];
        const QuantisedTile<R> tile_of{layout, weight, wide, reinterpret_cast<const pair*>(x.data),
                                       static_cast<size_t>(x.stride / 2), ahead_of(layout, weight, tile, n_tiles, kAhead)};
        if (p.group_sums != nullptr) {
          tile_of.template add_products<true>(p.group_sums + (row - p.first_row) * layout.n_groups(), sums);
        } else {
          tile_of.template add_products<false>(nullptr, sums);
        }
      } else {
        multiply_tile<R>(x, layout, weight, tile, n_tiles, start, sums);
      }
      store<R>(p.y, row, column, n_out, sums);
    });
    row = end;
  }
}

// Sums of the groups of rows [row, row + n), where minima need them.
const float* all_group_sums(const Layout& layout, Rows16 x, int64_t row, int64_t n) {
  if (layout.format.with_minimum == 0) return nullptr;
  thread_local Scratch scratch;
  auto* sums = static_cast<float*>(scratch.get(static_cast<size_t>(n * layout.n_groups()) * sizeof(float)));
  for (int64_t i = 0; i < n; ++i) sum_groups(x.data + (row + i) * x.stride, layout, sums + i * layout.n_groups());
  return sums;
}

}  // namespace

void apply(Workers::Session& workers, const orca_linear& linear, Rows16 x, int64_t n_rows, Target y) {
  if (n_rows == 0) return;
  const Layout layout(linear.format, linear.n_in);
  const int64_t panels = n_panels(linear.n_out), bytes = layout.panel_bytes;
  const int64_t plenty = panels / (kPartsPerThread * workers.n_threads());
  const int64_t enough = std::max(kPartBytes / bytes, layout.format.with_minimum != 0 ? kPanelsWorthSums : 1);
  const int64_t in_part = std::max({int64_t{1}, std::min(plenty, enough), panels / kMaxParts + 1});
  const int64_t n_parts = (panels + in_part - 1) / in_part;
  // many threads and many rows: parts of rows, too, or some threads would have a panel more to do than others
  const int64_t wanted = (kPartsPerThread * workers.n_threads() + n_parts - 1) / n_parts;
  const int64_t n_cuts = std::max<int64_t>(1, std::min({wanted, n_rows / kRowsWorthCutting, kMaxParts / n_parts}));
  workers.run(static_cast<int>(n_parts * n_cuts), [&](int part) {
    const int64_t begin = part / n_cuts * in_part, end = std::min(panels, begin + in_part), cut = part % n_cuts;
    const int64_t row = n_rows * cut / n_cuts, n = n_rows * (cut + 1) / n_cuts - row;
    const Product product{linear, layout, x, y, all_group_sums(layout, x, row, n), row};
    for (int64_t panel = begin; panel < end; ++panel) one_panel(product, panel, row, n);
  });
}

}  // namespace orca

using namespace orca;

int32_t orca_apply(const orca_linear* linear, const void* x, int64_t n_rows, float* y, int32_t n_threads) {
  return guarded([&] {
    Workers::Session workers(n_threads);
    apply(workers, *linear, {static_cast<const bf16*>(x), linear->n_in}, n_rows, {y, linear->n_out, Into::kFloat});
  });
}
