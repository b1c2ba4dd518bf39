// The "sim" accelerator: several devices over host memory, for tests that need more than one device.
//
// Every tensor of device sim:i lives in host memory owned by an allocator that knows its device. Operators
// run on CPU kernels: the fallback below hands them CPU tensors over the very same bytes, so nothing is
// copied behind the caller's back and the counters hold the caller's copies only. Everything is synchronous.
//
// What is imitated: one current device per thread, the errors of a real accelerator (an operator over two
// devices, an ordinal out of range), one autograd worker thread per device, autocast, pinned host memory.
// What is not: streams and events (there is one stream per device, always idle), sparse, nested and quantized
// tensors, and random numbers of a device's own (they come from the CPU's generator).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>
#include <torch/version.h>

#define SIM_DEVICE_ALLOCATOR (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9)
#if SIM_DEVICE_ALLOCATOR
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);
constexpr c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
constexpr int kMaxDevices = 16;

// ---------------------------------------------------------------- state

struct Transfers {
  std::atomic<int64_t> count{0}, bytes{0};
  void add(size_t n) {
    ++count;
    bytes += static_cast<int64_t>(n);
  }
  void reset() { count = bytes = 0; }
};

struct Memory {
  std::atomic<int64_t> blocks{0}, bytes{0};
};

int device_count = 0;
thread_local c10::DeviceIndex current_device = 0;
Transfers host_to_device, device_to_host, device_to_device;
std::atomic<int64_t> scalar_reads{0}, operators{0};
std::array<Memory, kMaxDevices> live;

void check_ordinal(int64_t index) {
  TORCH_CHECK(
      index >= 0 && index < device_count,
      "sim error: invalid device ordinal ", index, " (there are ", device_count, " devices)");
}

// ---------------------------------------------------------------- memory

struct Block {
  void* data;
  size_t bytes;
  c10::DeviceIndex device;
};

void release_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& memory = live[block->device];
  --memory.blocks;
  memory.bytes -= static_cast<int64_t>(block->bytes);
  std::free(block->data);
  delete block;
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes) {
  const c10::Device device(kSim, index);
  if (bytes == 0) return {nullptr, device};
  constexpr size_t kAlign = 64;
  void* data = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  TORCH_CHECK(data != nullptr, "sim out of memory: tried to allocate ", bytes, " bytes on ", device);
  auto& memory = live[index];
  ++memory.blocks;
  memory.bytes += static_cast<int64_t>(bytes);
  return {data, new Block{data, bytes, index}, &release_block, device};
}

#if SIM_DEVICE_ALLOCATOR
struct SimAllocator final : c10::DeviceAllocator {
  // What torch.accelerator's memory functions ask for; there is no cache, so "reserved" is "allocated".
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    check_ordinal(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocation[0].current = live[index].blocks;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = live[index].bytes;
    return stats;
  }
#else
struct SimAllocator final : c10::Allocator {
#endif
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device, bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// Page-locked host memory: ordinary memory whose addresses are remembered.
struct PinnedAllocator final : c10::Allocator {
  static inline std::mutex mutex;
  static inline std::unordered_set<const void*> addresses;

  static bool contains(const void* data) {
    std::lock_guard<std::mutex> hold(mutex);
    return addresses.count(data) != 0;
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> hold(mutex);
      addresses.erase(data);
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> hold(mutex);
    addresses.insert(data);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// Never destroyed: tensors may outlive the static objects of this library.
auto* const sim_allocator = new SimAllocator;
auto* const pinned_allocator = new PinnedAllocator;
REGISTER_ALLOCATOR(kSim, sim_allocator)

// Replaces a storage's memory by a block of another size, keeping the bytes that fit.
void resize_storage(const c10::Storage& storage, const void* source, size_t source_bytes, size_t bytes) {
  auto block = allocate_on(storage.device().index(), bytes);
  if (const size_t kept = std::min(source_bytes, bytes)) std::memcpy(block.get(), source, kept);
  storage.set_data_ptr_noswap(std::move(block));
  storage.set_nbytes(bytes);
}

// ---------------------------------------------------------------- device management

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only_stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

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

  c10::Stream getStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return only_stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return only_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex index) const override { check_ordinal(index); }

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
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

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::contains(data); }
  at::Device getDeviceFromPtr(void*) const override { return {kSim, current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, storage.data(), storage.nbytes(), bytes);
  }
};

// ---------------------------------------------------------------- views of device memory

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

// A CPU storage over the bytes of a device storage. A CPU kernel that resizes it moves it to memory of its own.
c10::Storage host_view(const c10::Storage& storage) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(),
      /*resizable=*/true));
}

bool on_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

at::Tensor host_view(const at::Tensor& tensor) {
  return on_sim(tensor) ? make_tensor(host_view(tensor.storage()), kCpuKeys, tensor) : tensor;
}

// ---------------------------------------------------------------- operators of the device's own

c10::Device resolve(const std::optional<at::Device>& device) {
  const auto index = device && device->has_index() ? device->index() : current_device;
  check_ordinal(index);
  return {kSim, index};
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_generic(size, sim_allocator, kSimKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_strided_generic(size, stride, sim_allocator, kSimKeys, c10::dtype_or_default(dtype));
}

// Every copy a caller asks for passes here. Counted in bytes that reach the destination; a copy of no element
// moves nothing and one within a device crosses nothing, so neither is counted.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool /*non_blocking*/) {
  if (const auto bytes = destination.nbytes()) {
    if (!on_sim(source)) {
      host_to_device.add(bytes);
    } else if (!on_sim(destination)) {
      device_to_host.add(bytes);
    } else if (source.device() != destination.device()) {
      device_to_device.add(bytes);
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  host_view(destination).copy_(host_view(source));
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  ++scalar_reads;
  const at::AutoDispatchBelowADInplaceOrView below;
  return host_view(tensor).item();
}

const at::Tensor& resize(
    const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, size, format);
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

void record_stream(at::Tensor&, c10::Stream) {}

// Says no, so that a transformer encoder given a padding mask does not turn to nested tensors.
bool may_nest(const at::Tensor&, const at::Tensor&) {
  return false;
}

// ---------------------------------------------------------------- recurrent cells
// Torch takes these fused kernels on any custom device, and has them for real accelerators only. What the
// backward passes need (the workspace) is in a format of our own.

at::Tensor gates_of(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

at::Tensor bias_gradient(const at::Tensor& gradient, bool has_bias) {
  return has_bias ? gradient.sum(0) : at::Tensor();
}

// The derivatives of sigmoid and tanh, from their results.
at::Tensor sigmoid_slope(const at::Tensor& y) {
  return y * (1 - y);
}
at::Tensor tanh_slope(const at::Tensor& y) {
  return 1 - y * y;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  const auto gates = (gates_of(input_gates, input_bias) + gates_of(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), update = gates[2].tanh(), out = gates[3].sigmoid();
  const auto new_cell = forget * cell + in * update;
  return {out * new_cell.tanh(), new_cell, at::cat({in, forget, update, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& hidden_gradient,
    const std::optional<at::Tensor>& new_cell_gradient,
    const at::Tensor& cell,
    const at::Tensor& new_cell,
    const at::Tensor& workspace,
    bool has_bias) {
  const auto given = [&](const std::optional<at::Tensor>& gradient) {
    return gradient && gradient->defined() ? *gradient : at::zeros_like(cell);
  };
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &update = gates[2], &out = gates[3];
  const auto squashed = new_cell.tanh(), of_hidden = given(hidden_gradient);
  const auto of_cell = given(new_cell_gradient) + of_hidden * out * tanh_slope(squashed);
  const auto of_gates = at::cat(
      {of_cell * update * sigmoid_slope(in),
       of_cell * cell * sigmoid_slope(forget),
       of_cell * in * tanh_slope(update),
       of_hidden * squashed * sigmoid_slope(out)},
      1);
  return {of_gates, of_cell * forget, bias_gradient(of_gates, has_bias)};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias,
    const std::optional<at::Tensor>& hidden_bias) {
  const auto from_input = gates_of(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = gates_of(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid(), keep = (from_input[1] + from_hidden[1]).sigmoid();
  const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + keep * (hidden - fresh), at::cat({reset, keep, fresh, hidden, from_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &reset = saved[0], &keep = saved[1], &fresh = saved[2], &hidden = saved[3], &candidate = saved[4];
  const auto of_fresh = gradient * (1 - keep) * tanh_slope(fresh);
  const auto of_keep = gradient * (hidden - fresh) * sigmoid_slope(keep);
  const auto of_reset = of_fresh * candidate * sigmoid_slope(reset);
  const auto of_input = at::cat({of_reset, of_keep, of_fresh}, 1);
  const auto of_hidden = at::cat({of_reset, of_keep, of_fresh * reset}, 1);
  return {
      of_input,
      of_hidden,
      gradient * keep,
      bias_gradient(of_input, has_bias),
      bias_gradient(of_hidden, has_bias)};
}

// ---------------------------------------------------------------- every other operator

// One call of a CPU kernel over device memory: arguments down to the host, results back up.
class HostCall {
 public:
  explicit HostCall(const c10::FunctionSchema& schema) : name_(schema.name()) {}

  c10::IValue lower(const c10::IValue& value) {
    if (value.isTensor()) return lower(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(lower(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {  // indices: these alone may stay on the CPU
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        const bool keep = !tensor || !tensor->defined() || tensor->is_cpu();
        list.push_back(keep ? tensor : std::optional<at::Tensor>(lower(*tensor)));
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kSim) {
      target_ = resolve(value.toDevice());  // stands after the tensors, and overrules them
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  // Brings over what the kernel did to its arguments besides writing into their bytes.
  void update_arguments() {
    for (auto& entry : storages_) {
      auto& [original, host] = entry.second;
      if (host.data() != original.data() || host.nbytes() != original.nbytes()) {
        resize_storage(original, host.data(), host.nbytes(), host.nbytes());
      }
    }
    for (const auto& [original, host] : tensors_) {
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

 private:
  struct StoragePair {
    c10::Storage original, host;
  };

  at::Tensor lower(const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
    if (!first_) first_ = tensor.device();
    TORCH_CHECK(
        tensor.device() == *first_,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *first_, " and ", tensor.device(), "! (when running ", name_, ")");
    if (!on_sim(tensor)) return tensor;
    target_ = tensor.device();
    for (const auto& [original, host] : tensors_) {
      if (original.is_same(tensor)) return host;
    }
    auto& pair = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!pair.host) pair = {tensor.storage(), host_view(tensor.storage())};
    tensors_.emplace_back(tensor, make_tensor(pair.host, kCpuKeys, tensor));
    return tensors_.back().second;
  }

  at::Tensor lift(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& [original, host] : tensors_) {
      if (host.is_same(result)) return original;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == at::kStrided && !result.is_nested() && !result.is_quantized(),
        "sim: ", name_, " returns a tensor that is not dense");
    return make_tensor(device_storage(result.storage()), kSimKeys, result);
  }

  // The device storage behind a host one: an argument's, when the result is a view of it, or a new one.
  c10::Storage device_storage(const c10::Storage& host) {
    for (const auto& entry : storages_) {
      if (entry.second.host.is_alias_of(host)) return entry.second.original;
    }
    const auto device = resolve(target_);
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), 0, allocate_on(device.index(), 0), sim_allocator, /*resizable=*/true);
    resize_storage(storage, host.data(), host.nbytes(), host.nbytes());
    storages_[storage.unsafeGetStorageImpl()] = {storage, host};
    return storage;
  }

  const std::string& name_;
  std::optional<c10::Device> first_;   // where the first tensor lies
  std::optional<c10::Device> target_;  // where new results go
  std::unordered_map<c10::StorageImpl*, StoragePair> storages_;  // by device storage
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;       // device tensor, host view
};

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  ++operators;
  HostCall call(op.schema());
  const auto first = stack->size() - op.schema().arguments().size();
  for (auto i = first; i < stack->size(); ++i) (*stack)[i] = call.lower((*stack)[i]);
  {
    const c10::impl::ExcludeDispatchKeyGuard no_cpu_autocast(c10::autocast_dispatch_keyset);
    op.redispatchBoxed(kCpuKeys, stack);
  }
  call.update_arguments();
  for (auto i = first; i < stack->size(); ++i) (*stack)[i] = call.lift((*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("_has_compatible_shallow_copy_type", compatible_shallow_copy);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_view);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_nested_tensor_from_mask_left_aligned", may_nest);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  // These two choose a kernel by device type and have none for this one: leave the choice to the CPU's. (Not
  // "convolution", the caller of "_convolution": it is the latter that a trace records.)
  for (const auto* name : {"_convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", compatible_shallow_copy);
}

// A lazily conjugated or negated source is resolved by copying it, so the copy has to take it as it is.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// ---------------------------------------------------------------- autocast

enum class Policy { kLower, kFull, kPromote };

template <typename Visit>
void visit_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  }
}

c10::IValue cast(const c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) return at::autocast::cached_cast(dtype, value.toTensor(), kSim);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(at::autocast::cached_cast(dtype, tensor, kSim));
    }
    return list;
  }
  return value;
}

template <Policy policy>
void run_autocast(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  const auto first = stack->size() - op.schema().arguments().size();
  auto dtype = policy == Policy::kFull ? at::kFloat : at::autocast::get_autocast_dtype(kSim);
  if (policy == Policy::kPromote) {
    for (auto i = first; i < stack->size(); ++i) {
      visit_tensors((*stack)[i], [&](const at::Tensor& tensor) {
        if (tensor.defined()) dtype = at::autocast::prioritize(dtype, tensor, kSim);
      });
    }
  }
  for (auto i = first; i < stack->size(); ++i) (*stack)[i] = cast((*stack)[i], dtype);
  op.callBoxed(stack);
}

template <Policy policy>
void autocast_operator(torch::Library& library, std::string name) {
  // "conv_transpose2d, input" in torch's lists is the overload conv_transpose2d.input.
  if (const auto comma = name.find(','); comma != std::string::npos) {
    name = name.substr(0, comma) + "." + name.substr(name.find_first_not_of(' ', comma + 1));
  }
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_autocast<policy>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_LOWER(...) autocast_operator<Policy::kLower>(m, #__VA_ARGS__);
#define SIM_FULL(...) autocast_operator<Policy::kFull>(m, #__VA_ARGS__);
#define SIM_PROMOTE(...) autocast_operator<Policy::kPromote>(m, #__VA_ARGS__);
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FULL)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
#undef SIM_LOWER
#undef SIM_FULL
#undef SIM_PROMOTE
}

// ---------------------------------------------------------------- Python

void start(int count) {
  TORCH_CHECK(device_count == 0, "sim: already started");
  TORCH_CHECK(count >= 1 && count <= kMaxDevices, "sim: between 1 and ", kMaxDevices, " devices, not ", count);
  device_count = count;
  at::RegisterPrivateUse1HooksInterface(new SimHooks);
}

std::map<std::string, int64_t> read_counters() {
  return {
      {"h2d", host_to_device.count},   {"h2d_bytes", host_to_device.bytes},
      {"d2h", device_to_host.count},   {"d2h_bytes", device_to_host.bytes},
      {"d2d", device_to_device.count}, {"d2d_bytes", device_to_device.bytes},
      {"scalar_reads", scalar_reads},  {"operators", operators},
  };
}

std::vector<std::pair<int64_t, int64_t>> read_memory() {
  std::vector<std::pair<int64_t, int64_t>> result;
  for (int i = 0; i < device_count; ++i) result.emplace_back(live[i].blocks, live[i].bytes);
  return result;
}

void reset_counters() {
  for (auto* transfers : {&host_to_device, &device_to_host, &device_to_device}) transfers->reset();
  scalar_reads = operators = 0;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("device_count", [] { return device_count; });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int index) {
    check_ordinal(index);
    current_device = static_cast<c10::DeviceIndex>(index);
  });
  m.def("read_counters", &read_counters);
  m.def("read_memory", &read_memory);
  m.def("reset_counters", &reset_counters);
}
