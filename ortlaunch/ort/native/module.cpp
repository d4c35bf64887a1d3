// What a step does in Python for each parameter, buffer and attribute of a model, as functions of a Python module.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>

#include <cstring>
#include <vector>

#include "executor.h"

namespace ortlaunch {
namespace {

// Adds what decides where ONNX Runtime reads a tensor, and how; false for one that is no plain tensor on the CPU.
bool note(const at::Tensor& tensor, std::vector<int64_t>& facts) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage()) return false;
  if (!tensor.is_contiguous() || tensor.is_neg() || tensor.is_conj()) return false;
  facts.push_back(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
  facts.push_back(static_cast<int64_t>(tensor.scalar_type()));
  facts.push_back(tensor.dim());
  facts.insert(facts.end(), tensor.sizes().begin(), tensor.sizes().end());
  return true;
}

PyObject* places(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  if (!PyTuple_Check(tensors)) return PyErr_Format(PyExc_TypeError, "places takes a tuple of tensors");
  static thread_local std::vector<int64_t> facts;
  facts.clear();
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tensors); ++place) {
    PyObject* const one = PyTuple_GET_ITEM(tensors, place);
    if (!THPVariable_Check(one) || !note(THPVariable_Unpack(one), facts)) Py_RETURN_NONE;
  }
  return PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(facts.data()), static_cast<Py_ssize_t>(facts.size() * sizeof(int64_t)));
  END_HANDLE_TH_ERRORS
}

PyObject* trained(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  if (!PyTuple_Check(tensors)) return PyErr_Format(PyExc_TypeError, "trained takes a tuple of tensors");
  const Py_ssize_t count = PyTuple_GET_SIZE(tensors);
  PyObject* const flags = PyBytes_FromStringAndSize(nullptr, count);
  if (flags == nullptr) return nullptr;
  for (Py_ssize_t place = 0; place < count; ++place) {
    PyObject* const one = PyTuple_GET_ITEM(tensors, place);
    PyBytes_AS_STRING(flags)[place] = THPVariable_Check(one) && THPVariable_Unpack(one).requires_grad() ? 1 : 0;
  }
  return flags;
  END_HANDLE_TH_ERRORS
}

PyObject* take(PyObject*, PyObject* capsule) {
  HANDLE_TH_ERRORS
  auto* const from = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  if (from == nullptr) return nullptr;
  at::Tensor tensor = taken(from);
  // Otherwise the capsule would release it, too.
  PyCapsule_SetName(capsule, "used_dltensor");
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}

PyObject* same_entries(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(arguments[0]) || !PyTuple_Check(arguments[1])) {
    return PyErr_Format(PyExc_TypeError, "same_entries takes a tuple of dictionaries and one of their entries");
  }
  PyObject *const tables = arguments[0], *const entries = arguments[1];
  Py_ssize_t next = 0;
  for (Py_ssize_t table = 0; table < PyTuple_GET_SIZE(tables); ++table) {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    if (!PyDict_Check(PyTuple_GET_ITEM(tables, table))) Py_RETURN_FALSE;
    while (PyDict_Next(PyTuple_GET_ITEM(tables, table), &position, &key, &value)) {
      if (next == PyTuple_GET_SIZE(entries) || PyTuple_GET_ITEM(entries, next) != value) Py_RETURN_FALSE;
      ++next;
    }
  }
  return PyBool_FromLong(next == PyTuple_GET_SIZE(entries));
}

// Whether an object's attributes equal these; -1 for an error.
int equal(PyObject* object, PyObject* names, PyObject* values) {
  PyObject* const attributes = PyObject_GenericGetDict(object, nullptr);
  if (attributes == nullptr) return -1;
  int result = 1;
  for (Py_ssize_t place = 0; result == 1 && place < PyTuple_GET_SIZE(names); ++place) {
    PyObject* const now = PyDict_GetItemWithError(attributes, PyTuple_GET_ITEM(names, place));
    PyObject* const then = PyTuple_GET_ITEM(values, place);
    if (now == nullptr) {
      result = PyErr_Occurred() == nullptr ? 0 : -1;
    } else if (now != then) {
      Py_INCREF(now);
      result = PyObject_RichCompareBool(now, then, Py_EQ);
      Py_DECREF(now);
    }
  }
  Py_DECREF(attributes);
  return result;
}

PyObject* same_attributes(PyObject*, PyObject* owners) {
  if (!PyTuple_Check(owners)) return PyErr_Format(PyExc_TypeError, "same_attributes takes a tuple");
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(owners); ++place) {
    PyObject* const owner = PyTuple_GET_ITEM(owners, place);
    if (!PyTuple_Check(owner) || PyTuple_GET_SIZE(owner) != 3) {
      return PyErr_Format(PyExc_TypeError, "same_attributes takes a tuple of (object, names, values)");
    }
    PyObject *const names = PyTuple_GET_ITEM(owner, 1), *const values = PyTuple_GET_ITEM(owner, 2);
    if (!PyTuple_Check(names) || !PyTuple_Check(values) || PyTuple_GET_SIZE(names) != PyTuple_GET_SIZE(values)) {
      return PyErr_Format(PyExc_TypeError, "same_attributes takes a value for each name");
    }
    const int is_equal = equal(PyTuple_GET_ITEM(owner, 0), names, values);
    if (is_equal < 0) return nullptr;
    if (is_equal == 0) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyObject* execute_with(PyObject*, PyObject* others) {
  const size_t address = PyLong_AsSize_t(others);
  if (PyErr_Occurred() != nullptr) return nullptr;
  set_others(reinterpret_cast<Execute>(address));
  return PyLong_FromSize_t(reinterpret_cast<size_t>(&execute));
}

PyMethodDef functions[] = {
    {"places", places, METH_O,
     "Describes where tensors are in memory, with types and sizes; None unless all are contiguous and on the CPU."},
    {"trained", trained, METH_O, "Which tensors require a gradient, as bytes."},
    {"take", take, METH_O, "Makes a tensor of a DLPack capsule, which it consumes."},
    {"same_entries", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(same_entries)), METH_FASTCALL,
     "Whether the values of dictionaries, one after the other, are these objects."},
    {"same_attributes", same_attributes, METH_O, "Whether the attributes in (object, names, values) have these values."},
    {"execute_with", execute_with, METH_O,
     "Sets the address of the executor for operators that are not ours, and returns that of ours."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "ortlaunch_kernels", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace ortlaunch

PyMODINIT_FUNC PyInit_ortlaunch_kernels() { return PyModule_Create(&ortlaunch::definition); }
