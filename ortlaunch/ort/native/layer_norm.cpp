// Normalization to mean 0 and variance 1, in one pass over each row; the gradients of weight and bias in the same pass.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "memory.h"
#include "operators.h"
#include "vector.h"

namespace ortlaunch {
namespace {

constexpr int64_t kGrain = 16384;  // smallest number of elements per thread

// Returns the smallest number of rows per thread.
int64_t grain(int64_t columns) { return std::max<int64_t>(1, kGrain / columns); }

bool plain(const at::Tensor& x) { return x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() > 0; }

// Whether the last dimension alone is normalized.
bool fits(const at::Tensor& weight, const at::Tensor& x) {
  return plain(weight) && plain(x) && weight.dim() == 1 && weight.numel() == x.size(-1);
}

std::vector<int64_t> reduced(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = 1;
  return sizes;
}

// The sum over a row of a function of each group's place. Parts of it are summed first, because the rounding of a sum
// grows with its length.
template <typename Function>
float row_sum(int64_t columns, const Function& function) {
  constexpr int64_t kPart = 64 * kLanes;
  Floats total = Floats{};
  for (int64_t begin = 0; begin < columns; begin += kPart) {
    Floats part = Floats{};
    in_groups(begin, std::min(columns, begin + kPart), [&](int64_t at, int64_t count) { part += function(at, count); });
    total += part;
  }
  return sum(total);
}

// A group of values without those beyond the row, which would not be 0.
inline Floats only(Floats value, int64_t count) {
  for (int64_t lane = count; lane < kLanes; ++lane) value[lane] = 0.0f;
  return value;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(
    const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x, double epsilon) {
  if (!fits(weight, x) || !fits(bias, x)) return at::native_layer_norm(x, weight.sizes(), weight, bias, epsilon);
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  at::Tensor out = fresh_like(x), means = fresh(reduced(x), at::kFloat), deviations = fresh(reduced(x), at::kFloat);
  const float *from = x.const_data_ptr<float>(), *factors = weight.const_data_ptr<float>();
  const float* shifts = bias.const_data_ptr<float>();
  float *to = out.data_ptr<float>(), *mean = means.data_ptr<float>(), *deviation = deviations.data_ptr<float>();
  at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* source = from + row * columns;
      float* line = to + row * columns;
      const float middle = row_sum(columns, [&](int64_t at, int64_t count) { return load_group(source + at, count); }) /
          static_cast<float>(columns);
      const float variance = row_sum(columns, [&](int64_t at, int64_t count) {
        const Floats value = only(load_group(source + at, count) - middle, count);
        return value * value;
      }) / static_cast<float>(columns);
      const float factor = 1.0f / std::sqrt(variance + static_cast<float>(epsilon));
      mean[row] = middle;
      deviation[row] = factor;
      in_groups(0, columns, [&](int64_t at, int64_t count) {
        const Floats value = (load_group(source + at, count) - middle) * factor;
        store_group(line + at, value * load_group(factors + at, count) + load_group(shifts + at, count), count);
      });
    }
  });
  return {out, means, deviations};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x,
    const at::Tensor& mean, const at::Tensor& deviation) {
  if (!fits(weight, x) || !fits(weight, grad) || !plain(mean) || !plain(deviation)) {
    auto [of_x, of_weight, of_bias] = at::native_layer_norm_backward(
        grad, x, weight.sizes(), mean, deviation, weight, bias, {true, true, true});
    return {of_weight, of_bias, of_x};
  }
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  at::Tensor of_x = fresh_like(x), of_weight = fresh({columns}, at::kFloat), of_bias = fresh({columns}, at::kFloat);
  // Each thread collects the gradients of weight and bias from its own rows.
  const int64_t threads = rows > grain(columns) ? at::get_num_threads() : 1;
  std::vector<float> collected(threads * 2 * columns);
  const float *slopes = grad.const_data_ptr<float>(), *factors = weight.const_data_ptr<float>();
  const float *from = x.const_data_ptr<float>(), *middles = mean.const_data_ptr<float>();
  const float* scales = deviation.const_data_ptr<float>();
  float *to = of_x.data_ptr<float>(), *parts = collected.data();
  at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    float* const part = parts + (threads == 1 ? 0 : at::get_thread_num()) * 2 * columns;
    float* const other = part + columns;
    for (int64_t row = begin; row < end; ++row) {
      const float *slope = slopes + row * columns, *source = from + row * columns;
      float* line = to + row * columns;
      const float middle = middles[row], factor = scales[row];
      Floats total = Floats{}, along = Floats{};
      in_groups(0, columns, [&](int64_t at, int64_t count) {
        const Floats own = load_group(slope + at, count);
        const Floats product = own * ((load_group(source + at, count) - middle) * factor);
        store_group(part + at, load_group(part + at, count) + product, count);
        store_group(other + at, load_group(other + at, count) + own, count);
        const Floats weights = load_group(factors + at, count);
        total += own * weights;
        along += only(product, count) * weights;
      });
      const float common = sum(total) / static_cast<float>(columns);
      const float share = sum(along) / static_cast<float>(columns);
      in_groups(0, columns, [&](int64_t at, int64_t count) {
        const Floats normalized = (load_group(source + at, count) - middle) * factor;
        const Floats own = load_group(slope + at, count) * load_group(factors + at, count);
        store_group(line + at, (own - common - normalized * share) * factor, count);
      });
    }
  });
  float *weights = of_weight.data_ptr<float>(), *biases = of_bias.data_ptr<float>();
  for (int64_t at = 0; at < columns; ++at) {
    float of_one = 0.0f, of_other = 0.0f;
    for (int64_t thread = 0; thread < threads; ++thread) {
      of_one += parts[thread * 2 * columns + at];
      of_other += parts[thread * 2 * columns + columns + at];
    }
    weights[at] = of_one;
    biases[at] = of_other;
  }
  return {of_weight, of_bias, of_x};
}

}  // namespace ortlaunch
