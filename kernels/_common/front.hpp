// Recorded launches.
//
//   entry   for one product, a layout of its inputs, a stream and a state of the dispatcher:
//             inputs   tensors that it reads; their addresses may differ
//             outputs  tensors that the steps write; some are the results
//             steps    launches as the bytes of their arguments, and the places of the addresses
//
// Arguments are copied for each call, so threads do not share them. The functions of the driver come
// as addresses, so this file needs no CUDA header, and a test can use other functions.

#pragma once
#define PY_SSIZE_T_CLEAN

#include <ATen/core/Tensor.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/mm_ops.h>
#include <Python.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
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

constexpr size_t MOST = 64;  // entries of a product; the oldest makes room
constexpr size_t IMAGE_BYTES = 8192, PARAMETERS = 64, DIMENSIONS = 5;
constexpr uintptr_t ALIGNMENT = 16;  // bytes: of addresses and strides
using Tensors = std::vector<at::Tensor>;
using Operands = c10::SmallVector<at::Tensor, 8>;  // of a call, without an allocation

// How kernels read a tensor, or a copy of it if they cannot read its layout.
struct Layout {
  at::ScalarType dtype;
  c10::Device device{c10::kCPU};
  c10::DispatchKeySet keys;
  std::array<int64_t, DIMENSIONS + 1> sizes{};  // rows, columns and stride; exact: all sizes
  bool copied = false;
  bool operator==(const Layout& other) const {
    return sizes == other.sizes && dtype == other.dtype && device == other.device &&
           keys == other.keys;
  }
};
using Layouts = c10::SmallVector<Layout, 4>;

// Returns the elements from a row to the next, or 0 if a kernel cannot read the rows where they are.
int64_t stride_of(at::IntArrayRef sizes, at::IntArrayRef strides, size_t element) {
  const size_t last = sizes.size() - 1;
  const int64_t columns = sizes[last];
  if (strides[last] != 1) return 0;
  int64_t stride = columns, next = 0;  // of a single row; what the next dimension's must be
  for (size_t i = last; i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (next ? strides[i] != next : strides[i] < columns) return 0;
    if (!next) stride = strides[i];
    next = strides[i] * sizes[i];
  }
  return stride == columns || stride * element % ALIGNMENT == 0 ? stride : 0;
}

// Returns false if a kernel can read neither the tensor nor a copy, as in vmap.
bool layout_of(const at::Tensor& t, bool exact, Layout& out) {
  if (!t.defined()) return false;
  out = {t.scalar_type(), t.device(), t.key_set()};
  if (out.keys.has_any(c10::python_ks) || !t.has_storage() || t.layout() != at::kStrided)
    return false;
  const at::IntArrayRef sizes = t.sizes();
  const int64_t count = t.numel(), columns = sizes.empty() ? 0 : sizes.back();
  if (!count || !columns) return false;
  const bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % ALIGNMENT == 0;
  if (exact) {
    if (sizes.size() > DIMENSIONS) return false;
    out.sizes[DIMENSIONS] = static_cast<int64_t>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), out.sizes.begin());
    out.copied = !aligned || !t.is_contiguous();
  } else {
    const int64_t stride = aligned ? stride_of(sizes, t.strides(), t.element_size()) : 0;
    out.sizes = {count / columns, columns, stride ? stride : columns};
    out.copied = !stride;
  }
  return true;
}

at::Tensor copy_of(const at::Tensor& t) {
  const c10::AutoGradMode no_gradient(false);
  return t.clone(at::MemoryFormat::Contiguous);
}

// Where a call runs: its stream, and this thread's modes, autocast and transforms.
struct Place {
  void* stream = nullptr;
  c10::DispatchKeySet included, excluded;
  bool operator==(const Place& other) const {
    return stream == other.stream && included == other.included && excluded == other.excluded;
  }
};

// Returns false if the stream is unknown, or the device is not the current one.
bool place_of(const at::Tensor& t, Place& out) {
  const c10::Device device = t.device();
  if (device.is_cuda() && c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice() != device)
    return false;
  const auto local = c10::impl::tls_local_dispatch_key_set();
  out.included = local.included_;
  out.excluded = local.excluded_;
  return !current_stream(static_cast<int32_t>(device.index()), &out.stream);
}

bool captures(void* stream) {
  int status = 0;
  return is_capturing(stream, &status) || status;
}

// The path in Python gives each thread its context, so the first call of a thread takes that path.
bool thread_is_ready() {
  thread_local bool ready = false;
  return std::exchange(ready, true);
}

// Releases a reference from any thread, also after Python has ended.
void release(PyObject* object) {
  if (!object || !Py_IsInitialized()) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(object);
  PyGILState_Release(state);
}

struct Patch { int operand; int64_t start; uint32_t offset; };  // start: bytes into the operand
struct Step {
  void* function;  // nullptr: torch computes the last operand of `patches` from those before it
  at::Tensor weight;  // and from this one, if it is defined
  uint32_t grid, threads, shared_bytes;  // grid 0: the function is cublasLtMatmul
  std::vector<Attribute> attributes;
  std::vector<char> image;
  std::vector<uint32_t> parameters;  // their offsets in the image
  std::vector<Patch> patches;
};
struct Output {
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  bool by_row = false;  // it has the leading sizes of the first input
  size_t last = SIZE_MAX;  // step that reads or writes it last; of results none
};
struct Entry {
  Layouts inputs;
  std::vector<const void*> fixed;  // address of an input that no launch reads, else nullptr
  Place place;
  std::vector<Output> outputs;
  std::vector<int> results;  // their numbers as outputs
  std::vector<Step> steps;
  at::Tensor dense;  // no launch was recorded; torch multiplies by this weight
  PyObject* owners = nullptr;  // of the other memory that the launches read
  Entry() = default;
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() { release(owners); }
  bool reads(at::TensorList others) const {
    for (size_t i = 0; i < fixed.size(); i++)
      if (fixed[i] && fixed[i] != others[i].data_ptr()) return false;
    return true;
  }
};

// The entries of one product. Autograd's threads read them without Python's lock. No thread waits
// for that lock, and no entry is destroyed, while it holds the mutex.
class Entries {
 public:
  std::shared_ptr<Entry> find(const Layouts& layouts, at::TensorList inputs, const Place& place) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : entries_)
      if (entry->inputs == layouts && entry->place == place && entry->reads(inputs)) return entry;
    return nullptr;
  }
  void add(std::shared_ptr<Entry> entry) {
    std::shared_ptr<Entry> oldest;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.size() == MOST) {
      oldest = std::move(entries_.front());
      entries_.erase(entries_.begin());
    }
    entries_.push_back(std::move(entry));
  }
  std::vector<std::shared_ptr<Entry>> swap_out() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::move(entries_);
  }
  template <class F>
  void each(F&& visit) {  // with Python's lock, so nothing adds meanwhile
    for (const auto& entry : entries_) visit(*entry);
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Entry>> entries_;
};

at::Tensor as_matrix(const at::Tensor& t) { return t.dim() == 2 ? t : t.view({-1, t.size(-1)}); }
at::Tensor as_batch(const at::Tensor& t) { return t.view({-1, t.size(-2), t.size(-1)}); }

// The blocks of one operand transposed, or the product of two operands, or of one and a weight. An
// image is the factor of products of batches.
void compute_by_torch(const Step& step, at::TensorList operands) {
  const auto operand = [&](size_t i) { return operands[step.patches[i].operand]; };
  at::Tensor to = operand(step.patches.size() - 1);
  if (step.weight.defined()) {
    to = as_matrix(to);
    at::_ops::mm_out::call(as_matrix(operand(0)), step.weight, to);
  } else if (step.patches.size() == 2) {
    at::_ops::copy_::call(to, operand(0).transpose(1, 2), false);
  } else if (!step.image.empty()) {
    double alpha;
    std::memcpy(&alpha, step.image.data(), sizeof alpha);
    to = as_batch(to);
    const at::Tensor b = as_batch(operand(1)).transpose(1, 2);
    at::_ops::baddbmm_out::call(to, as_batch(operand(0)), b, 0, alpha, to);  // 0 times `to`
  } else {
    to = as_matrix(to);
    at::_ops::mm_out::call(as_matrix(operand(0)), operand(1), to);
  }
}

// cublasLtMatmul, whose last argument is the stream.
void call_library(const Step& step, const char* image, void* stream) {
  using Word = uintptr_t;
  using Function = int (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                           Word, Word, Word, void*);
  std::array<Word, 15> a;
  std::memcpy(a.data(), image, sizeof a);
  if (int result = reinterpret_cast<Function>(step.function)(
          a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
          a[14], stream))
    throw std::runtime_error("cublasLtMatmul: status " + std::to_string(result));
}

void launch(const Step& step, at::TensorList operands, void* stream) {
  if (!step.function) return compute_by_torch(step, operands);
  alignas(64) char image[IMAGE_BYTES];
  std::memcpy(image, step.image.data(), step.image.size());
  for (const Patch& patch : step.patches) {
    const void* address = static_cast<char*>(operands[patch.operand].data_ptr()) + patch.start;
    std::memcpy(image + patch.offset, &address, sizeof address);
  }
  if (!step.grid) return call_library(step, image, stream);
  void* parameters[PARAMETERS];
  for (size_t i = 0; i < step.parameters.size(); i++) parameters[i] = image + step.parameters[i];
  Config config{{step.grid, 1, 1}, {step.threads, 1, 1}, step.shared_bytes, stream,
                const_cast<Attribute*>(step.attributes.data()),
                static_cast<uint32_t>(step.attributes.size())};
  if (int result = launch_kernel(&config, step.function, parameters, nullptr))
    throw std::runtime_error("launch of " + std::to_string(step.grid) + " CTAs of " +
                             std::to_string(step.threads) + ": error " + std::to_string(result));
}

at::Tensor empty_output(const Output& output, const at::Tensor& x) {
  at::IntArrayRef sizes = output.sizes;
  c10::SmallVector<int64_t, DIMENSIONS> of_rows;
  if (output.by_row && x.dim() != 2) {
    of_rows.assign(x.sizes().begin(), x.sizes().end());
    of_rows.back() = sizes.back();
    sizes = of_rows;
  }
  return at::empty(sizes, x.options().dtype(output.dtype).requires_grad(false));
}

// Returns the results; a bias is added to the first.
Tensors run(const Entry& entry, at::TensorList inputs, const at::Tensor& bias) {
  const c10::AutoGradMode no_gradient(false);
  const at::Tensor& x = inputs[0];
  Tensors results;
  if (entry.dense.defined()) {
    results.push_back(at::_ops::linear::call(x, entry.dense, std::nullopt));
  } else {
    Operands operands(inputs.begin(), inputs.end());
    operands.resize(inputs.size() + entry.outputs.size());
    for (size_t i = 0; i < entry.steps.size(); i++) {  // outputs exist only while steps need them
      for (const Patch& patch : entry.steps[i].patches)
        if (at::Tensor& t = operands[patch.operand]; !t.defined())
          t = empty_output(entry.outputs[patch.operand - inputs.size()], x);
      launch(entry.steps[i], operands, entry.place.stream);
      for (size_t j = 0; j < entry.outputs.size(); j++)
        if (entry.outputs[j].last == i) operands[inputs.size() + j].reset();
    }
    for (const int number : entry.results)
      results.push_back(std::move(operands[inputs.size() + number]));
  }
  if (bias.defined()) at::_ops::add__Tensor::call(results[0], bias, 1);
  return results;
}

}  // namespace
