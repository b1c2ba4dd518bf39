// What Python is given.

#include "memory.h"
#include "races.h"
#include "state.h"
#include "streams.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <string>

namespace sim {

void start_devices(int count);

namespace {

std::map<std::string, int64_t> read_counters() {
  return {
      {"h2d", host_to_device.count},   {"h2d_bytes", host_to_device.bytes},
      {"d2h", device_to_host.count},   {"d2h_bytes", device_to_host.bytes},
      {"d2d", device_to_device.count}, {"d2d_bytes", device_to_device.bytes},
      {"late", late_copies},           {"scalar_reads", scalar_reads},
      {"operators", operators},
  };
}

void reset_counters() {
  for (auto* transfers : {&host_to_device, &device_to_host, &device_to_device}) transfers->reset();
  scalar_reads = operators = late_copies = 0;
  reset_races();
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.attr("device_type") = static_cast<int>(kSim);
  m.def("start", &start_devices);
  m.def("device_count", [] { return device_count; });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("read_counters", &read_counters);
  m.def("read_memory", &read_memory);
  m.def("read_races", &read_races);
  m.def("reset_counters", &reset_counters);
}
