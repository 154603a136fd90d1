// Where the workers run: each on a CPU of its own while there is one for each of them, and the caller afterwards as it
// was before. And in slices of what length.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "workers.h"

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::puts(what);
  std::exit(1);
}

cpu_set_t allowed() {
  cpu_set_t set;
  expect(sched_getaffinity(0, sizeof set, &set) == 0, "the system does not say where this thread may run");
  return set;
}

// What each of n threads may use while it computes: a part waits until all have one, so that each takes one.
std::vector<cpu_set_t> places(int n) {
  orca::Workers::Session workers(n);
  expect(workers.n_threads() == n, "threads are missing");
  std::atomic<int> begun{0};
  std::mutex lock;
  std::vector<cpu_set_t> found;
  workers.run(n, [&](int) {
    for (++begun; begun < n;) std::this_thread::yield();
    const cpu_set_t mine = allowed();
    std::lock_guard<std::mutex> guard(lock);
    found.push_back(mine);
  });
  return found;
}

struct Attributes {  // sched_getattr(2)
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
};

Attributes attributes() {
  Attributes mine{};
  expect(syscall(SYS_sched_getattr, 0, &mine, sizeof mine, 0) == 0, "the system does not say how this thread runs");
  return mine;
}

// Whether slices can be chosen here at all: Linux 6.12.
bool has_slices() {
  bool has = false;
  std::thread([&] {
    Attributes mine = attributes();
    mine.size = sizeof mine, mine.runtime = 7'000'000;
    has = syscall(SYS_sched_setattr, 0, &mine, 0) == 0 && attributes().runtime == 7'000'000;
  }).join();
  return has;
}

void run_in_long_slices(int n) {
  expect(attributes().runtime != 20'000'000, "a caller of a few sessions has long slices");
  for (int i = 0; i < 256; ++i) orca::Workers::Session again(1);
  orca::Workers::Session workers(n);
  std::atomic<int> begun{0}, n_long{0}, n_nice{0};
  workers.run(n, [&](int) {
    for (++begun; begun < n;) std::this_thread::yield();
    n_long += attributes().runtime == 20'000'000;
    n_nice += attributes().nice == 3;
  });
  expect(n_long == n, "somebody computes in short slices");
  expect(n_nice == n, "somebody's share is another one than its maker's");
  std::thread([] { expect(attributes().runtime != 20'000'000, "what the caller starts has long slices"); }).join();
}

// The only CPU of a set that holds several, the last one.
cpu_set_t last(const cpu_set_t& set) {
  int found = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) found = cpu;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(found, &one);
  return one;
}

// Somebody moves the caller while it computes, as taskset does.
void is_moved(int n, const cpu_set_t& to) {
  orca::Workers::Session workers(n);
  expect(sched_setaffinity(0, sizeof to, &to) == 0, "the caller could not be moved");
}

bool all_apart(const std::vector<cpu_set_t>& places) {
  cpu_set_t seen;
  CPU_ZERO(&seen);
  for (const cpu_set_t& place : places) {
    if (CPU_COUNT(&place) != 1) return false;
    CPU_OR(&seen, &seen, &place);
  }
  return CPU_COUNT(&seen) == static_cast<int>(places.size());
}

bool all_like(const std::vector<cpu_set_t>& places, const cpu_set_t& set) {
  for (const cpu_set_t& place : places) {
    if (!CPU_EQUAL(&place, &set)) return false;
  }
  return true;
}

}  // namespace

int main() {
  expect(nice(3) == 3, "no niceness");
  const cpu_set_t before = allowed();
  const int n = CPU_COUNT(&before);
  expect(n > 1, "one CPU");
  expect(all_apart(places(n)), "a thread for each CPU: not each on its own");
  const cpu_set_t after = allowed();
  expect(CPU_EQUAL(&before, &after), "the caller was not let go");
  std::thread([&] {
    const cpu_set_t inherited = allowed();
    expect(CPU_EQUAL(&before, &inherited), "a thread of the caller's is not free");
  }).join();
  expect(all_like(places(n + 1), before), "more threads than CPUs: not all are free");
  expect(all_apart(places(n)), "again a thread for each CPU: not each on its own");

  if (has_slices()) run_in_long_slices(n);

  const cpu_set_t one = last(before);
  is_moved(n, one);
  const cpu_set_t moved = allowed();
  expect(CPU_EQUAL(&moved, &one), "a caller that was moved meanwhile was moved back");
  expect(all_like(places(2), one), "a caller that is held to one CPU: its workers are not");
  std::puts("fine");
}
