// Memory: who owns a block of it, when it comes to its end, and what is in it before and after.
//
// A block of a device belongs to the stream that was current on the device when it was made. A caching allocator
// hands freed memory to the next taker on that stream at once, while other streams may still be using it. Here
// freed memory is overwritten instead, after what its own stream and the recorded ones had queued by then, and
// whoever still used it is judged at the stream's next allocation (see races.h).

#pragma once

#include "races.h"
#include "streams.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <memory>
#include <utility>
#include <vector>

namespace sim {

// Bytes that stay mapped as long as anyone holds them: their owner, or a copy that was put off.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void poison();     // NaN, or all bits set
  History history;  // under the gate

 private:
  void* data_;
  size_t bytes_;
};

c10::Allocator* device_allocator();  // of the current device
c10::Allocator* pinned_allocator();
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);
void record_on_stream(const c10::DataPtr& data, const c10::Stream& stream);

std::shared_ptr<Memory> pinned_memory(const void* data);  // none where the address does not begin pinned memory
std::shared_ptr<Memory> memory_of(const at::Tensor& tensor);  // none for what is neither a device's nor pinned

void replace_memory(const c10::Storage& storage, const void* source, size_t bytes);  // by a new block, so filled
void resize_storage(const c10::Storage& storage, size_t bytes);  // as a kernel of the current stream

std::vector<std::pair<int64_t, int64_t>> read_memory();  // by device, the live blocks and bytes

}  // namespace sim
