// Keeps the memory of large results for reuse: new memory from the system costs a page fault per 4 KiB, in every step.
#pragma once

#include <ATen/ATen.h>

namespace ortlaunch {

// Returns an uninitialized contiguous tensor on the CPU.
at::Tensor fresh(at::IntArrayRef sizes, at::ScalarType dtype);

// Returns one of the same shape and type as another.
inline at::Tensor fresh_like(const at::Tensor& like) { return fresh(like.sizes(), like.scalar_type()); }

}  // namespace ortlaunch
