// A device for tests: "pretend" has its own tensors, allocator, random generator and autograd
// thread, as a GPU has; its memory is the host's, and its kernels are those of the CPU.
//
// It refuses to mix devices, refuses float64 if told so, and counts what costs time on a GPU:
// kernel launches, and synchronisations, where the host waits for a value.
//
// Every operator that the CPU has a kernel for is one launch. Views, and memory that is only
// allocated, are none. The `_foreach_` operators are as many launches as CUDA's would take.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKey;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// ---- what is counted ---------------------------------------------------------------------------

std::atomic<int64_t> launches{0}, synchronisations{0}, allocated{0}, most_allocated{0};
std::atomic<bool> has_float64{true};
void (*on_launch)(const char *) = nullptr;
void (*on_synchronisation)(const char *) = nullptr;

void launched(const char *name, int64_t n = 1) {
  launches += n;
  if (auto call = on_launch) call(name);
}

void synchronised(const char *name) {
  ++synchronisations;
  if (auto call = on_synchronisation) call(name);
}

void check_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(
      has_float64 || (type != at::kDouble && type != at::kComplexDouble),
      "the pretend device has no float64 now; use float32");
}

// ---- memory ------------------------------------------------------------------------------------

c10::Device here() { return c10::Device(kDevice, 0); }

struct Block {
  c10::DataPtr host;
  int64_t bytes;
};

void release(void *block) {
  auto *owned = static_cast<Block *>(block);
  allocated -= owned->bytes;
  delete owned;
}

// Memory of the host, as memory of the device.
c10::DataPtr on_device(c10::DataPtr host, size_t bytes) {
  void *data = host.get();
  auto *block = new Block{std::move(host), static_cast<int64_t>(bytes)};
  const int64_t now = allocated += block->bytes;
  if (now > most_allocated) most_allocated = now;
  return {data, block, &release, here()};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return on_device(c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *to, const void *from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

Tensor with_storage(c10::Storage storage, DispatchKey key, const Tensor &like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto *impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return t;
}

bool is_here(const Tensor &t) { return t.defined() && t.device().type() == kDevice; }

void forget(void *storage) { delete static_cast<c10::Storage *>(storage); }

// The same memory, as a tensor of the host.
Tensor to_host(const Tensor &t) {
  if (!is_here(t)) return t;
  auto *kept = new c10::Storage(t.storage());
  c10::DataPtr data(kept->mutable_data(), kept, &forget, c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t{}, kept->nbytes(), std::move(data),
      c10::GetAllocator(c10::DeviceType::CPU), true);
  return with_storage(std::move(storage), DispatchKey::CPU, t);
}

// A result that the host's kernel has made, as a tensor of the device.
Tensor to_device(const Tensor &t) {
  if (!t.defined() || is_here(t)) return t;
  check_type(t.scalar_type());
  auto *kept = new c10::Storage(t.storage());
  const size_t bytes = kept->nbytes();
  c10::DataPtr data(kept->mutable_data(), kept, &forget, c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t{}, bytes, on_device(std::move(data), bytes), &allocator, true);
  return with_storage(std::move(storage), DispatchKey::PrivateUse1, t);
}

void resize_storage(const c10::Storage &storage, size_t bytes) {
  auto fresh = allocator.allocate(bytes);
  std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// ---- device, guard and generator ---------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, here());
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(here()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void **, const c10::Stream &, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void *, const c10::Stream &) const override {}
  bool queryEvent(void *) const override { return true; }
  void destroyEvent(void *, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream &) const override { return true; }
  void synchronizeStream(const c10::Stream &) const override { synchronised("synchronize"); }
  void synchronizeEvent(void *) const override { synchronised("synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronised("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr &, const c10::Stream &) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The device's generator keeps one of the host's inside, which the kernels draw from.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Generator(at::Generator of)
      : c10::GeneratorImpl(here(), c10::DispatchKeySet(DispatchKey::PrivateUse1)),
        inner(std::move(of)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the pretend device has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the pretend device has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl &state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator *clone_impl() const override { return new Generator(inner.clone()); }
};

const at::Generator &default_generator() {
  static const at::Generator generator =
      at::make_generator<Generator>(at::detail::createCPUGenerator());
  return generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void *) const override { return here(); }
  c10::Allocator *getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
  const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

// While it lives, the host's default generator is in the state of the device's: operators such as
// `native_dropout` have no argument for one.
struct DrawFromDevice {
  at::Generator host = at::detail::getDefaultCPUGenerator();
  c10::intrusive_ptr<c10::TensorImpl> before = host.unsafeGetGeneratorImpl()->get_state();
  DrawFromDevice() {
    host.unsafeGetGeneratorImpl()->set_state(
        *default_generator().unsafeGetGeneratorImpl()->get_state());
  }
  ~DrawFromDevice() {
    default_generator().unsafeGetGeneratorImpl()->set_state(
        *host.unsafeGetGeneratorImpl()->get_state());
    host.unsafeGetGeneratorImpl()->set_state(*before);
  }
};

// ---- kernels -----------------------------------------------------------------------------------

// Operators whose result's size, or result, the host has to wait for.
const std::unordered_set<std::string> waits = {
    "aten::_local_scalar_dense", "aten::nonzero",     "aten::_unique",
    "aten::_unique2",            "aten::unique_dim",  "aten::unique_consecutive",
    "aten::masked_select",       "aten::equal",       "aten::unique_dim_consecutive",
    "aten::bincount",
};
// Operators that take indices or lengths from the host.
const std::unordered_set<std::string> mixes = {
    "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
    "aten::_pack_padded_sequence", "aten::_foreach_copy_",
};

bool has_mask(const c10::IValue &indices) {
  for (const auto &t : indices.toOptionalTensorVector())
    if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte))
      return true;
  return false;
}

// The tensors of one call, each with the host tensor that shares its memory.
struct Twins {
  const c10::OperatorHandle &op;
  std::vector<std::pair<Tensor, Tensor>> pairs;
  bool any_here = false, any_there = false;

  Tensor add(const Tensor &t, bool is_written) {
    if (!t.defined()) return t;
    if (is_here(t)) {
      any_here = true;
      check_type(t.scalar_type());
      pairs.emplace_back(t, to_host(t));
      return pairs.back().second;
    }
    any_there |= t.dim() > 0 || is_written;
    return t;
  }

  void check_devices() const {
    const auto &name = op.schema().name();
    TORCH_CHECK(
        !any_here || !any_there || mixes.count(name),
        "Expected all tensors to be on the same device, but found the pretend one and the CPU (",
        name, ")");
  }

  // Tensors that the kernel has given other memory.
  void bring_back() const {
    for (const auto &[ours, twin] : pairs) {
      if (twin.sizes() == ours.sizes() && twin.data_ptr() == ours.data_ptr()) continue;
      auto *storage = ours.storage().unsafeGetStorageImpl();
      const size_t bytes = twin.storage().nbytes();
      storage->set_data_ptr(on_device(allocator_copy(twin), bytes));
      storage->set_nbytes(bytes);
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(
          twin.sizes(), twin.strides(), twin.storage_offset());
    }
  }

  static c10::DataPtr allocator_copy(const Tensor &twin) {
    const size_t bytes = twin.storage().nbytes();
    auto memory = c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes);
    std::memcpy(memory.get(), twin.storage().data(), bytes);
    return memory;
  }

  Tensor result(const Tensor &t) const {
    if (!t.defined() || is_here(t)) return t;
    for (const auto &[ours, twin] : pairs) {
      if (t.is_same(twin)) return ours;
      if (t.storage().unsafeGetStorageImpl() == twin.storage().unsafeGetStorageImpl())
        return with_storage(ours.storage(), DispatchKey::PrivateUse1, t);
    }
    return to_device(t);
  }
};

// How many launches CUDA needs for lists of so many tensors, of so many lists (read in its
// documentation: so many tensors fit into the arguments of one launch).
int64_t launches_of_lists(size_t lists, size_t tensors) {
  static const int64_t fit[] = {110, 110, 64, 48, 36, 30};
  const int64_t n = fit[std::min<size_t>(lists, 5)];
  return (static_cast<int64_t>(tensors) + n - 1) / n;
}

void run(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  const auto &schema = op.schema();
  const auto &arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  Twins twins{op, {}};
  std::vector<Tensor> written;
  size_t lists = 0, longest = 0;
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded), on_demand = false, masked = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue &value = (*stack)[first + i];
    const auto *alias = arguments[i].alias_info();
    const bool is_written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = twins.add(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &t : value.toTensorVector()) {
        list.push_back(twins.add(t, is_written));
        if (is_written && is_here(t)) written.push_back(t);
      }
      ++lists, longest = std::max(longest, list.size());
      value = list;
    } else if (value.isOptionalTensorList()) {
      masked |= has_mask(value);
      c10::List<std::optional<Tensor>> list;
      for (const auto &t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional(twins.add(*t, is_written)) : std::nullopt);
      value = list;
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device() == here(), "the generator is of another device");
      value = static_cast<Generator *>(generator.unsafeGetGeneratorImpl())->inner;
      draws = false;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      value = c10::Device(c10::DeviceType::CPU);
      on_demand = true;
    }
  }
  twins.check_devices();
  const std::string &name = schema.name();
  const bool is_foreach = name.rfind("aten::_foreach_", 0) == 0;
  if (twins.any_here || on_demand)
    launched(name.c_str(), is_foreach ? launches_of_lists(lists, longest) : 1);
  if (twins.any_here && (waits.count(name) || masked)) synchronised(name.c_str());
  const bool sized = name == "aten::repeat_interleave" && !(*stack)[stack->size() - 1].isNone();
  if (name == "aten::repeat_interleave" && !sized) synchronised(name.c_str());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::optional<DrawFromDevice> drawn;
    if (draws) drawn.emplace();
    op.callBoxed(stack);
  }
  twins.bring_back();
  // for lists, that is up to the device's kernel, as it is on CUDA
  for (const Tensor &t : written) t.unsafeGetTensorImpl()->bump_version();
  if (!twins.any_here && !on_demand) return;
  const size_t begin = stack->size() - schema.returns().size();
  for (size_t i = begin; i < stack->size(); ++i) {
    c10::IValue &value = (*stack)[i];
    if (value.isTensor()) {
      value = twins.result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &t : value.toTensorVector()) list.push_back(twins.result(t));
      value = list;
    }
  }
}

// ---- memory and views --------------------------------------------------------------------------

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device>, std::optional<bool> pin) {
  const auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  check_type(type);
  at::AutoDispatchBelowADInplaceOrView below;
  auto options = at::TensorOptions().dtype(type).layout(layout).device(at::kCPU);
  return to_device(at::empty_strided(size, stride, options));
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  check_type(type);
  at::AutoDispatchBelowADInplaceOrView below;
  auto options = at::TensorOptions().dtype(type).layout(layout).device(at::kCPU);
  return to_device(at::empty(size, options, format));
}

Tensor copy_from(const Tensor &from, const Tensor &to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (is_here(from)) check_type(from.scalar_type());
  if (is_here(to)) check_type(to.scalar_type());
  if (is_here(from) && is_here(to)) {
    launched("aten::copy_");
  } else if (is_here(from) || !non_blocking) {  // to the host, the values are always waited for
    synchronised(is_here(from) ? "copy to the host" : "copy to the device");
  }
  to_host(to).copy_(to_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor &from, const Tensor &to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const Tensor &resize_(
    const Tensor &t, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto *impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const size_t bytes = (impl->storage_offset() + impl->numel()) * t.itemsize();
  if (t.storage().nbytes() < bytes) resize_storage(t.storage(), bytes);
  return t;
}

// ---- operators that a device has to bring ------------------------------------------------------

Tensor convolution(
    const Tensor &x, const Tensor &w, const std::optional<Tensor> &b, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  at::AutoDispatchBelowADInplaceOrView below;
  launched("aten::convolution");
  std::optional<Tensor> bias;
  if (b && b->defined()) bias = to_host(*b);
  return to_device(at::convolution(
      to_host(x), to_host(w), bias, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor &dy, const Tensor &x, const Tensor &w, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  at::AutoDispatchBelowADInplaceOrView below;
  launched("aten::convolution_backward", wanted[0] + wanted[1] + wanted[2]);
  const int64_t channels = transposed ? w.size(1) * groups : w.size(0);
  auto [dx, dw, db] = at::convolution_backward(
      to_host(dy), to_host(x), to_host(w), at::IntArrayRef(channels), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  return {to_device(dx), to_device(dw), to_device(db)};
}

int64_t attention_choice(
    const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &mask,
    double dropout, bool, std::optional<double>, bool shares_heads) {
  constexpr int64_t math = 0, own = 4;
  const bool plain = q.dim() == 4 && q.size(-1) == v.size(-1) && q.numel() && k.numel();
  return plain && dropout == 0 && !shares_heads && !(mask && mask->defined()) ? own : math;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(
    const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &,
    double dropout, bool is_causal, bool, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  launched("attention");
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      to_host(q), to_host(k), to_host(v), dropout, is_causal, std::nullopt, scale);
  return {to_device(out), to_device(lse), Tensor(), Tensor(), q.size(2), k.size(2),
          Tensor(), Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor &dy, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &,
    std::array<bool, 4>, const Tensor &out, const Tensor &lse, const Tensor &, const Tensor &,
    c10::SymInt, c10::SymInt, double dropout, bool is_causal, const Tensor &, const Tensor &,
    std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  launched("attention_backward", 2);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      to_host(dy), to_host(q), to_host(k), to_host(v), to_host(out), to_host(lse), dropout,
      is_causal, std::nullopt, scale);
  return {to_device(dq), to_device(dk), to_device(dv), Tensor()};
}

// ---- registration ------------------------------------------------------------------------------

bool is_view(const c10::FunctionSchema &schema) {
  for (const auto &value : schema.returns())
    if (value.alias_info() && !value.alias_info()->isWrite()) return true;
  return false;
}

const std::unordered_set<std::string> own = {
    "aten::as_strided",   "aten::view",           "aten::_reshape_alias",
    "aten::unfold",       "aten::view_as_real",   "aten::view_as_complex",
    "aten::set_",         "aten::resize_",        "aten::empty",
    "aten::_copy_from",   "aten::empty_strided",  "aten::_copy_from_and_resize",
    "aten::_fused_sdp_choice",
};

// What the CPU has a kernel for, the device has, also where there is a composite of many.
void register_kernels(torch::Library &library) {
  for (const auto &name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || own.count(name.name)) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || is_view(op->schema())) continue;
    const bool by_cpu = op->hasKernelForDispatchKey(DispatchKey::CPU);
    const bool is_foreach = name.name.rfind("aten::_foreach_", 0) == 0;
    if (!by_cpu && !is_foreach) continue;
    std::string full = name.name.substr(6);
    if (!name.overload_name.empty()) full += "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor &, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage", static_cast<Tensor &(*)(Tensor &, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  register_kernels(m);
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

Tensor get_state() { return default_generator().get_state(); }
void set_state(const Tensor &state) {
  at::Generator generator = default_generator();
  generator.set_state(state);
}
void seed(int64_t value) {
  at::Generator generator = default_generator();
  generator.set_current_seed(static_cast<uint64_t>(value));
}

TORCH_LIBRARY(pretend, m) {
  m.def("get_state", &get_state);
  m.def("set_state", &set_state);
  m.def("seed", &seed);
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}

// ---- what Python calls -------------------------------------------------------------------------

extern "C" {
void pretend_register() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
void pretend_reset() { launches = synchronisations = 0; }
int64_t pretend_launches() { return launches; }
int64_t pretend_synchronisations() { return synchronisations; }
int64_t pretend_allocated() { return allocated; }
int64_t pretend_most_allocated() { return most_allocated; }
void pretend_forget_most() { most_allocated = allocated.load(); }
void pretend_set_float64(bool present) { has_float64 = present; }
void pretend_on_launch(void (*call)(const char *)) { on_launch = call; }
void pretend_on_synchronisation(void (*call)(const char *)) { on_synchronisation = call; }
}
