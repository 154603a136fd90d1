// What Python sees: plain structures (mirrored in native.py, field by field) and C functions.
//
// Sizes are in elements unless they say bytes. Rows of a matrix lie `stride` elements apart. Nothing here checks
// anything: native.py does, before it calls. Functions that return int32_t say 0, or 1: memory ran out, or 2: something
// else went wrong; what they were to write is undefined then.
#pragma once

#include <cstdint>

#define ORCA_API __attribute__((visibility("default")))

extern "C" {

// How the numbers of a weight are kept. bits: 16 = bfloat16; 8 and 4 = integers that stand for integer * scale
// (+ minimum). grouped: a scale for each 32 inputs of an output, float16; else one for each output, float32. with_minimum: a minimum
// beside each scale. 8 bits are two's complement; 4 bits are 0 to 15, from which 8 is taken where there is no minimum.
struct orca_format {
  int32_t bits, grouped, with_minimum;
};

// y = x W^T + bias, with W packed by orca_pack or orca_pack_quantised. bias: float32 [n_out] in the order of the packed
// columns, or null.
struct orca_linear {
  const void* weight;
  const float* bias;
  int64_t n_out, n_in;
  orca_format format;
};

// One request's rows in a flat batch: n_rows from `row` on, the last one at position context - 1. Its block table
// begins at table[first_block].
struct orca_span {
  int32_t row, n_rows, context, first_block;
};

// A batch as attention sees it. table: numbers of blocks; block_size: slots in one.
struct orca_spans {
  const orca_span* spans;
  const int32_t* table;
  int32_t n_spans, block_size;
};

struct orca_heads {
  int32_t n_heads, n_kv_heads, head_dim;
};

// window: positions a row sees, its own included; 0 = all. softcap: 0 = none.
struct orca_attention_spec {
  float scale, softcap;
  int32_t window;
};

// rope: which pair of tables of the batch, -1 = q and k are not rotated. Norms of q and k: float32 [head_dim] or null.
// keys, values: this layer's pool, bfloat16 [n_blocks, block_size, n_kv_heads, head_dim].
struct orca_layer {
  orca_linear qkv, output, gate_up, down;
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;
  void *keys, *values;
  orca_attention_spec attention;
  int32_t rope;
};

// A Llama-shaped decoder. head: packed [vocab, hidden]; embedding: the same for a tied one.
struct orca_model {
  const orca_layer* layers;
  orca_linear head, embedding;
  const float* norm;
  orca_heads heads;
  int32_t n_layers;
  float eps, embedding_scale;
};

// cos, sin: float32 [n_rows, rotated / 2], one pair a rope; rotated: elements of a head that are.
struct orca_rope {
  const float *cos, *sin;
  int32_t rotated;
};

// Where the time of an iteration goes, in seconds, added to what is there. linear: products, with the bias, the SiLU
// gate and the residual that are added as they are stored; rows: embedding, norms, rotation, K and V into the pool; all:
// the whole call.
struct orca_times {
  double linear, attention, rows, all;
};

// One iteration. sample_rows: those whose logits are wanted, in the order of the spans' samples; each is the last row of
// its span, and sample_spans[i] is that span. times: null = nobody asks.
struct orca_batch {
  const int64_t *tokens, *slots;
  const orca_rope* ropes;
  orca_spans spans;
  const int64_t* sample_rows;
  const int32_t* sample_spans;
  float* logits;
  int64_t n_rows;
  int32_t n_samples, n_threads;
  orca_times* times;
};

// Bytes a packed [n_out, n_in] weight takes.
ORCA_API int64_t orca_packed_bytes(int64_t n_out, int64_t n_in, const orca_format* format);

// Packs bfloat16 weight [n_out, n_in]. gated: its first half are gates, its second half what they let through; the two
// are laid side by side, 16 and 16.
ORCA_API int32_t orca_pack(const void* weight, void* packed, int64_t n_out, int64_t n_in, int32_t gated, int32_t n_threads);

// Packs integers: int8 [n_out, n_in], or two of 4 bits in a byte, the earlier one in its lower half. scales, minima:
// float32 [n_out], or float16 [n_out, groups] where they are grouped; minima null where the format has none.
ORCA_API int32_t orca_pack_quantised(const void* integers, const void* scales, const void* minima, void* packed,
                 int64_t n_out, int64_t n_in, const orca_format* format, int32_t gated, int32_t n_threads);

// float32 y [n_rows, n_out] of bfloat16 x [n_rows, n_in].
ORCA_API int32_t orca_apply(const orca_linear* linear, const void* x, int64_t n_rows, float* y, int32_t n_threads);

// Attention of q over the pool. q and out: bfloat16 [rows, n_heads, head_dim].
ORCA_API int32_t orca_attend(const orca_spans* spans, const orca_heads* heads, const orca_attention_spec* spec, const void* q,
                 int64_t q_stride, const void* keys, const void* values, void* out, int64_t out_stride,
                 int32_t n_threads);

// A whole iteration: K and V of all rows are written, the logits of sample_rows computed.
ORCA_API int32_t orca_forward(const orca_model* model, const orca_batch* batch);

// How a row is drawn from (orca_core/sampling). temperature 0: its largest logit. top_k: 0 = off; top_p: 1 = off;
// min_p: 0 = off; point: where the draw falls, in [0, 1).
struct orca_draw {
  float temperature;
  int32_t top_k;
  double top_p, min_p, point;
};

// A token id for each row of float32 logits [n_rows, vocab]. sound: 0 where there is a NaN or no finite largest one. Not
// 0: memory ran out.
ORCA_API int32_t orca_sample(const float* logits, int64_t n_rows, int64_t vocab, const orca_draw* draws, int64_t* ids,
                 uint8_t* sound, int32_t n_threads);

// Log-softmax of float32 logits [n_rows, vocab]: of the chosen tokens, [n_rows], and of the n_top likeliest, [n_rows,
// n_top], best first and of equals the lowest id. -inf for a row that is not sound. Not 0: memory ran out.
ORCA_API int32_t orca_logprobs(const float* logits, int64_t n_rows, int64_t vocab, int64_t n_top, const int64_t* chosen,
                 float* chosen_values, int64_t* ids, float* values, int32_t n_threads);

// Asks the system for large pages.
ORCA_API void orca_advise(void* memory, int64_t bytes);

// Time: bytes read a second by n_threads over `bytes`, in the way of `method` (0 loads, 1 with prefetches); products a
// second of the instruction the tiles are built on. 0: memory ran out.
ORCA_API double orca_read_rate(const void* memory, int64_t bytes, int32_t method, int32_t n_threads);
ORCA_API double orca_product_rate(int32_t n_threads);
}
