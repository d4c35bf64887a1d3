// Registers the operators with torch. ONNX Runtime's ATen node passes tensors, integers and floats.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include "memory.h"
#include "operators.h"

namespace ortlaunch {

at::Tensor draw_seed(double p) {
  at::Tensor seed = at::zeros({}, at::kLong);
  if (p > 0.0) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    seed.fill_(static_cast<int64_t>(at::check_generator<at::CPUGeneratorImpl>(generator)->random64()));
  }
  return seed;
}

namespace {

at::Tensor rows(const at::Tensor& x) { return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2); }

std::vector<int64_t> widened(const at::Tensor& x, int64_t width) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = width;
  return sizes;
}

at::Tensor product(const at::Tensor& left, const at::Tensor& right) {
  at::Tensor result = fresh({left.size(0), right.size(1)}, left.scalar_type());
  at::mm_out(result, left, right);
  return result;
}

at::Tensor linear(const at::Tensor& weight, const at::Tensor& x) {
  return product(rows(x), weight.t()).view(widened(x, weight.size(0)));
}

at::Tensor affine(const at::Tensor& bias, const at::Tensor& x, const at::Tensor& weight) {
  at::Tensor result = fresh({x.size(0), weight.size(1)}, x.scalar_type());
  at::addmm_out(result, bias, x, weight);
  return result;
}

at::Tensor linear_bias(const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x) {
  return affine(bias, rows(x), weight.t()).view(widened(x, weight.size(0)));
}

at::Tensor linear_grad_x(const at::Tensor& grad, const at::Tensor& weight) {
  return product(rows(grad), weight).view(widened(grad, weight.size(1)));
}

at::Tensor linear_grad_weight(const at::Tensor& grad, const at::Tensor& x) { return product(rows(grad).t(), rows(x)); }

at::Tensor grad_bias(const at::Tensor& grad) { return rows(grad).sum(0); }

// All gradients at once: each call from the graph costs some microseconds, as much as a small product.
std::tuple<at::Tensor, at::Tensor> linear_trained_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& x) {
  return {linear_grad_weight(grad, x), linear_grad_x(grad, weight)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_bias_trained_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& x) {
  return {linear_grad_weight(grad, x), grad_bias(grad), linear_grad_x(grad, weight)};
}

at::Tensor conv1d_grad_x(const at::Tensor& grad, const at::Tensor& weight) { return product(grad, weight.t()); }

at::Tensor conv1d_grad_weight(const at::Tensor& grad, const at::Tensor& x) { return product(x.t(), grad); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(
    const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x, double epsilon) {
  return at::native_layer_norm(x, weight.sizes(), weight, bias, epsilon);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& x,
    const at::Tensor& mean, const at::Tensor& deviation) {
  auto [of_x, of_weight, of_bias] = at::native_layer_norm_backward(
      grad, x, weight.sizes(), mean, deviation, weight, bias, {true, true, true});
  return {of_weight, of_bias, of_x};
}

// Adds an embedding's gradient to the rows of `total` that belong to used tokens, and returns `total`.
at::Tensor add_embedding_gradient(
    at::Tensor total, const at::Tensor& grad, const at::Tensor& indices, int64_t padding) {
  at::Tensor tokens = indices.reshape({-1});
  at::Tensor slopes = grad.reshape({-1, grad.size(-1)});
  if (padding >= 0) {
    const at::Tensor kept = (tokens != padding).nonzero().squeeze(1);
    tokens = tokens.index_select(0, kept);
    slopes = slopes.index_select(0, kept);
  }
  return total.index_add_(0, tokens, slopes);
}

// Adds the gradient from outside to `total` and returns `total`; a single zero stands for no gradient.
at::Tensor add_outer_gradient(at::Tensor total, const at::Tensor& outer) {
  const bool is_nothing = outer.numel() == 1 && outer.dim() == 0 && outer.item<double>() == 0.0;
  if (!is_nothing) total.add_(outer.numel() == total.numel() ? outer.view_as(total) : outer);
  return total;
}

}  // namespace
}  // namespace ortlaunch

TORCH_LIBRARY(ortlaunch, library) {
  library.def("dropout(Tensor x, float p) -> (Tensor, Tensor)");
  library.def("dropout_backward(Tensor grad, Tensor seed, float p) -> Tensor");
  library.def("gelu(Tensor x) -> Tensor");
  library.def("gelu_backward(Tensor grad, Tensor x) -> Tensor");
  library.def("gelu_tanh(Tensor x) -> Tensor");
  library.def("gelu_tanh_backward(Tensor grad, Tensor x) -> Tensor");
  library.def("sigmoid(Tensor x) -> Tensor");
  library.def("sigmoid_backward(Tensor grad, Tensor y) -> Tensor");
  library.def("silu(Tensor x) -> Tensor");
  library.def("silu_backward(Tensor grad, Tensor x) -> Tensor");
  library.def("silu_product(Tensor gate, Tensor x) -> Tensor");
  library.def("silu_product_backward(Tensor grad, Tensor gate, Tensor x) -> (Tensor, Tensor)");
  library.def("rms_norm(Tensor weight, Tensor x, float epsilon) -> (Tensor, Tensor)");
  library.def("rms_norm_backward(Tensor grad, Tensor weight, Tensor x, Tensor scale) -> (Tensor, Tensor)");
  library.def("linear(Tensor weight, Tensor x) -> Tensor");
  library.def("linear_bias(Tensor weight, Tensor bias, Tensor x) -> Tensor");
  library.def("linear_trained(Tensor weight, Tensor x) -> Tensor");
  library.def("linear_trained_backward(Tensor grad, Tensor weight, Tensor x) -> (Tensor, Tensor)");
  library.def("linear_bias_trained(Tensor weight, Tensor bias, Tensor x) -> Tensor");
  library.def("linear_bias_trained_backward(Tensor grad, Tensor weight, Tensor x) -> (Tensor, Tensor, Tensor)");
  library.def("linear_grad_x(Tensor grad, Tensor weight) -> Tensor");
  library.def("linear_grad_weight(Tensor grad, Tensor x) -> Tensor");
  library.def("grad_bias(Tensor grad) -> Tensor");
  library.def("conv1d(Tensor bias, Tensor x, Tensor weight) -> Tensor");
  library.def("conv1d_grad_x(Tensor grad, Tensor weight) -> Tensor");
  library.def("conv1d_grad_weight(Tensor grad, Tensor x) -> Tensor");
  library.def("layer_norm(Tensor weight, Tensor bias, Tensor x, float epsilon) -> (Tensor, Tensor, Tensor)");
  library.def(
      "layer_norm_backward(Tensor grad, Tensor weight, Tensor bias, Tensor x, Tensor mean, Tensor deviation) "
      "-> (Tensor, Tensor, Tensor)");
  library.def("cross_entropy(Tensor x, Tensor target, int ignore) -> (Tensor, Tensor, Tensor)");
  library.def(
      "cross_entropy_backward(Tensor grad, Tensor x, Tensor levels, Tensor total, Tensor target, int ignore) "
      "-> Tensor");
  library.def(
      "add_embedding_gradient(Tensor(a!) total, Tensor grad, Tensor indices, int padding) -> Tensor(a!)");
  library.def("add_outer_gradient(Tensor(a!) total, Tensor outer) -> Tensor(a!)");
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float p, bool causal, float? scale) "
      "-> (Tensor, Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logarithms, "
      "Tensor seed, Tensor? mask, float p, bool causal, float? scale) -> (Tensor, Tensor, Tensor)");
  library.def(
      "attention_sideways(Tensor query, Tensor key, Tensor value, Tensor? cosine, Tensor? sine, Tensor? mask, float p, "
      "bool causal, float? scale) -> (Tensor, Tensor, Tensor)");
  library.def(
      "attention_sideways_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor logarithms, Tensor seed, Tensor? cosine, Tensor? sine, Tensor? mask, float p, bool causal, "
      "float? scale) -> (Tensor, Tensor, Tensor)");
  library.def(
      "attention_packed(Tensor x, Tensor? mask, int heads, float p, bool causal, float? scale) "
      "-> (Tensor, Tensor, Tensor)");
  library.def(
      "attention_packed_backward(Tensor grad, Tensor x, Tensor out, Tensor logarithms, Tensor seed, Tensor? mask, "
      "int heads, float p, bool causal, float? scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(ortlaunch, CPU, library) {
  library.impl("dropout", ortlaunch::dropout);
  library.impl("dropout_backward", ortlaunch::dropout_backward);
  library.impl("gelu", ortlaunch::gelu);
  library.impl("gelu_backward", ortlaunch::gelu_backward);
  library.impl("gelu_tanh", ortlaunch::gelu_tanh);
  library.impl("gelu_tanh_backward", ortlaunch::gelu_tanh_backward);
  library.impl("sigmoid", ortlaunch::sigmoid);
  library.impl("sigmoid_backward", ortlaunch::sigmoid_backward);
  library.impl("silu", ortlaunch::silu);
  library.impl("silu_backward", ortlaunch::silu_backward);
  library.impl("silu_product", ortlaunch::silu_product);
  library.impl("silu_product_backward", ortlaunch::silu_product_backward);
  library.impl("rms_norm", ortlaunch::rms_norm);
  library.impl("rms_norm_backward", ortlaunch::rms_norm_backward);
  library.impl("linear", ortlaunch::linear);
  library.impl("linear_bias", ortlaunch::linear_bias);
  library.impl("linear_trained", ortlaunch::linear);
  library.impl("linear_trained_backward", ortlaunch::linear_trained_backward);
  library.impl("linear_bias_trained", ortlaunch::linear_bias);
  library.impl("linear_bias_trained_backward", ortlaunch::linear_bias_trained_backward);
  library.impl("linear_grad_x", ortlaunch::linear_grad_x);
  library.impl("linear_grad_weight", ortlaunch::linear_grad_weight);
  library.impl("grad_bias", ortlaunch::grad_bias);
  library.impl("conv1d", ortlaunch::affine);
  library.impl("conv1d_grad_x", ortlaunch::conv1d_grad_x);
  library.impl("conv1d_grad_weight", ortlaunch::conv1d_grad_weight);
  library.impl("layer_norm", ortlaunch::layer_norm);
  library.impl("layer_norm_backward", ortlaunch::layer_norm_backward);
  library.impl("cross_entropy", ortlaunch::cross_entropy);
  library.impl("cross_entropy_backward", ortlaunch::cross_entropy_backward);
  library.impl("add_embedding_gradient", ortlaunch::add_embedding_gradient);
  library.impl("add_outer_gradient", ortlaunch::add_outer_gradient);
  library.impl("attention", ortlaunch::attention);
  library.impl("attention_backward", ortlaunch::attention_backward);
  library.impl("attention_sideways", ortlaunch::attention_sideways);
  library.impl("attention_sideways_backward", ortlaunch::attention_sideways_backward);
  library.impl("attention_packed", ortlaunch::attention_packed);
  library.impl("attention_packed_backward", ortlaunch::attention_packed_backward);
}
