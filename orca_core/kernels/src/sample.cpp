// One token for each row of logits, as orca_core/sampling/draw.py has it: the two must choose the same.
//
// A token's weight is exp((logit - largest) / temperature), a whole number of units so small that int64 just holds a
// vocabulary of them: sums are exact in any order. A row is one part, computed by one thread.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "simd.h"
#include "workers.h"

namespace orca {
namespace {

constexpr int64_t kChunk = 1024;  // tokens between two sums that are kept
constexpr float kDepths[] = {2.f, 4.f, 8.f, 16.f, 32.f};

struct Row {
  const float* logits;
  int64_t vocab;
  float peak, temperature;
  double unit;

  __m512 load(int64_t i) const {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-std::numeric_limits<float>::infinity()),
                                first_lanes(static_cast<int>(std::min<int64_t>(vocab - i, kLanes))), logits + i);
  }
  // How far behind the likeliest, at most 0.
  __m512 behind(int64_t i) const {
    return _mm512_div_ps(_mm512_sub_ps(load(i), _mm512_set1_ps(peak)), _mm512_set1_ps(temperature));
  }
};

struct Weights {
  __m512i low, high;
};

Weights weigh(__m512 behind, double unit) {
  const __m512 e = exp(behind);
  const __m512d scale = _mm512_set1_pd(unit);
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(e));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(e, 1));
  return {_mm512_cvtpd_epi64(_mm512_mul_pd(low, scale)), _mm512_cvtpd_epi64(_mm512_mul_pd(high, scale))};
}

// The largest logit. False: there is a NaN, or it is not finite.
bool find_peak(const float* logits, int64_t vocab, float* peak) {
  __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __mmask16 nan = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const __mmask16 lanes = first_lanes(static_cast<int>(std::min<int64_t>(vocab - i, kLanes)));
    const __m512 v = _mm512_maskz_loadu_ps(lanes, logits + i);
    nan |= _mm512_mask_cmp_ps_mask(lanes, v, v, _CMP_UNORD_Q);
    top = _mm512_mask_max_ps(top, lanes, top, v);
  }
  *peak = _mm512_reduce_max_ps(top);
  return !nan && std::isfinite(*peak);
}

int64_t first_of(const float* logits, int64_t vocab, float value) {
  const __m512 wanted = _mm512_set1_ps(value);
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const __mmask16 lanes = first_lanes(static_cast<int>(std::min<int64_t>(vocab - i, kLanes)));
    const __mmask16 hits = _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, logits + i), wanted, _CMP_EQ_OQ);
    if (hits) return i + __builtin_ctz(hits);
  }
  return 0;
}

// Of a chunk; tokens beyond the vocabulary weigh nothing.
int64_t weight_of(const Row& row, int64_t begin) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = begin, end = std::min(row.vocab, begin + kChunk); i < end; i += kLanes) {
    const Weights w = weigh(row.behind(i), row.unit);
    sum = _mm512_add_epi64(sum, _mm512_add_epi64(w.low, w.high));
  }
  return _mm512_reduce_add_epi64(sum);
}

int64_t target_of(double point, int64_t total) {
  return std::min(static_cast<int64_t>(point * static_cast<double>(total)), total - 1);
}

// The first id whose cumulative weight is above the target: never one of weight 0.
int64_t draw(const Row& row, double point, std::vector<int64_t>& sums) {
  sums.clear();
  int64_t total = 0;
  for (int64_t begin = 0; begin < row.vocab; begin += kChunk) {
    sums.push_back(weight_of(row, begin));
    total += sums.back();
  }
  int64_t left = target_of(point, total), begin = 0;
  for (size_t chunk = 0; chunk + 1 < sums.size() && left >= sums[chunk]; ++chunk, begin += kChunk) left -= sums[chunk];
  alignas(64) int64_t weights[kLanes];
  for (int64_t i = begin; i < row.vocab; i += kLanes) {
    const Weights w = weigh(row.behind(i), row.unit);
    _mm512_store_si512(weights, w.low);
    _mm512_store_si512(weights + 8, w.high);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (left < weights[lane]) return i + lane;
      left -= weights[lane];
    }
  }
  return row.vocab - 1;  // not reached: the target is below the total
}

struct Scratch {
  std::vector<int64_t> sums, cumulative;
  std::vector<uint64_t> keys;
};

Scratch& own_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// Tokens at most `depth` behind, as keys whose order is that of likelihood, equal ones by id. Returns their number.
size_t collect(const Row& row, float depth, std::vector<uint64_t>& keys) {
  keys.clear();
  const __m512 limit = _mm512_set1_ps(-depth);
  alignas(64) float behind[kLanes];
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    const __mmask16 lanes = first_lanes(static_cast<int>(std::min<int64_t>(row.vocab - i, kLanes)));
    const __m512 v = row.behind(i);
    uint32_t hits = _mm512_mask_cmp_ps_mask(lanes, v, limit, _CMP_GE_OQ);
    if (!hits) continue;
    _mm512_store_ps(behind, _mm512_abs_ps(v));
    for (; hits; hits &= hits - 1) {
      const int lane = __builtin_ctz(hits);
      uint32_t bits;
      __builtin_memcpy(&bits, behind + lane, 4);
      keys.push_back(uint64_t{bits} << 32 | static_cast<uint64_t>(i + lane));
    }
  }
  return keys.size();
}

float behind_of(uint64_t key) {
  const auto bits = static_cast<uint32_t>(key >> 32);
  float distance;
  __builtin_memcpy(&distance, &bits, 4);
  return -distance;
}

// Cumulative weights in the order of the keys, which may be sorted or not.
int64_t accumulate(const std::vector<uint64_t>& keys, double unit, std::vector<int64_t>& cumulative) {
  cumulative.resize(keys.size());
  alignas(64) float behind[kLanes];
  alignas(64) int64_t weights[kLanes];
  int64_t sum = 0;
  for (size_t i = 0; i < keys.size(); i += kLanes) {
    const size_t n = std::min<size_t>(kLanes, keys.size() - i);
    for (size_t lane = 0; lane < kLanes; ++lane) behind[lane] = lane < n ? behind_of(keys[i + lane]) : -1e30f;
    const Weights w = weigh(_mm512_load_ps(behind), unit);
    _mm512_store_si512(weights, w.low);
    _mm512_store_si512(weights + 8, w.high);
    for (size_t lane = 0; lane < n; ++lane) cumulative[i + lane] = sum += weights[lane];
  }
  return sum;
}

int64_t draw_filtered(const Row& row, const orca_draw& spec, Scratch& scratch) {
  const bool has_top_k = spec.top_k > 0 && spec.top_k < row.vocab, has_top_p = spec.top_p < 1.0;
  int64_t total = 0;
  if (has_top_p && !has_top_k) {
    for (int64_t begin = 0; begin < row.vocab; begin += kChunk) total += weight_of(row, begin);
  }
  auto& keys = scratch.keys;
  auto& cumulative = scratch.cumulative;
  // deeper and deeper, until all that may be kept is among the candidates
  for (int step = 0;; ++step) {
    const bool is_all = step == std::size(kDepths);
    const float depth = is_all ? std::numeric_limits<float>::infinity() : kDepths[step];
    const auto n = static_cast<int64_t>(collect(row, depth, keys));
    if (is_all || (has_top_k && n >= spec.top_k)) break;
    if (has_top_k && has_top_p) continue;  // its share is one of what top_k leaves
    if (std::exp(-static_cast<double>(depth)) < spec.min_p) break;
    if (has_top_p) {
      const auto mass = static_cast<double>(accumulate(keys, row.unit, cumulative));
      if (!(mass < spec.top_p * static_cast<double>(total))) break;
    }
  }
  std::sort(keys.begin(), keys.end());
  if (has_top_k && static_cast<int64_t>(keys.size()) > spec.top_k) keys.resize(spec.top_k);
  const int64_t sum = accumulate(keys, row.unit, cumulative);
  if (has_top_k) total = sum;
  size_t n_keep = 0;
  for (; n_keep < keys.size(); ++n_keep) {
    const int64_t before = n_keep ? cumulative[n_keep - 1] : 0;
    if (has_top_p && !(static_cast<double>(before) < spec.top_p * static_cast<double>(total))) break;
    if (!(std::exp(static_cast<double>(behind_of(keys[n_keep]))) >= spec.min_p)) break;
  }
  const int64_t target = target_of(spec.point, cumulative[n_keep - 1]);
  const auto found = std::upper_bound(cumulative.begin(), cumulative.begin() + n_keep, target);
  return static_cast<int64_t>(keys[found - cumulative.begin()] & 0xffffffffu);
}

// The logarithm of what all tokens' exponentials add up to.
double normaliser(const float* logits, int64_t vocab, float peak) {
  const Row row{logits, vocab, peak, 1.f, 1.0};
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const __m512 e = exp(row.behind(i));
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(e)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(e, 1)));
  }
  return std::log(_mm512_reduce_add_pd(_mm512_add_pd(low, high)));
}

// The n_top likeliest tokens, equal ones by id.
void find_best(const float* logits, int64_t vocab, float peak, int64_t n_top, std::vector<uint64_t>& keys) {
  const Row row{logits, vocab, peak, 1.f, 1.0};
  for (int step = 0;; ++step) {
    const bool is_all = step == std::size(kDepths);
    const auto n = static_cast<int64_t>(
        collect(row, is_all ? std::numeric_limits<float>::infinity() : kDepths[step], keys));
    if (is_all || n >= n_top) break;
  }
  std::partial_sort(keys.begin(), keys.begin() + n_top, keys.end());
}

int64_t choose(const float* logits, int64_t vocab, float peak, const orca_draw& spec) {
  Scratch& scratch = own_scratch();
  if (spec.temperature <= 0.f) return first_of(logits, vocab, peak);
  const int bits = vocab > 1 ? 64 - __builtin_clzll(static_cast<uint64_t>(vocab - 1)) : 1;
  const Row row{logits, vocab, peak, spec.temperature, std::ldexp(1.0, 62 - bits)};
  // one that cuts nothing off still has the draw run along the order of likelihood
  const bool filters = spec.top_k > 0 || spec.top_p < 1.0 || spec.min_p > 0.0;
  return filters ? draw_filtered(row, spec, scratch) : draw(row, spec.point, scratch.sums);
}

}  // namespace
}  // namespace orca

int32_t orca_sample(const float* logits, int64_t n_rows, int64_t vocab, const orca_draw* draws, int64_t* ids,
                    uint8_t* sound, int32_t n_threads) {
  return orca::guarded([&] {
    orca::Workers::Session workers(n_threads);
    workers.run(static_cast<int>(n_rows), [&](int i) {
      const float* row = logits + i * vocab;
      float peak;
      sound[i] = orca::find_peak(row, vocab, &peak);
      ids[i] = sound[i] ? orca::choose(row, vocab, peak, draws[i]) : 0;
    });
  });
}

int32_t orca_logprobs(const float* logits, int64_t n_rows, int64_t vocab, int64_t n_top, const int64_t* chosen,
                      float* chosen_values, int64_t* ids, float* values, int32_t n_threads) {
  return orca::guarded([&] {
    orca::Workers::Session workers(n_threads);
    workers.run(static_cast<int>(n_rows), [&](int i) {
      const float* row = logits + i * vocab;
      float peak;
      const bool is_sound = orca::find_peak(row, vocab, &peak);
      const double sum = is_sound ? orca::normaliser(row, vocab, peak) : 0.0;
      const auto value = [&](int64_t id) {
        return is_sound ? static_cast<float>(static_cast<double>(row[id]) - peak - sum)
                        : -std::numeric_limits<float>::infinity();
      };
      chosen_values[i] = value(chosen[i]);
      auto& keys = orca::own_scratch().keys;
      if (is_sound) orca::find_best(row, vocab, peak, n_top, keys);
      for (int64_t j = 0; j < n_top; ++j) {
        const int64_t id = is_sound ? static_cast<int64_t>(keys[j] & 0xffffffffu) : j;
        ids[i * n_top + j] = id;
        values[i * n_top + j] = value(id);
      }
    });
  });
}
