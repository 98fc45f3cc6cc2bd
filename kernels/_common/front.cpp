// Calls of frozen layers without Python: check that nothing changed, patch arguments, launch.
//
//   layer(x) --> Front(x) --> guards hold --> the entry for x --> allocate, patch, launch --> y
//                    |                              |
//                    +------ None: the layer takes its path in Python, and front.py records it
//
//   guard   an attribute of the layer is the same tensor object, at the same address, and torch has
//           counted no write to it; gradients, modes, autocast, captures and threads are as recorded
//   entry   for a number of tokens, a stride and a stream: the launches that Python recorded, as bytes
//           of their arguments, and the places in them where addresses of tensors stand
//
// The addresses in recorded arguments are found by value (front.py). Arguments are copied for each
// call, so threads do not share them. The driver's functions come as addresses, so that this file
// needs no CUDA header and a test can stand in for the driver.

#define PY_SSIZE_T_CLEAN

#include <ATen/core/Tensor.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear_ops.h>
#include <Python.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

struct Attribute { int number, padding; uint32_t words[16]; };  // CUlaunchAttribute
struct Config {                                                 // CUlaunchConfig
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};
using LaunchFn = int (*)(const Config*, void*, void**, void**);
using StreamFn = int (*)(int32_t, void**);
using CapturingFn = int (*)(void*, int*);
LaunchFn launch_kernel = nullptr;    // cuLaunchKernelEx
StreamFn current_stream = nullptr;   // aoti_torch_get_current_cuda_stream
CapturingFn is_capturing = nullptr;  // cuStreamIsCapturing

struct Patch { int operand; uint32_t offset; };
struct Step {
  void* function;
  uint32_t grid, threads, shared_bytes;
  std::vector<Attribute> attributes;
  std::vector<char> image;
  std::vector<uint32_t> parameters;  // their offsets in the image
  std::vector<Patch> patches;
};
struct Made { at::ScalarType dtype; std::vector<int64_t> sizes; };  // a tensor that a step writes
constexpr size_t MOST = 64;  // entries; the oldest makes room
struct Entry {
  int64_t tokens, stride;
  void* stream;
  c10::DispatchKeySet keys, included, excluded;  // of x; of this thread: modes, autocast
  std::vector<Made> made;  // the last is the output
  std::vector<Step> steps;
  at::Tensor bias, dense;  // dense: no launch was recorded; torch multiplies by this weight
  PyObject* owners = nullptr;  // of the other memory that the launches read
  ~Entry() { Py_XDECREF(owners); }
};
struct Guard { PyObject *dict, *name, *object; at::Tensor tensor; void* address; int64_t version; };

struct Front {
  PyObject_HEAD
  vectorcallfunc call;
  std::vector<Guard>* guards;
  std::vector<std::shared_ptr<Entry>>* entries;
  at::ScalarType dtype;
  c10::Device* device;
  int64_t depth, left, limit;  // calls until the layer must look again; a limit of 0: never
  char stale;                  // a guard failed: this object must be replaced
};

bool has_forward_gradient(const at::Tensor& t) {
  auto* meta = t.unsafeGetTensorImpl()->autograd_meta();
  return meta && meta->fw_grad(0, t).defined();
}

bool guards_hold(Front* self) {
  for (auto& guard : *self->guards) {
    if (guard.dict) {
      PyObject* item = PyDict_GetItem(guard.dict, guard.name);
      if ((item ? item : Py_None) != guard.object) return false;
    }
    const at::Tensor& t = guard.tensor;
    if (!t.defined()) continue;
    if (t.data_ptr() != guard.address || static_cast<int64_t>(t._version()) != guard.version)
      return false;
    if (has_forward_gradient(t)) return false;
  }
  return true;
}

bool needs_gradient(Front* self, const at::Tensor& x) {
  if (!c10::GradMode::is_enabled()) return false;
  if (x.requires_grad()) return true;
  for (auto& guard : *self->guards)
    if (guard.tensor.defined() && guard.tensor.requires_grad()) return true;
  return false;
}

at::Tensor run(const Entry& entry, const at::Tensor& x) {
  if (entry.dense.defined()) {
    c10::AutoGradMode no_gradient(false);
    return at::_ops::linear::call(
        x, entry.dense, entry.bias.defined() ? std::optional<at::Tensor>(entry.bias) : std::nullopt);
  }
  std::vector<at::Tensor> operands;
  operands.reserve(1 + entry.made.size());
  operands.push_back(x);
  for (size_t i = 0; i < entry.made.size(); i++) {
    const Made& made = entry.made[i];
    std::vector<int64_t> sizes = made.sizes;
    if (i + 1 == entry.made.size() && x.dim() != 2) {  // the output has the leading sizes of x
      sizes.assign(x.sizes().begin(), x.sizes().end());
      if (sizes.size() == 1) sizes = {made.sizes[1]};
      else sizes.back() = made.sizes[1];
    }
    operands.push_back(at::empty(sizes, x.options().dtype(made.dtype).requires_grad(false)));
  }
  for (const Step& step : entry.steps) {
    alignas(64) char image[8192];
    std::memcpy(image, step.image.data(), step.image.size());
    for (const Patch& patch : step.patches) {
      const void* address = operands[patch.operand].data_ptr();
      std::memcpy(image + patch.offset, &address, sizeof address);
    }
    void* parameters[64];
    for (size_t i = 0; i < step.parameters.size(); i++) parameters[i] = image + step.parameters[i];
    Config config{{step.grid, 1, 1}, {step.threads, 1, 1}, step.shared_bytes, entry.stream,
                  const_cast<Attribute*>(step.attributes.data()),
                  static_cast<uint32_t>(step.attributes.size())};
    if (int result = launch_kernel(&config, step.function, parameters, nullptr))
      throw std::runtime_error("launch of " + std::to_string(step.grid) + " CTAs of " +
                               std::to_string(step.threads) + ": error " + std::to_string(result));
  }
  at::Tensor y = std::move(operands.back());
  if (entry.bias.defined()) {
    c10::AutoGradMode no_gradient(false);
    at::_ops::add__Tensor::call(y, entry.bias, 1);
  }
  return y;
}

// Returns y, or None if the layer must take its path in Python.
PyObject* front_call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  Front* self = reinterpret_cast<Front*>(object);
  if (PyVectorcall_NARGS(flags) != 1 || names || !THPVariable_CheckExact(args[0])) Py_RETURN_NONE;
  const at::Tensor& x = THPVariable_Unpack(args[0]);
  thread_local bool ready = false;  // the path in Python gives a new thread its context
  if (!ready) {
    ready = true;
    Py_RETURN_NONE;
  }
  const int64_t dims = x.dim();
  if (dims < 1 || x.scalar_type() != self->dtype || x.device() != *self->device ||
      x.size(-1) != self->depth || has_forward_gradient(x))
    Py_RETURN_NONE;
  if (dims != 2 && !x.is_contiguous()) Py_RETURN_NONE;
  const int64_t tokens = dims == 2 ? x.size(0) : x.numel() / self->depth;
  const int64_t stride = dims == 2 ? x.stride(0) : self->depth;
  if ((dims == 2 && x.stride(1) != 1) || reinterpret_cast<uintptr_t>(x.data_ptr()) % 16)
    Py_RETURN_NONE;
  if (needs_gradient(self, x)) Py_RETURN_NONE;
  if (!guards_hold(self)) {
    self->stale = 1;
    Py_RETURN_NONE;
  }
  if (self->limit && --self->left <= 0) Py_RETURN_NONE;
  void* stream = nullptr;
  if (x.is_cuda()) {
    auto* guard = c10::impl::getDeviceGuardImpl(c10::kCUDA);
    if (guard->getDevice() != *self->device) Py_RETURN_NONE;
  }
  int status = 0;
  if (current_stream(static_cast<int32_t>(self->device->index()), &stream)) Py_RETURN_NONE;
  const auto keys = x.key_set();
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto found = std::find_if(
      self->entries->begin(), self->entries->end(), [&](const std::shared_ptr<Entry>& entry) {
        return entry->tokens == tokens && entry->stride == stride && entry->stream == stream &&
               entry->keys == keys && entry->included == local.included_ &&
               entry->excluded == local.excluded_;
      });
  if (found == self->entries->end() || is_capturing(stream, &status) || status) Py_RETURN_NONE;
  const std::shared_ptr<Entry> entry = *found;  // other threads may add entries meanwhile
  at::Tensor y;
  std::string failure;
  Py_BEGIN_ALLOW_THREADS;  // a launch waits if the queue is full
  try {
    y = run(*entry, x);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  Py_END_ALLOW_THREADS;
  if (failure.empty()) return THPVariable_Wrap(std::move(y));
  PyErr_SetString(PyExc_RuntimeError, failure.c_str());
  return nullptr;
}

// guard(dict or None, name, tensor or None): `dict[name]` must stay this object.
PyObject* front_guard(PyObject* object, PyObject* args) {
  Front* self = reinterpret_cast<Front*>(object);
  PyObject *dict, *name, *tensor;
  if (!PyArg_ParseTuple(args, "OOO", &dict, &name, &tensor)) return nullptr;
  Guard guard{dict == Py_None ? nullptr : dict, name, tensor, {}, nullptr, 0};
  if (tensor != Py_None) {
    guard.tensor = THPVariable_Unpack(tensor);
    guard.address = guard.tensor.data_ptr();
    guard.version = guard.tensor._version();
  }
  Py_XINCREF(guard.dict);
  Py_INCREF(name);
  Py_INCREF(tensor);
  self->guards->push_back(std::move(guard));
  Py_RETURN_NONE;
}

// add(x, made, steps, bias or None, owners, dense or None): what was recorded for a call with x on
// this stream.
//   made   [tensor, ...]: tensors that the steps write, of which sizes and dtype are taken
//   steps  [(function, grid, threads, shared_bytes, attributes, image, parameters, patches)]
PyObject* front_add(PyObject* object, PyObject* args) {
  Front* self = reinterpret_cast<Front*>(object);
  PyObject *of_x, *made, *steps, *bias, *owners, *dense;
  if (!PyArg_ParseTuple(args, "OOOOOO", &of_x, &made, &steps, &bias, &owners, &dense))
    return nullptr;
  const at::Tensor& x = THPVariable_Unpack(of_x);
  auto made_entry = std::make_shared<Entry>();
  Entry& entry = *made_entry;
  entry.tokens = x.dim() == 2 ? x.size(0) : x.numel() / self->depth;
  entry.stride = x.dim() == 2 ? x.stride(0) : self->depth;
  entry.keys = x.key_set();
  const auto local = c10::impl::tls_local_dispatch_key_set();
  entry.included = local.included_;
  entry.excluded = local.excluded_;
  if (current_stream(static_cast<int32_t>(self->device->index()), &entry.stream)) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < PyList_Size(made); i++) {
    const at::Tensor& t = THPVariable_Unpack(PyList_GetItem(made, i));
    entry.made.push_back({t.scalar_type(), t.sizes().vec()});
  }
  for (Py_ssize_t i = 0; i < PyList_Size(steps); i++) {
    unsigned long long function;
    Step step;
    PyObject *attributes, *parameters, *patches;
    const char* image;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(PyList_GetItem(steps, i), "KIIIOy#OO", &function, &step.grid,
                          &step.threads, &step.shared_bytes, &attributes, &image, &bytes,
                          &parameters, &patches))
      return nullptr;
    step.function = reinterpret_cast<void*>(function);
    step.image.assign(image, image + bytes);
    for (Py_ssize_t j = 0; j < PyList_Size(attributes); j++)
      step.attributes.push_back(
          {static_cast<int>(PyLong_AsLong(PyList_GetItem(attributes, j))), 0, {1}});
    for (Py_ssize_t j = 0; j < PyList_Size(parameters); j++)
      step.parameters.push_back(PyLong_AsUnsignedLong(PyList_GetItem(parameters, j)));
    for (Py_ssize_t j = 0; j < PyList_Size(patches); j++) {
      Patch patch;
      if (!PyArg_ParseTuple(PyList_GetItem(patches, j), "iI", &patch.operand, &patch.offset))
        return nullptr;
      step.patches.push_back(patch);
    }
    if (step.image.size() > 8192 || step.parameters.size() > 64) {
      PyErr_SetString(PyExc_ValueError, "expected at most 8192 bytes in 64 parameters");
      return nullptr;
    }
    entry.steps.push_back(std::move(step));
  }
  if (bias != Py_None) entry.bias = THPVariable_Unpack(bias).detach();
  if (dense != Py_None) entry.dense = THPVariable_Unpack(dense);
  entry.owners = Py_NewRef(owners);
  if (self->entries->size() == MOST) self->entries->erase(self->entries->begin());
  self->entries->push_back(std::move(made_entry));
  Py_RETURN_NONE;
}

PyObject* front_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* of_x;
  long long depth, limit;
  if (!PyArg_ParseTuple(args, "OLL", &of_x, &depth, &limit)) return nullptr;
  Front* self = reinterpret_cast<Front*>(type->tp_alloc(type, 0));
  const at::Tensor& x = THPVariable_Unpack(of_x);
  self->call = front_call;
  self->guards = new std::vector<Guard>();
  self->entries = new std::vector<std::shared_ptr<Entry>>();
  self->dtype = x.scalar_type();
  self->device = new c10::Device(x.device());
  self->depth = depth;
  self->limit = self->left = limit;
  self->stale = 0;
  return reinterpret_cast<PyObject*>(self);
}

// An owner may hold the weight that holds this object, so the garbage collector must see both.
int front_traverse(PyObject* object, visitproc visit, void* arg) {
  Front* self = reinterpret_cast<Front*>(object);
  if (self->guards)
    for (auto& guard : *self->guards) {
      Py_VISIT(guard.dict);
      Py_VISIT(guard.name);
      Py_VISIT(guard.object);
    }
  if (self->entries)
    for (auto& entry : *self->entries) Py_VISIT(entry->owners);
  return 0;
}

int front_clear(PyObject* object) {
  Front* self = reinterpret_cast<Front*>(object);
  std::vector<Guard> guards;
  std::vector<std::shared_ptr<Entry>> entries;
  guards.swap(*self->guards);
  entries.swap(*self->entries);
  for (auto& guard : guards) {
    Py_XDECREF(guard.dict);
    Py_DECREF(guard.name);
    Py_DECREF(guard.object);
  }
  return 0;
}

void front_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  Front* self = reinterpret_cast<Front*>(object);
  front_clear(object);
  delete self->guards;
  delete self->entries;
  delete self->device;
  Py_TYPE(object)->tp_free(object);
}

PyObject* front_due(PyObject* object, PyObject*) {  // whether `limit` calls have passed; counts anew
  Front* self = reinterpret_cast<Front*>(object);
  const bool due = self->limit && self->left <= 0;
  if (due) self->left = self->limit;
  return PyBool_FromLong(due);
}

PyObject* front_reduce(PyObject*, PyObject*) {  // copies and pickles as None
  return Py_BuildValue("(O())", Py_TYPE(Py_None));
}

PyMethodDef methods[] = {
    {"guard", front_guard, METH_VARARGS, nullptr}, {"add", front_add, METH_VARARGS, nullptr},
    {"due", front_due, METH_NOARGS, nullptr}, {"__reduce__", front_reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef members[] = {{"stale", T_BOOL, offsetof(Front, stale), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};

PyTypeObject front_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// connect(launch, stream, capturing): the addresses of the driver's and torch's functions.
PyObject* connect(PyObject*, PyObject* args) {
  unsigned long long launch, stream, capturing;
  if (!PyArg_ParseTuple(args, "KKK", &launch, &stream, &capturing)) return nullptr;
  launch_kernel = reinterpret_cast<LaunchFn>(launch);
  current_stream = reinterpret_cast<StreamFn>(stream);
  is_capturing = reinterpret_cast<CapturingFn>(capturing);
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"connect", connect, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "sparsebench_front", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_sparsebench_front() {
  front_type.tp_name = "sparsebench_front.Front";
  front_type.tp_basicsize = sizeof(Front);
  front_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
  front_type.tp_traverse = front_traverse;
  front_type.tp_clear = front_clear;
  front_type.tp_free = PyObject_GC_Del;
  front_type.tp_new = front_new;
  front_type.tp_dealloc = front_dealloc;
  front_type.tp_call = PyVectorcall_Call;
  front_type.tp_vectorcall_offset = offsetof(Front, call);
  front_type.tp_methods = methods;
  front_type.tp_members = members;
  if (PyType_Ready(&front_type) < 0) return nullptr;
  PyObject* made = PyModule_Create(&module);
  Py_INCREF(&front_type);
  PyModule_AddObject(made, "Front", reinterpret_cast<PyObject*>(&front_type));
  return made;
}
