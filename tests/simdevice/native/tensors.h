// Host tensors over the bytes of device tensors: what CPU kernels are given.

#pragma once

#include "state.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include <utility>

namespace sim {

inline at::Tensor make_tensor(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

// A CPU storage over the bytes of a storage, which it does not keep alive. A CPU kernel that resizes it moves it to
// memory of its own.
inline c10::Storage host_view(const c10::Storage& storage) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(),
      /*resizable=*/true));
}

inline at::Tensor host_view(const at::Tensor& tensor) {
  return make_tensor(host_view(tensor.storage()), kCpuKeys, tensor);
}

}  // namespace sim
