// Operators: the CPU's kernels over the bytes of device tensors, each as one piece of work of a stream.
//
// Hardly any operator is known by name here: a fallback hands CPU tensors over the very same bytes to whichever
// kernel it is, and learns from the operator's schema which of them are written.

#include "memory.h"
#include "races.h"
#include "state.h"
#include "streams.h"
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {
namespace {

// ---------------------------------------------------------------- operators of the device's own

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_generic(size, device_allocator(), kSimKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), kSimKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(
    const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(
      size, tensor.itemsize(), static_cast<size_t>(tensor.storage_offset()));
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  if (size != tensor.sizes()) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return tensor;
}

at::Tensor& set_storage_view(
    at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage_view(tensor, std::move(storage), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage_view(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// On a real accelerator a CPU parameter moved in place stays the same object; it does here too.
bool compatible_shallow_copy(const at::Tensor&, const at::Tensor&) {
  return true;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  record_on_stream(tensor.storage().data_ptr(), stream);
}

// Says no, so that a transformer encoder given a padding mask does not turn to nested tensors.
bool may_nest(const at::Tensor&, const at::Tensor&) {
  return false;
}

// ---------------------------------------------------------------- every other operator

// What an operator does with the bytes of a tensor; of two uses the greater counts.
enum class Use { kNone, kRead, kWrite };

Use use_of(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (alias == nullptr) return Use::kRead;
  return alias->isWrite() ? Use::kWrite : Use::kNone;  // kNone: a view is made of it
}

// Batch normalisation in training writes its running statistics, which its older schemas do not say.
bool trains_statistics(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto training = schema.argumentIndexWithName("training");
  if (!training || !schema.argumentIndexWithName("running_mean")) return false;
  const auto& value = stack[stack.size() - schema.arguments().size() + *training];
  return value.isBool() && value.toBool();
}

// One call of a CPU kernel over device memory: arguments down to the host, results back up.
class HostCall {
 public:
  explicit HostCall(const c10::FunctionSchema& schema) : name_(schema.name()) {}

  c10::IValue lower(const c10::IValue& value, Use use) {
    if (value.isTensor()) return lower(value.toTensor(), use);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(lower(tensor, use));
      return list;
    }
    if (value.isOptionalTensorList()) {  // indices: these alone may stay on the CPU
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        const bool keep = !tensor || !tensor->defined() || tensor->is_cpu();
        masks_ = masks_ || (!keep && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte));
        list.push_back(keep ? tensor : std::optional<at::Tensor>(lower(*tensor, use)));
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kSim) {
      target_ = resolve(value.toDevice());  // stands after the tensors, and overrules them
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  bool has_masks() const { return masks_; }
  StreamIndex stream() const { return index_of(current_stream(resolve(target_).index())); }

  // Whether the device has anything to do: not where a view is made, or all is empty.
  bool has_work() const {
    return arguments_.empty() || std::any_of(arguments_.begin(), arguments_.end(), [](const Argument& argument) {
             return argument.use != Use::kNone && argument.original.numel() != 0;
           });
  }

  // Brings over what the kernel did to its arguments besides writing into their bytes.
  void update_arguments() {
    for (auto& entry : storages_) {
      auto& [original, host] = entry.second;
      if (host.data() != original.data() || host.nbytes() != original.nbytes()) {
        replace_memory(original, host.data(), host.nbytes());
      }
    }
    for (const auto& [original, host, use] : arguments_) {
      // Only on a change: another thread may be reading the same tensor.
      if (host.sizes() != original.sizes() || host.strides() != original.strides() ||
          host.storage_offset() != original.storage_offset()) {
        original.unsafeGetTensorImpl()->set_sizes_and_strides(
            host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

  c10::IValue lift(const c10::IValue& value) {
    if (value.isTensor()) return lift(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(lift(tensor));
      return list;
    }
    return value;
  }

  void remember(const Gate& gate, const Moment& moment) const {
    const auto* name = operator_name(gate, name_);
    const auto add = [&](const at::Tensor& tensor, bool writes) {
      if (const auto memory = memory_of(tensor)) {
        memory->history.add(gate, {Footprint(tensor), moment, writes, name});
      }
    };
    for (const auto& [original, host, use] : arguments_) {
      if (use != Use::kNone) add(original, use == Use::kWrite);
    }
    for (const auto& result : results_) add(result, true);
  }

 private:
  struct StoragePair {
    c10::Storage original, host;
  };
  struct Argument {
    at::Tensor original, host;
    Use use;
  };

  at::Tensor lower(const at::Tensor& tensor, Use use) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
    if (!first_) first_ = tensor.device();
    TORCH_CHECK(
        tensor.device() == *first_,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *first_, " and ", tensor.device(), "! (when running ", name_, ")");
    if (!on_sim(tensor)) return tensor;
    target_ = tensor.device();
    for (auto& known : arguments_) {
      if (!known.original.is_same(tensor)) continue;
      known.use = std::max(known.use, use);
      return known.host;
    }
    auto& pair = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!pair.host) pair = {tensor.storage(), host_view(tensor.storage())};
    arguments_.push_back({tensor, make_tensor(pair.host, kCpuKeys, tensor), use});
    return arguments_.back().host;
  }

  at::Tensor lift(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& argument : arguments_) {
      if (argument.host.is_same(result)) return argument.original;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == at::kStrided && !result.is_nested() && !result.is_quantized(),
        "sim: ", name_, " returns a tensor that is not dense");
    auto storage = argument_storage(result.storage());
    const bool is_view = static_cast<bool>(storage);
    if (!is_view) storage = new_storage(result.storage());
    auto lifted = make_tensor(std::move(storage), kSimKeys, result);
    if (!is_view) results_.push_back(lifted);
    return lifted;
  }

  // The device storage behind a host one: an argument's when the result is a view of it.
  c10::Storage argument_storage(const c10::Storage& host) const {
    for (const auto& entry : storages_) {
      if (entry.second.host.is_alias_of(host)) return entry.second.original;
    }
    return {};
  }

  c10::Storage new_storage(const c10::Storage& host) {
    const auto device = resolve(target_);
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), 0, allocate_on(device.index(), 0), device_allocator(), /*resizable=*/true);
    replace_memory(storage, host.data(), host.nbytes());
    storages_[storage.unsafeGetStorageImpl()] = {storage, host};
    return storage;
  }

  const std::string& name_;
  std::optional<c10::Device> first_;   // where the first tensor lies
  std::optional<c10::Device> target_;  // where new results go
  bool masks_ = false;                 // among the indices
  std::unordered_map<c10::StorageImpl*, StoragePair> storages_;  // by device storage
  std::vector<Argument> arguments_;
  std::vector<at::Tensor> results_;  // in new memory
};

// Whether the host must wait for the device to know what the operator returns: a number, or a shape. Indexing is
// tagged so for the sake of masks.
bool host_waits(const c10::OperatorHandle& op, const HostCall& call) {
  if (call.has_masks() || op.hasTag(at::Tag::data_dependent_output)) return true;
  return op.hasTag(at::Tag::dynamic_output_shape) && op.schema().name() != "aten::index";
}

void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_cpu_autocast(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(kCpuKeys, stack);
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  ++operators;
  const auto& arguments = op.schema().arguments();
  HostCall call(op.schema());
  const auto first = stack->size() - arguments.size();
  const bool statistics = trains_statistics(op.schema(), *stack);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool written = statistics && arguments[i].name().rfind("running_", 0) == 0;
    (*stack)[first + i] = call.lower((*stack)[first + i], written ? Use::kWrite : use_of(arguments[i]));
  }
  const bool has_work = call.has_work();
  const auto stream = call.stream();
  const auto moment = has_work ? launch(Gate(), stream) : Moment{stream, 0};
  run_kernel(op, stack);
  call.update_arguments();
  for (auto i = first; i < stack->size(); ++i) (*stack)[i] = call.lift((*stack)[i]);
  if (!has_work) return;
  const Gate gate;
  call.remember(gate, moment);
  if (host_waits(op, call)) synchronize(gate, stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_has_compatible_shallow_copy_type", compatible_shallow_copy);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("is_set_to", at::native::is_set_to);  // compares addresses and sizes, and reads no memory
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_view);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_nested_tensor_from_mask_left_aligned", may_nest);
  // These two choose a kernel by device type and have none for this one: leave the choice to the CPU's. (Not
  // "convolution", the caller of "_convolution": it is the latter that a trace records.)
  for (const auto* name : {"_convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", compatible_shallow_copy);
}

}  // namespace
}  // namespace sim
