// Products with packed weights.
//
// A weight [n_out, n_in] is cut into panels of 32 outputs that lie one after the other, so that a thread reads one
// stream. The panel is read from memory once, by the first rows, and lies in the cache for the others; what the next
// panel needs is asked for meanwhile.
#pragma once

#include "api.h"
#include "tile.h"
#include "workers.h"

namespace orca {

inline int64_t n_panels(int64_t n_out) { return (n_out + kPanel - 1) / kPanel; }
inline int64_t n_pairs(int64_t n_in) { return n_in / 2; }

// Where a product goes.
enum class Into {
  kFloat,     // float32, stored
  kResidual,  // float32, added to what is there
  kGated      // bfloat16 silu(gate) * up, half as wide
};

struct Rows16 {
  const bf16* data;
  int64_t stride;  // even, and so is n_in: two elements are taken at a time
};

struct Target {
  void* data;
  int64_t stride;
  Into into;
};

void apply(Workers::Session& workers, const orca_linear& linear, Rows16 x, int64_t n_rows, Target y);

}  // namespace orca
