// Copies: from the host, to the host, between devices and within one.
//
// As on CUDA, a copy from or to the host is work of the device's current stream, which the host awaits unless the
// caller asked for non_blocking; then what lies in pinned memory is read or written at some later time, while
// pageable memory has been read when the call returns, and is written before it returns. A copy between devices is
// work of the source's current stream, set between two waits: it comes after what the destination's current
// stream had to do, and before what that is given next. "Some later time" is as late as can be (see streams.h).

#include "memory.h"
#include "races.h"
#include "state.h"
#include "streams.h"
#include "tensors.h"

#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/copy_ops.h>
#include <torch/library.h>

#include <memory>
#include <string>

namespace sim {
namespace {

// A copy between two ranges of memory, which holds neither tensor: whoever frees or overwrites one too early is to
// see what comes of it. It does keep the memory mapped.
class Copy {
 public:
  Copy(const at::Tensor& source, const at::Tensor& destination)
      : name_("a copy from " + source.device().str() + " to " + destination.device().str()),
        from_(host_view(source)),
        to_(host_view(destination)),
        from_memory_(memory_of(source)),
        to_memory_(memory_of(destination)) {
    TORCH_CHECK(
        at::is_expandable_to(source.sizes(), destination.sizes()),
        "sim: a tensor of shape ", source.sizes(), " cannot be copied to one of shape ", destination.sizes());
    at::assert_no_internal_overlap(destination);
  }

  // Past all dispatch, for it may happen in any thread, whatever modes are on there.
  void run() const { at::_ops::copy_::redispatch(kCpuKeys, const_cast<at::Tensor&>(to_), from_, false); }

  void remember(const Gate& gate, const Moment& moment) const {
    const auto* name = operator_name(gate, name_);
    if (from_memory_) from_memory_->history.add(gate, {Footprint(from_), moment, false, name});
    if (to_memory_) to_memory_->history.add(gate, {Footprint(to_), moment, true, name});
  }

 private:
  std::string name_;
  at::Tensor from_, to_;
  std::shared_ptr<Memory> from_memory_, to_memory_;
};

using SharedCopy = std::shared_ptr<const Copy>;

void put_off(const Gate& gate, StreamIndex stream, const SharedCopy& copy) {
  ++late_copies;
  copy->remember(gate, postpone(gate, stream, [copy] { copy->run(); }));
}

void copy_across(const SharedCopy& copy, StreamIndex here, StreamIndex there) {
  const Gate gate;
  wait(gate, here, record(gate, there));
  put_off(gate, here, copy);
  wait(gate, there, record(gate, here));
}

void copy_now(const SharedCopy& copy, StreamIndex stream, bool host_waits) {
  const auto moment = launch(Gate(), stream);
  copy->run();
  const Gate gate;
  copy->remember(gate, moment);
  if (host_waits) synchronize(gate, stream);
}

StreamIndex stream_of(const at::Tensor& tensor) {
  return index_of(current_stream(tensor.device().index()));
}

// Whether a copy can take the host's side from, or put it to, where it lies: CUDA puts anything else through a
// contiguous, pageable tensor.
bool is_direct(const at::Tensor& host, const at::Tensor& device) {
  return host.sizes() == device.sizes() && memory_of(host) != nullptr &&
      (host.is_contiguous() || (host.is_non_overlapping_and_dense() && host.strides() == device.strides()));
}

// Counted in bytes that reach the destination; a copy within one device crosses nothing and is not counted.
void count_copy(const at::Tensor& source, const at::Tensor& destination) {
  const auto bytes = destination.nbytes();
  if (!on_sim(source)) {
    host_to_device.add(bytes);
  } else if (!on_sim(destination)) {
    device_to_host.add(bytes);
  } else if (source.device() != destination.device()) {
    device_to_device.add(bytes);
  }
}

// Every copy a caller asks for passes here. One of no element does nothing.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  const auto copy = std::make_shared<const Copy>(source, destination);
  if (destination.numel() == 0) return destination;
  count_copy(source, destination);
  if (on_sim(source) && on_sim(destination)) {
    if (source.device() == destination.device()) {
      copy_now(copy, stream_of(source), /*host_waits=*/false);
    } else {
      copy_across(copy, stream_of(source), stream_of(destination));
    }
    return destination;
  }
  const bool arrives = on_sim(destination);
  const auto &device = arrives ? destination : source, &host = arrives ? source : destination;
  if (non_blocking && is_direct(host, device)) {
    put_off(Gate(), stream_of(device), copy);
  } else {
    copy_now(copy, stream_of(device), /*host_waits=*/!arrives || !non_blocking);
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  ++scalar_reads;
  const auto stream = stream_of(tensor);
  const auto moment = launch(Gate(), stream);
  const auto value = at::_ops::_local_scalar_dense::redispatch(kCpuKeys, host_view(tensor));
  const Gate gate;
  if (const auto memory = memory_of(tensor)) {
    memory->history.add(gate, {Footprint(tensor), moment, false, operator_name(gate, "item()")});
  }
  synchronize(gate, stream);
  return value;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
}

// A lazily conjugated or negated source is resolved by copying it, so the copy has to take it as it is.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace sim
