// Threads that share one computation. They belong to the process; one computation at a time has them.
//
// An OpenMP of our own would be a second one beside torch's, and its barriers wait for threads that the system has taken
// off the CPU. Here a part that nobody has begun can be taken by anyone, and who waits longer than some tens of
// microseconds gives the CPU away.
//
// Where there is a thread for each CPU that the caller may use, each has its own while they compute. Left to itself the
// system, when it wakes a thread and finds no CPU idle for a moment, puts it behind another one of them, and one CPU has
// two of them while others run what takes microseconds: beside a service on the same CPUs that costs a tenth.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

namespace orca {

constexpr int kMaxThreads = 256;
constexpr int kMaxParts = 65535;

class Workers {
 public:
  // The threads of this process, for as long as the object lives. Whoever comes while they are taken works alone, and
  // where the system gives no more threads there are fewer than were asked for.
  class Session {
   public:
    explicit Session(int n_threads);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    int n_threads() const { return n_threads_; }

    // Calls task(i) once for each 0 <= i < n_parts (at most kMaxParts), neighbours on the same thread where possible.
    // What a task throws is thrown here, once no task is being run any more.
    template <class Task>
    void run(int n_parts, const Task& task) {
      if (n_threads_ == 1 || n_parts <= 1) {
        for (int i = 0; i < n_parts; ++i) task(i);
        return;
      }
      const auto call = [](const void* context, int i) { (*static_cast<const Task*>(context))(i); };
      workers_->publish(n_threads_, n_parts, call, &task);
    }

   private:
    Workers* workers_;
    int n_threads_;
    bool is_held_ = false;  // the caller, to one CPU
    cpu_set_t allowed_;     // where it could run before
    cpu_set_t held_;        // that CPU
  };

 private:
  using Call = void (*)(const void*, int);

  // The parts a thread has left: epoch in the upper 32 bits, then the first and the end of them, 16 bits each. Whoever
  // takes one compares the epoch with it, so nobody can take a part of a computation that is over.
  struct alignas(64) Share {
    std::atomic<uint64_t> state{0};
  };

  static Workers& shared();
  int grow(int n_threads) noexcept;
  bool place(int n_threads, const cpu_set_t& allowed);
  void publish(int n_threads, int n_parts, Call call, const void* context);
  void work(uint32_t epoch, int self);
  void live(int self, uint32_t seen);
  bool take(uint32_t epoch, int share, bool from_the_end, int* part);

  std::mutex taken_;
  int n_alive_ = 1;
  std::vector<pthread_t> threads_;  // all but the caller's
  cpu_set_t placed_{};              // what they were placed by last: CPUs the caller could use, and threads
  int n_placed_ = 0;
  std::unique_ptr<Share[]> shares_ = std::make_unique<Share[]>(kMaxThreads);
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> n_shares_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> left_{0};
  alignas(64) std::atomic<int> n_asleep_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // written by whoever set failed_, read when no part is left
  std::mutex sleep_;
  std::condition_variable wake_;
};

// What a C function returns of a body that may throw, for nothing may be thrown at a caller in C. 0: it did not; 1:
// memory ran out; 2: something else.
template <class Body>
int32_t guarded(const Body& body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const std::length_error&) {  // a vector of more than there could be
    return 1;
  } catch (...) {
    return 2;
  }
}

}  // namespace orca
