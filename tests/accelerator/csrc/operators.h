// Operators: views and memory by hand, all others as jobs that run the CPU's kernel.
//
// The shapes of results come from the meta device, so the host goes on. Where they depend on data (`nonzero`), it waits,
// as for a GPU.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.h"

namespace sim {

using Values = std::vector<c10::IValue>;
using MaybeTensor = std::optional<at::Tensor>;

inline bool ours(const at::Tensor& x) { return x.defined() && x.device().type() == kDevice; }

inline bool is_number(const at::Tensor& x) { return x.device().is_cpu() && x.dim() == 0; }

inline Stream* stream_of(const at::Tensor& x) { return current_stream(x.device().index()); }

inline size_t extent(const at::Tensor& x) {  // bytes of its storage up to its last element
  if (!x.numel()) return 0;
  int64_t last = x.storage_offset();
  for (int64_t i = 0; i < x.dim(); i++) last += (x.size(i) - 1) * x.stride(i);
  return (last + 1) * x.itemsize();
}

// The same memory as a tensor of the CPU, which does not hold it: a job must not keep memory that was freed.
inline at::Tensor as_host(const at::Tensor& x) {
  auto options = at::TensorOptions().dtype(x.dtype()).device(at::kCPU);
  if (!x.numel()) return at::empty_strided(x.sizes(), x.strides(), options);
  size_t nbytes = x.storage().nbytes();
  TORCH_CHECK(extent(x) <= nbytes, "a tensor of ", x.sizes(), " whose memory was given back");
  c10::DataPtr memory(x.storage().mutable_data(), c10::Device(at::kCPU));
  auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes, std::move(memory), nullptr, false));
  c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  auto found = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, x.dtype());
  found.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
  if (x.is_conj()) found._set_conj(true);
  if (x.is_neg()) found._set_neg(true);
  return found;
}

inline at::Tensor as_meta(const at::Tensor& x) {
  if (is_number(x)) return x;
  return at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta).requires_grad(false));
}

inline void grow(const at::Tensor& x) {
  if (extent(x) > x.storage().nbytes()) hooks.resizePrivateUse1Bytes(x.storage(), extent(x));
}

// A value with `change` done to each tensor in it.
template <class Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& x : value.toTensorVector()) found.push_back(x.defined() ? change(x) : x);
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<MaybeTensor> found;
    for (MaybeTensor x : value.toOptionalTensorList())
      found.push_back(x.has_value() && x->defined() ? MaybeTensor(change(*x)) : std::nullopt);
    return found;
  }
  return value;
}

// Arguments for another device, in whose favour a `device=` among them is changed, too.
template <class Change>
Values moved(const Values& values, c10::Device device, Change change) {
  Values found;
  for (const c10::IValue& value : values) found.push_back(value.isDevice() ? device : changed(value, change));
  return found;
}

inline void run(const c10::OperatorHandle& op, Values& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(&stack);
}

// What an operator would give, as meta tensors; none: it depends on data.
inline Values shapes_of(const c10::OperatorHandle& op, const Values& arguments) {
  Values stack = moved(arguments, at::kMeta, as_meta);
  try {
    run(op, stack);
  } catch (const std::exception&) {
    stack.clear();
  }
  return stack;
}

// For each result, which argument it is; -1: it is new.
inline std::vector<int> written_arguments(const c10::FunctionSchema& schema) {
  std::vector<int> found;
  for (const auto& result : schema.returns()) {
    int which = -1;
    const auto* alias = result.alias_info();
    for (size_t i = 0; alias && i < schema.arguments().size(); i++) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other && other->isWrite() && alias->isWrite() && other->beforeSets() == alias->beforeSets())
        which = static_cast<int>(i);
    }
    TORCH_CHECK(!alias || which >= 0, "the view ", schema.operator_name(), " has no kernel for this device");
    found.push_back(which);
  }
  return found;
}

inline Stream* stream_for(const Values& arguments) {
  int device = -1;
  auto look = [&](const at::Tensor& x) {
    if (device < 0 && ours(x)) device = x.device().index();
    return x;
  };
  for (const c10::IValue& value : arguments) changed(value, look);
  for (const c10::IValue& value : arguments)
    if (device < 0 && value.isDevice()) device = Guard::index_of(value.toDevice());
  return current_stream(device < 0 ? current.device : device);
}

// `out=` tensors without elements get the size of what will be in them.
inline void size_outputs(const c10::OperatorHandle& op, const Values& arguments, const std::vector<int>& written) {
  auto unsized = [&](int i) {
    return i >= 0 && op.schema().arguments()[i].kwarg_only() && arguments[i].isTensor() &&
        ours(arguments[i].toTensor()) && !arguments[i].toTensor().numel();
  };
  if (std::none_of(written.begin(), written.end(), unsized)) return;
  Values shapes = shapes_of(op, arguments);
  for (size_t i = 0; i < shapes.size(); i++) {
    if (!unsized(written[i])) continue;
    at::Tensor out = arguments[written[i]].toTensor(), shape = shapes[i].toTensor();
    out.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
    grow(out);
  }
}

inline void copy_results(const Values& to, const Values& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  for (size_t i = 0; i < to.size(); i++) {
    if (to[i].isTensor() && to[i].toTensor().numel()) to[i].toTensor().copy_(from[i].toTensor());
    if (!to[i].isTensorList()) continue;
    auto into = to[i].toTensorVector(), source = from[i].toTensorVector();
    for (size_t j = 0; j < into.size(); j++)
      if (into[j].numel()) into[j].copy_(source[j]);
  }
}

// Floating-point operations of a matrix product; 0 of all else, which counts as nothing beside it.
inline double flops(const std::string& name, const Values& arguments) {
  size_t first = name == "aten::addmm" || name == "aten::baddbmm" ? 1 : 0;
  if (!first && name != "aten::mm" && name != "aten::bmm") return 0;
  return 2.0 * arguments[first].toTensor().numel() * arguments[first + 1].toTensor().size(-1);
}

inline void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t n = op.schema().arguments().size();
  Values arguments = torch::jit::last(*stack, n).vec();
  torch::jit::drop(*stack, n);
  Stream* stream = stream_for(arguments);
  c10::Device device(kDevice, static_cast<c10::DeviceIndex>(stream->device));
  std::vector<int> written = written_arguments(op.schema());
  size_outputs(op, arguments, written);
  Values on_host = moved(arguments, at::kCPU, [&](const at::Tensor& x) {
    if (ours(x)) return as_host(x);
    if (x.device().is_cpu() && x.dim()) stream->synchronize(stream->place(), "a tensor of the host in " + op.schema().name());
    return x.clone();
  });
  Values results(written.size()), results_on_host(written.size());
  bool fresh = std::any_of(written.begin(), written.end(), [](int which) { return which < 0; });
  Values shapes = fresh ? shapes_of(op, arguments) : Values();
  bool known = !fresh || !shapes.empty();
  for (size_t i = 0; i < written.size(); i++) {
    if (written[i] >= 0) {
      results[i] = arguments[written[i]];
    } else if (known) {
      results[i] = changed(shapes[i], [&](const at::Tensor& x) {
        return at::empty_strided(x.sizes(), x.strides(), x.options().device(device));
      });
      results_on_host[i] = changed(results[i], as_host);
    }
  }
  if (known) {
    auto job = [op, on_host, results_on_host]() mutable {
      run(op, on_host);
      copy_results(results_on_host, on_host);
    };
    stream->push(job, seconds(flops(op.schema().name(), arguments), rates.flops), op.schema().name());
  } else {
    stream->synchronize(stream->place(), "the size of what " + op.schema().name() + " gives");
    run(op, on_host);
    for (size_t i = 0; i < written.size(); i++)
      if (written[i] < 0) results[i] = changed(on_host[i], [&](const at::Tensor& x) { return x.to(device, x.scalar_type(), /*non_blocking=*/true); });
  }
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

// ---- memory and views -----------------------------------------------------------------------------------------------

inline c10::Device on(std::optional<at::Device> device) {
  return {kDevice, static_cast<c10::DeviceIndex>(device ? Guard::index_of(*device) : current.device)};
}

inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(on(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(on(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}

inline at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
inline at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
inline at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
inline at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  grow(self);
  return self;
}

inline at::Tensor& set_storage_and_sizes(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* mine = self.unsafeGetTensorImpl();
  mine->set_storage_keep_dtype(std::move(storage));
  mine->set_storage_offset(offset);
  if (stride.size() == size.size()) {
    mine->set_sizes_and_strides(size, stride);
  } else {
    mine->set_sizes_contiguous(size);
  }
  return self;
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_storage_and_sizes(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t n = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_and_sizes(self, std::move(storage), 0, {n}, {1});
}
inline at::Tensor& set_nothing(at::Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

// ---- copies, and what the host reads --------------------------------------------------------------------------------

// `which`: its name on the clock, where it is between the device and the host.
inline void copy_job(Stream* stream, at::Tensor to, at::Tensor from, const char* which = "") {
  double cost = *which ? seconds(to.numel() * to.itemsize(), rates.copied_bytes) : 0;
  auto job = [to, from]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  };
  stream->push(job, cost, which);
}

inline void between_devices(const at::Tensor& from, const at::Tensor& to) {
  Stream *source = stream_of(from), *target = stream_of(to);
  source->wait_for(target, target->place());
  copy_job(source, as_host(to), as_host(from));
  target->wait_for(source, source->place());
}

// Whether the host may go on while a copy is under way: pinned memory, and both sides alike.
inline bool may_be_late(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& host = ours(from) ? to : from;
  bool alike = from.dtype() == to.dtype() && from.strides() == to.strides() && host.is_non_overlapping_and_dense();
  return non_blocking && alike && host.numel() && pinned_allocator.has(host.storage().data());
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool late = may_be_late(from, to, non_blocking);
  if (ours(from) && ours(to)) {
    between_devices(from, to);
  } else if (ours(to)) {
    Stream* stream = stream_of(to);
    copy_job(stream, as_host(to), late ? as_host(from) : from.clone(), "back");  // pinned memory is read when the copy is done
    if (!non_blocking) stream->synchronize(stream->place(), "a copy to the device");
  } else if (late) {
    copy_job(stream_of(from), as_host(to), as_host(from), "out");
  } else {
    Stream* stream = stream_of(from);
    stream->synchronize(stream->place(), "a copy to the host");
    at::Tensor into = to;
    into.copy_(as_host(from));
  }
  return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar item(const at::Tensor& self) {
  stream_of(self)->synchronize(stream_of(self)->place(), "item");
  return as_host(self).item();
}

inline bool equal(const at::Tensor& self, const at::Tensor& other) {
  stream_of(self)->synchronize(stream_of(self)->place(), "equal");
  return at::equal(as_host(self), ours(other) ? as_host(other) : other);
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("resize_", resize_);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_and_sizes);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("equal", equal);
  library.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

}  // namespace sim
