// Attention over the paged pool, all requests of an iteration in one call.
//
// Work is cut into items: some rows of one request under one K/V head with all query heads that share it, so that K and
// V are read once for all of them. A row's arithmetic depends on nothing but its own position and what it sees: keys are
// taken in blocks and segments that begin at fixed positions, whoever computes them and beside whatever rows. So a
// token is the same computed alone, in a piece of a prompt, in any batch and on any number of threads.
#pragma once

#include <vector>

#include "api.h"
#include "linear.h"
#include "scratch.h"
#include "workers.h"

namespace orca {

struct Attention {
  orca_spans spans;
  orca_heads heads;
  orca_attention_spec spec;
  Rows16 q;
  const bf16 *keys, *values;
  bf16* out;
  int64_t out_stride;
};

void attend(Workers::Session& workers, const Attention& attention);

}  // namespace orca
