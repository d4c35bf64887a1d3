// Products of matrices that lie in memory, by the same library as torch's.
#pragma once

#include <cstdint>

namespace ortlaunch {

// c[n, m] = alpha * b[n, k] @ a + beta * c, rows `ld` apart; a is [k, m], or [m, k] where `turn_a`; b is [n, k], or
// [k, n] where `turn_b`. This is a BLAS call, and BLAS stores matrices by columns.
void multiply(
    bool turn_a, bool turn_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda, const float* b,
    int64_t ldb, float beta, float* c, int64_t ldc);

}  // namespace ortlaunch
