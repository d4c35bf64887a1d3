// Attention made of torch's operators, for number formats other than fp32.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace ortlaunch::plain {

struct Request {
  std::optional<at::Tensor> mask;
  at::Tensor factors;  // what the weights are multiplied by, or undefined
  bool causal;
  double scale;
};

// Returns the output and the logarithms of the sums of exponentials.
std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Request& request);

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logarithms, const Request& request);

// Applies a rotary position embedding to x [B, L, H, E]; cosine and sine are [B or 1, L, R], or none.
at::Tensor turned(
    const at::Tensor& x, const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine);

// The gradient of `turned`.
at::Tensor turned_back(
    const at::Tensor& grad, const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine);

}  // namespace ortlaunch::plain
