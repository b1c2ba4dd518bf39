// What every part of the simulation knows: which devices there are, and what has been counted so far.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);
constexpr c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
constexpr int kMaxDevices = 16;

struct Transfers {
  std::atomic<int64_t> count{0}, bytes{0};
  void add(size_t n) {
    ++count;
    bytes += static_cast<int64_t>(n);
  }
  void reset() { count = bytes = 0; }
};

inline int device_count = 0;
inline thread_local c10::DeviceIndex current_device = 0;
inline Transfers host_to_device, device_to_host, device_to_device;
inline std::atomic<int64_t> scalar_reads{0}, operators{0}, late_copies{0};

inline void check_ordinal(int64_t index) {
  TORCH_CHECK(
      index >= 0 && index < device_count,
      "sim error: invalid device ordinal ", index, " (there are ", device_count, " devices)");
}

inline c10::Device resolve(const std::optional<c10::Device>& device) {
  const auto index = device && device->has_index() ? device->index() : current_device;
  check_ordinal(index);
  return {kSim, index};
}

inline bool on_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

}  // namespace sim
