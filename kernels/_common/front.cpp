// Calls of planned operators without Python: check that nothing changed, patch arguments, launch.
//
//   op(x, ..) --> Front(x, ..) --> guards hold --> the entry for x, .. --> launch --> y, ..
//                    |                                                      |
//                    +--> None: the op takes its path in Python,            +--> with a node of
//                         and front.py records it                                autograd, if needed
//
// front.hpp has the recorded launches, front_node.hpp what must hold, and backward.

#include "front_node.hpp"

#include <ATen/ops/equal.h>
#include <structmember.h>

namespace {

// ---- calls ----

// Returns the result, or a tuple of them, or None if the op must take its path in Python.
PyObject* front_call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  Front* self = reinterpret_cast<Front*>(object);
  State& state = *self->state;
  const Py_ssize_t count = state.signature.arguments;
  if (PyVectorcall_NARGS(flags) != count || names) Py_RETURN_NONE;
  Operands inputs;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!THPVariable_CheckExact(args[i])) Py_RETURN_NONE;
    inputs.push_back(THPVariable_Unpack(args[i]));
    if (has_forward_gradient(inputs.back())) Py_RETURN_NONE;
  }
  if (!thread_is_ready()) Py_RETURN_NONE;
  const bool differentiated = needs_gradient(state, inputs);
  if (differentiated && !state.derivative) Py_RETURN_NONE;
  if (!guards_hold(state)) {
    self->stale = 1;
    Py_RETURN_NONE;
  }
  if (state.limit && --state.left <= 0) Py_RETURN_NONE;
  Operands variables;
  if (differentiated) {
    variables = inputs;
    variables.append(state.held.begin(), state.held.end());
    if (state.bias.defined()) variables.push_back(state.bias);
  }
  for (const auto& t : state.held)
    if (t.requires_grad()) inputs.push_back(t);
  Place place;
  Layouts layouts(inputs.size());
  for (size_t i = 0; i < inputs.size(); i++)
    if (!layout_of(inputs[i], state.signature.exact, layouts[i])) Py_RETURN_NONE;
  if (!place_of(inputs[0], place)) Py_RETURN_NONE;
  const auto entry = state.entries[0].find(layouts, inputs, place);
  if (!entry || captures(place.stream)) Py_RETURN_NONE;
  Tensors results;
  Call call{*entry, inputs, differentiated ? handle_of(self) : at::Tensor(), {}};
  {
    const pybind11::gil_scoped_release other_threads_run;  // a launch waits if the queue is full
    for (size_t i = 0; i < inputs.size(); i++)
      if (layouts[i].copied) inputs[i] = copy_of(inputs[i]);
    if (differentiated) {
      results.push_back(Node::apply(at::TensorList(variables), &call));
      results.insert(results.end(), call.results.begin(), call.results.end());
    } else {
      results = run(*entry, inputs, state.bias);
    }
  }
  if (results.size() == 1) return THPVariable_Wrap(std::move(results[0]));
  PyObject* tuple = PyTuple_New(results.size());
  for (size_t i = 0; i < results.size(); i++)
    PyTuple_SET_ITEM(tuple, i, THPVariable_Wrap(std::move(results[i])));
  return tuple;
  END_HANDLE_TH_ERRORS
}

// guard(dict or None, name, tensor or None, content): `dict[name]` must stay this object.
PyObject* front_guard(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  Front* self = reinterpret_cast<Front*>(object);
  PyObject *dict, *name, *tensor;
  int content;
  if (!PyArg_ParseTuple(args, "OOOp", &dict, &name, &tensor, &content)) return nullptr;
  Guard guard{dict == Py_None ? nullptr : dict, name, tensor, nullptr, -1, false,
              THPVariable_Check(tensor)};
  if (guard.is_tensor) {
    guard.address = guard.tensor().data_ptr();
    guard.requires_grad = guard.tensor().requires_grad();
    if (content) guard.version = guard.tensor()._version();
  }
  Py_XINCREF(guard.dict);
  Py_INCREF(name);
  Py_INCREF(tensor);
  self->state->guards.push_back(std::move(guard));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

Tensors tensors_of(PyObject* list) {
  Tensors tensors;
  for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
    tensors.push_back(THPVariable_Unpack(PyList_GetItem(list, i)));
  return tensors;
}

template <class T>
std::vector<T> numbers_of(PyObject* list) {
  std::vector<T> numbers;
  for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
    numbers.push_back(static_cast<T>(PyLong_AsUnsignedLong(PyList_GetItem(list, i))));
  return numbers;
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
  for (const int number : numbers_of<int>(attributes)) step.attributes.push_back({number, 0, {1}});
  step.parameters = numbers_of<uint32_t>(parameters);
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

// add(product, inputs, fixed, outputs, numbers, steps, owners, dense or None, results): what was
// recorded for a call with these inputs on this stream. Returns whether the steps give the same bits
// again; None if kernels cannot read the inputs.
//   product  0 for forward, else the number of a product of backward, from 1 on
//   fixed    numbers of inputs that no step reads: the entry is for their addresses alone
//   outputs  [tensor, ...]: tensors that the steps write, of which sizes and dtype are taken
//   numbers  those of `results` among the outputs
//   steps    [(function, grid, threads, shared_bytes, attributes, image, parameters, patches,
//            weight or None)]
PyObject* front_add(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  State& state = *reinterpret_cast<Front*>(object)->state;
  unsigned int number;
  PyObject *list, *fixed, *outputs, *numbers, *steps, *owners, *dense, *made;
  if (!PyArg_ParseTuple(args, "IOOOOOOOO", &number, &list, &fixed, &outputs, &numbers, &steps,
                        &owners, &dense, &made))
    return nullptr;
  const Tensors inputs = tensors_of(list), results = tensors_of(made);
  auto entry = std::make_shared<Entry>();
  for (const auto& t : inputs) {
    entry->inputs.emplace_back();
    if (!layout_of(t, state.signature.exact, entry->inputs.back())) Py_RETURN_NONE;
    if (entry->inputs.back().copied) Py_RETURN_NONE;
  }
  if (!place_of(inputs.at(0), entry->place)) Py_RETURN_NONE;
  entry->fixed.resize(inputs.size(), nullptr);
  for (const size_t i : numbers_of<size_t>(fixed)) entry->fixed.at(i) = inputs.at(i).data_ptr();
  for (const auto& t : tensors_of(outputs))
    entry->outputs.push_back({t.scalar_type(), t.sizes().vec()});
  entry->results = numbers_of<int>(numbers);
  for (size_t i = 0; i < entry->results.size(); i++) {
    Output& output = entry->outputs.at(entry->results[i]);
    output.sizes = results.at(i).sizes().vec();
    const size_t argument = number ? state.signature.backward.at(number - 1).gives.at(i) : 0;
    const bool of_weight = argument >= static_cast<size_t>(state.signature.arguments);
    output.by_row = !state.signature.exact && !of_weight;
  }
  for (Py_ssize_t i = 0; i < PyList_Size(steps); i++) {
    entry->steps.emplace_back();
    if (!parse_step(PyList_GetItem(steps, i), entry->steps.back())) return nullptr;
    for (const Patch& patch : entry->steps.back().patches)
      if (const size_t operand = patch.operand; operand >= inputs.size())
        entry->outputs.at(operand - inputs.size()).last = i;
  }
  for (const int result : entry->results) entry->outputs[result].last = SIZE_MAX;
  if (dense != Py_None) entry->dense = THPVariable_Unpack(dense);
  entry->owners = Py_NewRef(owners);
  {
    const pybind11::gil_scoped_release other_threads_run;
    const Tensors again = run(*entry, inputs, number ? at::Tensor() : state.bias);
    for (size_t i = 0; i < results.size(); i++)
      if (again[i].sizes() != results[i].sizes() ||
          !at::equal(again[i].view(at::kByte), results[i].view(at::kByte)))
        entry.reset();
  }
  if (!entry) Py_RETURN_FALSE;
  state.entries[number].add(std::move(entry));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// ---- the type ----

// Front(arguments, exact, [(reads, gives), ...], held, bias or None, derivative or None, limit)
PyObject* front_new(PyTypeObject* type, PyObject* args, PyObject*) {
  auto state = std::make_unique<State>();
  PyObject *backward, *held, *bias, *derivative;
  long long limit;
  if (!PyArg_ParseTuple(args, "npOOOOL", &state->signature.arguments, &state->signature.exact,
                        &backward, &held, &bias, &derivative, &limit))
    return nullptr;
  for (Py_ssize_t i = 0; i < PyList_Size(backward); i++) {
    PyObject *reads, *gives;
    if (!PyArg_ParseTuple(PyList_GetItem(backward, i), "OO", &reads, &gives)) return nullptr;
    state->signature.backward.push_back({numbers_of<size_t>(reads), numbers_of<size_t>(gives)});
  }
  state->held = tensors_of(held);
  if (bias != Py_None) state->bias = THPVariable_Unpack(bias);
  if (derivative != Py_None) state->derivative = Py_NewRef(derivative);
  state->entries = std::make_unique<Entries[]>(state->products());
  state->limit = state->left = limit;
  Front* self = reinterpret_cast<Front*>(type->tp_alloc(type, 0));
  self->call = front_call;
  self->state = state.release();
  self->stale = 0;
  return reinterpret_cast<PyObject*>(self);
}

// An owner may hold the weight that holds this object, so the garbage collector must see both.
int front_traverse(PyObject* object, visitproc visit, void* arg) {
  State* state = reinterpret_cast<Front*>(object)->state;
  if (!state) return 0;
  Py_VISIT(state->derivative);
  for (auto& guard : state->guards) {
    Py_VISIT(guard.dict);
    Py_VISIT(guard.name);
    Py_VISIT(guard.object);
  }
  int result = 0;
  for (size_t i = 0; i < state->products(); i++)
    state->entries[i].each([&](const Entry& entry) {
      if (!result && entry.owners) result = visit(entry.owners, arg);
    });
  return result;
}

int front_clear(PyObject* object) {
  State* state = reinterpret_cast<Front*>(object)->state;
  Py_CLEAR(state->derivative);
  std::vector<Guard> guards;
  guards.swap(state->guards);
  for (size_t i = 0; i < state->products(); i++) state->entries[i].swap_out();
  for (auto& guard : guards) {
    Py_XDECREF(guard.dict);
    Py_DECREF(guard.name);
    Py_DECREF(guard.object);
  }
  return 0;
}

void front_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  front_clear(object);
  delete reinterpret_cast<Front*>(object)->state;
  Py_TYPE(object)->tp_free(object);
}

PyObject* front_due(PyObject* object, PyObject*) {  // whether `limit` calls have passed; counts anew
  State& state = *reinterpret_cast<Front*>(object)->state;
  const bool due = state.limit && state.left <= 0;
  if (due) state.left = state.limit;
  return PyBool_FromLong(due);
}

PyMethodDef methods[] = {
    {"guard", front_guard, METH_VARARGS, nullptr},
    {"add", front_add, METH_VARARGS, nullptr},
    {"due", front_due, METH_NOARGS, nullptr},
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
