// What is done to each row by itself, between the products.
#pragma once

#include "linear.h"

namespace orca {

// Root-mean-square norm of float32 x [size] times weight, as bfloat16.
void normalise(const float* x, const float* weight, int64_t size, float eps, bf16* out);

// One head: normalised where `norm` is given, then rotated by cos and sin [rotated / 2], as bfloat16. x is overwritten.
void place_head(float* x, int size, const float* norm, float eps, const float* cos, const float* sin, int rotated,
                bf16* out);

// Row `token` of a packed weight [n_out, n_in] as float32, times scale.
void unpack_row(const orca_linear& linear, int64_t token, float scale, float* out);

}  // namespace orca
