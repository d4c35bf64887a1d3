#include "memory.h"

#include <ATen/EmptyTensor.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace ortlaunch {
namespace {

constexpr size_t kSmallest = size_t{1} << 20;  // bytes; the C library itself reuses smaller blocks
constexpr int64_t kIdle = 2048;                // allocations after which an unused block is freed

class Pool {
 public:
  void* take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++takes_;
    const auto found = free_.find(bytes);
    if (found != free_.end()) {
      void* block = found->second.address;
      free_.erase(found);
      return block;
    }
    drop_idle();
    void* block = nullptr;
    TORCH_CHECK(posix_memalign(&block, 4096, bytes) == 0, "out of memory: ", bytes, " bytes");
    return block;
  }

  void give(void* block, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.emplace(bytes, Free{block, takes_});
  }

 private:
  struct Free {
    void* address;
    int64_t since;
  };

  void drop_idle() {
    for (auto entry = free_.begin(); entry != free_.end();) {
      if (takes_ - entry->second.since > kIdle) {
        std::free(entry->second.address);
        entry = free_.erase(entry);
      } else {
        ++entry;
      }
    }
  }

  std::mutex mutex_;
  std::multimap<size_t, Free> free_;
  int64_t takes_ = 0;
};

Pool& pool() {
  static Pool* instance = new Pool();  // never destroyed, because tensors may exist until the process ends
  return *instance;
}

}  // namespace

at::Tensor fresh(at::IntArrayRef sizes, at::ScalarType dtype) {
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  if (bytes < kSmallest) return at::Tensor(at::detail::empty_cpu(sizes, dtype));
  // Sizes are rounded up to whole pages, so that tensors of slightly different lengths reuse each other's memory.
  const size_t rounded = (bytes + 65535) / 65536 * 65536;
  void* block = pool().take(rounded);
  return at::from_blob(block, sizes, [rounded](void* address) { pool().give(address, rounded); }, dtype);
}

}  // namespace ortlaunch
