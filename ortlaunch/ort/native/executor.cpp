// Runs the ATen nodes of ONNX Runtime's graph, in place of ORTModule's own executor.
//
// That one finds the operator by two strings that it makes at each call, and calls it through torch's dispatcher, with
// arguments in boxes and past autograd. For small tensors this takes longer than the operator. Our own operators are
// called directly here, and all others by ORTModule's executor.
#include "executor.h"

#include <ATen/DLConvertor.h>
#include <ATen/record_function.h>

#include <unordered_map>

namespace ortlaunch {
namespace {

struct Known {
  size_t inputs;
  size_t outputs;
  Call call;
};

Execute others = nullptr;

std::unordered_map<std::string_view, Known>& calls() {
  static auto* table = new std::unordered_map<std::string_view, Known>();  // never destroyed, as the sessions may not be
  return *table;
}

void release(void* managed) {
  auto* const from = static_cast<DLManagedTensor*>(managed);
  if (from->deleter != nullptr) from->deleter(from);
}

bool is_contiguous(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  for (int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

struct Held {
  at::Tensor tensor;
  DLManagedTensor managed;
};

}  // namespace

at::Tensor taken(DLManagedTensor* from) {
  const DLTensor& raw = from->dl_tensor;
  if (raw.device.device_type != kDLCPU || !is_contiguous(raw)) return at::fromDLPack(from);
  const at::IntArrayRef sizes(raw.shape, raw.ndim);
  const at::ScalarType type = at::toScalarType(raw.dtype);
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(type);
  c10::DataPtr data(static_cast<char*>(raw.data) + raw.byte_offset, from, &release, at::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(type));
  if (raw.ndim != 1 || raw.shape[0] != 0) tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

DLManagedTensor* given(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  auto* const held = new Held{tensor.contiguous(), {}};
  DLTensor& raw = held->managed.dl_tensor;
  raw.data = held->tensor.data_ptr();
  raw.device = {kDLCPU, 0};
  raw.ndim = static_cast<int32_t>(held->tensor.dim());
  raw.dtype = at::getDLDataType(held->tensor);
  raw.shape = const_cast<int64_t*>(held->tensor.sizes().data());
  raw.strides = nullptr;  // contiguous
  raw.byte_offset = 0;
  held->managed.manager_ctx = held;
  held->managed.deleter = [](DLManagedTensor* self) { delete static_cast<Held*>(self->manager_ctx); };
  return &held->managed;
}

void set_call(std::string_view name, size_t inputs, size_t outputs, Call call) {
  calls()[name] = {inputs, outputs, call};
}

void set_others(Execute execute) { others = execute; }

void execute(
    const char* name, const char* overload, size_t input_count, DLManagedTensor** inputs, size_t output_count,
    DLManagedTensor** outputs) {
  const auto found = calls().find(name);
  if (found == calls().end()) return others(name, overload, input_count, inputs, output_count, outputs);
  TORCH_CHECK(
      found->second.inputs == input_count && found->second.outputs == output_count, name, " has ", input_count,
      " inputs and ", output_count, " outputs");
  // torch's profiler sees the operator, as through the dispatcher.
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>());
  // Nothing is differentiated in a graph, so the operators that this one calls need not ask whether something is.
  const at::AutoDispatchBelowADInplaceOrView below;
  found->second.call(inputs, outputs);
}

}  // namespace ortlaunch
