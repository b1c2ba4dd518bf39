// Autocast: the lists of torch for accelerators, as the simulated device's.

#include "state.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>

namespace sim {
namespace {

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

}  // namespace
}  // namespace sim
