// What one item of attention works with: rows of queries, and blocks of keys and values packed for the product.
#pragma once

#include <algorithm>
#include <utility>

#include "attention.h"

namespace orca {

constexpr int kBlock = 64;  // keys that are scored together

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// What one item works with, in one piece of memory. Query rows are those of all heads of a token, token after token.
struct Desk {
  int n_rows, width, padded;  // query rows; head_dim; head_dim rounded up to whole panels
  bf16 *q, *weights;          // [n_rows, padded], [kMaxRows, kBlock]
  pair *keys, *values;        // panels: [kBlock / 32][padded / 2][32], [padded / 32][kBlock / 2][32]
  float *out, *top, *sum;     // of the segment: [n_rows, padded], [n_rows], [n_rows]
  float *all_out, *all_top, *all_sum;

  static size_t bytes(int n_rows, int padded) {
    return (size_t{2} * n_rows * padded + 2 * kMaxRows * kBlock + size_t{4} * kBlock * padded +
            size_t{8} * n_rows * padded + 16 * round_up(n_rows, kLanes) + 64);
  }

  Desk(void* memory, int rows, int head_dim) : n_rows(rows), width(head_dim), padded(round_up(head_dim, kPanel)) {
    char* at = static_cast<char*>(memory);
    const auto cut = [&](size_t size) { return std::exchange(at, at + size); };
    const size_t matrix = size_t{4} * n_rows * padded, column = size_t{4} * round_up(n_rows, kLanes);
    out = reinterpret_cast<float*>(cut(matrix)), all_out = reinterpret_cast<float*>(cut(matrix));
    keys = reinterpret_cast<pair*>(cut(size_t{2} * kBlock * padded));
    values = reinterpret_cast<pair*>(cut(size_t{2} * kBlock * padded));
    top = reinterpret_cast<float*>(cut(column)), all_top = reinterpret_cast<float*>(cut(column));
    sum = reinterpret_cast<float*>(cut(column)), all_sum = reinterpret_cast<float*>(cut(column));
    weights = reinterpret_cast<bf16*>(cut(2 * kMaxRows * kBlock));
    q = reinterpret_cast<bf16*>(cut(size_t{2} * n_rows * padded));
  }
};

// The keys of one block, for one K/V head. Keys from `end` on are not there: zeros.
//
// K and V lie in short pieces all over the pool, which no prefetcher of a CPU foresees, and a core waits for few lines of
// its own at a time. So while one block is packed, the second-level cache is asked for the `next` one.
class Block {
 public:
  Block() : n_(0) {}

  Block(const Attention& a, const orca_span& span, int kv_head, int first, int end) : n_(std::clamp(end - first, 0, kBlock)) {
    const int64_t row = int64_t{a.heads.n_kv_heads} * a.heads.head_dim;
    const int size = a.spans.block_size;
    for (int i = 0; i < n_; ++i) {
      const int64_t block = a.spans.table[span.first_block + (first + i) / size];
      where_[i] = (block * size + (first + i) % size) * row + int64_t{kv_head} * a.heads.head_dim;
    }
  }

  void pack_keys(const bf16* keys, Desk& desk, const Block& next) const {
    for (int dim = 0; dim < desk.width; dim += 32) {
      const __mmask32 mask = first_halves(desk.width - dim);
      for (int key = 0; key < round_up(n_, kPanel); key += kLanes) {
        __m512i rows[16];
        for (int i = 0; i < kLanes; ++i) {
          rows[i] = key + i < n_ ? _mm512_maskz_loadu_epi16(mask, keys + where_[key + i]  + dim) : _mm512_setzero_si512();
        }
        next.fetch(keys, key, kLanes, dim);
        transpose(rows);
        pair* to = desk.keys + (key / kPanel) * (desk.padded / 2) * kPanel + dim / 2 * kPanel + key % kPanel;
        for (int i = 0; i < kLanes; ++i) _mm512_store_si512(to + i * kPanel, rows[i]);
      }
    }
  }

  void pack_values(const bf16* values, Desk& desk, const Block& next) const {
    for (int dim = 0; dim < desk.width; dim += 32) {
      const __mmask32 mask = first_halves(desk.width - dim);
      pair* to = desk.values + dim / kPanel * (kBlock / 2) * kPanel;
      for (int key = 0; key < n_; key += 2) {
        next.fetch(values, key, 2, dim);
        const __m512i one = _mm512_maskz_loadu_epi16(mask, values + where_[key] + dim);
        const __m512i two =
            key + 1 < n_ ? _mm512_maskz_loadu_epi16(mask, values + where_[key + 1] + dim) : _mm512_setzero_si512();
        __m512i pairs[2];
        interleave(one, two, pairs);
        _mm512_store_si512(to + key / 2 * kPanel, pairs[0]), _mm512_store_si512(to + key / 2 * kPanel + kLanes, pairs[1]);
      }
    }
  }

  int size() const { return n_; }

 private:
  // A line of each of some keys.
  void fetch(const bf16* from, int key, int n, int dim) const {
    for (int i = key; i < std::min(key + n, n_); ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(from + where_[i] + dim), _MM_HINT_T1);
    }
  }

  int n_;
  int64_t where_[kBlock];
};

}  // namespace orca
