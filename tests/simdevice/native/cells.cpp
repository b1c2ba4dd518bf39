// The fused cells of recurrent layers. Torch takes these kernels on any custom device, and has them for real
// accelerators only. What the backward passes need (the workspace) is in a format of our own.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace sim {
namespace {

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

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace
}  // namespace sim
