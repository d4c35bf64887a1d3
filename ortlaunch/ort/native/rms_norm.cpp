// Normalization by the root of the mean square, as in Llama, in one pass over each row.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <vector>

#include "memory.h"
#include "operators.h"
#include "vector.h"

namespace ortlaunch {
namespace {

constexpr int64_t kGrain = 16384;  // smallest number of elements per thread

// Returns the smallest number of rows per thread.
int64_t grain(int64_t columns) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)); }

bool plain(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat && tensor.is_contiguous(); }

std::vector<int64_t> reduced(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = 1;
  return sizes;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& weight, const at::Tensor& x, double epsilon) {
  if (!plain(x) || !plain(weight)) {
    const at::Tensor scale = (x.square().mean(-1, true) + epsilon).rsqrt();
    return {weight * (x * scale), scale};
  }
  const int64_t columns = x.size(-1), rows = columns == 0 ? 0 : x.numel() / columns;
  at::Tensor out = fresh_like(x), scales = fresh(reduced(x), at::kFloat);
  const float *from = x.const_data_ptr<float>(), *factors = weight.const_data_ptr<float>();
  float *to = out.data_ptr<float>(), *scale = scales.data_ptr<float>();
  at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* source = from + row * columns;
      float* line = to + row * columns;
      Floats total = Floats{};
      in_groups(0, columns, [&](int64_t at, int64_t count) {
        const Floats value = load_group(source + at, count);
        total += value * value;
      });
      const float factor = 1.0f / std::sqrt(sum(total) / static_cast<float>(columns) + static_cast<float>(epsilon));
      scale[row] = factor;
      in_groups(0, columns, [&](int64_t at, int64_t count) {
        const Floats value = load_group(source + at, count) * factor;
        store_group(line + at, value * load_group(factors + at, count), count);
      });
    }
  });
  return {out, scales};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& x, const at::Tensor& scale) {
  if (!plain(grad) || !plain(x) || !plain(weight)) {
    const at::Tensor normalized = x * scale, slopes = grad * weight;
    const at::Tensor of_x = (slopes - normalized * (slopes * normalized).mean(-1, true)) * scale;
    return {(grad * normalized).flatten(0, -2).sum(0), of_x};
  }
  const int64_t columns = x.size(-1), rows = columns == 0 ? 0 : x.numel() / columns;
  at::Tensor of_x = fresh_like(x);
  // Each thread collects the gradient of the weight from its own rows.
  at::Tensor collected = at::zeros({at::get_num_threads(), columns}, x.options());
  const float *slopes = grad.const_data_ptr<float>(), *factors = weight.const_data_ptr<float>();
  const float *from = x.const_data_ptr<float>(), *scales = scale.const_data_ptr<float>();
  float *to = of_x.data_ptr<float>(), *parts = collected.data_ptr<float>();
  at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    float* part = parts + at::get_thread_num() * columns;
    for (int64_t row = begin; row < end; ++row) {
      const float *slope = slopes + row * columns, *source = from + row * columns;
      float* line = to + row * columns;
      const float factor = scales[row];
      Floats total = Floats{};
      in_groups(0, columns, [&](int64_t at, int64_t count) {
        const Floats product = load_group(slope + at, count) * (load_group(source + at, count) * factor);
        store_group(part + at, load_group(part + at, count) + product, count);
        total += product * load_group(factors + at, count);
      });
      const float common = sum(total) / static_cast<float>(columns);
      in_groups(0, columns, [&](int64_t at, int64_t count) {
        const Floats normalized = load_group(source + at, count) * factor;
        const Floats own = load_group(slope + at, count) * load_group(factors + at, count);
        store_group(line + at, (own - normalized * common) * factor, count);
      });
    }
  });
  return {collected.sum(0), of_x};
}

}  // namespace ortlaunch
