// Linear layers and their gradients. The products are BLAS calls: of small matrices, finding and checking torch's
// operators for them takes as long as the products.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "memory.h"
#include "operators.h"
#include "products.h"
#include "vector.h"

namespace ortlaunch {
namespace {

constexpr int64_t kGrain = 16384;  // smallest number of elements per thread
constexpr int64_t kSmall = 65536;  // elements up to which one thread sums as fast as several

bool plain(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() > 0 &&
      x.numel() <= std::numeric_limits<int32_t>::max();
}

at::Tensor rows(const at::Tensor& x) { return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2); }

std::vector<int64_t> widened(const at::Tensor& x, int64_t width) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = width;
  return sizes;
}

// What is not plain is torch's.
at::Tensor product(const at::Tensor& left, const at::Tensor& right) {
  at::Tensor result = fresh({left.size(0), right.size(1)}, left.scalar_type());
  at::mm_out(result, left, right);
  return result;
}

at::Tensor affine(const at::Tensor& bias, const at::Tensor& x, const at::Tensor& weight) {
  at::Tensor result = fresh({x.size(0), weight.size(1)}, x.scalar_type());
  at::addmm_out(result, bias, x, weight);
  return result;
}

// result[..., width] = x[..., depth] @ weight + bias, where the weight is [depth, width], or [width, depth] if `turn`.
at::Tensor rows_by(const at::Tensor& x, const at::Tensor& weight, bool turn, const at::Tensor* bias) {
  const int64_t depth = x.size(-1), width = weight.size(turn ? 0 : 1), count = x.numel() / depth;
  TORCH_CHECK(weight.size(turn ? 1 : 0) == depth, "a weight of ", weight.sizes(), " for values of ", x.sizes());
  at::Tensor result = fresh(widened(x, width), at::kFloat);
  float* const to = result.data_ptr<float>();
  if (bias != nullptr) {
    TORCH_CHECK(bias->numel() == width, "a bias of ", bias->sizes(), " for a weight of ", weight.sizes());
    const float* const line = bias->const_data_ptr<float>();
    at::parallel_for(0, count, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) std::memcpy(to + row * width, line, width * sizeof(float));
    });
  }
  multiply(
      turn, false, width, count, depth, 1.0f, weight.const_data_ptr<float>(), turn ? depth : width,
      x.const_data_ptr<float>(), depth, bias != nullptr ? 1.0f : 0.0f, to, width);
  return result;
}

// left^T @ right over all rows of both.
at::Tensor over_rows(const at::Tensor& left, const at::Tensor& right) {
  const int64_t height = left.size(-1), width = right.size(-1), count = left.numel() / height;
  TORCH_CHECK(right.numel() / width == count, "gradients of ", left.sizes(), " for values of ", right.sizes());
  at::Tensor result = fresh({height, width}, at::kFloat);
  multiply(
      false, true, width, height, count, 1.0f, right.const_data_ptr<float>(), width, left.const_data_ptr<float>(),
      height, 0.0f, result.data_ptr<float>(), width);
  return result;
}

}  // namespace

at::Tensor linear(const at::Tensor& weight, const at::Tensor& x) {
  if (plain(weight) && plain(x)) return rows_by(x, weight, true, nullptr);
  return product(rows(x), weight.t()).view(widened(x, weight.size(0)));
}

at::Tensor linear_bias(const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x) {
  if (plain(weight) && plain(bias) && plain(x)) return rows_by(x, weight, true, &bias);
  return affine(bias, rows(x), weight.t()).view(widened(x, weight.size(0)));
}

at::Tensor linear_grad_x(const at::Tensor& grad, const at::Tensor& weight) {
  if (plain(grad) && plain(weight)) return rows_by(grad, weight, false, nullptr);
  return product(rows(grad), weight).view(widened(grad, weight.size(1)));
}

at::Tensor linear_grad_weight(const at::Tensor& grad, const at::Tensor& x) {
  if (plain(grad) && plain(x)) return over_rows(grad, x);
  return product(rows(grad).t(), rows(x));
}

at::Tensor grad_bias(const at::Tensor& grad) {
  if (!plain(grad) || grad.numel() > kSmall) return rows(grad).sum(0);
  const int64_t width = grad.size(-1), count = grad.numel() / width;
  at::Tensor result = fresh({width}, at::kFloat);
  const float* const from = grad.const_data_ptr<float>();
  float* const to = result.data_ptr<float>();
  std::memcpy(to, from, width * sizeof(float));
  for (int64_t row = 1; row < count; ++row) {
    const float* const line = from + row * width;
    in_groups(0, width, [&](int64_t at, int64_t size) {
      store_group(to + at, load_group(to + at, size) + load_group(line + at, size), size);
    });
  }
  return result;
}

// All gradients at once: each call from the graph takes time, too.
std::tuple<at::Tensor, at::Tensor> linear_trained_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& x) {
  return {linear_grad_weight(grad, x), linear_grad_x(grad, weight)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_bias_trained_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& x) {
  return {linear_grad_weight(grad, x), grad_bias(grad), linear_grad_x(grad, weight)};
}

at::Tensor conv1d(const at::Tensor& bias, const at::Tensor& x, const at::Tensor& weight) {
  if (plain(bias) && plain(x) && plain(weight)) return rows_by(x, weight, false, &bias);
  return affine(bias, rows(x), weight).view(widened(x, weight.size(1)));
}

at::Tensor conv1d_grad_x(const at::Tensor& grad, const at::Tensor& weight) {
  if (plain(grad) && plain(weight)) return rows_by(grad, weight, true, nullptr);
  return product(rows(grad), weight.t()).view(widened(grad, weight.size(0)));
}

at::Tensor conv1d_grad_weight(const at::Tensor& grad, const at::Tensor& x) {
  if (plain(grad) && plain(x)) return over_rows(x, grad);
  return product(rows(x).t(), rows(grad));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> conv1d_trained_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight) {
  return {grad_bias(grad), conv1d_grad_x(grad, weight), conv1d_grad_weight(grad, x)};
}

}  // namespace ortlaunch
