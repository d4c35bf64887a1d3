// The operators that nodes of ONNX Runtime's graph call. Tensors are contiguous, as ONNX Runtime's are.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace ortlaunch {

// A seed from torch's generator, so that torch's seed and saved states govern what is dropped; none is drawn for p = 0.
at::Tensor draw_seed(double p);

// x @ weight^T + bias for values [..., depth] and a weight [width, depth], and the gradients.
at::Tensor linear(const at::Tensor& weight, const at::Tensor& x);
at::Tensor linear_bias(const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x);
at::Tensor linear_grad_x(const at::Tensor& grad, const at::Tensor& weight);
at::Tensor linear_grad_weight(const at::Tensor& grad, const at::Tensor& x);
at::Tensor grad_bias(const at::Tensor& grad);
std::tuple<at::Tensor, at::Tensor> linear_trained_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& x);
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_bias_trained_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& x);

// The same for a weight [depth, width].
at::Tensor conv1d(const at::Tensor& bias, const at::Tensor& x, const at::Tensor& weight);
at::Tensor conv1d_grad_x(const at::Tensor& grad, const at::Tensor& weight);
at::Tensor conv1d_grad_weight(const at::Tensor& grad, const at::Tensor& x);
// The gradients of bias, x and weight.
std::tuple<at::Tensor, at::Tensor, at::Tensor> conv1d_trained_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight);

// Normalization over the last dimensions, those of the weight; also the mean and the reciprocal of the deviation.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(
    const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x, double epsilon);
// The gradients of weight, bias and x.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x,
    const at::Tensor& mean, const at::Tensor& deviation);

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& x, double p);
at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& seed, double p);

at::Tensor gelu(const at::Tensor& x);
at::Tensor gelu_backward(const at::Tensor& grad, const at::Tensor& x);

at::Tensor sigmoid(const at::Tensor& x);
at::Tensor sigmoid_backward(const at::Tensor& grad, const at::Tensor& y);
at::Tensor silu(const at::Tensor& x);
at::Tensor silu_backward(const at::Tensor& grad, const at::Tensor& x);

at::Tensor gelu_tanh(const at::Tensor& x);
at::Tensor gelu_tanh_backward(const at::Tensor& grad, const at::Tensor& x);

// silu(gate) * x.
at::Tensor silu_product(const at::Tensor& gate, const at::Tensor& x);
std::tuple<at::Tensor, at::Tensor> silu_product_backward(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& x);

// weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, and the reciprocal of that root for each row.
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& weight, const at::Tensor& x, double epsilon);
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& x, const at::Tensor& scale);

std::tuple<at::Tensor, at::Tensor, at::Tensor> cross_entropy(
    const at::Tensor& x, const at::Tensor& target, int64_t ignore);
at::Tensor cross_entropy_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& levels, const at::Tensor& total,
    const at::Tensor& target, int64_t ignore);

// softmax(query @ key^T * scale + mask) @ value with dropout of the weights; the default scale is 1 / sqrt(E).
// Query [B, H, L, E], key and value [B, H or a divisor of it, S, E or V], where B may be 1 in some; the mask is
// none, boolean or added, and broadcasts to [B, H, L, S]. A query that sees no key gets zeros.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double p, bool causal, std::optional<double> scale);
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logarithms, const at::Tensor& seed, const std::optional<at::Tensor>& mask,
    double p, bool causal, std::optional<double> scale);

// The same for query [B, L, H, E], key and value [B, S, H or a divisor of it, E or V]; returns [B, L, H, V]. Where
// cosine and sine [B or 1, L, R] are given, they first rotate the first R of the E numbers of query and key:
// x * cosine + (-x2, x1) * sine, with the halves x1 and x2 of x. R is even, and at most E.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_sideways(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& cosine,
    const std::optional<at::Tensor>& sine, const std::optional<at::Tensor>& mask, double p, bool causal,
    std::optional<double> scale);
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_sideways_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logarithms, const at::Tensor& seed,
    const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine,
    const std::optional<at::Tensor>& mask, double p, bool causal, std::optional<double> scale);

// The same for query, key and value in one tensor [B, L, 3 * heads * E], the output of one projection; returns
// [B, L, heads, E].
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_packed(
    const at::Tensor& x, const std::optional<at::Tensor>& mask, int64_t heads, double p, bool causal,
    std::optional<double> scale);
at::Tensor attention_packed_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& out, const at::Tensor& logarithms,
    const at::Tensor& seed, const std::optional<at::Tensor>& mask, int64_t heads, double p, bool causal,
    std::optional<double> scale);

}  // namespace ortlaunch
