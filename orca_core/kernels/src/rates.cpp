// The ceilings of a machine: how fast it reads, and how fast it multiplies.
#include <atomic>
#include <chrono>

#include "linear.h"

namespace orca {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

uint32_t read_all(const char* from, int64_t bytes, bool prefetch) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    if (prefetch) {
      for (int line = 0; line < 4; ++line) _mm_prefetch(from + i + 4096 + 64 * line, _MM_HINT_T0);
    }
    a = _mm512_xor_si512(a, _mm512_loadu_si512(from + i));
    b = _mm512_xor_si512(b, _mm512_loadu_si512(from + i + 64));
    c = _mm512_xor_si512(c, _mm512_loadu_si512(from + i + 128));
    d = _mm512_xor_si512(d, _mm512_loadu_si512(from + i + 192));
  }
  return static_cast<uint32_t>(_mm512_reduce_add_epi32(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d))));
}

double read_rate(const void* memory, int64_t bytes, bool prefetch, int32_t n_threads) {
  Workers::Session workers(n_threads);
  constexpr int kParts = 256;
  std::atomic<uint32_t> sink{0};
  const int64_t each = bytes / kParts;
  const Clock::time_point start = Clock::now();
  workers.run(kParts, [&](int part) {
    sink += read_all(static_cast<const char*>(memory) + part * each, each, prefetch);
  });
  return static_cast<double>(each) * kParts / seconds_since(start);
}

double product_rate(int32_t n_threads) {
  Workers::Session workers(n_threads);
  constexpr int kParts = 64, kPairs = 64, kRounds = 800;  // 11 KB: they stay in the nearest cache
  std::atomic<float> sink{0};
  const Clock::time_point start = Clock::now();
  workers.run(kParts, [&](int) {
    alignas(64) pair panel[kPairs * kPanel] = {}, x[kMaxRows * kPairs] = {};
    asm volatile("" : : "r"(panel), "r"(x) : "memory");  // they might hold anything
    __m512 sums[kMaxRows][2] = {};
    for (int i = 0; i < kRounds; ++i) {
      multiply<kMaxRows, Ask::kFirst>(x, kPairs, panel, kPairs, {reinterpret_cast<const char*>(panel), 0}, sums);
    }
    __m512 all = _mm512_setzero_ps();  // every sum is looked at, or the compiler would leave it out
    for (auto& row : sums) all = _mm512_add_ps(all, _mm512_add_ps(row[0], row[1]));
    sink.store(_mm512_reduce_add_ps(all), std::memory_order_relaxed);
  });
  return 2.0 * kParts * kRounds * kMaxRows * kPairs * 2 * kPanel / seconds_since(start);
}

}  // namespace
}  // namespace orca

double orca_read_rate(const void* memory, int64_t bytes, int32_t method, int32_t n_threads) {
  double rate = 0;
  orca::guarded([&] { rate = orca::read_rate(memory, bytes, method == 1, n_threads); });
  return rate;
}

double orca_product_rate(int32_t n_threads) {
  double rate = 0;
  orca::guarded([&] { rate = orca::product_rate(n_threads); });
  return rate;
}
