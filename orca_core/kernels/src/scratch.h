// Memory that is kept from call to call: contents are undefined after each get.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace orca {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // Aligned to a line of the cache. Throws std::bad_alloc.
  void* get(size_t bytes) {
    if (bytes > bytes_) {
      std::free(memory_);
      bytes_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(64, bytes_);
      if (memory_ == nullptr) {
        bytes_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace orca
