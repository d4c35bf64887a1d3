// Dropout, GELU, sigmoid, SiLU and cross-entropy.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>

#include "memory.h"
#include "operators.h"
#include "vector.h"

namespace ortlaunch {
namespace {

constexpr int64_t kRow = 4096;     // elements that share a row of random words
constexpr int64_t kGrain = 16384;  // smallest number of elements per thread

// Returns the smallest number of rows per thread.
int64_t grain(int64_t columns) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)); }

template <typename Body>
void in_rows(int64_t count, const Body& body) {
  const int64_t rows = (count + kRow - 1) / kRow;
  at::parallel_for(0, rows, grain(kRow), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row, row * kRow, std::min(count, (row + 1) * kRow));
  });
}

void multiply_by_noise(const float* from, float* to, int64_t count, const Noise& noise) {
  in_rows(count, [&](int64_t row, int64_t begin, int64_t end) {
    Floats factors[kParts];
    for (int64_t place = begin; place < end; place += kBlock) {
      noise.block(factors, row, static_cast<uint32_t>((place - begin) / kBlock));
      for (int part = 0; part < kParts; ++part) {
        const int64_t at = place + part * kLanes;
        if (at + kLanes <= end) {
          store(to + at, load(from + at) * factors[part]);
        } else if (at < end) {
          store_part(to + at, load_part(from + at, end - at) * factors[part], end - at);
        }
      }
    }
  });
}

template <typename Function>
void map(const float* x, const float* y, float* to, int64_t count, const Function& function) {
  in_rows(count, [&](int64_t, int64_t begin, int64_t end) {
    int64_t at = begin;
    for (; at + kLanes <= end; at += kLanes) store(to + at, function(load(x + at), load(y + at)));
    if (at < end) {
      store_part(to + at, function(load_part(x + at, end - at), load_part(y + at, end - at)), end - at);
    }
  });
}

constexpr float kRoot = 0.7978845608f;  // sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

// e^-2u, so that (1 + tanh(u)) / 2 is 1 / (1 + e^-2u).
inline Floats decay(Floats x) { return exponential((x + x * x * x * kCubic) * (-2.0f * kRoot)); }

constexpr float kHalfRoot = 0.70710678f;      // sqrt(1 / 2)
constexpr float kNormalDensity = 0.39894228f;  // 1 / sqrt(2 pi)

// (1 + erf(x / sqrt(2))) / 2, from the approximation of erfc in Numerical Recipes (Press et al., 1992), whose relative
// error is 1.2e-7 everywhere: near 0 it is as exact as far from it.
inline Floats normal_share(Floats x) {
  constexpr float kFactors[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                                0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const Floats far = (x < 0.0f ? -x : x) * kHalfRoot;
  const Floats near = 1.0f / (1.0f + 0.5f * far);
  Floats series = all(0.17087277f);
  for (const float factor : kFactors) series = series * near + factor;
  const Floats tail = 0.5f * near * exponential(series - far * far);
  return x > 0.0f ? 1.0f - tail : tail;
}

// 1 / (1 + e^-x). Far below zero that is e^x, as a square because e^x alone would be a denormal number.
inline Floats opening(Floats x) {
  const Floats root = exponential(x * 0.5f);
  return x < -80.0f ? root * root : 1.0f / (1.0f + exponential(-x));
}

// The same with e^-x at hand, as a factor of x: exactly 0 where `exponential` no longer grows, as eager's SiLU. A mask of
// -3e38 would otherwise become -2.
inline Floats opening(Floats x, Floats power) { return x < -88.0f ? all(0.0f) : 1.0f / (1.0f + power); }

bool plain(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat && tensor.is_contiguous(); }

struct Row {
  float largest;
  float sum;
};

Row exponential_sum(const float* x, int64_t count) {
  const float lowest = -std::numeric_limits<float>::infinity();
  Floats most = all(lowest);
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    const Floats value = load(x + at);
    most = value > most ? value : most;
  }
  if (at < count) {
    const Floats value = load_part(x + at, count - at, lowest);
    most = value > most ? value : most;
  }
  const float top = largest(most);
  Floats total = Floats{};
  for (at = 0; at + kLanes <= count; at += kLanes) total += exponential(load(x + at) - top);
  if (at < count) total += exponential(load_part(x + at, count - at, lowest) - top);
  return {top, sum(total)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& x, double p) {
  const at::Tensor seed = draw_seed(p);
  if (p == 0.0) return {x.clone(), seed};
  return {dropout_backward(x, seed, p), seed};
}

at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& seed, double p) {
  if (p == 0.0) return grad.clone();
  const Noise noise(static_cast<uint64_t>(seed.item<int64_t>()), p);
  if (plain(grad)) {
    at::Tensor result = fresh_like(grad);
    multiply_by_noise(grad.const_data_ptr<float>(), result.data_ptr<float>(), grad.numel(), noise);
    return result;
  }
  at::Tensor factors = at::ones(grad.sizes(), at::kFloat);
  multiply_by_noise(factors.data_ptr<float>(), factors.data_ptr<float>(), factors.numel(), noise);
  return grad * factors.to(grad.scalar_type());
}

at::Tensor gelu(const at::Tensor& x) {
  if (!plain(x)) return at::gelu(x);
  at::Tensor result = fresh_like(x);
  const float* from = x.const_data_ptr<float>();
  map(from, from, result.data_ptr<float>(), x.numel(),
      [](Floats value, Floats) { return value * normal_share(value); });
  return result;
}

at::Tensor gelu_backward(const at::Tensor& grad, const at::Tensor& x) {
  if (!plain(x) || !plain(grad)) return at::gelu_backward(grad, x);
  at::Tensor result = fresh_like(x);
  map(grad.const_data_ptr<float>(), x.const_data_ptr<float>(), result.data_ptr<float>(), x.numel(),
      [](Floats slope, Floats value) {
        const Floats density = exponential(value * value * -0.5f) * kNormalDensity;
        return slope * (normal_share(value) + value * density);
      });
  return result;
}

at::Tensor gelu_tanh(const at::Tensor& x) {
  if (!plain(x)) return at::gelu(x, "tanh");
  at::Tensor result = fresh_like(x);
  const float* from = x.const_data_ptr<float>();
  map(from, from, result.data_ptr<float>(), x.numel(),
      [](Floats value, Floats) { return value / (1.0f + decay(value)); });
  return result;
}

at::Tensor gelu_tanh_backward(const at::Tensor& grad, const at::Tensor& x) {
  if (!plain(x) || !plain(grad)) return at::gelu_backward(grad, x, "tanh");
  at::Tensor result = fresh_like(x);
  map(grad.const_data_ptr<float>(), x.const_data_ptr<float>(), result.data_ptr<float>(), x.numel(),
      [](Floats slope, Floats value) {
        const Floats power = decay(value), open = 1.0f / (1.0f + power);
        const Floats inner = (1.0f + value * value * (3.0f * kCubic)) * (2.0f * kRoot);
        // power * open is 1 - open without its cancellation.
        return slope * (open + value * open * (power * open) * inner);
      });
  return result;
}

at::Tensor sigmoid(const at::Tensor& x) {
  if (!plain(x)) return at::sigmoid(x);
  at::Tensor result = fresh_like(x);
  const float* from = x.const_data_ptr<float>();
  map(from, from, result.data_ptr<float>(), x.numel(), [](Floats value, Floats) { return opening(value); });
  return result;
}

at::Tensor sigmoid_backward(const at::Tensor& grad, const at::Tensor& y) {
  if (!plain(y) || !plain(grad)) return at::sigmoid_backward(grad, y);
  at::Tensor result = fresh_like(y);
  map(grad.const_data_ptr<float>(), y.const_data_ptr<float>(), result.data_ptr<float>(), y.numel(),
      [](Floats slope, Floats open) { return slope * (open * (1.0f - open)); });
  return result;
}

at::Tensor silu(const at::Tensor& x) {
  if (!plain(x)) return at::silu(x);
  at::Tensor result = fresh_like(x);
  const float* from = x.const_data_ptr<float>();
  map(from, from, result.data_ptr<float>(), x.numel(), [](Floats value, Floats) { return value * opening(value); });
  return result;
}

at::Tensor silu_backward(const at::Tensor& grad, const at::Tensor& x) {
  if (!plain(x) || !plain(grad)) return at::silu_backward(grad, x);
  at::Tensor result = fresh_like(x);
  map(grad.const_data_ptr<float>(), x.const_data_ptr<float>(), result.data_ptr<float>(), x.numel(),
      [](Floats slope, Floats value) {
        const Floats power = exponential(-value), open = opening(value, power);
        // power * open is 1 - open without its cancellation.
        return slope * (open * (1.0f + value * (power * open)));
      });
  return result;
}

at::Tensor silu_product(const at::Tensor& gate, const at::Tensor& x) {
  if (!plain(gate) || !plain(x) || gate.sizes() != x.sizes()) return at::silu(gate) * x;
  at::Tensor result = fresh_like(gate);
  map(gate.const_data_ptr<float>(), x.const_data_ptr<float>(), result.data_ptr<float>(), gate.numel(),
      [](Floats value, Floats factor) { return value * opening(value, exponential(-value)) * factor; });
  return result;
}

std::tuple<at::Tensor, at::Tensor> silu_product_backward(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& x) {
  if (!plain(grad) || !plain(gate) || !plain(x) || gate.sizes() != x.sizes()) {
    const at::Tensor of_silu = at::sum_to(grad * x, gate.sizes());
    return {at::silu_backward(of_silu, gate), at::sum_to(grad * at::silu(gate), x.sizes())};
  }
  at::Tensor of_gate = fresh_like(gate), of_x = fresh_like(x);
  const float *slopes = grad.const_data_ptr<float>(), *values = gate.const_data_ptr<float>();
  const float* factors = x.const_data_ptr<float>();
  float *to_gate = of_gate.data_ptr<float>(), *to_x = of_x.data_ptr<float>();
  in_rows(gate.numel(), [&](int64_t, int64_t begin, int64_t end) {
    in_groups(begin, end, [&](int64_t at, int64_t count) {
      const Floats slope = load_group(slopes + at, count), value = load_group(values + at, count);
      const Floats power = exponential(-value), open = opening(value, power);
      // power * open is 1 - open without its cancellation.
      const Floats of_silu = slope * load_group(factors + at, count);
      store_group(to_gate + at, of_silu * (open * (1.0f + value * (power * open))), count);
      store_group(to_x + at, slope * (value * open), count);
    });
  });
  return {of_gate, of_x};
}

// Mean over the targets that are not `ignore`. For the backward it stores two numbers per row and their count, but not
// the logarithms of all probabilities. One number, the logarithm of the sum of the exponentials, would lose the sum
// beside large values.
std::tuple<at::Tensor, at::Tensor, at::Tensor> cross_entropy(
    const at::Tensor& x, const at::Tensor& target, int64_t ignore) {
  if (!plain(x)) {
    const auto [loss, total] = at::nll_loss_forward(at::log_softmax(x, -1), target, {}, at::Reduction::Mean, ignore);
    return {loss, at::empty({x.size(0), 2}, x.options()), total};
  }
  const int64_t rows = x.size(0), classes = x.size(1);
  at::Tensor levels = at::zeros({rows, 2}, x.options());
  at::Tensor losses = at::empty({rows}, x.options());
  const float* from = x.const_data_ptr<float>();
  const int64_t* wanted = target.const_data_ptr<int64_t>();
  float* level = levels.data_ptr<float>();
  float* loss = losses.data_ptr<float>();
  at::parallel_for(0, rows, grain(classes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      loss[row] = 0.0f;
      if (wanted[row] == ignore) continue;
      TORCH_CHECK_INDEX(wanted[row] >= 0 && wanted[row] < classes, "Target ", wanted[row], " is out of bounds.");
      const Row found = exponential_sum(from + row * classes, classes);
      level[2 * row] = found.largest;
      level[2 * row + 1] = 1.0f / found.sum;
      // This order avoids cancellation if the largest value is far from zero.
      loss[row] = (found.largest - from[row * classes + wanted[row]]) + std::log(found.sum);
    }
  });
  double total = 0.0;
  int64_t counted = 0;
  for (int64_t row = 0; row < rows; ++row) {
    total += loss[row];
    counted += wanted[row] != ignore;
  }
  return {at::scalar_tensor(total / counted, x.options()), levels, at::scalar_tensor(counted, x.options())};
}

at::Tensor cross_entropy_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& levels, const at::Tensor& total,
    const at::Tensor& target, int64_t ignore) {
  if (!plain(x)) {
    const at::Tensor log_p = at::log_softmax(x, -1);
    const at::Tensor of_log_p = at::nll_loss_backward(grad, log_p, target, {}, at::Reduction::Mean, ignore, total);
    return at::_log_softmax_backward_data(of_log_p, log_p, -1, x.scalar_type());
  }
  const int64_t rows = x.size(0), classes = x.size(1);
  at::Tensor result = fresh_like(x);
  const float* from = x.const_data_ptr<float>();
  const float* level = levels.const_data_ptr<float>();
  const int64_t* wanted = target.const_data_ptr<int64_t>();
  float* to = result.data_ptr<float>();
  const float scale = grad.item<float>() / total.item<float>();
  at::parallel_for(0, rows, grain(classes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* source = from + row * classes;
      float* line = to + row * classes;
      if (wanted[row] == ignore) {
        std::memset(line, 0, classes * sizeof(float));
        continue;
      }
      const float top = level[2 * row], share = level[2 * row + 1] * scale;
      int64_t at = 0;
      for (; at + kLanes <= classes; at += kLanes) store(line + at, exponential(load(source + at) - top) * share);
      if (at < classes) {
        store_part(line + at, exponential(load_part(source + at, classes - at) - top) * share, classes - at);
      }
      line[wanted[row]] -= scale;
    }
  });
  return result;
}

}  // namespace ortlaunch
