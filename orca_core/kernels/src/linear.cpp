#include "linear.h"

#include <algorithm>
#include <cstring>

namespace orca {
namespace {

constexpr int64_t kAhead = 4096;            // bytes ahead in the stream, where all rows fit into one pass
constexpr int64_t kPartBytes = 128 * 1024;  // of weights: what one thread takes at a time, where there is plenty
constexpr int64_t kPartsPerThread = 8;
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

// Rows [row, row + n_rows).
void one_panel(const orca_linear& linear, int64_t panel, Rows16 x, int64_t row, int64_t n_rows, const Target& y) {
  const int64_t pairs = n_pairs(linear.n_in), column = panel * kPanel;
  const int64_t packed_out = y.into == Into::kGated ? n_panels(linear.n_out) * kPanel : linear.n_out;
  const pair* weight = static_cast<const pair*>(linear.weight) + panel * pairs * kPanel;
  const int64_t n_tiles = (n_rows + kMaxRows - 1) / kMaxRows;
  const char* next = reinterpret_cast<const char*>(weight + pairs * kPanel);
  const size_t step = kPanel * sizeof(pair) / n_tiles;
  __m512 start[2];
  add_bias(linear.bias, column, packed_out, start);
  const int64_t first = row;
  for (int64_t tile = 0; tile < n_tiles; ++tile) {
    const int64_t end = first + n_rows * (tile + 1) / n_tiles;
    const auto* rows = reinterpret_cast<const pair*>(x.data + row * x.stride);
    // one tile: a little ahead in the one stream. Several: each fetches its part of the next panel
    const Ahead ahead = n_tiles == 1
        ? Ahead{reinterpret_cast<const char*>(weight) + kAhead, kPanel * sizeof(pair)}
        : Ahead{next + tile * pairs * step, step};
    with_rows(static_cast<int>(end - row), [&](auto constant) {
      constexpr int R = decltype(constant)::value;
      __m512 sums[R][2];
      for (int r = 0; r < R; ++r) sums[r][0] = start[0], sums[r][1] = start[1];
      multiply<R>(rows, x.stride / 2, weight, static_cast<int>(pairs), ahead, sums);
      store<R>(y, row, column, linear.n_out, sums);
    });
    row = end;
  }
}

// Packs one panel: outputs `columns[0..31]`, -1 = a column of zeros.
void pack_panel(const bf16* weight, pair* packed, const int64_t (&columns)[kPanel], int64_t n_in) {
  for (int64_t k = 0; k < n_pairs(n_in); k += kLanes) {
    const __mmask32 mask = first_halves(static_cast<int>(std::min<int64_t>(n_in - 2 * k, 32)));
    const int64_t n = std::min<int64_t>(n_pairs(n_in) - k, kLanes);
    for (int half = 0; half < 2; ++half) {
      __m512i block[16];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t column = columns[half * kLanes + i];
        block[i] = column < 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, weight + column * n_in + 2 * k);
      }
      transpose(block);
      for (int64_t i = 0; i < n; ++i) _mm512_storeu_si512(packed + (k + i) * kPanel + half * kLanes, block[i]);
    }
  }
}

void pack(const void* weight, void* packed, int64_t n_out, int64_t n_in, bool gated, int n_threads) {
  Workers::Session workers(n_threads);
  const int64_t panels = n_panels(n_out), in_part = panels / kMaxParts + 1;
  workers.run(static_cast<int>((panels + in_part - 1) / in_part), [&](int part) {
    for (int64_t panel = part * in_part; panel < std::min(panels, (part + 1) * in_part); ++panel) {
      int64_t columns[kPanel];
      for (int i = 0; i < kPanel; ++i) {
        const int64_t plain = panel * kPanel + i, gate = panel * kLanes + i % kLanes;
        const int64_t gate_or_up = gate < n_out / 2 ? gate + (i < kLanes ? 0 : n_out / 2) : -1;
        columns[i] = gated ? gate_or_up : (plain < n_out ? plain : -1);
      }
      pair* to = static_cast<pair*>(packed) + panel * kPanel * n_pairs(n_in);
      pack_panel(static_cast<const bf16*>(weight), to, columns, n_in);
    }
  });
}

}  // namespace

void apply(Workers::Session& workers, const orca_linear& linear, Rows16 x, int64_t n_rows, Target y) {
  if (n_rows == 0) return;
  const int64_t panels = n_panels(linear.n_out), bytes = n_pairs(linear.n_in) * kPanel * 4;
  const int64_t plenty = panels / (kPartsPerThread * workers.n_threads());
  const int64_t in_part = std::max({int64_t{1}, std::min(plenty, kPartBytes / bytes), panels / kMaxParts + 1});
  const int64_t n_parts = (panels + in_part - 1) / in_part;
  // many threads and many rows: parts of rows, too, or some threads would have a panel more to do than others
  const int64_t wanted = (kPartsPerThread * workers.n_threads() + n_parts - 1) / n_parts;
  const int64_t n_cuts = std::max<int64_t>(1, std::min({wanted, n_rows / kRowsWorthCutting, kMaxParts / n_parts}));
  workers.run(static_cast<int>(n_parts * n_cuts), [&](int part) {
    const int64_t begin = part / n_cuts * in_part, end = std::min(panels, begin + in_part), cut = part % n_cuts;
    const int64_t row = n_rows * cut / n_cuts, n = n_rows * (cut + 1) / n_cuts - row;
    for (int64_t panel = begin; panel < end; ++panel) one_panel(linear, panel, x, row, n, y);
  });
}

}  // namespace orca

using namespace orca;

int64_t orca_packed_bytes(int64_t n_out, int64_t n_in) {
  return n_panels(n_out) * kPanel * n_pairs(n_in) * static_cast<int64_t>(sizeof(pair));
}

int32_t orca_pack(const void* weight, void* packed, int64_t n_out, int64_t n_in, int32_t gated, int32_t n_threads) {
  return guarded([&] { pack(weight, packed, n_out, n_in, gated != 0, n_threads); });
}

int32_t orca_apply(const orca_linear* linear, const void* x, int64_t n_rows, float* y, int32_t n_threads) {
  return guarded([&] {
    Workers::Session workers(n_threads);
    apply(workers, *linear, {static_cast<const bf16*>(x), linear->n_in}, n_rows, {y, linear->n_out, Into::kFloat});
  });
}
