// Products and attention on memory of exactly the size they are told of, over many shapes. Build it with
// -fsanitize=address,undefined for each instruction set: docs/cpu.md says how. Numbers are not looked at here.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "attention.h"
#include "quantised.h"

namespace {

using orca::bf16;

std::vector<bf16> numbers(int64_t n) {
  std::vector<bf16> made(static_cast<size_t>(n));
  for (size_t i = 0; i < made.size(); ++i) made[i] = static_cast<bf16>(0x3c00 + (i * 40503u >> 3 & 0xff));
  return made;
}

bool multiply(orca_format format, int64_t n_in, int64_t n_out, int64_t n_rows, bool with_bias, int n_threads) {
  const int64_t n_bytes = orca::n_panels(n_out) * orca::Layout(format, n_in).panel_bytes;
  std::vector<char> weight(static_cast<size_t>(n_bytes));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<char>(i * 7 & 0x3f);
  const std::vector<float> bias(static_cast<size_t>(n_out));
  const std::vector<bf16> x = numbers(n_rows * n_in);
  std::vector<float> y(static_cast<size_t>(n_rows * n_out));
  const orca_linear linear{weight.data(), with_bias ? bias.data() : nullptr, n_out, n_in, format};
  return orca_apply(&linear, x.data(), n_rows, y.data(), n_threads) == 0;
}

bool attend(int head_dim, int n_kv_heads, int group, int n_rows, int context, int window, int n_threads) {
  constexpr int kBlockSize = 16;
  const int n_blocks = (context + kBlockSize - 1) / kBlockSize;
  std::vector<int32_t> table;
  for (int i = n_blocks - 1; i >= 0; --i) table.push_back(i);
  const int64_t width = int64_t{n_kv_heads} * group * head_dim;
  const std::vector<bf16> keys = numbers(int64_t{n_blocks} * kBlockSize * n_kv_heads * head_dim), values = keys;
  const std::vector<bf16> queries = numbers(n_rows * width);
  std::vector<bf16> out(queries.size());
  const orca_span span{0, n_rows, context, 0};
  const orca_spans spans{&span, table.data(), 1, kBlockSize};
  const orca_heads heads{n_kv_heads * group, n_kv_heads, head_dim};
  const orca_attention_spec spec{0.1f, window != 0 ? 30.f : 0.f, window};
  return orca_attend(&spans, &heads, &spec, queries.data(), width, keys.data(), values.data(), out.data(), width,
                     n_threads) == 0;
}

}  // namespace

int main() {
  int n = 0, n_failed = 0;
  const auto count = [&](bool ok) { ++n, n_failed += ok ? 0 : 1; };
  for (const orca_format format : {orca_format{16, 0, 0}, {8, 0, 0}, {8, 1, 0}, {8, 1, 1}, {4, 1, 0}, {4, 1, 1}}) {
    for (const int64_t n_in : {32, 64, 96, 576}) {
      for (const int64_t n_out : {1, 31, 32, 33, 100}) {
        for (const int64_t n_rows : {1, 2, 4, 5, 6, 7, 11, 12, 13, 23, 24, 25, 37, 50}) {
          count(multiply(format, n_in, n_out, n_rows, false, 1)), count(multiply(format, n_in, n_out, n_rows, true, 2));
        }
      }
    }
  }
  for (const int head_dim : {32, 64, 80, 128}) {
    for (const int group : {1, 3}) {
      for (const int n_rows : {1, 2, 17, 40, 200}) {
        for (const int before : {0, 5, 63, 600}) {
          for (const int window : {0, 50}) {
            count(attend(head_dim, 1, group, n_rows, before + n_rows, window, 1));
            count(attend(head_dim, 2, group, n_rows, before + n_rows, window, 2));
          }
        }
      }
    }
  }
  std::printf("%d calls, %d failed\n", n, n_failed);
  return n_failed == 0 ? 0 : 1;
}
