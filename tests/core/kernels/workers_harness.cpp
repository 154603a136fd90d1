// Two computations at a time over the workers of one process, with ever other numbers of threads and parts. Every part
// must be run once. Build it with -fsanitize=thread: docs/cpu.md says how.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "workers.h"

namespace {

void compute(unsigned seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < 400; ++round) {
    orca::Workers::Session workers(1 + static_cast<int>(random() % 6));
    for (int phase = 0; phase < 8; ++phase) {
      const int n = static_cast<int>(random() % 70);
      std::vector<int> runs(n, 0);
      workers.run(n, [&](int i) { ++runs[i]; });
      for (int count : runs) {
        if (count != 1) std::abort();
      }
    }
    if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // long enough for them to sleep
  }
}

}  // namespace

int main() {
  std::thread one(compute, 1), two(compute, 2);
  one.join(), two.join();
  std::puts("every part was run once");
}
