// What PyTorch asks of a device: which one is current, streams, events, who waits for whom.
#pragma once

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {

// A place in a stream's order, once it was recorded.
struct Event {
  Stream* stream;
  uint64_t place;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kDevice, static_cast<c10::DeviceIndex>(current.device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there are ", kDevices, " devices, and ", device, " is none of them");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current.device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current.device; }
  static c10::Stream wrapped(const Stream* stream) {
    c10::Device device(kDevice, static_cast<c10::DeviceIndex>(stream->device));
    return c10::Stream(c10::Stream::UNSAFE, device, stream->id);
  }
  c10::Stream getStream(c10::Device device) const noexcept override { return wrapped(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return wrapped(streams().at(index_of(device))); }
  c10::Stream getNewStream(c10::Device device, int) const override { return wrapped(streams().make(index_of(device), kOwn)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    c10::Stream before = getStream(stream.device());
    current.stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Stream* mine = streams().at(stream.id());
    return mine->reached(mine->place());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Stream* mine = streams().at(stream.id());
    mine->synchronize(mine->place(), "Stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (Stream* stream : streams().of(device < 0 ? current.device : device))
      stream->synchronize(stream->place(), "synchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    Stream* mine = streams().at(stream.id());
    *static_cast<Event*>(*event) = {mine, mine->place()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto* mine = static_cast<Event*>(event)) streams().at(stream.id())->wait_for(mine->stream, mine->place);
  }
  bool queryEvent(void* event) const override {
    auto* mine = static_cast<Event*>(event);
    return !mine || mine->stream->reached(mine->place);
  }
  void synchronizeEvent(void* event) const override {
    if (auto* mine = static_cast<Event*>(event)) mine->stream->synchronize(mine->place, "Event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    device_allocator.record_stream(memory.get(), streams().at(stream.id()));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current.device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current.device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* at) const override { return pinned_allocator.has(at); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::StorageImpl* mine = storage.unsafeGetStorageImpl();
    c10::Device before = Guard().exchangeDevice(mine->device());
    c10::DataPtr fresh = device_allocator.allocate(nbytes);
    void* to = fresh.get();
    const void* from = mine->data();
    size_t kept = std::min(nbytes, mine->nbytes());
    if (kept) current_stream(current.device)->push([=] { std::memcpy(to, from, kept); });
    mine->set_data_ptr_noswap(std::move(fresh));
    mine->set_nbytes(nbytes);
    Guard().setDevice(before);
  }
};

inline Hooks hooks;

}  // namespace sim
