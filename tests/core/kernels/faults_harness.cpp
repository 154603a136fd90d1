// What goes wrong in the workers: tasks that throw on any thread, and a system that gives no more threads.
#include <sys/resource.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <vector>

#include "workers.h"

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::puts(what);
  std::exit(1);
}

// Every part is run, whatever others throw; one of what was thrown comes out, after the last part.
void throw_in_parts(int n_threads, int every) {
  constexpr int kParts = 60;
  std::vector<std::atomic<int>> runs(kParts);
  orca::Workers::Session workers(n_threads);
  const int32_t status = orca::guarded([&] {
    workers.run(kParts, [&](int i) {
      ++runs[i];
      if (i % every == 0) throw std::bad_alloc();
    });
  });
  expect(status == 1, "bad_alloc did not come out");
  for (auto& count : runs) expect(n_threads == 1 || count == 1, "a part was not run once");
  std::atomic<int> sum{0};
  workers.run(kParts, [&](int i) { sum += i; });
  expect(sum == kParts * (kParts - 1) / 2, "the workers were no good afterwards");
}

// Run first: there are no threads yet, and no room for the stack of one.
void find_no_threads() {
  std::ifstream file("/proc/self/statm");
  rlim_t pages = 0;
  file >> pages;
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  rlimit tight = before;
  tight.rlim_cur = pages * 4096 + (1 << 20);
  setrlimit(RLIMIT_AS, &tight);
  for (int i = 0; i < 2; ++i) {  // a lock that stays behind would be met by the second
    orca::Workers::Session workers(4);
    expect(workers.n_threads() == 1, "threads came out of nowhere");
    int sum = 0;
    workers.run(10, [&](int part) { sum += part; });
    expect(sum == 45, "parts were left out");
  }
  setrlimit(RLIMIT_AS, &before);
  orca::Workers::Session workers(4);
  expect(workers.n_threads() == 4, "threads are not asked for again");
}

}  // namespace

int main() {
  find_no_threads();
  for (int round = 0; round < 14; ++round) {
    for (int n_threads : {1, 2, 4}) throw_in_parts(n_threads, 1 + round % 7);
  }
  expect(orca::guarded([] { throw 1; }) == 2, "what is thrown is not told apart");
  std::puts("fine");
}
