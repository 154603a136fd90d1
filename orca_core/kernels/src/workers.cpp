#include "workers.h"

#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>

namespace orca {
namespace {

constexpr int kSpins = 1000;  // some 40 microseconds: longer than the pause between two parts of an iteration

constexpr uint64_t kSliceNs = 20'000'000;  // the usual one is 3 ms
constexpr int kSteady = 256;  // sessions, two an iteration, after which a caller is one that computes all the time
constexpr uint64_t kResetOnFork = 1;  // SCHED_FLAG_RESET_ON_FORK: what this thread starts is none that computes

uint64_t pack(uint32_t epoch, uint64_t first, uint64_t end) { return uint64_t{epoch} << 32 | first << 16 | end; }

// Where a thread may run; one that the system will not have there goes on where it is.
bool hold(pthread_t thread, const cpu_set_t& set) { return pthread_setaffinity_np(thread, sizeof set, &set) == 0; }

// Has the system give this thread the CPU for longer and later: since Linux 6.12 the share of a thread, which stays the
// same, is dealt out in slices of a length that it may choose, and who has short ones goes first when it wakes. So what
// a service does for a token is done at once, and not when a slice of an iteration is over. Earlier kernels ignore it.
void take_long_slices() {
  struct {  // sched_setattr(2), its first version
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.size = sizeof attributes;
  attributes.flags |= kResetOnFork;
  attributes.runtime = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// The i-th CPU of a set.
cpu_set_t only(const cpu_set_t& set, int i) {
  int cpu = 0;
  for (; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set) && i-- == 0) break;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  return one;
}

std::atomic<Workers*> g_shared{nullptr};

}  // namespace

Workers& Workers::shared() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { g_shared = nullptr; });  // a child has none of its parent's threads
  });
  Workers* now = g_shared;
  if (now == nullptr) {
    auto made = std::make_unique<Workers>();
    if (g_shared.compare_exchange_strong(now, made.get())) now = made.release();  // its threads end with the process
  }
  return *now;
}

Workers::Session::Session(int n_threads) : workers_(&shared()), n_threads_(1) {
  thread_local int n_sessions = 0;  // one that only warms up goes on to other work
  if (n_sessions < kSteady && ++n_sessions == kSteady) take_long_slices();
  if (n_threads <= 1 || !workers_->taken_.try_lock()) return;
  n_threads_ = workers_->grow(n_threads < kMaxThreads ? n_threads : kMaxThreads);
  if (n_threads_ == 1) {
    workers_->taken_.unlock();
  } else if (sched_getaffinity(0, sizeof allowed_, &allowed_) == 0) {
    held_ = only(allowed_, 0);
    is_held_ = workers_->place(n_threads_, allowed_) && hold(pthread_self(), held_);
  }
}

Workers::Session::~Session() {
  cpu_set_t now;
  // what it starts next would inherit that one CPU; where somebody has put it elsewhere meanwhile, it stays there
  if (is_held_ && sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &held_)) {
    hold(pthread_self(), allowed_);
  }
  if (n_threads_ > 1) workers_->taken_.unlock();
}

// Gives each worker the CPUs that it should have; returns whether that is one for each, the first being the caller's.
bool Workers::place(int n_threads, const cpu_set_t& allowed) {
  const bool one_each = CPU_COUNT(&allowed) == n_threads;
  if (n_placed_ != n_threads || !CPU_EQUAL(&placed_, &allowed)) {
    for (int i = 0; i < static_cast<int>(threads_.size()); ++i) {
      hold(threads_[i], one_each && i + 1 < n_threads ? only(allowed, i + 1) : allowed);
    }
    n_placed_ = n_threads, placed_ = allowed;
  }
  return one_each;
}

int Workers::grow(int n_threads) noexcept {
  try {
    for (; n_alive_ < n_threads; ++n_alive_) {
      threads_.reserve(n_threads);
      std::thread thread(&Workers::live, this, n_alive_, epoch_.load());
      threads_.push_back(thread.native_handle());
      thread.detach();
      n_placed_ = 0;  // it has what its maker has
    }
  } catch (const std::exception&) {  // a limit on processes or on memory: those that are there do it
  }
  return n_alive_ < n_threads ? n_alive_ : n_threads;
}

void Workers::publish(int n_threads, int n_parts, Call call, const void* context) {
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  left_.store(n_parts, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  n_shares_.store(n_threads, std::memory_order_relaxed);
  for (int i = 0; i < n_threads; ++i) {
    const auto first = static_cast<uint64_t>(n_parts) * i / n_threads;
    const auto end = static_cast<uint64_t>(n_parts) * (i + 1) / n_threads;
    shares_[i].state.store(pack(epoch, first, end), std::memory_order_release);
  }
  epoch_.store(epoch);
  if (n_asleep_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  work(epoch, 0);
  for (int spins = 0; left_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpins) {
      _mm_pause();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));  // somebody was taken off the CPU amid a part
    }
  }
  if (failed_.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Workers::live(int self, uint32_t seen) {
  take_long_slices();
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen && spins < kSpins) {
      _mm_pause();
      ++spins;
    }
    if (spins == kSpins) {
      std::unique_lock<std::mutex> lock(sleep_);
      n_asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return epoch_.load() != seen; });
      n_asleep_.fetch_sub(1);
    }
    seen = epoch_.load(std::memory_order_acquire);
    work(seen, self);
  }
}

void Workers::work(uint32_t epoch, int self) {
  const Call call = call_.load(std::memory_order_relaxed);
  const void* context = context_.load(std::memory_order_relaxed);
  const int n_shares = n_shares_.load(std::memory_order_relaxed);
  if (self >= n_shares) return;
  for (int i = 0; i < n_shares; ++i) {
    const int share = (self + i) % n_shares;
    // what was read above is this epoch's if a part can be taken: the next one is published after all parts are done
    for (int part; take(epoch, share, i != 0, &part);) {
      try {
        call(context, part);
      } catch (...) {  // not out of a thread, nor out of the caller while others work on what lies on its stack
        if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
      }
      left_.fetch_sub(1, std::memory_order_release);
    }
  }
}

bool Workers::take(uint32_t epoch, int share, bool from_the_end, int* part) {
  std::atomic<uint64_t>& state = shares_[share].state;
  uint64_t now = state.load(std::memory_order_acquire);
  for (;;) {
    const uint64_t first = now >> 16 & 0xffff, end = now & 0xffff;
    if (static_cast<uint32_t>(now >> 32) != epoch || first >= end) return false;
    *part = static_cast<int>(from_the_end ? end - 1 : first);
    const uint64_t next = from_the_end ? pack(epoch, first, end - 1) : pack(epoch, first + 1, end);
    if (state.compare_exchange_weak(now, next, std::memory_order_acq_rel)) return true;
  }
}

}  // namespace orca
