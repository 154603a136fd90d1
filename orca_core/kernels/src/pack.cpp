// Weights into the layout of panels.
#include <algorithm>
#include <cstring>

#include "quantised.h"

namespace orca {
namespace {

// Which outputs the columns of a panel are; -1 = none.
struct Columns {
  int64_t of[kPanel];

  Columns(int64_t panel, int64_t n_out, bool gated) {
    for (int i = 0; i < kPanel; ++i) {
      const int64_t plain = panel * kPanel + i, gate = panel * kLanes + i % kLanes;
      const int64_t gate_or_up = gate < n_out / 2 ? gate + (i < kLanes ? 0 : n_out / 2) : -1;
      of[i] = gated ? gate_or_up : (plain < n_out ? plain : -1);
    }
  }
};

// Calls task(panel) for all panels.
template <class Task>
void each_panel(int64_t n_out, int32_t n_threads, const Task& task) {
  Workers::Session workers(n_threads);
  const int64_t panels = n_panels(n_out), in_part = panels / kMaxParts + 1;
  workers.run(static_cast<int>((panels + in_part - 1) / in_part), [&](int part) {
    for (int64_t panel = part * in_part; panel < std::min(panels, (part + 1) * in_part); ++panel) task(panel);
  });
}

void pack_panel(const bf16* weight, pair* packed, const Columns& columns, int64_t n_in) {
  for (int64_t k = 0; k < n_pairs(n_in); k += kLanes) {
    const __mmask32 mask = first_halves(static_cast<int>(std::min<int64_t>(n_in - 2 * k, 32)));
    const int64_t n = std::min<int64_t>(n_pairs(n_in) - k, kLanes);
    for (int half = 0; half < 2; ++half) {
      __m512i block[16];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t column = columns.of[half * kLanes + i];
        block[i] = column < 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, weight + column * n_in + 2 * k);
      }
      transpose(block);
      for (int64_t i = 0; i < n; ++i) _mm512_storeu_si512(packed + (k + i) * kPanel + half * kLanes, block[i]);
    }
  }
}

// Where the integer of a column lies in the row of its pair; see unpack_bytes and unpack_nibbles.
void put_byte(char* rows, int64_t k, int column, int odd, uint8_t value) {
  rows[k * 64 + column / kLanes * 32 + odd * 16 + column % kLanes] = static_cast<char>(value);
}

void put_nibble(char* rows, int64_t k, int column, int odd, uint8_t value) {
  char& byte = rows[k / 2 * 64 + (column % kLanes * 2 + odd) * 2 + k % 2];
  byte = static_cast<char>(static_cast<uint8_t>(byte) | value << (4 * (column / kLanes)));
}

struct Quantised {
  const uint8_t* integers;
  const char *scales, *minima;
  int64_t n_in;
};

void pack_quantised_panel(const Quantised& from, const Layout& layout, const Columns& columns, char* to) {
  std::memset(to, 0, static_cast<size_t>(layout.panel_bytes));
  const int64_t row_bytes = from.n_in * layout.format.bits / 8, n_groups = layout.n_groups();
  const int64_t scale_bytes = layout.scale_bytes / kPanel;
  for (int column = 0; column < kPanel; ++column) {
    if (columns.of[column] < 0) continue;
    const uint8_t* row = from.integers + columns.of[column] * row_bytes;
    for (int64_t group = 0; group < n_groups; ++group) {
      char* at = to + group * layout.group_bytes;
      const int64_t scale = (columns.of[column] * n_groups + group) * scale_bytes;
      std::memcpy(at + column * scale_bytes, from.scales + scale, static_cast<size_t>(scale_bytes));
      if (from.minima != nullptr) {
        char* minimum = at + layout.scale_bytes + column * scale_bytes;
        std::memcpy(minimum, from.minima + scale, static_cast<size_t>(scale_bytes));
      }
      const int64_t first = group * layout.group_pairs, n = std::min(layout.group_pairs, layout.n_pairs - first);
      char* rows = at + layout.head_bytes();
      for (int64_t k = 0; k < n; ++k) {
        for (int odd = 0; odd < 2; ++odd) {
          if (layout.format.bits == 8) {
            put_byte(rows, k, column, odd, row[2 * (first + k) + odd]);
          } else {
            put_nibble(rows, k, column, odd, row[first + k] >> (4 * odd) & 15);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace orca

using namespace orca;

int64_t orca_packed_bytes(int64_t n_out, int64_t n_in, const orca_format* format) {
  return n_panels(n_out) * Layout(*format, n_in).panel_bytes;
}

int32_t orca_pack(const void* weight, void* packed, int64_t n_out, int64_t n_in, int32_t gated, int32_t n_threads) {
  return guarded([&] {
    each_panel(n_out, n_threads, [&](int64_t panel) {
      pair* to = static_cast<pair*>(packed) + panel * kPanel * n_pairs(n_in);
      pack_panel(static_cast<const bf16*>(weight), to, Columns(panel, n_out, gated != 0), n_in);
    });
  });
}

int32_t orca_pack_quantised(const void* integers, const void* scales, const void* minima, void* packed, int64_t n_out,
                            int64_t n_in, const orca_format* format, int32_t gated, int32_t n_threads) {
  const Quantised from{static_cast<const uint8_t*>(integers), static_cast<const char*>(scales),
                       static_cast<const char*>(minima), n_in};
  const Layout layout(*format, n_in);
  return guarded([&] {
    each_panel(n_out, n_threads, [&](int64_t panel) {
      char* to = static_cast<char*>(packed) + panel * layout.panel_bytes;
      pack_quantised_panel(from, layout, Columns(panel, n_out, gated != 0), to);
    });
  });
}
