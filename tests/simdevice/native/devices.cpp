// What torch asks of a device type: which device and stream is current, events, and the hooks of an accelerator.

#include "memory.h"
#include "state.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim {
namespace {

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count); }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(c10::Device device) const override {
    check_ordinal(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(resolve(device).index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, resolve(device));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pool_stream(resolve(device).index(), priority < 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool urgent) const override {
    return pool_stream(resolve(device).index(), urgent);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);  // so that polling ends
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(Gate(), index_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_ordinal(device);
    const Gate gate;
    for (int id = 0; id < kStreamsPerDevice; ++id) synchronize(gate, device * kStreamsPerDevice + id);
  }

  // An event is made when it is first recorded. Torch calls none of these with one that was not.
  void record(void** slot, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag)
      const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "Event device index ", device, " does not match recording stream's device index ", stream.device_index());
    const Gate gate;
    auto recorded = sim::record(gate, index_of(stream));
    if (auto* event = static_cast<Event*>(*slot)) {
      *event = std::move(recorded);
    } else {
      *slot = new Event(std::move(recorded));
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait(Gate(), index_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);  // so that polling ends
    return true;
  }
  void synchronizeEvent(void* event) const override { synchronize(Gate(), *static_cast<Event*>(event)); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto elapsed = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_on_stream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

struct SimHooks final : at::PrivateUse1HooksInterface {
  // No "override" on the next two: older releases of torch do not declare them.
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_ordinal(index);
    current_device = index;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    if (index < 0) return -1;
    const auto previous = current_device;
    setCurrentDevice(index);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return pinned_memory(data) != nullptr; }
  at::Device getDeviceFromPtr(void*) const override { return {kSim, current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void start_devices(int count) {
  TORCH_CHECK(device_count == 0, "sim: already started");
  TORCH_CHECK(count >= 1 && count <= kMaxDevices, "sim: between 1 and ", kMaxDevices, " devices, not ", count);
  device_count = count;
  start_streams();
  at::RegisterPrivateUse1HooksInterface(new SimHooks);
}

}  // namespace sim
