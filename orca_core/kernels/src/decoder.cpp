// A whole iteration of a Llama-shaped decoder in one call.
//
// What flows between layers is float32; what enters a product is bfloat16. Of the last layer, only the rows that a
// token is sampled from are computed beyond their K and V.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "attention.h"
#include "rows.h"

namespace orca {
namespace {

constexpr int64_t kPadding = 32;             // between rows, or those of a size like 1024 meet in the same cache lines
constexpr int64_t kWorthSharing = 8 * 1024;  // elements: below it, waking others takes longer than doing it alone

int64_t padded(int64_t size) { return (size + 31) / 32 * 32 + kPadding; }

// Adds up what steps take, one behind the other; where nobody asks, it does nothing.
class Stopwatch {
 public:
  explicit Stopwatch(orca_times* times) : times_(times), start_(now()), last_(start_) {}
  ~Stopwatch() {
    if (times_ != nullptr) times_->all += seconds(now() - start_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void begin() { last_ = now(); }

  // The step that ends here is one of `kind`.
  void lap(double orca_times::*kind) {
    if (times_ == nullptr) return;
    const Clock::time_point before = std::exchange(last_, now());
    times_->*kind += seconds(last_ - before);
  }

 private:
  using Clock = std::chrono::steady_clock;

  Clock::time_point now() const { return times_ == nullptr ? Clock::time_point() : Clock::now(); }
  static double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

  orca_times* times_;
  Clock::time_point start_, last_;
};

class Iteration {
 public:
  Iteration(const orca_model& model, const orca_batch& batch)
      : model_(model), batch_(batch), watch_(batch.times), workers_(batch.n_threads), n_rows_(batch.n_rows) {
    const orca_layer& layer = model.layers[0];
    hidden_ = model.head.n_in, heads_ = layer.output.n_in, qkv_ = layer.qkv.n_out, inner_ = layer.down.n_in;
    thread_local Scratch scratch;
    const int64_t wide = padded(hidden_) + padded(qkv_);
    const int64_t narrow = padded(hidden_) + 2 * padded(heads_) + padded(inner_);
    auto* at = static_cast<char*>(scratch.get(static_cast<size_t>(n_rows_) * (4 * wide + 2 * narrow)));
    const auto cut = [&](int64_t bytes) { return std::exchange(at, at + n_rows_ * bytes); };
    residual_ = reinterpret_cast<float*>(cut(4 * padded(hidden_)));
    projected_ = reinterpret_cast<float*>(cut(4 * padded(qkv_)));
    input_ = reinterpret_cast<bf16*>(cut(2 * padded(hidden_)));
    queries_ = reinterpret_cast<bf16*>(cut(2 * padded(heads_)));
    attended_ = reinterpret_cast<bf16*>(cut(2 * padded(heads_)));
    gated_ = reinterpret_cast<bf16*>(cut(2 * padded(inner_)));
  }

  void run() {
    watch_.begin();
    each_row(hidden_, [&](int64_t row) {
      unpack_row(model_.embedding, batch_.tokens[row], model_.embedding_scale, residual_ + row * padded(hidden_));
    });
    for (int i = 0; i < model_.n_layers; ++i) {
      const orca_layer& layer = model_.layers[i];
      normalise_all(layer.attention_norm);
      multiply_all(layer.qkv, {input_, padded(hidden_)}, {projected_, padded(qkv_), Into::kFloat});
      each_row(qkv_, [&](int64_t row) { place(layer, row); });
      if (i + 1 == model_.n_layers) {
        if (batch_.n_samples == 0) break;  // pieces of prompts: their K and V are all that is wanted
        keep_samples();
      }
      watch_.lap(&orca_times::rows);
      attend_to(layer);
      watch_.lap(&orca_times::attention);
      multiply_all(layer.output, {attended_, padded(heads_)}, {residual_, padded(hidden_), Into::kResidual});
      normalise_all(layer.mlp_norm);
      multiply_all(layer.gate_up, {input_, padded(hidden_)}, {gated_, padded(inner_), Into::kGated});
      multiply_all(layer.down, {gated_, padded(inner_)}, {residual_, padded(hidden_), Into::kResidual});
    }
    if (batch_.n_samples > 0) {
      normalise_all(model_.norm);
      multiply_all(model_.head, {input_, padded(hidden_)}, {batch_.logits, model_.head.n_out, Into::kFloat});
    }
    watch_.lap(&orca_times::rows);
  }

 private:
  // Calls task(row) for all rows; `size`: elements a row has, to decide whether others should help.
  template <class Task>
  void each_row(int64_t size, const Task& task) {
    const int64_t in_part = std::max<int64_t>({1, kWorthSharing / size, n_rows_ / kMaxParts + 1});
    workers_.run(static_cast<int>((n_rows_ + in_part - 1) / in_part), [&](int part) {
      for (int64_t row = part * in_part; row < std::min(n_rows_, (part + 1) * in_part); ++row) task(row);
    });
  }

  void normalise_all(const float* weight) {
    each_row(hidden_, [&](int64_t row) {
      normalise(residual_ + row * padded(hidden_), weight, hidden_, model_.eps, input_ + row * padded(hidden_));
    });
  }

  void multiply_all(const orca_linear& linear, Rows16 x, Target y) {
    watch_.lap(&orca_times::rows);  // what came before a product was done row by row
    apply(workers_, linear, x, n_rows_, y);
    watch_.lap(&orca_times::linear);
  }

  // Norms and rotates q and k of a row, and puts k and v into the pool.
  void place(const orca_layer& layer, int64_t row) {
    const int size = model_.heads.head_dim, n_heads = model_.heads.n_heads, n_kv = model_.heads.n_kv_heads;
    orca_rope rope{nullptr, nullptr, 0};
    if (layer.rope >= 0) {
      rope = batch_.ropes[layer.rope];
      rope.cos += row * (rope.rotated / 2), rope.sin += row * (rope.rotated / 2);
    }
    float* from = projected_ + row * padded(qkv_);
    const int64_t slot = batch_.slots[row] * n_kv * size;
    bf16 *q = queries_ + row * padded(heads_), *k = static_cast<bf16*>(layer.keys) + slot;
    for (int head = 0; head < n_heads + n_kv; ++head, from += size) {
      const bool is_q = head < n_heads;
      bf16* to = is_q ? q + head * size : k + (head - n_heads) * size;
      place_head(from, size, is_q ? layer.q_norm : layer.k_norm, model_.eps, rope.cos, rope.sin, rope.rotated, to);
    }
    bf16* v = static_cast<bf16*>(layer.values) + slot;
    for (int i = 0; i < n_kv * size; i += kLanes) {
      const __mmask16 mask = first_lanes(n_kv * size - i);
      store_bf16(v + i, mask, _mm512_maskz_loadu_ps(mask, from + i));
    }
  }

  // From here on, only the rows that are sampled are there, one after the other.
  void keep_samples() {
    for (int i = 0; i < batch_.n_samples; ++i) {
      const int64_t row = batch_.sample_rows[i];  // they ascend: nothing is overwritten that is still needed
      std::copy_n(residual_ + row * padded(hidden_), hidden_, residual_ + i * padded(hidden_));
      std::copy_n(queries_ + row * padded(heads_), heads_, queries_ + i * padded(heads_));
      orca_span span = batch_.spans.spans[batch_.sample_spans[i]];
      span.row = i, span.n_rows = 1;
      sampled_.push_back(span);
    }
    n_rows_ = batch_.n_samples;
  }

  void attend_to(const orca_layer& layer) {
    orca_spans spans = batch_.spans;
    if (!sampled_.empty()) spans.spans = sampled_.data(), spans.n_spans = batch_.n_samples;
    attend(workers_, {spans, model_.heads, layer.attention, {queries_, padded(heads_)},
                      static_cast<const bf16*>(layer.keys), static_cast<const bf16*>(layer.values), attended_,
                      padded(heads_)});
  }

  const orca_model& model_;
  const orca_batch& batch_;
  Stopwatch watch_;
  Workers::Session workers_;
  int64_t n_rows_, hidden_, heads_, qkv_, inner_;
  float *residual_, *projected_;
  bf16 *input_, *queries_, *attended_, *gated_;
  std::vector<orca_span> sampled_;
};

}  // namespace
}  // namespace orca

int32_t orca_forward(const orca_model* model, const orca_batch* batch) {
  return orca::guarded([&] { orca::Iteration(*model, *batch).run(); });
}

void orca_advise(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kPage = 4096;
  char* first = static_cast<char*>(memory) + (kPage - reinterpret_cast<intptr_t>(memory) % kPage) % kPage;
  const int64_t whole = (static_cast<char*>(memory) + bytes - first) / kPage * kPage;
  if (whole > 0) madvise(first, static_cast<size_t>(whole), MADV_HUGEPAGE);
#endif
}
