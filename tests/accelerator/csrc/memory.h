// Memory of the device, and of the host.
//
// As CUDA's caching allocator, a block belongs to the stream that it was allocated on, and a freed one goes to the next
// allocation there: at once, while jobs that use it may still be to come. That is right if all of its use is in that
// stream's order. Here a block becomes NaN as it is allocated, in the order of its stream. So who is still at it in
// another order reads NaN, or finds NaN where it wrote.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "streams.h"

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr size_t kUnit = 512;

inline size_t rounded(size_t nbytes) { return std::max<size_t>(1, (nbytes + kUnit - 1) / kUnit) * kUnit; }

struct Block {
  void* memory;
  size_t nbytes;
  Stream* stream;
  size_t asked = 0;
  std::set<Stream*> also_used_on = {};  // `record_stream`
};

struct Use {
  int64_t now = 0, most = 0;
  void add(int64_t nbytes) {
    now += nbytes;
    most = std::max(most, now);
  }
};

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(kDevice, static_cast<c10::DeviceIndex>(current.device));
    if (!nbytes) return {nullptr, nullptr, &nothing, device};
    Stream* stream = current_stream(current.device);
    void* memory = find(rounded(nbytes), stream);
    begin(memory, nbytes);
    stream->push([=] { std::memset(memory, 0xFF, rounded(nbytes)); });
    return {memory, memory, &release, device};
  }

  // The block may be given away only behind what `stream` has been given until then.
  void record_stream(void* memory, Stream* stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find(memory);
    if (found != blocks_.end() && found->second.stream != stream) found->second.also_used_on.insert(stream);
  }

  // In use now, and the most since `reset_peak`: bytes of blocks, as CUDA's allocator counts them, and those asked for.
  std::pair<Use, Use> in_use() {
    std::lock_guard<std::mutex> guard(mutex_);
    return {blocks_in_use_, asked_in_use_};
  }
  void reset_peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    blocks_in_use_.most = blocks_in_use_.now;
    asked_in_use_.most = asked_in_use_.now;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    current_stream(current.device)->push([=] { std::memcpy(to, from, nbytes); });
  }

 private:
  void* find(size_t nbytes, Stream* stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& free = free_[{stream->id, nbytes}];
    if (!free.empty()) {
      void* memory = free.back();
      free.pop_back();
      return memory;
    }
    void* memory = std::aligned_alloc(kUnit, nbytes);
    TORCH_CHECK(memory, "out of memory: ", nbytes, " bytes");
    blocks_[memory] = {memory, nbytes, stream};
    return memory;
  }

  void begin(void* memory, size_t asked) {
    std::lock_guard<std::mutex> guard(mutex_);
    Block& block = blocks_.at(memory);
    block.asked = asked;
    blocks_in_use_.add(static_cast<int64_t>(block.nbytes));
    asked_in_use_.add(static_cast<int64_t>(asked));
  }

  static void nothing(void*) {}
  static void release(void* memory);
  void free(void* memory) {
    std::lock_guard<std::mutex> guard(mutex_);
    Block& block = blocks_.at(memory);
    for (Stream* other : block.also_used_on) block.stream->wait_for(other, other->place());
    block.also_used_on.clear();
    blocks_in_use_.add(-static_cast<int64_t>(block.nbytes));
    asked_in_use_.add(-static_cast<int64_t>(block.asked));
    free_[{block.stream->id, block.nbytes}].push_back(memory);
  }

  std::mutex mutex_;
  Use blocks_in_use_, asked_in_use_;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::pair<int64_t, size_t>, std::vector<void*>> free_;
};

inline DeviceAllocator device_allocator;
inline void DeviceAllocator::release(void* memory) { device_allocator.free(memory); }

// Pinned memory is never given back: a copy may still be at it, and CUDA's allocator would wait for that.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto* memory = static_cast<char*>(std::aligned_alloc(kUnit, rounded(nbytes)));
    std::memset(memory, 0xFF, rounded(nbytes));
    std::lock_guard<std::mutex> guard(mutex_);
    ends_[memory] = memory + rounded(nbytes);
    return {memory, memory, &keep, c10::Device(c10::DeviceType::CPU)};
  }
  bool has(const void* at) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto behind = ends_.upper_bound(static_cast<const char*>(at));
    return behind != ends_.begin() && at < std::prev(behind)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &keep; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }

 private:
  static void keep(void*) {}
  std::mutex mutex_;
  std::map<const char*, const char*> ends_;
};

inline PinnedAllocator pinned_allocator;

}  // namespace sim
