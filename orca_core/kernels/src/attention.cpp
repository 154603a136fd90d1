#include "attention_softmax.h"

#include <algorithm>

namespace orca {
namespace {

constexpr int kSegment = 512;   // keys whose softmax stands alone, to be merged with the other segments' in order
constexpr int kItemRows = 96;   // query rows that share one packing of K and V, where all threads have enough to do
constexpr int kItemsPerThread = 8;

struct Item {
  int32_t span, kv_head, row, n_rows;  // rows of the span, counted from its first
  int32_t segment, n_segments;         // segments of its context
  int32_t partial;                     // where a lone segment's result goes to be merged later; -1 = it is all there is
};

// R rows times one panel, added to what lies at `from`; null = nothing. A function of its own: beside other code,
// compilers run out of registers in the innermost loop.
template <int R>
__attribute__((noinline)) void one_product(const pair* x, size_t stride, const pair* panel, int n_pairs,
                                           const float* from, float* to, size_t to_stride) {
  __m512 sums[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sums[r][0] = from == nullptr ? _mm512_setzero_ps() : _mm512_load_ps(from + r * to_stride);
    sums[r][1] = from == nullptr ? _mm512_setzero_ps() : _mm512_load_ps(from + r * to_stride + kLanes);
  }
  multiply<R, Ask::kNothing>(x, stride, panel, n_pairs, {nullptr, 0}, sums);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(to + r * to_stride, sums[r][0]), _mm512_store_ps(to + r * to_stride + kLanes, sums[r][1]);
  }
}

// R rows of the desk over one block of keys.
template <int R>
void block_of_rows(const Attention& a, Desk& desk, int row, const int* positions, int first, int n_keys) {
  __m512 scores[R][4];
  const auto* q = reinterpret_cast<const pair*>(desk.q + static_cast<size_t>(row) * desk.padded);
  const int n_keys_padded = round_up(n_keys, kPanel);
  for (int panel = 0; panel < n_keys_padded / kPanel; ++panel) {
    const pair* keys = desk.keys + static_cast<size_t>(panel) * (desk.padded / 2) * kPanel;
    auto* to = reinterpret_cast<float*>(&scores[0][2 * panel]);
    one_product<R>(q, desk.padded / 2, keys, desk.padded / 2, nullptr, to, 4 * kLanes);
  }
  soften<R>(a, desk, row, positions, first, n_keys_padded / kLanes, scores);
  for (int dim = 0; dim < desk.padded; dim += kPanel) {
    const pair* values = desk.values + static_cast<size_t>(dim / kPanel) * (kBlock / 2) * kPanel;
    float* out = desk.out + static_cast<size_t>(row) * desk.padded + dim;
    const auto* weights = reinterpret_cast<const pair*>(desk.weights);
    one_product<R>(weights, kBlock / 2, values, (n_keys + 1) / 2, out, out, desk.padded);
  }
}

// Adds a segment's result to what the segments before it gave.
void merge(int padded, float top, float sum, const float* out, float* all_top, float* all_sum, float* all_out) {
  if (sum == 0.f) return;  // it sees nothing of the segment
  const float highest = std::max(*all_top, top);
  const float keep = _mm512_cvtss_f32(exp(_mm512_set1_ps(*all_top - highest)));
  const float add = _mm512_cvtss_f32(exp(_mm512_set1_ps(top - highest)));
  for (int i = 0; i < padded; i += kLanes) {
    const __m512 more = _mm512_mul_ps(_mm512_loadu_ps(out + i), _mm512_set1_ps(add));
    _mm512_storeu_ps(all_out + i, _mm512_fmadd_ps(_mm512_loadu_ps(all_out + i), _mm512_set1_ps(keep), more));
  }
  *all_top = highest, *all_sum = *all_sum * keep + sum * add;
}

void finish(const Attention& a, const orca_span& span, const Item& item, int index, const float* out, float sum) {
  const int group = a.heads.n_heads / a.heads.n_kv_heads, head = item.kv_head * group + index % group;
  bf16* to = a.out + (span.row + item.row + index / group) * a.out_stride + int64_t{head} * a.heads.head_dim;
  const __m512 divisor = _mm512_set1_ps(sum);
  for (int i = 0; i < a.heads.head_dim; i += kLanes) {
    store_bf16(to + i, first_lanes(a.heads.head_dim - i), _mm512_div_ps(_mm512_loadu_ps(out + i), divisor));
  }
}

void take_queries(const Attention& a, const orca_span& span, const Item& item, Desk& desk) {
  const int group = desk.n_rows / item.n_rows;
  for (int i = 0; i < desk.n_rows; ++i) {
    const int head = item.kv_head * group + i % group;
    const bf16* from = a.q.data + (span.row + item.row + i / group) * a.q.stride + int64_t{head} * desk.width;
    bf16* to = desk.q + static_cast<size_t>(i) * desk.padded;
    for (int dim = 0; dim < desk.padded; dim += 32) {
      const __mmask32 mask = first_halves(desk.width - dim);
      _mm512_storeu_si512(to + dim, _mm512_maskz_loadu_epi16(mask, from + dim));
    }
  }
}

// The keys that rows of an item see in a segment of its context: from the beginning of a block to one past the last.
struct Seen {
  int first, end;

  Seen(const Attention& a, const Item& item, int segment) {
    const orca_span& span = a.spans.spans[item.span];
    const int position = span.context - span.n_rows + item.row;
    const int visible_from = a.spec.window == 0 ? 0 : std::max(0, position + 1 - a.spec.window);
    first = std::max(segment * kSegment, visible_from / kBlock * kBlock);
    end = std::min((segment + 1) * kSegment, position + item.n_rows);
  }
};

Block block_at(const Attention& a, const Item& item, int first, int end) {
  return Block(a, a.spans.spans[item.span], item.kv_head, first, end);
}

Block first_block(const Attention& a, const Item& item, int segment) {
  const Seen seen(a, item, segment);
  return block_at(a, item, seen.first, seen.end);
}

// `after`: what will be read when this is done.
void compute_segment(const Attention& a, const orca_span& span, const Item& item, Desk& desk, int segment,
                     const Block& after) {
  std::fill_n(desk.out, static_cast<size_t>(desk.n_rows) * desk.padded, 0.f);
  std::fill_n(desk.top, desk.n_rows, kNothing);
  std::fill_n(desk.sum, desk.n_rows, 0.f);
  const int group = desk.n_rows / item.n_rows, position = span.context - span.n_rows + item.row;
  auto [first, end] = Seen(a, item, segment);
  for (Block block = block_at(a, item, first, end), next; first < end; first += kBlock, block = next) {
    next = first + kBlock < end ? block_at(a, item, first + kBlock, end) : after;
    block.pack_keys(a.keys, desk, next), block.pack_values(a.values, desk, next);
    const int first_row = std::max(0, first - position) * group;  // earlier rows see nothing of it
    for (int row = first_row; row < desk.n_rows; row += kMaxRows) {
      int positions[kMaxRows];
      const int n = std::min(kMaxRows, desk.n_rows - row);
      for (int r = 0; r < n; ++r) positions[r] = position + (row + r) / group;
      with_rows(n, [&](auto constant) {
        block_of_rows<decltype(constant)::value>(a, desk, row, positions, first, block.size());
      });
    }
  }
}

// `after`: what this thread computes next in all likelihood; null = nothing.
void compute(const Attention& a, const Item& item, const Item* after, float* partials) {
  thread_local Scratch scratch;
  const orca_span& span = a.spans.spans[item.span];
  const int n_rows = item.n_rows * (a.heads.n_heads / a.heads.n_kv_heads);
  const int padded = round_up(a.heads.head_dim, kPanel);
  Desk desk(scratch.get(Desk::bytes(n_rows, padded)), n_rows, a.heads.head_dim);
  take_queries(a, span, item, desk);
  const Block next = after == nullptr ? Block() : first_block(a, *after, after->segment);
  if (item.partial >= 0) {
    compute_segment(a, span, item, desk, item.segment, next);
    float* to = partials + static_cast<size_t>(item.partial) * (padded + 2);
    for (int i = 0; i < n_rows; ++i, to += padded + 2) {
      to[0] = desk.top[i], to[1] = desk.sum[i];
      std::copy_n(desk.out + static_cast<size_t>(i) * padded, padded, to + 2);
    }
    return;
  }
  std::fill_n(desk.all_out, static_cast<size_t>(n_rows) * padded, 0.f);
  std::fill_n(desk.all_top, n_rows, kNothing);
  std::fill_n(desk.all_sum, n_rows, 0.f);
  const int last = item.segment + item.n_segments - 1;
  for (int segment = item.segment; segment <= last; ++segment) {
    compute_segment(a, span, item, desk, segment, segment == last ? next : first_block(a, item, segment + 1));
    for (int i = 0; i < n_rows; ++i) {
      const size_t at = static_cast<size_t>(i) * padded;
      merge(padded, desk.top[i], desk.sum[i], desk.out + at, desk.all_top + i, desk.all_sum + i, desk.all_out + at);
    }
  }
  for (int i = 0; i < n_rows; ++i) {
    finish(a, span, item, i, desk.all_out + static_cast<size_t>(i) * padded, desk.all_sum[i]);
  }
}

// How many items there would be, but for segments, if each had so many rows of a span.
int n_pieces_of(const Attention& a, int rows) {
  const int most = std::max(1, rows);
  int n = 0;
  for (int s = 0; s < a.spans.n_spans; ++s) n += (a.spans.spans[s].n_rows + most - 1) / most;
  return n * a.heads.n_kv_heads;
}

// All items of a batch. Where they are few and long, every segment is an item, and `n_partials` rows are to be merged.
std::vector<Item> items_of(const Attention& a, int n_threads, int* n_partials) {
  std::vector<Item> items;
  const int group = a.heads.n_heads / a.heads.n_kv_heads, enough = kItemsPerThread * n_threads;
  const bool few = a.spans.n_spans * a.heads.n_kv_heads < enough;
  const int most = std::max(1, (n_pieces_of(a, kItemRows / group) < enough ? kItemRows / 2 : kItemRows) / group);
  for (int s = 0; s < a.spans.n_spans; ++s) {
    const orca_span& span = a.spans.spans[s];
    const int n_pieces = (span.n_rows + most - 1) / most;
    for (int kv_head = 0; kv_head < a.heads.n_kv_heads; ++kv_head) {
      for (int piece = n_pieces - 1; piece >= 0; --piece) {  // those with the most to see first
        const int row = static_cast<int>(int64_t{span.n_rows} * piece / n_pieces);
        const int end = static_cast<int>(int64_t{span.n_rows} * (piece + 1) / n_pieces);
        const int position = span.context - span.n_rows + row;
        const int first = a.spec.window == 0 ? 0 : std::max(0, position + 1 - a.spec.window) / kSegment;
        const int n_segments = (position + end - row - 1) / kSegment + 1 - first;
        const Item item{s, kv_head, row, end - row, first, n_segments, -1};
        if (!few || n_pieces > 1 || n_segments == 1) {
          items.push_back(item);
          continue;
        }
        for (int segment = first; segment < first + n_segments; ++segment) {
          items.push_back({s, kv_head, row, end - row, segment, n_segments, *n_partials});
          *n_partials += (end - row) * group;
        }
      }
    }
  }
  return items;
}

void merge_partials(const Attention& a, const std::vector<Item>& items, const float* partials) {
  const int group = a.heads.n_heads / a.heads.n_kv_heads, padded = round_up(a.heads.head_dim, kPanel);
  std::vector<float> all(padded);
  for (size_t i = 0; i < items.size(); i += items[i].partial < 0 ? 1 : items[i].n_segments) {
    const Item& item = items[i];
    if (item.partial < 0) continue;
    const int n_rows = item.n_rows * group;
    for (int row = 0; row < n_rows; ++row) {
      float top = kNothing, sum = 0;
      std::fill(all.begin(), all.end(), 0.f);
      for (int segment = 0; segment < item.n_segments; ++segment) {
        const float* one = partials + (static_cast<size_t>(item.partial) + segment * n_rows + row) * (padded + 2);
        merge(padded, one[0], one[1], one + 2, &top, &sum, all.data());
      }
      finish(a, a.spans.spans[item.span], item, row, all.data(), sum);
    }
  }
}

}  // namespace

void attend(Workers::Session& workers, const Attention& attention) {
  int n_partials = 0;
  const std::vector<Item> items = items_of(attention, workers.n_threads(), &n_partials);
  std::vector<float> partials(static_cast<size_t>(n_partials) * (round_up(attention.heads.head_dim, kPanel) + 2));
  const int n = static_cast<int>(items.size()), in_part = n / kMaxParts + 1;
  workers.run((n + in_part - 1) / in_part, [&](int part) {
    for (int i = part * in_part; i < std::min(n, (part + 1) * in_part); ++i) {
      compute(attention, items[i], i + 1 < n ? &items[i + 1] : nullptr, partials.data());
    }
  });
  if (n_partials > 0) merge_partials(attention, items, partials.data());
}

}  // namespace orca

using namespace orca;

int32_t orca_attend(const orca_spans* spans, const orca_heads* heads, const orca_attention_spec* spec, const void* q,
                    int64_t q_stride, const void* keys, const void* values, void* out, int64_t out_stride,
                    int32_t n_threads) {
  return guarded([&] {
    Workers::Session workers(n_threads);
    attend(workers, {*spans, *heads, *spec, {static_cast<const bf16*>(q), q_stride}, static_cast<const bf16*>(keys),
                     static_cast<const bf16*>(values), static_cast<bf16*>(out), out_stride});
  });
}
