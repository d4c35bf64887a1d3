#include "products.h"

#include <ATen/ATen.h>

extern "C" void sgemm_(
    const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*, const float*,
    const int*, const float*, float*, const int*) __attribute__((weak));

namespace ortlaunch {

void multiply(
    bool turn_a, bool turn_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
    int64_t ldb, float beta, float* c, int64_t ldc) {
  if (sgemm_ != nullptr) {
    const int sizes[] = {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k)};
    const int steps[] = {static_cast<int>(lda), static_cast<int>(ldb), static_cast<int>(ldc)};
    sgemm_(turn_a ? "T" : "N", turn_b ? "T" : "N", sizes, sizes + 1, sizes + 2, &alpha, a, steps, b, steps + 1, &beta,
           c, steps + 2);
    return;
  }
  const auto view = [](const float* data, int64_t rows, int64_t columns, int64_t step, bool turn) {
    return turn ? at::from_blob(const_cast<float*>(data), {columns, rows}, {1, step}, at::kFloat)
                : at::from_blob(const_cast<float*>(data), {rows, columns}, {step, 1}, at::kFloat);
  };
  const at::Tensor left = turn_b ? view(b, k, n, ldb, true) : view(b, n, k, ldb, false);
  const at::Tensor right = turn_a ? view(a, m, k, lda, true) : view(a, k, m, lda, false);
  at::Tensor result = view(c, n, m, ldc, false);
  at::addmm_out(result, result, left, right, beta, alpha);
}

}  // namespace ortlaunch
