// Lets the nodes of ONNX Runtime's graph call our operators without torch's dispatcher.
#pragma once

#include <ATen/ATen.h>
#include <ATen/dlpack.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace ortlaunch {

// Makes a tensor that owns what ONNX Runtime, or another library, has handed over.
at::Tensor taken(DLManagedTensor* from);

// Hands a tensor over; null for an undefined one.
DLManagedTensor* given(const at::Tensor& tensor);

// Calls an operator with the arguments of a node, which it takes, and sets the node's results.
using Call = void (*)(DLManagedTensor** inputs, DLManagedTensor** outputs);

// Makes nodes that name an operator use this call; `name` must stay. Only while the library is loaded.
void set_call(std::string_view name, size_t inputs, size_t outputs, Call call);

// Sets the executor of all other operators, which must stay.
using Execute = void (*)(
    const char* name, const char* overload, size_t input_count, DLManagedTensor** inputs, size_t output_count,
    DLManagedTensor** outputs);
void set_others(Execute execute);

// What ONNX Runtime calls for an ATen node.
void execute(
    const char* name, const char* overload, size_t input_count, DLManagedTensor** inputs, size_t output_count,
    DLManagedTensor** outputs);

namespace nodes {

// Reads a number of a node: fp32 for torch's floats, int64 for its integers, and int64 or a byte for its booleans.
template <typename T>
T number(DLManagedTensor* from) {
  const DLTensor& raw = from->dl_tensor;
  const bool is_one = raw.ndim == 0 || (raw.ndim == 1 && raw.shape[0] == 1);
  const void* const place = static_cast<const char*>(raw.data) + raw.byte_offset;
  const bool is_whole = raw.dtype.code == kDLInt && raw.dtype.bits == 64;
  T value{};
  bool is_known = is_one && raw.device.device_type == kDLCPU;
  if constexpr (std::is_same_v<T, double>) {
    is_known = is_known && raw.dtype.code == kDLFloat && raw.dtype.bits == 32;
    if (is_known) value = *static_cast<const float*>(place);
  } else if constexpr (std::is_same_v<T, bool>) {
    is_known = is_known && (is_whole || raw.dtype.bits == 8);
    if (is_known) value = is_whole ? *static_cast<const int64_t*>(place) != 0 : *static_cast<const uint8_t*>(place) != 0;
  } else {
    is_known = is_known && is_whole;
    if (is_known) value = *static_cast<const int64_t*>(place);
  }
  if (from->deleter != nullptr) from->deleter(from);
  TORCH_CHECK(is_known, "a number of the node has another type or size");
  return value;
}

template <typename T>
struct Argument {
  static T read(DLManagedTensor* from) {
    TORCH_CHECK(from != nullptr, "a number of the node is missing");
    return number<T>(from);
  }
};

template <>
struct Argument<at::Tensor> {
  static at::Tensor read(DLManagedTensor* from) { return from == nullptr ? at::Tensor() : taken(from); }
};

template <typename T>
struct Argument<std::optional<T>> {
  static std::optional<T> read(DLManagedTensor* from) {
    return from == nullptr ? std::nullopt : std::optional<T>(Argument<T>::read(from));
  }
};

inline void give(const at::Tensor& result, DLManagedTensor** outputs) { outputs[0] = given(result); }

template <typename... T>
void give(const std::tuple<T...>& results, DLManagedTensor** outputs) {
  size_t place = 0;
  std::apply([&](const auto&... result) { ((outputs[place++] = given(result)), ...); }, results);
}

template <typename T>
inline constexpr size_t kResults = 1;
template <typename... T>
inline constexpr size_t kResults<std::tuple<T...>> = sizeof...(T);

template <auto function, typename Type = decltype(function)>
struct Direct;

template <auto function, typename Result, typename... Arguments>
struct Direct<function, Result (*)(Arguments...)> {
  static constexpr size_t kInputs = sizeof...(Arguments), kOutputs = kResults<Result>;

  static void call(DLManagedTensor** inputs, DLManagedTensor** outputs) {
    in_order(inputs, outputs, std::index_sequence_for<Arguments...>());
  }

 private:
  template <size_t... place>
  static void in_order(DLManagedTensor** inputs, DLManagedTensor** outputs, std::index_sequence<place...>) {
    // Braces evaluate from left to right.
    std::tuple<std::decay_t<Arguments>...> arguments{
        Argument<std::decay_t<Arguments>>::read(std::exchange(inputs[place], nullptr))...};
    give(std::apply(function, arguments), outputs);
  }
};

}  // namespace nodes

}  // namespace ortlaunch
