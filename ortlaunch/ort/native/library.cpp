// Registers the operators with torch. ONNX Runtime's ATen node passes tensors, integers and floats.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <cstring>

#include "executor.h"
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

// Copies a tensor. Many nodes call torch's operator for this, which also stops gradients, of which a graph has none.
at::Tensor copied(const at::Tensor& x) {
  if (!x.is_cpu() || !x.is_contiguous()) return at::detach_copy(x);
  at::Tensor result = fresh_like(x);
  if (x.numel() > 0) std::memcpy(result.data_ptr(), x.const_data_ptr(), x.nbytes());
  return result;
}

// Registers an operator with torch, and for nodes that name it.
template <auto function>
void implement(torch::Library& library, const char* name) {
  library.impl(name, function);
  using Direct = nodes::Direct<function>;
  set_call(name, Direct::kInputs, Direct::kOutputs, &Direct::call);
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
  library.def("conv1d_trained(Tensor bias, Tensor x, Tensor weight) -> Tensor");
  library.def("conv1d_trained_backward(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor)");
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
  using namespace ortlaunch;
  implement<dropout>(library, "ortlaunch::dropout");
  implement<dropout_backward>(library, "ortlaunch::dropout_backward");
  implement<gelu>(library, "ortlaunch::gelu");
  implement<gelu_backward>(library, "ortlaunch::gelu_backward");
  implement<gelu_tanh>(library, "ortlaunch::gelu_tanh");
  implement<gelu_tanh_backward>(library, "ortlaunch::gelu_tanh_backward");
  implement<sigmoid>(library, "ortlaunch::sigmoid");
  implement<sigmoid_backward>(library, "ortlaunch::sigmoid_backward");
  implement<silu>(library, "ortlaunch::silu");
  implement<silu_backward>(library, "ortlaunch::silu_backward");
  implement<silu_product>(library, "ortlaunch::silu_product");
  implement<silu_product_backward>(library, "ortlaunch::silu_product_backward");
  implement<rms_norm>(library, "ortlaunch::rms_norm");
  implement<rms_norm_backward>(library, "ortlaunch::rms_norm_backward");
  implement<linear>(library, "ortlaunch::linear");
  implement<linear_bias>(library, "ortlaunch::linear_bias");
  implement<linear>(library, "ortlaunch::linear_trained");
  implement<linear_trained_backward>(library, "ortlaunch::linear_trained_backward");
  implement<linear_bias>(library, "ortlaunch::linear_bias_trained");
  implement<linear_bias_trained_backward>(library, "ortlaunch::linear_bias_trained_backward");
  implement<linear_grad_x>(library, "ortlaunch::linear_grad_x");
  implement<linear_grad_weight>(library, "ortlaunch::linear_grad_weight");
  implement<grad_bias>(library, "ortlaunch::grad_bias");
  implement<conv1d>(library, "ortlaunch::conv1d");
  implement<conv1d>(library, "ortlaunch::conv1d_trained");
  implement<conv1d_trained_backward>(library, "ortlaunch::conv1d_trained_backward");
  implement<conv1d_grad_x>(library, "ortlaunch::conv1d_grad_x");
  implement<conv1d_grad_weight>(library, "ortlaunch::conv1d_grad_weight");
  implement<layer_norm>(library, "ortlaunch::layer_norm");
  implement<layer_norm_backward>(library, "ortlaunch::layer_norm_backward");
  implement<cross_entropy>(library, "ortlaunch::cross_entropy");
  implement<cross_entropy_backward>(library, "ortlaunch::cross_entropy_backward");
  implement<add_embedding_gradient>(library, "ortlaunch::add_embedding_gradient");
  implement<add_outer_gradient>(library, "ortlaunch::add_outer_gradient");
  implement<attention>(library, "ortlaunch::attention");
  implement<attention_backward>(library, "ortlaunch::attention_backward");
  implement<attention_sideways>(library, "ortlaunch::attention_sideways");
  implement<attention_sideways_backward>(library, "ortlaunch::attention_sideways_backward");
  implement<attention_packed>(library, "ortlaunch::attention_packed");
  implement<attention_packed_backward>(library, "ortlaunch::attention_packed_backward");
  set_call("detach_copy", 1, 1, &nodes::Direct<copied>::call);
}
