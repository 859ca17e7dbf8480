// The "sim" devices as a PyTorch backend: real tensors with their own dispatch key, device index, allocator and random
// generators, whose operators run the CPU's kernels on the very same memory. Everything that makes several accelerators
// different from one CPU is real (device errors, copies, one autograd thread per device); only the arithmetic is borrowed.

// No text is made with std::ostream. PyTorch's libraries export parts of the libstdc++ that they were built with, so a
// stream of this file would be made by theirs and used by the system's: with torch 2.11+cu130 on one machine, every
// number that was written to one ended the process. The checks in PyTorch's headers then tell their condition alone.
#define STRIP_ERROR_MESSAGES

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

// ---- errors ----

std::string text(const char* part) { return part; }
std::string text(const std::string& part) { return part; }
std::string text(int64_t part) { return std::to_string(part); }
std::string text(c10::Device part) { return part.str(); }

template <typename... Parts>
std::string joined(const Parts&... parts) {
  std::string all;
  (all.append(text(parts)), ...);
  return all;
}

// TORCH_CHECK writes its message, even one string, to a std::ostringstream.
#define SIM_CHECK(error, condition, ...) \
  if (C10_UNLIKELY(!(condition))) C10_THROW_ERROR(error, joined(__VA_ARGS__))

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;  // autograd starts one thread for each, once per process
const c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);

// ---- memory: every storage is counted once, where it lives ----

struct Ledger {
  int64_t live = 0, peak = 0, capacity = 0;
  double busy = 0, bytes_per_second = 1;  // the time model: an operator takes what its operands and results weigh
};

std::mutex mutex;  // guards ledgers and traffic
std::array<Ledger, kMaxDevices> ledgers;
std::atomic<int> num_devices{1};

void claim(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& ledger = ledgers.at(device);
  SIM_CHECK(
      OutOfMemoryError, ledger.capacity == 0 || ledger.live + bytes <= ledger.capacity,
      "sim:", device, " out of memory, as CUDA out of memory. Tried to allocate ", bytes, " bytes. The device has a capacity of ",
      ledger.capacity, " bytes, of which ", ledger.capacity - ledger.live, " are free.");
  ledger.live += bytes;
  ledger.peak = std::max(ledger.peak, ledger.live);
}

double link_bytes_per_second = 0, link_latency = 0;  // 0: copies take no time

void charge_copy(int device, int64_t bytes) {
  if (device < 0) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (link_bytes_per_second > 0) {
    ledgers.at(device).busy += link_latency + static_cast<double>(bytes) / link_bytes_per_second;
  }
}

void charge(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& ledger = ledgers.at(device);
  ledger.busy += static_cast<double>(bytes) / ledger.bytes_per_second;
}

void release(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  ledgers.at(device).live -= bytes;
}

// What a sim storage holds: CPU memory that it owns, and its entry in the ledger.
struct Block {
  c10::DataPtr memory;
  c10::Storage adopted;  // the CPU result that the memory came with, if any
  int device;
  int64_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  release(block->device, block->bytes);
  delete block;
}

// What a CPU view of a sim storage holds: the storage.
void free_alias(void* context) {
  delete static_cast<c10::Storage*>(context);
}

thread_local int current_device = 0;

c10::DataPtr allocate_on(int device, size_t bytes) {
  claim(device, bytes);
  auto* block = new Block{c10::GetCPUAllocator()->allocate(bytes), c10::Storage(), device, static_cast<int64_t>(bytes)};
  return {block->memory.get(), block, &free_block, c10::Device(kSim, device)};
}

struct SimAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

SimAllocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

// Page-locked memory is ordinary memory that remembers having been asked for.
std::map<const char*, size_t> pinned;

void free_pinned(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<const char*>(pointer));
  }
  c10::GetCPUAllocator()->raw_deallocate(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* pointer = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> lock(mutex);
    pinned[static_cast<const char*>(pointer)] = bytes;
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < start + bytes;
}

// ---- devices ----

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSim, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    SIM_CHECK(
        Error, device.index() < num_devices, "There is no ", device, ": ", num_devices.load(), " devices are simulated.");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  // Autograd asks once per process, so the answer must cover whatever is simulated later.
  c10::DeviceIndex deviceCount() const noexcept override { return kMaxDevices; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

std::array<at::Generator, kMaxDevices>& generators() {
  static auto made = [] {
    std::array<at::Generator, kMaxDevices> all;
    for (auto& generator : all) generator = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
    return all;
  }();
  return made;
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { SimGuard().setDevice({kSim, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return SimGuard().exchangeDevice({kSim, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generators().at(device < 0 ? current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = allocate_on(storage.device().index(), bytes);
    std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- from a sim tensor to a CPU tensor on the same memory, and back ----

at::Tensor shaped(at::Tensor made, const at::Tensor& like) {
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (made.is_conj() != like.is_conj()) made._set_conj(like.is_conj());
  if (made.is_neg() != like.is_neg()) made._set_neg(like.is_neg());
  return made;
}

at::Tensor tensor_on(const c10::Storage& storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  return shaped(at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype()), like);
}

at::Tensor view_on(const c10::Storage& storage, const at::Tensor& base, caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(storage), base.key_set(), dtype);
}

at::Tensor to_host(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(
      storage.mutable_data(), new c10::Storage(storage), &free_alias, c10::Device(c10::DeviceType::CPU));
  c10::Storage alias(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
  return tensor_on(alias, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
}

c10::Storage storage_for(const at::Tensor& host, int device) {
  const auto& storage = host.storage();
  if (storage.data_ptr().get_deleter() == &free_alias) {
    return *static_cast<c10::Storage*>(storage.data_ptr().get_context());  // a view of an input
  }
  auto bytes = static_cast<int64_t>(storage.nbytes());
  claim(device, bytes);
  auto* block = new Block{c10::DataPtr(), storage, device, bytes};
  c10::DataPtr data(storage.mutable_data(), block, &free_block, c10::Device(kSim, device));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), &allocator, /*resizable=*/true);
}

// After an operator wrote to `host`, which stood for `tensor`: its memory and shape may be new.
void take_over(const at::Tensor& tensor, const at::Tensor& host, int device) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (host.storage().data_ptr().get_deleter() != &free_alias) impl->set_storage_keep_dtype(storage_for(host, device));
  if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides()) {
    impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
}

// ---- any operator: the CPU's kernel on aliases of the arguments ----

bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_pack_padded_sequence"};
  return names.count(name) != 0;
}

struct Call {
  const c10::FunctionSchema& schema;
  int device = -1;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs{};  // sim tensor, its CPU alias

  void see(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kSim) {
      SIM_CHECK(
          Error, device == -1 || device == tensor.device().index(),
          "Expected all tensors to be on the same device, but found at least two devices, sim:", device, " and ",
          tensor.device(), "! (when checking arguments of ", schema.name(), ")");
      device = tensor.device().index();
    }
  }

  void refuse_host(const at::Tensor& tensor) const {
    SIM_CHECK(
        Error,
        !tensor.defined() || tensor.device().type() == kSim || tensor.dim() == 0 || takes_host_tensors(schema.name()),
        "Expected all tensors to be on the same device, but found at least two devices, sim:", device, " and ",
        tensor.device(), "! (when checking arguments of ", schema.name(), ")");
  }

  at::Tensor host(const at::Tensor& tensor) {
    refuse_host(tensor);
    if (!tensor.defined() || tensor.device().type() != kSim) return tensor;
    for (const auto& [known, alias] : pairs) {
      if (known.is_same(tensor)) return alias;
    }
    pairs.emplace_back(tensor, to_host(tensor));
    return pairs.back().second;
  }

  at::Tensor sim(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& [known, alias] : pairs) {
      if (alias.is_same(result)) return known;
    }
    auto storage = storage_for(result, device);
    for (const auto& [known, alias] : pairs) {
      // A view of an input is, or is not, an inference tensor as its input is.
      if (known.storage().is_alias_of(storage)) return shaped(view_on(storage, known, result.dtype()), result);
    }
    return tensor_on(storage, kSimKeys, result);
  }
};

template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) visit(item.toTensor());
    }
  }
}

template <typename Change>
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& item : value.toTensorVector()) list.push_back(change(item));
    return list;
  }
  if (value.isList() && value.toList().elementType()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& item : value.toListRef()) {
      list.push_back(item.isTensor() ? std::optional<at::Tensor>(change(item.toTensor())) : std::nullopt);
    }
    return list;
  }
  return value;
}

int64_t weight(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call{schema};
  bool seeded = false;
  int64_t touched = 0;
  const size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  for (size_t i = first; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      call.see(tensor);
      touched += weight(tensor);
    });
    if ((*stack)[i].isDevice() && (*stack)[i].toDevice().type() == kSim && call.device == -1) {
      auto index = (*stack)[i].toDevice().index();
      call.device = index < 0 ? current_device : index;
    }
  }
  if (call.device < 0) call.device = current_device;
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (argument.name() == "pin_memory") {
      value = c10::IValue();
    } else if (argument.name() == "generator") {
      seeded = true;
      if (value.isNone()) value = generators().at(call.device);
    } else {
      value = changed(value, [&](const at::Tensor& tensor) { return call.host(tensor); });
    }
  }
  SIM_CHECK(
      NotImplementedError, seeded || !op.hasTag(at::Tag::nondeterministic_seeded), schema.name(),
      " draws random numbers without a generator argument; simulated devices do not support it.");
  // These use their result for a larger tensor in between, and warn unless it is empty.
  const bool loss = schema.name() == "aten::mse_loss" || schema.name() == "aten::smooth_l1_loss";
  if (loss && schema.overload_name() == "out") stack->back().toTensor().resize_({0});
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (const auto& [tensor, alias] : call.pairs) take_over(tensor, alias, call.device);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    const auto& returned = schema.returns()[i - (stack->size() - schema.returns().size())];
    if (!returned.alias_info()) {  // what an operator writes into was counted among its arguments
      for_each_tensor((*stack)[i], [&](const at::Tensor& result) { touched += weight(result); });
    }
    (*stack)[i] = changed((*stack)[i], [&](const at::Tensor& result) { return call.sim(result); });
  }
  if (!is_view(schema)) charge(call.device, touched);
}

// ---- what a device must do itself: allocate and copy ----

c10::Device placed(std::optional<c10::Device> device) {
  auto wanted = device.value_or(c10::Device(kSim, current_device));
  auto index = wanted.has_index() ? wanted.index() : static_cast<c10::DeviceIndex>(current_device);
  SIM_CHECK(
      Error, index < num_devices, "There is no sim:", index, ": ", num_devices.load(), " devices are simulated.");
  return {kSim, index};
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(size, &allocator, kSimKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, kSimKeys, c10::dtype_or_default(dtype));
}

// Zeros without memory, which forward-mode derivatives begin with; PyTorch makes real ones of them where it must.
at::Tensor efficient_zeros(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  auto nothing = at::native::ZeroTensorAllocator(placed(device));
  auto keys = kSimKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &nothing, keys, c10::dtype_or_default(dtype), std::nullopt);
}

struct Copies {
  int64_t count = 0, bytes = 0;
};
std::map<std::tuple<int, int, std::string>, Copies> traffic;  // source, target (-1 is the host), maker
using Observer = void (*)(char* name, int size);
std::atomic<Observer> observer{nullptr};  // asks Python who is copying

std::string maker() {
  char name[256] = "";
  if (auto ask = observer.load()) ask(name, sizeof(name));
  return name;
}

at::Tensor& copy_(at::Tensor& target, const at::Tensor& source, bool) {
  auto index_of = [](const at::Tensor& tensor) {
    return tensor.device().type() == kSim ? static_cast<int>(tensor.device().index()) : -1;
  };
  if (index_of(target) != index_of(source)) {
    auto name = maker();
    std::lock_guard<std::mutex> lock(mutex);
    auto& entry = traffic[{index_of(source), index_of(target), name}];
    entry.count += 1;
    entry.bytes += static_cast<int64_t>(source.nbytes());
  }
  if (index_of(target) != index_of(source)) {
    for (int end : {index_of(source), index_of(target)}) charge_copy(end, static_cast<int64_t>(source.nbytes()));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  auto host = index_of(target) < 0 ? target : to_host(target);
  host.copy_(index_of(source) < 0 ? source : to_host(source));
  return target;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto written = target;
  return copy_(written, source, non_blocking);
}

void record_stream(at::Tensor&, c10::Stream) {}

at::Tensor& set_view(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = stride.empty() ? c10::contiguous_strides(sizes) : c10::DimVector(C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  auto rows = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_view(self, std::move(storage), 0, {rows}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_view(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

// The CPU's own fused dropout would draw from the process-wide generator.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double rate, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - rate);
  return {input.mul(mask).mul_(rate < 1 ? 1 / (1 - rate) : 0.0), mask};
}

// GPUs count integers, too, such as the experts that tokens go to; the CPU's kernel does not.
at::Tensor histogram(const at::Tensor& input, int64_t bins, const at::Scalar& least, const at::Scalar& largest) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto host = to_host(input);
  if (c10::isIntegralType(host.scalar_type(), false)) host = host.to(at::kDouble);
  auto counts = at::empty({bins}, input.options());
  to_host(counts).copy_(at::histc(host, bins, least, largest));
  return counts;
}

// As between the CPU and CUDA: Module.to keeps its Parameter objects, and tied weights stay tied.
bool dense(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided &&
      (tensor.device().type() == kSim || tensor.device().type() == c10::DeviceType::CPU);
}

bool shallow_copies(const at::Tensor& self, const at::Tensor& from) {
  return dense(self) && dense(from);
}

// PyTorch takes fused recurrent cells for granted on every accelerator; written with operators that differentiate.
using Bias = const std::optional<at::Tensor>&;

at::Tensor with_bias(const at::Tensor& gates, Bias bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell, Bias input_bias,
    Bias hidden_bias) {
  auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  auto next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, at::empty({0}, next.options())};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden, Bias input_bias,
    Bias hidden_bias) {
  auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (from_hidden[0] + from_input[0]).sigmoid(), update = (from_hidden[1] + from_input[1]).sigmoid();
  auto fresh = (from_input[2] + from_hidden[2] * reset).tanh();
  return {(hidden - fresh) * update + fresh, at::empty({0}, fresh.options())};
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", shallow_copies);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", dropout);
  m.impl("histc", histogram);
  m.impl("_has_compatible_shallow_copy_type", shallow_copies);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  // The CPU has a kernel of its own for these; the device-independent ones would compute, and keep, something else.
  for (auto name :
       {"convolution", "convolution_backward", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
        "native_group_norm_backward", "native_dropout_backward", "embedding", "gelu", "silu",
        "_fused_sdp_choice", "linalg_vector_norm"}) {
    try {
      m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
    } catch (const c10::Error&) {
      // This version of PyTorch has no such operator, so nobody calls it.
    }
  }
}

// ---- autocast with CUDA's lists ----

using namespace at::autocast;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

// ---- what Python asks: torch.ops.dpx_sim ----

void check_index(int64_t device) {
  SIM_CHECK(Error, device >= 0 && device < kMaxDevices, "device ", device, " is not in 0..", kMaxDevices - 1);
}

void set_devices(int64_t count) {
  SIM_CHECK(Error, count >= 1 && count <= kMaxDevices, "count ", count, " is not in 1..", kMaxDevices);
  num_devices = static_cast<int>(count);
}

void set_capacity(int64_t device, int64_t bytes) {
  check_index(device);
  std::lock_guard<std::mutex> lock(mutex);
  ledgers[device].capacity = bytes;
}

std::vector<int64_t> memory(int64_t device) {
  check_index(device);
  std::lock_guard<std::mutex> lock(mutex);
  return {ledgers[device].live, ledgers[device].peak, ledgers[device].capacity};
}

void reset_peak(int64_t device) {
  check_index(device);
  std::lock_guard<std::mutex> lock(mutex);
  ledgers[device].peak = ledgers[device].live;
}

void seed(int64_t device, int64_t value) {
  check_index(device);
  auto& generator = generators()[device];
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(value));
}

int64_t initial_seed(int64_t device) {
  check_index(device);
  auto& generator = generators()[device];
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<int64_t>(generator.current_seed());
}

void set_speed(int64_t device, double bytes_per_second) {
  check_index(device);
  std::lock_guard<std::mutex> lock(mutex);
  ledgers[device].bytes_per_second = bytes_per_second;
}

void set_link(double bytes_per_second, double latency) {
  std::lock_guard<std::mutex> lock(mutex);
  link_bytes_per_second = bytes_per_second;
  link_latency = latency;
}

double busy(int64_t device) {
  check_index(device);
  std::lock_guard<std::mutex> lock(mutex);
  return ledgers[device].busy;
}

at::Tensor random_state(int64_t device) {
  check_index(device);
  auto& generator = generators()[device];
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(int64_t device, const at::Tensor& state) {
  check_index(device);
  auto& generator = generators()[device];
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

int64_t exchange_device(int64_t device) {
  return SimHooks().exchangeDevice(static_cast<c10::DeviceIndex>(device));
}

int64_t get_device() {
  return current_device;
}

void set_observer(int64_t address) {
  observer = reinterpret_cast<Observer>(address);
}

std::vector<std::string> traffic_lines() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::string> lines;
  for (const auto& [key, value] : traffic) {
    const auto& [source, target, name] = key;
    lines.push_back(joined(source, " ", target, " ", value.count, " ", value.bytes, " ", name));
  }
  return lines;
}

void clear_traffic() {
  std::lock_guard<std::mutex> lock(mutex);
  traffic.clear();
}

TORCH_LIBRARY(dpx_sim, m) {
  m.def("set_devices(int count) -> ()", set_devices);
  m.def("set_capacity(int device, int bytes) -> ()", set_capacity);
  m.def("memory(int device) -> int[]", memory);
  m.def("reset_peak(int device) -> ()", reset_peak);
  m.def("seed(int device, int value) -> ()", seed);
  m.def("initial_seed(int device) -> int", initial_seed);
  m.def("set_speed(int device, float bytes_per_second) -> ()", set_speed);
  m.def("set_link(float bytes_per_second, float latency) -> ()", set_link);
  m.def("busy(int device) -> float", busy);
  m.def("random_state(int device) -> Tensor", random_state);
  m.def("set_random_state(int device, Tensor state) -> ()", set_random_state);
  m.def("exchange_device(int device) -> int", exchange_device);
  m.def("get_device() -> int", get_device);
  m.def("set_observer(int address) -> ()", set_observer);
  m.def("traffic() -> str[]", traffic_lines);
  m.def("clear_traffic() -> ()", clear_traffic);
}

const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  return true;
}();

}  // namespace
