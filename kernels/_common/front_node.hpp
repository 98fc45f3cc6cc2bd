// What must not change while recordings hold, and the node of autograd that replays them.
//
//   guard      an attribute of the layer is the same tensor object, at the same address, with the
//              same requires_grad, and torch has counted no write to it if the recording read it
//   signature  what an op declares: how many arguments a call has, and for each product of backward
//              the operands that it reads and whose gradients it gives. Operands have numbers:
//              arguments, held tensors (of a weight, with a gradient), results, gradient
//   backward   the entries for dy --> launch --> dx, ..
//                   |
//                   +--> none, create_graph, or a tangent: `derivative`, a function in Python
//
// A node holds the Front that made it.

#pragma once
#include "front.hpp"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <exception>

namespace {

struct Product { std::vector<size_t> reads, gives; };  // numbers of operands
struct Signature {
  Py_ssize_t arguments;
  int exact;  // an entry is for inputs of the same sizes, not only for as many rows
  std::vector<Product> backward;
};
struct Guard {
  PyObject *dict, *name, *object;
  void* address;
  int64_t version;  // -1: writes do not matter, because every call reads the tensor
  bool requires_grad, is_tensor;
  // From the object, because torch hides from the garbage collector what C++ holds.
  const at::Tensor& tensor() const { return THPVariable_Unpack(object); }
};
struct State {
  Signature signature;
  Tensors held;     // that may have a gradient
  at::Tensor bias;  // or undefined
  PyObject* derivative = nullptr;  // nullptr: calls that need a gradient are not for this object
  std::vector<Guard> guards;
  std::unique_ptr<Entries[]> entries;  // of forward, and of each product of backward
  int64_t left, limit;  // calls until the layer must look again; a limit of 0: never
  size_t inputs() const { return signature.arguments + held.size(); }
  size_t products() const { return 1 + signature.backward.size(); }
};
struct Front {
  PyObject_HEAD
  vectorcallfunc call;
  State* state;
  char stale;  // a guard failed: this object must be replaced
};

bool has_forward_gradient(const at::Tensor& t) {
  auto* meta = t.unsafeGetTensorImpl()->autograd_meta();
  return meta && meta->fw_grad(0, t).defined();
}

bool guards_hold(const State& state) {
  for (const auto& guard : state.guards) {
    if (guard.dict) {
      PyObject* item = PyDict_GetItem(guard.dict, guard.name);
      if ((item ? item : Py_None) != guard.object) return false;
    }
    if (!guard.is_tensor) continue;
    const at::Tensor& t = guard.tensor();
    if (t.data_ptr() != guard.address || t.requires_grad() != guard.requires_grad) return false;
    if (guard.version >= 0 && static_cast<int64_t>(t._version()) != guard.version) return false;
    if (has_forward_gradient(t)) return false;
  }
  return true;
}

// Whether nothing that the recordings read was written or moved; it does not look into dicts.
bool contents_hold(const State& state) {
  for (const auto& guard : state.guards) {
    if (!guard.is_tensor || guard.version < 0) continue;
    const at::Tensor& t = guard.tensor();
    if (t.data_ptr() != guard.address || static_cast<int64_t>(t._version()) != guard.version)
      return false;
  }
  return true;
}

bool needs_gradient(const State& state, at::TensorList arguments) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const auto& t : arguments)
    if (t.requires_grad()) return true;
  for (const auto& guard : state.guards)
    if (guard.is_tensor && guard.tensor().requires_grad()) return true;
  return false;
}

// ---- autograd ----

// Returns a tensor at the address of a Front, which it owns: a node of autograd saves it as data,
// because compiled autograd accepts tensors and numbers there, but no objects.
at::Tensor handle_of(Front* front) {
  Py_INCREF(front);
  const auto free = [](void* address) { release(static_cast<PyObject*>(address)); };
  return at::from_blob(front, {1}, free, at::kByte);
}

Front* front_of(const at::Tensor& handle) { return static_cast<Front*>(handle.data_ptr()); }

// Finds the gradients that are needed. Returns false if there is no entry for one of them, or if the
// weight is not as the recordings read it.
//   operands  arguments, held tensors, results and gradient; those that nothing reads are undefined
bool replay(State& state, Tensors operands, const std::vector<bool>& needed, Tensors& gradients) {
  const at::Tensor& gradient = operands.back();
  Layout layout;
  Place place;
  if (!thread_is_ready() || !layout_of(gradient, state.signature.exact, layout)) return false;
  if (!place_of(gradient, place) || captures(place.stream) || !contents_hold(state)) return false;
  const auto& products = state.signature.backward;
  std::vector<std::shared_ptr<Entry>> entries(products.size());
  std::vector<bool> copied(operands.size());
  const auto inputs_of = [&](const Product& product) {
    Operands inputs;
    for (const size_t i : product.reads) inputs.push_back(operands[i]);
    return inputs;
  };
  for (size_t p = 0; p < products.size(); p++) {
    bool is_needed = false;
    for (const size_t i : products[p].gives) is_needed |= needed[i];
    if (!is_needed) continue;
    Layouts layouts;
    for (const size_t i : products[p].reads) {
      if (!layout_of(operands[i], state.signature.exact, layout)) return false;
      copied[i] = layout.copied;
      layouts.push_back(layout);
    }
    entries[p] = state.entries[1 + p].find(layouts, inputs_of(products[p]), place);
    if (!entries[p]) return false;
  }
  for (size_t i = 0; i < operands.size(); i++)
    if (copied[i]) operands[i] = copy_of(operands[i]);
  for (size_t p = 0; p < products.size(); p++) {
    if (!entries[p]) continue;
    Tensors results = run(*entries[p], inputs_of(products[p]), at::Tensor());
    for (size_t i = 0; i < results.size(); i++)
      if (needed[products[p].gives[i]]) gradients[products[p].gives[i]] = std::move(results[i]);
  }
  return true;
}

// Calls derivative(front, gradient, [operand or None, ...], [whether its gradient is needed, ...]),
// which returns a gradient or None for each argument and held tensor.
void differentiate(Front* front, const Tensors& operands, const std::vector<bool>& needed,
                   Tensors& gradients) {
  const pybind11::gil_scoped_acquire gil;
  const size_t count = operands.size() - 1;
  PyObject *saved = PyList_New(count), *needs = PyList_New(needed.size());
  for (size_t i = 0; i < count; i++)  // an undefined tensor becomes None
    PyList_SET_ITEM(saved, i, THPVariable_Wrap(operands[i]));
  for (size_t i = 0; i < needed.size(); i++)
    PyList_SET_ITEM(needs, i, PyBool_FromLong(needed[i]));
  PyObject* result = PyObject_CallFunction(front->state->derivative, "ONNN", front,
                                           THPVariable_Wrap(operands.back()), saved, needs);
  PyObject* items = result ? PySequence_Fast(result, "expected a sequence of gradients") : nullptr;
  Py_XDECREF(result);
  if (items && PySequence_Fast_GET_SIZE(items) != static_cast<Py_ssize_t>(needed.size())) {
    PyErr_SetString(PyExc_ValueError, "expected a gradient or None for each operand");
    Py_CLEAR(items);
  }
  if (!items) {
    python_error error;
    error.persist();
    throw error;
  }
  for (size_t i = 0; i < needed.size(); i++) {
    PyObject* item = PySequence_Fast_GET_ITEM(items, i);
    if (item != Py_None && needed[i]) gradients[i] = THPVariable_Unpack(item);
  }
  Py_DECREF(items);
}

struct Call {
  const Entry& entry;
  at::TensorList inputs;
  const at::Tensor handle;
  Tensors results;  // without the first, which alone has a gradient
};

struct Node : torch::autograd::Function<Node> {
  using Context = torch::autograd::AutogradContext;

  // variables: arguments, held tensors, and a bias
  static at::Tensor forward(Context* context, at::TensorList variables, Call* call) {
    const State& state = *front_of(call->handle)->state;
    Tensors results = run(call->entry, call->inputs, state.bias);
    Tensors kept(state.inputs() + results.size());
    for (const Product& product : state.signature.backward) {
      bool is_needed = false;
      for (const size_t i : product.gives) is_needed |= variables[i].requires_grad();
      if (!is_needed) continue;
      for (const size_t i : product.reads)
        if (i < kept.size()) kept[i] = i < state.inputs() ? variables[i] : results[i - state.inputs()];
    }
    context->save_for_backward(std::move(kept));
    context->saved_data["front"] = call->handle;
    at::Tensor y = std::move(results[0]);
    call->results.assign(results.begin() + 1, results.end());
    return y;
  }

  static Tensors backward(Context* context, Tensors gradients) {
    const at::Tensor handle = context->saved_data["front"].toTensor(), dy = gradients[0];
    Front* front = front_of(handle);
    State& state = *front->state;
    const size_t count = state.inputs(), bias = state.bias.defined();
    Tensors operands = context->get_saved_variables(), given(count + bias + 1);
    operands.push_back(dy);
    std::vector<bool> needed(count);
    bool any = false;
    for (size_t i = 0; i < count; i++) {
      needed[i] = context->needs_input_grad(i);
      any |= needed[i];
    }
    if (bias && context->needs_input_grad(count)) {
      const auto type = state.bias.scalar_type();
      given[count] = dy.dim() < 2 ? dy.to(type) : dy.flatten(0, -2).sum(0, false, type);
    }
    const bool again = c10::GradMode::is_enabled() || has_forward_gradient(dy);
    if (any && (again || !replay(state, operands, needed, given)))
      differentiate(front, operands, needed, given);
    return given;
  }
};

}  // namespace
