#include "attention_plain.h"

#include <limits>

namespace ortlaunch::plain {
namespace {

at::Tensor repeated(const at::Tensor& shared, const at::Tensor& query) {
  return shared.repeat_interleave(query.size(1) / shared.size(1), 1);
}

at::Tensor summed(const at::Tensor& repeated, const at::Tensor& shared) {
  return repeated.unflatten(1, {shared.size(1), -1}).sum(2);
}

at::Tensor scores_of(const at::Tensor& query, const at::Tensor& key, const Request& request) {
  at::Tensor scores = at::matmul(query, key.transpose(-1, -2)) * request.scale;
  const double never = -std::numeric_limits<double>::infinity();
  if (request.causal) {
    scores = scores.masked_fill(at::ones({query.size(2), key.size(2)}, at::kBool).tril().logical_not(), never);
  }
  if (request.mask.has_value() && request.mask->defined()) {
    const bool chooses = request.mask->scalar_type() == at::kBool || request.mask->scalar_type() == at::kByte;
    scores = chooses ? scores.masked_fill(request.mask->logical_not(), never) : scores + *request.mask;
  }
  return scores;
}

at::Tensor weights_of(const at::Tensor& scores, const at::Tensor& logarithms) {
  // If no key is seen, the logarithm is infinite and the weights are zero. A hidden key has no part in a query that is
  // NaN.
  return (scores - logarithms.unsqueeze(-1)).exp().masked_fill(scores == -std::numeric_limits<double>::infinity(), 0.0);
}

at::Tensor dropped(const at::Tensor& weights, const Request& request) {
  return request.factors.defined() ? weights * request.factors.to(weights.scalar_type()) : weights;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Request& request) {
  const at::Tensor scores = scores_of(query, repeated(key, query), request);
  at::Tensor logarithms = scores.logsumexp(-1);
  logarithms = logarithms.masked_fill(logarithms == -std::numeric_limits<double>::infinity(),
                                      std::numeric_limits<double>::infinity());
  const at::Tensor weights = dropped(weights_of(scores, logarithms), request);
  return {at::matmul(weights, repeated(value, query)), logarithms};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logarithms, const Request& request) {
  const at::Tensor keys = repeated(key, query);
  const at::Tensor weights = weights_of(scores_of(query, keys, request), logarithms);
  const at::Tensor of_weights = dropped(at::matmul(grad, repeated(value, query).transpose(-1, -2)), request);
  const at::Tensor of_scores = weights * (of_weights - (grad * out).sum(-1, true)) * request.scale;
  return {
      at::matmul(of_scores, keys), summed(at::matmul(of_scores.transpose(-1, -2), query), key),
      summed(at::matmul(dropped(weights, request).transpose(-1, -2), grad), value)};
}

at::Tensor turned(
    const at::Tensor& x, const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine) {
  if (!cosine.has_value() || !cosine->defined()) return x;
  const int64_t size = cosine->size(2);
  const at::Tensor part = x.narrow(-1, 0, size), kept = x.narrow(-1, size, x.size(-1) - size);
  const auto halves = part.chunk(2, -1);
  const at::Tensor swapped = at::cat({-halves[1], halves[0]}, -1);
  return at::cat({part * cosine->unsqueeze(2) + swapped * sine->unsqueeze(2), kept}, -1);
}

at::Tensor turned_back(
    const at::Tensor& grad, const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine) {
  if (!cosine.has_value() || !cosine->defined()) return grad;
  const int64_t size = cosine->size(2);
  const at::Tensor part = grad.narrow(-1, 0, size), kept = grad.narrow(-1, size, grad.size(-1) - size);
  const auto halves = (part * sine->unsqueeze(2)).chunk(2, -1);
  return at::cat({part * cosine->unsqueeze(2) + at::cat({halves[1], -halves[0]}, -1), kept}, -1);
}

}  // namespace ortlaunch::plain
