// Large results are kept and reused: memory fresh from the system costs a page fault for every 4 KiB, in every step.
#pragma once

#include <ATen/ATen.h>

namespace ortlaunch {

// An uninitialized contiguous tensor on the CPU.
at::Tensor fresh(at::IntArrayRef sizes, at::ScalarType dtype);

// The same in the shape and dtype of another.
inline at::Tensor fresh_like(const at::Tensor& like) { return fresh(like.sizes(), like.scalar_type()); }

}  // namespace ortlaunch
