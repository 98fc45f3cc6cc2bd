// Calls of planned layers without Python: check that nothing changed, patch arguments, launch.
//
//   layer(x) --> Front(x) --> guards hold --> the entry for x --> launch --> y
//                    |                              |               |  if a gradient is needed:
//                    +------ None: the layer takes its path in Python, and front.py records it
//                                                                   |
//   backward of y  --> the entries for dy --> launch --> dX, dW <---+  (Product, a node of autograd)
//                              |
//                              +--> none, or create_graph: `derivative`, a function in Python
//
// front.hpp has guards and entries. A node of autograd holds the Front that made it.

#include "front.hpp"

#include <ATen/ops/from_blob.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <exception>

namespace {

// ---- autograd ----

// Returns a tensor at the address of a Front, which it owns: a node of autograd saves it as data,
// because compiled autograd accepts tensors and numbers there, but no objects.
at::Tensor handle_of(Front* front) {
  Py_INCREF(front);
  const auto free = [](void* address) { release(static_cast<PyObject*>(address)); };
  return at::from_blob(front, {1}, free, at::kByte);
}

Front* front_of(const at::Tensor& handle) { return static_cast<Front*>(handle.data_ptr()); }

// Computes dX and dW, which are undefined where not needed. Returns false if no entry is for dy, or
// if the weight is not as the recordings read it.
bool replay(Front* front, at::Tensor dy, const at::Tensor& x, const at::Tensor& values,
            bool for_x, bool for_values, at::Tensor& dx, at::Tensor& dw) {
  Layout layout;
  if (!thread_is_ready() || dy.key_set().has_any(c10::python_ks) || dy.layout() != at::kStrided)
    return false;
  if (!layout_of(dy, layout) || (layout.rows > 1 && layout.stride < layout.columns)) {
    dy = dy.contiguous();  // an expanded dy, for one
    if (reinterpret_cast<uintptr_t>(dy.data_ptr()) % 16) dy = dy.clone();
  }
  Place place;
  if (!place_of(dy, place) || captures(place.stream) || !contents_hold(front)) return false;
  Inputs of_x{dy};
  if (values.defined() || front->keeps_x) of_x.push_back(values.defined() ? values : x);
  const Inputs of_values{dy, x};
  const auto entry_x = for_x ? front->entries[DGRAD].find(of_x, place) : nullptr;
  const auto entry_values = for_values ? front->entries[WGRAD].find(of_values, place) : nullptr;
  if ((for_x && !entry_x) || (for_values && !entry_values)) return false;
  if (for_x) dx = run(*entry_x, of_x, true);
  if (for_values) dw = run(*entry_values, of_values, false);
  return true;
}

// Calls derivative(front, dy, x, values, for_x, for_values), which returns dX and dW or None.
void differentiate(Front* front, const at::Tensor& dy, const at::Tensor& x,
                   const at::Tensor& values, bool for_x, bool for_values, at::Tensor& dx,
                   at::Tensor& dw) {
  const pybind11::gil_scoped_acquire gil;
  PyObject *result_x = nullptr, *result_values = nullptr;
  const auto wrapped = [](const at::Tensor& t) {  // an undefined tensor becomes None
    return THPVariable_Wrap(t);
  };
  PyObject* result =
      PyObject_CallFunction(front->derivative, "ONNNii", front, wrapped(dy), wrapped(x),
                            wrapped(values), for_x ? 1 : 0, for_values ? 1 : 0);
  if (!result || !PyArg_ParseTuple(result, "OO", &result_x, &result_values)) {
    Py_XDECREF(result);
    python_error error;
    error.persist();
    throw error;
  }
  if (result_x != Py_None) dx = THPVariable_Unpack(result_x);
  if (result_values != Py_None) dw = THPVariable_Unpack(result_values);
  Py_DECREF(result);
}

struct Product : torch::autograd::Function<Product> {
  using Context = torch::autograd::AutogradContext;

  static at::Tensor forward(Context* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& values,
                            const std::optional<at::Tensor>& bias, const Entry* entry,
                            const Inputs* inputs, const at::Tensor* handle) {
    const bool keeps_x = front_of(*handle)->keeps_x || (values && values->requires_grad());
    const bool keeps_values = values && x.requires_grad();
    context->save_for_backward({keeps_x ? x : at::Tensor(), keeps_values ? *values : at::Tensor()});
    context->saved_data["front"] = *handle;
    return run(*entry, *inputs, true);
  }

  static torch::autograd::variable_list backward(Context* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor handle = context->saved_data["front"].toTensor();
    Front* front = front_of(handle);
    const bool has_values = front->values->defined();
    const bool for_x = context->needs_input_grad(0);
    const bool for_values = has_values && context->needs_input_grad(1);
    const bool for_bias = front->bias->defined() && context->needs_input_grad(has_values ? 2 : 1);
    const at::Tensor& dy = gradients[0];
    at::Tensor dx, dw, dbias;
    if (for_bias) {
      const auto type = front->bias->scalar_type();
      dbias = dy.dim() < 2 ? dy.to(type) : dy.flatten(0, -2).sum(0, false, type);
    }
    const bool again = c10::GradMode::is_enabled();  // create_graph
    if ((for_x || for_values) &&
        (again || !replay(front, dy, saved[0], saved[1], for_x, for_values, dx, dw)))
      differentiate(front, dy, saved[0], saved[1], for_x, for_values, dx, dw);
    return {dx, dw, dbias, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// ---- calls ----

// Returns y, or None if the layer must take its path in Python.
PyObject* front_call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  Front* self = reinterpret_cast<Front*>(object);
  if (PyVectorcall_NARGS(flags) != 1 || names || !THPVariable_CheckExact(args[0])) Py_RETURN_NONE;
  const at::Tensor& x = THPVariable_Unpack(args[0]);
  if (!thread_is_ready() || has_forward_gradient(x)) Py_RETURN_NONE;
  const bool differentiated = needs_gradient(self, x);
  if (differentiated && !self->derivative) Py_RETURN_NONE;
  if (!guards_hold(self)) {
    self->stale = 1;
    Py_RETURN_NONE;
  }
  if (self->limit && --self->left <= 0) Py_RETURN_NONE;
  Place place;
  if (!place_of(x, place)) Py_RETURN_NONE;
  Inputs inputs{x};
  if (self->values->defined() && self->values->requires_grad()) inputs.push_back(*self->values);
  const auto entry = self->entries[LINEAR].find(inputs, place);
  if (!entry || captures(place.stream)) Py_RETURN_NONE;
  const at::Tensor handle = differentiated ? handle_of(self) : at::Tensor();
  at::Tensor y;
  {
    const pybind11::gil_scoped_release other_threads_run;  // a launch waits if the queue is full
    y = differentiated
            ? Product::apply(x, optional(*self->values), optional(*self->bias), entry.get(),
                             &inputs, &handle)
            : run(*entry, inputs, true);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// run(op, inputs): the product of an entry, or None if there is none.
PyObject* front_run(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  Front* self = reinterpret_cast<Front*>(object);
  int op;
  PyObject* list;
  if (!PyArg_ParseTuple(args, "iO!", &op, &PyList_Type, &list)) return nullptr;
  Inputs inputs;
  for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
    inputs.push_back(THPVariable_Unpack(PyList_GetItem(list, i)));
  Place place;
  if (!place_of(inputs[0], place)) Py_RETURN_NONE;
  const auto entry = self->entries[op].find(inputs, place);
  if (!entry) Py_RETURN_NONE;
  return THPVariable_Wrap(run(*entry, inputs, op != WGRAD));
  END_HANDLE_TH_ERRORS
}

// guard(dict or None, name, tensor or None, content): `dict[name]` must stay this object.
PyObject* front_guard(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  Front* self = reinterpret_cast<Front*>(object);
  PyObject *dict, *name, *tensor;
  int content;
  if (!PyArg_ParseTuple(args, "OOOp", &dict, &name, &tensor, &content)) return nullptr;
  Guard guard{dict == Py_None ? nullptr : dict, name, tensor, {}, nullptr, -1, false};
  if (THPVariable_Check(tensor)) {
    guard.tensor = THPVariable_Unpack(tensor);
    guard.address = guard.tensor.data_ptr();
    guard.requires_grad = guard.tensor.requires_grad();
    if (content) guard.version = guard.tensor._version();
  }
  Py_XINCREF(guard.dict);
  Py_INCREF(name);
  Py_INCREF(tensor);
  self->guards->push_back(std::move(guard));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// differentiate(derivative, values or None, bias or None, keeps_x): run calls that need a gradient.
PyObject* front_differentiate(PyObject* object, PyObject* args) {
  Front* self = reinterpret_cast<Front*>(object);
  PyObject *derivative, *values, *bias;
  int keeps_x;
  if (!PyArg_ParseTuple(args, "OOOp", &derivative, &values, &bias, &keeps_x)) return nullptr;
  self->keeps_x = static_cast<char>(keeps_x);
  Py_XSETREF(self->derivative, Py_NewRef(derivative));
  if (values != Py_None) *self->values = THPVariable_Unpack(values);
  if (bias != Py_None) *self->bias = THPVariable_Unpack(bias);
  Py_RETURN_NONE;
}

bool parse_step(PyObject* tuple, Step& step) {
  unsigned long long function;
  PyObject *attributes, *parameters, *patches, *weight;
  const char* image;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(tuple, "KIIIOy#OOO", &function, &step.grid, &step.threads,
                        &step.shared_bytes, &attributes, &image, &bytes, &parameters, &patches,
                        &weight))
    return false;
  if (weight != Py_None) step.weight = THPVariable_Unpack(weight);
  step.function = reinterpret_cast<void*>(function);
  step.image.assign(image, image + bytes);
  for (Py_ssize_t i = 0; i < PyList_Size(attributes); i++)
    step.attributes.push_back(
        {static_cast<int>(PyLong_AsLong(PyList_GetItem(attributes, i))), 0, {1}});
  for (Py_ssize_t i = 0; i < PyList_Size(parameters); i++)
    step.parameters.push_back(PyLong_AsUnsignedLong(PyList_GetItem(parameters, i)));
  for (Py_ssize_t i = 0; i < PyList_Size(patches); i++) {
    Patch patch;
    long long start;
    if (!PyArg_ParseTuple(PyList_GetItem(patches, i), "iLI", &patch.operand, &start,
                          &patch.offset))
      return false;
    patch.start = start;
    step.patches.push_back(patch);
  }
  if (step.image.size() <= IMAGE_BYTES && step.parameters.size() <= PARAMETERS) return true;
  PyErr_SetString(PyExc_ValueError, "expected at most 8192 bytes in 64 parameters");
  return false;
}

// add(op, inputs, outputs, steps, fixed, bias or None, owners, dense or None): what was recorded for
// a call with these inputs on this stream. Returns false if kernels cannot read their layout.
//   outputs  [tensor, ...]: tensors that the steps write, of which sizes and dtype are taken
//   fixed    numbers of inputs that no step reads: the entry is for their addresses alone
//   steps    [(function, grid, threads, shared_bytes, attributes, image, parameters, patches,
//            weight or None)]
PyObject* front_add(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  Front* self = reinterpret_cast<Front*>(object);
  int op;
  PyObject *inputs, *outputs, *steps, *fixed, *bias, *owners, *dense;
  if (!PyArg_ParseTuple(args, "iOOOOOOO", &op, &inputs, &outputs, &steps, &fixed, &bias, &owners,
                        &dense))
    return nullptr;
  auto entry = std::make_shared<Entry>();
  for (Py_ssize_t i = 0; i < PyList_Size(inputs); i++) {
    const at::Tensor& t = THPVariable_Unpack(PyList_GetItem(inputs, i));
    entry->inputs.emplace_back();
    if (!layout_of(t, entry->inputs.back())) Py_RETURN_FALSE;
    if (i == 0 && !place_of(t, entry->place)) Py_RETURN_FALSE;
  }
  entry->fixed.resize(entry->inputs.size(), nullptr);
  for (Py_ssize_t i = 0; i < PyList_Size(fixed); i++) {
    const long at = PyLong_AsLong(PyList_GetItem(fixed, i));
    entry->fixed.at(at) = THPVariable_Unpack(PyList_GetItem(inputs, at)).data_ptr();
  }
  for (Py_ssize_t i = 0; i < PyList_Size(outputs); i++) {
    const at::Tensor& t = THPVariable_Unpack(PyList_GetItem(outputs, i));
    entry->outputs.push_back({t.scalar_type(), t.sizes().vec()});
  }
  for (Py_ssize_t i = 0; i < PyList_Size(steps); i++) {
    entry->steps.emplace_back();
    if (!parse_step(PyList_GetItem(steps, i), entry->steps.back())) return nullptr;
  }
  if (bias != Py_None) entry->bias = THPVariable_Unpack(bias).detach();
  if (dense != Py_None) entry->dense = THPVariable_Unpack(dense);
  entry->owners = Py_NewRef(owners);
  self->entries[op].add(std::move(entry));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// ---- the type ----

PyObject* front_new(PyTypeObject* type, PyObject* args, PyObject*) {
  long long limit;
  if (!PyArg_ParseTuple(args, "L", &limit)) return nullptr;
  Front* self = reinterpret_cast<Front*>(type->tp_alloc(type, 0));
  self->call = front_call;
  self->guards = new std::vector<Guard>();
  self->entries = new Entries[OPS];
  self->values = new at::Tensor();
  self->bias = new at::Tensor();
  self->derivative = nullptr;
  self->limit = self->left = limit;
  self->stale = self->keeps_x = 0;
  return reinterpret_cast<PyObject*>(self);
}

// An owner may hold the weight that holds this object, so the garbage collector must see both.
int front_traverse(PyObject* object, visitproc visit, void* arg) {
  Front* self = reinterpret_cast<Front*>(object);
  Py_VISIT(self->derivative);
  if (!self->guards) return 0;
  for (auto& guard : *self->guards) {
    Py_VISIT(guard.dict);
    Py_VISIT(guard.name);
    Py_VISIT(guard.object);
  }
  int result = 0;
  for (int op = 0; op < OPS; op++)
    self->entries[op].each([&](const Entry& entry) {
      if (!result && entry.owners) result = visit(entry.owners, arg);
    });
  return result;
}

int front_clear(PyObject* object) {
  Front* self = reinterpret_cast<Front*>(object);
  Py_CLEAR(self->derivative);
  std::vector<Guard> guards;
  guards.swap(*self->guards);
  for (int op = 0; op < OPS; op++) self->entries[op].swap_out();
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
  delete[] self->entries;
  delete self->values;
  delete self->bias;
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
    {"guard", front_guard, METH_VARARGS, nullptr},
    {"differentiate", front_differentiate, METH_VARARGS, nullptr},
    {"add", front_add, METH_VARARGS, nullptr},
    {"run", front_run, METH_VARARGS, nullptr},
    {"due", front_due, METH_NOARGS, nullptr},
    {"__reduce__", front_reduce, METH_NOARGS, nullptr},
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
  PyObject* extension = PyModule_Create(&module);
  Py_INCREF(&front_type);
  PyModule_AddObject(extension, "Front", reinterpret_cast<PyObject*>(&front_type));
  return extension;
}
